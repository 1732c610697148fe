"""DP-KFC: a Kronecker-factored geometry from synthetic probes, at no privacy cost (Algorithm 1).

For layer l with inputs a and backprops δ, the Fisher block is approximated by ``A_l ⊗ G_l`` with
``A_l = E[a aᵀ]`` (with the input 1 of the bias appended to a) and ``G_l = E[δ δᵀ]``. Each
per-sample gradient is mapped to ``U_G g U_A``, with ``U = (factor + damping)^(-power/2)``, before
it is clipped. With factors="AG", power 1 and rank=None, the mapped gradients of the probes have a
covariance close to the identity (Appendix B). The default uses A_l only (U_G = I), with 32
eigendirections.

Positions that share a weight (pixels of a convolution, tokens) enter the factors in one of two
ways:

* "expand": every position is a sample: ``A_l = Σ_it a aᵀ / (N T)``, ``G_l = Σ_it δ δᵀ / N``;
* "reduce": positions are combined first: ``A_l = Σ_i ā āᵀ / N`` with their mean ā, and
  ``G_l = Σ_i (Σ_t δ)(Σ_t δ)ᵀ / N``.

**Guarantee.** The maps are functions of the weights at the last refresh, which are results of
private steps, and of a generator with a public seed. Given the earlier results, both are
independent of the records, so the steps compose as those of DP-SGD with the same noise (Proposition
5.6; post-processing).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dpkfc.geometry.base import ParamNames
from dpkfc.geometry.diagonal import DiagonalMap, check_numbers, mean_entry, transposed_weights
from dpkfc.geometry.factors import Moment, Spectrum
from dpkfc.geometry.kronecker import KroneckerMap, kronecker_from
from dpkfc.geometry.probing import Probing, combined_grads, diverged
from dpkfc.per_sample.base import IDENTITY_MAP, HookedModule, KroneckerForm, LayerCall, LinearMap
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.probes.infer import infer_probe
from dpkfc.probes.probe import Probe
from dpkfc.probes.public import Hybrid
from dpkfc.probes.targets import Loss

if TYPE_CHECKING:
    from dpkfc.geometry.description import Description

# damping of a diagonal map relative to its mean: most entries of an embedding see no probe
ENTRY_DAMPING = 1e-2


@dataclass(eq=False)
class KroneckerLayer:
    """A layer with a Kronecker form, and the moments that the probes have contributed so far."""

    names: ParamNames
    hooked: HookedModule
    form: KroneckerForm
    groups: int
    inputs: int  # per group, without the bias
    outputs: int  # per group
    bias: bool
    a_moment: Moment = field(default_factory=Moment)
    g_moment: Moment = field(default_factory=Moment)
    a_count: int = 0
    g_count: int = 0

    def sizes(self) -> tuple[int, int]:
        """Of the factors A_l and G_l."""
        return self.inputs + int(self.bias), self.outputs


@dataclass
class Refresh:
    """What a refresh cost, for `KFC.describe`."""

    step: int
    parameters: ParamNames  # the trainable ones, in the model's order
    layer_seconds: dict[ParamNames, float] = field(default_factory=dict)  # factors and roots
    seconds: float = 0.0  # in total, including the passes over the probes


class KFC:
    """The data-free Kronecker geometry of DP-KFC.

    Args:
        probe: where synthetic inputs come from: `PinkNoise`, `Tokens`, `Tabular`, `PublicData`,
            `Hybrid`. By default inferred from what the model declares (`model.input_shape`, a
            Hugging Face config).
        every: steps between two refreshes (T_freq in the paper).
        probes: number of inputs per refresh; by default what the probe recommends.
        damping: π, relative to the mean eigenvalue of each factor.
        stability: γ, absolute.
        power: 0 is DP-SGD, 1 the paper's inverse square root.
        factors: "A" whitens activations only, "AG" backprops as well.
        rank: eigendirections of a factor that get their own scale; the others share one. None: all.
        approx: "expand" or "reduce", for positions that share a weight (see the module).
        max_factor: a layer with a wider factor is treated like parameters without a Kronecker form.
        others: gradients of parameters without a Kronecker form. "scalar" multiplies each by one
            number, so that its mean squared entry on the probes equals that of the mapped layers;
            "diagonal" uses one number per entry; None leaves them as they are.
        post: exponent r of a second, milder map after the noise, ``s (A_l + μ I)^(-r/2)`` with
            μ = π tr(A_l)/d + γ, and s such that the probes keep their energy; 0 for none. Free
            post-processing, but it breaks the cancellation of correlated noise.
        loss: of the probes: "cross_entropy", "mse", "bce", "masked_lm", "next_token", or a function
            ``loss(output, probes, generator) -> [batch]``.
        chunk: probes per pass; by default a quarter of them, so that a refresh needs less memory
            than a step.
        seed: of the probes. It need not be secret.

    >>> import dpkfc
    >>> probe = dpkfc.probes.PinkNoise(shape=(1, 28, 28), classes=10)
    >>> dpkfc.KFC(probe, every=50).public
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
        self.probe, self.every = probe, every
        self.damping, self.stability, self.power = damping, stability, power
        self.factors, self.rank, self.approx, self.max_factor = factors, rank, approx, max_factor
        self.others, self.post = others, post
        self._probing = Probing(probes, chunk, loss, seed)
        self._maps: dict[ParamNames, KroneckerMap | DiagonalMap] = {}
        self._post_maps: dict[ParamNames, KroneckerMap] = {}
        self._spectra: dict[ParamNames, tuple[Spectrum, Spectrum | None]] = {}
        self._last_refresh: Refresh | None = None

    @property
    def name(self) -> str:
        source = "inferred" if self.probe is None else self.probe.name
        settings = f"{self.factors}, power {self.power:g}, probes: {source}"
        return f"DP-KFC ({settings}, every {self.every} steps)"

    @property
    def public(self) -> bool:
        return self.probe is None or self.probe.public

    @property
    def _sources(self) -> dict[str, Probe]:
        """The probe for each factor."""
        assert self.probe is not None
        return self.probe.sources if isinstance(self.probe, Hybrid) else {self.factors: self.probe}

    def prepare(self, model: nn.Module, capture: GradientCapture) -> None:
        self.probe = infer_probe(model) if self.probe is None else self.probe
        for source in self._sources.values():
            self._probing.try_out(model, capture, source)

    def due(self, step: int) -> bool:
        return not self._maps or step % self.every == 0

    def probe_norms(self, model: nn.Module, capture: GradientCapture) -> Tensor | None:
        self.refresh(model, capture, 0)
        source = next(iter(self._sources.values()))
        return self._probing.mapped_norms(model, capture, source, self.map_of)

    def map_of(self, names: ParamNames) -> LinearMap:
        return self._maps.get(names, IDENTITY_MAP)

    def after_noise(self) -> dict[ParamNames, LinearMap]:
        return dict(self._post_maps)

    @property
    def spectra(self) -> dict[ParamNames, tuple[Spectrum, Spectrum | None]]:
        """A_l, and G_l if used, of every mapped layer at the last refresh, without damping.

        Eigenvectors are kept only for the directions with a scale of their own: all with rank=None.
        Empty after a checkpoint was loaded, which holds only the maps.
        """
        return dict(self._spectra)

    def describe(self) -> Description:
        """The maps in figures, layer by layer: print it, or ``describe().plot("geometry.png")``.

        Sizes, ranks, eigenvalues, condition numbers before and after, work, memory and the time of
        the refresh. All of it is public: it follows from the probes and from weights that private
        steps released. Only with `Oracle` it is not, and the description says so.
        """
        from dpkfc.geometry.description import MapSettings, describe

        if self._last_refresh is None and not self._maps:
            raise RuntimeError(
                "KFC.describe: there are no maps yet: they are built when the first batch is "
                "drawn. Call describe() inside or after `for x, y in run.loader:`"
            )
        source = "inferred" if self.probe is None else self.probe.name
        settings = MapSettings(
            source, self.public, self.every, self.damping, self.stability, self.power
        )
        return describe(self._maps, self._post_maps, self._spectra, self._last_refresh, settings)

    # -- the refresh

    def refresh(self, model: nn.Module, capture: GradientCapture, step: int) -> None:
        start = time.perf_counter()
        name_of = {p: name for name, p in model.named_parameters()}
        layers = self._kronecker_layers(capture, name_of)
        trainable = tuple(name for p, name in name_of.items() if p.requires_grad)
        refresh = Refresh(step, trainable)
        calls = self._add_probes(model, capture, step, layers, refresh)
        reference = next(p for p in model.parameters() if p.is_floating_point())
        dtype = torch.promote_types(reference.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=reference.device)
        generator = self._probing.generator(step, "eigenvectors")
        maps: dict[ParamNames, KroneckerMap | DiagonalMap] = {}
        self._post_maps, self._spectra = {}, {}
        with torch.no_grad():
            for layer in layers.values():
                if layer.a_count:  # a layer that the model did not use keeps its gradient as it is
                    with _timed(refresh, layer):
                        maps[layer.names] = self._build_map(layer, like, generator)
            self._scale_others(maps, calls, name_of, capture)
        capture.reuse_workspaces()
        refresh.seconds = time.perf_counter() - start
        self._maps, self._last_refresh = maps, refresh

    def _kronecker_layers(
        self, capture: GradientCapture, name_of: dict[nn.Parameter, str]
    ) -> dict[HookedModule, KroneckerLayer]:
        layers = {}
        for hooked in capture.hooked_modules:
            layer = _kronecker_layer(hooked, name_of)
            if layer is not None and max(layer.sizes()[: len(self.factors)]) <= self.max_factor:
                layers[hooked] = layer
        return layers

    def _add_probes(
        self,
        model: nn.Module,
        capture: GradientCapture,
        step: int,
        layers: dict[HookedModule, KroneckerLayer],
        refresh: Refresh,
    ) -> list[LayerCall]:
        """Add all probes to the moments of the layers; returns the calls of the last pass."""
        calls: list[LayerCall] = []
        for factors, source in self._sources.items():
            if factors in self.factors or self.others:
                generator = self._probing.generator(step, factors)
                for calls in self._probing.passes(model, capture, source, generator):
                    for hooked, uses in _by_module(calls).items():
                        if hooked in layers:
                            with _timed(refresh, layers[hooked]):
                                self._add_to_moments(layers[hooked], uses, factors)
        return calls

    def _add_to_moments(self, layer: KroneckerLayer, uses: list[LayerCall], factors: str) -> None:
        """Add one pass; several uses of a layer are positions side by side."""
        with torch.no_grad():
            vectors = zip(*(layer.form.vectors(use) for use in uses), strict=True)
            a, delta = (torch.cat(parts, 1) for parts in vectors)
            batch = len(a)
            if self.approx == "reduce":
                a, delta = a.mean(1, keepdim=True), delta.sum(1, keepdim=True)
            if "A" in factors:
                if layer.bias:
                    a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
                layer.a_moment.add(_by_group(a))
                layer.a_count += batch * a.shape[1]
            if "G" in factors and "G" in self.factors:
                layer.g_moment.add(_by_group(delta))
                layer.g_count += batch

    def _build_map(
        self, layer: KroneckerLayer, like: Tensor, generator: torch.Generator
    ) -> KroneckerMap:
        damping = self.damping, self.stability, like
        for moment in (layer.a_moment, layer.g_moment):
            if not moment.finite():
                raise diverged(layer.names[0])
        a_size, g_size = layer.sizes()
        a = layer.a_moment.spectrum(layer.a_count, self._rank_of(a_size), generator)
        g_root, g = None, None
        if layer.g_count:
            g = layer.g_moment.spectrum(layer.g_count, self._rank_of(g_size), generator)
            g_root = g.root(self.power, *damping, bias=False)
        a_root = a.root(self.power, *damping, bias=layer.bias)
        adapter = layer.hooked.adapter
        shape = (
            layer.inputs,
            layer.outputs,
            layer.groups,
            adapter is not None and adapter.transposed,
        )
        if self.post:
            post_root = a.trace_keeping_root(self.post, *damping, bias=layer.bias)
            self._post_maps[layer.names] = KroneckerMap(None, post_root, *shape)
        self._spectra[layer.names] = (a, g)
        return KroneckerMap(g_root, a_root, *shape)

    def _rank_of(self, size: int) -> int | None:
        return None if self.rank is None or 2 * self.rank >= size else self.rank

    def _scale_others(
        self,
        maps: dict[ParamNames, KroneckerMap | DiagonalMap],
        calls: list[LayerCall],
        name_of: dict[nn.Parameter, str],
        capture: GradientCapture,
    ) -> None:
        """Scale the other gradients to the mean squared entry of the mapped ones."""
        covered = {name for names in maps for name in names}
        rest = [p for p, name in name_of.items() if p.requires_grad and name not in covered]
        if self.others is None or self.power == 0 or not rest or not calls:
            return
        grads = {
            tuple(name_of[p] for p in key): grad for key, grad in combined_grads(calls).items()
        }
        sizes = {name: p.numel() for p, name in name_of.items()}
        batch = calls[0].batch_size
        transposed = {name_of[p] for p in transposed_weights(capture)}
        mapped = [names for names in grads if names in maps]
        energy = sum(float(grads[names].squared_norms(maps[names]).sum()) for names in mapped)
        energy /= batch
        if not math.isfinite(energy):
            raise diverged("the mapped layers")
        entries = sum(sizes[name] for names in mapped for name in names)
        means: dict[ParamNames, float] = {}
        moments: dict[ParamNames, list[Tensor]] = {}
        for names in (names for names in grads if names not in maps):
            if self.others == "diagonal":
                moments[names] = [s / batch for s in grads[names].sum_of_squares()]
                means[names] = mean_entry(moments[names], names)
            else:
                total = float(grads[names].squared_norms(IDENTITY_MAP).sum())
                if not math.isfinite(total):
                    raise diverged(names[0])
                means[names] = total / batch / sum(sizes[name] for name in names)
        means = {names: mean for names, mean in means.items() if mean > 0}
        if not means or (entries and energy <= 0):
            return
        target = energy / entries if entries else sum(means.values()) / len(means)
        for names, mean in means.items():
            if self.others == "scalar":
                maps[names] = DiagonalMap((target / mean) ** (self.power / 2))
            else:
                floor = max(self.damping, ENTRY_DAMPING) * mean
                scales = [((m + floor) / target) ** (-self.power / 2) for m in moments[names]]
                maps[names] = DiagonalMap(scales, names[0] in transposed)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        kronecker = {n: m for n, m in self._maps.items() if isinstance(m, KroneckerMap)}
        scaled = {n: m for n, m in self._maps.items() if isinstance(m, DiagonalMap)}
        return {
            "kronecker": {"|".join(names): m.state() for names, m in kronecker.items()},
            "scaled": {"|".join(names): m.state() for names, m in scaled.items()},
            "post": {"|".join(names): m.state() for names, m in self._post_maps.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        maps: dict[ParamNames, KroneckerMap | DiagonalMap] = {}
        for names, fields in state["kronecker"].items():
            maps[tuple(names.split("|"))] = kronecker_from(fields)
        for names, fields in state["scaled"].items():
            maps[tuple(names.split("|"))] = DiagonalMap(**fields)
        self._maps = maps
        self._post_maps = {
            tuple(names.split("|")): kronecker_from(fields)
            for names, fields in state["post"].items()
        }
        # a checkpoint holds only the maps
        self._spectra, self._last_refresh = {}, None


@contextlib.contextmanager
def _timed(refresh: Refresh, layer: KroneckerLayer) -> Iterator[None]:
    start = time.perf_counter()
    yield
    before = refresh.layer_seconds.get(layer.names, 0.0)
    refresh.layer_seconds[layer.names] = before + time.perf_counter() - start


def _by_module(calls: list[LayerCall]) -> dict[HookedModule, list[LayerCall]]:
    uses: dict[HookedModule, list[LayerCall]] = {}
    for call in calls:
        uses.setdefault(call.hooked, []).append(call)
    return uses


def _kronecker_layer(
    hooked: HookedModule, name_of: dict[nn.Parameter, str]
) -> KroneckerLayer | None:
    """The Kronecker form of a layer with a trainable weight of its own, if it has one."""
    trainable = [key for key, p in hooked.params.items() if p.requires_grad]
    form = None if hooked.adapter is None else hooked.adapter.kronecker
    if hooked.kind != "layer" or hooked.shared or "weight" not in trainable or form is None:
        return None
    names = [name_of[hooked.params[key]] for key in trainable]
    names.sort(key=lambda name: name.endswith("bias"))
    return KroneckerLayer(
        tuple(names), hooked, form, *form.shape(hooked.module), bias="bias" in trainable
    )


def _by_group(x: Tensor) -> Tensor:
    """[batch, T, groups, d] to [groups, batch·T, d]."""
    return x.flatten(0, 1).transpose(0, 1)


def _check_options(arguments: dict[str, Any]) -> None:
    for name, allowed in {
        "factors": ("A", "AG"),
        "approx": ("expand", "reduce"),
        "others": ("scalar", "diagonal", None),
    }.items():
        if arguments[name] not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ValueError(f"KFC: {name}={arguments[name]!r}: must be one of {choices}")
    whole = ("every", "probes", "rank", "max_factor", "chunk")
    check_numbers("KFC", arguments, whole, real=("damping", "stability", "power", "post"))
    probe = arguments["probe"]
    if probe is not None and not hasattr(probe, "draw"):
        raise TypeError(
            f"KFC: probe={type(probe).__name__}: pass a probe such as "
            "dpkfc.probes.PinkNoise(shape=(1, 28, 28))"
        )
