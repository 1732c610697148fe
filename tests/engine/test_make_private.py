"""The loop stays plain PyTorch.

Schedulers, groups, autocast, scalers, accumulation, workers, checkpointing.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkfc

RECORDS = 48


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(RECORDS, 6), torch.randint(3, (RECORDS,)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def make(
    model: nn.Module, optimizer: Any = None, dataset: Any = None, **settings: Any
) -> tuple[dpkfc.PrivateRun, Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    defaults: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "steps": 6,
        "batch_size": 12,
        "clip": 0.5,
    }
    defaults |= {"seed": 3, "loss": dpkfc.losses.cross_entropy}
    return dpkfc.make_private(
        model, optimizer, data() if dataset is None else dataset, **{**defaults, **settings}
    ), optimizer


def train(
    private: dpkfc.PrivateRun, model: nn.Module, optimizer: Any, each: Any = lambda: None
) -> Tensor:
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        each()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_without_clipping_and_noise_it_is_ordinary_training() -> None:
    """Adam with a schedule and parameter groups, on full batches.

    The same weights as without dpkfc.
    """
    outcomes = []
    for private_run in (True, False):
        model = network()
        groups = [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": [*model[1].parameters(), *model[3].parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.05, 0.02], total_steps=10
        )
        if private_run:
            private, _ = make(
                model, optimizer, noise_multiplier=0.0, clip=1e9, batch_size=RECORDS, steps=8
            )
            outcomes.append(train(private, model, optimizer, scheduler.step))
        else:
            for _ in range(8):
                optimizer.zero_grad()
                F.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
                optimizer.step()
                scheduler.step()
            outcomes.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sum_and_mean_losses_give_the_same_private_gradients(reduction: str) -> None:
    want = train(*_triple(network()))
    model = network()

    def reduced(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    private, optimizer = make(model, options=dpkfc.Options(loss_reduction=reduction), loss=reduced)
    for batch in private.loader:
        reduced(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in model.parameters()]), want, rtol=1e-4, atol=1e-5
    )


def _triple(model: nn.Module, **settings: Any) -> tuple[Any, ...]:
    private, optimizer = make(model, **settings)
    return private, model, optimizer


def test_zero_grad_may_come_first_or_not_at_all() -> None:
    want = train(*_triple(network()))
    for first in (True, False):
        model = network()
        private, optimizer = make(model)
        for x, y in private.loader:
            if first:
                optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), want)


def in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def test_autocast_to_bfloat16() -> None:
    want = train(*_triple(network()))
    model = network()
    private, optimizer = make(model, loss=in_bfloat16)
    for batch in private.loader:
        in_bfloat16(model, batch).backward()
        optimizer.step()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.zero_grad()
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in model.parameters()]), want, rtol=0.05, atol=0.01
    )


def test_clipping_is_exact_also_when_backward_and_the_next_chunk_run_under_autocast() -> None:
    """A chunk is clipped at the next forward, inside the user's autocast.

    Two equal records add up to 2 C.
    """
    model = nn.Sequential(
        nn.Conv1d(3, 5, 3, padding=1),
        nn.Flatten(),
        nn.Linear(30, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )
    twice = TensorDataset(torch.randn(1, 3, 6).expand(2, 3, 6).clone(), torch.tensor([1, 1]))
    settings = {"noise_multiplier": 0.0, "clip": 1e-4, "steps": 1, "batch_size": 2}
    private, optimizer = make(
        model, dataset=twice, max_physical_batch_size=1, loss=in_bfloat16, **settings
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x, y in private.loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm() * 2
    assert total == pytest.approx(2e-4, rel=1e-5)


def test_a_grad_scaler_is_divided_out_and_never_skips() -> None:
    want = train(*_triple(network()))
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    private, optimizer = make(model, options=dpkfc.Options(grad_scaler=scaler))
    for x, y in private.loader:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert private.steps == 6 and scaler.get_scale() > 1024
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in model.parameters()]), want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[3](
                checkpoint(self.inner[:3], x.requires_grad_(), use_reentrant=reentrant)
            )

    want = train(*_triple(network()))
    model = Checkpointed(network())
    assert torch.equal(train(*_triple(model)), want)


def test_workers_and_collate_function_of_a_loader_are_kept() -> None:
    want = train(*_triple(network()))
    loader = DataLoader(data(), batch_size=12, shuffle=True, num_workers=2)
    model = network()
    private, optimizer = make(model, dataset=loader, batch_size=None)
    torch.testing.assert_close(train(private, model, optimizer), want, rtol=0, atol=0)


def test_a_loop_over_epochs() -> None:
    model = network()
    private, optimizer = make(model, steps=None, epochs=3)
    want = train(*_triple(network(), steps=None, epochs=3))
    passes = 0
    for epoch in private.epochs():
        passes += 1
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert private.steps == 4 * passes
    assert passes == 3 and private.steps == private.plan.steps == 12
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), want)


def test_leaving_the_loop_and_coming_back_goes_on() -> None:
    want = train(*_triple(network(), max_physical_batch_size=5))
    model = network()
    private, optimizer = make(model, max_physical_batch_size=5)
    for stop_after in (2, 1, 4, 100):
        for count, (x, y) in enumerate(private.loader, 1):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if count == stop_after:
                break
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in model.parameters()]), want, rtol=0, atol=0
    )


def test_a_schedule_within_a_split_batch_is_refused_with_the_fix() -> None:
    model = network()
    private, optimizer = make(model, max_physical_batch_size=5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(dpkfc.PrivacyError, match=r"run\.after_step\(scheduler\.step\)"):
        train(private, model, optimizer, scheduler.step)
    assert private.steps == 0


def test_a_schedule_guarded_by_took_step_sees_every_step_once() -> None:
    rates = []
    for chunk in (None, 5):
        model = network()
        private, optimizer = make(model, max_physical_batch_size=chunk)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(
            private,
            model,
            optimizer,
            lambda p=private, s=scheduler: s.step() if p.took_step else None,
        )
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] == pytest.approx([0.1 * 0.9**6])


def test_loader_yields_chunks_of_at_most_the_physical_size() -> None:
    model = network()
    private, optimizer = make(model, max_physical_batch_size=5)
    sizes = []
    for x, y in private.loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert max(sizes) == 5 and len(sizes) > 6 and private.steps == 6


def test_two_backwards_over_one_forward_are_refused() -> None:
    model = network()
    private, _ = make(model)
    x, y = next(iter(private.loader))
    loss = F.cross_entropy(model(x), y)
    (0.25 * loss).backward(retain_graph=True)
    with pytest.raises(dpkfc.PrivacyError, match="Add the losses and call backward once"):
        (0.75 * loss).backward()


def test_evaluation_between_steps_disturbs_nothing() -> None:
    want = train(*_triple(network()))
    model = network()
    private, optimizer = make(model)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(5, 6))
        model(torch.randn(7, 6))  # with grad, never backpropagated

    assert torch.equal(train(private, model, optimizer, evaluate), want)


def test_averaging_the_model_keeps_an_independent_copy() -> None:
    model = network()
    private, optimizer = make(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    train(private, model, optimizer, lambda: average.update_parameters(model))
    with torch.no_grad():
        x = torch.randn(4, 6)
        assert not torch.allclose(average(x), model(x))


def test_a_closure_is_evaluated_once_and_its_gradient_is_private() -> None:
    """As Lightning's automatic optimization steps."""
    model = network()
    private, optimizer = make(model)
    want = train(private, model, optimizer)
    model = network()
    private, optimizer = make(model)
    evaluated = 0

    for x, y in private.loader:

        def closure() -> Tensor:
            nonlocal evaluated
            evaluated += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        returned = optimizer.step(closure)
        assert isinstance(returned, Tensor)
    assert evaluated == private.steps
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), want)


def test_optimizers_that_evaluate_a_closure_several_times_and_second_derivatives_are_refused() -> (
    None
):
    model = network()
    private, optimizer = make(model)
    x, y = next(iter(private.loader))
    with pytest.raises(dpkfc.PrivacyError, match="0 were seen by backward"):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    private.detach()
    private, optimizer = make(model, torch.optim.LBFGS(model.parameters()))
    x, y = next(iter(private.loader))
    with pytest.raises(dpkfc.PrivacyError, match="LBFGS evaluates the loss several times"):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    with pytest.raises(dpkfc.PrivacyError, match="create_graph"):
        F.cross_entropy(model(x), y).backward(create_graph=True)


def test_parameters_added_to_the_optimizer_later_are_refused() -> None:
    model = network()
    private, optimizer = make(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(dpkfc.PrivacyError, match="make_private again"):
        train(private, model, optimizer)
    assert private.epsilon() == 0


def test_make_private_twice_is_refused_until_detached() -> None:
    model = network()
    private, optimizer = make(model)
    with pytest.raises(dpkfc.PrivacyError, match="already private"):
        make(model, optimizer)
    private.detach()
    make(model, optimizer)


def test_a_copy_of_a_private_model_is_an_ordinary_one() -> None:
    model = network()
    make(model)
    copied = copy.deepcopy(model)
    private, optimizer = make(copied)
    train(private, copied, optimizer)
    assert private.epsilon() > 0


def test_a_refused_run_leaves_the_model_as_it_was() -> None:
    model = network()
    for error, settings in (
        (ValueError, {"clip": -1.0}),
        (ValueError, {"delta": None}),
        (TypeError, {"loss": lambda m, b: m(b[0])}),
        (ValueError, {"options": dpkfc.Options(vmap_modules=["nothing"])}),
    ):
        with pytest.raises(error):
            make(model, **settings)
    F.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_failing_forward_leaves_the_model_trainable() -> None:
    model = network()
    private, optimizer = make(model)
    with warnings.catch_warnings(), pytest.raises(RuntimeError):
        warnings.simplefilter("ignore")
        model(torch.randn(4, 5))
    assert all(p.requires_grad for p in model.parameters())
    train(private, model, optimizer)


def test_the_ledger_is_charged_step_by_step_and_closed_by_detach(tmp_path: Any) -> None:
    ledger = dpkfc.Ledger(tmp_path / "privacy.db", dataset="people")
    model = network()
    private, optimizer = make(model, ledger=ledger)
    charges = []
    train(private, model, optimizer, lambda: charges.append(ledger.runs()[0].charged))
    assert charges == [1, 2, 3, 4, 5, 6]
    assert ledger.epsilon(1e-3) == pytest.approx(private.epsilon())
    private.detach()
    assert ledger.runs()[0].closed


def test_a_detached_run_that_stays_open_is_continued_with_other_noise(tmp_path: Any) -> None:
    """As the rounds of a federated client do."""
    ledger = dpkfc.Ledger(tmp_path / "privacy.db", dataset="people")
    model = network()
    first, optimizer = make(model, ledger=ledger)
    for x, y in first.loader.take(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    key = first._key
    first.detach(resumable=True)
    assert not ledger.runs()[0].closed
    second, optimizer = make(model, ledger=ledger)
    second.load_state_dict({**second.state_dict(), "run": first.run_id, "lost_steps": 2})
    assert (second.charged, second.steps) == (2, 0) and second._key != key
    train(second, model, optimizer)
    (run,) = ledger.runs()
    assert run.charged == run.mechanism.steps == 6


def test_a_run_that_does_not_fit_the_budget_is_refused_before_the_first_step(tmp_path: Any) -> None:
    ledger = dpkfc.Ledger(tmp_path / "privacy.db", dataset="people", budget=(0.1, 1e-3))
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    private, optimizer = make(model, ledger=ledger)
    with pytest.raises(dpkfc.PrivacyError, match="allowed"):
        train(private, model, optimizer)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_dropout_is_drawn_once_in_modules_run_under_vmap() -> None:
    """The same mask must act in forward and backward, and differ between samples."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(200))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.weight, 0.5)

    model = nn.Sequential(Dropped())
    private, optimizer = make(
        model,
        dataset=TensorDataset(torch.ones(4, 200)),
        batch_size=4,
        steps=1,
        noise_multiplier=0.0,
        clip=1e9,
        options=dpkfc.Options(check=False),
        loss="unchecked",  # this dropout is on in eval mode too: no two passes agree
    )
    for (x,) in private.loader:
        out = model(x)
        assert not torch.equal(out[0], out[1])
        out.sum(1).mean().backward()
        optimizer.step()
        torch.testing.assert_close(model[0].weight.grad, out.detach().mean(0))
