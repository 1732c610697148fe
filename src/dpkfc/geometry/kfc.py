"""DP-KFC: a Kronecker-factored geometry from synthetic probes (Algorithm 1). It costs no privacy budget.

For a layer with inputs a and backprops δ the Fisher block is approximated by ``A ⊗ G`` with
``A = E[a aᵀ]`` (the bias is the homogeneous coordinate 1 behind a) and ``G = E[δ δᵀ]``. Each per-sample gradient is
mapped to ``U_G g U_A``, with ``U = (factor + damping)^(-power/2)``, before it is clipped; with power 1 the mapped
gradients of the probes have a covariance close to the identity (Appendix B).

Positions that share a weight (pixels of a convolution, tokens) enter A and G in one of two ways:

* "expand": every position is a sample of its own, ``A = Σ_it a aᵀ / (N T)``, ``G = Σ_it δ δᵀ / N``;
* "reduce": positions are combined first, ``A = Σ_i ā āᵀ / N`` with ā their mean, ``G = Σ_i (Σ_t δ)(Σ_t δ)ᵀ / N``.

Privacy: the maps are functions of the weights at the last refresh, which are results of private steps, and of a
generator with a public seed. Both are independent of the records given the earlier results, so the composition
of steps is that of DP-SGD with the same noise (Proposition 5.6; post-processing).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.geometry.diagonal import DiagonalMap, check_numbers, mean_of, transposed_weights
from dpkfc.geometry.factors import Moment, Spectrum
from dpkfc.geometry.identity import IDENTITY_MAP, LinearMap
from dpkfc.geometry.kronecker import KroneckerMap, kronecker_from
from dpkfc.geometry.probing import Probing, diverged, gradients
from dpkfc.per_sample.layers.conv import Conv, pad_input, patches
from dpkfc.per_sample.layers.linear import as_positions, conv1d_of_transformers, linear
from dpkfc.per_sample.registry import HookedModule
from dpkfc.probes.infer import infer_probe
from dpkfc.probes.probe import Probe
from dpkfc.probes.public import Hybrid
from dpkfc.probes.targets import Loss

if TYPE_CHECKING:
    from dpkfc.geometry.description import Description
    from dpkfc.per_sample.capture import GradientCapture, LayerCall

Names = tuple[str, ...]


@dataclass(eq=False)
class Layer:
    """A layer with a Kronecker form, and what the probes have told about it."""

    names: Names
    unit: HookedModule
    groups: int
    inputs: int  # in a group, without the bias
    outputs: int  # in a group
    bias: bool
    transposed: bool
    a: Moment = field(default_factory=Moment)
    g: Moment = field(default_factory=Moment)
    a_count: int = 0
    g_count: int = 0

    def sizes(self) -> tuple[int, int]:
        return self.inputs + int(self.bias), self.outputs


@dataclass
class Refresh:
    """What a refresh found and what it cost, for `KFC.describe`."""

    step: int
    parameters: Names  # those that are trained, in the model's order
    layer_seconds: dict[Names, float] = field(
        default_factory=dict
    )  # for the factors and roots of a layer
    seconds: float = 0.0  # in all, with the probes' own passes


class KFC:
    """The data-free Kronecker geometry of DP-KFC.

    Args:
        probe: where synthetic inputs come from: `PinkNoise`, `Tokens`, `Tabular`, `PublicData`, `Hybrid`. Inferred
            from what the model declares (`model.input_shape`, a Hugging Face config) if not given.
        every: steps from one refresh to the next (T_freq).
        probes: inputs a refresh draws; by default as many as the probe thinks right.
        damping: π, relative to the mean eigenvalue of each factor.
        stability: γ, absolute.
        power: 0 is DP-SGD, 1 the paper's inverse square root.
        factors: "A" whitens activations only, "AG" backprops as well.
        rank: directions of a factor that are told apart; the others share one scale. None keeps all.
        approx: "expand" or "reduce" (see the module).
        max_factor: a layer with a wider factor is treated like the parameters that have no Kronecker form.
        others: parameters without a Kronecker form: "scalar" scales each so that its entries are on average as
            large as those of the mapped layers; "diagonal" does so entry by entry; None leaves them as they are.
        post: exponent r of a second, milder map after the noise, ``z (A + γ)^(-r/2)``; 0 for none. Free
            post-processing; with noise that is correlated over time it would break the cancellation.
        loss: of the probes: "cross_entropy", "mse", "bce", "masked_lm", "next_token", or a function
            ``loss(output, probes, generator) -> [batch]``.
        chunk: probes in one pass; a quarter of them if not given, so that a refresh needs less memory than a step.
        seed: of the probes. It need not be secret.

    >>> import dpkfc
    >>> geometry = dpkfc.KFC(probe=dpkfc.probes.PinkNoise(shape=(1, 28, 28), classes=10), every=50)
    >>> geometry.public
    True
    """

    def __init__(
        self,
        probe: Probe | None = None,
        *,
        every: int = 50,
        probes: int | None = None,
        damping: float = 0.03,
        stability: float = 0.0,
        power: float = 1.0,
        factors: Literal["A", "AG"] = "A",
        rank: int | None = 32,
        approx: Literal["expand", "reduce"] = "expand",
        max_factor: int = 8192,
        others: Literal["scalar", "diagonal"] | None = "scalar",
        post: float = 0.0,
        loss: Loss = "cross_entropy",
        chunk: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_options(locals())
        self.probe, self.every, self.damping, self.stability, self.power = (
            probe,
            every,
            damping,
            stability,
            power,
        )
        self.factors, self.rank, self.approx, self.max_factor = factors, rank, approx, max_factor
        self.others, self.post = others, post
        self._probing = Probing(probes, chunk, loss, seed)
        self._maps: dict[Names, KroneckerMap | DiagonalMap] = {}
        self._post: dict[Names, KroneckerMap] = {}
        self._spectra: dict[Names, tuple[Spectrum, Spectrum | None]] = {}
        self._last: Refresh | None = None

    @property
    def name(self) -> str:
        source = "inferred" if self.probe is None else self.probe.name
        return f"DP-KFC ({self.factors}, power {self.power:g}, probes: {source}, every {self.every} steps)"

    @property
    def public(self) -> bool:
        return self.probe is None or self.probe.public

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        self.probe = infer_probe(model) if self.probe is None else self.probe
        for source in (
            self.probe.sources.values() if isinstance(self.probe, Hybrid) else [self.probe]
        ):
            self._probing.try_out(model, capture, source)

    def due(self, step: int) -> bool:
        return not self._maps or step % self.every == 0

    def probe_norms(self, model: nn.Module, capture: GradientCapture) -> Tensor | None:
        assert self.probe is not None
        self.refresh(model, capture, 0)
        source = (
            next(iter(self.probe.sources.values()))
            if isinstance(self.probe, Hybrid)
            else self.probe
        )
        return self._probing.mapped_norms(model, capture, source, self.map_of)

    def map_of(self, parameters: Names) -> LinearMap:
        return self._maps.get(parameters, IDENTITY_MAP)

    def after_noise(self) -> dict[Names, LinearMap]:
        return dict(self._post)

    @property
    def spectra(self) -> dict[Names, tuple[Spectrum, Spectrum | None]]:
        """A, and G if the geometry uses it, of every mapped layer at the last refresh, before damping.

        Only the directions that are told apart have their vectors: all of them with rank=None. Empty after a
        checkpoint was loaded, which holds the maps alone.
        """
        return dict(self._spectra)

    def describe(self) -> Description:
        """The maps in figures, layer by layer: print it, or ``describe().plot("geometry.png")``.

        Sizes, ranks, eigenvalues, condition numbers before and after, work, memory and the time of the refresh.
        All of it is public: it follows from the probes and from weights that private steps released. Only with
        `Oracle` is it not, and the description says so.
        """
        from dpkfc.geometry.description import MapSettings, describe

        if self._last is None and not self._maps:
            raise PrivacyError(
                "KFC.describe: there are no maps yet: they are built when the first batch is drawn. Call describe() "
                "inside or after `for x, y in private.loader:`"
            )
        source = "inferred" if self.probe is None else self.probe.name
        settings = MapSettings(
            source, self.public, self.every, self.damping, self.stability, self.power
        )
        return describe(self._maps, self._post, self._spectra, self._last, settings)

    # -- the refresh

    def refresh(self, model: nn.Module, capture: GradientCapture, step: int) -> None:
        assert self.probe is not None
        start = time.perf_counter()
        names = {p: name for name, p in model.named_parameters()}
        layers = {layer.unit: layer for layer in self._layers(capture.units, names)}
        last = Refresh(step, tuple(name for p, name in names.items() if p.requires_grad))
        sources = (
            self.probe.sources if isinstance(self.probe, Hybrid) else {self.factors: self.probe}
        )
        calls: list[LayerCall] = []
        for factors, source in sources.items():
            if factors in self.factors or self.others:
                for calls in self._probing.passes(
                    model, capture, source, self._probing.generator(step, factors)
                ):
                    for unit, uses in _by_unit(calls).items():
                        if unit in layers:
                            with _timed(last, layers[unit]):
                                self._add(layers[unit], uses, factors)
        generator = self._probing.generator(step, "eigenvectors")
        reference = next(p for p in model.parameters() if p.is_floating_point())
        like = torch.empty(
            0, dtype=torch.promote_types(reference.dtype, torch.float32), device=reference.device
        )
        maps: dict[Names, KroneckerMap | DiagonalMap] = {}
        self._post, self._spectra = {}, {}
        with torch.no_grad():
            for layer in layers.values():
                if layer.a_count:  # a layer that the model did not use is left as it is
                    with _timed(last, layer):
                        maps[layer.names] = self._map(layer, like, generator)
            self._scale_others(maps, calls, names, capture)
        capture.recycle()
        last.seconds = time.perf_counter() - start
        self._maps, self._last = maps, last

    def _layers(self, units: Iterable[HookedModule], names: dict[nn.Parameter, str]) -> list[Layer]:
        found = []
        for unit in units:
            trainable = [key for key, p in unit.parameters.items() if p.requires_grad]
            layer = _layer(unit, trainable, tuple(names[unit.parameters[key]] for key in trainable))
            if layer is not None and max(layer.sizes()[: len(self.factors)]) <= self.max_factor:
                found.append(layer)
        return found

    def _add(self, layer: Layer, uses: list[LayerCall], factors: str) -> None:
        """Add one pass to the factors of a layer; several uses of it are positions side by side."""
        with torch.no_grad():
            a, delta = (
                torch.cat(parts, 1)
                for parts in zip(*(_positions(layer, use) for use in uses), strict=True)
            )
            batch = len(a)
            if self.approx == "reduce":
                a, delta = a.mean(1, keepdim=True), delta.sum(1, keepdim=True)
            if "A" in factors:
                if layer.bias:
                    a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
                layer.a.add(_by_group(a))
                layer.a_count += batch * a.shape[1]
            if "G" in factors and "G" in self.factors:
                layer.g.add(_by_group(delta))
                layer.g_count += batch

    def _map(self, layer: Layer, like: Tensor, generator: torch.Generator) -> KroneckerMap:
        settings = self.damping, self.stability, like
        for moment in (layer.a, layer.g):
            if not moment.finite():
                raise diverged(layer.names[0])
        a = layer.a.spectrum(layer.a_count, self._rank_of(layer.sizes()[0]), generator)
        left, g = None, None
        if layer.g_count:
            g = layer.g.spectrum(layer.g_count, self._rank_of(layer.sizes()[1]), generator)
            left = g.root(self.power, *settings, bias=False)
        right = a.root(self.power, *settings, bias=layer.bias)
        shape = (layer.inputs, layer.outputs, layer.groups, layer.transposed)
        if self.post:
            after = a.trace_keeping_root(self.post, *settings, bias=layer.bias)
            self._post[layer.names] = KroneckerMap(None, after, *shape)
        self._spectra[layer.names] = (a, g)
        return KroneckerMap(left, right, *shape)

    def _rank_of(self, size: int) -> int | None:
        return None if self.rank is None or 2 * self.rank >= size else self.rank

    def _scale_others(
        self,
        maps: dict[Names, KroneckerMap | DiagonalMap],
        calls: list[LayerCall],
        names: dict[nn.Parameter, str],
        capture: GradientCapture,
    ) -> None:
        """Give what has no Kronecker form the mean squared entry that mapped gradients have on the probes."""
        covered = {name for key in maps for name in key}
        rest = {p for p, name in names.items() if p.requires_grad and name not in covered}
        if self.others is None or self.power == 0 or not rest or not calls:
            return
        forms = {tuple(names[p] for p in slot): form for slot, form in gradients(calls).items()}
        sizes = {name: p.numel() for p, name in names.items()}
        batch, transposed = calls[0].batch, {names[p] for p in transposed_weights(capture)}
        mapped = [key for key in forms if key in maps]
        energy = sum(float(forms[key].squared_norms(maps[key]).sum()) for key in mapped) / batch
        if not math.isfinite(energy):
            raise diverged("the mapped layers")
        entries = sum(sizes[name] for key in mapped for name in key)
        means: dict[Names, float] = {}
        moments: dict[Names, list[Tensor]] = {}
        for key in (key for key in forms if key not in maps):
            if self.others == "diagonal":
                moments[key] = [s / batch for s in forms[key].squares()]
                means[key] = mean_of(moments[key], key)
            else:
                total = float(forms[key].squared_norms(IDENTITY_MAP).sum())
                if not math.isfinite(total):
                    raise diverged(key[0])
                means[key] = total / batch / sum(sizes[name] for name in key)
        means = {key: mean for key, mean in means.items() if mean > 0}
        if not means or (entries and energy <= 0):
            return
        target = energy / entries if entries else sum(means.values()) / len(means)
        for key, mean in means.items():
            if self.others == "scalar":
                maps[key] = DiagonalMap((target / mean) ** (self.power / 2))
            else:
                floor = max(self.damping, ENTRY_DAMPING) * mean
                scales = [((m + floor) / target) ** (-self.power / 2) for m in moments[key]]
                maps[key] = DiagonalMap(scales, key[0] in transposed)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "kronecker": {
                "|".join(k): m.state() for k, m in self._maps.items() if isinstance(m, KroneckerMap)
            },
            "scaled": {
                "|".join(k): m.state() for k, m in self._maps.items() if isinstance(m, DiagonalMap)
            },
            "post": {"|".join(k): m.state() for k, m in self._post.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._maps = {
            tuple(key.split("|")): kronecker_from(one) for key, one in state["kronecker"].items()
        }
        self._maps |= {
            tuple(key.split("|")): DiagonalMap(**one) for key, one in state["scaled"].items()
        }
        self._post = {
            tuple(key.split("|")): kronecker_from(one) for key, one in state["post"].items()
        }
        self._spectra, self._last = {}, None  # a checkpoint holds the maps alone


ENTRY_DAMPING = (
    1e-2  # of a diagonal map, relative to the mean: most entries of an embedding see no probe
)


@contextlib.contextmanager
def _timed(last: Refresh, layer: Layer) -> Iterator[None]:
    start = time.perf_counter()
    yield
    last.layer_seconds[layer.names] = (
        last.layer_seconds.get(layer.names, 0.0) + time.perf_counter() - start
    )


def _by_unit(calls: list[LayerCall]) -> dict[HookedModule, list[LayerCall]]:
    found: dict[HookedModule, list[LayerCall]] = {}
    for made in calls:
        found.setdefault(made.unit, []).append(made)
    return found


def _layer(unit: HookedModule, trainable: list[str], names: Names) -> Layer | None:
    """The Kronecker form of a unit, if it has one: a matrix product over positions, with a trainable weight."""
    module = unit.module
    if unit.kind != "layer" or not unit.joint or "weight" not in trainable:
        return None
    bias = "bias" in trainable
    names = tuple(sorted(names, key=lambda name: name.endswith("bias")))
    weight = unit.parameters["weight"]
    if isinstance(module, Conv):
        out, *inner = weight.shape
        return Layer(
            names, unit, module.groups, math.prod(inner), out // module.groups, bias, False
        )
    if unit.handler is linear:
        return Layer(names, unit, 1, weight.shape[1], weight.shape[0], bias, False)
    if unit.handler is conv1d_of_transformers:
        return Layer(names, unit, 1, weight.shape[0], weight.shape[1], bias, True)
    return None


def _positions(layer: Layer, use: LayerCall) -> tuple[Tensor, Tensor]:
    """a and δ of one use as [batch, T, groups, features]."""
    module, a, delta, batch = layer.unit.module, use.a, use.delta, use.batch
    assert a is not None
    if isinstance(module, Conv):
        a = patches(module, pad_input(module, a)).reshape(batch, -1, layer.groups, layer.inputs)
        delta = delta.flatten(2).transpose(1, 2).reshape(batch, -1, layer.groups, layer.outputs)
        return a, delta
    return as_positions(a, batch).unsqueeze(2), as_positions(delta, batch).unsqueeze(2)


def _by_group(x: Tensor) -> Tensor:
    """[batch, T, groups, d] to [groups, batch·T, d]."""
    return x.flatten(0, 1).transpose(0, 1)


def _check_options(given: dict[str, Any]) -> None:
    for name, allowed in {
        "factors": ("A", "AG"),
        "approx": ("expand", "reduce"),
        "others": ("scalar", "diagonal", None),
    }.items():
        if given[name] not in allowed:
            raise PrivacyError(
                f"KFC: {name}={given[name]!r}: must be one of {', '.join(map(repr, allowed))}"
            )
    whole = ("every", "probes", "rank", "max_factor", "chunk")
    check_numbers("KFC", given, whole, real=("damping", "stability", "power", "post"))
    if given["probe"] is not None and not hasattr(given["probe"], "draw"):
        raise PrivacyError(
            f"KFC: probe={type(given['probe']).__name__}: pass a probe such as dpkfc.probes.PinkNoise(shape=(1, 28, 28))"
        )
