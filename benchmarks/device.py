"""The cost of noise on a device: normals per second, kernels, operations, and its share of a step.

    python -m benchmarks.device [--device cuda]

Arms take turns, and the best of several turns is reported. On an accelerator, where the noise is
one compiled kernel, compiling it takes a minute or two at the first run. On the CPU the library
draws with `cryptography`; the compiled kernel is for comparison. Integer operations and bytes are
counted from the code, not measured, so that the cost for a model of any size can be computed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpkfc
from dpkfc import chacha, normals
from dpkfc.noise.independent import Independent
from dpkfc.noise.workload import Workload
from dpkfc.random import add_normal_, first_key

INTEGER_OPERATIONS = ("add", "sub", "bitwise", "__lshift__", "__rshift__", "__and__", "__or__")
MODELS = {"1 B": 10**9, "7 B": 7 * 10**9}


class CountOperations(TorchDispatchMode):
    """Counts elementwise operations, per element of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.integer: Counter[str] = Counter()
        self.floating: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, Tensor) and not func.is_view:
            if out.dtype == torch.int32 and name.startswith(INTEGER_OPERATIONS):
                self.integer[name] += out.numel()
            elif out.is_floating_point() and name not in ("stack", "_to_copy", "full_like"):
                self.floating[name] += out.numel()
        return out


def operations_per_normal() -> tuple[float, float]:
    """Integer and floating-point operations of the kernel, per normal."""
    blocks = 64
    key = chacha.key_words(bytes(32), torch.device("cpu"))
    with CountOperations() as counted:
        normals.box_muller(key, torch.arange(blocks))
    count = 2 * chacha.WORDS * blocks
    return counted.integer.total() / count, counted.floating.total() / count


def alternate(
    arms: dict[str, Callable[[], object]], turns: int, device: torch.device
) -> dict[str, float]:
    """The best time of each arm, in seconds."""

    def seconds(arm: Callable[[], object]) -> float:
        wait(device)
        started = time.perf_counter()
        arm()
        wait(device)
        return time.perf_counter() - started

    for arm in arms.values():
        arm()
    rounds = [[seconds(arm) for arm in arms.values()] for _ in range(turns)]
    return dict(zip(arms, map(min, zip(*rounds, strict=True)), strict=True))


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def kernels_of(function: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> int:
    """Compile the noise kernel and return of how many kernels it consists."""
    from torch._inductor import metrics

    metrics.reset()
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        function(chacha.key_words(bytes(32), device), torch.arange(100, device=device))
    return int(metrics.generated_kernel_count)


def drawing_arms(
    size: int, device: torch.device, compiled: Callable[[Tensor, Tensor], Tensor] | None
) -> dict[str, Callable[[], object]]:
    """Functions that draw `size` normals each, in different ways."""
    key = first_key(0)
    words = chacha.key_words(key, device)
    block = torch.arange(math.ceil(size / (2 * chacha.WORDS)), device=device)
    target = torch.zeros(size, device=device)
    on_host = torch.zeros(size)
    arms: dict[str, Callable[[], object]] = {
        "as in a step": lambda: add_normal_([target], key, 0.5),
        "torch normal_": lambda: target.add_(torch.empty_like(target).normal_(), alpha=0.5),
        "cryptography on the host, copied": lambda: target.add_(_drawn(on_host, key).to(device)),
        "cipher, separate kernels": lambda: normals.box_muller(words, block),
    }
    if compiled is not None:
        arms["cipher, one kernel"] = lambda: compiled(words, block)
    return arms


def _drawn(target: Tensor, key: bytes) -> Tensor:
    add_normal_([target.zero_()], key, 1.0)
    return target


def step_arms(device: torch.device, width: int) -> tuple[dict[str, Callable[[], object]], int]:
    """A training step of an MLP with and without noise, and the number of its parameters."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    x = torch.randn(64, width, device=device)
    params = list(model.parameters())
    size = sum(p.numel() for p in params)
    stream = Independent().factorize(Workload.sgd(), 1, 1).stream([range(size)], device)
    taken = iter(range(10**9))

    def plain() -> None:
        grads = torch.autograd.grad(model(x).square().mean(), params)
        for p, grad in zip(params, grads, strict=True):
            p.data.add_(grad, alpha=-1e-3)

    def noisy() -> None:
        grads = list(torch.autograd.grad(model(x).square().mean(), params))
        stream.add_(grads, first_key(0), 1e-3, next(taken))
        for p, grad in zip(params, grads, strict=True):
            p.data.add_(grad, alpha=-1e-3)

    return {"without noise": plain, "with noise": noisy}, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=4_000_000, help="normals per turn")
    parser.add_argument("--width", type=int, default=1024, help="of the model of the step")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled kernel")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device, console = torch.device(chosen.device), Console()

    compiled = None
    if not chosen.no_compile:
        compiled = normals.compiled()
        started = time.perf_counter()
        count = kernels_of(compiled, device)
        seconds = time.perf_counter() - started
        console.print(f"The cipher and Box-Muller: {count} kernel(s), compiled in {seconds:.0f} s")

    times = alternate(drawing_arms(chosen.size, device, compiled), chosen.turns, device)
    table = Table("arm", "million normals per second", "relative to normal_", title="Drawing")
    for name, best in times.items():
        rate, ratio = chosen.size / best / 1e6, best / times["torch normal_"]
        table.add_row(name, f"{rate:,.0f}", f"{ratio:.2f}")
    console.print(table)

    integer, floating = operations_per_normal()
    table = Table("per normal", *MODELS, title="One kernel: operations and bytes, counted")
    for name, value, unit in (
        ("32-bit integer operations", integer, 1e12),
        ("float32 operations", floating, 1e12),
        ("bytes written", 4.0, 1e9),
        ("bytes to add it to the gradient", 12.0, 1e9),
    ):
        prefix = "T" if unit == 1e12 else "GB"
        scaled = [f"{value * size / unit:,.1f} {prefix}" for size in MODELS.values()]
        table.add_row(f"{value:,.1f} {name}", *scaled)
    console.print(table)

    arms, size = step_arms(device, chosen.width)
    times = alternate(arms, chosen.turns, device)
    table = Table("step", "ms", "ratio", title=f"A step of an MLP of {size:,} parameters")
    for name, best in times.items():
        table.add_row(name, f"{best * 1e3:.1f}", f"{best / times['without noise']:.2f}")
    console.print(table)
    console.print(f"dpkfc {dpkfc.__version__}, torch {torch.__version__}, {device}")


if __name__ == "__main__":
    main()
