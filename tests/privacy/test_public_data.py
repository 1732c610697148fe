"""Public data that holds private records is refused, however it was copied; other data is not."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import dpkfc
from dpkfc.losses import cross_entropy
from dpkfc.probes import records
from dpkfc.probes.public import check_apart


def numbers(count: int, seed: int, features: int = 5) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


PRIVATE, OTHERS = numbers(30, 0), numbers(30, 1)
LABELS = torch.arange(30) % 3
DATA = TensorDataset(PRIVATE, LABELS)


class Own(Dataset[Any]):
    """A class of the user's own, which hands out what it is given, and may be slow or random about
    it.
    """

    def __init__(
        self, rows: Any, seconds: float = 0.0, change: Callable[[Any], Any] = lambda record: record
    ) -> None:
        self.rows, self.seconds, self.change = rows, seconds, change
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.seconds)
        self.read.append(row)
        return self.change(self.rows[row])


def refused(public: Any, private: Any = DATA) -> tuple[int, int, int]:
    """How many public records equal private ones, of how many, and where one of them is."""
    with pytest.raises(dpkfc.PrivacyError, match="PublicData holds private records") as caught:
        check_apart(dpkfc.probes.PublicData(public), private)
    message = str(caught.value)
    assert (
        "Remove them from PublicData, or use noise instead: PinkNoise, Tokens, Tabular" in message
    )
    found = re.search(r": (\d+) of (\d+) public records .* at position (\d+)\.", message)
    assert found is not None
    count, of, place = (int(group) for group in found.groups())
    return count, of, place


def accepted(public: Any, private: Any = DATA) -> bool:
    return check_apart(dpkfc.probes.PublicData(public), private)


# -- the same records, in other forms

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the inputs": lambda x, y: x.clone(),
    "with labels": lambda x, y: (x.clone(), y.clone()),
    "with other labels": lambda x, y: (x.clone(), y + 7),
    "in double precision": lambda x, y: x.double(),
    "of another shape": lambda x, y: x.view(len(x), 1, 1, -1).clone(),
    "in another memory layout": lambda x, y: x.T.contiguous().T,
    "a dict": lambda x, y: {"pixels": x.clone(), "label": y},
    "a dict with more in it": lambda x, y: {"index": y + 100, "target": y, "pixels": x.clone()},
    "a list of dicts": lambda x, y: [
        {"label": int(b), "image": a.numpy()} for a, b in zip(x, y, strict=True)
    ],
    "a list of tuples": lambda x, y: [
        (a.tolist(), int(b)) for a, b in zip(x.double(), y, strict=True)
    ],
    "a class": lambda x, y: Own([(a, b) for a, b in zip(x, y, strict=True)]),
    "a class without labels": lambda x, y: Own(list(x.clone())),
    "nested": lambda x, y: [({"a": a, "length": 5}, b) for a, b in zip(x, y, strict=True)],
    "a subset": lambda x, y: Subset(TensorDataset(torch.cat([OTHERS, x])), range(30, 30 + len(x))),
    "parts": lambda x, y: ConcatDataset(
        [TensorDataset(x[:1], y[:1]), Own([(a, 0) for a in x[1:]])]
    ),
}
PRIVATE_FORMS = {
    name: FORMS[name] for name in ("with labels", "a list of dicts", "a class", "a subset", "parts")
}


@pytest.mark.parametrize("private", PRIVATE_FORMS)
@pytest.mark.parametrize("public", FORMS)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.integers(0, 29), min_size=1, max_size=30, unique=True), begin=st.integers(0, 3)
)
def test_any_subset_of_the_private_records_is_found_in_any_form(
    public: str, private: str, rows: list[int], begin: int
) -> None:
    """In any order, alone or behind records that are public."""
    data = FORMS[private](PRIVATE, LABELS)
    data = TensorDataset(*data) if isinstance(data, tuple) else data
    x, y = torch.cat([OTHERS[:begin], PRIVATE[rows]]), torch.cat([LABELS[:begin], LABELS[rows]])
    assert refused(FORMS[public](x, y), data) == (len(rows), begin + len(rows), begin)


@pytest.mark.parametrize("private", PRIVATE_FORMS)
@pytest.mark.parametrize("public", FORMS)
def test_other_records_are_accepted_in_any_form(public: str, private: str) -> None:
    data = FORMS[private](PRIVATE, LABELS)
    data = TensorDataset(*data) if isinstance(data, tuple) else data
    assert accepted(FORMS[public](OTHERS, LABELS), data), "and all of them were compared"


TYPES = [
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("other", TYPES, ids=str)
@pytest.mark.parametrize("one", TYPES, ids=str)
def test_values_are_the_same_in_every_type(one: torch.dtype, other: torch.dtype) -> None:
    pixels = torch.randint(256, (20, 40), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(pixels.to(one))
    assert refused(pixels[7:9].to(other), data) == (2, 2, 0)
    assert refused(list(pixels[7:9].to(other).numpy()), data) == (2, 2, 0)
    assert accepted(pixels[7:9].add(1).remainder(256).to(other), data)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 2**40),
)
def test_large_whole_numbers_are_told_apart(words: list[int], at: int, change: int) -> None:
    """Token ids and hashes: float32 has 24 bits only."""
    other = list(words)
    other[at % len(words)] += change
    for made in (
        torch.tensor,
        lambda rows: [np.array(row) for row in rows],
        lambda rows: [(row, 0) for row in rows],
    ):
        assert accepted(made([other]), TensorDataset(torch.tensor([words])))
        assert refused(made([words]), TensorDataset(torch.tensor([words]))) == (1, 1, 0)


def test_texts_and_negative_zeros() -> None:
    texts = [{"text": f"record {i}", "label": i} for i in range(20)]
    assert refused([{"text": "new"}, {"text": "record 7"}], texts) == (1, 2, 1)
    assert accepted([{"text": "record 20"}], texts)
    assert refused(
        torch.tensor([[-0.0, 1.0]]), TensorDataset(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    ) == (1, 1, 0)


def test_a_file_that_is_read_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "records.npy", PRIVATE.numpy())
    first, second = (torch.from_numpy(np.load(tmp_path / "records.npy")) for _ in range(2))
    assert refused(second.flip(0), TensorDataset(first, LABELS)) == (30, 30, 0)


# -- what is evidence


def test_equal_records_of_a_coarse_table_are_not_evidence_unless_they_are_most() -> None:
    private = TensorDataset(torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 1.0]] * 5 + [[3.0, 3.0]]))
    common, rare, new = [0.0, 1.0], [3.0, 3.0], [7.0, 7.0]
    assert accepted(torch.tensor([common, new, new]), private), (
        "it occurs five times: a coincidence"
    )
    assert accepted(torch.tensor([common, new]), private), "half of them is not more than half"
    assert refused(torch.tensor([common, common, new]), private) == (2, 3, 0)
    assert refused(torch.tensor([new, new, new, common, rare]), private) == (2, 5, 3), (
        "this one occurs once"
    )


# -- data sets that are slow to read


def test_slow_data_sets_are_sampled_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SECONDS", 0.4)
    begun = time.monotonic()
    public, private = Own(list(OTHERS) * 100, 0.002), Own(list(PRIVATE) * 100, 0.002)
    assert check_apart(dpkfc.probes.PublicData(public), private) is False
    assert time.monotonic() - begun < 5
    for side in (public, private):
        assert (
            5 < len(side.read) < 3000
            and side.read != sorted(side.read)
            and len(set(side.read)) == len(side.read)
        )
    again = Own(list(OTHERS) * 100, 0.002)
    check_apart(dpkfc.probes.PublicData(again), private)
    assert again.read[:10] != public.read[:10], "another sample every time"


def test_a_sample_is_enough_to_find_the_same_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SECONDS", 1.0)
    rows = numbers(4000, 5)
    count, of, _ = refused(rows, Own(list(rows), 0.001))
    assert of == 4000 and 0 < count < 4000


def test_a_data_set_that_is_a_part_of_both_needs_no_reading() -> None:
    whole = Own(list(PRIVATE), 60.0)
    assert refused(Subset(whole, [3, 29, 4]), Subset(whole, range(20))) == (2, 3, 0)
    assert refused(ConcatDataset([TensorDataset(OTHERS), whole]), whole) == (30, 60, 30)
    assert whole.read == []


def test_records_in_which_nothing_can_be_compared_are_not_complete() -> None:
    assert check_apart(dpkfc.probes.PublicData([object()]), DATA) is False


# -- random transforms


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.random, random.random], ids=["torch", "numpy", "python"]
)
def test_random_transforms_do_the_same_to_the_same_record(draw: Callable[..., Any]) -> None:
    def changed(record: Tensor) -> Tensor:
        return record + (draw(()) if draw is torch.rand else draw())

    private, public = Own(PRIVATE, change=changed), Own(PRIVATE[[4, 2]], change=changed)
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    before = random.getstate(), numpy_state, torch.get_rng_state()
    assert refused(public, private) == (2, 2, 0)
    assert accepted(Own(OTHERS, change=changed), private)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[2])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


# -- in a run


def test_make_private_refuses_a_copy_and_an_oracle_is_exempt() -> None:
    def begin(probe: Any) -> dpkfc.PrivateRun:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 5, "batch_size": 10}
        return dpkfc.make_private(
            model, optimizer, DATA, geometry=dpkfc.KFC(probe), loss=cross_entropy, **run
        )

    with pytest.raises(dpkfc.PrivacyError, match=r"3 of 33 public records .* position 30"):
        begin(dpkfc.probes.PublicData(torch.cat([OTHERS, PRIVATE[:3]])))
    both = dpkfc.probes.Hybrid(
        A=dpkfc.probes.PublicData(OTHERS), G=dpkfc.probes.PublicData(PRIVATE.double())
    )
    with pytest.raises(dpkfc.PrivacyError, match=r"30 of 30 public records"):
        begin(both)
    assert begin(dpkfc.probes.PublicData(OTHERS)).plan.public_geometry
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not begin(dpkfc.probes.Oracle(PRIVATE)).plan.public_geometry


def test_without_public_data_no_record_is_read() -> None:
    private = Own(PRIVATE)
    assert check_apart(dpkfc.KFC(dpkfc.probes.Tabular(5)), private) is True
    assert private.read == []


def test_images_are_compared_completely_and_quickly() -> None:
    """60,000 × 784 on either side; the processor's time, since others may be using the machine."""
    generator = torch.Generator().manual_seed(0)
    public, private = (torch.rand(60_000, 784, generator=generator) for _ in range(2))
    private[59_999] = public[31_234]
    begun = time.process_time()
    assert refused(public, TensorDataset(private, torch.zeros(60_000))) == (1, 60_000, 31_234)
    assert time.process_time() - begun < 3.0, "about one second"
