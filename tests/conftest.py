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
