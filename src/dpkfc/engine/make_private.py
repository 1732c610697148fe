"""`make_private`: joins sampling, capture, geometry, clipping and noise to the user's model, optimizer and data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from dpkfc.accounting.ledger import Ledger
from dpkfc.accounting.unchecked import Unchecked
from dpkfc.clipping import AutomaticClipping
from dpkfc.engine.checks import ROWS, check_collate, check_loss, check_model, check_optimizer
from dpkfc.engine.guards import one_process
from dpkfc.engine.options import Options
from dpkfc.engine.rng_state import kept_generators
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry, Identity
from dpkfc.noise.auto import Auto
from dpkfc.noise.factorization import Factorization
from dpkfc.optim.adambc import DPAdamBC
from dpkfc.optim.disk import DiSK
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.registry import partition
from dpkfc.planning.choose_noise import Noise, choose
from dpkfc.planning.plan import Plan, batches
from dpkfc.probes.public import LABELS, check_apart
from dpkfc.sampling import CyclicPoisson, PrivateLoader, read_dataset

LOOKED_AT = 128  # records, for some with different targets


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    clip: float | AutomaticClipping | Literal["auto"] = 1.0,
    geometry: Geometry | None = None,
    noise: Noise | Auto | Literal["auto"] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | Literal["unchecked"] | None = None,
    records: int | None = None,
    max_physical_batch_size: int | None = None,
    ledger: Ledger | None = None,
    seed: int | None = None,
    options: Options | None = None,
) -> PrivateRun:
    """Train `model` with differential privacy in a plain PyTorch loop.

    Args:
        model, optimizer: the user's own; neither is wrapped. The optimizer is any torch.optim.Optimizer over
            the model's parameters.
        dataset: a map-style Dataset, or a DataLoader, whose data set, collate function and workers are kept
            and whose sampler is replaced by Poisson sampling.
        epsilon: the privacy budget, to which the noise is calibrated.
        noise_multiplier: instead of epsilon, the standard deviation of the noise divided by the clip.
        delta: the δ of (ε, δ)-differential privacy; well below 1/N.
        epochs or steps: how long to train. One pass over `private.loader` takes all planned steps.
        batch_size: the expected batch size (a DataLoader's own by default).
        clip: the L2 norm C to which every record's gradient is clipped; or `AutomaticClipping()`, which scales every gradient
            to it, so that there is no threshold to tune; or "auto": the median norm of the geometry's own mapped
            probes at the first weights. The noise grows with C, so tune the product lr · C.
        geometry: the linear map before clipping: `KFC(...)`, `Diagonal(...)`; `Identity()` is DP-SGD.
        noise: `Independent()` Gaussian noise; or correlated noise, which largely cancels in the parameters:
            `BandedToeplitz(bands=16)`, `BandedSquareRoot(...)`, `BufferedToeplitz(...)` and others; or "auto"
            (`Auto(max_buffers=16)`): whichever adds the least noise to the parameters at the same epsilon.
        loss: ``loss(model, batch) -> scalar``, the loss that the loop computes. Required. It is tried on a few records
            before anything is spent: a loss that mixes records, or does not reduce them as declared, is refused. At
            the first step, and at a few secretly chosen later ones, the gradients that the loop left behind are
            compared with it. "unchecked" omits all of this but for a trial of the model alone: plan, report and ledger
            then say so.
        records: the number of records N, stated as public. Sampling rate, number of steps and normalisation follow
            from it and not from ``len(dataset)``, which stays private. Without it ``len(dataset)`` is taken as public.
        max_physical_batch_size: the loader yields each batch in parts of at most this size, and the step is taken after
            the last. Step schedulers by `private.after_step(scheduler.step)`.
        by_vmap: names of modules to run whole under vmap, for parameters used outside their own module.
        accountant: "pld" (tight) or "rdp"; with `best_of` always "rdp".
        ledger: a `Ledger` on disk that charges every step before its result can be seen.
        seed: reproducible noise and sampling, for experiments only. By default the keys come from the operating
            system and nobody can reproduce the noise.
        options: less common settings; see `Options`.

    >>> import torch, dpkfc
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
    >>> private = dpkfc.make_private(model, optimizer, data, epsilon=2.0, delta=1e-3, epochs=1, batch_size=10,
    ...                              loss=dpkfc.losses.cross_entropy)
    >>> for x, y in private.loader:
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> private.epsilon() <= 2.0
    True
    """
    options = Options() if options is None else options
    if loss is None:
        raise PrivacyError(
            "loss= is missing. Give the loss that the loop computes, as a function of the model and a batch of the "
            "loader, so that it can be tried before anything is spent: "
            "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]). Or give loss='unchecked', and "
            "plan, report and ledger will say that nobody checked it"
        )
    declared = None if isinstance(loss, str) and loss == "unchecked" else loss
    if declared is not None and not callable(declared):
        raise TypeError(
            f"loss={loss!r}: must be a function loss(model, batch) -> scalar tensor, or 'unchecked'"
        )
    if records is not None and (
        isinstance(records, bool) or not isinstance(records, int) or records < 1
    ):
        raise ValueError(
            f"records={records!r}: give the public number of records, a whole number of at least 1"
        )
    data, loader_options, its_batch_size = read_dataset(dataset)
    batch_size = its_batch_size if batch_size is None else batch_size
    if batch_size is None:
        raise PrivacyError(
            "batch_size is missing: the number of records a step is expected to draw"
        )
    if options.loss_reduction not in ("mean", "sum"):
        raise PrivacyError(
            f"loss_reduction={options.loss_reduction!r}: must be 'mean' or 'sum' over the records of a forward pass"
        )
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise PrivacyError(f"max_physical_batch_size={max_physical_batch_size}: must be at least 1")
    if not isinstance(ledger, Ledger | None):
        raise PrivacyError(
            f"ledger must be a dpkfc.Ledger(path, dataset=...), not {type(ledger).__name__}"
        )
    if options.grad_scaler is not None and any(
        group.get("fused") for group in optimizer.param_groups
    ):
        raise ValueError(
            "grad_scaler= with a fused optimizer: it would divide the private gradient by the scale once more. Build "
            "the optimizer with fused=False"
        )
    one_process()
    check_model(model)
    check_optimizer(model, optimizer)
    geometry = Identity() if geometry is None else geometry
    public_data = check_apart(geometry, data)
    collate = loader_options.get("collate_fn", default_collate)
    trials: list[Any] = []
    if declared is not None or collate is not default_collate:
        with kept_generators():
            trial = _unlike(data)
            trials = [
                (collate(some), len(some)) for some in (trial[:ROWS], trial[ROWS:]) if len(some) > 1
            ]
        if trials:
            check_collate(collate, trial)
    count = len(data)  # type: ignore[arg-type]
    unchecked: dict[Unchecked, bool] = {
        "loss": declared is None,
        "model": not options.check,
        "seed": seed is not None,
        "ledger": ledger is None,
        "records": records is None,
        "public data": not public_data,
    }
    records = count if records is None else records
    batch_size, steps = batches(records, batch_size, epochs, steps)
    capture = GradientCapture(model, partition(model, options.vmap_modules))
    try:
        geometry.prepare(model, capture)
        run: dict[str, Any] = {
            "records": records,
            "batch_size": batch_size,
            "clip": _clip_from_probes(geometry, model, capture) if clip == "auto" else clip,
            "delta": delta,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "accountant": options.accountant,
            "best_of": options.best_of,
        }
        rescaled = (
            f"{geometry.name} maps noisy gradients once more (post)"
            if getattr(geometry, "post", 0)
            else None
        )
        factorization = choose(noise, optimizer, rescaled, options.sampling, **run)
        plan = Plan.make(
            **run,
            geometry=geometry.name,
            public_geometry=geometry.public,
            noise=factorization,
            sampling=options.sampling,
        )
        plan = replace(plan, unchecked=tuple(what for what, is_so in unchecked.items() if is_so))
        if isinstance(optimizer, DPAdamBC | DiSK):
            optimizer.set_noise_variance(*_noise_variance(plan, factorization, rescaled))
        if declared is not None:
            for batch, rows in trials:
                check_loss(model, capture, batch, rows, declared, options.loss_reduction == "mean")
    except BaseException:
        capture.remove()
        raise
    private = PrivateRun(
        model,
        optimizer,
        plan,
        geometry,
        factorization,
        capture,
        loss=declared,
        mean_loss=options.loss_reduction == "mean",
        check=options.check,
        seed=seed,
        ledger=ledger,
        grad_scaler=options.grad_scaler,
        clip_from_probes=clip == "auto",
    )
    private.loader = PrivateLoader(
        data,
        loader_options,
        lambda: CyclicPoisson(private._group_key, count, plan.groups, plan.rate_in_turn),
        plan.steps,
        max_physical_batch_size,
        private,
    )
    return private


def _noise_variance(
    plan: Plan, noise: Factorization, rescaled: str | None
) -> tuple[float | None, str]:
    """Of every coordinate of `.grad`, if it is the same for all and at all steps; otherwise None, and why not."""
    if noise.bands != 1:
        return None, f"{noise.name} noise varies from step to step"
    if rescaled:
        return None, rescaled
    return (plan.noise_scale / plan.batch_size) ** 2, ""


def _clip_from_probes(geometry: Geometry, model: nn.Module, capture: GradientCapture) -> float:
    norms = geometry.probe_norms(model, capture)
    if norms is None:
        raise PrivacyError(
            'clip="auto" takes the clip from the probes of the geometry, and this one has none: use KFC or Diagonal, '
            "or give a number, or dpkfc.AutomaticClipping()"
        )
    return float(norms.median())


def _unlike(data: Any) -> list[Any]:
    """A few records, with as many different targets as there are among some that are spread over the data set.

    A loss with class weights divides by the weights of the whole batch, which nobody sees on records of one class.
    """
    some = random.Random(0).sample(range(len(data)), min(LOOKED_AT, len(data)))
    first: dict[str, Any] = {}
    others = []
    for record in (data[row] for row in some):
        if first.setdefault(_target(record), record) is not record:
            others.append(record)
    return [*first.values(), *others][: 2 * ROWS]


def _target(record: Any) -> str:
    """The last part of a tuple, the label of a dict; as a word that equal ones share."""
    if isinstance(record, Mapping):
        return str([record.get(name) for name in LABELS])
    return str(record[-1]) if isinstance(record, tuple | list) else ""
