"""Forward and backward passes over probes at the current weights (Algorithm 1, lines 3 to 6).

Everything here receives the model and its own generators; no private record, batch size or
statistic reaches it. Passes have no side effects: global generators, buffers and gradients are
restored.

Probes are drawn all at once, and run in chunks. Random targets and dropout of a chunk come from a
generator of its own, and the chunks are the same for any number of ranks. So it makes no difference
which rank runs a chunk, or whether one process runs them all.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpkfc.distributed import ALONE, Ranks
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import ParamNames
from dpkfc.per_sample.base import LayerCall, LinearMap, ParamKey, PerSampleGrad
from dpkfc.per_sample.capture import GradientCapture, per_sample_grads
from dpkfc.per_sample.combine import combine
from dpkfc.probes.probe import Probe, Probes, call, digest, split, tensors, to
from dpkfc.probes.targets import Loss, probe_losses
from dpkfc.sharding import is_sharded


@dataclass(frozen=True)
class Probing:
    """How a network is probed.

    Args:
        count: the number of probes; None: what the probe recommends.
        chunk: probes per pass, by default a quarter of them, so that probing needs less memory than
            a batch of as many records. The ranks of a job share the passes: more than four ranks
            need a smaller chunk to have a pass each.
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
        try:
            for _ in replace(self, count=2).passes(model, capture, probe, 0, "trial"):
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
        self, model: nn.Module, capture: GradientCapture, probe: Probe, step: int, purpose: str
    ) -> Iterator[list[LayerCall]]:
        """The layer calls (a, δ), pass by pass.

        δ is the gradient of the *sum* of the losses, so that it is per sample.
        """
        for chunk in self._chunks(self._draw(probe, step, purpose), probe, step, purpose):
            yield self._run(model, capture, chunk)

    def share_passes(
        self,
        model: nn.Module,
        capture: GradientCapture,
        probe: Probe,
        step: int,
        purpose: str,
        ranks: Ranks,
        receive: Callable[[list[LayerCall]], None],
    ) -> None:
        """Divide the passes over the ranks; `receive` gets the layer calls of each of this rank's.

        Ranks take consecutive chunks in their order, and the last rank the last chunk. `receive`
        must not send messages. If it fails on one rank, all ranks raise.
        """
        with ranks.together():
            probes = self._draw(probe, step, purpose)
        if ranks.count > 1 and len(set(ranks.everyone(digest(probes)))) > 1:
            raise ValueError(
                f"the ranks of this job drew different probes ({probe.name}): give all ranks the "
                "same public data, and let random transforms draw from torch's generators only"
            )
        chunks = self._chunks(probes, probe, step, purpose)
        own = own_chunks(len(chunks), ranks)
        with ranks.together():
            for number in own:
                receive(self._run(model, capture, chunks[number]))
            if any(is_sharded(p) for p in model.parameters()):
                # all ranks exchange weights in every pass: those with fewer chunks repeat one
                most = max(
                    len(own_chunks(len(chunks), replace(ranks, rank=k))) for k in range(ranks.count)
                )
                for _ in range(most - len(own)):
                    self._run(model, capture, chunks[-1])

    def _draw(self, probe: Probe, step: int, purpose: str) -> Probes:
        return probe.draw(self.count or probe.count, self.generator(step, purpose))

    def _chunks(self, probes: Probes, probe: Probe, step: int, purpose: str) -> list[_Chunk]:
        classes = getattr(probe, "classes", None)
        parts = split(probes, self.chunk or -(-len(probes) // 4))
        return [
            _Chunk(part, classes, self.generator(step, f"{purpose}, chunk {number}"))
            for number, part in enumerate(parts)
        ]

    def _run(self, model: nn.Module, capture: GradientCapture, chunk: _Chunk) -> list[LayerCall]:
        reference = next(p for p in model.parameters() if p.is_floating_point())
        probes = to(chunk.probes, reference.device, reference.dtype)
        with (
            _without_side_effects(model, chunk.generator),
            capture.recording() as calls,
            torch.enable_grad(),
        ):
            output = call(model, probes.inputs)
            losses = probe_losses(self.loss, output, probes, chunk.generator, chunk.classes)
            losses.sum().backward()
        return calls

    def mapped_norms(
        self,
        model: nn.Module,
        capture: GradientCapture,
        probe: Probe,
        map_of: Callable[[ParamNames], LinearMap],
        ranks: Ranks = ALONE,
    ) -> Tensor:
        """``‖U g‖`` of every probe at the current weights: the same bits on all ranks."""
        names = {p: name for name, p in model.named_parameters()}
        norms: list[Tensor] = []

        def receive(calls: list[LayerCall]) -> None:
            with torch.no_grad():
                squared = [
                    grad.squared_norms(map_of(tuple(names[p] for p in key)))
                    for key, grad in combined_grads(calls).items()
                ]
                norms.append(torch.stack(squared).sum(0).sqrt().cpu())

        self.share_passes(model, capture, probe, 0, "clip", ranks, receive)
        return torch.cat([part for parts in ranks.everyone(norms) for part in parts])


@dataclass(frozen=True)
class _Chunk:
    """The probes of one pass, and the source of its targets and dropout."""

    probes: Probes
    classes: int | None
    generator: torch.Generator


def own_chunks(count: int, ranks: Ranks) -> range:
    """Which of the chunks this rank runs: consecutive ones, as many as the others or one less.

    >>> [list(own_chunks(4, Ranks(rank, 3))) for rank in range(3)]
    [[0], [1], [2, 3]]
    """
    return range(count * ranks.rank // ranks.count, count * (ranks.rank + 1) // ranks.count)


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
