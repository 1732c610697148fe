"""Adapt a Hugging Face transformer to private texts with LoRA (peft).

    python examples/lora_transformer.py                      # a tiny model with random weights
    python examples/lora_transformer.py --model-path PATH    # a pretrained model in a local folder
    python examples/lora_transformer.py --quick              # fewer steps

Only the LoRA matrices and the classification head are trained, so only they are clipped and noised.
Public pretrained weights cost no privacy. The unit of privacy is one text: if a person wrote
several, join them into one record.

The loss is a mean over records. Each text contributes one term, and its gradient depends on that
text alone. (A mean over all tokens of a batch would be refused: the length of one text would change
the weight of the others. For token losses see dpkfc.losses.mean_over_records.)

Nothing is downloaded: the texts are invented, and the tiny model splits them into words.

Prints how many parameters are trained, the test accuracy and the epsilon spent:

    1,634 of 44,020 parameters are trained
    test accuracy 0.998  epsilon 2.9999944899031568

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[hugging-face]'
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers

import dpkfc

LENGTH = 16  # tokens per text
GOOD = ["excellent", "kind", "careful", "quick", "helpful"]
BAD = ["rude", "slow", "careless", "noisy", "expensive"]
NEUTRAL = ["the", "nurse", "room", "doctor", "was", "and", "very", "visit", "clinic", "on", "time"]

Record = dict[str, Any]
Encoder = Callable[[str], Record]


def invented_texts(count: int) -> list[tuple[str, int]]:
    """Reviews of a clinic: label 1 if they contain good words, 0 if they contain bad words."""
    generator = random.Random(0)
    texts = []
    for index in range(count):
        label = index % 2
        words = generator.choices(NEUTRAL, k=7) + generator.choices(GOOD if label else BAD, k=3)
        generator.shuffle(words)
        texts.append((" ".join(words), label))
    return texts


def tiny_model() -> tuple[torch.nn.Module, Encoder]:
    """A BERT with two layers and random weights, and an encoder with a fixed list of words."""
    vocabulary = {word: number for number, word in enumerate([*NEUTRAL, *GOOD, *BAD], start=1)}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary) + 1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        num_labels=2,
        pad_token_id=0,
        initializer_range=0.2,  # wide enough for a model that stays at its random weights
    )

    def encode(text: str) -> Record:
        ids = [vocabulary[word] for word in text.split()][:LENGTH]
        padding = [0] * (LENGTH - len(ids))
        return {"input_ids": ids + padding, "attention_mask": [1] * len(ids) + padding}

    return transformers.BertForSequenceClassification(config), encode


def local_model(path: str) -> tuple[torch.nn.Module, Encoder]:
    """A pretrained model and its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, local_files_only=True
    )

    def encode(text: str) -> Record:
        encoded = tokenizer(text, padding="max_length", truncation=True, max_length=LENGTH)
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    return model, encode


def records_of(texts: list[tuple[str, int]], encode: Encoder) -> list[Record]:
    return [
        {name: torch.tensor(values) for name, values in encode(text).items()} | {"labels": label}
        for text, label in texts
    ]


def loss(model: torch.nn.Module, batch: Record) -> torch.Tensor:
    """Mean over the records of the batch: one cross-entropy term per text."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"])


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA of a transformer on private texts.")
    parser.add_argument("--model-path", help="a local folder; default: a tiny random model")
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same initial weights; the noise stays secret
    model, encode = local_model(args.model_path) if args.model_path else tiny_model()
    records = records_of(invented_texts(2400), encode)
    train, test = records[:2000], records[2000:]

    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["query", "value"]
    )
    model = peft.get_peft_model(model, lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    trained = sum(p.numel() for p in trainable)
    print(f"{trained:,} of {model.num_parameters():,} parameters are trained")

    optimizer = torch.optim.AdamW(trainable, lr=0.02)
    run = dpkfc.make_private(
        model,
        optimizer,
        train,
        loss=loss,
        epsilon=3.0,
        delta=1e-5,
        steps=20 if args.quick else 60,
        batch_size=200,
        # Its probes are random token sequences, derived from the model's configuration.
        geometry=dpkfc.KFC(every=20),
        # Memory for 100 records at a time; the noise is still added once per batch of 200.
        max_physical_batch_size=100,
    )
    for batch in run.loader:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    batch = torch.utils.data.default_collate(test)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    accuracy = float((logits.argmax(1) == batch["labels"]).float().mean())
    print(f"test accuracy {accuracy:.3f}  epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
