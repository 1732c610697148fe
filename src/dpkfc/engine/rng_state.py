"""States of the global random generators, which dropout and augmentation draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def get_generators() -> dict[str, Any]:
    """The states, as tensors, numbers and strings."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, [int(k) for k in keys], *rest),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Restore what `get_generators` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002


def seed_generators(key: bytes) -> None:
    """Start all generators from a secret key of 32 bytes."""
    seed = int.from_bytes(key[:7], "big")
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed stores a formatted stack for each kind of device that is missing
        torch.default_generator.manual_seed(seed)
    random.seed(key[7:23])
    np.random.seed(int.from_bytes(key[23:27], "big"))  # noqa: NPY002


@contextmanager
def kept_generators(seed: int | None = None) -> Iterator[None]:
    """Restore the generators at the end of the block; inside, start them from `seed` if given."""
    before = get_generators()
    try:
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
        yield
    finally:
        set_generators(before)
