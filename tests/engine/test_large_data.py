"""Data sets larger than memory: only drawn records are read, from memory-mapped files too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import dpkfc
from dpkfc.engine.trial import INSPECTED
from dpkfc.noise import BandedSquareRoot, Independent, LambdaCGD
from dpkfc.probes import records as compared_records
from dpkfc.random import next_key, sub_key
from dpkfc.sampling import poisson_sample

STEPS, BATCH = 6, 30


class Recorded(Dataset[Any]):
    """Any index and length; remembers which records were read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.read.append(row)
        return torch.tensor(np.asarray(self.rows[row]), dtype=torch.float32), row % 3


class Billion:
    """A billion records that exist when asked for."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, row: int) -> list[float]:
        return [row / 10**9, 1.0, row % 7, 0.5]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def begin(data: Any, loss: Any = loss, **settings: Any) -> dpkfc.PrivateRun:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "delta": 1e-10, "steps": STEPS} | settings
    return dpkfc.make_private(model, optimizer, data, loss=loss, batch_size=BATCH, **settings)


def drawn_rows(run: dpkfc.PrivateRun) -> list[list[int]]:
    """The records of each step, from the keys alone."""
    key, batches = run._key, []
    for _ in range(run.plan.steps):
        rows = poisson_sample(sub_key(key, "sampling"), run.plan.records, run.plan.sampling_rate)
        batches.append(rows)
        key = next_key(key)
    return batches


def train(run: dpkfc.PrivateRun, loss: Any = loss) -> list[Any]:
    batches = []
    for batch in run.loader:
        loss(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        batches.append(batch)
    assert run.steps == STEPS
    return batches


@pytest.mark.parametrize("noise", [Independent(), BandedSquareRoot(3), LambdaCGD()])
def test_of_a_billion_records_only_a_few_are_touched(noise: Any) -> None:
    """Poisson, cyclic Poisson and min-separated batches; their lengths too need no other record."""
    data = Recorded(Billion())
    run = begin(data, noise=noise, max_physical_batch_size=8)
    assert len(data.read) <= INSPECTED
    data.read.clear()
    batches = len(run.loader)
    assert data.read == []
    yielded = train(run)
    assert len(yielded) == batches
    assert len(data.read) == sum(len(batch[0]) for batch in yielded)
    assert STEPS * BATCH / 2 < len(data.read) < STEPS * BATCH * 2


def test_the_records_that_are_read_are_the_drawn_ones() -> None:
    data = Recorded(Billion())
    run = begin(data)
    data.read.clear()
    expected = drawn_rows(run)
    train(run)
    assert data.read == [row for rows in expected for row in rows]


def test_a_loader_of_a_billion_records_keeps_its_options() -> None:
    data = Recorded(Billion())
    run = begin(DataLoader(data, batch_size=5, shuffle=True, pin_memory=False))
    train(run)
    assert len(data.read) < INSPECTED + 2 * STEPS * BATCH


def test_public_records_are_compared_with_a_sample_of_a_billion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No array with an entry per record is made, within a data set of data sets neither."""
    monkeypatch.setattr(compared_records, "SECONDS", 0.2)
    public = dpkfc.probes.PublicData(torch.randn(40, 4))
    for private in (Recorded(Billion()), ConcatDataset([Recorded(Billion()), Recorded(Billion())])):
        run = begin(private, geometry=dpkfc.KFC(public))
        assert "public data" in run.plan.unchecked


def test_a_large_data_set_is_compared_in_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(500, 4))
    private = Recorded(rows)
    digests = compared_records.digests(private, deadline=np.inf)
    assert digests.complete and sorted(digests.at) == list(range(500))
    monkeypatch.setattr(compared_records, "MOST_READ", 100)
    part = compared_records.digests(private, deadline=np.inf)
    assert not part.complete and len(part.at) == 100
    assert part.at.items() <= digests.at.items()
    assert any(one > other for one, other in pairwise(private.read[500:]))


# -- files


@pytest.fixture
def table() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(5000, 4)).astype("float32")
    return {"x": x, "label": generator.integers(3, size=5000)}


def test_a_mapped_file_of_a_billion_records(tmp_path: Path) -> None:
    """A sparse file of 4 GB, whose records are zero except for the drawn ones."""
    file = tmp_path / "records"
    size = 10**9
    mapped = np.memmap(file, dtype=np.uint8, mode="w+", shape=(size, 4))
    data = Recorded(mapped)
    run = begin(data)
    data.read.clear()
    expected = drawn_rows(run)
    for step, rows in enumerate(expected):
        mapped[rows] = step + 1
    batches = train(run)
    assert data.read == [row for rows in expected for row in rows]
    for step, (inputs, _) in enumerate(batches):
        assert (inputs == step + 1).all() and len(inputs) == len(expected[step])
    assert file.stat().st_blocks * 512 < 20e6, "the rest of the file was never written"


def test_a_hugging_face_data_set_on_disk(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    columns = {name: values.tolist() for name, values in table.items()}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "records")
    read: list[int] = []
    original = datasets.Dataset.__getitem__

    def recorded(self: Any, key: Any) -> Any:
        read.extend(key if isinstance(key, list) else [key])
        return original(self, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", recorded)
    before = pa.total_allocated_bytes()
    data = datasets.load_from_disk(tmp_path / "records").with_format("torch")

    def of_columns(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["label"])

    run = begin(data, of_columns)
    assert len(read) <= INSPECTED
    read.clear()
    expected = drawn_rows(run)
    batches = train(run, of_columns)
    assert read == [row for rows in expected for row in rows]
    for rows, batch in zip(expected, batches, strict=True):
        assert torch.equal(batch["x"], torch.tensor(table["x"][rows]))
    assert pa.total_allocated_bytes() - before < 5000, "less than a column of the table"


def test_a_mapped_arrow_table(table: dict[str, Any], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {f"x{k}": table["x"][:, k] for k in range(4)}
    content = pa.table(columns)
    with pa.ipc.new_file(str(tmp_path / "records.arrow"), content.schema) as file:
        file.write_table(content, max_chunksize=700)
    del content
    before = pa.total_allocated_bytes()

    class Rows:
        def __init__(self) -> None:
            source = pa.memory_map(str(tmp_path / "records.arrow"))
            self.table = pa.ipc.open_file(source).read_all()

        def __len__(self) -> int:
            return int(self.table.num_rows)

        def __getitem__(self, row: int) -> list[float]:
            return list(self.table.slice(row, 1).to_pylist()[0].values())

    data = Recorded(Rows())
    run = begin(data)
    data.read.clear()
    expected = drawn_rows(run)
    batches = train(run)
    assert data.read == [row for rows in expected for row in rows]
    for rows, (inputs, _) in zip(expected, batches, strict=True):
        assert torch.equal(inputs, torch.tensor(table["x"][rows]))
    assert pa.total_allocated_bytes() - before < 5000, "less than a column of the table"


def test_groups_need_a_plan_for_at_least_half_of_the_records() -> None:
    """Refused before anything is spent, and the message does not tell the number of records."""
    with pytest.raises(ValueError, match="more than twice the 100 records") as refused:
        begin(Recorded(np.zeros((257, 4))), noise=BandedSquareRoot(3), records=100)
    assert "257" not in str(refused.value)
    begin(Recorded(np.zeros((256, 4))), noise=BandedSquareRoot(3), records=100)
    begin(Recorded(np.zeros((257, 4))), records=100)
