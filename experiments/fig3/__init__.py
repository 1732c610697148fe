"""Figures 3, 8 and 9 of the paper: agreement of public and synthetic factors with the oracle's.

dpkfc reproduce fig3 --data-dir DATA
"""
