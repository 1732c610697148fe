"""Figure 1 of the paper: the signal-to-noise ratio of a private step, layer by layer.

dpkfc reproduce fig1 --data-dir DATA
"""
