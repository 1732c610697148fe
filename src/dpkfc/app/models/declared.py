"""Models declare their input shape, so that a geometry can choose probes for them."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def with_input_shape(shape: tuple[int, ...], network: Network) -> Network:
    """The network, with `input_shape` set to the shape of one input (no batch dimension)."""
    # setattr, because torch types attributes of modules as tensors.
    setattr(network, "input_shape", shape)  # noqa: B010
    return network
