"""Parameters of modules that never see a sample belong to the module that contains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.per_sample.partition import partition
from oracle import largest_error, private_sum, reference_grads, reference_norms, reference_sum

ROWS = 4


class Holder(nn.Module):
    """Without a forward: a place for parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))


class Table(nn.Module):
    """A forward without input, through a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.mix = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 3)

    def forward(self) -> Tensor:
        return self.mix(self.start)


class Uses(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.before, self.after = kind, nn.Linear(3, 3), nn.Linear(3, 2)
        one, other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, 3))
        self.held: Any = {
            "dict": lambda: nn.ParameterDict({"a": one, "b": other}),
            "list": lambda: nn.ParameterList([one, other]),
            "leading one": lambda: nn.ParameterList([other]),
            "dicts in a list": lambda: nn.ModuleList([nn.ParameterDict({"a": one})]),
            "no forward": Holder,
            "no input": Table,
        }[kind]()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        if self.kind == "dict":
            x = x * self.held["a"] + self.held["b"].flatten()
        elif self.kind == "list":
            x = x * self.held[0] + self.held[1].flatten()
        elif self.kind == "leading one":
            x = x * self.held[0].flatten()
        elif self.kind == "dicts in a list":
            x = x * self.held[0]["a"]
        elif self.kind == "no forward":
            x = x * self.held.scale
        else:
            x = F.softmax(x @ self.held().T, -1) @ self.held()
        return self.after(x)


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 3), Uses(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


KINDS = ["dict", "list", "leading one", "dicts in a list", "no forward", "no input"]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten(1).cos().sum(1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("kind", KINDS)
def test_held_parameters_are_exact(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Outer(kind).to(dtype), torch.randn(ROWS, 4, dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    assert largest_error(model, loss_of, x, ROWS) < tolerance
    grads = reference_grads(model, loss_of, x, ROWS)
    clip = float(reference_norms(grads).median())
    got = private_sum(model, loss_of, x, ROWS, clip)
    for name, want in reference_sum(grads, clip).items():
        torch.testing.assert_close(got[name].double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_containing_module_runs_under_vmap(kind: str) -> None:
    model = Outer(kind)
    hooked = {one.name: one for one in partition(model)}
    assert {name: one.kind for name, one in hooked.items()} == {"first": "layer", "inner": "vmap"}
    assert hooked["inner"].params.keys() == dict(model.inner.named_parameters()).keys()


def test_empty_dicts_change_nothing() -> None:
    """PEFT's LoRA layers own dicts that stay empty unless they wrap an embedding."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ParameterDict(), nn.ModuleList([nn.Linear(3, 3)]))
    assert [one.kind for one in partition(model)] == ["layer", "layer"]


def tiny_bert(config: Any) -> nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=30,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    model = peft.get_peft_model(bert, config(peft))
    for p in model.parameters():  # adapters begin as the identity, with zero or equal gradients
        if p.requires_grad:
            nn.init.normal_(p, std=0.5)
    return model


def bert_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return F.cross_entropy(logits, batch["y"])


PEFT_CONFIGS = {
    "ia3": lambda peft: peft.IA3Config(
        task_type="SEQ_CLS",
        target_modules=["key", "value", "output.dense"],
        feedforward_modules=["output.dense"],
    ),
    "embedding lora": lambda peft: peft.LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["word_embeddings", "query"],
        lora_dropout=0.0,
    ),
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_peft_adapters_in_parameter_dicts(kind: str) -> None:
    model = tiny_bert(PEFT_CONFIGS[kind])
    held = "ia3_l" if kind == "ia3" else "lora_embedding_"
    assert any(held in name and p.requires_grad for name, p in model.named_parameters())
    batch = {
        "ids": torch.randint(30, (ROWS, 7)),
        "mask": (torch.arange(7) < torch.tensor([[7], [3], [5], [6]])).long(),
        "y": torch.randint(2, (ROWS,)),
    }
    assert largest_error(model, bert_loss, batch, ROWS) < 1e-4
    grads = reference_grads(model, bert_loss, batch, ROWS)
    clip = float(reference_norms(grads).median())
    got = private_sum(model, bert_loss, batch, ROWS, clip)
    for name, want in reference_sum(grads, clip).items():
        torch.testing.assert_close(got[name].double(), want, rtol=1e-4, atol=1e-5 * clip)
