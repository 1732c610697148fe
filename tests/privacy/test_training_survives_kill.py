"""8. The whole pipeline killed at random points.

The ledger never shows less than what was released.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.accounting.ledger import read

KILLS = 200

# One process imports everything and forks a trainer for every kill. What the trainer has released
# is what it wrote:
# one byte after every optimizer.step(), the first moment at which its result can be seen. Every
# other kill waits until
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
    private = dpkfc.make_private(model, optimizer, data, noise_multiplier=1.0,
                                 delta=1e-3, steps=steps, batch_size=8,
                                 ledger=ledger, seed=number, loss=dpkfc.losses.cross_entropy)
    released = os.open(f"{folder}/released-{private.state_dict()['run']}",
                       os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    done = subprocess.run(
        [sys.executable, "-c", NURSERY, str(tmp_path), str(KILLS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    charged = {
        run.run_id: run.charged
        for name in ("warm-up.db", "ledger.db")
        for run in read(tmp_path / name)
    }
    released = {
        path.name.removeprefix("released-"): path.stat().st_size
        for path in tmp_path.glob("released-*")
    }
    assert sum(released.values()) > KILLS, "the trainers were killed before they did anything"
    assert len([n for n in released.values() if n]) >= KILLS // 2
    for run, steps in released.items():
        assert steps <= charged.get(run, 0), "released but not charged"
        assert charged.get(run, 0) <= steps + 20, "far more was charged than was ever released"


# `dpkfc.app.workflow.fit.fit` in a folder; where it is killed, if at all: at a step, or while it
# releases.
FITTING = """
import os, signal, sys
from pathlib import Path
import torch
from rich.console import Console
import dpkfc
from dpkfc.app.workflow import release
from dpkfc.app.workflow.fit import fit
from dpkfc.app.workflow.settings import Settings
from dpkfc.app.readers.sources import Loaded

folder, where = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
y = torch.arange(60) % 2
x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)) + y.view(-1, 1)
data = torch.utils.data.TensorDataset(x, y)
loaded = Loaded(data, data, "tabular", (4,), 2, ("no", "yes"), (), dpkfc.probes.Tabular(4))
settings = Settings(epsilon=3.0, delta=1e-3, epochs=4, batch_size=10, noise="independent",
                    ledger=str(folder / "ledger.db"), dataset="people")

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "release":
    release.count_correct = kill
release.draw_figures = lambda *arguments: None
fit(loaded, settings, folder / "run", console=Console(),
    on_step=lambda step: kill() if str(step) == where else None)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_run_ends_with_every_charged_step_in_its_weights_or_told_as_lost(
    tmp_path: Path,
) -> None:
    for where, code in (("5", -signal.SIGKILL), ("release", -signal.SIGKILL), ("nowhere", 0)):
        command = [sys.executable, "-c", FITTING, str(tmp_path), where]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (run,) = read(tmp_path / "ledger.db")
    assert result["steps"] + result["lost_steps"] == run.charged == run.mechanism.steps
    assert 1 <= result["lost_steps"] <= 5 and f"{result['lost_steps']} step" in done.stdout
    assert (
        not (tmp_path / "run" / "checkpoint").exists() and not (tmp_path / "run" / ".lock").exists()
    )
