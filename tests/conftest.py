import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in (
    "",
    "per_sample",
    "geometry",
):  # the oracles and the layer cases, shared by all tests
    sys.path.insert(0, str(Path(__file__).parent / folder))
torch.set_num_threads(1)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also if the tests were started with SIGINT ignored.

    Under nohup, or by `&` in a script.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_state_of_accelerate() -> Iterator[None]:
    """Its settings are singletons: the precision of one test would be that of the next."""
    yield
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
