"""Probes from records: inputs, labels, names and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probes
from dpkfc.probes.public import Hybrid, Oracle, PublicData
from dpkfc.probes.tabular import Tabular

X, Y = torch.arange(50.0)[:, None], torch.arange(50) + 1000


def draw(data: Any, count: int = 20, seed: int = 0, **options: Any) -> Probes:
    return PublicData(data, **options).draw(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 20, 50])
def test_no_record_is_drawn_twice(count: int) -> None:
    for seed in range(20):
        assert len(draw(X, count, seed).inputs.unique()) == count


def test_every_record_is_drawn_equally_often() -> None:
    generator, public = torch.Generator().manual_seed(0), PublicData(X)
    seen = torch.cat([public.draw(10, generator).inputs.ravel() for _ in range(500)]).long()
    counts = torch.bincount(seen, minlength=50)  # 100 each, standard deviation 9
    assert counts.min() > 60 and counts.max() < 140


def test_with_too_few_records_some_come_twice() -> None:
    drawn = draw(X, 80)
    assert len(drawn) == 80 and len(drawn.inputs.unique()) < 50


@pytest.mark.parametrize(
    "data",
    [(X, Y), TensorDataset(X, Y), list(zip(X, Y.tolist(), strict=True))],
    ids=["tensors", "dataset", "list"],
)
def test_the_label_is_left_out_unless_asked_for(data: Any) -> None:
    without = draw(data)
    assert without.targets is None and without.inputs.shape == (20, 1)
    labelled = draw(data, labels=True)
    assert labelled.inputs.equal(without.inputs)
    assert labelled.targets.equal(labelled.inputs[:, 0].long() + 1000)


def test_records_of_one_element_are_inputs() -> None:
    assert draw(TensorDataset(X)).inputs.equal(draw(X).inputs) and draw(list(X)).inputs.shape == (
        20,
        1,
    )


def test_of_longer_records_all_but_the_last_are_inputs() -> None:
    probes = draw((X, X + 0.5, Y), labels=True)
    first, second = probes.inputs
    assert second.equal(first + 0.5) and probes.targets.equal(first[:, 0].long() + 1000)


@pytest.mark.parametrize("key", ["label", "labels"])
@pytest.mark.parametrize("columns", [True, False])
def test_dicts_lose_their_labels(key: str, columns: bool) -> None:
    data: Any = {"pixels": X, "more": X + 0.5, key: Y}
    if not columns:
        data = [{name: value[i] for name, value in data.items()} for i in range(50)]
    probes = draw(data, labels=True)
    assert list(probes.inputs) == ["pixels", "more"] and probes.inputs["more"].equal(
        probes.inputs["pixels"] + 0.5
    )
    assert probes.targets.equal(probes.inputs["pixels"][:, 0].long() + 1000)
    assert draw(data).targets is None


def test_a_dict_may_come_with_a_label_beside_it() -> None:
    probes = draw([({"a": X[i]}, i) for i in range(50)], labels=True)
    assert probes.inputs["a"][:, 0].long().equal(probes.targets)


def test_collate_makes_the_batch() -> None:
    texts = [{"text": "x" * i, "label": i} for i in range(50)]

    def collate(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {
            key: torch.tensor([len(r["text"]) for r in records]) for key in ("input_ids", "labels")
        }

    probes = draw(texts, labels=True, collate=collate)
    assert list(probes.inputs) == ["input_ids"] and probes.targets.equal(probes.inputs["input_ids"])


class Noisy(Dataset[torch.Tensor]):
    """A dataset with a random transform."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, row: int) -> torch.Tensor:
        return X[row] + torch.rand(())


def test_random_transforms_follow_the_generator_and_leave_the_global_one_alone() -> None:
    torch.manual_seed(1)
    first = draw(Noisy())
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert draw(Noisy()).inputs.equal(first.inputs) and torch.get_rng_state().equal(before)
    assert not draw(Noisy(), seed=3).inputs.frac().equal(first.inputs.frac())


def test_an_oracle_is_loud_and_not_public() -> None:
    with pytest.warns(UserWarning, match=r"PRIVATE records.*report epsilon = inf") as caught:
        oracle = Oracle((X, Y), labels=True, count=30)
    assert caught[0].filename == __file__
    assert oracle.public is False and "private" in oracle.name.lower() and oracle.count == 30
    drawn = oracle.draw(20, torch.Generator().manual_seed(0))
    assert (
        drawn.targets.equal(drawn.inputs[:, 0].long() + 1000) and len(drawn.inputs.unique()) == 20
    )


def test_public_data_is_quiet_and_public() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PublicData(X).public is True


def test_a_hybrid_has_two_sources() -> None:
    pink, public = PinkNoise((1, 4, 4), count=10), PublicData(X, count=40)
    hybrid = Hybrid(A=public, G=pink)
    assert hybrid.sources == {"A": public, "G": pink} and hybrid.A is public and hybrid.G is pink
    assert hybrid.count == 40 and hybrid.public is True
    assert hybrid.name == "A from public data, G from pink noise"
    with pytest.raises(TypeError, match=r"draw from hybrid.A and hybrid.G"):
        hybrid.draw(3, torch.Generator())


@pytest.mark.parametrize("private", ["A", "G"])
def test_a_hybrid_with_an_oracle_is_not_public(private: str) -> None:
    with pytest.warns(UserWarning, match="epsilon = inf"):
        sources = {"A": Tabular(1), "G": Tabular(1), private: Oracle(X)}
    hybrid = Hybrid(**sources)
    assert hybrid.public is False and "ORACLE" in hybrid.name


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: PublicData(Stream()),
            TypeError,
            r"dataset=Stream has no length and no index: pass a map-style",
        ),
        (lambda: PublicData([]), ValueError, r"dataset is empty"),
        (lambda: PublicData(torch.zeros(0, 3)), ValueError, r"dataset is empty"),
        (
            lambda: PublicData((X, Y[:3])),
            ValueError,
            r"the tensors have \[50, 3\] records: not equal",
        ),
        (lambda: PublicData((X, "y")), TypeError, r"a tuple or dict must hold tensors"),
        (lambda: PublicData({"x": [1, 2]}), TypeError, r"a tuple or dict must hold tensors"),
        (lambda: PublicData(X, count=0), ValueError, r"PublicData: count=0"),
        (
            lambda: draw(X, labels=True),
            ValueError,
            r"labels=True, but the records carry no label tensor.*labels=False",
        ),
        (
            lambda: draw([{"text": "a", "label": 1}]),
            TypeError,
            r"input 'text' of a batch is list, not a tensor.*collate=",
        ),
        (
            lambda: draw([torch.zeros(2), torch.zeros(3)]),
            ValueError,
            r"do not make a batch \(.*\): pass collate=",
        ),
        (lambda: draw([object()]), ValueError, r"do not make a batch"),
        (
            lambda: Hybrid(A=Tabular(1), G=Hybrid(A=Tabular(1), G=Tabular(1))),
            TypeError,
            r"Hybrid: G=Hybrid: give a single source",
        ),
        (lambda: Hybrid(A=X, G=Tabular(1)), TypeError, r"Hybrid: A=Tensor: give a single source"),
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
