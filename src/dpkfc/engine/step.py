"""One private step, in order: from captured per-sample gradients to ``.grad``.

    g_i                                captured gradients, one per sample (per_sample/)
    c_i = min(1, R / ‖U g_i‖)          clip in the preconditioned space
    x_t = Σ_i c_i U g_i / E[batch]     = U Σ_i c_i g_i / E[batch]: the sum is mapped once, and
                                       added up over the ranks of a distributed job
    x_t + w_t,  w = C⁻¹ z              noise is added once, to the sum of the whole logical batch
    .grad                              x_t + w_t on a grid; then maps after the noise, if any

All functions get their state as arguments. A name that ends in _ changes its first argument in
place; `write_grads` and `release` set ``.grad``. Training calls them from `engine.run`; diagnostics
call the same functions.

**Guarantee: any geometry can be combined with any noise.** Adding or removing a record moves x_t by
a vector of norm at most R / E[batch] if the record was drawn at step t, and by 0 otherwise. This
holds for every map U_t, because clipping comes after U_t, and U_t depends only on public numbers
and on what was released before step t. So (x_t) is an adaptive stream with bounded participations,
which is all that the matrix mechanism needs (Denisov et al., 2022): releasing ``x + C⁻¹ z = C⁻¹ (C
x + z)`` has the privacy of the Gaussian mechanism with the sensitivity of C. No inverse map
follows: the optimizer uses x_t + w_t directly, so the noise in θ is ``A C⁻¹ z``, as without a
geometry. Noise added at one step is still cancelled at later steps, although U has changed in
between. A map *after* the noise costs no privacy either, but if it changes over time the noise no
longer cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkfc.clipping import ROUNDING
from dpkfc.distributed import ALONE, BUCKET, Ranks
from dpkfc.noise.grid import round_to_grid_
from dpkfc.noise.stream import Stream
from dpkfc.per_sample.base import LinearMap, ParamKey, PerSampleGrad, PreconditionerOf
from dpkfc.per_sample.capture import CapturedGrads
from dpkfc.per_sample.rounding import at_least_float32, branches_are_cheap
from dpkfc.sharding import (
    is_sharded,
    like_parameter,
    local,
    mesh_of,
    sum_over_ranks,
    zeros_of,
)

Sums = dict[ParamKey, list[Tensor]]


@dataclass(frozen=True)
class ClippedBatch:
    """The clipped gradients of one physical batch, added up."""

    sums: Sums  # Σ_i c_i U g_i / E[batch]
    clip_factors: Tensor  # [batch], c_i; 0 for a sample that is not finite
    finite: Tensor  # [batch]


def clip_and_sum(
    captured: CapturedGrads,
    preconditioner_of: PreconditionerOf,
    *,
    clip: float,
    gamma: float | None,
    grad_scale: float,
    expected_batch_size: int,
    sharded: Sequence[nn.Parameter] = (),
    placeholder: bool = False,
) -> ClippedBatch | None:
    """Clip each sample's preconditioned gradient and add them up: ``Σ_i c_i U g_i / E[batch]``.

    Args:
        captured: the gradients of one physical batch. They are consumed: each is freed once it is
            added up.
        preconditioner_of: the map U of each parameter.
        clip: R.
        gamma: of automatic clipping; None for plain clipping.
        grad_scale: the factor that makes a captured gradient the gradient of one sample's own loss:
            the batch size for a mean loss, divided by the scale of a GradScaler.
        expected_batch_size: the sum is divided by it.
        sharded: trainable parameters that are divided over ranks. A layer's sum over all ranks is
            formed, and this rank keeps its own part.
        placeholder: these samples do not count; this rank only takes part in the sums.

    Returns:
        None if nothing was captured.

    **Guarantee.** Every sample contributes a vector of norm at most R / E[batch] in the
    preconditioned space. A sample whose gradient is not finite contributes exactly zero.
    """
    if captured.squared_norms is None:
        return None
    factors, finite = clip_factors(captured.squared_norms * grad_scale**2, clip, gamma)
    counted = torch.zeros_like(finite) if placeholder else finite
    weights = factors * counted * (grad_scale / expected_batch_size)
    # on an accelerator all are masked: the host does not wait for the answer
    all_counted = branches_are_cheap(counted) and bool(counted.all())

    def sum_of(key: ParamKey) -> list[Tensor]:
        grad = captured.grads.pop(key)
        # 0 · NaN is NaN: entries of samples that are not finite are set to zero
        grad = grad if all_counted else grad.masked(counted)
        return preconditioned_sum(grad, weights, preconditioner_of(key))

    if sharded:
        sums = sharded_sums(list(captured.grads), sum_of, sharded)
    else:
        sums = {key: sum_of(key) for key in reversed(list(captured.grads))}
    return ClippedBatch(sums, factors, finite)


def sharded_sums(
    keys: Iterable[ParamKey],
    sum_of: Callable[[ParamKey], list[Tensor]],
    params: Iterable[nn.Parameter],
) -> Sums:
    """Form the sums layer by layer, add them up over the ranks, and keep this rank's part.

    Sums are sent when those of a few layers fill a bucket. All ranks go through all parameters in
    the same order, whatever their samples used.
    """
    keys_of: dict[nn.Parameter, list[ParamKey]] = {}
    for key in keys:
        for p in key:
            keys_of.setdefault(p, []).append(key)
    formed: dict[ParamKey, dict[nn.Parameter, Tensor]] = {}

    def total_of(p: nn.Parameter) -> Tensor:
        total = None
        for key in keys_of.get(p, ()):
            if key not in formed:
                formed[key] = dict(zip(key, sum_of(key), strict=True))
            part = formed[key].pop(p)
            total = part if total is None else total + part
        if total is None:
            dtype = at_least_float32(local(p.detach())).dtype
            total = torch.zeros(p.shape, dtype=dtype, device=p.device)
        return total

    sums: Sums = {}
    for bucket in buckets_of_sums(params, total_of):
        sums |= {(p,): [part] for p, part in sum_over_ranks(bucket).items()}
    return sums


def buckets_of_sums(
    params: Iterable[nn.Parameter], total_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """The totals in order, cut where a bucket is full, or where the mesh or the dtype changes."""
    bucket: dict[nn.Parameter, Tensor] = {}
    size = 0
    kind = None
    for p in params:
        total = total_of(p)
        own_size, own_kind = total.numel() * total.element_size(), (mesh_of(p), total.dtype)
        if bucket and (own_kind != kind or size + own_size > BUCKET):
            yield bucket
            bucket, size = {}, 0
        bucket[p], kind = total, own_kind
        size += own_size
    if bucket:
        yield bucket


def clip_factors(
    squared_norms: Tensor, clip: float, gamma: float | None = None
) -> tuple[Tensor, Tensor]:
    """The factors c_i that clip v_i to norm R = `clip`, and which samples are finite.

    Args:
        squared_norms: [batch], ``‖v_i‖²`` of the vectors to clip; in training, v_i = U g_i.
        clip: the clip norm R.
        gamma: γ of automatic clipping; None clips plainly.

    Returns:
        factors: ``min(1, R (1 - ROUNDING) / ‖v_i‖)``, or ``R (1 - ROUNDING) / (‖v_i‖ + γ)``.
        finite: True for samples whose norm is finite.

    **Guarantee.** ``‖c_i v_i‖ ≤ R`` up to `clipping.MARGIN`, for which the noise is scaled. A
    sample whose norm is NaN or infinite has factor exactly 0. The caller must also drop its
    vectors, since 0 · NaN is NaN.

    >>> factors, finite = clip_factors(torch.tensor([0.25, 16.0, float("inf")]), clip=1.0)
    >>> [round(factor, 3) for factor in factors.tolist()], finite.tolist()
    ([1.0, 0.25, 0.0], [True, True, False])
    """
    norms = squared_norms.clamp(min=0).sqrt()
    finite = torch.isfinite(squared_norms)
    if gamma is None:
        factors = (clip * (1 - ROUNDING) / norms).clamp(max=1.0)
    else:
        factors = clip * (1 - ROUNDING) / (norms + gamma)
    return torch.where(finite, factors, torch.zeros_like(factors)), finite


def preconditioned_sum(
    grad: PerSampleGrad, weights: Tensor, preconditioner: LinearMap
) -> list[Tensor]:
    """``Σ_i v_i U g_i = U Σ_i v_i g_i`` for weights v_i."""
    total = grad.weighted_sum(weights)
    return total if grad.preconditioned else preconditioner.apply(total)


def add_sums_(total: Sums, more: Sums) -> None:
    """Add the sums of another physical batch, in place.

    Both are preconditioned. Before preconditioning, a clipped record may be longer than R.
    """
    for key, parts in more.items():
        if key in total:
            parts = [before.add_(part) for before, part in zip(total[key], parts, strict=True)]
        total[key] = parts


def sum_per_parameter(sums: Sums, trainable: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """One tensor per trainable parameter, zero for a parameter that no sample used.

    `sums` is consumed.
    """
    totals: dict[nn.Parameter, Tensor] = {}
    while sums:
        key, parts = sums.popitem()
        for p, part in zip(key, parts, strict=True):
            totals[p] = totals[p] + part if p in totals else part
    return {
        name: totals[p].contiguous()
        if p in totals
        else zeros_of(p, at_least_float32(local(p.detach())).dtype)
        for name, p in trainable.items()
    }


def add_noise_(
    sums: dict[str, Tensor],
    noise: Stream,
    noise_key: bytes,
    scale: float,
    step: int,
    grid: float,
) -> None:
    """``x_t + w_t``, rounded to multiples of `grid`, in place.

    Args:
        sums: one tensor per trainable parameter, in the order of the model.
        noise: the stream ``w = C⁻¹ z``.
        noise_key: the secret key from which the normals z_t are generated.
        scale: standard deviation of z on every coordinate, divided by E[batch] like the sums.
        step: t.
        grid: a power of two that the data cannot move; 0 for a run without noise.

    **Guarantee.** Noise is added once, to the sum of the whole logical batch, and to every
    trainable parameter, used or not.
    """
    noise.add_(list(sums.values()), noise_key, scale, step)
    round_to_grid_(sums.values(), grid)


def map_after_noise_(grads: dict[str, Tensor], maps: Mapping[tuple[str, ...], LinearMap]) -> None:
    """Map noisy gradients in place: post-processing, free of privacy cost."""
    for names, after in maps.items():
        grads.update(zip(names, after.apply([grads[name] for name in names]), strict=True))


def write_grads(params: Mapping[nn.Parameter, str], grads: Mapping[str, Tensor]) -> None:
    """Set ``.grad`` of every parameter; without an entry in `grads`, to None.

    So no older gradient is used by a step.
    """
    for p, name in params.items():
        p.grad = like_parameter(p, grads[name].to(p.dtype)) if name in grads else None


def release(
    sums: Sums,
    params: Mapping[nn.Parameter, str],
    noise: Stream,
    noise_key: bytes,
    *,
    scale: float,
    step: int,
    grid: float,
    maps_after_noise: Mapping[tuple[str, ...], LinearMap],
    ranks: Ranks = ALONE,
) -> None:
    """From the sums of a logical batch to ``.grad``: the only place where something is released.

    Args:
        sums: ``Σ_i c_i U g_i / E[batch]`` of the whole logical batch; consumed.
        params: all parameters of the model with their names.
        noise, noise_key, scale, step, grid: see `add_noise_`.
        maps_after_noise: see `map_after_noise_`.
        ranks: the processes over which the batch was divided. Sums of sharded parameters are
            complete already; others are added up here, once per logical batch.
    """
    trainable = {name: p for p, name in params.items() if p.requires_grad}
    grads = sum_per_parameter(sums, trainable)
    if not any(is_sharded(p) for p in trainable.values()):
        ranks.sum_(grads)
    add_noise_(grads, noise, noise_key, scale, step, grid)
    map_after_noise_(grads, maps_after_noise)
    write_grads(params, grads)
