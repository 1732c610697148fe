"""Capture is compared with the plain model before any budget is spent.

What cannot be captured module by module runs under vmap, exactly; everything else is refused by
name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.per_sample.base import LayerCall
from dpkfc.per_sample.capture import GradAccumulator
from oracle import reference_grads, reference_norms, reference_sum, relative_error

RECORDS, WIDTH = 6, 5


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).cos().flatten(1).sum(1).mean()


def begin(model: nn.Module, x: Tensor, **settings: Any) -> dpkfc.PrivateRun:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    defaults = {"loss": loss_of, "noise_multiplier": 0.0, "delta": 1e-5, "steps": 1, "clip": 1.0}
    return dpkfc.make_private(
        model, optimizer, TensorDataset(x), batch_size=len(x), **{**defaults, **settings}
    )


def train_one_step(model: nn.Module, run: dpkfc.PrivateRun) -> None:
    for batch in run.loader:
        loss_of(model, batch).backward()
        run.optimizer.step()
    run.detach()


def assert_exact(model: nn.Module, x: Tensor, vmap_modules: tuple[str, ...] | None = None) -> None:
    """The clipped sum is that of one autograd pass per record of an untouched copy."""
    grads = reference_grads(copy.deepcopy(model), loss_of, [x], len(x))
    clip = float(reference_norms(grads).median())
    run = begin(model, x, clip=clip)
    if vmap_modules is not None:
        assert run.vmap_modules == vmap_modules
    train_one_step(model, run)
    for name, want in reference_sum(grads, clip).items():
        got = model.get_parameter(name).grad
        assert got is not None and relative_error(got * len(x), want) < 1e-5, name


class RelativePositions(nn.Module):
    """Attention with a learned table that is looked up without a batch dimension, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.bias = nn.Linear(WIDTH, WIDTH), nn.Embedding(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.bias(places[:, None] - places[None, :] + 32).squeeze(-1)
        return (self.query(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x


class ReadsWeight(nn.Module):
    """Reads the weight of a layer instead of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight + self.layer.bias


class ReZero(nn.Module):
    """A block with a scalar of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.layer(x).tanh()


class Gate(nn.Module):
    """A leaf that owns a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


class Temperature(nn.Module):
    """The model's own scalar, in a model that does not run under vmap."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.scale = nn.Sequential(*layers), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        if bool(out.isnan().any()):  # depends on values, which vmap refuses
            return out
        return out * self.scale.exp()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class TestExact:
    @pytest.mark.parametrize("length", [3, 4, 6, 8, 12], ids=lambda n: f"length {n}")
    def test_positions_that_all_samples_share(self, length: int) -> None:
        """Also where the length is a multiple of the records in the trial, or in the step."""
        model = nn.Sequential(linear(), RelativePositions(), linear())
        assert_exact(model, torch.randn(RECORDS, length, WIDTH), ("1",))

    def test_blocks_that_fail_alike_are_found_at_once(self, monkeypatch: Any) -> None:
        trials = []
        check = dpkfc.engine.make_private.check_loss
        monkeypatch.setattr(
            dpkfc.engine.make_private, "check_loss", lambda *a: trials.append(a) or check(*a)
        )
        model = nn.Sequential(*(RelativePositions() for _ in range(5)))
        run = begin(model, torch.randn(4, 3, WIDTH))
        assert run.vmap_modules == ("0", "1", "2", "3", "4")
        assert len(trials) == 2

    def test_a_weight_that_another_module_reads(self) -> None:
        model = nn.Sequential(linear(), ReadsWeight(), linear())
        assert_exact(model, torch.randn(RECORDS, WIDTH), ("1",))

    @pytest.mark.parametrize("build", [ReZero, Gate])
    @pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH)], ids=["rows", "tokens"])
    def test_scalars_of_blocks_and_leaves(
        self, build: Callable[[], nn.Module], shape: tuple[int, ...]
    ) -> None:
        assert_exact(nn.Sequential(linear(), build()), torch.randn(RECORDS, *shape), ())

    def test_a_scalar_of_the_model(self) -> None:
        assert_exact(Temperature(linear()), torch.randn(RECORDS, WIDTH))

    def test_a_frozen_scalar_does_not_matter(self) -> None:
        model = Temperature(linear())
        model.scale.requires_grad_(False)
        x = torch.randn(RECORDS, 3, WIDTH)
        grads = reference_grads(copy.deepcopy(model), loss_of, [x], RECORDS)
        run = begin(model, x, clip=1e3)
        train_one_step(model, run)
        for name, want in reference_sum(grads, 1e3).items():
            assert relative_error(model.get_parameter(name).grad * RECORDS, want) < 1e-5

    def test_a_shared_argument_with_as_many_rows_as_the_batch(self) -> None:
        """The trial has other batch sizes: the module remembers what its samples share."""

        class Scores(Gate):
            def forward(self, x: Tensor, table: Tensor) -> Tensor:
                return x.unsqueeze(1) * self.gate * table

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.scores = linear(), Scores()
                self.register_buffer("table", torch.randn(RECORDS, WIDTH))

            def forward(self, x: Tensor) -> Tensor:
                return self.scores(self.layer(x), self.table)

        assert_exact(Model(), torch.randn(RECORDS, WIDTH))


class TestRefused:
    def test_a_module_that_computes_something_else_under_vmap(self) -> None:
        class BatchSize(Gate):
            def forward(self, x: Tensor) -> Tensor:
                return x * self.gate * len(x) ** 0.5

        model = nn.Sequential(linear(), nn.Sequential(BatchSize(), nn.Tanh()))
        with pytest.raises(dpkfc.PrivacyError, match=r"'1.0' \(BatchSize\) computes something"):
            begin(model, torch.randn(RECORDS, WIDTH))
        run = begin(model, torch.randn(RECORDS, WIDTH), loss="unchecked")
        with pytest.raises(dpkfc.PrivacyError, match=r"'1.0' \(BatchSize\) computes something"):
            train_one_step(model, run)
        assert run.epsilon() == 0

    @pytest.mark.parametrize("share", [0.0, 0.99], ids=["lost", "one percent too small"])
    def test_gradients_that_do_not_add_up(
        self, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every other way to notice is blind to it: all records lose the same part."""
        receive = GradAccumulator.receive

        def lossy(self: GradAccumulator, call: LayerCall) -> None:
            if call.hooked.name == "1":
                call.backprops = call.backprops * share
            receive(self, call)

        monkeypatch.setattr(GradAccumulator, "receive", lossy)
        model = nn.Sequential(linear(), linear())
        with pytest.raises(dpkfc.PrivacyError, match=r"'1\.weight', '1\.bias' do not add up"):
            begin(model, torch.randn(RECORDS, WIDTH))

    def test_a_scalar_that_is_not_used_sample_by_sample(self) -> None:
        """[batch, 1] would scale the tokens, silently where there are as many as records."""
        model = Temperature(linear())
        for length in (3, 4, 2):
            with pytest.raises(dpkfc.PrivacyError, match="Temperature.*does not run under"):
                begin(model, torch.randn(4, length, WIDTH))

    def test_a_container_parameter_that_is_unfrozen_later(self) -> None:
        model = Temperature(linear())
        model.scale.requires_grad_(False)
        run = begin(model, torch.randn(RECORDS, WIDTH), loss="unchecked")
        model.scale.requires_grad_(True)
        with pytest.raises(dpkfc.PrivacyError, match="'scale' is trained, but was frozen"):
            train_one_step(model, run)
        assert model.scale.grad is None and run.epsilon() == 0

    @pytest.mark.parametrize("loss", ["declared", "unchecked"])
    def test_a_model_that_fails_also_without_privacy(self, loss: str) -> None:
        model = nn.Sequential(linear(), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH + 1, 2)))
        with pytest.raises(ValueError, match=r"'1\.1' \(Linear\) fails on a batch.*cannot be mult"):
            settings = {} if loss == "declared" else {"loss": "unchecked"}
            train_one_step(model, begin(model, torch.randn(RECORDS, WIDTH), **settings))

    def test_a_loss_that_fails_also_without_privacy(self) -> None:
        def fails(model: nn.Module, batch: list[Tensor]) -> Tensor:
            return (model(batch[0]) @ torch.ones(WIDTH + 1)).mean()

        with pytest.raises(ValueError, match="the loss, or its backward pass, fails.*RuntimeError"):
            begin(nn.Sequential(linear()), torch.randn(RECORDS, WIDTH), loss=fails)

    def test_a_model_that_fails_only_under_capture(self) -> None:
        class NeedsWeight(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.token, self.layer = nn.Parameter(torch.ones(1, WIDTH)), linear()

            def forward(self, x: Tensor) -> Tensor:
                if len(self.token) != 1:
                    raise RuntimeError("one token expected")
                out: Tensor = self.layer(x + self.token)
                return out if bool(out.isfinite().all()) else x

        with pytest.raises(
            dpkfc.PrivacyError, match=r"'the model' \(NeedsWeight\) fails.*although.*one token"
        ):
            begin(NeedsWeight(), torch.randn(RECORDS, WIDTH))

    def test_hooks_are_removed_after_a_refusal(self) -> None:
        model = Temperature(linear())
        x = torch.randn(4, 3, WIDTH)
        with pytest.raises(dpkfc.PrivacyError):
            begin(model, x)
        loss_of(model, [x]).backward()
        assert all(p.grad is not None for p in model.parameters())
