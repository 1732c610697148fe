"""Experiments that reproduce the paper's tables and figures, and further studies.

They are run from a checkout and are not part of the wheel. There is one folder per table or
figure; `experiments.common` holds what several of them share. `python -m experiments --help`
lists the names, and `python -m experiments NAME` (or `dpkfc reproduce NAME`) runs one.
"""
