"""What ranks may not do: all of them refuse together, in words, before anything is released."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import Subset, TensorDataset

import dpkfc
from dpkfc.accounting.ledger import read
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.registry import LayerAdapter
from tests.distributed.training import (
    FEATURES,
    RECORDS,
    begin,
    loop,
    loss_of,
    network,
    record_noise,
    records,
    sharded,
    train,
    whole,
)

Refusal = tuple[str, str, bool]  # the error's type and message; whether the weights have changed


@pytest.fixture
def waiting() -> Iterator[Job]:
    """Ranks that may be left waiting for each other."""
    with Job(2, timeout=15) as job:
        yield job


def refusal(model: nn.Module, function: Callable[[], Any]) -> Refusal:
    before = [whole(p) for p in model.parameters()]
    try:
        function()
    except Exception as problem:
        after = [whole(p) for p in model.parameters()]
        same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return type(problem).__name__, str(problem), not same
    return "nothing", "", True


def layout_of(layout: str) -> tuple[nn.Module, nn.Module]:
    """The model, and what the loop calls."""
    model = network()
    if layout == "fsdp":
        sharded(model)
    return model, nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model


def expect(refusals: list[Refusal], kind: str, *words: str) -> None:
    for rank, (given, message, changed) in enumerate(refusals):
        assert given == kind, f"rank {rank}: {given}: {message}"
        assert not changed, f"rank {rank}: the weights have changed"
        for each in words:
            assert each in message, f"rank {rank}: {message}"


# -- ranks that were given different things


def different_data(how: str) -> Refusal:
    data, rank = records(), dist.get_rank()
    half = RECORDS // 2
    given: Any = {
        "halves": Subset(data, range(half * rank, half * rank + half)),
        "lengths": Subset(data, range(RECORDS - rank)),
        "orders": Subset(data, torch.randperm(RECORDS).roll(rank).tolist()),
        "values": TensorDataset(data.tensors[0] + rank, data.tensors[1]),
    }[how]
    model = network()
    return refusal(model, lambda: loop(begin(model, given), model))


@pytest.mark.parametrize("how", ["halves", "lengths", "orders", "values"])
def test_different_data(how: str, two: Job) -> None:
    refusals = two(different_data, how)
    expect(refusals, "PrivacyError", "different records", "whole data set")


def different_arguments(layout: str, name: str, values: list[Any], options: Any) -> Refusal:
    model, _ = layout_of(layout)
    given = {**options, name: values[dist.get_rank()]}
    return refusal(model, lambda: loop(begin(model, records(), **given), model))


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
@pytest.mark.parametrize(
    ("name", "values", "options"),
    [
        ("batch_size", [12, 13], {}),
        ("batch_size", [12, -1], {}),
        ("epsilon", [1.0, 2.0], {"noise_multiplier": None}),
        ("noise_multiplier", [1.0, 2.0], {}),
        ("steps", [20, 21], {}),
        ("clip", [1.0, 2.0], {}),
        ("max_physical_batch_size", [None, 2], {}),
        ("seed", [5, None], {}),
        ("loss", [loss_of, "unchecked"], {}),
    ],
)
def test_different_arguments(
    layout: str, name: str, values: list[Any], options: Any, two: Job
) -> None:
    refusals = two(different_arguments, layout, name, values, options)
    kinds = {kind for kind, _, _ in refusals}
    assert kinds <= {"PrivacyError", "ValueError"}
    for _, message, changed in refusals:
        assert name in message and not changed


def ledger_on_one_rank(path: str, one: int) -> Refusal:
    model = network()
    ledger = dpkfc.Ledger(path, dataset="people") if dist.get_rank() == one else None
    return refusal(model, lambda: loop(begin(model, records(), ledger=ledger), model))


@pytest.mark.parametrize("one", [0, 1])
def test_a_ledger_on_one_rank_only(one: int, two: Job, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    expect(two(ledger_on_one_rank, str(path), one), "PrivacyError", "different ledger")
    assert not read(path)


def different_models(how: str) -> Refusal:
    model = network()
    if dist.get_rank():
        if how == "frozen":
            model[0].requires_grad_(False)  # type: ignore[index]
        else:
            model = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 3))
    return refusal(model, lambda: loop(begin(model, records()), model))


@pytest.mark.parametrize("how", ["frozen", "shapes"])
def test_different_models(how: str, two: Job) -> None:
    expect(two(different_models, how), "PrivacyError", "different model")


# -- ranks whose loops differ


def bad_loop(layout: str, what: str, ledger: str, at: int = 1) -> tuple[Refusal, int]:
    """Rank 1 does something else in its loop at batch `at`."""
    model, called = layout_of(layout)
    ledger_here = dpkfc.Ledger(ledger, dataset="people")
    run = begin(called, records(), ledger=ledger_here, batch_size=40)

    def step(x: Tensor, y: Tensor, bad: bool) -> None:
        if bad and what == "leaves":
            return
        loss = F.cross_entropy(called(x), y)
        if bad and what == "loss":
            loss = 2 * loss
        if not (bad and what == "no backward"):
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    batches = iter(run.loader)
    for _ in range(at):
        step(*next(batches), False)
    x, y = next(batches)
    return refusal(model, lambda: step(x, y, dist.get_rank() == 1)), run.steps


@pytest.mark.parametrize("layout", ["plain", "ddp"])
def test_a_rank_that_steps_without_backward(layout: str, two: Job, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    results = two(bad_loop, layout, "no backward", str(path))
    expect([each for each, _ in results], "PrivacyError", "0 were seen by backward()")
    assert [steps for _, steps in results] == [1, 1] == [read(path)[0].charged] * 2
    assert results[0][0][1].startswith("rank 1 stopped: ")


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
def test_a_rank_with_another_loss(layout: str, two: Job, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    results = two(bad_loop, layout, "loss", str(path), at=0)
    expect([each for each, _ in results], "PrivacyError", "does not compute the loss")
    assert [steps for _, steps in results] == [0, 0] == [read(path)[0].charged] * 2


def test_a_rank_that_leaves_the_loop(waiting: Job, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first, second = waiting(bad_loop, "plain", "leaves", str(path))
    expect([first[0]], "RuntimeError", "another rank", "all ranks must run the same loop")
    assert second[0][0] == "nothing"
    assert first[1] == 1 == read(path)[0].charged


@pytest.mark.parametrize("what", ["no backward", "leaves"])
def test_sharded_ranks_that_part_release_nothing(what: str, waiting: Job, tmp_path: Path) -> None:
    """FSDP2 itself communicates in backward passes: the ranks end by the time-out at the latest."""
    path = tmp_path / "ledger.db"
    (first, steps), (second, other_steps) = waiting(parting, what, str(path))
    assert first.startswith("RuntimeError")
    assert second == "left" if what == "leaves" else second.startswith("RuntimeError")
    assert steps == other_steps == read(path)[0].charged == 1


def parting(what: str, ledger: str) -> tuple[str, int]:
    model = sharded(network())
    run = begin(model, records(), ledger=dpkfc.Ledger(ledger, dataset="people"), batch_size=40)
    try:
        for number, (x, y) in enumerate(run.loader):
            bad = number == 1 and dist.get_rank() == 1
            if bad and what == "leaves":
                break
            loss = F.cross_entropy(model(x), y)
            if not bad:
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}", run.steps
    return "left", run.steps


# -- charges that fail


def failing_charge(path: str, how: str) -> tuple[Refusal, int]:
    model = network()
    ledger = dpkfc.Ledger(path, dataset="people")
    if how == "budget":
        ledger = dpkfc.Ledger(path, dataset="people", budget=(0.1, 1e-4))
    run = begin(model, records(), ledger=ledger, batch_size=40)
    if how == "disk" and dist.get_rank() == 0:

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        ledger.charge = full  # type: ignore[method-assign]
    return refusal(model, lambda: loop(run, model)), run.steps


@pytest.mark.parametrize(
    ("how", "kind"), [("budget", ["PrivacyError"] * 2), ("disk", ["OSError", "RuntimeError"])]
)
def test_a_charge_that_fails(how: str, kind: list[str], two: Job, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    results = two(failing_charge, str(path), how)
    for (given, message, changed), expected in zip((r for r, _ in results), kind, strict=True):
        assert given == expected and not changed
        assert {"budget": "does not fit", "disk": "No space left on device"}[how] in message
    assert [steps for _, steps in results] == [0, 0]
    assert sum(run.charged for run in read(path)) == 0


# -- models that cannot be divided so


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class UsedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 4)
        self.outer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(F.linear(x, self.inner.weight, self.inner.bias))
        return out


def odd_model(what: str) -> Refusal:
    model: Any = network()
    options: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,))
    if what == "ddp of a part":
        model[0] = nn.parallel.DistributedDataParallel(model[0])
    elif what == "data parallel":
        model = nn.DataParallel(model)
    elif what == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "unchecked":
        sharded(model)
        options["loss"] = "unchecked"
    elif what == "a part":
        fully_shard(model[0], mesh=mesh)
    elif what == "columns":
        parameter = distribute_tensor(model[0].weight.detach(), mesh, [Shard(1)])
        model[0].weight = nn.Parameter(parameter)
    elif what == "placement":
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    elif what == "sub-mesh":
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "data"))
        fully_shard(model, mesh=both["data"])
    elif what == "adapter":
        model = nn.Sequential(Scale(), model)
        dpkfc.register_layer(
            Scale,
            LayerAdapter(
                lambda call: {("weight",): DenseGrad([call.backprops * call.activations])},
                params=("weight",),
            ),
        )
        sharded(model)
    elif what == "post":
        sharded(model)
        probe = dpkfc.probes.Tabular(FEATURES, classes=3)
        options["geometry"] = dpkfc.KFC(probe, post=0.5)
    elif what == "outside":
        model = sharded(UsedOutside())
    elif what == "outside whole":
        model = UsedOutside()
        fully_shard(model, mesh=mesh)
    return refusal_of_parts(model, lambda: loop(begin(model, records(), **options), model))


def refusal_of_parts(model: nn.Module, function: Callable[[], Any]) -> Refusal:
    """Like `refusal`, for models whose parameters cannot be put together."""
    try:
        function()
    except Exception as problem:
        return type(problem).__name__, str(problem), False
    return "nothing", "", True


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("ddp of a part", "PrivacyError", "wraps a part of the model. Wrap the whole model"),
        ("data parallel", "PrivacyError", "use torchrun"),
        ("fsdp1", "PrivacyError", "Use torch.distributed.fsdp.fully_shard"),
        ("unchecked", "PrivacyError", "Give the loss that the loop computes"),
        ("a part", "PrivacyError", "call fully_shard on the model itself"),
        ("columns", "PrivacyError", "Use fully_shard without shard_placement_fn"),
        ("placement", "PrivacyError", "Use fully_shard without shard_placement_fn"),
        ("sub-mesh", "PrivacyError", "Use fully_shard over all ranks"),
        ("adapter", "PrivacyError", "Options(vmap_modules=[...])"),
        ("post", "ValueError", "Use post=0"),
        ("outside", "ValueError", "also without privacy"),
        ("outside whole", "PrivacyError", "vmap_modules"),
    ],
)
def test_models_that_cannot_be_trained(what: str, kind: str, words: str, two: Job) -> None:
    expect(two(odd_model, what), kind, words)


class OwnForward(Scale):
    """Has no adapter: runs under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sums_under_vmap(layout: str) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(OwnForward(), *network())
    if layout == "each":
        sharded(model)
    elif layout == "whole":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run = begin(model, records(), options=dpkfc.Options(vmap_modules=["0"]))
    sums, _ = record_noise(run)
    loop(run, model)
    return sums


@pytest.mark.parametrize("layout", ["each", "whole"])
def test_a_layer_under_vmap_can_be_sharded(layout: str, two: Job) -> None:
    alone = sums_under_vmap("plain")
    for sums in two(sums_under_vmap, layout):
        for step, one in zip(sums, alone, strict=True):
            for own, other in zip(step, one, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-6)


def divided_too_late(when: str) -> Refusal:
    model = network()
    run = begin(model, records())
    if when == "after a step":
        loop(run, model, most=1)
    sharded(model)
    return refusal(model, lambda: loop(run, model))


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
def test_fully_shard_after_make_private(when: str, two: Job) -> None:
    expect(two(divided_too_late, when), "PrivacyError", "fully_shard", "make_private")


# -- what works


def zero_redundancy() -> list[Tensor]:
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)
    loop(begin(model, records(), optimizer), model)
    return [whole(p) for p in model.parameters()]


def test_an_optimizer_whose_state_is_divided(two: Job) -> None:
    one, other = two(zero_redundancy)
    for own, others, plain in zip(one, other, two(train, "plain")[0].weights, strict=True):
        assert torch.equal(own, others) and torch.equal(own, plain)


def train_with_nan(layout: str, batch_size: int) -> tuple[list[list[Tensor]], int, int]:
    """The sums of all steps; the placeholders that were not finite; the records that were not."""
    data = records()
    data.tensors[0][::2] = float("nan")
    _, called = layout_of(layout)
    run = begin(called, data, batch_size=batch_size)
    sums, _ = record_noise(run)
    placeholders = 0
    for x, y in run.loader:
        placeholders += run._batch.chunk.placeholder and bool(x.isnan().any())
        F.cross_entropy(called(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return sums, placeholders, run.not_private.non_finite


@pytest.mark.parametrize("batch_size", [2, 12])
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
def test_a_record_that_is_not_finite_contributes_zero(
    layout: str, batch_size: int, two: Job
) -> None:
    """4. On any rank, also as a placeholder."""
    alone, none, non_finite = train_with_nan("plain", batch_size)
    ranks = two(train_with_nan, layout, batch_size)
    assert none == 0 and sum(count for _, _, count in ranks) == non_finite > 10
    if batch_size == 2:
        assert sum(placeholders for _, placeholders, _ in ranks) > 0
    for sums, _, _ in ranks:
        for step, one in zip(sums, alone, strict=True):
            for own, other in zip(step, one, strict=True):
                assert own.isfinite().all()
                torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-6)


def copied(how: str) -> Refusal:
    model = network()
    run = begin(model, records())
    copies = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
    return refusal(model, lambda: copies[how](run))


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
def test_copies_of_a_run(how: str, two: Job) -> None:
    expect(two(copied, how), "PrivacyError", "cannot be copied or pickled")
