"""A model of the user's own: a function in a file, written as FILE.py:function."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from dpkfc.app.models import backbone
from dpkfc.app.suggestions import did_you_mean


def is_user_model(name: str) -> bool:
    """Whether the name is FILE.py:function.

    >>> [is_user_model(name) for name in ("net.py:network", "cnn", "frozen:models/net.py:network")]
    [True, False, False]
    """
    return backbone.parse(name) is None and name.rpartition(":")[0].endswith(".py")


def user_model(
    name: str, code: str | None, shape: tuple[int, ...], classes: int
) -> tuple[nn.Module, str]:
    """Build the model, and return it with the digest of its file.

    Args:
        name: FILE.py:function.
        code: the digest that the file must have. It is compared before anything in the file runs.
    """
    function, digest = _load_function(name, code)
    return _call(function, name, shape, classes), digest


def _load_function(name: str, code: str | None) -> tuple[Callable[..., Any], str]:
    """The function in the file, and the digest of the file.

    The file is read once, so that what runs is what was compared. Python's own import would read
    it again, or run a .pyc file instead.
    """
    path, _, function_name = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--model {name}: there is no file {file}")
    source = file.read_bytes()
    digest = sha256(source).hexdigest()
    if code is not None and digest != code:
        raise ValueError(
            f"the file of the model {name} has changed since the run, and was not run: restore "
            f"{file} as it was"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as problem:
        raise ValueError(
            f"--model {name}: {file} fails with {type(problem).__name__}: {problem}"
        ) from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"--model {name}: {file} has no function {function_name!r}"
            f"{did_you_mean(function_name, known)}; it has {', '.join(known) or 'none'}"
        )
    return function, digest


def _call(
    function: Callable[..., Any], name: str, shape: tuple[int, ...], classes: int
) -> nn.Module:
    count = _argument_count(function)
    if count not in (0, 2):
        raise ValueError(
            f"--model {name}: the function takes {count} arguments: write it as f(shape, classes) "
            "or f()"
        )
    try:
        model = function(shape, classes) if count else function()
    except (Exception, SystemExit) as problem:
        raise ValueError(
            f"--model {name} fails with {type(problem).__name__}: {problem}"
        ) from problem
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"--model {name} returned {type(model).__name__}: it must return a torch.nn.Module"
        )
    return model


def _argument_count(function: Callable[..., Any]) -> int:
    """The number of arguments to call the function with.

    Required arguments count. Without any, it is 2 if the function takes any number of arguments,
    or has two with default values.

    >>> _argument_count(lambda shape, classes, hidden=3: None)
    2
    >>> _argument_count(lambda *arguments: None), _argument_count(lambda hidden=3: None)
    (2, 0)
    """
    parameters = inspect.signature(function).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return 2 if not required and (any_number or len(parameters) == 2) else len(required)
