"""The description of a geometry agrees with dense matrices, computed independently."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from naive import Fixed, cosine_loss, written_out
from rich.console import Console
from torch import Tensor, nn

import dpkfc
from dpkfc.geometry import factors
from dpkfc.geometry.description import Description, FactorRow
from dpkfc.per_sample.capture import GradientCapture

PROBES = 12
SETTINGS = {
    "A": {"factors": "A", "rank": None},
    "AG": {"factors": "AG", "rank": None, "damping": 0.1},
    "AG, low rank": {"factors": "AG", "rank": 2, "damping": 0.05, "stability": 1e-4},
    "half the power": {"factors": "AG", "rank": 2, "power": 0.5},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(4, 6, 3, groups=2),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Linear(7, 5, bias=False))


def images() -> Tensor:
    return torch.randn(PROBES, 4, 4, 4, generator=torch.Generator().manual_seed(1))


def refreshed(model: nn.Module, geometry: dpkfc.KFC, step: int = 0) -> dpkfc.KFC:
    capture = GradientCapture(model)
    try:
        geometry.refresh(model, capture, step)
    finally:
        capture.remove()
    return geometry


def kfc(**settings: Any) -> dpkfc.KFC:
    return refreshed(network(), dpkfc.KFC(Fixed(images()), loss=cosine_loss, **settings))


def moments(model: nn.Module) -> dict[str, list[tuple[list[np.ndarray], list[np.ndarray]]]]:
    """A and G of every layer, a block a group, from hooks on the plain model and `unfold`."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in model.named_children():
        if isinstance(module, nn.Conv2d | nn.Linear):

            def look(module: nn.Module, args: tuple[Tensor], out: Tensor, name: str = name) -> None:
                out.retain_grad()
                seen[name] = args[0].detach(), out

            handles.append(module.register_forward_hook(look))
    cosine_loss(model(images()), None, None).sum().backward()  # type: ignore[arg-type]
    for handle in handles:
        handle.remove()
    found: dict[str, Any] = {}
    for name, (a, out) in seen.items():
        module, delta = model.get_submodule(name), out.grad
        assert delta is not None
        groups = module.groups if isinstance(module, nn.Conv2d) else 1
        if isinstance(module, nn.Conv2d):
            a, delta = (
                nn.functional.unfold(a, 3).transpose(1, 2).flatten(0, 1),
                delta.flatten(2).transpose(1, 2),
            )
            delta = delta.flatten(0, 1)
        left, right = [], []
        for x, d in zip(a.double().chunk(groups, 1), delta.double().chunk(groups, 1), strict=True):
            x = torch.cat([x, torch.ones(len(x), 1)], 1) if module.bias is not None else x
            right.append((x.T @ x / len(x)).numpy())
            left.append((d.T @ d / PROBES).numpy())
        found[name] = right, left
    return found


def effective_rank(values: np.ndarray) -> float:
    return values.sum() ** 2 / (values**2).sum()


def check(
    row: FactorRow, root: Any, blocks: list[np.ndarray], damping: float, stability: float
) -> None:
    size = len(blocks[0])
    assert (row.groups, row.size) == (len(blocks), size)
    roots = written_out(root, len(blocks), size).numpy()
    eyes = [(damping * np.trace(b) / size + stability) * np.eye(size) for b in blocks]
    plain = np.concatenate([np.linalg.eigvalsh(b) for b in blocks])
    mapped = np.concatenate(
        [np.linalg.eigvalsh(u @ b @ u) for u, b in zip(roots, blocks, strict=True)]
    )
    before = np.concatenate([np.linalg.eigvalsh(b + e) for b, e in zip(blocks, eyes, strict=True)])
    after = np.concatenate(
        [np.linalg.eigvalsh(u @ (b + e) @ u) for u, b, e in zip(roots, blocks, eyes, strict=True)]
    )
    spectrum = row.spectrum
    assert spectrum is not None and spectrum.exact
    np.testing.assert_allclose(
        spectrum.values, np.sort(plain)[::-1], rtol=1e-4, atol=1e-6 * plain.max()
    )
    assert spectrum.damping == pytest.approx(
        (min(e[0, 0] for e in eyes), max(e[0, 0] for e in eyes)), rel=1e-4
    )
    assert spectrum.effective_rank == pytest.approx(
        (effective_rank(plain), effective_rank(mapped)), rel=1e-3
    )
    assert spectrum.condition == pytest.approx(
        (before.max() / before.min(), after.max() / after.min()), rel=1e-2
    )


@pytest.mark.parametrize("kind", SETTINGS)
def test_figures_equal_those_of_dense_matrices(kind: str) -> None:
    settings: dict[str, Any] = {"damping": 0.0, "stability": 1e-3, **SETTINGS[kind]}
    geometry = kfc(**settings)
    rows = {row.name: row for row in geometry.describe().rows}
    assert list(rows) == ["0", "1.weight", "1.bias", "4", "6"]
    for name, (right, left) in moments(network()).items():
        row, rule = (
            rows[name],
            geometry.map_of((f"{name}.weight", *([f"{name}.bias"] if name != "6" else []))),
        )
        levels = settings["damping"], settings["stability"]
        assert row.kind == "Kronecker" and row.a is not None
        check(row.a, rule.a_root, right, *levels)  # type: ignore[attr-defined]
        assert (row.g is not None) == ("G" in settings["factors"])
        if row.g is not None:
            check(row.g, rule.g_root, left, *levels)  # type: ignore[attr-defined]
        assert row.seconds is not None and row.seconds > 0


def test_work_and_memory_of_full_and_low_rank_roots() -> None:
    rows = {row.name: row for row in kfc(factors="AG", rank=2).describe().rows}
    conv, fc, last = rows["0"].a, rows["4"].a, rows["6"].a
    assert conv is not None and fc is not None and last is not None
    assert (conv.form, conv.rank, conv.multiplications, conv.memory) == (
        "full",
        19,
        2 * 19 * 19,
        2 * 19 * 19 * 4,
    )
    # V and w; V diag(w) transposed and, beside it, its last row
    assert (fc.form, fc.rank, fc.multiplications, fc.memory) == (
        "low rank",
        2,
        2 * 25 * 2,
        4 * (50 + 2 + 48 + 2),
    )
    assert (last.form, last.rank, last.size, last.memory) == ("low rank", 2, 7, 4 * (14 + 2 + 14))
    # type: ignore[union-attr]
    assert rows["4"].multiplications == 100 + rows["4"].g.multiplications
    assert rows["4"].memory == fc.memory + rows["4"].g.memory  # type: ignore[union-attr]


def test_eigenvalues_that_were_not_computed_give_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = kfc(factors="A", rank=2, chunk=PROBES).describe()
    monkeypatch.setattr(factors, "OVERSAMPLE", 1)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(2)) * torch.logspace(0, -2, 24)
    model = nn.Sequential(nn.Linear(24, 3))
    described = refreshed(model, dpkfc.KFC(Fixed(x), loss=cosine_loss, rank=3)).describe()
    monkeypatch.undo()
    known = refreshed(model, dpkfc.KFC(Fixed(x), loss=cosine_loss, rank=3)).describe()
    bound, true = described.rows[0].a.spectrum, known.rows[0].a.spectrum  # type: ignore[union-attr]
    assert bound is not None and true is not None and not bound.exact and true.exact
    for k in (0, 1):
        assert (
            bound.condition[k] < true.condition[k]
            and bound.effective_rank[k] > true.effective_rank[k]
        )
    assert "≥" in str(described) and "≤" in str(described)
    assert "≥" not in str(known) and "≥" not in str(exact)


@pytest.mark.parametrize(
    ("others", "kind"), [("scalar", "scaled"), ("diagonal", "scaled"), (None, "unchanged")]
)
def test_layers_without_a_kronecker_form(others: Any, kind: str) -> None:
    geometry = kfc(others=others)
    rows = [row for row in geometry.describe().rows if row.name.startswith("1")]
    assert rows and {row.kind for row in rows} == {kind}
    scales = [row.scale for row in rows]
    if others == "scalar":
        assert all(scale is not None and scale[0] == scale[1] > 0 for scale in scales)
    elif others == "diagonal":
        assert all(scale is not None and scale[0] < scale[1] for scale in scales)
        assert sum(row.memory for row in rows) == 12 * 4
    assert kind in str(geometry.describe())


def test_a_factor_that_the_probes_leave_zero_is_not_mapped() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    row = (
        refreshed(model, dpkfc.KFC(Fixed(torch.zeros(8, 4)), stability=0.1, loss=cosine_loss))
        .describe()
        .rows[0]
    )
    assert row.a is not None and row.a.form == "none" and row.memory == 0
    assert row.a.spectrum is not None and row.a.spectrum.condition == (1, 1)
    assert row.a.spectrum.effective_rank == (0, 0)


def test_the_map_after_the_noise_counts_in_memory() -> None:
    plain, post = ({row.name: row for row in kfc(post=post).describe().rows} for post in (0.0, 0.5))
    assert plain["4"].post is None and post["4"].post is not None
    assert (
        post["4"].memory == 2 * plain["4"].memory
        and post["4"].multiplications == plain["4"].multiplications
    )


def test_before_the_first_batch_there_is_nothing_to_describe() -> None:
    with pytest.raises(RuntimeError, match="first batch is drawn.*run.loader"):
        dpkfc.KFC(Fixed(images())).describe()


def test_in_the_loop_it_tells_the_step_of_the_last_refresh() -> None:
    model, geometry = network(), dpkfc.KFC(Fixed(images()), loss=cosine_loss, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(x, 0) for x in images()]
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "steps": 4,
        "batch_size": PROBES,
        "clip": 1.0,
    }
    run = dpkfc.make_private(
        model, optimizer, data, geometry=geometry, loss=dpkfc.losses.cross_entropy, **settings
    )
    for x, y in run.loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    described = geometry.describe()
    assert described.step == 2 and described.public
    assert (
        described.seconds is not None
        and described.seconds > sum(row.seconds or 0 for row in described.rows) > 0
    )


def test_after_a_checkpoint_what_is_known_is_told(tmp_path: Path) -> None:
    geometry, again = (
        kfc(factors="AG", rank=2, post=0.5),
        dpkfc.KFC(Fixed(images()), factors="AG", rank=2, post=0.5),
    )
    again.load_state_dict(geometry.state_dict())
    before, after = geometry.describe(), again.describe()
    assert after.step is None and after.seconds is None and "checkpoint" in str(after)
    want = {row.name: row for row in before.rows}
    for row in after.rows:
        assert row.seconds is None and row.memory == want[row.name].memory
        for name, factor in row.factors.items():
            same = want[row.name].factors[name]
            assert factor.spectrum is None
            assert (factor.size, factor.rank, factor.form) == (same.size, same.rank, same.form)
    if find_spec("matplotlib"):
        after.plot(tmp_path / "none.png")


def test_an_oracle_is_called_not_private() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = dpkfc.probes.Oracle(images())
    described = refreshed(network(), dpkfc.KFC(oracle, loss=cosine_loss)).describe()
    assert not described.public
    assert str(described).startswith("NOT PRIVATE") and "ORACLE" in str(described)
    assert "NOT PRIVATE" not in str(kfc().describe())


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_names_every_layer_at_any_width(width: int) -> None:
    described = kfc(factors="AG").describe()
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(described)
    text = capture.get()
    for row in described.rows:
        assert f" {row.name} " in text
    assert "…" not in text


def deep() -> Description:
    model = nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(6, 6), nn.Tanh())])
    x = torch.randn(PROBES, 6, generator=torch.Generator().manual_seed(3))
    return refreshed(
        model, dpkfc.KFC(Fixed(x), loss=cosine_loss, factors="AG", damping=0.1)
    ).describe()


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="plots need matplotlib")
@pytest.mark.parametrize("factors", ["A", "AG", "many layers"])
def test_the_plot_is_an_image(factors: Any, tmp_path: Path) -> None:
    described = deep() if factors == "many layers" else kfc(factors=factors, rank=2).describe()
    described.plot(tmp_path / "geometry.png")
    assert (tmp_path / "geometry.png").read_bytes().startswith(b"\x89PNG")
