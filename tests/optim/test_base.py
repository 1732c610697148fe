"""The protocols by which an optimizer takes part in a run."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from dpkfc.optim import DiSK, DPAdamBC
from dpkfc.optim.base import KeepsIterate, NoiseAware, RunAware


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def test_the_optimizers_of_the_package_follow_the_protocols() -> None:
    adam = DPAdamBC([parameter()])
    disk = DiSK(torch.optim.SGD([parameter()], lr=0.1))
    plain = torch.optim.SGD([parameter()], lr=0.1)
    assert isinstance(adam, NoiseAware) and not isinstance(adam, RunAware)
    assert isinstance(disk, NoiseAware) and isinstance(disk, RunAware)
    assert isinstance(disk, KeepsIterate) and not isinstance(adam, KeepsIterate)
    assert not isinstance(plain, NoiseAware | RunAware | KeepsIterate)


def test_two_gradients_are_computed_within_the_context_of_the_run() -> None:
    p = parameter()
    disk = DiSK(torch.optim.SGD([p], lr=0.1), kappa=0.5, gamma=0.5)
    events: list[str] = []

    @contextmanager
    def accumulate_per_sample():  # type: ignore[no-untyped-def]
        events.append("enter")
        yield
        events.append("exit")

    def closure() -> torch.Tensor:
        events.append("loss")
        return p.square().sum()

    disk.bind_run(accumulate_per_sample)
    disk.backward(closure)
    assert events == ["enter", "loss", "loss", "exit"]


def test_the_filter_passes_on_what_is_left_of_the_noise() -> None:
    adam = DPAdamBC([parameter()])
    disk = DiSK(adam, kappa=0.5)
    disk.set_noise_variance(0.3, "")
    assert adam.param_groups[0]["noise_variance"] == 0.3 * 0.5 / 1.5
