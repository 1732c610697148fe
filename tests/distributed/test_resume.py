"""A run saved by some ranks and continued by others goes on with the same noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.training import (
    begin,
    geometry_of,
    loop,
    network,
    noise_of,
    record_noise,
    records,
    sharded,
    whole,
)
from torch import Tensor

from ranks import Job

HALF = 9


def train(
    layout: str, noise: str, save: str | None = None, load: str | None = None
) -> tuple[list[Tensor], list[list[Tensor]], int]:
    """Weights, the noise of the steps of this process, and the records seen by all."""
    model = network()
    if layout == "fsdp":
        sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = begin(model, records(), optimizer, noise=noise_of(noise), geometry=geometry_of("kfc"))
    if load is not None:
        run.load(load)
    _, noises = record_noise(run)
    loop(run, model, None if save is None else HALF)
    if save is not None:
        run.save(save)
    result = [whole(p) for p in model.parameters()], noises, run.not_private.samples
    run.detach()
    return result


def same(ours: list[Any], theirs: list[Any], start: int) -> None:
    (weights, noise, _), (other_weights, other_noise, _) = ours, theirs
    for step, other in zip(noise, other_noise[start:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(step, other, strict=True))
    for own, other in zip(weights, other_weights, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", ["independent", "banded"])
@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_saved_by_three_and_continued_by_one_or_two(
    layout: str, noise: str, two: Job, three: Job, tmp_path: Path
) -> None:
    whole_run = train("plain", noise)
    folders = [str(tmp_path / name) for name in ("one", "two", "three")]
    for folder in folders:
        for each in three(train, layout, noise, save=folder):
            assert len(each[1]) == HALF
    same(train("plain", noise, load=folders[0]), whole_run, HALF)
    for folder, other in zip(folders[1:], (layout, "plain"), strict=True):
        ranks = two(train, other, noise, load=folder)
        for each in ranks:
            same(each, whole_run, HALF)
        assert sum(each[2] for each in ranks) == whole_run[2], "every record is counted once"


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_saved_by_one_and_continued_by_two(layout: str, two: Job, tmp_path: Path) -> None:
    whole_run = train("plain", "banded")
    train("plain", "banded", save=str(tmp_path / "saved"))
    for each in two(train, layout, "banded", load=str(tmp_path / "saved")):
        same(each, whole_run, HALF)


def continue_twice(folder: str) -> bool:
    """Whether the second continuation of one checkpoint has other noise than the first."""
    noises = []
    for _ in range(2):
        model = sharded(network())
        run = begin(model, records(), noise=noise_of("banded"))
        run.load(folder)
        _, noise = record_noise(run)
        loop(run, model, HALF + 1)
        noises.append(torch.cat([part.flatten() for part in noise[0]]))
        run.detach()
    return bool((noises[0] != noises[1]).all())


def save(folder: str) -> None:
    model = sharded(network())
    run = begin(model, records(), noise=noise_of("banded"))
    loop(run, model, HALF)
    run.save(folder)
    run.detach()


@pytest.mark.filterwarnings("ignore:the checkpoint")
def test_noise_is_not_used_twice(two: Job, tmp_path: Path) -> None:
    two(save, str(tmp_path / "saved"))
    first, second = two(continue_twice, str(tmp_path / "saved"))
    assert first and second


def files_are_not_pickles(folder: str) -> list[str]:
    save(folder)
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


def test_checkpoints_are_safetensors_and_json(two: Job, tmp_path: Path) -> None:
    names, _ = two(files_are_not_pickles, str(tmp_path / "saved"))
    assert all(name.endswith((".safetensors", ".json")) for name in names)
