"""A private run: from the batches of the loader to the noisy gradients that the user's optimizer steps with.

    sampling -> capture -> norms in the metric of the geometry -> clip -> sum -> map the sum -> + noise -> .grad

A step pre-hook of the user's optimizer turns what the backward passes left behind into a private `.grad`.
"""

from __future__ import annotations

import os
import random
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpkfc.accounting.ledger import Ledger
from dpkfc.clipping import clip_weights
from dpkfc.engine import checkpoint, guards, lineage
from dpkfc.engine.checks import check_isolation, check_still_frozen, frozen_batch_norms
from dpkfc.engine.fingerprint import Fingerprint
from dpkfc.engine.loss_comparison import LoopTrace, Loss, compare, random_weights
from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import Geometry, LinearMap
from dpkfc.noise.factorization import Factorization
from dpkfc.noise.grid import round_to_grid_
from dpkfc.optim.disk import DiSK
from dpkfc.per_sample.capture import GradientCapture, ParamKey
from dpkfc.per_sample.record import at_least_float32, full_precision
from dpkfc.planning.plan import NOT_CHECKED, Plan
from dpkfc.random import first_key, next_key, sub_key
from dpkfc.sampling import Chunk, PrivateLoader

TRIALS = 3  # steps after the first, chosen secretly, at which model and loss are tried once more
_LIVE: weakref.WeakSet[PrivateRun] = weakref.WeakSet()
_ITERATING: weakref.WeakSet[PrivateRun] = weakref.WeakSet()  # those whose loader is being iterated
_watch: list[RemovableHandle] = []  # over the calls of modules, while there are any


@dataclass
class NotPrivate:
    """Exact counts over the private records. They are not covered by epsilon: look, but do not publish them."""

    samples: int = 0
    clipped: int = 0
    non_finite: int = 0


class PrivateRun:
    """What privacy depends on: the sampler, the sums, the noise, the accountant. Made by `make_private`."""

    all_steps: ClassVar[int] = 0  # of all runs in this process

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        geometry: Geometry,
        noise: Factorization,
        capture: GradientCapture,
        *,
        loss: Loss | None,
        mean_loss: bool,
        check: bool,
        seed: int | None,
        ledger: Ledger | None,
        grad_scaler: Any,
        clip_from_probes: bool,
    ) -> None:
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.loader: PrivateLoader
        self.not_private = NotPrivate()
        self.steps = 0  # taken so far
        self.took_step = False  # did the last optimizer.step() end a logical batch?
        self.geometry, self.factorization, self._capture = geometry, noise, capture
        self._loss, self._mean_loss, self._scaler = loss, mean_loss, grad_scaler
        self._clip_from_probes = clip_from_probes
        self._trial_due, self._trial_steps = check, _secret_steps(plan.steps) if check else set()
        self._trace: LoopTrace | None = (
            None  # of a batch at which the loop is compared with the declared loss
        )
        self._names = {p: name for name, p in model.named_parameters()}
        self._frozen_norms = frozen_batch_norms(model)
        self._layout = self._trainable()
        self._noise = noise.stream(sum(p.numel() for p in self._layout.values()))
        self._key = first_key(seed)
        self._group_key = sub_key(
            self._key, "groups"
        )  # for the whole run: a record must not change its group
        self._ledger, self._run, self._handle, self._pid = (
            ledger,
            uuid.uuid4().hex,
            uuid.uuid4().hex,
            os.getpid(),
        )
        lineage.own(self._run, self._handle, 0)
        self._checkpoints: list[
            tuple[Path, str]
        ] = []  # that hold the present key: to be claimed before the next step
        self._salt = b""  # of the noise, if one of them is not where it was
        self._weights: str | None = (
            self._weights_digest()
        )  # what they must be at the next step; None: not looked at
        self._touched = guards.Touched()
        self._detached = False
        self._lost_steps = (
            0  # charged by a run that did not survive to write them into its checkpoint
        )
        self._ledger_open = False
        self._sums: dict[ParamKey, list[Tensor]] = {}  # mapped
        self._maps: dict[
            ParamKey, LinearMap
        ] = {}  # of the batch under way: all its parts are mapped alike
        self._rows = 0
        self._joining = False
        self._chunk: Chunk | None = None
        self._rates_at_partial_step: list[float] | None = None
        capture.map_of = self._map_of
        capture.on_enter = lambda: check_still_frozen(self._frozen_norms)
        capture.before_forward = self._before_forward
        if grad_scaler is not None:
            capture.on_gradient = self._placeholder_for_scaler
        self._after: list[Callable[[], Any]] = []
        self._step_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if isinstance(optimizer, DiSK):
            optimizer.bind_run(self.joined)
        _LIVE.add(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy would draw the same noise once more."""
        raise PrivacyError(
            "a private run cannot be copied or pickled: the copy would use the same noise on other sums, and the "
            "difference would be free of noise. Use save() and load(), or make_private in the other process"
        )

    # -- what the user asks

    def epsilon(self, delta: float | None = None) -> float:
        """The privacy loss so far. Asking changes nothing."""
        return self.plan.epsilon(self.charged, delta)

    @property
    def batch_open(self) -> bool:
        """Between a batch from the loader and its step."""
        return self._chunk is not None

    @property
    def charged(self) -> int:
        """Steps that count against the budget."""
        return self.steps + self._lost_steps

    def after_step(self, function: Callable[[], Any]) -> None:
        """Call `function` after every step: `scheduler.step`, say, or the update of an average.

        Also after a step whose batch was empty, of which the loop sees nothing. What is counted in the loop itself
        (learning rates, averages) tells how many batches were not empty, which no noise hides: it does not matter for
        batches of a hundred records, which are never empty, but it does for batches of a few.
        """
        self._after.append(function)

    def epochs(self) -> Iterator[Iterator[Any]]:
        """The rest of the plan, one iterator over batches for every expected pass over the data."""
        per_epoch = max(1, round(1 / self.plan.sampling_rate))
        while self.charged < self.plan.steps:
            before = self.charged
            yield self.loader.take(per_epoch - self.charged % per_epoch)
            if self.charged == before:
                return

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model and optimizer: numbers, strings and tensors. Holds secret keys."""
        return {
            "plan": self.plan.to_json(),
            "step": self.steps,
            "lost_steps": self._lost_steps,
            "key": self._key.hex(),
            "groups": self._group_key.hex(),
            "run": self._run,
            "weights": self._weights_digest(),
            "salt": self._salt.hex(),
            "not_private": vars(self.not_private).copy(),
            "geometry": self.geometry.state_dict(),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that wrote `state`. The plan must be the same.

        A run that has taken steps goes back or forth within itself only: of another one's state it would learn another
        count of steps, and forget its own.

        **Guarantee.** No noise is used twice. If this process, or the ledger, knows of steps after the state (the
        process died after its last checkpoint, or goes back to it), their results may have been seen: they stay
        charged, and fresh entropy is mixed into the key. So it is where nobody can know whether the state was continued
        before: it comes from another process, without a ledger and without a seed. (`load` does know.) Otherwise the
        run goes on exactly as it would have.
        """
        unknown = lineage.steps_here(str(state.get("run"))) is None and self._ledger is None
        self._continue(
            state, fresh=unknown and "seed" not in state.get("plan", {}).get("unchecked", ())
        )

    def _continue(self, state: dict[str, Any], fresh: bool) -> None:
        plan = self._check_state(state)
        run, step, lost, key = (
            state["run"],
            state["step"],
            state["lost_steps"],
            bytes.fromhex(state["key"]),
        )
        charged = max(lineage.steps_here(run) or 0, self.charged if run == self._run else 0)
        if self._ledger is not None:
            charged = max(charged, self._open_in_ledger(self._ledger, run, plan))
        if charged > step + lost:
            self._check_restart()
            lost, fresh = charged - step, True
        _load_geometry(self.geometry, state["geometry"])
        self._noise.load_state_dict(
            state["noise"]
        )  # steps that were lost make it start anew at the next step
        self.plan = plan
        self.steps, self._lost_steps, self._run = step, lost, run
        self._key = lineage.fresh_key(key) if fresh else key
        self._pid = os.getpid()
        lineage.own(run, self._handle, self.charged)
        self._weights, self._salt, self._checkpoints = (
            state["weights"],
            bytes.fromhex(state["salt"]),
            [],
        )
        self._trial_due = self._trial_due or bool(self._trial_steps)
        self.not_private = NotPrivate(**state["not_private"])
        self._group_key = bytes.fromhex(state["groups"])
        self._forget_batch()

    def _open_in_ledger(self, ledger: Ledger, run: str, plan: Plan) -> int:
        charged = ledger.open_run(run, plan.mechanism, delta=plan.delta, unchecked=plan.unchecked)
        self._ledger_open = True
        return charged

    def _check_state(self, state: dict[str, Any]) -> Plan:
        """Refuse a state that cannot be continued from here, with nothing changed; the plan to continue with."""
        checkpoint.check_run_state(state, self.plan.steps)
        plan = self.plan
        if (
            self._clip_from_probes
        ):  # it was chosen at the first weights of the run that is continued
            plan = replace(plan, clip=state["plan"]["clip"])
        told = set(plan.unchecked) | set(
            state["plan"].get("unchecked", ())
        )  # what was not checked stays so
        plan = replace(plan, unchecked=tuple(what for what in NOT_CHECKED if what in told))
        own, found = (
            {k: v for k, v in p.items() if k != "unchecked"}
            for p in (plan.to_json(), state["plan"])
        )
        if found != own:
            changed = [k for k, v in own.items() if found.get(k) != v]
            raise PrivacyError(
                f"the checkpoint belongs to another plan: {', '.join(changed)} differ. Make the run private "
                "with the same settings to resume it"
            )
        if self.charged and state["run"] != self._run:
            raise PrivacyError(
                f"the checkpoint belongs to another run, and this one has taken {self.charged} steps, which it would "
                "forget. detach(), make_private again, and load the checkpoint into that"
            )
        self._noise.check_state(state["noise"])
        return plan

    def _check_restart(self) -> None:
        """The past noise of lost steps is gone: may the stream go on without it? See `noise.stream.Stream.restart`."""
        bands, non_negative = (
            self.factorization.bands,
            self.factorization.non_negative(self.plan.steps),
        )
        if not (non_negative or (bands is not None and bands <= self.plan.groups)):
            raise PrivacyError(
                f"steps after this checkpoint were lost, and {self.factorization.name} cannot go on without their "
                "noise: its matrix has negative entries, for which that is not known to be private. Begin a new run"
            )

    def save(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write model, optimizer, generators, sampler, accountant, and any `others` with a state_dict()."""
        checkpoint.save(path, self, others)

    def load(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Continue from `save(path)`: bit for bit as if the run had never stopped."""
        checkpoint.load(path, self, others)

    def detach(self) -> None:
        """Leave model and optimizer as they were. The budget that was spent stays spent."""
        self._forget_batch()
        self._detached = True
        self._capture.remove()
        for hook in self._step_hooks:
            hook.remove()
        if self._ledger is not None and self._ledger_open:
            self._ledger.close_run(self._run)

    # -- the way of a batch

    def _start(self) -> tuple[int, bytes]:
        """The loader is about to draw batches: from which step on, and with which key."""
        self._demand_attached()
        guards.one_process()
        lineage.demand_owner(self._run, self._handle)
        if self._pid != os.getpid():  # a fork: the parent has the same key
            self._key, self._pid = lineage.fresh_key(self._key), os.getpid()
        for folder, claimed in self._claim():
            if not claimed:
                self._key = lineage.fresh_key(self._key)
                warnings.warn(lineage.continued_before(folder), stacklevel=4)
        _ITERATING.add(self)
        _watch_modules()
        return self.charged, self._key

    def _begin(self, chunk: Chunk, batch: Any) -> None:
        """The loader is about to hand out `batch`."""
        self._demand_attached()
        if chunk.step != self.charged:
            raise PrivacyError(
                "optimizer.step() was not called for the last batch. Skipping a step because of what is in the batch "
                "would leak; call step() for every batch. For larger batches set batch_size and max_physical_batch_size"
            )
        if self._ledger is not None and not self._ledger_open:
            self._open_in_ledger(self._ledger, self._run, self.plan)
        if chunk.first:
            self._forget_batch()
            self._begin_step(chunk.step)
        elif self._rates_at_partial_step not in (None, self._rates()):
            raise PrivacyError(
                "a learning-rate scheduler was stepped within one logical batch, which max_physical_batch_size has "
                "split. Write `private.after_step(scheduler.step)` before the loop instead"
            )
        self._chunk = chunk
        if self._trial_due and self._loss is not None and chunk.rows:
            self._trace = LoopTrace.of(batch, chunk.rows)

    def _begin_step(self, step: int) -> None:
        """What is looked at once for a logical batch, before the first part of it is handed out."""
        guards.one_process()
        lineage.demand_owner(self._run, self._handle)
        if self._pid != os.getpid():
            raise PrivacyError(
                "the process was forked while private.loader was being iterated: parent and child would train on the "
                "same batches. Begin to iterate in the child"
            )
        for folder, claimed in self._claim():
            if claimed is False:
                self._key = lineage.fresh_key(
                    self._key
                )  # for whoever catches the error and iterates again
                raise PrivacyError(
                    f"the checkpoint '{folder}' that this run has just saved was continued by another process: both "
                    "would use the same noise. Iterate over private.loader again to go on with fresh noise"
                )
            if claimed is None and "seed" not in self.plan.unchecked:
                self._salt = os.urandom(32)  # it may be continued elsewhere, and nobody would know
        if self._weights is not None:
            guards.same_weights(self._weights_digest(), self._weights, self.charged)
            self._weights = None
        self._trial_due = self._trial_due or step in self._trial_steps
        self._refresh()

    def _claim(self) -> list[tuple[Path, bool | None]]:
        """For each checkpoint that holds the present key: is this handle the first that continues it?"""
        claims = [(folder, checkpoint.claim(folder, name)) for folder, name in self._checkpoints]
        self._checkpoints = []
        return claims

    def _demand_attached(self) -> None:
        if self._detached:
            raise PrivacyError(
                "this run was detached: the loop would go on with raw gradients. make_private again to go on privately"
            )

    def _weights_digest(self) -> str:
        return guards.weights_digest({name: p for p, name in self._names.items()})

    def end_iteration(self) -> None:
        """The loop was left, or has come to its end: what happens now has nothing to do with a private batch."""
        self._touched.clear()
        _ITERATING.discard(self)
        _watch_modules()

    def _refresh(self) -> None:
        """New maps at the present weights, which are public: results of earlier steps. No record has a part in it."""
        if self.geometry.due(self.steps):
            self.geometry.refresh(self.model, self._capture, self.steps)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _empty_step(self, chunk: Chunk) -> None:
        """A batch without records takes its step of pure noise; the loop does not see it, `after_step` does."""
        self._begin(chunk, None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Forward and backward passes over the same batch whose gradients add up, record by record, before clipping."""
        self._absorb()
        self._joining = True
        try:
            yield
        finally:
            self._joining = False

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guards.no_new_parameters(self.model, self._names)
        if not self._joining:
            self._absorb()
        if self._trace is not None:
            self._trace.see_forward(self.model)
        elif (
            self._trial_due
            and self._loss is None
            and self.batch_open
            and (self._capture.batch or 0) > 1
        ):
            self._trial_due = not check_isolation(self.model, self._capture, args, kwargs)

    def _absorb(self) -> None:
        """Clip what the last backward left behind and add it to the sums."""
        with full_precision(next(self.model.parameters()).device):
            self._clip_and_sum()

    def _clip_and_sum(self) -> None:
        captured = self._capture.drain()
        forms, squared, batch = captured.forms, captured.squared_norms, captured.batch
        if squared is None:
            return
        scale = (
            float(batch) if self._mean_loss else 1.0
        )  # a mean loss has divided every gradient by the batch
        scale /= self._loss_scale()
        seen, fingerprint = self._trace, None
        if seen is not None:
            fingerprint = Fingerprint.of(captured, random_weights(batch), 1 / self._loss_scale())
        weights, finite = clip_weights(squared * scale**2, self.plan.clip, self.plan.clip_gamma)
        whole = bool(finite.all())
        while forms:
            slot, form = forms.popitem()
            total = (form if whole else form.masked(finite)).weighted_sum(
                weights * (scale / self.plan.batch_size)
            )
            if (
                not form.mapped
            ):  # before it meets the sums of other parts: unmapped, a record may be longer than C
                total = self._map_of(slot).apply(total)
            if slot in self._sums:
                total = [
                    before.add_(part) for before, part in zip(self._sums[slot], total, strict=True)
                ]
            self._sums[slot] = total
        self._capture.recycle()
        self._rows += batch
        self.not_private.samples += batch
        self.not_private.non_finite += int((~finite).sum())
        self.not_private.clipped += int((weights < 1).logical_and(finite).sum())
        if seen is not None and fingerprint is not None:
            self._compare(seen, fingerprint)

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _compare(self, seen: LoopTrace, loop: Fingerprint) -> None:
        """The loop's gradients with those of the declared loss. Sums were formed, and nothing is released yet."""
        assert self._loss is not None
        self._trace = None  # while the declared loss is computed
        try:
            told = compare(
                seen, loop, self.model, self._capture, self._loss, _backward_of(self.optimizer)
            )
        except BaseException:
            self._forget_batch()
            raise
        if seen.compared < seen.rows:
            self._trace = seen
        elif told:
            self._trial_due = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise PrivacyError(
                    "LBFGS evaluates the loss several times a step, which is not accounted for. Use another optimizer"
                )
            with torch.enable_grad():
                loss = closure()  # forward and backward, as the optimizer would have done it, once
            args, kwargs = (args[0], lambda: loss), {}
        self._make_private_step(optimizer)
        return args, kwargs

    def _make_private_step(self, optimizer: Optimizer) -> None:
        if any(p not in self._names for group in optimizer.param_groups for p in group["params"]):
            raise PrivacyError(
                "the optimizer was given parameters that the model did not have when it was made private: they would "
                "be stepped without clipping and noise. detach(), and make_private again with all of them"
            )
        lineage.demand_owner(self._run, self._handle)
        chunk = self._chunk
        if chunk is None:
            raise PrivacyError(
                "optimizer.step() without a batch from private.loader: what is sampled must be what is "
                "accounted. Iterate over private.loader and call step() once a batch"
            )
        self._absorb()
        self.took_step = chunk.last
        if not chunk.last:
            self._rates_at_partial_step = self._rates()
            for p in self._names:
                p.grad = None  # torch optimizers skip parameters without a gradient
            return
        if self._rows != chunk.of:
            raise PrivacyError(
                f"{chunk.of} samples were drawn for this step but {self._rows} were seen by backward(): every sample "
                "must be clipped on its own, exactly once. Call backward once for every forward pass, on the batches "
                "that private.loader yields; weight samples in the loss instead of leaving them out"
            )
        if self.charged >= self.plan.steps:
            raise PrivacyError(
                f"all {self.plan.steps} planned steps are used up; make a new plan to go on"
            )
        if self.factorization.bands != 1 and self._trainable().keys() != self._layout.keys():
            changed = ", ".join(sorted(self._trainable().keys() ^ self._layout.keys()))
            raise PrivacyError(
                f"{changed}: frozen or unfrozen since make_private. Correlated noise takes back in a later step what "
                "it added in an earlier one, to the same parameters. Choose what is trainable before make_private, or "
                "use Independent() noise"
            )
        if self._ledger is not None:
            self._ledger.charge(self._run, self.charged + 1)
        sums, key, step = self._sums, self._key, self.charged
        self.steps += 1  # charged: from here on it counts, also if what follows fails
        PrivateRun.all_steps += 1
        lineage.count(self._run, self.charged)
        self._key = next_key(key)
        self._forget_batch()
        with full_precision(next(self.model.parameters()).device):
            self._release(sums, sub_key(key + self._salt, "noise"), step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.took_step:
            for function in self._after:
                function()

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for p, name in self._names.items() if p.requires_grad}

    def _release(self, sums: dict[ParamKey, list[Tensor]], key: bytes, step: int) -> None:
        """``.grad = (Σ clip(U g_i) + w_t) / E[batch]`` for every trainable parameter, used or not; w = C⁻¹ z.

        The sums hold ``Σ U w_i g_i / E[batch]``.

        **Why any geometry goes with any noise.** Let x_t be the mapped, clipped sum of step t. Adding or removing a
        record moves x_t by a vector of norm at most C if it was drawn and by 0 if not, in the coordinates of the
        parameters, whatever the map U_t was: U_t is computed from public numbers and from what was released before t.
        So (x_t) is an adaptive stream with bounded participations, which is all that the matrix mechanism
        asks for (Denisov et al., 2022): releasing ``x + C⁻¹ z``, that is ``C⁻¹ (C x + z)``, has the privacy of
        the Gaussian mechanism with the sensitivity of C. And no inverse map follows: the optimizer adds x_t + w_t
        to the parameters as it is, so the noise in θ is ``A C⁻¹ z``, exactly as without a geometry; what one step added
        is taken back later although U has changed in between. A map *after* the noise (`post`) is free too, but if it
        changes over time the noise no longer cancels: make_private warns.
        """
        totals: dict[nn.Parameter, Tensor] = {}
        while sums:
            slot, total = sums.popitem()
            for p, part in zip(slot, total, strict=True):
                totals[p] = totals[p] + part if p in totals else part
        trainable = self._trainable()
        noisy = {
            name: totals[p].contiguous()
            if p in totals
            else torch.zeros_like(p, dtype=at_least_float32(p).dtype)
            for name, p in trainable.items()
        }
        self._noise.add_(
            list(noisy.values()), key, self.plan.noise_scale / self.plan.batch_size, step
        )
        round_to_grid_(noisy.values(), self.plan.grid)
        for names, after in self.geometry.after_noise().items():
            noisy.update(zip(names, after.apply([noisy[name] for name in names]), strict=True))
        for p, name in self._names.items():
            p.grad = (
                noisy[name].to(p.dtype) if name in noisy else None
            )  # nothing of before make_private is stepped

    def _map_of(self, slot: ParamKey) -> LinearMap:
        """The geometry's map at the first use in a logical batch; a refresh from outside waits for the next."""
        if slot not in self._maps:
            self._maps[slot] = self.geometry.map_of(tuple(self._names[p] for p in slot))
        return self._maps[slot]

    def _forget_batch(self) -> None:
        self._sums, self._maps, self._rows, self._chunk, self._rates_at_partial_step = (
            {},
            {},
            0,
            None,
            None,
        )
        self._trace = None
        self._capture.drain()
        self._capture.recycle()

    def _placeholder_for_scaler(self) -> None:
        smallest = min((p for p in self._names if p.requires_grad), key=lambda p: p.numel())
        smallest.grad = torch.zeros_like(smallest)


def _secret_steps(steps: int) -> set[int]:
    return set(random.SystemRandom().sample(range(steps), min(TRIALS, steps)))


def _is_private(p: nn.Parameter) -> bool:
    """Is it clipped and noised by some run?"""
    return any(p in run._names for run in _LIVE if not run._detached)


def _note_modules(module: nn.Module, args: Any) -> None:
    if module._parameters and torch.is_grad_enabled():
        for run in _ITERATING:
            if run.batch_open:
                guards.note_foreign(module, _is_private, run._touched)


def _watch_modules() -> None:
    """While some loop is under way, every call of any module is looked at."""
    if _ITERATING and not _watch:
        _watch.append(register_module_forward_pre_hook(_note_modules))
    elif _watch and not _ITERATING:
        _watch.pop().remove()


def _backward_of(optimizer: Optimizer) -> Callable[[Callable[[], Tensor]], Any]:
    """What a loop does with its loss; DiSK may take two gradients of it."""
    if isinstance(optimizer, DiSK):
        return optimizer.backward
    return lambda closure: closure().backward()


def _load_geometry(geometry: Geometry, state: dict[str, Any]) -> None:
    """All of it or nothing."""
    before = geometry.state_dict()
    try:
        geometry.load_state_dict(state)
    except BaseException:
        geometry.load_state_dict(before)
        raise


def _watch_other_optimizers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    touched = [run._touched for run in _LIVE if run._touched]
    if touched and not any(optimizer is run.optimizer for run in _LIVE if not run._detached):
        for parameters in touched:
            guards.not_stepped(optimizer, parameters)


register_optimizer_step_pre_hook(_watch_other_optimizers)
