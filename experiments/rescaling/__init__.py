"""What happens to correlated noise when noisy gradients are rescaled on their way?

dpkfc reproduce rescaling
"""
