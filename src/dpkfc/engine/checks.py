"""Checks before the first step: what would break the guarantee is found while no budget is spent.

`check_model` and `check_optimizer` look; `check_isolation` and `check_loss` try: a record's gradient must be the same
among other records and among copies of itself. That finds batch normalisation under any name, losses that compare or
rank the records of a batch, denominators that count the tokens of the whole batch, signs and thresholds that depend on
the batch, and tensors whose first dimension is not the batch. A trial reads a few private records. Its error message
contains statistics of them: do not publish it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpkfc.engine.batch import all_equal, copied, has_rows, parts_of, pick
from dpkfc.engine.fingerprint import EXACT, Fingerprint, difference
from dpkfc.engine.rng_state import kept_generators
from dpkfc.errors import PrivacyError
from dpkfc.per_sample.capture import CapturedGrads, GradientCapture, Hook, ParamKey

ROWS = 4  # records in a trial batch
DRAWS = 4  # random seeds with which the reduction is tried
ROUNDED = 1.1  # largest factor by which rounding, also in bfloat16, changes the norm of a gradient
MEAN_OR_SUM = 1.4  # the limit for random losses, about √2: halfway between the ratios 1 and 2


def check_model(model: nn.Module) -> None:
    """Refuse, by name and with the fix, what no per-sample gradient can make private."""
    if not isinstance(model, nn.Module):
        raise PrivacyError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(hook, Hook) and hook.active for hook in model._forward_pre_hooks.values()):
        raise PrivacyError(
            "the model is already private: call detach() on the handle of the earlier make_private first"
        )
    problems = [
        f"'{name or 'the model'}' ({type(module).__name__}): {problem}"
        for name, module in model.named_modules()
        if (problem := _problem_with(module))
    ]
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            problems.append(
                f"parameter '{name}' is not initialised: run one forward pass on public or random input first"
            )
        elif hasattr(p, "device_mesh"):
            problems.append(
                f"parameter '{name}' is sharded over processes (fully_shard), and this process has a part of it only: "
                "train in one process, without fully_shard"
            )
        elif p.requires_grad and not p.is_floating_point():
            problems.append(
                f"parameter '{name}' is {p.dtype}: only real floating-point parameters can be trained"
            )
    if problems:
        raise PrivacyError(
            "this model cannot be trained privately as it is:\n  " + "\n  ".join(problems)
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise PrivacyError(
            "the model has no trainable parameter: set requires_grad on what is to be trained"
        )


def _problem_with(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        frozen = not module.training and not any(p.requires_grad for p in module.parameters())
        return (
            None
            if frozen
            else "mixes the records of a batch. model = dpkfc.fix(model) replaces it by GroupNorm; or "
            "freeze it and call .eval() on it"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of private records. dpkfc.fix(model), or track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and any(
        p.requires_grad for p in module.parameters()
    ):
        if module.max_norm is not None:
            return "max_norm rewrites the rows that a batch uses, without noise. Use max_norm=None"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq counts tokens over the batch. Use scale_grad_by_freq=False"
        if module.sparse:
            return (
                "a private gradient is dense, since noise is added to every row. Use sparse=False"
            )
    trained = any(p.requires_grad for p in module.parameters())
    if (
        trained
        and getattr(module, "batch_first", True) is False
        and isinstance(
            module,
            nn.RNNBase
            | nn.MultiheadAttention
            | nn.TransformerEncoderLayer
            | nn.TransformerDecoderLayer,
        )
    ):
        return "puts time before the batch. Use batch_first=True"
    if type(module).__name__ == "OptimizedModule":
        return (
            "is compiled, so that its layers cannot be watched. Pass the model before torch.compile"
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "wraps the model. Pass the model itself"
    if type(module).__module__.startswith("opacus."):
        return "is already wrapped by Opacus. Pass the plain model"
    return None


def frozen_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm modules that `check_model` let pass because they are frozen and in eval mode."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }


def check_still_frozen(norms: dict[str, nn.Module]) -> None:
    """A call of model.train() may have woken them; they must not see a private batch then."""
    for name, module in norms.items():
        if module.training:
            raise PrivacyError(
                f"'{name}' ({type(module).__name__}) is in training mode, where it mixes the records of a batch: "
                "call .eval() on it after model.train()"
            )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Every trainable parameter must be in the optimizer, and nothing else may be."""
    if not isinstance(optimizer, Optimizer):
        raise PrivacyError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped
    ]
    if missing:
        raise PrivacyError(
            f"trainable parameters missing from the optimizer: {_some(missing)}. They would take their share of "
            "the clipped norm and never move: add them, or set requires_grad=False"
        )
    known = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise PrivacyError(
            f"the optimizer holds {foreign} parameters that are not in the model: they would be stepped without "
            "clipping and noise. Build the optimizer from model.parameters(), after dpkfc.fix(model)"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_isolation(
    model: nn.Module, capture: GradientCapture, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Try the model alone, with a random linear loss on its outputs (or its own loss, if it returns one).

    False if nothing was to be seen, because the records are equal.
    """
    batch = capture.batch
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
        return _linear_loss(out)

    _demand_isolation(model, capture, inputs, rows, loss_of, "the model")
    return True


def check_loss(
    model: nn.Module,
    capture: GradientCapture,
    batch: Any,
    rows: int,
    loss: Callable[[nn.Module, Any], Tensor],
    mean_loss: bool,
) -> None:
    """Try model and loss together on a few records, and the declared reduction on half of them."""

    def loss_of(inputs: Any) -> Tensor:
        return scalar_loss(model, inputs, loss)

    if not any(has_rows(part, rows) for part in parts_of(batch)):
        raise PrivacyError(
            f"a batch is a {type(batch).__name__}, whose records cannot be exchanged for a trial of the loss: let "
            "collate_fn return tensors, or lists, tuples, dicts or dataclasses of them; or give loss='unchecked'"
        )
    _demand_own_parameters(model, capture, batch, loss_of)
    _demand_isolation(model, capture, batch, rows, loss_of, "the model or the loss")
    with _kept_buffers(model), _eval_mode(model):
        _demand_reduction(model, capture, batch, rows, loss_of, mean_loss)


def _demand_reduction(
    model: nn.Module,
    capture: GradientCapture,
    batch: Any,
    rows: int,
    loss_of: Callable[[Any], Tensor],
    mean_loss: bool,
) -> None:
    """With half as many records, the gradients of a mean are twice as long, and those of a sum stay."""
    half = rows // 2
    fewer, share = pick(batch, rows, list(range(half))), half / rows if mean_loss else 1.0
    ratios: list[
        float
    ] = []  # gradient norm in the half batch to that in the whole, corrected for the reduction
    for seed in range(DRAWS):
        whole, part = (_gradients(model, capture, some, loss_of, seed) for some in (batch, fewer))
        assert whole.squared_norms is not None and part.squared_norms is not None
        of_all, of_few = whole.squared_norms[:half].sqrt(), part.squared_norms.sqrt() * share
        sound = of_all.isfinite() & of_few.isfinite() & (of_all > 0) & (of_few > 0)
        ratios += (of_few / of_all)[sound].tolist()
        capture.recycle()
    if not ratios:
        return
    ratio, spread = median(ratios), max(ratios) / min(ratios)
    limit = MEAN_OR_SUM if spread > ROUNDED else ROUNDED
    if not 1 / limit < ratio < limit:
        declared = "mean" if mean_loss else "sum"
        raise PrivacyError(
            f"the loss is not the {declared} over records that loss_reduction='{declared}' declares: with {half} "
            f"records instead of {rows}, a record's gradient is {ratio:.3g} times what it should be. A loss averaged "
            "over all tokens of a batch must be averaged within each record first: "
            "dpkfc.losses.mean_over_records(token_losses, mask)"
        )


def scalar_loss(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> Tensor:
    """The declared loss of a batch."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise PrivacyError(
            "loss(model, batch) must return a scalar tensor, as the training loop's loss"
        )
    return value


def _demand_own_parameters(
    model: nn.Module, capture: GradientCapture, batch: Any, loss_of: Callable[[Any], Tensor]
) -> None:
    """What the loss reaches in each of two calls is no input made in them: it is trainable, and must be the model's."""
    with _kept_buffers(model), capture.replaying(_nothing), kept_generators(0), torch.enable_grad():
        first, second = (list(_leaves_of(loss_of(copied(batch)))) for _ in range(2))
    own = {id(p) for p in model.parameters()} | {id(capture.anchor)}
    for leaf in first:
        if id(leaf) not in own and any(leaf is other for other in second):
            raise PrivacyError(
                f"the loss reaches a trainable tensor of shape {list(leaf.shape)} that is not in the model: it would "
                "be trained without clipping and noise. Make it a parameter of the model before make_private, or set "
                "requires_grad=False"
            )


def _leaves_of(value: Tensor) -> Iterator[Tensor]:
    """Every leaf that a backward pass would reach."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def check_collate(collate: Callable[[list[Any]], Any], records: list[Any]) -> None:
    """Try it: with another record in the last place, all rows but one stay. Mixup, say, puts a record into two rows."""
    changed = [*records[:-1], records[0]]
    try:
        whole, again, other = (
            tree_leaves(_seeded(collate, given)) for given in (records, records, changed)
        )
    except Exception:
        return  # it is tried on every batch anyway, and says then what it cannot do
    _demand_no_statistic(collate, records)
    for x, y, z in zip(whole, again, other, strict=False):
        if not (
            isinstance(x, Tensor)
            and has_rows(x, len(records))
            and x.shape == z.shape
            and torch.equal(x, y)
        ):
            continue  # padded to the longest record, or of a randomness that no seed reaches: nothing can be told
        if (_rows(x) - _rows(z)).total() > 1:  # wherever they stand: it may sort them
            raise PrivacyError(
                "collate_fn mixes the records of a batch (as mixup does): a record would be clipped in several rows, "
                "and count several times. Make every row from one record"
            )


def _demand_no_statistic(collate: Callable[[list[Any]], Any], records: list[Any]) -> None:
    """What has no entry per record must be the same among copies of one record, if all shapes are."""
    rows = len(records)
    whole, again, *alone = (
        _seeded(collate, given)
        for given in (records, records, *([record] * rows for record in records))
    )
    for batch in alone:
        if _shapes(batch) != _shapes(whole):
            continue  # padded to the longest record: nothing can be told
        for x, y, z in zip(
            *(_without_rows(part, rows) for part in (whole, again, batch)), strict=True
        ):
            if _equal(x, y) and not _equal(x, z):
                raise PrivacyError(
                    "collate_fn computes something from all records of a batch (a mean, a count, weights): one record "
                    "would act on all others through it. Let it return what belongs to single records only"
                )


def _shapes(batch: Any) -> list[Any]:
    return [getattr(x, "shape", None) for x in tree_leaves(batch)]


def _without_rows(batch: Any, rows: int) -> list[Any]:
    """The tensors, numbers and lists of numbers in the batch that do not have one entry per record."""
    if isinstance(batch, int | float):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif isinstance(batch, Tensor) or (
        isinstance(batch, list | tuple) and not any(map(_is_nested, batch))
    ):
        return [] if has_rows(batch, rows) else [batch]
    if isinstance(batch, list | tuple):
        return [found for part in batch for found in _without_rows(part, rows)]
    return []


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor | Mapping | list | tuple)


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)


def _rows(x: Tensor) -> Counter[str]:
    return Counter(str(row.tolist()) for row in x)


def _seeded(collate: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """With the same random numbers each time."""
    with kept_generators(seed=0):
        batch = collate(list(records))
        return dict(batch) if isinstance(batch, Mapping) else batch


def _demand_isolation(
    model: nn.Module,
    capture: GradientCapture,
    inputs: Any,
    rows: int,
    loss_of: Callable[[Any], Tensor],
    who: str,
) -> None:
    """Fill the batch with copies of one record: its gradient, in its own row, must stay what it was among the others.

    Shapes, random masks and the scale of the loss stay the same, so that the gradients agree to rounding in any dtype.
    """
    with _kept_buffers(model) as restore:
        whole = _gradients(model, capture, inputs, loss_of)
        buffers = buffers_of(model)
        for row in range(rows):
            restore()
            alone = _gradients(model, capture, pick(inputs, rows, [row] * rows), loss_of)
            demand_same_buffers(model, buffers, buffers_of(model))
            among_others, among_copies = (
                Fingerprint.of(found, _one_row(rows, row)) for found in (whole, alone)
            )
            demand_same(among_others, among_copies, model, who)
        capture.recycle()


def demand_same(one: Fingerprint, other: Fingerprint, model: nn.Module, who: str) -> None:
    """The other records changed between the two passes; the gradients of these must be equal."""
    found = difference(one, other, EXACT)
    if found is not None:
        raise PrivacyError(
            f"{who} mixes the records of a batch: a record's gradient changes with the other records (by "
            f"{found.share:.2g} of its length, most at {where(model, found.slot)}). Keep the batch in the first "
            "dimension. Use no statistics over the batch, and no class weights that are normalised over the batch. For "
            "losses over tokens use dpkfc.losses.mean_over_records"
        )


def where(model: nn.Module, slot: ParamKey | None) -> str:
    """The parameters by their names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return ", ".join(f"'{names[id(p)]}'" for p in slot or ()) or "no parameter"


def _gradients(
    model: nn.Module,
    capture: GradientCapture,
    inputs: Any,
    loss_of: Callable[[Any], Tensor],
    seed: int = 0,
) -> CapturedGrads:
    """The per-sample gradients of one forward and backward; inputs and randomness stay put."""
    with capture.replaying(_nothing), kept_generators(seed), torch.enable_grad():
        loss_of(copied(inputs)).backward()
        captured = capture.drain()
    if captured.squared_norms is None:
        raise PrivacyError(
            "backward() reached no trainable parameter of the model: nothing would be trained"
        )
    return captured


def _nothing(*args: Any) -> None:
    return None


def _one_row(rows: int, row: int) -> Tensor:
    return torch.eye(rows)[row]


Buffers = list[tuple[nn.Module, str, Tensor | None]]


def buffers_of(model: nn.Module) -> Buffers:
    """Copies of all buffers, and where they belong."""
    return [
        (module, name, None if b is None else b.clone())
        for module in model.modules()
        for name, b in module._buffers.items()
    ]


def put_buffers(buffers: Buffers) -> None:
    """Their values again, also of those that were made, or grew, in the meantime."""
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
    before = buffers_of(model)
    try:
        yield lambda: put_buffers(before)
    finally:
        put_buffers(before)


def demand_same_buffers(model: nn.Module, one: Buffers, other: Buffers) -> None:
    """Between the two passes records were exchanged; buffers must not notice."""
    for (module, name, x), (_, _, y) in zip(one, other, strict=True):
        if x is None or y is None or x.shape != y.shape:
            continue
        if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
            place = next(
                f"{where}.{name}".strip(".")
                for where, each in model.named_modules()
                if each is module
            )
            raise PrivacyError(
                f"buffer '{place}' is computed from the records of a batch and would be released without noise: make "
                "the layer that owns it use the current input only"
            )


def _linear_loss(out: Any) -> Tensor:
    outputs = [
        x
        for x in tree_leaves(out)
        if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()
    ]
    if not outputs:
        raise PrivacyError(
            f"the model returned no tensor that depends on a trainable parameter (got {type(out).__name__})"
        )
    return torch.stack([(x * torch.randn_like(x)).sum() for x in outputs]).sum()


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, whose masks would shift with the batch; then each module goes back to its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
