"""The matrix of `benchmarks.models`: exact, or refused in the words that are recorded here.

Every architecture is tested in full fine-tuning, some also with LoRA and with frozen parts, and
every adapter of PEFT. The page with the matrix shows all cells.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
import torch

from dpkfc.per_sample.capture import GradientCapture

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are not installed
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from benchmarks.architectures import ADAPTERS, ARCHITECTURES, TRAINED  # noqa: E402
from benchmarks.models import cases  # noqa: E402

PAGE = ROOT / "docs" / "how-to" / "models.md"
BASES = ("BERT", "GPT-2")
# what is refused, and a part of the message
REFUSED = {
    ("Mixtral", "LoRA"): "used outside the forward of module",
    **{("ResNet", column): r"BatchNorm2d\): mixes the records" for column in TRAINED},
}
# the modules that run under vmap
UNDER_VMAP = {
    ("DeBERTa-v2", "full"): ["DebertaV2Encoder"],
    ("DeBERTa-v2", "LoRA"): ["DisentangledSelfAttention"],
    ("DeBERTa-v2", "frozen parts"): ["DisentangledSelfAttention"],
    ("MPNet", "full"): ["MPNetEncoder"],
    ("T5", "full"): ["T5Attention"],
    ("mT5", "full"): ["MT5Attention"],
    **{("DoRA", base): ["Linear"] for base in BASES},
}
ALSO_IN_PART = ("BERT", "DeBERTa-v2", "T5", "Swin", "CLIP", "Mixtral", "Mamba")
CELLS = [
    *((name, "full") for name in ARCHITECTURES if name != "Mixtral, LoRA of attention"),
    *((name, column) for name in ALSO_IN_PART for column in ("LoRA", "frozen parts")),
    ("Mixtral, LoRA of attention", "LoRA"),
    *((name, base) for name in ADAPTERS for base in BASES),
]
MATRIX = cases()


@pytest.mark.parametrize(("row", "column"), CELLS, ids=lambda name: name)
def test_a_cell_of_the_matrix(row: str, column: str) -> None:
    cell = MATRIX[row][column]()
    if (row, column) in REFUSED:
        assert cell.verdict == "refused"
        assert re.search(REFUSED[row, column], cell.refusal)
    else:
        assert cell.verdict == "exact", str(cell)
        assert cell.vmap == UNDER_VMAP.get((row, column), [])


def test_the_page_shows_the_whole_matrix() -> None:
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    shown = {line[0]: line[1:] for line in lines if line[0] in MATRIX}
    assert shown.keys() == MATRIX.keys()
    for row, columns in MATRIX.items():
        for column, text in zip(columns, shown[row], strict=True):
            refused = (row, column) in REFUSED
            assert text.startswith("refused: " if refused else "exact"), (row, column)
            for kind in UNDER_VMAP.get((row, column), []):
                assert kind in text


def test_no_cache_is_written_under_vmap() -> None:
    """Its tensors could not leave vmap."""
    torch.manual_seed(0)
    model, batch = ARCHITECTURES["GPT-2"].build(), ARCHITECTURES["GPT-2"].records()
    inputs = {"input_ids": batch["input_ids"]}
    capture = GradientCapture(model, ["transformer.h.0.attn"])
    assert model(**inputs).past_key_values is None
    with pytest.raises(ValueError, match="GPT2LMHeadModel was called with use_cache=True"):
        model(**inputs, use_cache=True)
    with torch.no_grad():
        kept = model(**inputs).past_key_values
    assert torch.isfinite(kept.layers[0].keys.sum())
    capture.remove()
    assert model(**inputs).past_key_values is not None


def test_prompts_of_a_copy_and_after_capture_are_those_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model, batch = ADAPTERS["prompt tuning"].build("GPT-2"), ARCHITECTURES["GPT-2"].records()
    loss = ARCHITECTURES["GPT-2"].loss
    want = loss(model, batch)
    capture = GradientCapture(model)
    torch.testing.assert_close(loss(model, batch), want)
    torch.testing.assert_close(loss(copy.deepcopy(model), batch), want)
    for p in model.parameters():
        p.requires_grad_(False)
    torch.testing.assert_close(loss(model, batch), want)
    capture.remove()
    torch.testing.assert_close(loss(model, batch), want)
    assert "get_prompt" not in vars(model)


def test_a_refused_forward_that_changes_the_model_is_told() -> None:
    """PEFT registers a parametrization in the forward, which fails under vmap."""
    cell = MATRIX["Mixtral"]["LoRA"]()
    assert "build it again" in cell.refusal
