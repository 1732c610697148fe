"""Fine-tune a transformer on private texts inside Hugging Face's Trainer.

    python examples/hugging_face_trainer.py
    python examples/hugging_face_trainer.py --quick     # fewer steps

The program is an ordinary one with two changes: PrivateTrainer instead of Trainer, and the argument
`privacy`. Schedules, evaluation, logs, checkpoints and callbacks are the Trainer's own. The unit of
privacy is one text.

Nothing is downloaded: the texts are invented, and the tiny model has random weights.

Prints the Trainer's logs, then the accuracy on other texts and the epsilon spent:

    test accuracy 1.000  epsilon 2.9999944474471123

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[hugging-face]'
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
import transformers

from dpkfc.integrations.transformers import PrivateTrainer

LENGTH = 12  # words per text
GOOD = ["excellent", "kind", "careful", "quick", "helpful"]
BAD = ["rude", "slow", "careless", "noisy", "expensive"]
NEUTRAL = ["the", "nurse", "room", "doctor", "was", "and", "very", "visit", "clinic", "on", "time"]
WORDS = {word: number for number, word in enumerate([*NEUTRAL, *GOOD, *BAD], start=1)}


def invented_texts(count: int) -> list[dict[str, Any]]:
    """Reviews of a clinic: label 1 if they contain good words, 0 if they contain bad words."""
    generator = random.Random(0)
    records = []
    for index in range(count):
        label = index % 2
        words = generator.choices(NEUTRAL, k=LENGTH - 3)
        words += generator.choices(GOOD if label else BAD, k=3)
        generator.shuffle(words)
        records.append({"input_ids": [WORDS[word] for word in words], "labels": label})
    return records


def tiny_model() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        num_labels=2,
        initializer_range=0.2,  # wide enough to learn from in a few steps
        pad_token_id=0,
    )
    return transformers.BertForSequenceClassification(config)


def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer, with privacy.")
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    chosen = parser.parse_args()

    torch.manual_seed(0)  # the same initial weights; the noise stays secret
    records = invented_texts(4400)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            # A step draws 200 records on average; at most 100 are in memory at a time.
            per_device_train_batch_size=100,
            gradient_accumulation_steps=2,
            max_steps=20 if chosen.quick else 60,
            learning_rate=0.01,
            lr_scheduler_type="cosine",
            logging_steps=20,
            save_strategy="no",
            report_to=[],
        )
        trainer = PrivateTrainer(
            model=tiny_model(),
            args=args,
            train_dataset=records[:4000],
            eval_dataset=records[4000:],
            compute_metrics=accuracy,
            privacy={"epsilon": 3.0, "delta": 1e-5, "clip": 0.1},
        )
        trainer.train()
        measured = trainer.evaluate()
    assert trainer.run is not None
    print(f"test accuracy {measured['eval_accuracy']:.3f}  epsilon {trainer.run.epsilon()}")


if __name__ == "__main__":
    main()
