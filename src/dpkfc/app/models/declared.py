"""Models say what they take, so that a geometry knows how to probe them."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def taking(shape: tuple[int, ...], network: Network) -> Network:
    """The network, with `input_shape` declared: one input without the batch dimension."""
    setattr(network, "input_shape", shape)  # noqa: B010 - torch types attributes of modules as tensors
    return network
