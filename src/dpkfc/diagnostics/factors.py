"""The Kronecker factors A and G of every layer as a source shows them, before damping: what `KFC` would build on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from dpkfc.diagnostics.passes import layers_of, watched
from dpkfc.diagnostics.result import is_probe
from dpkfc.errors import PrivacyError
from dpkfc.geometry.factors import Spectrum
from dpkfc.geometry.kfc import KFC
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss

Factors = dict[str, tuple[Spectrum, Spectrum]]  # (A, G) by layer, all eigenvalues and vectors


def by_name(sources: Probe | Mapping[str, Probe]) -> dict[str, Probe]:
    """Sources by name; a single one goes by its own."""
    found: dict[str, Any] = (
        dict(sources) if isinstance(sources, Mapping) else {getattr(sources, "name", ""): sources}
    )
    for name, source in found.items():
        if not is_probe(source):
            raise PrivacyError(
                f"source {name!r} is {type(source).__name__}: give a probe such as dpkfc.probes.PinkNoise(...), or a dict of "
                "them; records as dpkfc.probes.PublicData(records), or as dpkfc.probes.Oracle(records) if they are private"
            )
    if not found:
        raise PrivacyError(
            "no source was given: pass a probe such as dpkfc.probes.PinkNoise(shape=(1, 28, 28)), or a dict"
        )
    return found


def factors_of(
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
    """Both factors of every layer that has a Kronecker form, at the model's present weights."""
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
    with watched(model, vmap_modules) as (copied, capture):
        geometry.prepare(copied, capture)
        geometry.refresh(copied, capture, 0)
        parameters, layers = dict(copied.named_parameters()), layers_of(capture.hooked_modules)
    found = {
        layers[parameters[names[0]]]: (a, g)
        for names, (a, g) in geometry.spectra.items()
        if g is not None
    }
    if not found:
        raise PrivacyError(
            f"{type(model).__name__} has no trainable layer with Kronecker factors of at most {max_factor}: a linear "
            "layer or a convolution. Unfreeze one, or raise max_factor"
        )
    return found
