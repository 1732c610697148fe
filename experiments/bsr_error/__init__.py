"""The error of the banded square root and its alternatives (Kalinin & Lampert, 2024).

dpkfc reproduce bsr-error
"""
