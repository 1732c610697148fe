"""The preset: the learning rate yields the promised noise in any run, and no record is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.app.models import digits_cnn, paper_cnn
from dpkfc.planning import recipe as presets

PLAIN = dpkfc.noise.Independent()


def model_of(outputs: int = 50, inputs: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    "noise", [dpkfc.noise.Independent(), dpkfc.noise.BandedToeplitz(bands=4)], ids=str
)
@pytest.mark.parametrize(("records", "batch_size", "epsilon"), [(2000, 100, 0.5), (2000, 50, 8.0)])
def test_noise_moves_a_units_weights_by_the_given_length(
    records: int, batch_size: int, epsilon: float, noise: Any
) -> None:
    """A run on records without gradient: the weights are pure noise, of the promised length.

    The root mean square over the steps and units, for 50 units with 41 weights: 2050 normal numbers
    per step, so the length is known to within a few percent; 2 % of it comes from the chi
    distribution.
    """
    model = model_of()
    recipe = dpkfc.recipe(
        model,
        records=records,
        epsilon=epsilon,
        delta=1e-5,
        epochs=2,
        batch_size=batch_size,
        noise_length=3.0,
        noise=noise,
    )
    optimizer = recipe.optimizer(model)
    start = [w.detach().clone() for w in model.parameters()]
    data = TensorDataset(torch.zeros(records, 40))

    def nothing(model: nn.Module, batch: Any) -> Tensor:
        return (0 * model(batch[0])).sum()

    run = dpkfc.make_private(
        model,
        optimizer,
        data,
        **recipe.arguments,
        seed=1,
        options=dpkfc.Options(check=False),
        loss=nothing,
    )
    squares = []
    for batch in run.loader:
        nothing(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = torch.cat(
            [
                (w - s).detach().reshape(50, -1)
                for w, s in zip(model.parameters(), start, strict=True)
            ],
            1,
        )
        squares.append(moved.square().sum(1).mean())
    length = float(torch.stack(squares).mean().sqrt())
    # few steps of a random walk: the mean over the steps is itself random
    assert length == pytest.approx(3.0, rel=0.15)


def test_less_noise_larger_rate() -> None:
    """With more budget, or noise that cancels, the same length of noise allows a larger step."""
    run: dict[str, Any] = {"records": 2000, "delta": 1e-5, "epochs": 4, "batch_size": 500}
    tight, plain = (dpkfc.recipe(model_of(), epsilon=e, noise=PLAIN, **run).lr for e in (0.5, 8.0))
    free = dpkfc.recipe(model_of(), epsilon=8.0, **run)
    assert tight < plain < free.lr
    assert isinstance(free.arguments["noise"], dpkfc.noise.BandedToeplitz)


@pytest.mark.parametrize(
    ("model", "units", "parameters"),
    [
        (nn.Linear(7, 3), 3, 24),
        (nn.Linear(7, 3, bias=False), 3, 21),
        (digits_cnn(), 16 + 32 + 10, None),
        (paper_cnn(), 16 + 32 + 128 + 10, None),
        (nn.LayerNorm(4), 1, 8),
    ],
)
def test_units_are_rows_of_weight_matrices(
    model: nn.Module, units: int, parameters: int | None
) -> None:
    expected = sum(p.numel() for p in model.parameters()) if parameters is None else parameters
    assert presets.count_units_and_parameters(model) == (units, expected)


def test_frozen_parts_are_neither_counted_nor_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    assert presets.count_units_and_parameters(model) == (2, 12)
    recipe = dpkfc.recipe(
        model,
        records=500,
        epsilon=1.0,
        epochs=1,
        batch_size=100,
        probe=dpkfc.probes.Tabular(6),
        noise=PLAIN,
    )
    assert [p.shape for group in recipe.optimizer(model).param_groups for p in group["params"]] == [
        (2, 5),
        (2,),
    ]


def test_the_average_is_the_mean_at_first_and_the_last_tenth_later() -> None:
    model = nn.Linear(1, 1, bias=False)
    recipe = dpkfc.recipe(model, records=10_000, epsilon=1.0, epochs=1, batch_size=100, noise=PLAIN)
    assert recipe.decay == pytest.approx(0.9)
    averaged, expected = recipe.averaged(model), 0.0
    for step in range(1, 41):
        with torch.no_grad():
            model.weight.fill_(float(step))
        averaged.update_parameters(model)
        expected += (step - expected) * max(0.1, 1 / step)
        assert float(averaged.module.weight.detach()) == pytest.approx(expected, rel=1e-5)


def test_defaults() -> None:
    recipe = dpkfc.recipe(model_of(), records=60_000, epsilon=1.0, noise=PLAIN)
    arguments = recipe.arguments
    assert arguments["delta"] == pytest.approx(0.1 / 60_000) and arguments["clip"] == 1.0
    assert (arguments["batch_size"], arguments["steps"], arguments["geometry"].every) == (
        1125,
        800,
        40,
    )
    text = str(recipe)
    for word in ("batch size", "learning rate", "averaged weights", "no private data"):
        assert word in text


@pytest.mark.parametrize("records", [1, 7, 50])
def test_few_records(records: int) -> None:
    recipe = dpkfc.recipe(model_of(), records=records, epsilon=3.0, noise=PLAIN)
    assert 1 <= recipe.arguments["batch_size"] <= records and 0 < recipe.lr < math.inf


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"records": 0}, ValueError, "records"),
        ({"records": 2.5}, TypeError, "records"),
        ({"noise_length": 0.0}, ValueError, "noise_length"),
        ({"noise_length": float("nan")}, ValueError, "noise_length"),
        ({"epsilon": -1.0}, ValueError, "epsilon"),
        ({"epochs": 0.0}, ValueError, "epochs"),
        ({"batch_size": 5000}, ValueError, "exceeds the 100 records"),
        ({"probe": dpkfc.probes.Tabular(40), "geometry": dpkfc.Identity()}, ValueError, "not both"),
        ({"model": "resnet"}, TypeError, "model must be a torch.nn.Module, not str"),
        ({"model": nn.LazyLinear(3)}, ValueError, "parameter 'weight' is not initialised"),
        ({"model": nn.Flatten()}, ValueError, "no trainable parameter"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": model_of(), "records": 100, "epsilon": 1.0, "noise": PLAIN, **wrong}
    with pytest.raises(error, match=message):
        dpkfc.recipe(**arguments)
