"""The handle of a private run: what a user asks of it, and what happens at each event of the loop.

    run.loader   -> _start_iteration, _begin_batch    sampling; refresh of the geometry
    forward      -> _before_forward                   hooks of per_sample/capture.py
    backward     -> _LoopGrads.receive                per-sample gradients and their norms
    step()       -> _before_step                      clip, sum, noise, .grad: engine/step.py

The rules that a loop must keep are in `engine.guards`.
"""

from __future__ import annotations

import os
import random
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkfc.accounting.ledger import Ledger
from dpkfc.distributed import Ranks
from dpkfc.engine import checkpoint, foreign, guards, lineage, resume
from dpkfc.engine.checks import check_isolation
from dpkfc.engine.counts import Counts, NotPrivate
from dpkfc.engine.fingerprint import Fingerprint
from dpkfc.engine.loader import Chunk, PrivateLoader, Source
from dpkfc.engine.loss_comparison import LoopTrace, Loss, compare_with_declared_loss, random_weights
from dpkfc.engine.options import Options
from dpkfc.engine.rng_state import seed_generators
from dpkfc.engine.step import Sums, add_sums_, clip_and_sum, release, write_grads
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.noise.factorization import Factorization
from dpkfc.noise.stream import Stream
from dpkfc.optim.base import RunAware
from dpkfc.per_sample.base import LayerCall, LinearMap, ParamKey
from dpkfc.per_sample.capture import CapturedGrads, GradAccumulator, GradientCapture, Hook
from dpkfc.per_sample.rounding import full_precision
from dpkfc.planning.plan import Plan
from dpkfc.random import first_key, next_key, sub_key
from dpkfc.sampling import CyclicPoisson
from dpkfc.sharding import is_sharded, owned_ranges, reshard

SECRET_CHECKS = 3  # steps after the first at which model and loss are checked again


@dataclass
class LogicalBatch:
    """The state of the logical batch under way."""

    chunk: Chunk | None = None  # the physical part that the loader yielded last
    sums: Sums = field(default_factory=dict)  # Σ_i c_i U g_i / E[batch]
    samples: int = 0  # that backward passes have seen
    # all parts are preconditioned alike: a refresh from outside takes effect at the next batch
    preconditioners: dict[ParamKey, LinearMap] = field(default_factory=dict)
    rates_at_partial_step: list[float] | None = None
    trace: LoopTrace | None = None  # if the loop is compared with the declared loss
    problem: PrivacyError | None = None  # for which all ranks will refuse the step
    check_was_due: bool = False  # the same on all ranks


class PrivateRun:
    """A private training run, made by `make_private`.

    Attributes:
        loader: iterate over it instead of your own DataLoader. One pass is the whole plan.
        plan: what is sampled, clipped, noised and accounted.
        steps: steps taken so far.
        run_id: names the run in the ledger.
        took_step: True if the last optimizer.step() ended a logical batch.
        geometry: the preconditioner.
        vmap_modules: names of the modules that run as a whole under vmap, because they were named
            in `Options` or because a module inside cannot be captured on its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        source: Source,
        capture: GradientCapture,
        *,
        geometry: Geometry,
        factorization: Factorization,
        loss: Loss | None,
        options: Options,
        max_physical_batch_size: int | None,
        seed: int | None,
        ledger: Ledger | None,
        clip_from_probes: bool,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.geometry, self.factorization = geometry, factorization
        self.vmap_modules = capture.vmap_modules
        self._counts = Counts(NotPrivate())
        self.steps = 0
        self.took_step = False
        self.detached = False
        self._loss, self._options = loss, options
        self._clip_from_probes = clip_from_probes
        self._check_due = options.check
        self._names = {p: name for name, p in model.named_parameters()}
        self._trainable_at_start = self._trainable()
        self._sharded = any(is_sharded(p) for p in self._names)
        self._noise = self._noise_stream()
        # chosen once for all ranks
        self._key, self._secret_steps, self.run_id = ranks.on_first(
            lambda: (
                first_key(seed),
                _secret_steps(plan.steps) if options.check else set(),
                uuid.uuid4().hex,
            )
        )
        # for the whole run: a record must not change its group
        self._group_key = sub_key(self._key, "groups")
        # mixed into the noise keys if a checkpoint of this run was moved away and may be continued
        self._salt = b""
        self._handle_id, self._pid = uuid.uuid4().hex, os.getpid()
        lineage.own(self.run_id, self._handle_id, 0)
        self._unfinished = weakref.finalize(
            self, lineage.warn_unfinished, self._handle_id, plan.steps
        )
        # checkpoints that hold the present key: to be claimed before the next step
        self._checkpoints: list[tuple[Path, str]] = []
        # what the weights must be at the next step; None: not compared
        self._expected_weights: str | None = self._weights_digest()
        self._foreign = foreign.ForeignParameters()
        self._ledger, self._ledger_open = ledger, False
        # charged by a run that did not survive to write them into its checkpoint
        self._lost_steps = 0
        self._batch = LogicalBatch()
        self._loop_grads = (
            _LoopGrads(self) if options.grad_scaler is None else _ScaledLoopGrads(self)
        )
        self._accumulating = False
        self._after_step: list[Callable[[], Any]] = []
        self.loader = PrivateLoader(
            source,
            lambda: CyclicPoisson(
                self._group_key,
                len(source),
                plan.groups,
                plan.rate_in_turn,
                planned_records=plan.records,
            ),
            plan.steps,
            max_physical_batch_size,
            self,
            ranks,
        )
        self._capture = capture
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._run_after_step),
        ]
        if norms := guards.batch_norms(model):
            check = Hook(lambda *call: guards.batch_norms_frozen(norms))
            self._hooks.append(model.register_forward_pre_hook(check))
        capture.attach(self._loop_grads)
        if isinstance(optimizer, RunAware):
            optimizer.bind_run(self.accumulate_per_sample)
        foreign.register(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise guards.no_copy()

    # -- what the user asks

    def epsilon(self, delta: float | None = None) -> float:
        """The privacy loss so far. Does not consume budget."""
        return self.plan.epsilon(self.charged, delta)

    @property
    def not_private(self) -> NotPrivate:
        """Exact counts over the private records, not covered by epsilon."""
        return self._counts.read()

    @property
    def batch_open(self) -> bool:
        """True between a batch from the loader and its step."""
        return self._batch.chunk is not None

    @property
    def batch_complete(self) -> bool:
        """True once the loader has yielded the last physical part of the batch."""
        return self._batch.chunk is not None and self._batch.chunk.last

    @property
    def batch_weight(self) -> float:
        """The weight of a loss of this physical batch in a mean over the logical batch.

        With it, the sum of a rank's losses, averaged over the ranks, is that mean. It is zero for a
        placeholder.
        """
        chunk = guards.has_batch(self._batch.chunk)
        return self._ranks.count * chunk.rows / max(1, chunk.drawn)

    @property
    def charged(self) -> int:
        """Steps that count against the budget."""
        return self.steps + self._lost_steps

    def owns(self, p: nn.Parameter) -> bool:
        """True if this run clips and noises the gradient of the parameter."""
        return not self.detached and p in self._names

    def after_step(self, function: Callable[[], Any]) -> None:
        """Call `function` after every step: `scheduler.step`, or the update of an average.

        This includes steps whose batch was empty, which the loop does not see. What is counted in
        the loop itself (learning rates, averages) reveals how many batches were not empty, which no
        noise hides. That does not matter for batches of a hundred records, which are never empty,
        but it does for batches of a few.
        """
        self._after_step.append(function)

    def epochs(self) -> Iterator[Iterator[Any]]:
        """The rest of the plan, one iterator over batches per expected pass over the data."""
        per_epoch = max(1, round(1 / self.plan.sampling_rate))
        while self.charged < self.plan.steps:
            before = self.charged
            yield self.loader.take(per_epoch - self.charged % per_epoch)
            if self.charged == before:
                return

    @contextmanager
    def accumulate_per_sample(self) -> Iterator[None]:
        """Gradients of several passes over the same batch add up per sample, before clipping."""
        self._absorb()
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def save(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write model, optimizer, generators, geometry, noise, step count and keys to a checkpoint.

        The keys determine the batches that follow.

        Args:
            path: a folder. An earlier checkpoint there is replaced; nothing else is.
            others: further objects with a `state_dict()`.
        """
        checkpoint.save(path, self, others)

    def load(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Continue from `save(path)`: bit for bit as if the run had not been interrupted."""
        checkpoint.load(path, self, others)

    def detach(self, *, resumable: bool = False) -> None:
        """Remove all hooks. Trained weights stay, and the budget that was spent stays spent.

        Args:
            resumable: the run may be resumed from a checkpoint: the ledger keeps the rest of its
                plan reserved. By default that budget is freed.
        """
        self._drop_batch()
        self.detached = True
        self._unfinished.detach()
        self._capture.remove()
        for hook in self._hooks:
            hook.remove()
        keeps_ledger = self._ranks.first and self._ledger is not None
        if keeps_ledger and self._ledger_open and not resumable:
            assert self._ledger is not None
            self._ledger.close_run(self.run_id)

    # -- the loader draws batches

    def _start_iteration(self) -> tuple[int, bytes]:
        """The first step of the iteration, and its key."""
        guards.attached(self.detached)
        guards.same_ranks(self._ranks)
        lineage.demand_owner(self.run_id, self._handle_id)
        if self._pid != os.getpid():  # forked: the parent has the same key
            self._key, self._pid = self._fresh_key(), os.getpid()
        for folder, claimed in self._claim_checkpoints():
            if not claimed:
                self._key = self._fresh_key()
                warnings.warn(lineage.continued_before(folder), stacklevel=6)
        foreign.iteration_starts(self)
        return self.charged, self._key

    def _begin_batch(self, chunk: Chunk, batch: Any) -> None:
        """The loader is about to yield `batch`."""
        guards.attached(self.detached)
        guards.previous_step_taken(chunk, self.charged)
        if self._ledger is not None and not self._ledger_open:
            resume.open_in_ledger(self, self._ledger, self.run_id, self.plan)
        if chunk.first:
            self._drop_batch()
            self._begin_step(chunk.step)
            self._batch.check_was_due = self._check_due
        else:
            if not self._accumulating:
                self._absorb()  # a loop need not call step() between the parts of a batch
            guards.same_learning_rates(self._batch.rates_at_partial_step, self._learning_rates())
        self._batch.chunk = chunk
        if self._check_due and self._loss is not None and chunk.drawn:
            self._batch.trace = LoopTrace.of(batch, max(1, chunk.rows))

    def _begin_step(self, step: int) -> None:
        """Once per logical batch, before its first part is yielded."""
        guards.same_ranks(self._ranks)
        guards.not_forked(self._pid)
        lineage.demand_owner(self.run_id, self._handle_id)
        for folder, claimed in self._claim_checkpoints():
            if claimed is False:
                # for a user who catches the error and iterates again
                self._key = self._fresh_key()
                raise guards.checkpoint_not_continued_elsewhere(folder)
            if claimed is None and "seed" not in self.plan.unchecked:
                self._salt = self._ranks.on_first(lambda: os.urandom(32))
        if self._sharded:
            reshard(self.model)
        if self._expected_weights is not None:
            guards.same_weights(self._weights_digest(), self._expected_weights, self.charged)
            self._expected_weights = None
        if step in self._secret_steps:
            self._check_due = True
            self._capture.verify_adapters()
        self._seed_generators(self._key)
        # at the current weights, which are public: results of earlier steps
        if self.geometry.due(self.steps):
            self.geometry.refresh(self.model, self._capture, self.steps, self._ranks)

    def _seed_generators(self, key: bytes) -> None:
        """Dropout and augmentation draw from secret numbers, unless the run has a seed.

        Records take their random numbers from the global generators one after another. With one
        record more, all others get different masks. If the masks are secret, these are only other
        draws from the same distribution. If they came from a public seed, the sum could change by
        more than the clip.
        """
        if "seed" not in self.plan.unchecked:
            seed_generators(sub_key(key, f"generators of rank {self._ranks.rank}"))

    def _take_empty_step(self, chunk: Chunk) -> None:
        """A batch without records takes its step of pure noise; the loop does not see it."""
        self._begin_batch(chunk, None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _end_iteration(self) -> None:
        foreign.iteration_ends(self)

    # -- the loop calls the model

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guards.no_new_parameters(self.model, self._names)
        if not self._accumulating:
            self._absorb()
        if self._batch.trace is not None:
            self._batch.trace.see_forward(self.model)
        elif self._isolation_check_due():
            self._check_due = not check_isolation(
                self.model, self._capture, args, kwargs, self._preconditioner_of
            )

    def _isolation_check_due(self) -> bool:
        """Without a declared loss, the model alone is checked, on a batch of several records."""
        several = (self._capture.batch_size or 0) > 1
        return self._check_due and self._loss is None and self.batch_open and several

    def _absorb(self) -> None:
        """Clip what the last backward left behind and add it to the sums."""
        with full_precision(next(self.model.parameters()).device):
            captured = self._loop_grads.take()
            if captured.squared_norms is not None:
                self._add_to_batch(captured)

    def _add_to_batch(self, captured: CapturedGrads) -> None:
        loss_scale = self._loss_scale()
        # a mean loss has divided every gradient by the batch size
        batch_size = captured.batch_size if self._options.loss_reduction == "mean" else 1
        trace, fingerprint = self._batch.trace, None
        if trace is not None:
            weights = random_weights(captured.batch_size)
            fingerprint = Fingerprint.of(captured, weights, 1 / loss_scale)
        placeholder = self._batch.chunk is not None and self._batch.chunk.placeholder
        clipped = clip_and_sum(
            captured,
            self._preconditioner_of,
            clip=self.plan.clip,
            gamma=self.plan.clip_gamma,
            grad_scale=float(batch_size) / loss_scale,
            expected_batch_size=self.plan.batch_size,
            sharded=tuple(self._trainable().values()) if self._sharded else (),
            placeholder=placeholder,
        )
        assert clipped is not None
        add_sums_(self._batch.sums, clipped.sums)
        self._capture.reuse_workspaces()
        if not placeholder:
            self._batch.samples += captured.batch_size
            self._counts.add(clipped)
        if trace is not None and fingerprint is not None:
            self._compare_with_declared_loss(trace, fingerprint)

    def _loss_scale(self) -> float:
        scaler = self._options.grad_scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _compare_with_declared_loss(self, trace: LoopTrace, loop: Fingerprint) -> None:
        """Compare the loop's gradients with the declared loss before anything is released."""
        assert self._loss is not None
        self._batch.trace = None  # while the declared loss is computed
        try:
            conclusive = compare_with_declared_loss(
                trace,
                loop,
                self.model,
                self._capture,
                self._preconditioner_of,
                self._loss,
                _backward_of(self.optimizer),
                self._ranks.any if self._sharded else bool,
            )
        except BaseException as problem:
            if self._ranks.count == 1 or not isinstance(problem, PrivacyError):
                self._drop_batch()
                raise
            # at optimizer.step() all ranks refuse together
            self._batch.problem, conclusive = problem, False
        if self._sharded:
            conclusive = not self._ranks.any(not conclusive)
        if trace.compared < trace.rows:
            self._batch.trace = trace
        elif conclusive:
            self._check_due = False

    # -- the loop calls optimizer.step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            guards.not_lbfgs(optimizer)
            with torch.enable_grad():
                loss = closure()  # once, as the optimizer would have done it
            args, kwargs = (args[0], lambda: loss), {}
        guards.only_known_parameters(optimizer, self._names)
        lineage.demand_owner(self.run_id, self._handle_id)
        chunk = guards.has_batch(self._batch.chunk)
        self._absorb()
        self.took_step = chunk.last
        if chunk.last:
            self._private_step(chunk)
        else:
            self._batch.rates_at_partial_step = self._learning_rates()
            # torch optimizers skip parameters without a gradient
            write_grads(self._names, {})
        return args, kwargs

    def _private_step(self, chunk: Chunk) -> None:
        """Charge the step, add noise to the sums, and write ``.grad``."""
        trainable = self._trainable()
        problem = self._problem_with_step(chunk)
        self._ranks.agree(problem, steps=self.charged, trainable_parameters=len(trainable))
        if self._batch.check_was_due:
            # all ranks check again if one could not tell: a loss may communicate
            self._check_due = self._ranks.any(self._check_due)
        if list(trainable) != self._noised:
            # independent noise: nothing of the past is kept but the number of the next step
            state, self._noise = self._noise.state_dict(), self._noise_stream()
            self._noise.load_state_dict(state)
        ledger = self._ledger
        if ledger is not None:
            self._ranks.on_first(lambda: ledger.charge(self.run_id, self.charged + 1))
        sums, key, step = self._batch.sums, self._key, self.charged
        # charged: from here on the step counts, also if what follows fails
        self.steps += 1
        lineage.count(self.run_id, self.charged)
        self._key = next_key(key)
        self._drop_batch()
        with full_precision(next(self.model.parameters()).device):
            release(
                sums,
                self._names,
                self._noise,
                sub_key(key + self._salt, "noise"),
                scale=self.plan.noise_scale / self.plan.batch_size,
                step=step,
                grid=self.plan.grid,
                maps_after_noise=self.geometry.after_noise(),
                ranks=self._ranks,
            )

    def _problem_with_step(self, chunk: Chunk) -> PrivacyError | None:
        """Why the step must not be released."""
        correlated = self.factorization.bands != 1
        try:
            if self._batch.problem is not None:
                raise self._batch.problem
            guards.all_samples_seen(chunk, self._batch.samples)
            guards.steps_left(self.charged, self.plan.steps)
            guards.same_trainable(self._trainable(), self._trainable_at_start, correlated)
        except PrivacyError as problem:
            return problem
        return None

    def _run_after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.took_step:
            for function in self._after_step:
                function()

    # -- state

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for p, name in self._names.items() if p.requires_grad}

    def _noise_stream(self) -> Stream:
        """The noise of all trainable parameters, computed where the model is."""
        trainable = self._trainable()
        self._noised = list(trainable)
        device = next(self.model.parameters()).device
        return self.factorization.stream(owned_ranges(trainable.values()), device)

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _preconditioner_of(self, key: ParamKey) -> LinearMap:
        preconditioners = self._batch.preconditioners
        if key not in preconditioners:
            names = tuple(self._names[p] for p in key)
            preconditioners[key] = self.geometry.map_of(names)
        return preconditioners[key]

    def _drop_batch(self) -> None:
        self._batch = LogicalBatch()
        self._loop_grads.clear()
        self._capture.reuse_workspaces()

    def _weights_digest(self) -> str:
        parameters = {name: p for p, name in self._names.items()}
        return guards.weights_digest(parameters, self._ranks)

    def _fresh_key(self) -> bytes:
        """A key that no other run has, the same on all ranks."""
        return self._ranks.on_first(lambda: lineage.fresh_key(self._key))

    def _claim_checkpoints(self) -> list[tuple[Path, bool | None]]:
        """For each checkpoint that holds the present key: see `lineage.claim` for the answers."""
        held, self._checkpoints = self._checkpoints, []
        if not held:
            return []
        return self._ranks.on_first(
            lambda: [(folder, checkpoint.claim(folder, name)) for folder, name in held]
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model and optimizer. Holds secret keys."""
        return resume.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that wrote `state`. The plan must be the same. See `engine.resume`."""
        resume.load_state(self, state)


class _LoopGrads(GradAccumulator):
    """The per-sample gradients of the user's loop."""

    def __init__(self, run: PrivateRun) -> None:
        super().__init__(run._preconditioner_of)
        self._run = run

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run._before_forward(args, kwargs)


class _ScaledLoopGrads(_LoopGrads):
    """With a GradScaler, which steps only if it finds a gradient: a zero one, replaced later."""

    def receive(self, call: LayerCall) -> None:
        super().receive(call)
        trainable = self._run._trainable().values()
        smallest = min(trainable, key=lambda p: p.numel())
        smallest.grad = torch.zeros_like(smallest)


def _secret_steps(steps: int) -> set[int]:
    return set(random.SystemRandom().sample(range(steps), min(SECRET_CHECKS, steps)))


def _backward_of(optimizer: Optimizer) -> Callable[[Callable[[], Tensor]], Any]:
    """What a loop does with its loss; some optimizers take several gradients of it."""
    if isinstance(optimizer, RunAware):
        return optimizer.backward
    return lambda closure: closure().backward()
