"""Forward and backward passes over probes at the current weights (Algorithm 1, lines 3 to 6).

Everything here receives the model and its own generator; no private record, batch size or statistic
reaches it. Passes have no side effects: global generators, buffers and gradients are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import ParamNames
from dpkfc.per_sample.base import LayerCall, LinearMap, ParamKey, PerSampleGrad
from dpkfc.per_sample.capture import GradientCapture, per_sample_grads
from dpkfc.per_sample.combine import combine
from dpkfc.probes.probe import Probe, call, split, tensors, to
from dpkfc.probes.targets import Loss, probe_losses


@dataclass(frozen=True)
class Probing:
    """How a network is probed.

    Args:
        count: the number of probes; None: what the probe recommends.
        chunk: probes per pass, by default a quarter of them, so that probing needs less memory than
            a batch of as many records.
        loss: of the probes.
        seed: of the probes; public.
    """

    count: int | None
    chunk: int | None
    loss: Loss
    seed: int

    def generator(self, step: int, purpose: str) -> torch.Generator:
        """A generator for one purpose at one step, so that a resumed run draws the same probes."""
        digest = hashlib.sha256(f"dpkfc probes {self.seed} {step} {purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def try_out(self, model: nn.Module, capture: GradientCapture, probe: Probe) -> None:
        """Run two probes: a probe that does not fit is refused before any budget is spent."""
        generator = self.generator(0, "trial")
        try:
            for _ in replace(self, count=2).passes(model, capture, probe, generator):
                pass
        except PrivacyError:
            raise
        except Exception as problem:
            inputs = probe.draw(1, self.generator(0, "trial")).inputs
            shapes = ", ".join(str(list(x.shape[1:])) for x in tensors(inputs))
            raise ValueError(
                f"the model does not run on the probe ({probe.name}), whose inputs have the shape "
                f"{shapes}: {problem}. Give the probe the shape of the model's own inputs, and "
                "give the geometry the loss= that fits the model's outputs"
            ) from problem

    def passes(
        self,
        model: nn.Module,
        capture: GradientCapture,
        probe: Probe,
        generator: torch.Generator,
    ) -> Iterator[list[LayerCall]]:
        """The layer calls (a, δ), pass by pass.

        δ is the gradient of the *sum* of the losses, so that it is per sample.
        """
        reference = next(p for p in model.parameters() if p.is_floating_point())
        probes = probe.draw(self.count or probe.count, generator)
        probes = to(probes, reference.device, reference.dtype)
        for part in split(probes, self.chunk or -(-len(probes) // 4)):
            with (
                _without_side_effects(model, generator),
                capture.recording() as calls,
                torch.enable_grad(),
            ):
                output = call(model, part.inputs)
                classes = getattr(probe, "classes", None)
                losses = probe_losses(self.loss, output, part, generator, classes)
                losses.sum().backward()
            yield calls

    def mapped_norms(
        self,
        model: nn.Module,
        capture: GradientCapture,
        probe: Probe,
        map_of: Callable[[ParamNames], LinearMap],
    ) -> Tensor:
        """``‖U g‖`` of every probe at the current weights."""
        names = {p: name for name, p in model.named_parameters()}
        norms = []
        for calls in self.passes(model, capture, probe, self.generator(0, "clip")):
            with torch.no_grad():
                squared = [
                    grad.squared_norms(map_of(tuple(names[p] for p in key)))
                    for key, grad in combined_grads(calls).items()
                ]
                norms.append(torch.stack(squared).sum(0).sqrt())
        return torch.cat(norms)


@contextlib.contextmanager
def _without_side_effects(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Dropout draws from `generator`; buffers and global generators are restored."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    others = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(others), torch.autocast(device.type, enabled=False):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def combined_grads(calls: list[LayerCall]) -> dict[ParamKey, PerSampleGrad]:
    """The per-sample gradients of one pass, without preconditioner."""
    uses: dict[ParamKey, list[PerSampleGrad]] = {}
    for layer_call in calls:
        for key, grad in per_sample_grads(layer_call).items():
            uses.setdefault(key, []).append(grad)
    return {key: combine(grads) for key, grads in uses.items()}


def diverged(where: str) -> PrivacyError:
    """The error to raise where probing gave values that are not finite."""
    return PrivacyError(
        f"probing the network gave values that are not finite at '{where}': its weights have "
        "diverged. Use a smaller learning rate or clip, and start again from the last checkpoint"
    )
