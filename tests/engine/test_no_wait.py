"""A step on an accelerator: the host never waits for the device, and copies nothing from or to it.

The functions of a step run on meta tensors, which have a shape but no values: whatever asks for a
value, or for a shape that depends on values, raises. A dispatch mode refuses every operation that
has tensors on two devices. So this needs no accelerator: a meta device is one, to the code.

What still waits, by design or because it is rare:

* the checks of the first steps (`engine.checks`, `engine.loss_comparison`), reading
  `run.not_private`, saving and loading, and a refresh of the geometry with its `gain`;
* mixtures of experts, which ask how many tokens each expert has, and packed sequences of recurrent
  layers, whose lengths torch keeps on the host;
* a GradScaler, whose scale is read at each step, and learning rates that are tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpkfc import normals
from dpkfc.engine.counts import Counts, NotPrivate
from dpkfc.engine.step import ClippedBatch, clip_and_sum, release
from dpkfc.geometry.diagonal import DiagonalMap
from dpkfc.geometry.factors import FullRoot, LowRankRoot
from dpkfc.geometry.kronecker import KroneckerMap
from dpkfc.noise.factorization import (
    IDENTITY,
    BufferedStrategy,
    Factorization,
    InverseToeplitzStrategy,
    ToeplitzStrategy,
)
from dpkfc.per_sample.base import IDENTITY_MAP, HookedModule, LayerCall, LinearMap
from dpkfc.per_sample.capture import GradAccumulator
from dpkfc.per_sample.registry import adapter_for
from dpkfc.per_sample.rows import TiedEmbeddingGrad

BATCH = 5
WAITS_OR_COPIES = "meta tensor|Meta|data-independent|expected device|works on"
DEVICE = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuses operations between devices. Scalars may come from the host, as kernel arguments."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        assert len(devices) <= 1, f"{func} works on {devices}"
        return out


@contextlib.contextmanager
def device_without_values() -> Iterator[None]:
    with OneDevice(), torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is compiled once, with values; its operations are those of `box_muller`."""
    monkeypatch.setattr(normals, "box_muller_on", lambda device: normals.box_muller)
    # which knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: bool((x > 0).all()),
        lambda x: int(x.sum()),
        lambda x: x.nonzero()[0].tolist(),
        lambda x: torch.unique(x).tolist(),
        lambda x: x.cpu(),
        lambda x: x + torch.arange(4.0),
        lambda x: torch.tensor([1.0, 2.0]).to(x.device),
    ],
)
def test_what_waits_or_copies_is_noticed(wait: Callable[[Tensor], object]) -> None:
    """The test can fail."""
    x = torch.ones(4, device=DEVICE)
    with (
        device_without_values(),
        pytest.raises((RuntimeError, AssertionError), match=WAITS_OR_COPIES),
    ):
        wait(x)


def kronecker(module: nn.Module, low_rank: bool = False) -> LinearMap:
    """Any Kronecker map of the module's shape."""
    adapter, _ = adapter_for(module)
    assert adapter is not None and adapter.kronecker is not None
    groups, inputs, outputs = adapter.kronecker.shape(module)
    bias = module.bias is not None

    def root(size: int, bias: bool) -> FullRoot | LowRankRoot:
        if low_rank:
            low = LowRankRoot(
                0.5, torch.ones(size, 2, device=DEVICE), torch.ones(2, device=DEVICE), bias
            )
            # measured when the map is made
            vars(low).update(largest=1.5, smallest=0.5)
            return low
        return FullRoot(torch.ones(groups, size, size, device=DEVICE), bias, 2.0, 0.5)

    return KroneckerMap(
        root(outputs, False), root(inputs + int(bias), bias), inputs, outputs, groups
    )


def identity(module: nn.Module) -> LinearMap:
    return IDENTITY_MAP


def low_rank(module: nn.Module) -> LinearMap:
    return kronecker(module, low_rank=True)


def diagonal(module: nn.Module) -> LinearMap:
    scale = DiagonalMap([torch.ones_like(p) for p in module.parameters()])
    vars(scale).update(gain=1.0, condition=1.0)
    return scale


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 7, device=DEVICE), (BATCH, 6)),
    "linear, positions": (lambda: nn.Linear(60, 70, device=DEVICE), (BATCH, 3, 60)),
    "linear, formed": (lambda: nn.Linear(6, 7, device=DEVICE), (BATCH, 40, 6)),
    "conv": (lambda: nn.Conv2d(8, 6, 3, padding=1, device=DEVICE), (BATCH, 8, 9, 9)),
    "conv, patches": (lambda: nn.Conv2d(64, 64, 3, device=DEVICE), (BATCH, 64, 4, 4)),
    "embedding": (lambda: nn.Embedding(11, 4, padding_idx=0, device=DEVICE), (BATCH, 6)),
    "layer norm": (lambda: nn.LayerNorm(6, device=DEVICE), (BATCH, 3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6, device=DEVICE), (BATCH, 6, 4, 4)),
}
MAPS: dict[str, Callable[[nn.Module], LinearMap]] = {
    "identity": identity,
    "Kronecker": kronecker,
    "Kronecker, low rank": low_rank,
    "diagonal": diagonal,
}
CASES = [
    (layer, kind)
    for layer in MODULES
    for kind in MAPS
    if kind == "identity"
    or (kind.startswith("Kronecker") and layer.split(",")[0] in ("linear", "conv"))
    or (kind == "diagonal" and layer.split(",")[0] in ("linear", "embedding"))
]


def call_of(module: nn.Module, shape: tuple[int, ...]) -> LayerCall:
    ids = isinstance(module, nn.Embedding)
    a = torch.ones(shape, dtype=torch.int64 if ids else torch.float32, device=DEVICE)
    params = dict(module.named_parameters())
    hooked = HookedModule("layer", module, "layer", params, adapter_for(module)[0])
    return LayerCall(hooked, params, BATCH, a, torch.ones_like(module(a)))


@pytest.mark.parametrize(("layer", "kind"), CASES)
def test_norms_clipping_and_sums(layer: str, kind: str) -> None:
    make, shape = MODULES[layer]
    with device_without_values():
        module = make()
        preconditioner = MAPS[kind](module)
        accumulator = GradAccumulator(lambda key: preconditioner)
        accumulator.receive(call_of(module, shape))
        clipped = clip_and_sum(
            accumulator.take(),
            lambda key: preconditioner,
            clip=1.0,
            gamma=None,
            grad_scale=float(BATCH),
            expected_batch_size=BATCH,
        )
        assert clipped is not None
        counts = Counts(NotPrivate())
        counts.add(clipped)
        counts.add(clipped)
        totals = [part for parts in clipped.sums.values() for part in parts]
        assert sum(part.numel() for part in totals) == sum(p.numel() for p in module.parameters())
        assert {part.device.type for part in (*totals, clipped.finite)} == {"meta"}


def test_a_tied_embedding() -> None:
    with device_without_values():
        head, table = (
            nn.Linear(4, 11, bias=False, device=DEVICE),
            nn.Embedding(11, 4, device=DEVICE),
        )
        accumulators = GradAccumulator(), GradAccumulator()
        accumulators[0].receive(call_of(head, (BATCH, 3, 4)))
        accumulators[1].receive(call_of(table, (BATCH, 6)))
        (outer,), (rows,) = (list(each.take().grads.values()) for each in accumulators)
        tied = TiedEmbeddingGrad(outer, rows)  # type: ignore[arg-type]
        norms = tied.squared_norms(IDENTITY_MAP)
        finite = torch.isfinite(norms)
        (total,) = tied.masked(finite).weighted_sum(norms)
        assert total.shape == (11, 4)


STREAMS: dict[str, Factorization] = {
    "independent": IDENTITY,
    "banded": ToeplitzStrategy("", (1.0, 0.8, 0.5, 0.3)),
    "banded inverse": InverseToeplitzStrategy("", (1.0, -0.5, -0.2, -0.1, -0.05)),
    "regenerated": InverseToeplitzStrategy("", (1.0, -0.5)),
    "buffered": BufferedStrategy("", (0.4, 0.2), (0.99, 0.5)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_made_on_the_device_and_released(name: str) -> None:
    """All of a step after the sums: noise, grid, a map after the noise, ``.grad``."""
    with device_without_values():
        p = nn.Parameter(torch.ones(30, 20, device=DEVICE))
        unused = nn.Parameter(torch.ones(7, device=DEVICE))
        with _poles_are_sent_once():
            stream = STREAMS[name].stream([range(607)], DEVICE)
        for step in range(3):
            release(
                {(p,): [torch.ones_like(p)]},
                {p: "p", unused: "unused"},
                stream,
                bytes(32),
                scale=0.3,
                step=step,
                grid=0.25,
                maps_after_noise={("p",): DiagonalMap(2.0)},
            )
            assert p.grad is not None and p.grad.device.type == "meta"
            assert unused.grad is not None and unused.grad.shape == (7,)


@contextlib.contextmanager
def _poles_are_sent_once() -> Iterator[None]:
    """A stream is made before the first step. Its constants may be copied then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", lambda x: torch.ones(x.shape, device=DEVICE))
        yield


def test_values_are_asked_for_when_the_user_does() -> None:
    finite = torch.tensor([True, False, True])
    counts = Counts(NotPrivate())
    for _ in range(2):
        counts.add(ClippedBatch({}, torch.tensor([0.5, 0.0, 1.0]), finite))
    assert counts.read() == counts.read() == NotPrivate(samples=6, clipped=2, non_finite=2)
    with device_without_values():
        fake = Counts(NotPrivate())
        fake.add(ClippedBatch({}, torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE) > 0))
        with pytest.raises((RuntimeError, AssertionError), match=WAITS_OR_COPIES):
            fake.read()
