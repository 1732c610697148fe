"""Checks before the first step: what would break the guarantee is found before any budget is spent.

`check_model` and `check_optimizer` inspect. `check_isolation` and `check_loss` try: a record's
gradient must be the same among other records and among copies of itself. This finds batch
normalisation under any name, losses that compare or rank the records of a batch, denominators that
count the tokens of the whole batch, signs and thresholds that depend on the batch, and tensors
whose first dimension is not the batch. A trial reads a few private records, and its error message
contains statistics of them: do not publish it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpkfc import sharding
from dpkfc.distributed import ALONE, Ranks
from dpkfc.engine.batch import all_equal, copied, has_rows, parts_of, pick
from dpkfc.engine.check_capture import (
    LossOfBatch,
    PlainPass,
    captured_pass,
    nodes_of,
    plain_pass,
    same_as_plain,
)
from dpkfc.engine.fingerprint import EXACT, SAME, Fingerprint, difference, differing_keys
from dpkfc.engine.rng_state import kept_generators
from dpkfc.engine.trial import ROWS, Trial
from dpkfc.errors import CaptureError, PrivacyError
from dpkfc.per_sample.base import ParamKey, PreconditionerOf, no_preconditioner
from dpkfc.per_sample.capture import CapturedGrads, GradientCapture, Hook

DRAWS = 4  # random seeds with which the reduction is tried
ROUNDED = 1.1  # largest factor by which rounding, also in bfloat16, changes the norm of a gradient
MEAN_OR_SUM = 1.4  # the limit for random losses, about √2: between the ratios 1 and 2
SHOWN_NAMES = 8


# -- the model and the optimizer


def check_model(model: nn.Module, ranks: Ranks = ALONE) -> None:
    """Refuse, by name and with the fix, what no per-sample gradient can make private."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    sharding.reshard(model)
    if any(isinstance(h, Hook) and h.active for h in model._forward_pre_hooks.values()):
        raise PrivacyError(
            "the model is already private: call detach() on the run of the earlier make_private"
        )
    problems = [
        f"'{name or 'the model'}' ({type(module).__name__}): {problem}"
        for name, module in model.named_modules()
        if (problem := _problem_with_module(module))
    ]
    problems += [
        f"parameter '{name}' {problem}"
        for name, p in model.named_parameters()
        if (problem := _problem_with_parameter(p) or sharding.problem_with(p, ranks))
    ]
    if problem := sharding.all_or_none(dict(model.named_parameters())):
        problems.append(problem)
    if problems:
        listed = "\n  ".join(problems)
        raise PrivacyError(f"this model cannot be trained privately as it is:\n  {listed}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter: set requires_grad where needed")


def _problem_with_parameter(p: nn.Parameter) -> str | None:
    if isinstance(p, UninitializedParameter):
        return "is not initialised: run one forward pass on public or random input first"
    if p.requires_grad and not p.is_floating_point():
        return f"is {p.dtype}: only real floating-point parameters can be trained"
    return None


def _problem_with_module(module: nn.Module) -> str | None:
    trained = any(p.requires_grad for p in module.parameters())
    if isinstance(module, _BatchNorm) and (module.training or trained):
        return (
            "mixes the records of a batch. model = dpkfc.fix(model) replaces it by GroupNorm; or "
            "freeze it and call .eval() on it"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return (
            "keeps running statistics of private records. Use dpkfc.fix(model), or "
            "track_running_stats=False"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and trained:
        if module.max_norm is not None:
            return "max_norm rewrites the rows that a batch uses, without noise. Use max_norm=None"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq counts tokens over the batch. Use scale_grad_by_freq=False"
        if module.sparse:
            return "a private gradient is dense: noise is added to every row. Use sparse=False"
    time_first = getattr(module, "batch_first", True) is False
    sequential = (
        nn.RNNBase,
        nn.MultiheadAttention,
        nn.TransformerEncoderLayer,
        nn.TransformerDecoderLayer,
    )
    if trained and time_first and isinstance(module, sequential):
        return "puts time before the batch. Use batch_first=True"
    if type(module).__name__ == "OptimizedModule":
        return "is compiled, so its layers cannot be captured. Pass the model before torch.compile"
    if isinstance(module, nn.DataParallel):
        return "wraps the model. Pass the model itself; for several devices, use torchrun"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "wraps a part of the model. Wrap the whole model, or nothing: see docs/scaling.md"
    if type(module).__name__ == "FullyShardedDataParallel":
        return "is FSDP's first version. Use torch.distributed.fsdp.fully_shard"
    if type(module).__module__.startswith("opacus."):
        return "is already wrapped by Opacus. Pass the plain model"
    return None


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Every trainable parameter must be in the optimizer, and nothing else may be."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped
    ]
    if missing:
        more = f" and {len(missing) - SHOWN_NAMES} more" if len(missing) > SHOWN_NAMES else ""
        raise ValueError(
            "trainable parameters missing from the optimizer: "
            f"{', '.join(missing[:SHOWN_NAMES])}{more}. They would take their share of the clipped "
            "norm and never be updated: add them, or set requires_grad=False"
        )
    foreign = len(stepped - {id(p) for p in model.parameters()})
    if foreign:
        raise PrivacyError(
            f"the optimizer holds {foreign} parameters that are not in the model: they would be "
            "stepped without clipping and noise. Build the optimizer from model.parameters(), "
            "after dpkfc.fix(model)"
        )


# -- trials of the model and the loss


def check_isolation(
    model: nn.Module,
    capture: GradientCapture,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preconditioner_of: PreconditionerOf,
) -> bool:
    """Try the model alone, with its own loss if it returns one, else a random linear loss.

    Returns:
        False if the records are equal, so that mixing cannot be seen.
    """
    batch = capture.batch_size
    assert batch is not None
    rows = min(ROWS, batch)
    inputs = pick((args, kwargs), batch, list(range(rows)))
    if all_equal(inputs, rows):
        return False

    def loss_of(inputs: Any) -> Tensor:
        out = model(*inputs[0], **inputs[1])
        own = getattr(out, "loss", None)
        if isinstance(own, Tensor) and own.dim() == 0:
            return own
        return _random_linear_loss(out)

    plain = _try_plain(model, capture, inputs, loss_of)
    _check_capture(model, capture, inputs, rows, loss_of, plain)
    _check_records_apart(model, capture, inputs, rows, loss_of, "the model", preconditioner_of)
    return True


def check_loss(
    model: nn.Module,
    capture: GradientCapture,
    trial: Trial,
    loss: Callable[[nn.Module, Any], Tensor],
    mean_loss: bool,
) -> None:
    """Try model and loss together on a few records, and the declared reduction on half of them."""
    batch, rows = trial.batch, trial.rows

    def loss_of(inputs: Any) -> Tensor:
        return scalar_loss(model, inputs, loss)

    if not any(has_rows(part, rows) for part in parts_of(batch)):
        raise PrivacyError(
            f"a batch is a {type(batch).__name__}, whose records cannot be exchanged for a trial "
            "of the loss: let collate_fn return tensors, or lists, tuples, dicts or dataclasses of "
            "them; or give loss='unchecked'"
        )
    plain = _try_plain(model, capture, batch, loss_of)
    _check_leaves(model, capture, batch, loss_of)
    _check_capture(model, capture, batch, rows, loss_of, plain)
    _check_records_apart(model, capture, batch, rows, loss_of, "the model or the loss")
    with _kept_buffers(model), _eval_mode(model):
        _check_padding(model, capture, trial, loss_of)
        _check_reduction(model, capture, batch, rows, loss_of, mean_loss)


def scalar_loss(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> Tensor:
    """The declared loss of a batch."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise TypeError("loss(model, batch) must return a scalar tensor, as the loop's loss is")
    return value


def _try_plain(
    model: nn.Module, capture: GradientCapture, batch: Any, loss_of: LossOfBatch
) -> PlainPass:
    """The plain model must work in the mode that it is in; returned is a pass without dropout."""
    with _kept_buffers(model) as restore:
        try:
            plain_pass(model, capture, batch, loss_of)
            restore()
            with _eval_mode(model):
                return plain_pass(model, capture, batch, loss_of)
        except ValueError:
            # capture may know the module, as of an input that is changed in place
            with contextlib.suppress(CaptureError, ValueError):
                _gradients(model, capture, batch, loss_of)
            raise


def _check_capture(
    model: nn.Module,
    capture: GradientCapture,
    batch: Any,
    rows: int,
    loss_of: LossOfBatch,
    plain: PlainPass,
) -> None:
    """Without dropout, loss and gradients must be those of the plain model."""
    values: list[Tensor] = []

    def kept_loss_of(inputs: Any) -> Tensor:
        values.append(loss_of(inputs))
        return values[-1]

    with _kept_buffers(model) as restore, _eval_mode(model):
        captured = _gradients(model, capture, batch, kept_loss_of)
        assert captured.squared_norms is not None
        finite = captured.squared_norms.isfinite().nonzero().flatten().tolist()
        if 0 < len(finite) < rows:
            # training drops a record that is not finite; a plain sum does not
            batch = pick(batch, rows, [finite[row % len(finite)] for row in range(rows)])
            restore()
            plain = plain_pass(model, capture, batch, loss_of)
            restore()
            captured = _gradients(model, capture, batch, kept_loss_of)
        if finite:
            loss = values[-1].detach()
            same_as_plain(model, capture, batch, loss_of, plain, captured, loss)
        capture.reuse_workspaces()


def _check_leaves(
    model: nn.Module, capture: GradientCapture, batch: Any, loss_of: LossOfBatch
) -> None:
    """Refuse a loss that reaches a trainable tensor outside the model.

    An autograd leaf that two calls have in common was not created in the call: it is trainable.
    """

    def leaves() -> list[Tensor]:
        with capture.accumulating(), kept_generators(0), torch.enable_grad():
            return list(_leaves_of(loss_of(copied(batch))))

    with _kept_buffers(model):
        first, second = (captured_pass(model, leaves) for _ in range(2))
    own = {id(p) for p in model.parameters()} | {id(capture.anchor)}
    for leaf in first:
        if id(leaf) not in own and any(leaf is other for other in second):
            raise PrivacyError(
                f"the loss reaches a trainable tensor of shape {list(leaf.shape)} that is not in "
                "the model: it would be trained without clipping and noise. Make it a parameter of "
                "the model before make_private, or set requires_grad=False"
            )


def _leaves_of(value: Tensor) -> Iterator[Tensor]:
    """Every leaf that a backward pass would reach."""
    for node in nodes_of(value):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


def _check_records_apart(
    model: nn.Module,
    capture: GradientCapture,
    inputs: Any,
    rows: int,
    loss_of: LossOfBatch,
    who: str,
    preconditioner_of: PreconditionerOf = no_preconditioner,
) -> None:
    """A record's gradient among others must be what it is in a batch of copies of that record.

    Shapes, random masks and the scale of the loss stay the same, so that the gradients agree up to
    rounding in any dtype.
    """
    with _kept_buffers(model) as restore:
        whole = _gradients(model, capture, inputs, loss_of, preconditioner_of)
        buffers = get_buffers(model)
        for row in range(rows):
            restore()
            copies = pick(inputs, rows, [row] * rows)
            alone = _gradients(model, capture, copies, loss_of, preconditioner_of)
            same_buffers(model, buffers, get_buffers(model))
            one_hot = torch.eye(rows)[row]
            among_others, among_copies = (Fingerprint.of(g, one_hot) for g in (whole, alone))
            differing = differing_keys(among_others, among_copies, EXACT)
            if len(differing) < len(among_others.sums):
                shared_by_samples(capture, model, differing)
            records_stay_apart(among_others, among_copies, model, who)
        capture.reuse_workspaces()


def _check_padding(
    model: nn.Module, capture: GradientCapture, trial: Trial, loss_of: LossOfBatch
) -> None:
    """A record's gradient must not depend on how far the longest record of its batch pads it."""
    if not trial.alone:
        return
    whole = _gradients(model, capture, trial.batch, loss_of)
    for row, less_padded in trial.alone.items():
        alone = _gradients(model, capture, less_padded, loss_of)
        one_hot = torch.eye(trial.rows)[row]
        differs = difference(Fingerprint.of(whole, one_hot), Fingerprint.of(alone, one_hot), SAME)
        if differs is not None:
            raise PrivacyError(
                "a record's gradient depends on how far its batch is padded, and so on the longest "
                f"record of the batch (by {differs.share:.2g} of its length, most at "
                f"{describe_key(model, differs.key)}). Mask what is padded: pass attention_mask, "
                "and position_ids if the padding is on the left; use no mean, maximum or "
                "normalisation over padded positions. Or pad all records to one length"
            )
    capture.reuse_workspaces()


def _check_reduction(
    model: nn.Module,
    capture: GradientCapture,
    batch: Any,
    rows: int,
    loss_of: LossOfBatch,
    mean_loss: bool,
) -> None:
    """With half as many records, gradients of a mean are twice as long, and those of a sum stay."""
    half = rows // 2
    fewer = pick(batch, rows, list(range(half)))
    share = half / rows if mean_loss else 1.0
    # gradient norm in the half batch relative to the whole one, corrected for the reduction
    ratios: list[float] = []
    for seed in range(DRAWS):
        whole, part = (
            _gradients(model, capture, some, loss_of, seed=seed) for some in (batch, fewer)
        )
        assert whole.squared_norms is not None and part.squared_norms is not None
        of_all, of_few = whole.squared_norms[:half].sqrt(), part.squared_norms.sqrt() * share
        usable = of_all.isfinite() & of_few.isfinite() & (of_all > 0) & (of_few > 0)
        ratios += (of_few / of_all)[usable].tolist()
        capture.reuse_workspaces()
    if not ratios:
        return
    ratio, spread = median(ratios), max(ratios) / min(ratios)
    limit = MEAN_OR_SUM if spread > ROUNDED else ROUNDED
    if not 1 / limit < ratio < limit:
        declared = "mean" if mean_loss else "sum"
        raise PrivacyError(
            f"the loss is not the {declared} over records that loss_reduction='{declared}' "
            f"declares: with {half} records instead of {rows}, a record's gradient is {ratio:.3g} "
            "times what it should be. A loss averaged over all tokens of a batch must be averaged "
            "within each record first: dpkfc.losses.mean_over_records(token_losses, mask)"
        )


def _gradients(
    model: nn.Module,
    capture: GradientCapture,
    inputs: Any,
    loss_of: LossOfBatch,
    preconditioner_of: PreconditionerOf = no_preconditioner,
    seed: int = 0,
) -> CapturedGrads:
    """The per-sample gradients of one forward and backward; inputs and generators are kept."""

    def run() -> CapturedGrads:
        with capture.accumulating(preconditioner_of) as grads, kept_generators(seed):
            with torch.enable_grad():
                loss_of(copied(inputs)).backward()
            return grads.take()

    captured = captured_pass(model, run)
    if captured.squared_norms is None:
        raise ValueError(
            "backward() reached no trainable parameter of the model: nothing would be trained"
        )
    return captured


def records_stay_apart(one: Fingerprint, other: Fingerprint, model: nn.Module, who: str) -> None:
    """The other records changed between two passes; the gradients of these must be equal."""
    differs = difference(one, other, EXACT)
    if differs is not None:
        raise PrivacyError(
            f"{who} mixes the records of a batch: a record's gradient changes with the other "
            f"records (by {differs.share:.2g} of its length, most at "
            f"{describe_key(model, differs.key)}). Keep the batch in the first dimension. Use no "
            "statistics over the batch, and no class weights that are normalised over the batch. "
            "For losses over tokens use dpkfc.losses.mean_over_records"
        )


def shared_by_samples(
    capture: GradientCapture, model: nn.Module, differing: list[ParamKey]
) -> None:
    """Records are apart, except at some parameters: what they compute is shared by all samples."""
    if differing:
        owners = capture.owners(p for key in differing for p in key)
        raise CaptureError(
            f"module '{owners[0]}' mixes the records of a batch: a record's gradient of "
            f"{describe_key(model, differing[0])} changes with the other records, although that of "
            "other parameters does not. Keep the batch in the first dimension of what the module "
            "gets. If it computes something that all samples share, such as relative positions, "
            "freeze it, or name the module that calls it in Options(vmap_modules=[...])",
            *owners,
        )


def describe_key(model: nn.Module, key: ParamKey | None) -> str:
    """The parameters by their names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return ", ".join(f"'{names[id(p)]}'" for p in key or ()) or "no parameter"


def _random_linear_loss(out: Any) -> Tensor:
    outputs = [
        x
        for x in tree_leaves(out)
        if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()
    ]
    if not outputs:
        raise ValueError(
            "the model returned no tensor that depends on a trainable parameter (got "
            f"{type(out).__name__})"
        )
    return torch.stack([(x * torch.randn_like(x)).sum() for x in outputs]).sum()


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout, whose masks would shift with the batch; modes are restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# -- buffers

Buffers = list[tuple[nn.Module, str, Tensor | None]]


def get_buffers(model: nn.Module) -> Buffers:
    """Copies of all buffers, with the module and name that they belong to."""
    return [
        (module, name, None if b is None else b.clone())
        for module in model.modules()
        for name, b in module._buffers.items()
    ]


def restore_buffers(buffers: Buffers) -> None:
    """Restore values, also of buffers that were created, or changed their shape, in between."""
    with torch.no_grad():
        for module, name, value in buffers:
            present = module._buffers.get(name)
            if present is not None and value is not None and present.shape == value.shape:
                present.copy_(value)
            else:
                module._buffers[name] = None if value is None else value.clone()


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore buffers at the end of a trial, and whenever the yielded function is called."""
    before = get_buffers(model)
    try:
        yield lambda: restore_buffers(before)
    finally:
        restore_buffers(before)


def same_buffers(model: nn.Module, one: Buffers, other: Buffers) -> None:
    """Between two passes records were exchanged: no buffer may depend on that."""
    for (module, name, x), (_, _, y) in zip(one, other, strict=True):
        if x is None or y is None or x.shape != y.shape:
            continue
        if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
            path = next(path for path, each in model.named_modules() if each is module)
            raise PrivacyError(
                f"buffer '{f'{path}.{name}'.strip('.')}' is computed from the records of a batch "
                "and would be released without noise: make the layer that owns it use the current "
                "input only"
            )
