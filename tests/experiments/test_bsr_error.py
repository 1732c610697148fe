"""The published errors to the printed precision; the files of bsr-error and how it resumes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dpkfc.noise.toeplitz import BandedToeplitz
from experiments.bsr_error import experiment as bsr_error
from experiments.bsr_error.experiment import (
    SEPARATION,
    Case,
    Row,
    low_memory,
    measure,
    once,
    repeated,
    reproduce,
)
from experiments.common.options import ReproduceOptions

STEPS = (100, 200, 500, 1000, 2000)
REPEATED = {
    (1.0, 0.0, "BSR"): (2.371, 3.645, 6.949, 12.103, 22.190),
    (1.0, 0.0, "identity"): (7.106, 14.177, 35.391, 70.746, 141.457),
    (1.0, 0.0, "A"): (10.000, 22.361, 74.162, 196.214, 535.724),
    (1.0, 0.9, "BSR"): (13.905, 22.896, 47.976, 88.724, 169.675),
    (1.0, 0.9, "identity"): (61.807, 132.274, 344.275, 697.787, 1404.874),
    (1.0, 0.9, "A"): (92.878, 213.196, 724.660, 1937.850, 5322.643),
    (0.999, 0.0, "BSR"): (2.327, 3.532, 6.375, 10.040, 15.429),
    (0.999, 0.0, "identity"): (6.879, 13.296, 30.366, 53.317, 86.909),
    (0.999, 0.0, "A"): (9.525, 20.491, 61.091, 137.383, 282.867),
    (0.999, 0.9, "BSR"): (13.498, 21.799, 42.536, 69.957, 110.300),
    (0.999, 0.9, "identity"): (59.826, 124.011, 295.157, 525.136, 861.154),
    (0.999, 0.9, "A"): (88.625, 195.813, 598.458, 1360.153, 2816.234),
}
ONCE = {
    (1.0, 0.0, "BSR"): (2.371, 2.590, 2.882, 3.102, 3.323),
    (1.0, 0.9, "BSR"): (13.905, 16.281, 19.320, 21.576, 23.812),
    (0.999, 0.0, "BSR"): (2.327, 2.505, 2.690, 2.777, 2.822),
    (0.999, 0.9, "BSR"): (13.498, 15.461, 17.437, 18.351, 18.819),
}
# At β = 0 and 0.9, n = 2000, in as many digits as are published.
FEW_BANDS = {
    "BSR, p = 2": ("105", "994"),
    "BSR, p = 4": ("79", "704"),
    "BSR, p = 16": ("45", "360"),
    "BSR, p = 100": ("22", "170"),
    "BISR, p = 2": ("82", "231"),
    "BISR, p = 4": ("57", "225"),
    "BISR, p = 16": ("31", "199"),
    "BISR, p = 100": ("22", "177"),
    "λ-CGD": ("26.1", "171.8"),
    "BLT, 1 buffer": ("21.75", ""),
}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


@pytest.mark.parametrize(
    ("cases", "published"),
    [(repeated(STEPS), REPEATED), (once(STEPS, optimal=False), ONCE)],
    ids=["repeated", "once"],
)
def test_published_errors(
    cases: list[Case], published: dict[tuple[float, float, str], tuple[float, ...]]
) -> None:
    found: dict[tuple[float, float, str], list[float]] = {}
    for case in cases:
        if case.method != "AOF":
            found.setdefault((case.alpha, case.beta, case.method), []).append(
                measure(case)["error"]
            )
    assert found == {key: pytest.approx(errors, rel=3e-4) for key, errors in published.items()}


def test_published_errors_with_little_memory() -> None:
    found: dict[str, list[float]] = {}
    for case in low_memory(2000):
        if case.method in FEW_BANDS:
            found.setdefault(case.method, []).append(measure(case)["error"])
    for method, errors in FEW_BANDS.items():
        for error, text in zip(found[method], errors, strict=True):
            assert not text or f"{error:.{len(text.partition('.')[2])}f}" == text, method
    optimised = Case("", BandedToeplitz(100, normalise=False), 1.0, 0.0, 2000, SEPARATION)
    assert measure(optimised)["error"] == pytest.approx(20.2067, rel=1e-5)


def test_number_of_vectors_kept() -> None:
    kept = {case.method: measure(case)["buffers"] for case in low_memory(100)}
    assert kept["λ-CGD"] == kept["BISR, p = 4"] == 0
    assert (kept["BSR, p = 16"], kept["BLT, 3 buffers"]) == (15, 3)


def test_files_are_written_and_only_aof_is_read_from_them(tmp_path: Path) -> None:
    console = quiet()
    reproduce(ReproduceOptions(tmp_path, console, quick=True), steps=(100, 501))
    assert {file.name for file in tmp_path.iterdir()} == {
        "bsr-error.json",
        "bsr-error.md",
        "bsr-error.png",
    }
    assert (tmp_path / "bsr-error.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "bsr-error.md").read_text()
    assert "    dpkfc reproduce bsr-error --quick\n" in text
    assert "| 1, 0.9 | BSR | 13.905 |\n| 1, 0.9 | AOF | 12.953 |" in text
    assert "12.953" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "501" not in text

    rows: list[Row] = json.loads((tmp_path / "bsr-error.json").read_text())
    changed = [row | {"error": 77.777 if row["method"] == "AOF" else 88.888} for row in rows]
    other = changed[0] | {"n": 7}
    (tmp_path / "bsr-error.json").write_text(json.dumps([*changed, other]))
    reproduce(ReproduceOptions(tmp_path, quiet(), quick=True), steps=(100,))
    again = (tmp_path / "bsr-error.md").read_text()
    assert again.count("77.777") == 4
    assert "88.888" not in again
    assert other in json.loads((tmp_path / "bsr-error.json").read_text())


def test_an_interrupted_run_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Case] = []

    def interrupted(case: Case) -> Row:
        if sum(done.method == "AOF" for done in measured) == 2:
            raise KeyboardInterrupt
        measured.append(case)
        return case.row | {"error": 1.0, "buffers": 0}

    monkeypatch.setattr(bsr_error, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce(ReproduceOptions(tmp_path, quiet(), quick=True), steps=(100,))
    rows = json.loads((tmp_path / "bsr-error.json").read_text())
    assert [row["beta"] for row in rows if row["method"] == "AOF"] == [0.0, 0.9]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("[{", '{"a": 1}', '[{"method": "AOF"}]'):
        (tmp_path / "bsr-error.json").write_text(content)
        with pytest.raises(ValueError, match="does not hold results of this experiment"):
            reproduce(ReproduceOptions(tmp_path, quiet(), quick=True), steps=(100,))
    monkeypatch.setattr(bsr_error, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        reproduce(ReproduceOptions(tmp_path, quiet(), quick=True))
