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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dpkfc.distributed import ALONE, Ranks
from dpkfc.geometry.base import ParamNames
from dpkfc.geometry.diagonal import DiagonalMap, check_numbers, mean_entry, transposed_weights
from dpkfc.geometry.factors import Moment, Spectrum, spectrum_work
from dpkfc.geometry.kronecker import KroneckerMap, kronecker_from
from dpkfc.geometry.probing import Probing, combined_grads, diverged
from dpkfc.geometry.sharing import build_once, demand_same_maps, owners, sum_at_owners
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
    seconds: float = 0.0  # for factors and roots, of all ranks together

    def sizes(self) -> tuple[int, int]:
        """Of the factors A_l and G_l."""
        return self.inputs + int(self.bias), self.outputs

    def moments(self) -> list[tuple[Moment, int]]:
        """Those of the factors A_l and G_l, with their sizes."""
        return list(zip((self.a_moment, self.g_moment), self.sizes(), strict=True))


@dataclass
class BuiltLayer:
    """What the owner of a layer computes from its moments."""

    kronecker: KroneckerMap
    post: KroneckerMap | None
    spectra: tuple[Spectrum, Spectrum | None]
    seconds: float


@dataclass
class Refresh:
    """What a refresh cost, for `KFC.describe`."""

    step: int
    parameters: ParamNames  # the trainable ones, in the model's order
    # for factors and roots, of all ranks together
    layer_seconds: dict[ParamNames, float] = field(default_factory=dict)
    seconds: float = 0.0  # from beginning to end, including the passes over the probes


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
            than a step. The ranks of a job share the passes: with more than four ranks, a smaller
            chunk gives each of them one.
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

    def probe_norms(
        self, model: nn.Module, capture: GradientCapture, ranks: Ranks = ALONE
    ) -> Tensor | None:
        self.refresh(model, capture, 0, ranks)
        source = next(iter(self._sources.values()))
        return self._probing.mapped_norms(model, capture, source, self.map_of, ranks)

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

    def refresh(
        self, model: nn.Module, capture: GradientCapture, step: int, ranks: Ranks = ALONE
    ) -> None:
        """Build the maps. The ranks share the work as `dpkfc.geometry.sharing` describes."""
        start = time.perf_counter()
        name_of = {p: name for name, p in model.named_parameters()}
        layers = self._kronecker_layers(capture, name_of)
        calls = self._add_probes(model, capture, step, layers, ranks)
        reference = next(p for p in model.parameters() if p.is_floating_point())
        dtype = torch.promote_types(reference.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=reference.device)
        by_names = {layer.names: layer for layer in layers.values()}
        with torch.no_grad():
            owner_of = self._to_owners(by_names, ranks, like.device)
            built = build_once(
                ranks,
                owner_of,
                lambda names: self._build_layer(by_names[names], like, step),
                like.device,
            )
            maps: dict[ParamNames, KroneckerMap | DiagonalMap] = {
                names: layer.kronecker for names, layer in built.items()
            }
            # the rank that ran the last pass has its calls
            (others,) = build_once(
                ranks,
                {"others": ranks.count - 1},
                lambda _: self._scale_others(maps, calls, name_of, capture),
                like.device,
            ).values()
        capture.reuse_workspaces()
        maps |= others
        post_maps = {names: layer.post for names, layer in built.items() if layer.post is not None}
        demand_same_maps(ranks, _state(maps, post_maps))
        self._maps, self._post_maps = maps, post_maps
        self._spectra = {names: layer.spectra for names, layer in built.items()}
        self._last_refresh = Refresh(
            step,
            parameters=tuple(name for p, name in name_of.items() if p.requires_grad),
            layer_seconds={names: layer.seconds for names, layer in built.items()},
            seconds=time.perf_counter() - start,
        )

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
        ranks: Ranks,
    ) -> list[LayerCall]:
        """Add this rank's probes to the moments of the layers; returns the calls of its last pass.

        Only the last rank, whose last pass is the last of all, returns any.
        """
        last: list[LayerCall] = []
        for factors, source in self._sources.items():
            if factors not in self.factors and not self.others:
                continue

            def receive(calls: list[LayerCall], factors: str = factors) -> None:
                for hooked, uses in _by_module(calls).items():
                    if hooked in layers:
                        with _timed(layers[hooked]):
                            self._add_to_moments(layers[hooked], uses, factors)
                if ranks.rank == ranks.count - 1:
                    last[:] = calls

            self._probing.share_passes(model, capture, source, step, factors, ranks, receive)
        return last

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

    def _to_owners(
        self, layers: dict[ParamNames, KroneckerLayer], ranks: Ranks, device: torch.device
    ) -> dict[ParamNames, int]:
        """Choose an owner for each layer that the model used, and add up its moments there.

        A layer that the model did not use has no owner: it keeps its gradient as it is.
        """
        if ranks.count == 1:
            return {names: 0 for names, layer in layers.items() if layer.a_count}
        held = ranks.everyone([_contribution(layer) for layer in layers.values()])
        work: dict[ParamNames, float] = {}
        vectors: dict[tuple[ParamNames, int], int] = {}
        parts: dict[tuple[ParamNames, int], Tensor] = {}
        for layer, of_ranks in zip(layers.values(), zip(*held, strict=True), strict=True):
            layer.a_count = sum(each.a_count for each in of_ranks)
            layer.g_count = sum(each.g_count for each in of_ranks)
            layer.seconds = sum(each.seconds for each in of_ranks)
            for number, (moment, size) in enumerate(layer.moments()):
                counts = [each.vectors[number] for each in of_ranks]
                dtypes = [each.dtypes[number] for each in of_ranks if each.vectors[number]]
                if not dtypes:
                    continue
                key = layer.names, number
                before, vectors[key] = sum(counts[: ranks.rank]), sum(counts)
                empty = torch.empty(layer.groups, 0, size, dtype=dtypes[0], device=device)
                parts[key] = moment.take_part(before, vectors[key], empty)
                work[layer.names] = work.get(layer.names, 0.0) + spectrum_work(
                    vectors[key], layer.groups, size, self._rank_of(size)
                )
        owner_of = owners(work, ranks.count)
        sums = sum_at_owners(ranks, parts, {key: owner_of[key[0]] for key in parts})
        for (names, number), content in sums.items():
            layers[names].moments()[number][0].replace(content, vectors[names, number])
        return owner_of

    def _build_layer(self, layer: KroneckerLayer, like: Tensor, step: int) -> BuiltLayer:
        with _timed(layer):
            damping = self.damping, self.stability, like
            for moment, _ in layer.moments():
                if not moment.finite():
                    raise diverged(layer.names[0])
            generator = self._probing.generator(step, f"eigenvectors of {layer.names[0]}")
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
            post = None
            if self.post:
                post_root = a.trace_keeping_root(self.post, *damping, bias=layer.bias)
                post = KroneckerMap(None, post_root, *shape)
        return BuiltLayer(KroneckerMap(g_root, a_root, *shape), post, (a, g), layer.seconds)

    def _rank_of(self, size: int) -> int | None:
        return None if self.rank is None or 2 * self.rank >= size else self.rank

    def _scale_others(
        self,
        maps: Mapping[ParamNames, KroneckerMap | DiagonalMap],
        calls: list[LayerCall],
        name_of: dict[nn.Parameter, str],
        capture: GradientCapture,
    ) -> dict[ParamNames, DiagonalMap]:
        """Scale the other gradients to the mean squared entry of the mapped ones."""
        covered = {name for names in maps for name in names}
        rest = [p for p, name in name_of.items() if p.requires_grad and name not in covered]
        if self.others is None or self.power == 0 or not rest or not calls:
            return {}
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
            return {}
        target = energy / entries if entries else sum(means.values()) / len(means)
        others: dict[ParamNames, DiagonalMap] = {}
        for names, mean in means.items():
            if self.others == "scalar":
                others[names] = DiagonalMap((target / mean) ** (self.power / 2))
            else:
                floor = max(self.damping, ENTRY_DAMPING) * mean
                scales = [((m + floor) / target) ** (-self.power / 2) for m in moments[names]]
                others[names] = DiagonalMap(scales, names[0] in transposed)
        return others

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return _state(self._maps, self._post_maps)

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


def _state(
    maps: Mapping[ParamNames, KroneckerMap | DiagonalMap],
    post_maps: Mapping[ParamNames, KroneckerMap],
) -> dict[str, Any]:
    kronecker = {n: m for n, m in maps.items() if isinstance(m, KroneckerMap)}
    scaled = {n: m for n, m in maps.items() if isinstance(m, DiagonalMap)}
    return {
        "kronecker": {"|".join(names): m.state() for names, m in kronecker.items()},
        "scaled": {"|".join(names): m.state() for names, m in scaled.items()},
        "post": {"|".join(names): m.state() for names, m in post_maps.items()},
    }


@contextlib.contextmanager
def _timed(layer: KroneckerLayer) -> Iterator[None]:
    start = time.perf_counter()
    yield
    layer.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class _Contribution:
    """What the probes of one rank have contributed to a layer, without the moments themselves."""

    a_count: int
    g_count: int
    seconds: float
    vectors: tuple[int, ...]  # in the moments of A_l and G_l
    dtypes: tuple[torch.dtype | None, ...]


def _contribution(layer: KroneckerLayer) -> _Contribution:
    moments = [moment for moment, _ in layer.moments()]
    return _Contribution(
        layer.a_count,
        layer.g_count,
        layer.seconds,
        tuple(moment.vectors for moment in moments),
        tuple(moment.dtype for moment in moments),
    )


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
