"""What the benchmarks train: a model and one batch of random records in memory.

Weights and records are random, because speed and memory do not depend on them. No model has
dropout, so every arm computes the same function. Token models get every input as a full [batch,
tokens] tensor, position ids included, because Opacus reads the batch size from the first dimension
of whatever enters an embedding.

Each workload also has the probe of its DP-KFC arm: as many synthetic inputs as a batch has
records, of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.models import groupnorm_resnet, mlp, paper_cnn, tiny_vit
from dpkfc.probes import PinkNoise, Tokens
from dpkfc.probes.probe import Probe
from dpkfc.probes.targets import Loss

TOKENS = 128
BERT_VOCABULARY = 30522
GPT2_VOCABULARY = 50257

Record = tuple[Tensor, ...]  # the inputs in the order in which `logits` reads them, then the target


@dataclass(frozen=True)
class Workload:
    """One model and one batch.

    Args:
        batch_size: The number of records in the batch.
        steps: The number of steps that an arm takes in a row within a timing round.
        build: Builds the model.
        batch: Draws a batch of that many records.
        probe: The probe of the DP-KFC arm.
        logits: Computes the logits of a batch.
        probe_loss: The loss on the probe.
    """

    batch_size: int
    steps: int
    build: Callable[[], nn.Module]
    batch: Callable[[int], Record]
    probe: Probe
    logits: Callable[[nn.Module, Record], Tensor] = lambda model, record: model(record[0])
    probe_loss: Loss = "cross_entropy"


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy, for a language model over all tokens.

    Sequences have equal lengths, so that is also the mean over the samples.
    """
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def images(channels: int, size: int) -> Callable[[int], Record]:
    """Return a function that draws images and labels."""
    return lambda batch_size: (
        torch.randn(batch_size, channels, size, size),
        torch.randint(10, (batch_size,)),
    )


def pink(channels: int, size: int, count: int) -> Probe:
    return PinkNoise((channels, size, size), classes=10, count=count)


def vgg() -> nn.Module:
    """Build VGG-11 for images [3, 32, 32], with GroupNorm: 9.2 million weights."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ([64], [128], [256, 256], [512, 512], [512, 512]):
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.GroupNorm(32, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def sentences(batch_size: int) -> Record:
    """Draw input_ids, attention_mask, token_type_ids, position_ids and labels."""
    ids = torch.randint(1, BERT_VOCABULARY, (batch_size, TOKENS))
    return (
        ids,
        torch.ones_like(ids),
        torch.zeros_like(ids),
        positions(batch_size),
        torch.randint(2, (batch_size,)),
    )


def texts(batch_size: int) -> Record:
    """Draw input_ids, attention_mask, position_ids, and the next token at every position."""
    ids = torch.randint(GPT2_VOCABULARY, (batch_size, TOKENS + 1))
    return (
        ids[:, :-1].clone(),
        torch.ones(batch_size, TOKENS).long(),
        positions(batch_size),
        ids[:, 1:].clone(),
    )


def positions(batch_size: int) -> Tensor:
    return torch.arange(TOKENS).repeat(batch_size, 1)


def minilm() -> nn.Module:
    """Build BERT with the sizes of MiniLM-L6: 22.7 million weights, half in the word embedding."""
    transformers: Any = import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=BERT_VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def minilm_logits(model: nn.Module, record: Record) -> Tensor:
    ids, mask, types, position_ids, _ = record
    logits: Tensor = model(
        input_ids=ids, attention_mask=mask, token_type_ids=types, position_ids=position_ids
    ).logits
    return logits


def gpt2() -> nn.Module:
    """Build a four-layer GPT-2 with the full vocabulary; the head shares the embedding weight."""
    transformers: Any = import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=GPT2_VOCABULARY,
        n_positions=TOKENS,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def gpt2_logits(model: nn.Module, record: Record) -> Tensor:
    ids, mask, position_ids, _ = record
    logits: Tensor = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits
    return logits


SENTENCES = Tokens(
    BERT_VOCABULARY, TOKENS, cls=101, sep=102, pad=0, classes=2, extra=("token_type_ids",), count=16
)
TEXTS = Tokens(GPT2_VOCABULARY, TOKENS, count=8)

WORKLOADS = {
    "mlp": Workload(256, 4, lambda: mlp([784, 512, 512, 10]), images(1, 28), pink(1, 28, 256)),
    "cnn": Workload(256, 4, paper_cnn, images(1, 28), pink(1, 28, 256)),
    "resnet": Workload(64, 2, groupnorm_resnet, images(3, 32), pink(3, 32, 64)),
    "vgg": Workload(64, 1, vgg, images(3, 32), pink(3, 32, 64)),
    "vit": Workload(64, 2, tiny_vit, images(3, 32), pink(3, 32, 64)),
    "minilm": Workload(16, 1, minilm, sentences, SENTENCES, minilm_logits),
    "gpt2": Workload(8, 1, gpt2, texts, TEXTS, gpt2_logits, "next_token"),
}
