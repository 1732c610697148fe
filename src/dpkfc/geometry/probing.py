"""One forward and backward pass over synthetic inputs, at the current weights (Algorithm 1, lines 3 to 6).

Everything here receives the model and a generator of its own; no private record, batch size or statistic reaches
it. The pass leaves no trace: global generators, buffers and gradients are as before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import IDENTITY_MAP, LinearMap
from dpkfc.per_sample.capture import GradientCapture, LayerCall, ParamKey
from dpkfc.per_sample.record import PerSampleGrad, join
from dpkfc.probes.probe import Probe, call, split, tensors, to
from dpkfc.probes.targets import Loss, probe_losses


@dataclass(frozen=True)
class Probing:
    """How a network is probed: `count` inputs, in passes of at most `chunk` (by default a quarter of them).

    In several passes the probes need less memory than a batch of as many records.
    """

    count: int | None
    chunk: int | None
    loss: Loss
    seed: int

    def generator(self, step: int, purpose: str) -> torch.Generator:
        """A generator for one purpose at one step: a resumed run draws the same probes."""
        digest = hashlib.sha256(f"dpkfc probes {self.seed} {step} {purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def try_out(self, model: nn.Module, capture: GradientCapture, probe: Probe) -> None:
        """Two probes through the model: a probe that does not fit is refused before anything is spent."""
        try:
            for _ in replace(self, count=2).passes(
                model, capture, probe, self.generator(0, "trial")
            ):
                pass
        except PrivacyError:
            raise
        except Exception as problem:
            shapes = [
                list(x.shape[1:]) for x in tensors(probe.draw(1, self.generator(0, "trial")).inputs)
            ]
            raise PrivacyError(
                f"the model does not run on the probe ({probe.name}), whose inputs have the shape "
                f"{', '.join(map(str, shapes))}: {problem}. Give the probe the shape of the model's own inputs, and "
                "the geometry the loss= that fits its outputs"
            ) from problem

    def passes(
        self, model: nn.Module, capture: GradientCapture, probe: Probe, generator: torch.Generator
    ) -> Iterator[list[LayerCall]]:
        """The calls (a, δ) of every unit, pass by pass. δ belongs to the *sum* of the losses: it is per sample."""
        reference = next(p for p in model.parameters() if p.is_floating_point())
        probes = to(
            probe.draw(self.count or probe.count, generator), reference.device, reference.dtype
        )
        for part in split(probes, self.chunk or -(-len(probes) // 4)):
            with _no_trace(model, generator), capture.recording() as calls, torch.enable_grad():
                output = call(model, part.inputs)
                losses = probe_losses(
                    self.loss, output, part, generator, getattr(probe, "classes", None)
                )
                losses.sum().backward()
            yield calls

    def mapped_norms(
        self,
        model: nn.Module,
        capture: GradientCapture,
        probe: Probe,
        map_of: Callable[[tuple[str, ...]], LinearMap],
    ) -> Tensor:
        """``‖U g‖`` of every probe at the present weights."""
        names = {p: name for name, p in model.named_parameters()}
        norms = []
        for calls in self.passes(model, capture, probe, self.generator(0, "clip")):
            with torch.no_grad():
                forms = gradients(calls).items()
                squared = [
                    form.squared_norms(map_of(tuple(names[p] for p in slot)))
                    for slot, form in forms
                ]
                norms.append(torch.stack(squared).sum(0).sqrt())
        return torch.cat(norms)


@contextlib.contextmanager
def _no_trace(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Dropout draws from `generator`; buffers and the global generators are afterwards as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    others = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(others), torch.autocast(device.type, enabled=False):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def gradients(calls: list[LayerCall]) -> dict[ParamKey, PerSampleGrad]:
    """The per-sample gradients of one pass."""
    forms: dict[ParamKey, list[PerSampleGrad]] = {}
    for made in calls:
        for slot, form in made.gradients(lambda slot: IDENTITY_MAP):
            forms.setdefault(slot, []).append(form)
    return {slot: join(uses) for slot, uses in forms.items()}


def diverged(where: str) -> PrivacyError:
    """What to raise where probing gave values that are not finite."""
    return PrivacyError(
        f"probing the network gave values that are not finite at '{where}': its weights have diverged. Lower the "
        "learning rate or the clip and start again from the last checkpoint"
    )
