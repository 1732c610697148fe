"""Batches of probes: called, split, moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkfc.probes.pink import PinkNoise
from dpkfc.probes.probe import Probe, Probes, call, split, to, token_ids
from dpkfc.probes.public import Hybrid, PublicData
from dpkfc.probes.tabular import Tabular
from dpkfc.probes.tokens import Tokens

PROBES = {
    "pink": PinkNoise((2, 9, 6), channel_correlation=0.5),
    "tokens": Tokens(50, 12, cls=1, sep=2, pad=0),
    "dense": Tabular(7, correlation=0.3),
    "sparse": Tabular.sparse(30, 4),
    "public": PublicData((torch.arange(40.0)[:, None], torch.arange(40)), labels=True),
}


class Subtract(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


def flat(probes: Probes) -> list[Tensor]:
    inputs = probes.inputs
    found = (
        list(inputs.values())
        if isinstance(inputs, dict)
        else list(inputs)
        if isinstance(inputs, tuple)
        else [inputs]
    )
    return [*found, *(part for part in (probes.targets, probes.active) if part is not None)]


@pytest.mark.parametrize("name", PROBES)
def test_a_draw_is_a_function_of_the_generator_alone(name: str) -> None:
    probe: Probe = PROBES[name]
    torch.manual_seed(1)
    first = flat(probe.draw(6, torch.Generator().manual_seed(5)))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = flat(probe.draw(6, torch.Generator().manual_seed(5)))
    assert torch.get_rng_state().equal(before)
    other = flat(probe.draw(6, torch.Generator().manual_seed(6)))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not all(a.equal(b) for a, b in zip(first, other, strict=True))
    generator = torch.Generator().manual_seed(5)
    probe.draw(6, generator)
    later = flat(probe.draw(6, generator))
    assert not all(a.equal(b) for a, b in zip(first, later, strict=True))


@pytest.mark.parametrize("name", PROBES)
def test_a_draw_ignores_the_default_dtype(name: str) -> None:
    plain = flat(PROBES[name].draw(3, torch.Generator().manual_seed(0)))
    torch.set_default_dtype(torch.float64)
    try:
        again = flat(PROBES[name].draw(3, torch.Generator().manual_seed(0)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        a.equal(b) and a.dtype == b.dtype and a.device.type == "cpu"
        for a, b in zip(plain, again, strict=True)
    )


@pytest.mark.parametrize("name", PROBES)
def test_a_draw_has_as_many_probes_as_asked_for(name: str) -> None:
    probe = PROBES[name]
    assert probe.public and probe.name and probe.count >= 8
    assert all(len(part) == 3 for part in flat(probe.draw(3, torch.Generator())))
    with pytest.raises(ValueError, match=r"draw: count=0: give a whole number, 1 or more"):
        probe.draw(0, torch.Generator())


def test_models_are_called_as_the_inputs_say() -> None:
    left, right = torch.tensor([5.0]), torch.tensor([3.0])
    assert call(nn.Identity(), left).equal(left)
    assert call(Subtract(), (left, right)).item() == 2
    assert call(Subtract(), {"right": left, "left": right}).item() == -2


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_chunks_join_to_the_whole(form: str) -> None:
    rows = torch.arange(10).view(5, 2)
    inputs = {"tensor": rows, "tuple": (rows, rows + 100), "dict": {"a": rows, "b": rows + 100}}[
        form
    ]
    whole = Probes(inputs, targets=torch.arange(5) + 1000, active=rows > 3)
    parts = list(split(whole, 2))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert all(type(part.inputs) is type(inputs) for part in parts)
    for column, expected in enumerate(flat(whole)):
        assert torch.cat([flat(part)[column] for part in parts]).equal(expected)
    assert [len(part) for part in split(whole, 99)] == [5]
    bare = next(split(Probes(rows), 2))
    assert bare.targets is None and bare.active is None


def test_moving_casts_floating_inputs_only() -> None:
    probes = Probes(
        {"x": torch.ones(2, 3), "ids": torch.ones(2, dtype=torch.long)},
        torch.ones(2),
        torch.ones(2, 3) > 0,
    )
    moved = to(probes, "cpu", torch.bfloat16)
    assert moved.inputs["x"].dtype == torch.bfloat16 and moved.inputs["ids"].dtype == torch.long
    assert moved.targets.dtype == torch.float32 and moved.active.dtype == torch.bool
    meta = to(probes, "meta", torch.float32)
    assert all(part.device.type == "meta" for part in flat(meta))


def test_token_ids_are_found_where_they_are() -> None:
    ids, pixels = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    assert token_ids(ids) is ids and token_ids((ids, pixels)) is ids
    assert (
        token_ids({"mask": ids + 1, "input_ids": ids}) is ids and token_ids({"my_ids": ids}) is ids
    )
    assert (
        token_ids(pixels) is None and token_ids({"pixel_values": pixels, "pixel_mask": ids}) is None
    )
    assert token_ids(ids.to(torch.uint8)) is None  # an image in bytes


def test_a_hybrid_is_a_probe() -> None:
    probe: Probe = Hybrid(A=PROBES["pink"], G=PROBES["dense"])
    assert probe.public
