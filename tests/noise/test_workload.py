"""Workloads against the optimizers they describe, run in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpkfc.noise.sensitivity import MAX_DENSE_STEPS
from dpkfc.noise.workload import Workload

LR = 0.3
N = 30


def cosine(step: int) -> float:
    return 0.5 * (1 + np.cos(np.pi * step / 40))


def path(
    make: Callable[[list[torch.nn.Parameter]], Optimizer],
    gradients: np.ndarray,
    schedule: Callable[[int], float] | None = None,
) -> np.ndarray:
    """θ_1, θ_2, ... from θ_0 = 0, computed by the optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer = make([parameter])
    scheduler = LambdaLR(optimizer, schedule) if schedule else None
    moved = []
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        if scheduler:
            scheduler.step()
        moved.append(parameter.detach().numpy().copy())
    return np.array(moved)


def assert_proportional(got: np.ndarray, want: np.ndarray, factor: float) -> None:
    np.testing.assert_allclose(got, factor * want, rtol=0, atol=1e-11 * np.abs(got).max())


SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.5, "nesterov": True},
    {"weight_decay": 0.2},
    {"momentum": 0.9, "weight_decay": 0.001},
    {"momentum": 0.9, "weight_decay": 0.5},  # complex roots
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
]
ids = [", ".join(f"{k} {v}" for k, v in case.items()) or "plain" for case in SGD]


@pytest.mark.parametrize("kwargs", SGD, ids=ids)
def test_sgd_is_what_torch_does(kwargs: dict[str, Any]) -> None:
    """θ = -η A x. A is scaled to a first coefficient of 1, which is 1 + β with Nesterov."""
    x = np.random.default_rng(0).normal(size=(N, 5))
    theta = path(lambda p: torch.optim.SGD(p, lr=LR, **kwargs), x)
    workload = Workload.sgd(lr=LR, **kwargs)
    a = workload.materialize(N)
    scale = 1 + kwargs["momentum"] if kwargs.get("nesterov") else 1.0
    assert_proportional(theta, a @ x, -LR * scale)
    assert np.array_equal(workload.coefficients(N), a[:, 0]) and a[0, 0] == 1


@given(st.floats(0, 0.99), st.floats(0, 2), st.floats(0.01, 0.45), st.booleans())
@settings(max_examples=25, deadline=None)
def test_sgd_is_what_torch_does_at_any_setting(
    momentum: float, decay: float, lr: float, nesterov: bool
) -> None:
    nesterov = nesterov and momentum > 0  # torch's own condition
    kwargs = {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    theta = path(lambda p: torch.optim.SGD(p, lr=lr, **kwargs), np.eye(N))
    a = Workload.sgd(lr=lr, **kwargs).materialize(N)
    assert_proportional(theta, a, -lr * (1 + momentum if nesterov else 1))


@pytest.mark.parametrize("kwargs", SGD, ids=ids)
def test_a_schedule_is_what_lambda_lr_does(kwargs: dict[str, Any]) -> None:
    x = np.random.default_rng(1).normal(size=(N, 5))
    theta = path(lambda p: torch.optim.SGD(p, lr=LR, **kwargs), x, cosine)
    as_function = Workload.sgd(lr=LR, lr_schedule=cosine, **kwargs).materialize(N)
    as_list = Workload.sgd(
        lr=LR, lr_schedule=[cosine(t) for t in range(N + 3)], **kwargs
    ).materialize(N)
    moved = as_function @ x
    factor = float((theta * moved).sum() / (moved * moved).sum())
    assert factor < 0
    assert_proportional(theta, moved, factor)
    assert np.array_equal(as_function, as_list)
    assert np.array_equal(
        as_function[:7, :7], Workload.sgd(lr=LR, lr_schedule=cosine, **kwargs).materialize(7)
    )


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "decoupled"])
@pytest.mark.parametrize("kwargs", SGD, ids=ids)
def test_a_constant_schedule_is_no_schedule(kwargs: dict[str, Any], coupled: bool) -> None:
    without = Workload.sgd(lr=LR, coupled=coupled, **kwargs).materialize(N)
    constant = Workload.sgd(
        lr=LR, coupled=coupled, lr_schedule=lambda t: 1.0, **kwargs
    ).materialize(N)
    np.testing.assert_allclose(constant, without, rtol=1e-10)


@pytest.mark.parametrize("schedule", [None, cosine], ids=["constant rate", "cosine"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_decoupled_decay_is_its_recursion(
    momentum: float, decay: float, nesterov: bool, schedule: Callable[[int], float] | None
) -> None:
    """m_t = β m_{t-1} + x_t,  θ_t = (1 - ηλ) θ_{t-1} - η m_t; Nesterov: x_t + β m_t for m_t."""
    x = np.random.default_rng(2).normal(size=N)
    theta, m, moved = 0.0, 0.0, []
    for t in range(N):
        rate = LR * (schedule(t) if schedule else 1)
        m = momentum * m + x[t]
        theta = (1 - rate * decay) * theta - rate * (x[t] + momentum * m if nesterov else m)
        moved.append(theta)
    a = Workload.sgd(
        momentum,
        decay,
        lr=LR,
        coupled=False,
        nesterov=nesterov,
        lr_schedule=schedule and (lambda t: schedule(t)),
    ).materialize(N)
    got = a @ x
    assert_proportional(np.array(moved), got, moved[0] / got[0])


def test_the_workload_of_the_bsr_paper() -> None:
    """a_k = (α^{k+1} - β^{k+1}) / (α - β)."""
    alpha, beta, k = 0.999, 0.9, np.arange(1, N + 1)
    a = Workload.sgd(beta, 1 - alpha, coupled=False).coefficients(N)
    np.testing.assert_allclose(a, (alpha**k - beta**k) / (alpha - beta), rtol=1e-12)


# The workload of an optimizer


def response(make: Callable[[list[torch.nn.Parameter]], Optimizer]) -> np.ndarray:
    """The response of θ to the second gradient alone; dampening treats the first differently."""
    column = path(make, np.eye(N))[1:, 1]
    return np.asarray(column / column[0])


@pytest.mark.parametrize(
    "kwargs",
    [
        *SGD,
        {"momentum": 0.9, "dampening": 0.9},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.0},
        {"momentum": 0.9, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "foreach": True},
        {"momentum": 0.9, "fused": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("lr", [LR, torch.tensor(LR)], ids=["number", "tensor"])
def test_of_sgd(lr: float | torch.Tensor, kwargs: dict[str, Any]) -> None:
    if isinstance(lr, torch.Tensor) and kwargs.get("foreach"):
        pytest.skip("torch refuses it")
    workload = Workload.of(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=lr, **kwargs))
    want = response(lambda p: torch.optim.SGD(p, lr=float(lr), **kwargs))
    np.testing.assert_allclose(workload.coefficients(N - 1), want, rtol=1e-9, atol=1e-9)


def test_the_largest_group_decides() -> None:
    small, large = (
        torch.nn.Parameter(torch.ones(3)),
        [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)],
    )
    slow = {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True}
    for groups in (
        [{"params": [small]}, {"params": large, **slow}],
        [{"params": large, **slow}, {"params": [small]}],
    ):
        workload = Workload.of(torch.optim.SGD(groups, lr=1.0, momentum=0.9))
        want = response(lambda p: torch.optim.SGD(p, **slow))
        np.testing.assert_allclose(workload.coefficients(N - 1), want, rtol=1e-9)


def test_the_learning_rate_counts_as_it_is_without_a_schedule() -> None:
    """Weight decay is proportional to it: half the rate, half the decay per step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=LR, weight_decay=0.4)
    optimizer.param_groups[0]["lr"] = LR / 2
    want = response(lambda p: torch.optim.SGD(p, lr=LR / 2, weight_decay=0.4))
    np.testing.assert_allclose(Workload.of(optimizer).coefficients(N - 1), want, rtol=1e-9)
    LambdaLR(optimizer, lambda step: 0.1)
    np.testing.assert_allclose(Workload.of(optimizer).coefficients(N - 1), want, rtol=1e-9)


def test_a_warm_up_from_zero_is_not_mistaken_for_an_adaptive_optimizer() -> None:
    optimizer = torch.optim.SGD(
        [torch.nn.Parameter(torch.ones(3))], lr=LR, momentum=0.9, weight_decay=0.1
    )
    LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    assert optimizer.param_groups[0]["lr"] == 0
    want = response(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1))
    np.testing.assert_allclose(Workload.of(optimizer).coefficients(N - 1), want, rtol=1e-9)


ADAPTIVE = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
]


@pytest.mark.parametrize("kind", ADAPTIVE, ids=lambda kind: kind.__name__)
def test_adaptive_optimizers_are_refused_by_name(kind: type[Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=rf"^{kind.__name__} is not linear in the gradients"):
        Workload.of(optimizer)


class TwoGradients(torch.optim.SGD):
    """θ_t = θ_{t-1} - η (x_t + x_{t-1} / 2): linear, but not SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", torch.zeros_like(p))
                p.sub_(group["lr"] * (p.grad + last / 2))
                self.state[p]["last"] = p.grad.clone()


class Fading(torch.optim.SGD):
    """A built-in learning rate 1/t: linear, but not time-invariant."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["t"] = self.state[p].get("t", 0) + 1
                p.sub_(p.grad / self.state[p]["t"])


class NeedsMatrices(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("matrices only")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            TwoGradients,
            r"TwoGradients has a different impulse response from SGD.*Workload\.toeplitz",
        ),
        (Fading, r"Fading is not linear"),
        (NeedsMatrices, r"NeedsMatrices could not be tried on a single number \(matrices only\)"),
    ],
)
def test_other_optimizers_are_refused_with_a_way_out(kind: type[Optimizer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.of(kind([torch.nn.Parameter(torch.ones(3))], lr=LR))  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_users_optimizer_is_left_alone(kind: type[Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.arange(3.0)), torch.nn.Parameter(torch.ones(2))]
    settings_ = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(parameters, lr=LR, **settings_)  # type: ignore[call-arg]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    values, state = [p.detach().clone() for p in parameters], copy.deepcopy(optimizer.state_dict())
    try:
        Workload.of(optimizer)
    except ValueError:
        assert kind is torch.optim.Adam
    after = optimizer.state_dict()
    assert (
        after["param_groups"] == state["param_groups"]
        and after["state"].keys() == state["state"].keys()
    )
    for index, entries in state["state"].items():
        for name, value in entries.items():
            assert torch.equal(
                torch.as_tensor(after["state"][index][name]), torch.as_tensor(value)
            ), name
    for p, value in zip(parameters, values, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, torch.ones_like(p))
    assert optimizer.param_groups[0]["params"] == parameters


# Given workloads


def test_given_coefficients() -> None:
    c = [2.0, -1.0, 0.5, 3.0]
    workload = Workload.toeplitz(c)
    want = np.array([[2, 0, 0], [-1, 2, 0], [0.5, -1, 2]])
    assert np.array_equal(workload.materialize(3), want) and np.array_equal(
        workload.coefficients(4), c
    )
    with pytest.raises(ValueError, match="given for 4 steps; the run has 5"):
        workload.coefficients(5)


def test_given_matrix() -> None:
    matrix = np.tril(np.random.default_rng(0).normal(size=(5, 5)))
    workload = Workload.linear(matrix)
    assert np.array_equal(workload.materialize(5), matrix)
    assert np.array_equal(workload.materialize(3), matrix[:3, :3])
    with pytest.raises(ValueError, match="given for 5 steps; the run has 6"):
        workload.materialize(6)
    with pytest.raises(ValueError, match=r"given matrix\) is not Toeplitz"):
        workload.generating_function()
    with pytest.raises(ValueError, match="not Toeplitz"):
        workload.coefficients(3)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5, float("nan")])
def test_bad_momentum(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"momentum=.*must lie in \[0, 1\)"):
        Workload.sgd(momentum)


@pytest.mark.parametrize(
    ("lr", "decay"), [(0, 0), (-1, 0), (1, -0.1), (1, 1), (2, 0.5), (float("nan"), 0)]
)
def test_bad_rates(lr: float, decay: float) -> None:
    with pytest.raises(
        ValueError,
        match=f"lr={lr}, weight_decay={decay}: need lr > 0 and 0 <= lr . weight_decay < 1",
    ):
        Workload.sgd(0.9, decay, lr=lr)


@pytest.mark.parametrize(
    "coefficients", [[], [0.0, 1.0], [-1.0], [1.0, float("nan")], [1.0, float("inf")]]
)
def test_bad_coefficients(coefficients: list[float]) -> None:
    with pytest.raises(ValueError, match="must be finite numbers, the first of them positive"):
        Workload.toeplitz(coefficients)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones(3), "square lower-triangular"),
        (np.tril(np.ones((3, 2))), "square lower-triangular"),
        (np.ones((3, 3)), "square lower-triangular"),
        (np.diag([1.0, 0.0, 1.0]), "without zeros on its diagonal"),
        (np.diag([1.0, float("inf")]), "finite"),
    ],
)
def test_bad_matrix(matrix: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.linear(matrix)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([1.0] * 4, "lr_schedule has 4 factors; the run has 5 steps"),
        ([1, 1, -1, 1, 1], "finite factors, 0 or larger"),
        ([1, 1, float("nan"), 1, 1], "finite factors"),
        ([0.0] * 5, "not all 0"),
        (lambda t: float("inf"), "finite factors"),
    ],
)
def test_bad_schedule(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.sgd(0.9, lr_schedule=schedule).materialize(5)


def test_no_huge_matrix_is_made() -> None:
    with pytest.raises(
        ValueError, match=f"a matrix of {MAX_DENSE_STEPS + 1} x {MAX_DENSE_STEPS + 1}.*schedule"
    ):
        Workload.sgd(0.9, lr_schedule=cosine).materialize(MAX_DENSE_STEPS + 1)
