"""1, 2, 4 and 9 for a geometry.

Blind to the data, no sample above C after the map, and an oracle says what it is.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpkfc
from dpkfc.clipping import MARGIN
from dpkfc.geometry.base import Geometry

NOISE = dpkfc.probes.PinkNoise((1, 4, 4), classes=3)
GEOMETRIES = {
    "A": lambda: dpkfc.KFC(NOISE, probes=32, every=2),
    "A, low rank": lambda: dpkfc.KFC(NOISE, probes=32, every=2, rank=4),
    "AG": lambda: dpkfc.KFC(
        NOISE, probes=32, every=2, factors="AG", damping=0.01, stability=0.0, rank=None
    ),
    "AG, low rank, diagonal": lambda: dpkfc.KFC(
        NOISE, probes=32, every=2, factors="AG", damping=1e-3, rank=2, others="diagonal", post=0.5
    ),
    "AdaDPS": lambda: dpkfc.Diagonal(NOISE, probes=32, every=2),
}


def small_cnn(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Dropout(0.1),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)


def images(seed: int, records: int = 40, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 1, 4, 4, generator=generator) * (1 + seed)
    return TensorDataset(x.to(dtype), torch.randint(3, (records,), generator=generator))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def train(
    model: nn.Module, data: Dataset, geometry: Geometry, lr: float = 0.0, **settings: Any
) -> dpkfc.PrivateRun:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    defaults = {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "steps": 3,
        "batch_size": 10,
        "clip": 0.5,
        "seed": 3,
    }
    private = dpkfc.make_private(
        model, optimizer, data, geometry=geometry, loss=loss_of, **{**defaults, **settings}
    )
    for batch in private.loader:
        loss_of(model, batch).backward()
        optimizer.step()
    private.detach()
    return private


def tensors(state: Any) -> list[Tensor | float]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in tensors(value)]
    if isinstance(state, list):
        return [leaf for value in state for leaf in tensors(value)]
    return [state] if isinstance(state, Tensor | float) else []


class TestBlindToTheData:
    """1. Swap the private dataset.

    The preconditioner is bit-identical at equal weights and seed.
    """

    @pytest.mark.parametrize("kind", GEOMETRIES)
    def test_swapped_records_leave_every_map_bit_identical(self, kind: str) -> None:
        states = []
        for seed, records, batch_size, chunk in ((1, 40, 10, None), (7, 23, 5, 2)):
            geometry = GEOMETRIES[kind]()
            train(
                small_cnn(),
                images(seed, records),
                geometry,
                batch_size=batch_size,
                max_physical_batch_size=chunk,
            )
            states.append(tensors(geometry.state_dict()))
        assert len(states[0]) == len(states[1]) > 3
        for one, other in zip(*states, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))

    @pytest.mark.parametrize("kind", GEOMETRIES)
    def test_a_map_follows_the_weights_and_its_seed_only(self, kind: str) -> None:
        """The test above could pass with maps that never change: these must."""
        moving = GEOMETRIES[kind]()
        train(small_cnn(), images(1), moving, lr=1.0)
        still = GEOMETRIES[kind]()
        train(small_cnn(), images(1), still)
        pairs = zip(tensors(moving.state_dict()), tensors(still.state_dict()), strict=True)
        assert any(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)

    def test_no_record_is_read_during_a_refresh(self) -> None:
        """Nor does the code that refreshes have a way to.

        It takes the model, its hooks, a step and the ranks that share the work.
        """
        reading: list[int] = []
        refreshing: list[bool] = []

        class Watched(Dataset):
            def __len__(self) -> int:
                return 40

            def __getitem__(self, i: int) -> tuple[Tensor, int]:
                assert not refreshing, "a record was read while the geometry was built"
                reading.append(i)
                return torch.randn(1, 4, 4), 0

        class WatchedKFC(dpkfc.KFC):
            def refresh(self, *args: Any) -> None:
                refreshing.append(True)
                super().refresh(*args)
                refreshing.clear()

        train(small_cnn(), Watched(), WatchedKFC(NOISE, every=1))
        assert reading
        assert list(inspect.signature(dpkfc.KFC.refresh).parameters) == [
            "self",
            "model",
            "capture",
            "step",
            "ranks",
        ]

    def test_probing_leaves_no_trace(self) -> None:
        model = small_cnn()
        model.register_buffer("counter", torch.zeros(1))
        model.register_forward_pre_hook(lambda module, args: (module.counter.add_(1), None)[1])
        plain = small_cnn()
        states = []
        for one, geometry in ((plain, dpkfc.Identity()), (model, dpkfc.KFC(NOISE, every=1))):
            torch.manual_seed(5)
            train(one, images(1), geometry, noise_multiplier=0.0)
            states.append(torch.get_rng_state())
        assert torch.equal(*states), "the global generator, which dropout draws from, was moved"
        assert float(model.counter) <= 4, (
            "buffers saw the probes"
        )  # three batches and the trial of the first


class TestNoSampleAboveC:
    """2. Every sample's clipped contribution has norm at most R in the preconditioned space."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
    @pytest.mark.parametrize("kind", GEOMETRIES)
    def test_alone(self, kind: str, scale: float, dtype: torch.dtype) -> None:
        model, data = small_cnn(dtype).eval(), images(1, dtype=dtype)
        for i in range(4):
            one = TensorDataset(data.tensors[0][i : i + 1] * scale, data.tensors[1][i : i + 1])
            norm = contribution(model, one, GEOMETRIES[kind]())
            assert norm <= 0.5, "the clipped contribution exceeds C"
            assert norm > 0.45 or scale < 1, (
                "a large gradient should be clipped to C, not far below it"
            )

    @pytest.mark.parametrize("direction", ["largest", "smallest"])
    @pytest.mark.parametrize("rank", [None, 8])
    def test_a_record_along_an_eigenvector(self, rank: int | None, direction: str) -> None:
        """Along the largest eigenvalue U shrinks most, and rounding of U g is largest beside it."""
        torch.manual_seed(0)
        model = nn.Linear(40, 3)
        scales = 10.0 ** torch.linspace(3, -3, 40)
        probe = dpkfc.probes.Tabular(40, std=scales, classes=3)
        geometry = dpkfc.KFC(
            probe, probes=30 if rank is None else 300, rank=rank, damping=1e-12, stability=1e-9
        )
        record = torch.zeros(1, 40)
        record[0, 0 if direction == "largest" else -1] = 1e3
        assert contribution(model, TensorDataset(record, torch.tensor([1])), geometry) <= 0.5 * (
            1 + MARGIN
        )

    @pytest.mark.parametrize("kind", GEOMETRIES)
    def test_maps_that_change_within_a_batch_wait_for_the_next(self, kind: str) -> None:
        """One geometry shared by two runs, or refreshed by hand between backward and step.

        The clip still holds.
        """
        model, geometry = small_cnn().eval(), GEOMETRIES[kind]()
        x, y = images(1).tensors
        sums: list[Tensor] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = {"noise_multiplier": 0.0, "delta": 0.5, "steps": 1, "batch_size": 1, "clip": 0.5}
        private = dpkfc.make_private(
            model,
            optimizer,
            TensorDataset(x[:1], y[:1]),
            geometry=geometry,
            loss=loss_of,
            **settings,
        )
        private._noise = recorder(sums)
        for batch in private.loader:
            loss_of(model, batch).backward()
            other = small_cnn()
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(0.05)
            train(other, images(2), geometry)
            optimizer.step()
        private.detach()
        assert torch.cat([s.flatten().double() for s in sums]).norm() <= 0.5


def recorder(sums: list[Tensor]) -> Any:
    """Takes the place of the noise and keeps what it would have been added to."""

    class Recorder:
        def add_(self, totals: list[Tensor], key: bytes, scale: float, step: int) -> None:
            sums[:] = [t.clone() for t in totals]

    return Recorder()


def contribution(model: nn.Module, one: TensorDataset, geometry: Geometry) -> float:
    """The norm of what one record adds to the sum, before noise and before any map after it."""
    sums: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"noise_multiplier": 0.0, "delta": 0.5, "steps": 1, "batch_size": 1, "clip": 0.5}
    private = dpkfc.make_private(model, optimizer, one, geometry=geometry, loss=loss_of, **settings)
    private._noise = recorder(sums)
    for batch in private.loader:
        loss_of(model, batch).backward()
        optimizer.step()
    private.detach()
    return float(torch.cat([s.flatten().double() for s in sums]).norm())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_a_record_that_is_not_finite_after_the_map_contributes_exactly_zero(
    kind: str, bad: float
) -> None:
    """4. The others are untouched."""
    grads = []
    for poison in (False, True):
        model = small_cnn().eval()
        data = images(1, 6)
        x, y = data.tensors
        if poison:
            x, y = torch.cat([x, torch.full((1, 1, 4, 4), bad)]), torch.cat([y, y[:1]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = {
            "noise_multiplier": 0.0,
            "delta": 0.1,
            "steps": 1,
            "batch_size": len(x),
            "clip": 0.5,
        }
        private = dpkfc.make_private(
            model,
            optimizer,
            TensorDataset(x, y),
            geometry=GEOMETRIES[kind](),
            loss=loss_of,
            **settings,
        )
        for batch in private.loader:
            loss_of(model, batch).backward()
            optimizer.step()
        private.detach()
        grads.append([p.grad * len(x) for p in model.parameters()])
        if poison and private.not_private.non_finite == 0:
            pytest.skip("this record has a finite gradient: GroupNorm has made it small")
    for clean, poisoned in zip(*grads, strict=True):
        assert torch.isfinite(poisoned).all()
        assert (poisoned - clean).norm() < 1e-5 * 0.5, "beside the clip, only rounding may differ"


class TestAnOracleSaysSo:
    """9. A geometry from the private records makes the run report epsilon = inf."""

    def test_epsilon_is_infinite(self) -> None:
        data = images(1)
        with pytest.warns(UserWarning, match="PRIVATE records"):
            oracle = dpkfc.probes.Oracle(data)
        for geometry in (
            dpkfc.KFC(oracle),
            dpkfc.KFC(dpkfc.probes.Hybrid(A=NOISE, G=oracle)),
            dpkfc.Diagonal(oracle),
        ):
            private = train(small_cnn(), data, geometry)
            assert private.epsilon() == math.inf
            assert "inf" in str(private.plan) and "ORACLE" in private.plan.geometry

    def test_it_can_be_compared_at_the_noise_of_a_private_run_but_reports_no_epsilon(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oracle = dpkfc.probes.Oracle(images(1))
        budget = {"noise_multiplier": None, "epsilon": 1.0}
        private = train(small_cnn(), images(1), dpkfc.KFC(oracle), **budget)
        assert private.epsilon() == math.inf
        synthetic = train(small_cnn(), images(1), dpkfc.KFC(NOISE), **budget)
        assert private.plan.noise_multiplier == synthetic.plan.noise_multiplier

    def test_synthetic_geometry_costs_nothing(self) -> None:
        plain = train(small_cnn(), images(1), dpkfc.Identity()).epsilon()
        assert train(small_cnn(), images(1), dpkfc.KFC(NOISE)).epsilon() == plain < math.inf
