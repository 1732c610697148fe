"""Figure 7 of the paper: the spectrum of the Hessian on private, public and synthetic inputs.

dpkfc reproduce fig7 --data-dir DATA
"""
