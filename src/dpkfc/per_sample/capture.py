"""Hooks that let one forward and one backward leave (a, δ) behind, and no weight gradient.

While a captured layer runs, its parameters do not require grad: autograd then builds the input gradient
only. A hook on the layer's output hands over δ. What a container owns itself is replaced, while the container runs,
by one copy a sample (an expanded view, no memory), whose gradient is per sample.

The model is not wrapped and its forward methods are not replaced, except those of modules run under
vmap. A copy of the model (`copy.deepcopy`, as averaging does, or pickling) is a plain model: hooks do not follow it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dpkfc.errors import PrivacyError
from dpkfc.geometry.identity import IDENTITY_MAP, LinearMap
from dpkfc.per_sample.layers.vmap import run_under_vmap
from dpkfc.per_sample.record import DenseGrad, PerSampleGrad, Use, full_precision, held, join
from dpkfc.per_sample.registry import HookedModule

ParamKey = tuple[nn.Parameter, ...]


@dataclass
class LayerCall:
    """One use of a unit: for a layer (a, δ); otherwise `delta` is the per-sample gradient of parameter `wanted`."""

    unit: HookedModule
    wanted: frozenset[str]
    batch: int
    a: Tensor | None
    delta: Tensor

    def gradients(
        self, map_of: Callable[[ParamKey], LinearMap]
    ) -> list[tuple[ParamKey, PerSampleGrad]]:
        """The per-sample gradients of this call, keyed by the parameters they belong to."""
        unit = self.unit
        if unit.handler is None or self.a is None:
            (name,) = self.wanted
            return [((unit.parameters[name],), DenseGrad([self.delta]))]

        def map_of_names(names: tuple[str, ...]) -> LinearMap:
            return map_of(tuple(unit.parameters[name] for name in names))

        use = Use(
            unit.module,
            self.a,
            self.delta,
            set(self.wanted),
            unit.joint,
            self.batch,
            unit.workspace,
            map_of_names,
        )
        return [
            (tuple(unit.parameters[name] for name in names), form)
            for names, form in unit.handler(use)
        ]


@dataclass
class CapturedGrads:
    """Per-sample gradients of `batch` samples: a form for each slot, and the squared norm over all slots."""

    forms: dict[ParamKey, PerSampleGrad]
    squared_norms: Tensor | None
    batch: int
    eps: float  # relative rounding error of the coarsest dtype that they were computed in


class Hook:
    """A hook that stays behind when the module is copied or pickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def active(self) -> bool:
        """False in a copy, where it does nothing."""
        return self.function is not _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Forward(Hook):
    """A replaced forward; a copy of the module gets its class's own forward back."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(function)
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (
            self.module,
            "forward",
        )  # read while the copy has no attributes of its own yet


class _Anchor(torch.autograd.Function):
    """Joins a tensor that needs no gradient to the graph, so that its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
            return x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None


class GradientCapture:
    """Collects the per-sample gradients of one or more backward passes until `drain` takes them."""

    def __init__(self, model: nn.Module, units: list[HookedModule]) -> None:
        self._forms: dict[ParamKey, list[PerSampleGrad]] = {}
        self._norms: dict[ParamKey, Tensor] = {}  # squared, of slots with one use so far
        self._batches: set[int] = set()  # sizes of the forward passes that the gradients came from
        self._eps = 0.0  # of the coarsest dtype among the backprops
        self._kept: list[
            tuple[Tensor, int, HookedModule]
        ] = []  # what the forms hold, and its version when it was measured
        self.map_of: Callable[[ParamKey], LinearMap] = lambda slot: IDENTITY_MAP
        self.trial: list[LayerCall] | None = None  # where a trial wants to see the calls themselves
        self.batch: int | None = None  # samples in the forward pass under way
        self.on_enter: Callable[[], None] = (
            _nothing  # before every forward pass, also without gradients
        )
        self.before_forward: Callable[[tuple[Any, ...], dict[str, Any]], None] = _nothing
        self.on_gradient: Callable[[], None] = _nothing
        self.units = units
        self.anchor = torch.zeros((), requires_grad=True)
        self._replaced: list[
            tuple[nn.Module, Any]
        ] = []  # with the forward of their own that they had, if any
        self._handles = [model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)]
        for unit in units:
            self._attach(unit)
        names = {id(p): name for name, p in model.named_parameters()}
        for unit in units:
            for p in unit.parameters.values():
                if p.is_floating_point():
                    self._handles.append(_watch_for_bypass(p, names[id(p)], unit.name))

    def drain(self) -> CapturedGrads:
        """What the backward passes since the last drain left behind."""
        forms, norms, batches, kept, eps = (
            self._forms,
            self._norms,
            self._batches,
            self._kept,
            self._eps,
        )
        self._forms, self._norms, self._batches, self._kept, self._eps = {}, {}, set(), [], 0.0
        for tensor, version, unit in kept:
            if tensor._version != version:
                raise PrivacyError(
                    f"what module '{unit.name}' was given, or its gradient, was changed in place after backward(): it "
                    "was measured before, and would be released after. Leave a batch as it is until optimizer.step()"
                )
        if len(batches) > 1:
            raise PrivacyError(
                f"one backward reached forward passes of {sorted(batches)} samples: row i must be the same sample in "
                "all of them. Call backward after each forward pass"
            )
        joined = {slot: join(uses, self.map_of(slot)) for slot, uses in forms.items()}
        for slot, form in joined.items():
            if slot not in norms or len(forms[slot]) > 1:
                norms[slot] = form.squared_norms(self.map_of(slot))
        squared = torch.stack(list(norms.values())).sum(0) if norms else None
        return CapturedGrads(joined, squared, max(batches, default=0), eps)

    def recycle(self) -> None:
        """The forms of earlier drains are used up: their memory may be written again."""
        for unit in self.units:
            unit.workspace.taken = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[LayerCall]]:
        """A trial whose calls are listed, and do not mix with those of training."""
        saved = self.batch, self.before_forward
        self.trial, self.before_forward = [], _nothing
        try:
            yield self.trial
        finally:
            self.batch, self.before_forward = saved
            self.trial = None

    @contextlib.contextmanager
    def replaying(
        self, before_forward: Callable[[tuple[Any, ...], dict[str, Any]], None]
    ) -> Iterator[None]:
        """Passes that are captured as usual, while something else than usual happens before each forward pass.

        What the loop left behind must have been drained before.
        """
        saved = self.batch, self.before_forward, self.on_gradient
        self.before_forward, self.on_gradient = before_forward, _nothing
        try:
            yield
        finally:
            self.batch, self.before_forward, self.on_gradient = saved

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for module, its_own in self._replaced:
            del module.forward
            if its_own is not None:
                module.forward = its_own
        self._handles, self._replaced = [], []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.on_enter()
        if not torch.is_grad_enabled():
            return
        sizes = [
            x.shape[0] for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()
        ]
        self.batch = next((size for size in sizes if size != 1), 1) if sizes else self.batch
        self.before_forward(args, kwargs)

    def _attach(self, unit: HookedModule) -> None:
        module = unit.module
        if unit.kind == "vmap":
            original = module.forward
            self._replaced.append((module, vars(module).get("forward")))
            module.forward = _Forward(lambda *a, **k: self._vmapped(unit, original, a, k), module)
            return
        before = self._lend_layer if unit.kind == "layer" else self._expand
        after = self._watch_layer if unit.kind == "layer" else self._give_back

        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return before(unit, args, kwargs)

        def post(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            return after(unit, args, kwargs, out)

        self._handles.append(module.register_forward_pre_hook(Hook(pre), with_kwargs=True))
        self._handles.append(
            module.register_forward_hook(
                Hook(post), with_kwargs=True, prepend=True, always_call=True
            )
        )

    # -- layers with a fast path

    def _lend_layer(self, unit: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trainable = self._trainable(unit)
        unit.lent.append(trainable)
        for p in trainable.values():
            p.requires_grad_(False)
        if not trainable:
            return None
        x, batch = _input_of(args, kwargs), self._batch_of(unit)
        if x.dim() == 0 or (x.shape[0] % batch and x.shape[0] != 1):
            raise PrivacyError(
                f"module '{unit.name}' got an input of shape {list(x.shape)} in a batch of {batch} samples: its first "
                "dimension must hold the samples. Use batch_first=True, or keep the batch in front when reshaping. If "
                "it computes something that all samples share, such as relative positions, freeze it, or name the "
                "module that calls it in make_private(vmap_modules=[...])"
            )
        if x.shape[0] == 1 and batch > 1:  # one input for all samples: give every sample its own
            expanded = x.expand(batch, *x.shape[1:])
            if args:
                return (expanded, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): expanded}
        return None

    def _watch_layer(
        self, unit: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        if not unit.lent:
            return None
        trainable = unit.lent.pop()
        for p in trainable.values():
            p.requires_grad_(True)
        if not trainable or out is None:  # nothing to capture, or the forward raised
            return None
        holder = [_input_of(args, kwargs).detach()]
        version, batch, wanted = holder[0]._version, self._batch_of(unit), frozenset(trainable)

        def received(delta: Tensor) -> None:
            if not holder:
                raise PrivacyError(
                    f"module '{unit.name}': backward ran twice over one forward pass. Add the losses and call "
                    "backward once"
                )
            a = holder.pop()  # the graph lives as long as the user's loss; the activations need not
            if a._version != version:
                raise PrivacyError(
                    f"the input of module '{unit.name}' was changed in place after the module had used it; "
                    "its gradient would be wrong. Use the out-of-place operation"
                )
            self._append(LayerCall(unit, wanted, batch, a, delta))

        anchored = None if out.requires_grad else _Anchor.apply(out, self.anchor, True)
        (out if anchored is None else anchored).register_hook(received)
        return anchored

    # -- parameters that are given one copy a sample

    def _expand(self, unit: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trainable = self._trainable(unit)
        unit.lent.append(trainable)
        for name, p in trainable.items():
            unit.module._parameters[name] = self._copies(
                unit, name, p.detach().expand(self._batch_of(unit), *p.shape[1:])
            )  # type: ignore[assignment]

    def _give_back(
        self, unit: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if unit.lent:
            unit.module._parameters.update(unit.lent.pop())

    def _vmapped(
        self,
        unit: HookedModule,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        trainable = self._trainable(unit)
        if not trainable:
            return original(*args, **kwargs)
        batch = self._batch_of(unit)
        copies = {
            name: self._copies(unit, name, p.detach().expand(batch, *p.shape))
            for name, p in trainable.items()
        }
        return run_under_vmap(unit, original, copies, batch, args, kwargs)

    def _copies(self, unit: HookedModule, name: str, expanded: Tensor) -> Tensor:
        copies = _Anchor.apply(expanded, self.anchor, False)
        batch, keep_dim = len(expanded), unit.kind == "expanded"

        def received(grad: Tensor) -> None:
            self._append(
                LayerCall(
                    unit, frozenset([name]), batch, None, grad.unsqueeze(1) if keep_dim else grad
                )
            )

        copies.register_hook(received)
        return copies  # type: ignore[no-any-return]

    # -- shared

    def _trainable(self, unit: HookedModule) -> dict[str, nn.Parameter]:
        if not torch.is_grad_enabled():
            return {}
        return {name: p for name, p in unit.parameters.items() if p.requires_grad}

    def _batch_of(self, unit: HookedModule) -> int:
        if self.batch is None:
            raise PrivacyError(
                f"module '{unit.name}' ran outside the model's own forward: call the model itself, model(...)"
            )
        return self.batch

    def _append(self, call: LayerCall) -> None:
        if call.delta.requires_grad:
            raise PrivacyError(
                "backward(create_graph=True) is not supported: a private gradient has no second derivative"
            )
        if self.trial is not None:
            self.trial.append(call)
            return
        # Digested at once: norms while δ is in the cache, and small gradients formed, which lets go of activations.
        with full_precision(call.delta.device):
            for slot, form in call.gradients(self.map_of):
                uses = self._forms.setdefault(slot, [])
                uses.append(form)
                self._kept += [(tensor, tensor._version, call.unit) for tensor in held(form)]
                if call.unit.joint and len(uses) == 1:
                    self._norms[slot] = form.squared_norms(self.map_of(slot))
        self._batches.add(call.batch)
        self._eps = max(self._eps, torch.finfo(call.delta.dtype).eps)
        self.on_gradient()


def _watch_for_bypass(p: nn.Parameter, name: str, module: str) -> RemovableHandle:
    """Autograd never reaches a captured parameter, unless it was used outside its module.

    The hook must not refer to the model: Python's garbage collector does not see references that autograd holds.
    """

    def refuse(p: Tensor) -> None:
        p.grad = None
        raise PrivacyError(
            f"parameter '{name}' was used outside the forward of module '{module or 'the model'}', so its "
            "gradient cannot be clipped per sample. Call the module itself, or name the module that uses it in "
            "make_private(vmap_modules=[...])"
        )

    frozen = not p.requires_grad  # it may be unfrozen later, and only then can be watched
    p.requires_grad_(True)
    handle: RemovableHandle = p.register_post_accumulate_grad_hook(Hook(refuse))
    p.requires_grad_(not frozen)
    return handle


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x
