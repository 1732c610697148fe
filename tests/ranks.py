"""Processes of a torch.distributed job, kept for all tests of a module: starting them is slow."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120  # seconds, also on a busy machine


class Job:
    """`count` ranks over gloo, on which functions of a test module are run.

    >>> # with Job(2) as job: job(function, argument) -> [result of rank 0, result of rank 1]
    """

    def __init__(self, count: int, timeout: float = PATIENCE) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, str(store), timeout, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of all ranks; the first error of a rank is raised as AssertionError."""
        results = self.outcomes(function, *args, **kwargs)
        for rank, (kind, content) in enumerate(results):
            assert kind == "result", f"rank {rank}:\n{content}"
        return [content for _, content in results]

    def outcomes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """("result", value) or ("error", traceback) of every rank."""
        for end in self._ends:
            end.send((function, args, kwargs))
        answers = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < len(self._ends) and time.monotonic() < deadline:
            for rank, end in enumerate(self._ends):
                if rank not in answers and end.poll(0.01):
                    answers[rank] = end.recv()
        silent = set(range(len(self._ends))) - set(answers)
        assert not silent, f"ranks {silent} have not answered; the others: {answers}"
        return [answers[rank] for rank in range(len(self._ends))]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, count: int, store: str, timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        function, args, kwargs = end.recv()
        try:
            end.send(("result", function(*args, **kwargs)))
        except BaseException:
            end.send(("error", traceback.format_exc()))
