"""Privacy bugs that an earlier version of the test suite did not notice, one section for each.

Each test names the edits that it kills: file, function, what is changed. All of them were tried.
The released gradients may or may not be rounded to a grid of at most a 32nd of the noise's standard
deviation: the tests hold either way.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    pld,
)
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc import chacha, clipping, sampling
from dpkfc import random as rng
from dpkfc.accounting.ledger import Ledger
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.workflow import release
from dpkfc.app.workflow.fit import fit
from dpkfc.app.workflow.settings import Settings
from dpkfc.losses import cross_entropy

GRID = 1 / 32  # the coarsest grid of released gradients, in standard deviations of the noise


def table(count: int = 40, features: int = 4, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, features, generator=generator), torch.arange(count) % 3)


def network(features: int = 4, hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def begin(
    model: nn.Module,
    data: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    **changed: Any,
) -> dpkfc.PrivateRun:
    settings = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "steps": 6,
        "batch_size": 10,
        "loss": cross_entropy,
        "seed": 0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return dpkfc.make_private(
        model, optimizer, table() if data is None else data, **{**settings, **changed}
    )


def train(private: dpkfc.PrivateRun, steps: int | None = None) -> dpkfc.PrivateRun:
    for batch in private.loader.take(private.plan.steps if steps is None else steps):
        cross_entropy(private.model, batch).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    return private


def vector(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# -- the ledger is charged before anything is released


class WatchedNoise:
    """The noise of a run, and what the ledger on disk says when it is added."""

    def __init__(self, private: dpkfc.PrivateRun, path: Path) -> None:
        self.real, self.path, self.run = private._noise, path, private.state_dict()["run"]
        self.charged: list[int] = []

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        reader = Ledger(self.path, "people")
        self.charged.append(reader.charged(self.run))
        reader.close()
        self.real.add_(sums, key, scale, step)

    def state_dict(self) -> dict[str, Any]:
        return self.real.state_dict()


@pytest.mark.parametrize("parts", [None, 4])
def test_the_charge_is_on_disk_before_noise_is_added_and_anything_released(
    tmp_path: Path, parts: int | None
) -> None:
    """Kills, in run.py: `_before_step` with `ledger.charge` after `_release`.

    `charge` moved into `_after_step`.
    """
    ledger, model = Ledger(tmp_path / "ledger", "people"), network()
    private = begin(model, ledger=ledger, max_physical_batch_size=parts)
    private._noise = noise = WatchedNoise(private, tmp_path / "ledger")  # type: ignore[assignment]
    seen: list[tuple[int, int]] = []
    real = ledger.charge

    def charge(run: str, steps: int) -> None:
        assert all(p.grad is None for p in model.parameters()), "charged after the release"
        seen.append((steps, len(noise.charged)))
        real(run, steps)

    ledger.charge = charge  # type: ignore[method-assign]
    train(private)
    assert seen == [(step + 1, step) for step in range(6)], (
        "each step is charged once, before its noise is drawn"
    )
    assert noise.charged == [1, 2, 3, 4, 5, 6], "and on disk by then"


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize("failing", [1, 3])
def test_a_failing_charge_releases_nothing(tmp_path: Path, parts: int | None, failing: int) -> None:
    """Kills, in run.py: the two edits above.

    `_before_step` with `self.steps += 1` or `next_key` before the charge.
    """
    ledger, model = Ledger(tmp_path / "ledger", "people"), network()
    private = begin(model, ledger=ledger, max_physical_batch_size=parts)
    private._noise = noise = WatchedNoise(private, tmp_path / "ledger")  # type: ignore[assignment]
    train(private, failing - 1)
    before, state, epsilon = vector(model.parameters()), private.state_dict(), private.epsilon()

    def charge(run: str, steps: int) -> None:
        raise OSError("no space left on the device")

    ledger.charge = charge  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        train(private)
    after = private.state_dict()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(vector(model.parameters()), before)
    assert len(noise.charged) == failing - 1, "no noise was drawn"
    assert (
        (after["step"], after["key"])
        == (state["step"], state["key"])
        == (failing - 1, state["key"])
    )
    assert private.epsilon() == epsilon


# -- optimizers step with what was released, and with nothing else


OPTIMIZERS: dict[str, Any] = {
    "adambc": lambda p: dpkfc.optim.DPAdamBC(p, lr=0.05),
    "disk": lambda p: dpkfc.optim.DiSK(torch.optim.SGD(p, lr=0.1, momentum=0.5), kappa=0.6),
    "disk, two gradients": lambda p: dpkfc.optim.DiSK(
        torch.optim.SGD(p, lr=0.1), kappa=0.6, gamma=0.3
    ),
    "disk around adambc": lambda p: dpkfc.optim.DiSK(dpkfc.optim.DPAdamBC(p, lr=0.05), kappa=0.6),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_a_function_of_the_released_gradients_alone(name: str) -> None:
    """Kills: step.py `release` keeping sums before the noise, `p.clean = ...`, and in
    optim/adambc.py `step` or `_step` (mean, square) or in optim/disk.py `step` (from the first step
    or later) the use of `p.clean` for `p.grad`.

    The released gradients of a real run are replayed into a fresh optimizer that has never met a
    run.
    """
    model = network()
    alone = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    two = (
        getattr(optimizer, "gradients_per_step", 1) == 2
    )  # its gradients are not those of the loss at one point
    private = begin(model, optimizer=optimizer, loss="unchecked" if two else cross_entropy)
    released: list[list[Tensor]] = []
    weights: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        released.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(record)  # runs behind the hook of the run
    for x, y in private.loader:
        if two:
            optimizer.backward(lambda x=x, y=y: F.cross_entropy(model(x), y))
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(vector(model.parameters()).clone())
    assert len(released) == 6

    replayed = OPTIMIZERS[name](alone.parameters())
    if hasattr(replayed, "set_noise_variance"):
        plan = private.plan
        replayed.set_noise_variance((plan.noise_scale / plan.batch_size) ** 2, "")
    for grads, expected in zip(released, weights, strict=True):
        for p, grad in zip(alone.parameters(), grads, strict=True):
            p.grad = grad.clone()
        replayed.step()
        replayed.zero_grad()
        assert torch.equal(vector(alone.parameters()), expected)


# -- parameters that are unfrozen later


def clipped_sum(model: nn.Module, batch: Any, clip: float) -> list[Tensor]:
    """``Σ_i g_i min(1, C / ‖g_i‖)`` by autograd, record by record, in float64.

    The norm is over all parameters.
    """
    exact = copy.deepcopy(model).double().requires_grad_(True)
    totals = [torch.zeros_like(p) for p in exact.parameters()]
    for x, y in zip(*batch, strict=True):
        grads = torch.autograd.grad(
            cross_entropy(exact, (x[None].double(), y[None])), list(exact.parameters())
        )
        norm = float(vector(grads).norm())
        totals = [
            total + grad * min(1.0, clip / norm) for total, grad in zip(totals, grads, strict=True)
        ]
    return totals


@pytest.mark.parametrize("noise_multiplier", [1e-3, 1.0])
@pytest.mark.parametrize("late", ["0.weight", "0.bias", "0.", "2.weight"])
def test_parameters_unfrozen_later_are_in_the_norm_and_get_noise(
    late: str, noise_multiplier: float
) -> None:
    """Kills: step.py `release` with `self._layout` for `trainable`, or noise for the names in
    `self._layout` only;
    per_sample/capture.py `take` with the norms of keys that were trainable at first only.

    What is released less the clipped sum, computed by other means, is noise of the planned
    deviation everywhere. With little noise, a record that is longer than the clip would stand out
    by far.
    """
    model, clip = network(100, 50), 0.5
    x, y = table(40, 100).tensors
    data = TensorDataset(5 * x, y)  # most of a gradient is in the first layer
    chosen = [p for name, p in model.named_parameters() if name.startswith(late)]
    for p in chosen:
        p.requires_grad_(False)
    private = begin(
        model, data, clip=clip, noise_multiplier=noise_multiplier, batch_size=20, steps=4
    )
    planned = noise_multiplier * clip / 20
    train(private, 1)
    for p in chosen:
        p.requires_grad_(True)
    squares = {name: torch.zeros(0, dtype=torch.float64) for name, _ in model.named_parameters()}
    for batch in private.loader:
        sums = clipped_sum(model, batch, clip)
        cross_entropy(model, batch).backward()
        private.optimizer.step()
        for total, (name, p) in zip(sums, model.named_parameters(), strict=True):
            assert p.grad is not None, f"{name} was not released"
            noise = (p.grad.double() - total / 20) / planned
            squares[name] = torch.cat([squares[name], noise.flatten().square()])
        private.optimizer.zero_grad()
    for name, each in squares.items():
        allowed = 5 * math.sqrt(2 / len(each)) + 0.001  # five standard errors, and the grid
        assert abs(float(each.mean()) - 1) < allowed, (
            f"{name}: noise variance / planned = {float(each.mean()):.4g}"
        )
    assert private.not_private.clipped > 0


@pytest.mark.parametrize("late", ["0.weight", "0.bias", "0.", "2."])
def test_one_record_moves_unfrozen_and_other_parameters_by_at_most_the_clip(late: str) -> None:
    """Kills the edits of the norm above, by the released gradient of a single record alone, without
    an oracle.
    """
    model, clip = network(100, 50), 0.5
    data = TensorDataset(50 * table(1, 100).tensors[0], torch.tensor([1]))
    chosen = [p for name, p in model.named_parameters() if name.startswith(late)]
    for p in chosen:
        p.requires_grad_(False)
    private = begin(model, data, clip=clip, noise_multiplier=1e-6, batch_size=1, steps=2, delta=0.5)
    train(private, 1)
    for p in chosen:
        p.requires_grad_(True)
    for batch in private.loader:
        cross_entropy(model, batch).backward()
        private.optimizer.step()
        # type: ignore[union-attr]
        norm = float(vector(p.grad.double() for p in model.parameters()).norm())
        assert 0.99 * clip < norm < clip * (1 + 1e-3), "the noise is a thousandth of that"


# -- clip="auto"


@pytest.mark.parametrize("kind", ["kfc", "diagonal"])
def test_an_automatic_clip_looks_at_no_private_record(kind: str) -> None:
    """Kills: private.py `_clip_from_probes` with the norm of one private record among those of the
    probes;
    `make_private` with a clip that is scaled by the norm of one.
    """

    def chosen(x: Tensor, y: Tensor) -> float:
        probe = dpkfc.probes.Tabular(4, classes=3)
        geometry = dpkfc.KFC(probe) if kind == "kfc" else dpkfc.Diagonal(source=probe)
        private = begin(network(), TensorDataset(x, y), clip="auto", geometry=geometry)
        private.detach()
        return private.plan.clip

    (x, y), (other, _) = table().tensors, table(seed=1).tensors
    clips = [
        chosen(x, y),
        chosen(other, y.flip(0)),
        chosen(1e6 * x, y),
        chosen(1e-6 * other, 2 - y),
    ]
    assert clips == [clips[0]] * 4 and clips[0] > 0
    torch.manual_seed(1)
    assert chosen(x, y) == clips[0], "nor at the global generator"


# -- checkpoints hold no past key


def pieces(value: Any) -> Iterator[bytes]:
    """Everything in a state, as bytes.

    Text that may be hexadecimal, and large numbers, as what they stand for too.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from pieces(key)
            yield from pieces(item)
    elif isinstance(value, list | tuple | set):
        if value and all(isinstance(item, int) and 0 <= item < 256 for item in value):
            yield bytes(value)
        for item in value:
            yield from pieces(item)
    elif isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, str):
        yield value.encode()
        yield from (
            bytes.fromhex(found)
            for found in re.findall(r"[0-9a-f]{64}|[0-9a-f]{32}", value.lower())
        )
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif isinstance(value, int) and value > 2**100:
        yield value.to_bytes(value.bit_length() // 8 + 1, "big")
        yield value.to_bytes(value.bit_length() // 8 + 1, "little")


def written(folder: Path) -> Iterator[bytes]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        yield content
        if file.suffix == ".json":
            yield from pieces(json.loads(content))


PURPOSES = ("noise", "sampling", "workers", "tail", "groups")


def derived(key: bytes, links: int) -> Iterator[bytes]:
    """The keys that follow from one: later links of the chain, and the keys of each purpose."""
    for _ in range(links):
        yield key
        yield from (rng.sub_key(key, purpose) for purpose in PURPOSES)
        key = rng.next_key(key)


STREAMS: dict[str, Any] = {
    "independent": dpkfc.noise.Independent(),
    "ring of outputs": dpkfc.noise.BandedToeplitz(bands=4),
    "ring of inputs": dpkfc.noise.InverseSquareRoot(bands=12),
    # InverseSquareRoot and LambdaCGD with few bands (`Regenerated`) are left out: they keep the
    # keys of the last few
    # steps on purpose, where the others keep the past noise itself.
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("resumed", [False, True])
def test_no_earlier_noise_follows_from_a_checkpoint(
    name: str, resumed: bool, tmp_path: Path
) -> None:
    """Kills: run.py `state_dict` with the first or the previous key, or half of the key of the last
    noise, as text, a number or a tensor; run.py `_before_step` that advances the key only at the
    next step; noise/stream.py `_Buffers.state_dict` with keys; checkpoint.py `save` writing an
    older state as well.
    """
    private = begin(network(), noise=STREAMS[name], batch_size=5, steps=12, seed=None)
    past: list[bytes] = []
    released: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        released.append(vector(p.grad for p in private.model.parameters()))

    private.optimizer.register_step_pre_hook(record)
    for step in range(8):
        past.append(bytes.fromhex(private.state_dict()["key"]))
        if step == 4 and resumed:
            private.save(tmp_path / "middle")
            private.load(tmp_path / "middle")
        train(private, 1)
        private.save(tmp_path / "checkpoint")  # over the earlier one
    assert len(released) == len(set(past)) == 8

    state = private.state_dict()
    everything = [*pieces(state), *written(tmp_path / "checkpoint")]
    forbidden = {
        rng.sub_key(key, purpose) for key in past for purpose in ("noise", "sampling")
    } | set(past)
    for secret in forbidden:
        # the cipher reads 16 bytes of a key
        for piece in everything:
            assert secret[:16] not in piece and secret[:16].hex().encode() not in piece.lower()
    keys = {piece for piece in everything if len(piece) == 32}
    assert bytes.fromhex(state["key"]) in keys, "the search finds keys"
    for key in keys:
        assert forbidden.isdisjoint(derived(key, 50))


def test_a_recorded_key_gives_away_its_noise_and_a_later_checkpoint_does_not(
    tmp_path: Path,
) -> None:
    """Kills the edits above for independent noise, by an attack: regenerate noise from whatever the
    checkpoint holds.

    The noise is a thousand times the clip, so a released gradient is noise almost entirely.
    """
    private = begin(network(20, 30), table(40, 20), noise_multiplier=1e3, seed=None)
    states, released = [private.state_dict()], []
    private.optimizer.register_step_pre_hook(
        lambda *_: released.append(vector(p.grad for p in private.model.parameters()))
    )
    for _ in range(6):
        train(private, 1)
        states.append(private.state_dict())
    private.save(tmp_path / "checkpoint")

    def best(found: list[bytes], steps: list[Tensor]) -> float:
        """The largest correlation of released gradients with noise from any of these keys, and
        those that follow.
        """
        keys = {key for one in found if len(one) == 32 for key in derived(one, 8)}
        guesses = torch.zeros(len(keys), len(released[0]))
        for guess, key in zip(guesses, keys, strict=True):
            rng.add_normal_([guess], key, 1.0)
        scale = guesses.norm(dim=1, keepdim=True) * torch.stack(steps).norm(dim=1)
        return float((guesses @ torch.stack(steps).T / scale).abs().max())

    for step in range(6):
        assert best(list(pieces(states[step])), released[step : step + 1]) > 0.99, (
            "the attack works on what is to come"
        )
        assert best(list(pieces(states[step + 1])), released[: step + 1]) < 0.3
    assert best(list(written(tmp_path / "checkpoint")), released) < 0.3


# -- the first key


def key_of(**changed: Any) -> str:
    private = begin(network(), loss="unchecked", seed=None, **changed)
    private.detach()
    return str(private.state_dict()["key"])


def test_the_first_key_depends_on_each_of_32_bytes_of_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: random.py `first_key` from `random`; from `os.urandom(2)`, hashed; from 2 of 32
    bytes, hashed; from 16 bytes, twice; run.py `__init__` with `first_key(seed or 0)`.
    """
    asked: list[int] = []
    flipped = -1

    def urandom(size: int) -> bytes:
        asked.append(size)
        out = bytearray(range(1, size + 1))
        if 0 <= flipped < size:
            out[flipped] ^= 1
        return bytes(out)

    monkeypatch.setattr(os, "urandom", urandom)
    keys = {key_of()}
    while flipped < 31:
        flipped += 1
        keys.add(key_of())
    assert max(asked) >= 32, "256 bits of entropy"
    assert len(keys) == 33, "every byte matters"
    assert all(len(key) == 64 for key in keys)


def test_unseeded_runs_do_not_depend_on_the_global_generators() -> None:
    """Kills: random.py `first_key` from `random`, `numpy` or `torch`, as they are or hashed."""
    keys = []
    for _ in range(3):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        keys.append(key_of())
    assert len(set(keys)) == 3


# -- how much noise


class Silent(nn.Module):
    """Many parameters, and gradients of exactly zero on records of zeros."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_the_noise_scale_has_the_rounding_margin() -> None:
    """Kills: plan.py `noise_scale` without `(1 + MARGIN)`, or with `1 - MARGIN`; step.py `release`
    with `noise_multiplier * clip` for `noise_scale`.

    The released noise regressed on the stream's own million normals: the slope is known to a few
    parts in a million, also if the noise was rounded to a grid.
    """
    model = Silent(1000)
    data = TensorDataset(torch.zeros(40, 1000), torch.arange(40) % 3)
    private = begin(model, data, noise_multiplier=2.0, clip=0.7, steps=2)
    for step in range(2):
        key = rng.sub_key(bytes.fromhex(private.state_dict()["key"]), "noise")
        normals = torch.zeros(1000, 1000)
        rng.add_normal_([normals], key, 1.0)
        batch = next(iter(private.loader))
        cross_entropy(model, batch).backward()
        private.optimizer.step()
        noise = model.layer.weight.grad
        assert noise is not None
        exact = normals.double()
        slope = float((noise.double() * exact).sum() / exact.square().sum()) / (2.0 * 0.7 / 10)
        assert 1 + clipping.MARGIN - 2e-5 < slope < 1.01, f"step {step}"
        error = noise / (2.0 * 0.7 / 10 * (1 + clipping.MARGIN)) - normals
        assert float(error.abs().max()) < GRID, "and each number is that of the stream"
        private.optimizer.zero_grad()
    assert clipping.MARGIN > 0


class Driven:
    """A cipher whose key stream is one word of 32 bits again and again, and another where the tail
    is asked for.
    """

    word = 0
    tail = 0

    def __init__(self, algorithm: Any, mode: Any) -> None:
        self._of_tail = any(algorithm.nonce[8:])  # the words before are the counter

    def encryptor(self) -> Driven:
        return self

    def update_into(self, data: Any, buffer: Any) -> int:
        word = self.tail if self._of_tail else self.word
        buffer[: len(data)] = word.to_bytes(4, "little") * (len(data) // 4)
        return len(data)


@pytest.mark.parametrize(
    ("word", "tail"),
    [
        *[(0, 0), (0, 1), (0, 2**18), (0, 2**24), (0, 2**31), (1, 0), (5, 7), (100, 2**30)],
        *[(2**12 - 1, 9), (2**12, 0), (2**16, 0)],
    ],
)
def test_the_tail_of_the_noise_is_not_cut(
    word: int, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: normals.py `cpu_normals` without `_refine_tail_`, or with radii or normals
    clamped at 5.8, 6.5 or 7.5; `_refine_tail_` that adds no fraction; step.py `release` or
    `add_lanes_` that clamps the noise.

    All words of the cipher are the same small number: radii and angles follow by Box and Muller's
    formula.
    """
    monkeypatch.setattr(Driven, "word", word)
    monkeypatch.setattr(Driven, "tail", tail)
    monkeypatch.setattr(chacha, "Cipher", Driven)
    u = word + (
        (tail + 0.5) / 2**32 if word < 2**12 else 0.5
    )  # small ones have 32 bits more behind them
    radius, angle = math.sqrt(-2 * math.log(u / 2**32)), 2 * math.pi * word / 2**32
    assert radius > 4.5 and (word or radius > 6.6)

    normals = torch.zeros(1000)
    rng.add_normal_([normals], bytes(32), 1.0)
    torch.testing.assert_close(
        normals, torch.full((1000,), radius * math.cos(angle)), rtol=1e-4, atol=0.0
    )

    model = Silent(4)
    private = begin(
        model, TensorDataset(torch.zeros(40, 4), torch.arange(40) % 3), loss="unchecked"
    )
    # only the noise is driven: from these bits, gaps between drawn records are zero
    monkeypatch.setattr(sampling, "uniform_bits", lambda _, n: np.full(n, 2**64 - 1, "<u8"))
    batch = next(iter(private.loader))
    assert len(batch[0]) == 40
    cross_entropy(model, batch).backward()
    private.optimizer.step()
    assert model.layer.weight.grad is not None
    released = model.layer.weight.grad / (private.plan.noise_scale / 10)
    torch.testing.assert_close(
        released, torch.full((1000, 4), radius * math.cos(angle)), rtol=1e-4, atol=GRID
    )


# -- groups


def drawn(private: dpkfc.PrivateRun, steps: int) -> Iterator[tuple[int, set[int]]]:
    """The number of each step, and the records in its batch, which carry their own number."""
    batches: dict[int, set[int]] = {}
    first = private.steps
    for batch in private.loader.take(steps):
        batches[private.steps] = set(batch[0][:, 0].long().tolist())
        cross_entropy(private.model, batch).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    return ((step, batches.get(step, set())) for step in range(first, first + steps))


def numbered(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.arange(count)
    return TensorDataset(x, torch.arange(count) % 3)


@pytest.mark.parametrize("by", ["file", "state"])
def test_an_unseeded_run_keeps_its_groups_when_it_is_resumed(by: str, tmp_path: Path) -> None:
    """Kills: run.py `load_state_dict` without the group key, or with one derived from the key of
    the present step.
    """
    settings: dict[str, Any] = {
        "noise": dpkfc.noise.BandedToeplitz(bands=4),
        "batch_size": 10,
        "steps": 60,
        "seed": None,
    }
    private = begin(network(), numbered(50), **settings)
    assert private.plan.groups == 4 and private.plan.sampling == "cyclic-poisson"
    group = {row: step % 4 for step, rows in drawn(private, 30) for row in rows}
    assert len(group) == 50, "at a rate of 0.8, each record was drawn at some turn of its group"
    private.save(tmp_path / "checkpoint")
    fresh = begin(network(), numbered(50), **settings)
    if by == "file":
        fresh.load(tmp_path / "checkpoint")
    else:
        fresh.model.load_state_dict(private.model.state_dict())
        fresh.load_state_dict(private.state_dict())
    seen = [(row, step % 4) for step, rows in drawn(fresh, 30) for row in rows]
    assert len(seen) > 200 and all(group[row] == turn for row, turn in seen)


# -- the accountant


def accounted(
    rate: float, sigma: float, count: int, delta: float, pessimistic: bool = True
) -> float:
    """dp-accounting's PLD for Poisson-sampled Gaussians, as an upper or a lower bound."""
    accountant = pld.PLDAccountant(
        NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    if pessimistic:
        accountant.compose(
            SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count)
        )
        return float(accountant.get_epsilon(delta))
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=1e-4, pessimistic_estimate=False
    )
    return float(one.self_compose(count).get_epsilon_for_delta(delta))


def test_the_accountant_is_given_the_rate_within_a_group(tmp_path: Path) -> None:
    """Kills: plan.py `mechanism` with `sampling_rate` for `rate_in_turn`, or with `groups=1`;
    `rate_in_turn` without `groups`; run.py giving the ledger another mechanism.

    The rate is measured on the batches of the loop, and epsilon is dp-accounting's own for it.
    """
    bands, batch, count, steps, sigma, delta = 4, 10, 100, 80, 1.0, 1e-3
    with closing(Ledger(tmp_path / "ledger", "people")) as ledger:
        private = begin(
            network(),
            numbered(count),
            noise=dpkfc.noise.BandedToeplitz(bands=bands),
            noise_multiplier=sigma,
            batch_size=batch,
            steps=steps,
            delta=delta,
            ledger=ledger,
        )
        batches = dict(drawn(private, steps))
        turns = {
            row: {step % bands for step, rows in batches.items() if row in rows}
            for row in range(count)
        }
        assert all(len(its) <= 1 for its in turns.values())
        often = sum(map(len, batches.values())) / (
            count * steps / bands
        )  # a record has steps / bands turns
        rate = bands * batch / count
        assert abs(often - rate) < 5 * math.sqrt(rate * (1 - rate) / (count * steps / bands))
        assert private.plan.mechanism.sampling_rate == pytest.approx(rate)
        assert ledger.runs()[0].mechanism == private.plan.mechanism
        spent = ledger.epsilon(delta)
    for taken in (3, bands + 1, steps):
        expected = accounted(rate, sigma, -(-taken // bands), delta)
        assert private.plan.epsilon(taken) == pytest.approx(expected, rel=5e-3)
        assert private.plan.epsilon(taken) > 1.2 * accounted(
            batch / count, sigma, -(-taken // bands), delta
        )
    assert private.epsilon() == private.plan.epsilon(steps) == pytest.approx(spent, rel=1e-6)
    assert private.epsilon() >= accounted(rate, sigma, steps // bands, delta, pessimistic=False)


# -- gradients that are no numbers


class Words(nn.Module):
    """Scores from the mean of embeddings; where `broken` is 0, the gradient that reaches the
    embedding is NaN.

    The derivative of a square root at 0 is infinite, and times 0 it is NaN. All else about such a
    record is finite.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 6, padding_idx=None)
        self.head = nn.Linear(6, 12, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, intact: Tensor) -> Tensor:
        mean = self.embedding(ids).mean(1)
        return self.head(mean + (mean.abs() * intact[:, None]).sqrt())


def released_by(
    tied: bool, ids: Tensor, intact: Tensor, weight: Tensor
) -> tuple[dict[str, Tensor], dpkfc.PrivateRun]:
    """The sum of clipped gradients, without noise, of ``Σ weight · loss / records``."""
    model = Words(tied)
    data = TensorDataset(ids, intact, weight, ids[:, 0])
    private = begin(
        model,
        data,
        noise_multiplier=0.0,
        batch_size=len(ids),
        steps=1,
        clip=0.3,
        # of a loss that is no number for some records there is nothing to compare
        loss="unchecked",
        options=dpkfc.Options(check=False),
    )
    for its_ids, its_intact, its_weight, y in private.loader:
        losses = F.cross_entropy(model(its_ids, its_intact), y, reduction="none")
        (losses * its_weight).mean().backward()
        private.optimizer.step()
    private.detach()
    return {
        name: p.grad * len(ids) for name, p in model.named_parameters() if p.grad is not None
    }, private


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bad", [[2], [0, 5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("how", ["in the embedding", "everywhere"])
def test_a_record_with_nan_backprops_into_an_embedding_contributes_zero(
    how: str, bad: list[int], tied: bool
) -> None:
    """Kills: per_sample/rows.py `RowSparseGrad.masked` that returns `self`, or multiplies by 0;
    `TiedEmbeddingGrad.masked` that masks the head or the rows only; run.py `_clip_and_sum` that
    masks no forms; step.py `clip_factors` without `finite`.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(12, (6, 4), generator=generator)
    ids[0] = ids[0, 0]  # a record with the same word again and again
    ones = torch.ones(6)
    broken = ones.clone()
    broken[bad] = 0.0 if how == "in the embedding" else math.nan
    poisoned = (ids, broken, ones) if how == "in the embedding" else (ids, ones, broken)
    got, private = released_by(tied, *poisoned)
    assert private.not_private.non_finite == len(bad)
    good = [row for row in range(6) if row not in bad]
    zero = ones.clone()
    zero[bad] = 0.0
    want, _ = released_by(tied, ids, ones, zero)  # their gradients are zero
    for name, grad in want.items():
        assert torch.equal(got[name], grad), f"{name}: not exactly zero"
    if good:
        alone, _ = released_by(tied, ids[good], ones[good], ones[good])
        for name, grad in alone.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-7)
        assert any(float(grad.abs().max()) > 0 for grad in alone.values())


# -- what a run says in the end


def test_the_epsilon_of_a_result_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: training.py `fit` or `release` with an epsilon that is 1 % too low, or that of fewer
    steps; the same in `_loop`, which writes metrics.jsonl; run.py `epsilon`, plan.py `epsilon`
    scaled by 0.99.
    """
    monkeypatch.setattr(release, "draw_figures", lambda *arguments: None)
    records, batch_size, epochs, delta = 60, 20, 2, 1e-3
    train_part, test_part = table(records), table(20, seed=1)
    loaded = Loaded(
        train_part, test_part, "tabular", (4,), 3, ("a", "b", "c"), (), dpkfc.probes.Tabular(4)
    )
    settings = Settings(
        epsilon=3.0,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        noise="independent",
        seed=0,
        model="linear",
    )
    assert fit(loaded, settings, tmp_path / "run", console=Console(quiet=True))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    rate, steps, sigma = (
        batch_size / records,
        epochs * records // batch_size,
        plan["noise_multiplier"],
    )
    assert (result["steps"], result["delta"], result["noise_multiplier"]) == (steps, delta, sigma)
    upper, lower = (
        accounted(rate, sigma, steps, delta),
        accounted(rate, sigma, steps, delta, pessimistic=False),
    )
    assert 0.998 < lower / upper <= 1
    assert lower <= result["epsilon"] < 1.002 * upper
    for line in metrics:
        assert (
            accounted(rate, sigma, line["step"], delta, pessimistic=False) <= line["epsilon"] + 1e-9
        )
    assert metrics[-1]["step"] == steps and metrics[-1]["epsilon"] == result["epsilon"]
