"""Small convolutional classifiers: the MNIST network of the paper, and one for 8x8 digits."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from dpkfc.app.models.declared import with_input_shape


def paper_cnn(shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """The four-layer CNN of the paper. `fc1` has 32 · 7 · 7 inputs for images [1, 28, 28]."""
    channels, height, width = shape
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32 * (height // 4) * (width // 4), 128),
            relu3=nn.ReLU(),
            fc2=nn.Linear(128, classes),
        )
    )
    return with_input_shape(shape, network)


def digits_cnn() -> nn.Sequential:
    """A CNN with about six thousand weights for images [1, 8, 8] and 10 classes, with GroupNorm."""
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            norm1=nn.GroupNorm(4, 16),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            norm2=nn.GroupNorm(4, 32),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(32 * 2 * 2, 10),
        )
    )
    return with_input_shape((1, 8, 8), network)
