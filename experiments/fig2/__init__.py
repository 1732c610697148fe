"""Figures 2 and 6 of the paper: eigenvalues of A ⊗ G from private, public and synthetic inputs.

dpkfc reproduce fig2 --data-dir DATA
"""
