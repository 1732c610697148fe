"""The ranks of a torch.distributed job train as one: same batch, same step, same noise.

Two kinds of messages are sent. *Control messages* (a few numbers, a key, a refusal) go through the
CPU, over gloo, so that no accelerator waits for them. *Sums* of gradients go through the job's own
process group, wherever the parameters are.

`Ranks` is what one process knows of the others. Without a process group, or with a single rank,
every method returns at once, so that callers need no case of their own.

**Guarantee.** If one rank refuses a step, no rank releases it (`agree`). What the first rank alone
does, such as charging the ledger, has happened before any other rank continues (`on_first`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpkfc.errors import PrivacyError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
BUCKET = 25 * 2**20  # bytes that are reduced together, as DistributedDataParallel does

# the control group of each default group
_control_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The processes of a job as one of them sees it."""

    rank: int = 0
    count: int = 1
    control: Any = None  # the process group of control messages; None: the default group

    @property
    def first(self) -> bool:
        """True on the rank that keeps the ledger and writes what exists once."""
        return self.rank == 0

    def on_first(self, function: Callable[[], T]) -> T:
        """Run `function` on the first rank; every rank gets its result, or raises its error."""
        if self.count == 1:
            return function()
        problem: BaseException | None = None
        message: list[Any] = [None]
        if self.first:
            try:
                message = [("result", function())]
            except Exception as error:
                problem, message = error, [("error", *_described(error))]
        with _lost_ranks_in_words():
            dist.broadcast_object_list(message, src=0, group=self.control, device=_CPU)
        kind, *content = message[0]
        if problem is not None:
            raise problem
        if kind == "error":
            raise _error(0, *content)
        return content[0]  # type: ignore[no-any-return]

    def everyone(self, value: T) -> list[T]:
        """The values of all ranks, in their order: small ones, which are pickled."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            with _lost_ranks_in_words():
                dist.all_gather_object(values, value, group=self.control)
        return values

    def total(self, counts: dict[str, int]) -> dict[str, int]:
        """The sums of the counts over the ranks."""
        everyone = self.everyone(counts)
        return {name: sum(each[name] for each in everyone) for name in counts}

    def any(self, flag: bool) -> bool:
        """True on every rank if it is on one."""
        if self.count == 1:
            return flag
        message = torch.tensor([int(flag)])
        self.largest_(message)
        return bool(message[0])

    def agree(self, problem: Exception | None = None, **numbers: int) -> None:
        """Continue if no rank has a problem and all have the same numbers; else raise everywhere.

        Raises:
            Exception: `problem` itself on a rank that passed one; on the others an error with the
                message of the first rank that did.
            PrivacyError: the ranks have different numbers, such as different steps.
        """
        if self.count == 1:
            if problem is not None:
                raise problem
            return
        values = list(numbers.values())
        # the largest of x and of -x: all ranks have the same x if these are opposite
        message = torch.tensor([int(problem is not None), *values, *(-x for x in values)])
        self.largest_(message)
        refused, *extremes = message.tolist()
        if refused:
            self._raise_together(problem)
        largest, smallest = extremes[: len(values)], extremes[len(values) :]
        for name, high, low in zip(numbers, largest, smallest, strict=True):
            if high != -low:
                raise PrivacyError(
                    f"the ranks of this job have different values of {name} (from {-low} to "
                    f"{high}): all ranks must run the same loop, with the same number of batches"
                )

    def _raise_together(self, problem: Exception | None) -> None:
        everyone = self.everyone(None if problem is None else _described(problem))
        if problem is not None:
            raise problem
        rank, content = next((rank, each) for rank, each in enumerate(everyone) if each)
        raise _error(rank, *content)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block each rank works for itself. If one fails, all raise at the end of it.

        The block must not send messages: a rank that has failed would not receive them.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        self.agree(problem)

    def same(self, remedy: str, **values: Any) -> None:
        """Refuse values that differ between the ranks. They are compared by their text.

        Args:
            remedy: what to do, at the end of the message.
            values: by the names that the message uses.
        """
        if self.count == 1:
            return
        texts = {name: str(value) for name, value in values.items()}
        everyone = self.everyone(texts)
        different = [name for name in texts if any(each[name] != texts[name] for each in everyone)]
        if different:
            raise PrivacyError(
                f"the ranks of this job have different {' and '.join(different)}: {remedy}"
            )

    def sum_(self, tensors: dict[str, Tensor]) -> None:
        """Replace every tensor by its sum over the ranks: the same bits on all of them.

        As many bytes are sent as DistributedDataParallel sends for gradients of this dtype.
        """
        if self.count == 1:
            return
        under_way = []
        for names in buckets(tensors):
            flat = torch.cat([tensors[name].reshape(-1) for name in names])
            under_way.append((names, flat, dist.all_reduce(flat, async_op=True)))
            shapes = {name: tensors[name].shape for name in names}
            # the copies in `flat` take the place of the tensors: no more memory than one bucket
            parts = flat.split([shape.numel() for shape in shapes.values()])
            for (name, shape), part in zip(shapes.items(), parts, strict=True):
                tensors[name] = part.view(shape)
        for _, _, work in under_way:
            work.wait()

    def largest_(self, numbers: Tensor) -> None:
        """Replace numbers on the CPU by the largest over the ranks, entry by entry."""
        if self.count > 1:
            with _lost_ranks_in_words():
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.control)

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of the first rank."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)


_CPU = torch.device("cpu")
ALONE = Ranks()


def current_ranks() -> Ranks:
    """The ranks of the process group that is initialised now. All of them must call this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size(), _control_group())


def _control_group() -> Any:
    """A group over gloo: the default group itself, if it can reduce CPU tensors."""
    default: Any = dist.group.WORLD
    if "gloo" in str(dist.get_backend_config(default)):
        return None
    if default not in _control_groups:
        options = getattr(default._get_backend(torch.device("cuda")), "options", None)
        timeout = getattr(options, "_timeout", None)
        _control_groups[default] = dist.new_group(backend="gloo", timeout=timeout)
    return _control_groups[default]


def _described(problem: BaseException) -> tuple[str, str]:
    return type(problem).__name__, str(problem)


def _error(rank: int, kind: str, message: str) -> Exception:
    """The error of another rank, of the same kind if it is one that this library raises."""
    kinds = {each.__name__: each for each in (PrivacyError, ValueError, TypeError)}
    return kinds.get(kind, RuntimeError)(f"rank {rank} stopped: {message}")


@contextlib.contextmanager
def _lost_ranks_in_words() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:  # also of the backends
        raise RuntimeError(
            "another rank has ended, or has not come to the same point of its program within the "
            "time-out of the process group: all ranks must run the same loop, with the same number "
            "of batches. Look at the errors of the other ranks. Nothing more is released "
            f"({problem})"
        ) from problem


def buckets(tensors: Mapping[Key, Tensor]) -> Iterator[list[Key]]:
    """The keys in order, cut where a bucket is full, the dtype changes or the device does."""
    keys: list[Key] = []
    size = 0
    for key, tensor in tensors.items():
        bytes_of = tensor.numel() * tensor.element_size()
        before = tensors[keys[-1]] if keys else tensor
        same_kind = (before.dtype, before.device) == (tensor.dtype, tensor.device)
        if keys and (size + bytes_of > BUCKET or not same_kind):
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += bytes_of
    if keys:
        yield keys


# -- DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose reduction of gradients is switched off.

    It would send raw gradients. It would also wait for ``.grad`` of every parameter, which no
    backward pass forms here.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        stop_reducing(model)
        model = model.module
    return model


def stop_reducing(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Switch off the wrapper's reduction of gradients; it passes calls on to its module."""
    wrapper.require_backward_grad_sync = False
