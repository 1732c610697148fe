"""Runs a function of a test module in several processes, started as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkfc.engine.run import PrivateRun

ROOT = Path(__file__).parents[2]
CALL = "import importlib, sys; importlib.import_module(sys.argv[1]).work(sys.argv[2])"


def environment(**more: str) -> dict[str, str]:
    """The sources of this checkout, and one thread per process."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), *sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def launch(command: list[str], count: int = 2, timeout: float = 600) -> list[str]:
    """Run `command` once per rank; returns what each rank printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                GROUP_RANK="0",
                TORCHELASTIC_RUN_ID="tests",
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, printed, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [output for output, _ in printed]


def results_of(module: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What ``module.work(folder)`` has kept with `keep`, for each rank."""
    launch([sys.executable, "-c", CALL, module, str(folder)], count)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]


def keep(folder: Path | str, results: dict[str, Any]) -> None:
    torch.save(results, Path(folder) / f"rank{os.environ['RANK']}.pt")


def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the size of each logical batch that a run of this process begins."""
    sizes: list[int] = []
    begin = PrivateRun._begin_batch

    def begin_batch(run: PrivateRun, chunk: Any, batch: Any) -> None:
        if chunk.first:
            sizes.append(chunk.drawn)
        begin(run, chunk, batch)

    monkeypatch.setattr(PrivateRun, "_begin_batch", begin_batch)
    return sizes
