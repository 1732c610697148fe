"""Per-sample gradients from one forward and one backward pass, which form no weight gradient.

`GradientCapture` sets hooks that deliver (a, δ) of every layer call to a receiver;
`GradAccumulator` is the receiver that turns them into per-sample gradients with their norms.

While a layer with an adapter runs, its parameters do not require grad, so that autograd builds only
the gradient of the input. A hook on the layer's output delivers δ. Parameters that a container owns
itself are replaced, while the container runs, by one copy per sample (an expanded view, no memory),
whose gradient is per sample.

The model is not wrapped and its methods are not replaced, except the forward of modules that run
under vmap and what `per_sample.hugging_face` says. A copy of the model (by `copy.deepcopy`, as for
weight averaging, or by pickling) is a plain model: the hooks do nothing in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dpkfc.errors import CaptureError, PrivacyError
from dpkfc.per_sample.base import (
    HookedModule,
    LayerCall,
    ParamKey,
    PerSampleGrad,
    PreconditionerOf,
    no_preconditioner,
)
from dpkfc.per_sample.combine import combine
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.hugging_face import (
    models_with_cache,
    models_with_prompt,
    prompt_per_sample,
)
from dpkfc.per_sample.layers.vmap import run_under_vmap
from dpkfc.per_sample.partition import partition
from dpkfc.per_sample.rounding import full_precision
from dpkfc.per_sample.verify import verify_adapter
from dpkfc.sharding import is_sharded


class Receiver(Protocol):
    """What the events of forward and backward passes are delivered to."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to run with gradients enabled."""

    def receive(self, call: LayerCall) -> None:
        """The backward pass has reached a call of a hooked module."""


@dataclass
class CapturedGrads:
    """Per-sample gradients g_i of `batch_size` samples, and their preconditioned norms."""

    grads: dict[ParamKey, PerSampleGrad]
    squared_norms_by_key: dict[ParamKey, Tensor]  # [batch], ‖U g_i‖² of each parameter key
    squared_norms: Tensor | None  # [batch], their sum; None if nothing was captured
    batch_size: int
    eps: float  # relative rounding error of the coarsest dtype that they were computed in


class GradAccumulator:
    """Receives layer calls until `take`; a parameter used several times gets one gradient."""

    def __init__(self, preconditioner_of: PreconditionerOf = no_preconditioner) -> None:
        self._preconditioner_of = preconditioner_of
        self.clear()

    def clear(self) -> None:
        """Forget everything that was received."""
        self._grads: dict[ParamKey, list[PerSampleGrad]] = {}
        self._squared_norms: dict[ParamKey, Tensor] = {}  # of parameters with one use so far
        self._batch_sizes: set[int] = set()
        self._eps = 0.0
        # the tensors that the gradients refer to, with their versions when they were measured
        self._versions: list[tuple[Tensor, int, str]] = []

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def receive(self, call: LayerCall) -> None:
        """Measure at once: while δ is in the cache, and so that activations can be freed."""
        with full_precision(call.backprops.device):
            grads = per_sample_grads(call, self._preconditioner_of)
            if not call.hooked.verified:
                verify_adapter(call, grads, self._preconditioner_of)
                call.hooked.verified = True
            for key, grad in grads.items():
                uses = self._grads.setdefault(key, [])
                uses.append(grad)
                name = call.hooked.name
                self._versions += [(tensor, tensor._version, name) for tensor in _tensors(grad)]
                if not call.shared and len(uses) == 1:
                    self._squared_norms[key] = grad.squared_norms(self._preconditioner_of(key))
        self._batch_sizes.add(call.batch_size)
        self._eps = max(self._eps, torch.finfo(call.backprops.dtype).eps)

    def take(self) -> CapturedGrads:
        """The gradients of the backward passes since the last `take`."""
        grads, norms, sizes = self._grads, self._squared_norms, self._batch_sizes
        versions, eps = self._versions, self._eps
        self.clear()
        for tensor, version, name in versions:
            if tensor._version != version:
                raise PrivacyError(
                    f"the input of module '{name}', or its gradient, was changed in place after "
                    "backward(): it was measured before the change and would be released after it. "
                    "Do not change a batch before optimizer.step()"
                )
        if len(sizes) > 1:
            raise PrivacyError(
                f"one backward reached forward passes of {sorted(sizes)} samples: row i must be "
                "the same sample in all of them. Call backward after each forward pass"
            )
        combined = {key: combine(uses, self._preconditioner_of(key)) for key, uses in grads.items()}
        for key, grad in combined.items():
            if key not in norms or len(grads[key]) > 1:
                norms[key] = grad.squared_norms(self._preconditioner_of(key))
        total = torch.stack(list(norms.values())).sum(0) if norms else None
        return CapturedGrads(combined, norms, total, max(sizes, default=0), eps)


def per_sample_grads(
    call: LayerCall, preconditioner_of: PreconditionerOf = no_preconditioner
) -> dict[ParamKey, PerSampleGrad]:
    """The per-sample gradients of one call, by the parameters that they belong to.

    Args:
        call: (a, δ) of a layer, or the gradient of one copy of a parameter per sample.
        preconditioner_of: the map that the gradients will be multiplied by. An adapter may apply it
            at once where that is cheaper.
    """
    adapter = call.hooked.adapter
    if call.activations is None or adapter is None or adapter.per_sample_grads is None:
        return {tuple(call.params.values()): DenseGrad([call.backprops])}
    call.preconditioner_of = preconditioner_of
    return {
        tuple(call.params[name] for name in names): grad
        for names, grad in adapter.per_sample_grads(call).items()
    }


def _tensors(grad: Any) -> Iterator[Tensor]:
    """Every tensor that a per-sample gradient refers to."""
    for value in vars(grad).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from value
        elif is_dataclass(value):
            yield from _tensors(value)


class GradientCapture:
    """The hooks on a model. Events are delivered to the innermost receiver."""

    def __init__(
        self, model: nn.Module, vmap_modules: Iterable[str] = (), expand_scalars: bool = False
    ) -> None:
        self.vmap_modules = tuple(vmap_modules)
        self.hooked_modules = partition(model, self.vmap_modules, expand_scalars)
        _refuse_unverifiable(self.hooked_modules)
        self.verify_adapters()
        self._active_modules: Sequence[HookedModule] = self.hooked_modules
        self.batch_size: int | None = None  # of the forward pass under way
        # joins what needs no gradient itself to the autograd graph
        self.anchor = torch.zeros((), requires_grad=True)
        self._receivers: list[Receiver] = []
        self._sharded_may_accumulate = [False]  # shared with the hooks of the parameters
        # methods of the modules, and what the modules had in their place besides their class's
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._handles = [model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)]
        for hooked in self.hooked_modules:
            self._attach(hooked)
        if any(h.kind == "vmap" and any(h.module.children()) for h in self.hooked_modules):
            for module in models_with_cache(model):
                hook = Hook(self._refuse_cache)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for module in models_with_prompt(model):
            self._replace_get_prompt(module)
        owners = {id(p): h.name for h in self.hooked_modules for p in h.params.values()}
        for name, p in model.named_parameters():
            if p.is_floating_point():
                allowed = self._sharded_may_accumulate if is_sharded(p) else [False]
                self._handles.append(_refuse_direct_use(p, name, owners.get(id(p)), allowed))

    def attach(self, receiver: Receiver) -> None:
        """Deliver events to `receiver` from now on."""
        self._receivers.append(receiver)

    @contextlib.contextmanager
    def delivering_to(self, receiver: Receiver) -> Iterator[None]:
        """Inside the block, deliver events to `receiver` only."""
        batch_size = self.batch_size
        self._receivers.append(receiver)
        try:
            yield
        finally:
            self._receivers.pop()
            self.batch_size = batch_size

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[LayerCall]]:
        """Inside the block, collect the calls in a list."""
        recorder = _Recorder()
        with self.delivering_to(recorder):
            yield recorder.calls

    @contextlib.contextmanager
    def accumulating(
        self, preconditioner_of: PreconditionerOf = no_preconditioner
    ) -> Iterator[GradAccumulator]:
        """Inside the block, accumulate per-sample gradients apart from those of training."""
        accumulator = GradAccumulator(preconditioner_of)
        with self.delivering_to(accumulator):
            yield accumulator

    @contextlib.contextmanager
    def suspended(self, except_for: HookedModule | None = None) -> Iterator[None]:
        """Inside the block, the model is the plain model, `except_for` one module.

        Take gradients with `torch.autograd.grad`: `backward` would be refused, except by sharded
        parameters, whose gradients exist only after `backward`.
        """
        self._active_modules = [] if except_for is None else [except_for]
        self._sharded_may_accumulate[0] = True
        try:
            with self.delivering_to(_Recorder()):
                yield
        finally:
            self._active_modules = self.hooked_modules
            self._sharded_may_accumulate[0] = False

    def owners(self, params: Iterable[nn.Parameter]) -> list[str]:
        """Names of the hooked modules that account for these parameters."""
        wanted = {id(p) for p in params}
        return [
            hooked.name
            for hooked in self.hooked_modules
            if any(id(p) in wanted for p in hooked.params.values())
        ]

    def reuse_workspaces(self) -> None:
        """All per-sample gradients captured so far are no longer needed: reuse their memory."""
        for hooked in self.hooked_modules:
            hooked.workspace.release()

    def verify_adapters(self) -> None:
        """Compare adapters that are not built in with autograd at their next call."""
        for hooked in self.hooked_modules:
            hooked.verified = hooked.built_in or hooked.kind != "layer"

    def remove(self) -> None:
        """Remove all hooks and restore replaced methods."""
        for handle in self._handles:
            handle.remove()
        for module, name, own in self._replaced:
            delattr(module, name)
            if own is not None:
                setattr(module, name, own)
        self._handles, self._replaced, self._receivers = [], [], []

    # -- events

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_capturing():
            return
        leaves = tree_leaves((args, kwargs))
        sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()]
        if sizes:  # a tensor of size 1 may be shared by all samples
            self.batch_size = next((size for size in sizes if size != 1), 1)
        if self._receivers:
            self._receivers[-1].before_forward(args, kwargs)

    def _deliver(self, call: LayerCall) -> None:
        if call.backprops.requires_grad:
            raise PrivacyError(
                "backward(create_graph=True) is not supported: a private gradient has no second "
                "derivative"
            )
        if not self._receivers:
            return
        try:
            self._receivers[-1].receive(call)
        except PrivacyError:
            raise
        except Exception as problem:
            raise CaptureError(
                f"the per-sample gradients of module '{call.hooked.name}' "
                f"({type(call.module).__name__}) cannot be computed: {problem}. Freeze it, or name "
                "the module that calls it in Options(vmap_modules=[...])",
                call.hooked.name,
            ) from problem

    def _is_capturing(self) -> bool:
        return torch.is_grad_enabled() and bool(self._active_modules)

    def _trainable(self, hooked: HookedModule) -> dict[str, nn.Parameter]:
        active = self._active_modules is self.hooked_modules or hooked in self._active_modules
        if not torch.is_grad_enabled() or not active:
            return {}
        return {name: p for name, p in hooked.params.items() if p.requires_grad}

    def _attach(self, hooked: HookedModule) -> None:
        module = hooked.module
        if hooked.kind == "vmap":
            forward = module.forward
            self._replace(module, "forward", lambda *a, **k: self._vmap(hooked, forward, a, k))
            return
        before = self._before_layer if hooked.kind == "layer" else self._expand_params
        after = self._after_layer if hooked.kind == "layer" else self._restore_params

        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return before(hooked, args, kwargs)

        def post(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            return after(hooked, args, kwargs, out)

        self._handles += [
            module.register_forward_pre_hook(Hook(pre), with_kwargs=True),
            module.register_forward_hook(
                Hook(post), with_kwargs=True, prepend=True, always_call=True
            ),
        ]

    def _replace(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._replaced.append((module, name, vars(module).get(name)))
        setattr(module, name, _Method(function, module, name))

    def _replace_get_prompt(self, module: nn.Module) -> None:
        get_prompt: Any = module.get_prompt

        def per_sample(batch_size: int, *args: Any, **kwargs: Any) -> Any:
            if not self._is_capturing():
                return get_prompt(batch_size, *args, **kwargs)
            return prompt_per_sample(module, get_prompt, batch_size, *args, **kwargs)

        self._replace(module, "get_prompt", per_sample)

    def _refuse_cache(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._is_capturing():
            return None
        if kwargs.get("use_cache"):
            raise ValueError(
                f"{type(module).__name__} was called with use_cache=True, but modules run under "
                f"vmap ({', '.join(self.vmap_modules) or 'that own parameters'}), from which no "
                "cache can be returned. Call it without use_cache, or under torch.no_grad()"
            )
        return args, {**kwargs, "use_cache": False}

    # -- layers with an adapter

    def _before_layer(
        self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        trainable = self._trainable(hooked)
        hooked.lent.append(trainable)
        for name in trainable:
            hooked.gathered(name).requires_grad_(False)
        if not trainable:
            return None
        _activations(hooked, args, kwargs)  # refuses a call that the adapter does not cover
        x, batch = _first_input(hooked, args, kwargs), self._require_batch_size(hooked)
        if x.dim() == 0 or (x.shape[0] % batch and x.shape[0] != 1):
            raise CaptureError(
                f"module '{hooked.name}' got an input of shape {list(x.shape)} in a batch of "
                f"{batch} samples: its first dimension must hold the samples. Use "
                "batch_first=True, or keep the batch in front when reshaping. If the module "
                "computes something that all samples share, such as relative positions, freeze it, "
                "or name the module that calls it in Options(vmap_modules=[...])",
                hooked.name,
            )
        if x.shape[0] == 1 and batch > 1:  # one input for all samples: one copy per sample
            expanded = x.expand(batch, *x.shape[1:])
            if args:
                return (expanded, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): expanded}
        return None

    def _after_layer(
        self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        if not hooked.lent:
            return None
        trainable = hooked.lent.pop()
        for name in trainable:
            hooked.gathered(name).requires_grad_(True)
        if not trainable or out is None:  # nothing to capture, or the forward raised
            return None
        # in a list, so that the activations are freed after backward although the graph lives on
        holder = [_activations(hooked, args, kwargs).detach()]
        version, batch = holder[0]._version, self._require_batch_size(hooked)

        def received(delta: Tensor) -> None:
            if not holder:
                raise PrivacyError(
                    f"module '{hooked.name}': backward ran twice over one forward pass. Add the "
                    "losses and call backward once"
                )
            a = holder.pop()
            if a._version != version:
                raise PrivacyError(
                    f"the input of module '{hooked.name}' was changed in place after the module "
                    "had used it; its gradient would be wrong. Use the out-of-place operation"
                )
            self._deliver(LayerCall(hooked, trainable, batch, a, delta))

        anchored = None if out.requires_grad else _Anchor.apply(out, self.anchor, True)
        (out if anchored is None else anchored).register_hook(received)
        return anchored

    # -- parameters that are replaced by one copy per sample

    def _expand_params(
        self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        trainable = self._trainable(hooked)
        gathered = {name: hooked.gathered(name) for name in trainable}
        hooked.lent.append(gathered)
        for name, p in trainable.items():
            tail = p.shape[1:] if p.dim() else (1,)
            expanded = gathered[name].detach().expand(self._require_batch_size(hooked), *tail)
            copies = self._copies(hooked, name, p, expanded)
            hooked.module._parameters[name] = copies  # type: ignore[assignment]

    def _restore_params(
        self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if hooked.lent:
            hooked.module._parameters.update(hooked.lent.pop())

    def _vmap(
        self,
        hooked: HookedModule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        trainable = self._trainable(hooked)
        if not trainable:
            return forward(*args, **kwargs)
        batch = self._require_batch_size(hooked)
        copies = {
            name: self._copies(
                hooked, name, p, hooked.gathered(name).detach().expand(batch, *p.shape)
            )
            for name, p in trainable.items()
        }
        return run_under_vmap(hooked, forward, copies, batch, args, kwargs)

    def _copies(self, hooked: HookedModule, name: str, p: nn.Parameter, expanded: Tensor) -> Tensor:
        copies: Tensor = _Anchor.apply(expanded, self.anchor, False)
        batch = len(expanded)

        def received(grad: Tensor) -> None:
            per_sample = grad.reshape(batch, *p.shape)
            self._deliver(LayerCall(hooked, {name: p}, batch, None, per_sample))

        copies.register_hook(received)
        return copies

    def _require_batch_size(self, hooked: HookedModule) -> int:
        if self.batch_size is None:
            raise PrivacyError(
                f"module '{hooked.name}' ran outside the model's own forward: call the model "
                "itself, model(...)"
            )
        return self.batch_size


class Hook:
    """A hook that does nothing in a copy of the module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def active(self) -> bool:
        """False in a copy."""
        return self.function is not _do_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Method(Hook):
    """A replaced method; a copy of the module gets the method of its class back."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, name: str) -> None:
        super().__init__(function)
        self.module, self.name = module, name

    def __reduce__(self) -> tuple[Any, ...]:
        # read while the copy has no attributes of its own yet
        return getattr, (self.module, self.name)


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


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def receive(self, call: LayerCall) -> None:
        self.calls.append(call)


def _refuse_unverifiable(hooked_modules: Iterable[HookedModule]) -> None:
    """A registered adapter is compared with autograd, which needs the whole parameter."""
    for hooked in hooked_modules:
        if not hooked.built_in and any(is_sharded(p) for p in hooked.params.values()):
            raise PrivacyError(
                f"module '{hooked.name}' ({type(hooked.module).__name__}) has an adapter of its "
                "own, which cannot be compared with autograd while its parameters are divided by "
                "fully_shard: name it in Options(vmap_modules=[...])"
            )


def _refuse_direct_use(
    p: nn.Parameter, name: str, module: str | None, allowed: list[bool]
) -> RemovableHandle:
    """Autograd reaches a captured parameter only if it was used outside its module: refuse that.

    The hook must not refer to the model: Python's garbage collector does not see references that
    autograd holds.
    """

    def refuse(p: Tensor) -> None:
        if allowed[0]:
            return
        p.grad = None
        if module is None:
            raise PrivacyError(
                f"parameter '{name}' is trained, but was frozen when its gradients were set up to "
                "be captured. Unfreeze it before make_private"
            )
        raise CaptureError(
            f"parameter '{name}' was used outside the forward of module '{module or 'the model'}', "
            "so its gradient cannot be clipped per sample. Call the module itself, or name the "
            "module that uses it in Options(vmap_modules=[...])",
            module,
        )

    # a frozen parameter may be unfrozen later; a hook can be set only while it requires grad
    frozen = not p.requires_grad
    p.requires_grad_(True)
    handle: RemovableHandle = p.register_post_accumulate_grad_hook(Hook(refuse))
    p.requires_grad_(not frozen)
    return handle


def _activations(hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if hooked.adapter is None or hooked.adapter.activations is None:
        return _first_input(hooked, args, kwargs)
    try:
        return hooked.adapter.activations(args, kwargs)
    except PrivacyError as problem:
        where = f"module '{hooked.name}' ({type(hooked.module).__name__})"
        raise PrivacyError(f"{where}: {problem}") from problem


def _first_input(hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = next(iter((*args, *kwargs.values())), None)
    if not isinstance(x, Tensor):
        raise CaptureError(
            f"module '{hooked.name}' ({type(hooked.module).__name__}) was called with "
            f"{type(x).__name__} as its first argument instead of a tensor: call it with its input "
            "first, or name the module that calls it in Options(vmap_modules=[...])",
            hooked.name,
        )
    return x
