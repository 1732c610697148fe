"""The Kronecker factors A_l and G_l of every layer, before damping, estimated from one source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from dpkfc.diagnostics.passes import captured_copy, layer_names
from dpkfc.diagnostics.result import is_probe
from dpkfc.geometry.factors import Spectrum
from dpkfc.geometry.kfc import KFC
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss

Factors = dict[str, tuple[Spectrum, Spectrum]]  # (A, G) by layer, with all eigenpairs


def named_sources(sources: Probe | Mapping[str, Probe]) -> dict[str, Probe]:
    """Sources by name; a single source has its own name."""
    named: dict[str, Any] = (
        dict(sources) if isinstance(sources, Mapping) else {getattr(sources, "name", ""): sources}
    )
    for name, source in named.items():
        if not is_probe(source):
            raise TypeError(
                f"source {name!r} is {type(source).__name__}: give a probe such as "
                "dpkfc.probes.PinkNoise(...), or a dict of them; records as "
                "dpkfc.probes.PublicData(records), or as dpkfc.probes.Oracle(records) if they are "
                "private"
            )
    if not named:
        raise ValueError(
            "no source was given: pass a probe such as dpkfc.probes.PinkNoise(shape=(1, 28, 28)), "
            "or a dict"
        )
    return named


def kronecker_factors(
    model: nn.Module,
    probe: Probe,
    *,
    loss: Loss,
    probes: int | None,
    approx: Literal["expand", "reduce"],
    max_factor: int,
    vmap_modules: Iterable[str],
    seed: int,
) -> Factors:
    """Both factors of every layer with a Kronecker form, at the present weights of the model."""
    geometry = KFC(
        probe,
        probes=probes,
        factors="AG",
        rank=None,
        approx=approx,
        max_factor=max_factor,
        others=None,
        loss=loss,
        seed=seed,
    )
    with captured_copy(model, vmap_modules) as (copied, capture):
        geometry.prepare(copied, capture)
        geometry.refresh(copied, capture, 0)
        parameters = dict(copied.named_parameters())
        layers = layer_names(capture.hooked_modules)
    factors = {
        layers[parameters[names[0]]]: (a, g)
        for names, (a, g) in geometry.spectra.items()
        if g is not None
    }
    if not factors:
        raise ValueError(
            f"{type(model).__name__} has no trainable layer with Kronecker factors of at most "
            f"{max_factor}: a linear layer or a convolution. Unfreeze one, or raise max_factor"
        )
    return factors
