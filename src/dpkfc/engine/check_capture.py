"""Compare a model under capture with the plain model, and explain where a pass fails.

Capture reads the batch dimension off the shapes of tensors, and runs some modules under vmap. If it
misreads a shape, the loss or the gradients differ from those of the plain model. This is seen on a
few records, before any budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpkfc.engine.batch import copied, map_parts
from dpkfc.engine.fingerprint import SAME, SMALL, Fingerprint, differing_keys
from dpkfc.engine.rng_state import kept_generators
from dpkfc.errors import CaptureError, PrivacyError
from dpkfc.per_sample.base import ParamKey
from dpkfc.per_sample.capture import CapturedGrads, GradientCapture
from dpkfc.per_sample.rounding import at_least_float32
from dpkfc.sharding import is_sharded, local, zeros_of

LossOfBatch = Callable[[Any], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class PlainPass:
    """Loss and gradients of the plain model, from generators that start at 0.

    Parameters inside a reentrant checkpoint have no entry: autograd does not see them.
    """

    loss: Tensor
    grads: dict[int, Tensor]  # by the parameters' ids; of sharded ones, this rank's part


def plain_pass(
    model: nn.Module, capture: GradientCapture, inputs: Any, loss_of: LossOfBatch
) -> PlainPass:
    """One pass of the plain model.

    Raises:
        ValueError: it fails.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with (
        capture.suspended(),
        kept_generators(0),
        torch.enable_grad(),
        # cuDNN computes no gradients of recurrent layers in evaluation mode
        torch.backends.cudnn.flags(enabled=False),
    ):
        try:
            loss = loss_of(copied(inputs))
            grads = _gradients_of(loss, params)
        except Exception as problem:
            if _in_words(problem):
                raise
            _, where = innermost_module(model, problem)
            raise ValueError(
                f"{where} fails on a batch of the data, also without privacy: "
                f"{type(problem).__name__}: {problem}. Correct the model, the loss, or what the "
                "data set and its collate_fn return"
            ) from problem
    hidden = any("CheckpointFunction" in node.name() for node in nodes_of(loss))
    return PlainPass(
        loss.detach(),
        {
            id(p): zeros_of(p, p.dtype) if grad is None else at_least_float32(grad)
            for p, grad in zip(params, grads, strict=True)
            if grad is not None or not hidden
        },
    )


def _gradients_of(loss: Tensor, params: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """The gradients of the loss; of sharded parameters, the part that this rank holds.

    FSDP2 reduces gradients only in `backward`. It takes the mean over the ranks, which all have the
    same batch here.
    """
    if not any(is_sharded(p) for p in params):
        return torch.autograd.grad(loss, params, allow_unused=True)
    loss.backward()
    grads = [None if p.grad is None else local(p.grad) for p in params]
    for p in params:
        p.grad = None
    return grads


def same_as_plain(
    model: nn.Module,
    capture: GradientCapture,
    inputs: Any,
    loss_of: LossOfBatch,
    plain: PlainPass,
    captured: CapturedGrads,
    loss: Tensor,
) -> None:
    """Refuse a capture that changes the loss or the sum of all gradients.

    Args:
        model, capture: the model with its hooks.
        inputs: of the pass.
        loss_of: the loss of a batch.
        plain: what the plain model computed.
        captured, loss: what the captured pass computed, from generators that start at 0.

    **Guarantee.** On these records, loss and Σ_i g_i are those of plain autograd, up to rounding,
    for every trainable parameter on its own scale. That each g_i belongs to record i is checked
    separately: a record's gradient must not change with the other records.

    Raises:
        CaptureError: they differ.
    """
    _same_loss(capture, inputs, loss_of, loss, plain.loss, captured.eps)
    own = Fingerprint.of(captured, torch.ones(captured.batch_size))
    differing = _differing(model, own, plain)
    if differing and not any(is_sharded(p) for p in model.parameters()):
        # where large terms cancel, it may be the plain sum that is rounded
        with suppress(Exception), _in_float64(model):
            exact = plain_pass(model, capture, _floats_to_double(inputs), loss_of)
            differing = _differing(model, own, exact)
    if differing:
        names = {id(p): name for name, p in model.named_parameters()}
        worst = ", ".join(f"'{names[id(p)]}'" for p in differing[0])
        owners = capture.owners(p for key in differing for p in key)
        raise CaptureError(
            f"the captured gradients of {worst} do not add up to the gradient of the plain model: "
            f"the first dimension of what module '{owners[0]}' gets is not the batch, or its "
            "parameter is used elsewhere too. Keep the batch in the first dimension, freeze the "
            "module, or name the module that calls it in Options(vmap_modules=[...])",
            *owners,
        )


def _differing(model: nn.Module, own: Fingerprint, plain: PlainPass) -> list[ParamKey]:
    """The parameters whose captured gradients do not add up to those of the plain model."""
    params = [p for p in model.parameters() if p.requires_grad]
    seen = {id(p) for key in own.sums for p in key}
    keys = [*own.sums, *((p,) for p in params if id(p) not in seen)]
    sums = {
        key: [plain.grads[id(p)] for p in key]
        for key in keys
        if all(id(p) in plain.grads for p in key)
    }
    captured = {
        key: own.sums.get(key, [torch.zeros_like(x) for x in parts]) for key, parts in sums.items()
    }
    return differing_keys(replace(own, sums=captured), replace(own, sums=sums), SAME)


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers are float64 inside the block, and the same bits as before after it."""
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    before = [x.data for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.double()
        yield
    finally:
        for x, data in zip(tensors, before, strict=True):
            x.data = data


def _floats_to_double(inputs: Any) -> Any:
    def double(part: Any) -> Any:
        is_float = isinstance(part, Tensor) and part.is_floating_point()
        return part.double() if is_float else part

    return map_parts(double, inputs)


def _same_loss(
    capture: GradientCapture,
    inputs: Any,
    loss_of: LossOfBatch,
    loss: Tensor,
    plain_loss: Tensor,
    eps: float,
) -> None:
    limit = SAME.limit(max(eps, torch.finfo(plain_loss.dtype).eps))

    def differs(value: Tensor) -> bool:
        # a loss may cancel to zero: the gradients are compared on their own scale
        scale = max(abs(float(plain_loss)), SMALL)
        return not abs(float(value) - float(plain_loss)) <= limit * scale

    if not differs(loss):
        return
    changed = []
    for hooked in capture.hooked_modules:
        with capture.suspended(except_for=hooked), kept_generators(0), torch.enable_grad():
            if differs(loss_of(copied(inputs)).detach()):
                changed.append(hooked)
    listed = ", ".join(f"'{each.name}' ({type(each.module).__name__})" for each in changed[:4])
    raise CaptureError(
        f"the loss is {float(loss):.6g} while gradients are captured, and {float(plain_loss):.6g} "
        f"otherwise: {listed or 'a module'} computes something else sample by sample. Keep the "
        "batch in the first dimension of its inputs, freeze it, or give it an adapter with "
        "dpkfc.register_layer",
        *(each.name for each in changed),
    )


def nodes_of(value: Tensor) -> Iterator[Any]:
    """Every node of the autograd graph that a backward pass would reach."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


# -- failures of a pass


def captured_pass(model: nn.Module, run: Callable[[], T]) -> T:
    """Run a pass under capture. If it fails inside the model or the loss, say where.

    Raises:
        CaptureError: it fails; the plain model was tried before.
    """
    try:
        return run()
    except Exception as problem:
        if _in_words(problem):
            raise
        name, where = innermost_module(model, problem)
        raise CaptureError(
            f"{where} fails while gradients are captured per sample, although it works without: "
            f"{type(problem).__name__}: {problem}. Keep the batch in the first dimension of all "
            "tensors. Or freeze the module, or name it in Options(vmap_modules=[...]), or give it "
            "an adapter with dpkfc.register_layer",
            *(() if name is None else (name,)),
        ) from problem


def innermost_module(model: nn.Module, problem: BaseException) -> tuple[str | None, str]:
    """The module whose code raised an error, by name and in words; None if it was the loss."""
    names = {module: name for name, module in model.named_modules()}
    found = None
    for frame in _frames(problem.__traceback__):
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = owner
    if found is None:
        return None, "the loss, or its backward pass,"
    return names[found], f"module '{names[found] or 'the model'}' ({type(found).__name__})"


def _in_words(problem: BaseException) -> bool:
    """The library's own errors name the module and say what to do."""
    if isinstance(problem, PrivacyError):
        return True
    *_, last = _frames(problem.__traceback__)
    in_a_module = isinstance(last.tb_frame.f_locals.get("self"), nn.Module)
    return last.tb_frame.f_globals.get("__name__", "").startswith("dpkfc.") and not in_a_module


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
