"""Federations in Flower's own simulation engine, whose clients live in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from experiments.common.options import ReproduceOptions
from experiments.federated.experiment import reproduce
from experiments.federated.simulation import (
    METHODS,
    Federation,
    load,
    new_model,
    partitions,
    rows_of_clients,
)


def test_quick_federations_keep_their_budget_and_are_not_repeated(tmp_path: Path) -> None:
    reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    file = tmp_path / "quick.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["setting"]["method"] for row in rows] == list(METHODS)
    for row in rows:
        setting = Federation(**row["setting"])
        assert row["result"]["replies"] == setting.clients * setting.rounds
        assert 0.99 * setting.epsilon < row["result"]["epsilon"] <= setting.epsilon
    text = (tmp_path / "quick.md").read_text()
    assert all(f"| {method} |" in text for method in METHODS) and "Its numbers mean nothing" in text
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")
    before = file.read_text()
    reproduce(ReproduceOptions(tmp_path, Console(quiet=True), quick=True))
    assert file.read_text() == before


def test_clients_have_equally_many_records_of_their_own() -> None:
    labels = torch.randint(10, (1000,), generator=torch.Generator().manual_seed(0))
    largest = {}
    for alpha in (None, 0.1):
        rows = rows_of_clients(labels, 5, alpha, seed=0)
        assert [len(own) for own in rows] == [200] * 5
        assert len({row for own in rows for row in own}) == 1000
        shares = [torch.bincount(labels[own], minlength=10) / 200 for own in rows]
        largest[alpha] = max(float(share.max()) for share in shares)
    assert largest[0.1] > 2 * largest[None], "few labels per client"


def test_no_client_has_the_records_on_which_rates_are_chosen() -> None:
    setting = Federation("digits", "DP-SGD", 0.5, 0, 0.5, held_out=300)
    records, validation, _ = load(setting.dataset, setting.held_out, None)
    assert len(validation) == 300
    seen = {image.numpy().tobytes() for part in partitions(records, 4, 0.5, 0) for image, _ in part}
    assert not seen & {image.numpy().tobytes() for image, _ in validation}
    assert torch.equal(new_model(setting).fc.weight, new_model(setting).fc.weight)
