"""The page about Flower: its code blocks run, and both sides of its diff are what Flower calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from messages import context, fit_message, train_message, weights_in
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkfc

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "flower.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def load_data(partition: int) -> DataLoader[Any]:
    data = TensorDataset(torch.rand(300, 1, 28, 28), torch.randint(10, (300,)))
    return DataLoader(data, batch_size=128, shuffle=True)


@pytest.mark.parametrize("removed", ["-", "+"], ids=["private", "ordinary"])
def test_both_sides_of_the_diff_answer_a_message(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (diff,) = DIFF.findall(PAGE)
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(removed)]
    names = (ArrayRecord, ClientApp, Message, MetricRecord, RecordDict)
    namespace: dict[str, Any] = {
        "F": F,
        "Net": small_network,
        "load_data": load_data,
        "torch": torch,
        **{name.__name__: name for name in names},
    }
    exec(compile("\n".join(lines), "flower.md", "exec"), namespace)
    reply = namespace["app"](train_message(small_network().state_dict()), context())
    weights = weights_in(reply)
    assert not torch.equal(weights["1.weight"], small_network()[1].weight)
    if removed == "-":
        assert dict(reply.content["metrics"]) == {"num-examples": 6000}
        (run,) = dpkfc.Ledger("privacy.db", "clinic 7").runs()
        assert (run.charged, run.mechanism.steps) == (10, 200)
    else:
        assert dict(reply.content["metrics"]) == {"num-examples": 300}


def test_code_blocks_run_and_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "flower"}
    for code, shown in BLOCK.findall(PAGE):
        exec(compile(code, "flower.md", "exec"), namespace)
        printed = capsys.readouterr().out
        assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
        assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(
            [float(number) for number in NUMBER.findall(shown)], rel=0.05
        )
    reply = namespace["app"](fit_message(nn.Linear(10, 3)), context())
    assert reply.content["fitres.num_examples"]["num_examples"] == 1000
    (run,) = dpkfc.Ledger("privacy.db", "clinic 7").runs()
    assert (run.charged, run.mechanism.steps) == (5, 100)
