"""Ranks that share a refresh have the same maps, bit by bit, and those of one process.

Models are in float64: sums that are added up in another order then differ by 1e-15, and maps by
that times the condition of a damped factor. So `CLOSE` is far above rounding and far below what one
lost, repeated or differently drawn probe would change.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from naive import Fixed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.distributed import ALONE, Ranks, current_ranks
from dpkfc.geometry.factors import Moment
from dpkfc.geometry.sharing import checksum, demand_same_maps, owners
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.probes.targets import probe_losses

CLOSE = 1e-8
IMAGES = dpkfc.probes.PinkNoise((2, 6, 6), classes=3)
TOKENS = dpkfc.probes.Tokens(40, 8, classes=3)


class OfTokens(nn.Module):
    """Factors of 161 with 8 positions per probe; a norm layer, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 160)
        self.norm = nn.LayerNorm(160)
        self.inside = nn.Linear(160, 24)
        self.dropout = nn.Dropout(0.2)
        self.outside = nn.Linear(24, 3, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inside = torch.tanh(self.inside(self.norm(self.embedding(input_ids))))
        return self.outside(self.dropout(inside).mean(1))


def of_images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, groups=2),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(216, 12),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.Linear(12, 3),
    ).double()


def of_tokens() -> nn.Module:
    torch.manual_seed(0)
    return OfTokens().double()


KFC = functools.partial(dpkfc.KFC, probes=32)
# dropout and random targets everywhere
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    # n < d vectors of a linear layer, which are kept as they are; blocks of a grouped convolution
    "A": (of_images, lambda: KFC(IMAGES)),
    "AG": (of_images, lambda: KFC(IMAGES, factors="AG", rank=None, post=0.5)),
    "reduce": (of_images, lambda: KFC(IMAGES, factors="AG", approx="reduce", rank=4)),
    "diagonal others": (of_images, lambda: KFC(IMAGES, others="diagonal", loss="mse")),
    # chunks of which the last is smaller
    "uneven": (of_images, lambda: KFC(IMAGES, factors="AG", chunk=7)),
    # more than d vectors, fewer than d on each rank; subspace iteration
    "tokens": (of_tokens, lambda: KFC(TOKENS, rank=4)),
    "tokens, AG": (of_tokens, lambda: KFC(TOKENS, factors="AG", rank=None, others="diagonal")),
    # one of three ranks has no probe
    "two probes": (of_tokens, lambda: dpkfc.KFC(TOKENS, probes=2, chunk=1, factors="AG")),
    "hybrid": (
        of_images,
        lambda: KFC(
            dpkfc.probes.Hybrid(A=IMAGES, G=dpkfc.probes.PinkNoise((2, 6, 6), alpha=0.0)),
            factors="AG",
        ),
    ),
    "AdaDPS": (of_images, lambda: dpkfc.Diagonal(IMAGES, probes=32)),
    "AdaDPS, two probes": (of_tokens, lambda: dpkfc.Diagonal(TOKENS, probes=2, chunk=1)),
}


SHARDED = ("AG", "uneven", "tokens, AG", "two probes", "hybrid", "AdaDPS")


def sharded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model as FSDP2 divides it: its layers, and then what is left."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def refreshed(
    build: Callable[[], nn.Module], make: Callable[[], Any], ranks: Ranks
) -> dict[str, Any]:
    """The maps, the probes in each pass that built them, and the norms of mapped probes."""
    model, geometry = build(), make()
    capture = GradientCapture(model)
    geometry.prepare(model, capture)
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len([*args, *kwargs.values()][0])),
        with_kwargs=True,
    )
    geometry.refresh(model, capture, 3, ranks)
    hook.remove()
    found = {
        "state": geometry.state_dict(),
        "rows": rows,
        "text": without_times(geometry),
        "norms": geometry.probe_norms(model, capture, ranks),
    }
    capture.remove()
    return found


def without_times(geometry: Any) -> str:
    """The description of a geometry up to its last column, and that there are times."""
    if isinstance(geometry, dpkfc.Diagonal):
        return ""
    description = geometry.describe()
    layers = [row for row in description.rows if row.kind == "Kronecker"]
    assert layers and all(0 < row.seconds < description.seconds * 10 for row in layers)
    return "\n".join(f"{row.name} {row.a} {row.g} {row.post} {row.scale}" for row in layers)


def private_run(seed: int) -> dict[str, Any]:
    """Three steps with records of their own, at a learning rate of zero."""
    model = of_images()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 2, 6, 6, generator=generator, dtype=torch.float64) * seed
    data = TensorDataset(x, torch.randint(3, (40,), generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    geometry = KFC(IMAGES, factors="AG", every=2)
    run = dpkfc.make_private(
        model,
        optimizer,
        data,
        loss=dpkfc.losses.cross_entropy,
        geometry=geometry,
        clip="auto",
        noise_multiplier=1.0,
        delta=1e-5,
        steps=3,
        batch_size=10,
        seed=3,
    )
    for inputs, targets in run.loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.detach()
    return {"state": geometry.state_dict(), "clip": run.plan.clip}


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def refusals(ranks: Ranks) -> dict[str, str]:
    """What goes wrong on one rank is refused by all: none waits for a message."""

    def refresh(geometry: Any, break_weight: bool = False) -> None:
        model = of_images()
        if break_weight:
            with torch.no_grad():
                model[4].weight[0, 0] = float("nan")
        geometry.refresh(model, GradientCapture(model), 0, ranks)

    def fails_on_last(output: Any, probes: Any, generator: torch.Generator) -> Tensor:
        if ranks.rank == ranks.count - 1:
            raise ValueError("this rank has no memory left")
        return probe_losses("cross_entropy", output, probes, generator)

    own = Fixed(torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(ranks.rank)))
    noise = dpkfc.probes.PinkNoise((2, 6, 6))
    hybrid = dpkfc.probes.Hybrid(A=noise, G=noise)
    one_bit = torch.ones(3, 3)
    if ranks.rank == 1:
        one_bit.view(torch.int32)[2, 0] += 1
    return {
        "probes": error_of(lambda: refresh(dpkfc.KFC(own))),
        "pass": error_of(lambda: refresh(KFC(IMAGES, loss=fails_on_last))),
        "hybrid": error_of(lambda: refresh(KFC(hybrid, factors="AG", loss=fails_on_last))),
        "diverged": error_of(lambda: refresh(KFC(IMAGES), break_weight=True)),
        "adadps": error_of(lambda: refresh(dpkfc.Diagonal(IMAGES), break_weight=True)),
        "maps": error_of(lambda: demand_same_maps(ranks, {"map": [one_bit]})),
    }


def work(rank: int, count: int, folder: str) -> None:
    """All that one rank does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count
    )
    ranks = current_ranks()
    results: dict[str, Any] = {
        name: refreshed(build, make, ranks) for name, (build, make) in CASES.items()
    }
    for name in SHARDED:
        build, make = CASES[name]
        results["sharded", name] = refreshed(functools.partial(sharded, build), make, ranks)
    results["float32"] = refreshed(lambda: of_images().float(), lambda: KFC(IMAGES), ranks)
    results["private"] = [private_run(seed) for seed in (1, 7)]
    results["refusals"] = refusals(ranks)
    torch.save(results, f"{folder}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def shared(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank of a job found."""
    return spawn(work, request.param, tmp_path_factory.mktemp("ranks"))


def spawn(function: Any, count: int, folder: Path) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=function, args=(rank, count, str(folder))) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * count
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(count)]


@functools.cache
def alone(case: str) -> dict[str, Any]:
    """What one process finds."""
    return refreshed(*CASES[case], ALONE)


def leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for key, value in state.items() for leaf in (key, *leaves(value))]
    return (
        [leaf for value in state for leaf in leaves(value)] if isinstance(state, list) else [state]
    )


def assert_same_bits(one: Any, other: Any) -> None:
    assert len(leaves(one)) == len(leaves(other)) > 5
    for x, y in zip(leaves(one), leaves(other), strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, y) and x.dtype == y.dtype
            assert x.stride() == y.stride(), "products in another order would round differently"
        else:
            assert x == y


def actions(case: str, state: dict[str, Any]) -> dict[Any, list[Tensor]]:
    """What the maps make of a gradient: eigenvectors themselves may differ by a rotation."""
    build, make = CASES[case]
    geometry = make()
    geometry.load_state_dict(state)
    generator = torch.Generator().manual_seed(9)
    grads = {
        name: torch.randn(1, *p.shape, generator=generator, dtype=torch.float64)
        for name, p in build().named_parameters()
    }
    maps = {("map", *names): rule for names, rule in geometry._maps.items()}
    maps |= {("post", *names): rule for names, rule in geometry.after_noise().items()}
    return {key: rule.apply([grads[name] for name in key[1:]]) for key, rule in maps.items()}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_have_the_same_bits(shared: list[dict[str, Any]], case: str) -> None:
    first, *others = (results[case] for results in shared)
    for other in others:
        assert_same_bits(first["state"], other["state"])
        assert torch.equal(first["norms"], other["norms"])
        assert first["text"] == other["text"]


@pytest.mark.parametrize("case", CASES)
def test_the_maps_are_those_of_one_process(shared: list[dict[str, Any]], case: str) -> None:
    assert_equal_maps(case, shared[0][case], alone(case))


def assert_equal_maps(case: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    got, want = actions(case, found["state"]), actions(case, wanted["state"])
    assert list(got) == list(want) and want
    for key in want:
        for one, other in zip(got[key], want[key], strict=True):
            assert (one - other).norm() <= CLOSE * other.norm(), key
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=CLOSE, atol=0)


@pytest.mark.parametrize("case", SHARDED)
def test_a_model_divided_by_fsdp2_has_the_maps_of_a_whole_one(
    shared: list[dict[str, Any]], case: str
) -> None:
    """All ranks run as many passes: those with fewer chunks take part without a result."""
    first, *others = (results["sharded", case] for results in shared)
    assert_equal_maps(case, first, alone(case))
    for other in others:
        assert_same_bits(first["state"], other["state"])
        assert torch.equal(first["norms"], other["norms"])
        assert len(first["rows"]) == len(other["rows"])
    most = max(len(results[case]["rows"]) for results in shared)
    assert len(first["rows"]) == most < len(alone(case)["rows"])


@pytest.mark.parametrize("case", CASES)
def test_the_tolerance_tells_other_probes_apart(case: str) -> None:
    """`CLOSE` would not hide a refresh from other draws, here those of another step."""
    build, make = CASES[case]
    model, geometry = build(), make()
    geometry.prepare(model, capture := GradientCapture(model))
    geometry.refresh(model, capture, 4)
    got, want = actions(case, geometry.state_dict()), actions(case, alone(case)["state"])
    for key in want:
        assert (got[key][0] - want[key][0]).norm() > 1e3 * CLOSE * want[key][0].norm()


@pytest.mark.parametrize("case", CASES)
def test_each_rank_runs_its_share_of_the_probes(shared: list[dict[str, Any]], case: str) -> None:
    passes = [results[case]["rows"] for results in shared]
    assert sorted(rows for of_rank in passes for rows in of_rank) == sorted(alone(case)["rows"])
    counts = [len(of_rank) for of_rank in passes]
    sources = 2 if case == "hybrid" else 1
    assert max(counts) - min(counts) <= sources, "each source is divided as evenly as chunks allow"


def test_single_precision_is_shared_in_full_precision(shared: list[dict[str, Any]]) -> None:
    for other in shared[1:]:
        assert_same_bits(shared[0]["float32"]["state"], other["float32"]["state"])


def test_the_maps_of_all_ranks_are_blind_to_the_data(shared: list[dict[str, Any]]) -> None:
    """1. for ranks: other records everywhere, the same maps, bit by bit, and the same clip."""
    for results in shared:
        for run in results["private"]:
            assert_same_bits(shared[0]["private"][0]["state"], run["state"])
            assert run["clip"] == shared[0]["private"][0]["clip"]
    assert shared[0]["private"][0]["clip"] == pytest.approx(private_run(1)["clip"], rel=CLOSE)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("probes", "the ranks of this job drew different probes"),
        ("pass", "this rank has no memory left"),
        ("hybrid", "this rank has no memory left"),
        ("diverged", "PrivacyError: .*values that are not finite"),
        ("adadps", "PrivacyError: .*values that are not finite"),
        ("maps", "PrivacyError: the ranks of this job have different maps"),
    ],
)
def test_what_fails_on_one_rank_is_refused_by_all(
    shared: list[dict[str, Any]], what: str, message: str
) -> None:
    for results in shared:
        assert re.search(message, results["refusals"][what]), results["refusals"][what]


# -- the pieces


def test_every_chunk_draws_numbers_of_its_own() -> None:
    """Or all chunks would have the same targets and dropout: fewer probes than there seem to be."""
    drawn: list[float] = []

    def loss(output: Any, probes: Any, generator: torch.Generator) -> Tensor:
        drawn.append(float(torch.rand(1, generator=generator)))
        drawn.append(float(torch.rand(1)))  # as dropout does
        return probe_losses("cross_entropy", output, probes, generator)

    model = of_images()
    capture = GradientCapture(model)
    for step in (0, 1):
        KFC(IMAGES, loss=loss).refresh(model, capture, step)
    KFC(IMAGES, loss=loss, seed=1).refresh(model, capture, 0)
    assert len(drawn) == len(set(drawn)) == 3 * 4 * 2
    before = drawn[:8]
    drawn.clear()
    KFC(IMAGES, loss=loss).refresh(model, capture, 0)
    assert drawn == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)], ids=str)
def test_a_checksum_sees_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    map_ = torch.randn(shape, dtype=dtype)
    before = checksum({"map": [map_], "base": 0.1})
    assert before == checksum({"map": [map_.clone()], "base": 0.1})
    assert before != checksum({"map": [map_], "base": 0.1 + 1e-17 + 2e-17})
    flat = map_.view(-1)
    bits = flat.view(torch.int32)
    for entry in range(len(bits)):
        for bit in (0, 13, 30):
            bits[entry] ^= 1 << bit
            assert checksum({"map": [map_], "base": 0.1}) != before
            bits[entry] ^= 1 << bit
    for other in range(1, len(flat)):
        flat[[0, other]] = flat[[other, 0]]
        assert checksum({"map": [map_], "base": 0.1}) != before
        flat[[0, other]] = flat[[other, 0]]
    assert checksum({"map": [map_], "base": 0.1}) == before


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "counts", [(2, 3), (0, 4), (3, 0, 9), (4, 4, 4), (20, 1), (0, 20)], ids=str
)
def test_parts_of_a_moment_add_up(counts: tuple[int, ...], groups: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(groups, n, 7, dtype=torch.float64) for n in counts]
    whole = Moment()
    whole.add(torch.cat(parts, 1))
    empty = torch.empty(groups, 0, 7, dtype=torch.float64)
    pieces = []
    for number, rows in enumerate(parts):
        moment = Moment()
        if rows.shape[1]:
            moment.add(rows)
        pieces.append(moment.take_part(sum(counts[:number]), sum(counts), empty))
    total = Moment()
    total.replace(torch.stack(pieces).sum(0), sum(counts))
    assert (total.rows is None) == (whole.rows is None)
    if whole.rows is not None:
        assert torch.equal(total.rows, whole.rows), "rows in their order, bit by bit"
    torch.testing.assert_close(total.dense(5), whole.dense(5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_work_is_divided_evenly(count: int) -> None:
    """By the largest task first, no rank has more than 4/3 of the best division (Graham 1969)."""
    torch.manual_seed(0)
    work = {str(number): float(x) for number, x in enumerate(torch.rand(40).exp())}
    owner_of = owners(work, count)
    assert list(owner_of) == list(work)
    loads = [sum(work[key] for key in work if owner_of[key] == rank) for rank in range(count)]
    assert max(loads) <= 4 / 3 * max(sum(work.values()) / count, *work.values())
