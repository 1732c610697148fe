"""Run the private loop of the README, as a user would after installing the wheel.

    python readme_loop.py README.md

The README shows the loop as a diff. Its added and unchanged lines are a program that needs a
model, an optimizer and a loader; this script defines them for images of 28 x 28 pixels.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def private_side(page: str) -> str:
    """The program after the change: all lines of the first diff block but the removed ones."""
    block = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    if block is None:
        sys.exit("the page has no ```diff block")
    return "\n".join(line[1:] for line in block[1].splitlines() if not line.startswith("-"))


def main() -> None:
    data = TensorDataset(torch.rand(500, 1, 28, 28), torch.randint(10, (500,)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    before = [p.detach().clone() for p in model.parameters()]
    names = {
        "F": F,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=50, shuffle=True),
    }
    program = private_side(Path(sys.argv[1]).read_text(encoding="utf-8"))
    exec(compile(program, sys.argv[1], "exec"), names)
    changed = any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))
    sys.exit(None if changed else "the loop did not change the weights")


if __name__ == "__main__":
    main()
