"""`make_private`: adds sampling, capture, geometry, clipping and noise to the user's objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.unchecked import Unchecked
from dpkfc.clipping import AutomaticClipping
from dpkfc.distributed import Ranks, current_ranks, unwrapped
from dpkfc.engine.capture_model import capture_for
from dpkfc.engine.checks import check_loss, check_model, check_optimizer
from dpkfc.engine.loader import read_source
from dpkfc.engine.options import Options
from dpkfc.engine.run import PrivateRun
from dpkfc.engine.trial import content_digest, trials_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.geometry.identity import Identity
from dpkfc.noise.auto import Auto
from dpkfc.noise.factorization import Factorization
from dpkfc.optim.base import NoiseAware
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.planning.choose_noise import Noise, choose
from dpkfc.planning.plan import Plan, batches
from dpkfc.probes.public import check_apart
from dpkfc.sampling import check_slots
from dpkfc.sharding import is_sharded, tensors_to_copy


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | Literal["unchecked"] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    clip: float | AutomaticClipping | Literal["auto"] = 1.0,
    geometry: Geometry | None = None,
    noise: Noise | Auto | Literal["auto"] | None = None,
    records: int | None = None,
    ledger: Ledger | None = None,
    max_physical_batch_size: int | None = None,
    seed: int | None = None,
    options: Options | None = None,
) -> PrivateRun:
    """Train `model` with differential privacy in a plain PyTorch loop.

    Args:
        model, optimizer: your own; neither is wrapped. The optimizer is any torch.optim.Optimizer
            over the model's parameters.
        dataset: a map-style Dataset; or a DataLoader, whose data set, collate function and workers
            are kept and whose sampler is replaced by Poisson sampling.
        loss: ``loss(model, batch) -> scalar``, the loss that your loop computes. Required. It is
            tried on a few records before any budget is spent: a loss that mixes records, or does
            not reduce them as declared, is refused. At the first step, and at a few secretly chosen
            later ones, the gradients of your loop are compared with it. "unchecked" omits this,
            except for a trial of the model alone; plan, report and ledger then say so.
        epsilon, delta: the privacy budget, to which the noise is calibrated; δ well below 1/N.
        noise_multiplier: σ, instead of epsilon: the noise's standard deviation divided by the clip.
        epochs, steps: how long to train; give one. One pass over `run.loader` takes all steps.
        batch_size: the expected batch size; by default that of your DataLoader.
        clip: R, the L2 norm to which each record's gradient is clipped; or `AutomaticClipping()`,
            which scales every gradient to it; or "auto": the median norm of the geometry's own
            mapped probes at the first weights. The noise grows with R: tune the product lr · R.
        geometry: the linear map before clipping: `KFC(...)` or `Diagonal(...)`. Default: DP-SGD.
        noise: `noise.Independent()` (default); or correlated noise, most of which cancels in the
            parameters, such as `noise.BandedToeplitz(bands=16)`; or "auto" (`noise.Auto()`): the
            one with the smallest error at the same epsilon.
        records: the number of records N, stated as public. Sampling rate, number of steps and
            normalisation follow from it, and ``len(dataset)`` stays private. By default
            ``len(dataset)`` is treated as public.
        ledger: a `Ledger` on disk that charges every step before its result can be seen.
        max_physical_batch_size: the loader yields each batch in parts of at most this size, and the
            step is taken after the last part. Step schedulers with
            `run.after_step(scheduler.step)`.
        seed: reproducible noise and sampling, for experiments only. By default the keys come from
            the operating system and nobody can reproduce the noise.
        options: less common settings; see `Options`.

    Returns:
        The run. Iterate over `run.loader`; ask `run.epsilon()` for the privacy loss so far.

    Raises:
        PrivacyError: continuing would break the guarantee.
        ValueError, TypeError: an argument is wrong.

    **Guarantee.** The sequence of all gradients that the optimizer receives is (ε,
    δ)-differentially private under adding or removing one record, with the ε and δ of `run.plan`.

    >>> import torch, dpkfc
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
    >>> run = dpkfc.make_private(
    ...     model, optimizer, data, loss=dpkfc.losses.cross_entropy,
    ...     epsilon=2.0, delta=1e-3, epochs=1, batch_size=10,
    ... )
    >>> for x, y in run.loader:
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> run.epsilon() <= 2.0
    True
    """
    options = Options() if options is None else options
    ranks = current_ranks()
    with ranks.together():
        declared_loss = _read_loss(loss)
        optimizer = _prepared_by_accelerate(optimizer)
        source = read_source(dataset)
        batch_size = source.batch_size if batch_size is None else batch_size
        _check_arguments(optimizer, batch_size, records, max_physical_batch_size, ledger, options)
        assert batch_size is not None
        model = unwrapped(model)
        check_model(model, ranks)
        check_optimizer(model, optimizer)
        _check_sharded(model, declared_loss, geometry)
        content = content_digest(source) if ranks.count > 1 else ""
    ranks.same(
        "give every rank the whole data set; each batch is divided over the ranks",
        records=(len(source), content),
    )
    ranks.same(
        "call make_private on all ranks with the same arguments",
        model=[(name, p.shape, p.requires_grad) for name, p in model.named_parameters()],
        loss=declared_loss is None,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        clip=clip,
        records=records,
        ledger=None if ledger is None else ledger.dataset,
        max_physical_batch_size=max_physical_batch_size,
        seed=seed,
    )
    ranks.copy_from_first_(tensors_to_copy(model))
    geometry = Identity() if geometry is None else geometry
    public_data_checked = check_apart(geometry, source.dataset)
    trials, collate_checked = trials_of(source, declared_loss is not None)
    not_checked: dict[Unchecked, bool] = {
        "loss": declared_loss is None,
        "model": not options.check,
        "seed": seed is not None,
        "ledger": ledger is None,
        "records": records is None,
        "public data": not public_data_checked,
        "collate": not collate_checked,
    }
    records = len(source) if records is None else records
    batch_size, steps = batches(records, batch_size, epochs, steps)

    def check(capture: GradientCapture) -> None:
        for trial in trials if declared_loss is not None else ():
            assert declared_loss is not None
            check_loss(model, capture, trial, declared_loss, options.loss_reduction == "mean")

    capture = capture_for(model, options.vmap_modules, check)
    try:
        geometry.prepare(model, capture)
        planned: dict[str, Any] = {
            "records": records,
            "batch_size": batch_size,
            "clip": _clip_from_probes(geometry, model, capture, ranks) if clip == "auto" else clip,
            "delta": delta,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "accountant": options.accountant,
            "best_of": options.best_of,
        }
        rescaled = _rescaled_after_noise(geometry)
        factorization = choose(noise, optimizer, rescaled, options.sampling, **planned)
        plan = Plan.make(
            **planned,
            geometry=geometry.name,
            public_geometry=geometry.public,
            noise=factorization,
            sampling=options.sampling,
        )
        unchecked = tuple(what for what, is_unchecked in not_checked.items() if is_unchecked)
        plan = replace(plan, unchecked=unchecked)
        ranks.same("call make_private on all ranks with the same arguments", **plan.to_json())
        if plan.groups > 1:
            check_slots(len(source), plan.records)
        if isinstance(optimizer, NoiseAware):
            optimizer.set_noise_variance(*_noise_variance(plan, factorization, rescaled))
        return PrivateRun(
            model,
            optimizer,
            plan,
            source,
            capture,
            geometry=geometry,
            factorization=factorization,
            loss=declared_loss,
            options=options,
            max_physical_batch_size=max_physical_batch_size,
            seed=seed,
            ledger=ledger,
            clip_from_probes=clip == "auto",
            ranks=ranks,
        )
    except BaseException:
        capture.remove()
        raise


def _check_sharded(model: nn.Module, loss: object | None, geometry: Geometry | None) -> None:
    """Refuse what would need more than one rank's part of a sharded model."""
    if not any(is_sharded(p) for p in model.parameters()):
        return
    if loss is None:
        raise PrivacyError(
            "loss='unchecked' with a model divided by fully_shard: the ranks could not try the "
            "model together. Give the loss that the loop computes"
        )
    if getattr(geometry, "post", 0):
        raise ValueError(
            "KFC(post=...) maps whole gradients after the noise, and fully_shard leaves each rank "
            "a part of them. Use post=0"
        )


def _prepared_by_accelerate(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself: accelerate's wrapper calls its step and has no hooks of its own."""
    while type(optimizer).__module__ == "accelerate.optimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def _read_loss(loss: Any) -> Callable[[nn.Module, Any], Tensor] | None:
    """The declared loss; None if it is not to be checked."""
    if loss is None:
        raise PrivacyError(
            "loss= is missing. Give the loss that the loop computes, as a function of the model "
            "and a batch of the loader, so that it can be tried before any budget is spent: "
            "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]). Or give "
            "loss='unchecked', and plan, report and ledger will say that nobody checked it"
        )
    if isinstance(loss, str) and loss == "unchecked":
        return None
    if not callable(loss):
        raise TypeError(
            f"loss={loss!r}: must be a function loss(model, batch) -> scalar tensor, or 'unchecked'"
        )
    return loss  # type: ignore[no-any-return]


def _check_arguments(
    optimizer: Optimizer,
    batch_size: int | None,
    records: int | None,
    max_physical_batch_size: int | None,
    ledger: Ledger | None,
    options: Options,
) -> None:
    if not isinstance(options, Options):
        raise TypeError(f"options must be a dpkfc.Options(...), not {type(options).__name__}")
    is_int = isinstance(records, int) and not isinstance(records, bool)
    if records is not None and (not is_int or records < 1):
        raise ValueError(
            f"records={records!r}: give the public number of records, a whole number of at least 1"
        )
    if batch_size is None:
        raise ValueError("batch_size is missing: the number of records a step is expected to draw")
    if options.loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f"loss_reduction={options.loss_reduction!r}: must be 'mean' or 'sum' over the records "
            "of a forward pass"
        )
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size={max_physical_batch_size}: must be at least 1")
    if not isinstance(ledger, Ledger | None):
        raise TypeError(
            f"ledger must be a dpkfc.Ledger(path, dataset=...), not {type(ledger).__name__}"
        )
    fused = any(group.get("fused") for group in getattr(optimizer, "param_groups", ()))
    if options.grad_scaler is not None and fused:
        raise ValueError(
            "grad_scaler= with a fused optimizer: it would divide the private gradient by the "
            "scale once more. Build the optimizer with fused=False"
        )


def _rescaled_after_noise(geometry: Geometry) -> str | None:
    """Why noisy gradients do not reach the optimizer on one scale, if so."""
    if getattr(geometry, "post", 0):
        return f"{geometry.name} maps noisy gradients once more (post)"
    return None


def _noise_variance(
    plan: Plan, noise: Factorization, rescaled: str | None
) -> tuple[float | None, str]:
    """The variance per coordinate of ``.grad``; None, and why, if it is not always the same."""
    if noise.bands != 1:
        return None, f"{noise.name} noise varies from step to step"
    if rescaled:
        return None, rescaled
    return (plan.noise_scale / plan.batch_size) ** 2, ""


def _clip_from_probes(
    geometry: Geometry, model: nn.Module, capture: GradientCapture, ranks: Ranks
) -> float:
    norms = geometry.probe_norms(model, capture, ranks)
    if norms is None:
        raise ValueError(
            'clip="auto" takes the clip from the probes of the geometry, and this one has none: '
            "use KFC or Diagonal, or give a number, or dpkfc.AutomaticClipping()"
        )
    return float(norms.median())
