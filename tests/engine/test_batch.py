"""Rows of whatever a collate function returns."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.engine.batch import all_equal, copied, parts_of, pick

Pair = namedtuple("Pair", "x y")
ROWS = 5


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the BatchEncoding of transformers: no dict, but made from one."""


@dataclass
class Record:
    x: torch.Tensor
    others: dict[str, torch.Tensor]


def batches() -> dict[str, Any]:
    x, y = torch.arange(2.0 * ROWS).view(ROWS, 2), torch.arange(ROWS)
    return {
        "tensor": x,
        "list": [x, y],
        "tuple": (x, y),
        "named tuple": Pair(x, y),
        "dict": {"x": x, "deep": {"y": y, "shared": torch.ones(1, 3)}},
        "encoding": Encoding({"x": x, "y": y}),
        "dataclass": Record(x, {"y": y}),
        "strings": [x, ["a", "b", "c", "d", "e"]],
    }


@pytest.mark.parametrize("kind", batches())
@given(chosen=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=8))
def test_rows_are_picked_from_every_part_that_has_them(kind: str, chosen: list[int]) -> None:
    batch = batches()[kind]
    found = pick(batch, ROWS, chosen)
    assert type(found) is type(batch)
    for before, after in zip(parts_of(batch), parts_of(found), strict=True):
        if isinstance(before, torch.Tensor):
            want = before[chosen] if len(before) == ROWS else before
            assert torch.equal(after, want)
        else:
            assert after == [before[row] for row in chosen]


@pytest.mark.parametrize("kind", batches())
def test_a_copy_shares_no_memory(kind: str) -> None:
    batch = batches()[kind]
    for before, after in zip(parts_of(batch), parts_of(copied(batch)), strict=True):
        if isinstance(before, torch.Tensor):
            after.add_(1)
            assert not torch.equal(before, after)


def test_equal_records_are_told_from_others() -> None:
    same = [torch.ones(3, 2), ["a"] * 3, torch.arange(7)]
    assert all_equal(same, 3)
    assert not all_equal([*same, torch.arange(3)], 3) and not all_equal(
        [torch.ones(3), ["a", "a", "b"]], 3
    )
