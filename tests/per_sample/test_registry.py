"""Layers that a user registers: exact where the adapter is right, refused where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.per_sample import registry
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.registry import KroneckerForm, LayerAdapter, LayerCall, register_layer
from oracle import reference_grads, reference_norms

RECORDS, FEATURES = 24, 5


class Square(nn.Module):
    """A square linear layer without bias; nothing but its adapter says how it is oriented."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, FEATURES))
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.T)


@pytest.fixture(autouse=True)
def _registered_for_one_test() -> Iterator[None]:
    before = dict(registry._adapters)
    yield
    registry._adapters.clear()
    registry._adapters.update(before)


def vectors(call: LayerCall) -> tuple[Tensor, Tensor]:
    assert call.activations is not None
    batch = call.batch_size
    a, delta = call.activations, call.backprops
    return a.reshape(batch, -1, a.shape[-1]), delta.reshape(batch, -1, delta.shape[-1])


def scaled_linear(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    a, delta = vectors(call)
    module = call.module
    assert isinstance(module, ScaledLinear)
    weight = torch.einsum("bto,bti->boi", delta * module.scale, a)
    scale = (delta * (a @ module.weight.T)).sum(1)
    grads = {("weight",): DenseGrad([weight]), ("scale",): DenseGrad([scale])}
    return {names: grad for names, grad in grads.items() if names[0] in call.params}


def square(transposed: bool = False, part: float = 1.0) -> Callable[[LayerCall], Any]:
    def grads(call: LayerCall) -> dict[tuple[str, ...], Any]:
        a, delta = vectors(call)
        return {("weight",): OuterProductGrad(delta * part, a, transposed=transposed)}

    return grads


SQUARE_FORM = KroneckerForm(
    lambda module: (1, FEATURES, FEATURES),
    # type: ignore[arg-type, return-value]
    lambda call: tuple(x.unsqueeze(2) for x in vectors(call)),
)


def network(layer: Callable[[], nn.Module], outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, FEATURES), nn.Tanh(), layer(), nn.Tanh(), nn.Linear(outputs, 2)
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (RECORDS,), generator=generator)
    return TensorDataset(torch.randn(RECORDS, 3, generator=generator), labels)


def train(model: nn.Module, **settings: Any) -> dpkfc.PrivateRun:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 4, "batch_size": 8}
    defaults |= {"loss": dpkfc.losses.cross_entropy, "seed": 0}
    run = dpkfc.make_private(model, optimizer, data(), **{**defaults, **settings})
    try:
        for x, y in run.loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        run.detach()
    return run


@pytest.mark.parametrize("positions", [(), (6,)], ids=["one position", "six positions"])
def test_a_registered_layer_is_captured_by_its_adapter_and_exact(
    positions: tuple[int, ...],
) -> None:
    seen: list[int] = []

    def watched(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
        seen.append(call.batch_size)
        return scaled_linear(call)

    register_layer(ScaledLinear, LayerAdapter(watched, params=("weight", "scale")))
    model = network(ScaledLinear, 4)
    x = torch.randn(7, *positions, 3)
    capture = GradientCapture(model)
    with capture.accumulating() as grads:
        model(x).square().flatten(1).sum(1).mean().backward()
    captured = grads.take()
    capture.remove()
    assert seen == [7] and captured.squared_norms is not None

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().flatten(1).sum(1).mean()

    want = reference_norms(reference_grads(model, loss, x, 7))
    torch.testing.assert_close(
        captured.squared_norms.double().sqrt() * 7, want, rtol=1e-4, atol=1e-6
    )


def test_training_gives_the_weights_of_the_vmap_path() -> None:
    plain = network(ScaledLinear, 4)
    train(plain, noise_multiplier=0.0)
    register_layer(ScaledLinear, LayerAdapter(scaled_linear, params=("weight", "scale")))
    fast = network(ScaledLinear, 4)
    train(fast, noise_multiplier=0.0)
    for one, other in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_kfc_sees_a_layer_with_a_kronecker_form() -> None:
    register_layer(Square, LayerAdapter(square(), params=("weight",), kronecker=SQUARE_FORM))
    geometry = dpkfc.KFC(dpkfc.probes.Tabular(3, classes=2), factors="AG", every=2)
    run = train(network(Square, FEATURES), geometry=geometry)
    assert run.steps == 4 and ("2.weight",) in geometry.spectra


def wrong_bias(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    grads = scaled_linear(call)
    grads["scale",] = DenseGrad([grads["scale",].grads[0] * 0.5])
    return grads


def one_sample_dropped(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    grads = scaled_linear(call)
    return {names: DenseGrad([g.grads[0].flip(0)]) for names, g in grads.items()}


def one_parameter_missing(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    return {("weight",): scaled_linear(call)["weight",]}


def wrong_shape(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    grads = scaled_linear(call)
    grads["weight",] = DenseGrad([grads["weight",].grads[0].transpose(1, 2)])
    return grads


class TooShort(DenseGrad):
    """A gradient of the user's own class, whose norm is measured too small."""

    def squared_norms(self, preconditioner: Any) -> Tensor:
        return super().squared_norms(preconditioner) * 0.25


def too_short(call: LayerCall) -> dict[tuple[str, ...], DenseGrad]:
    return {names: TooShort(grad.grads) for names, grad in scaled_linear(call).items()}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (wrong_bias, "gradient of scale differs from autograd's"),
        (one_sample_dropped, "differs from autograd's"),
        (one_parameter_missing, "gradients of 1 parameters instead of 2"),
        (wrong_shape, "have the shapes"),
        (too_short, "the norm of weight is"),
    ],
)
@pytest.mark.parametrize("loss", ["declared", "unchecked"])
def test_a_wrong_adapter_is_refused_before_anything_is_released(
    adapter: Any, message: str, loss: str
) -> None:
    register_layer(ScaledLinear, LayerAdapter(adapter, params=("weight", "scale")))
    model = network(ScaledLinear, 4)
    before = [p.detach().clone() for p in model.parameters()]
    settings = {} if loss == "declared" else {"loss": "unchecked"}
    with pytest.raises(dpkfc.PrivacyError, match=message):
        train(model, **settings)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_an_orientation_that_contradicts_the_adapter_is_refused() -> None:
    """Norms by factors and the map of the sum would disagree, and no shape would show it."""
    wrong = LayerAdapter(square(), params=("weight",), kronecker=SQUARE_FORM, transposed=True)
    register_layer(Square, wrong)
    geometry = dpkfc.KFC(dpkfc.probes.Tabular(3, classes=2), factors="AG", every=2, rank=None)
    with pytest.raises(dpkfc.PrivacyError, match="registered adapter of Square"):
        train(network(Square, FEATURES), geometry=geometry)


def test_an_adapter_that_goes_wrong_later_is_found_at_secretly_chosen_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[dpkfc.PrivateRun] = []

    def later_wrong(call: LayerCall) -> dict[tuple[str, ...], Any]:
        wrong = bool(runs) and runs[0].steps >= 3
        return square(part=0.5 if wrong else 1.0)(call)

    monkeypatch.setattr(dpkfc.engine.run, "_secret_steps", lambda steps: {3})
    register_layer(Square, LayerAdapter(later_wrong, params=("weight",)))
    model = network(Square, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = dpkfc.make_private(
        model,
        optimizer,
        data(),
        noise_multiplier=1.0,
        delta=1e-3,
        steps=6,
        batch_size=8,
        loss="unchecked",
    )
    runs.append(run)
    with pytest.raises(dpkfc.PrivacyError, match="registered adapter of Square"):
        for x, y in run.loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.steps == 3


@pytest.mark.parametrize("case", ["bfloat16", "tiny gradients"])
def test_a_wrong_adapter_is_refused_also_where_gradients_are_small(case: str) -> None:
    """The error allowed is relative to the gradients, not to 1."""
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    scale = 1e-2 if case == "bfloat16" else 1e-9

    def step(adapter: Any) -> None:
        registry._adapters.pop(ScaledLinear, None)
        register_layer(ScaledLinear, LayerAdapter(adapter, params=("weight", "scale")))
        model = network(ScaledLinear, 4).to(dtype)
        capture = GradientCapture(model)
        with capture.accumulating():
            (model(torch.randn(8, 3).to(dtype)).float().square().sum() * scale).backward()

    step(scaled_linear)
    for wrong in (wrong_bias, one_sample_dropped, too_short):
        with pytest.raises(dpkfc.PrivacyError, match="registered adapter of ScaledLinear"):
            step(wrong)


def test_a_record_that_is_not_finite_does_not_refuse_a_right_adapter() -> None:
    """Whether an error is raised must not tell of a record."""
    register_layer(ScaledLinear, LayerAdapter(scaled_linear, params=("weight", "scale")))
    model = network(ScaledLinear, 4)
    x = torch.randn(8, 3)
    x[5] = float("nan")
    capture = GradientCapture(model)
    with capture.accumulating() as grads:
        model(x).square().sum().backward()
    norms = grads.take().squared_norms
    assert norms is not None and torch.isfinite(norms).tolist() == [i != 5 for i in range(8)]


@pytest.mark.parametrize("loss", ["declared", "unchecked"])
def test_an_adapter_that_gives_a_forward_trains_also_through_secret_checks(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no (a, δ) to compare with autograd; records are tried for mixing as in any model."""

    def forward(module: Square, params: Any, batch_size: int, args: Any, kwargs: Any) -> Tensor:
        return torch.einsum("bi,boi->bo", args[0], params["weight"])

    monkeypatch.setattr(dpkfc.engine.run, "_secret_steps", lambda steps: {1, 2})
    plain = network(Square, FEATURES)
    train(plain, noise_multiplier=0.0)
    register_layer(Square, LayerAdapter(per_sample_forward=forward, params=("weight",)))
    model = network(Square, FEATURES)
    settings = {} if loss == "declared" else {"loss": "unchecked"}
    assert train(model, noise_multiplier=0.0, **settings).steps == 4
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_forward_that_mixes_records_is_refused() -> None:
    def mixing(module: Square, params: Any, batch_size: int, args: Any, kwargs: Any) -> Tensor:
        centred = args[0] - args[0].mean(0)
        return torch.einsum("bi,boi->bo", centred, params["weight"])

    register_layer(Square, LayerAdapter(per_sample_forward=mixing, params=("weight",)))
    with pytest.raises(
        dpkfc.PrivacyError, match=r"'2' \(Square\) computes something else sample by"
    ):
        train(network(Square, FEATURES))


def test_a_module_of_several_inputs_cannot_be_verified_and_is_refused() -> None:
    class Gated(Square):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
            return (x * gate) @ self.weight.T

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.gated(x, torch.sigmoid(x))  # type: ignore[no-any-return]

    register_layer(Gated, LayerAdapter(square(), params=("weight",)))
    with pytest.raises(dpkfc.PrivacyError, match="function of one tensor"):
        train(network(Outer, FEATURES))


@pytest.mark.parametrize(
    ("kind", "adapter", "error", "message"),
    [
        (3, LayerAdapter(square()), TypeError, "neither a torch.nn.Module class nor its name"),
        (Square, square(), TypeError, "give a LayerAdapter"),
        (nn.Linear, LayerAdapter(square()), ValueError, "already has an adapter"),
        ("transformers.pytorch_utils.Conv1D", LayerAdapter(square()), ValueError, "already has"),
    ],
)
def test_wrong_registrations_are_named(kind: Any, adapter: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        register_layer(kind, adapter)


def test_an_adapter_needs_one_of_its_two_functions() -> None:
    with pytest.raises(ValueError, match="give one of"):
        LayerAdapter()
    with pytest.raises(ValueError, match="give one of"):
        LayerAdapter(square(), per_sample_forward=lambda *call: None)


def test_a_subclass_with_a_forward_of_its_own_does_not_inherit_the_adapter() -> None:
    class Doubled(Square):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    register_layer(Square, LayerAdapter(square(), params=("weight",)))
    capture = GradientCapture(nn.Sequential(Square(), Doubled()))
    assert [hooked.kind for hooked in capture.hooked_modules] == ["layer", "vmap"]
    capture.remove()


def test_built_in_layers_are_not_compared_again_and_registered_ones_are() -> None:
    register_layer(Square, LayerAdapter(square(), params=("weight",)))
    capture = GradientCapture(nn.Sequential(nn.Linear(FEATURES, FEATURES), Square()))
    assert [hooked.verified for hooked in capture.hooked_modules] == [True, False]
    capture.remove()
