"""8. The whole pipeline killed at random points: the ledger never shows less than what was released."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.accounting.ledger import read

KILLS = 200

# One process imports everything and forks a trainer for every kill. What the trainer has released is what it wrote:
# one byte after every optimizer.step(), the first moment at which its result can be seen. Every other kill waits until
# some steps were taken, however slow the machine is; the rest may come before the first.
NURSERY = """
import os, random, signal, sys, time
import torch
import dpkfc

folder, kills = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))

def train(number, ledger, steps, told=None):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = dpkfc.Ledger(f"{folder}/{ledger}", dataset="people")
    private = dpkfc.make_private(model, optimizer, data, noise_multiplier=1.0, delta=1e-3, steps=steps, batch_size=8,
                                 ledger=ledger, seed=number)
    released = os.open(f"{folder}/released-{private.state_dict()['run']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for x, y in private.loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        os.write(released, b"." * (private.steps - os.fstat(released).st_size))
        if told is not None:
            os.write(told, b".")
        optimizer.zero_grad()

train(0, "warm-up.db", 3)  # imports what is imported late
delays = random.Random(0)
for number in range(kills):
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(number, "ledger.db", 100_000, told)
        finally:
            os._exit(1)
    os.close(told)
    if number % 2:
        for _ in range(delays.randint(1, 5)):
            os.read(heard, 1)
        time.sleep(delays.uniform(0.0, 0.01))
    else:
        time.sleep(delays.uniform(0.0, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(heard)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_kills_at_random_points_never_hide_a_step(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NURSERY, str(tmp_path), str(KILLS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    charged = {run.run_id: run.charged for name in ("warm-up.db", "ledger.db") for run in read(tmp_path / name)}
    released = {path.name.removeprefix("released-"): path.stat().st_size for path in tmp_path.glob("released-*")}
    assert sum(released.values()) > KILLS, "the trainers were killed before they did anything"
    assert len([n for n in released.values() if n]) >= KILLS // 2
    for run, steps in released.items():
        assert steps <= charged.get(run, 0), "released but not charged"
        assert charged.get(run, 0) <= steps + 20, "far more was charged than was ever released"
