"""Find the modules that must run as a whole under vmap for a model to be captured.

Most modules are captured on their own. Some are not: a table of relative positions is looked up
without a batch dimension, an adapter reads the weight of another module. The module around them,
run as a whole under vmap, has per-sample gradients all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from dpkfc.errors import CaptureError, PrivacyError
from dpkfc.per_sample.capture import GradientCapture


def capture_for(
    model: nn.Module, vmap_modules: Iterable[str], check: Callable[[GradientCapture], None]
) -> GradientCapture:
    """Set the hooks with which the model passes the trial.

    Where a module cannot be captured on its own, the module around it runs under vmap instead, and
    the trial is repeated, parent by parent. The whole model is never run under vmap for a part
    of it. Where the model owns parameters and does not run under vmap, its scalars are expanded to
    one copy per sample.

    Args:
        model: the user's.
        vmap_modules: the modules that the user named.
        check: the trial. Raises a `CaptureError` that names the modules that it could not capture.

    **Guarantee.** The trial passed with exactly the hooks that are returned.

    Raises:
        PrivacyError: no choice of modules passes.
    """
    chosen, first = tuple(vmap_modules), None
    modules, scalars = set(model.modules()), False
    while True:
        capture = GradientCapture(model, chosen, expand_scalars=scalars)
        try:
            check(capture)
            return capture
        except CaptureError as problem:
            larger = _enlarged(model, capture, problem.modules)
            capture.remove()
            changed = set(model.modules()) != modules
            if "" in problem.modules and not scalars and not changed:
                scalars = True
            elif larger is None or set(larger) == set(chosen) or changed:
                raise _refusal(first, problem, changed) from problem
            else:
                chosen = larger
            first = first or problem
        except BaseException:
            capture.remove()
            raise


def _enlarged(
    model: nn.Module, capture: GradientCapture, failed: Iterable[str]
) -> tuple[str, ...] | None:
    """The modules to run under vmap so that each failed module is in one; None: there are none."""
    chosen = set(capture.vmap_modules)
    for name in failed:
        enclosing = _enclosing(model, capture, name)
        if not enclosing:
            return None
        chosen |= {enclosing, *_similar(model, enclosing, name)}
    inner = {name for name in chosen for other in chosen if name.startswith(f"{other}.")}
    return tuple(name for name, _ in model.named_modules() if name in chosen - inner)


def _enclosing(model: nn.Module, capture: GradientCapture, name: str) -> str:
    """The smallest module that can be tried in place of this one; '' is the whole model."""
    kinds = {hooked.name: hooked.kind for hooked in capture.hooked_modules}
    if kinds.get(name) in ("layer", "vmap"):
        name = name.rpartition(".")[0]
    # lists are never called
    while name and isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
        name = name.rpartition(".")[0]
    return name


def _similar(model: nn.Module, enclosing: str, failed: str) -> Iterable[str]:
    """Modules of the same class, with a module of the same class at the place of the failed one.

    The blocks of a transformer fail alike: one trial instead of one per block.
    """
    place = failed.removeprefix(enclosing).removeprefix(".")
    kinds = type(model.get_submodule(enclosing)), type(model.get_submodule(failed))
    for name, module in model.named_modules():
        if type(module) is kinds[0]:
            try:
                inner = module.get_submodule(place)
            except AttributeError:
                continue
            trained = any(p.requires_grad for p in inner.parameters())
            if type(inner) is kinds[1] and trained:
                yield name


def _refusal(first: CaptureError | None, last: CaptureError, changed: bool) -> PrivacyError:
    message = str(last)
    if first is not None and str(first) != message:
        message = f"{first}. Another way to capture it fails too: {message}"
    if changed:
        message += ". The failed forward has left other modules in the model: build it again"
    return PrivacyError(message)
