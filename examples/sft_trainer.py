"""Teach a language model private texts with TRL's SFTTrainer and LoRA.

    python examples/sft_trainer.py
    python examples/sft_trainer.py --quick     # fewer steps

PrivateTrainer is a mixin: one line makes a private SFTTrainer. The loss is the mean over each
text's own tokens, so that the length of one text does not change the weight of the others. The unit
of privacy is one text.

Nothing is downloaded: each word of the invented texts determines the next one, and the tiny model
has random weights.

Prints the Trainer's logs, then how often the next word of other texts is predicted, and the epsilon
spent:

    test accuracy 1.000  epsilon 7.999986747907343

The noise is secret and differs in every run, so the accuracy differs too.

Needs: pip install 'dpkfc[trl]'
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from dpkfc.integrations.transformers import PrivateTrainer

WORDS = [f"word{number}" for number in range(20)]
VOCABULARY = ["<pad>", "<eos>", *WORDS]


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    pass


def invented_texts(count: int) -> datasets.Dataset:
    """Between 6 and 16 words, each three after the one before."""
    generator = random.Random(0)
    texts = []
    for _ in range(count):
        first, length = generator.randrange(len(WORDS)), generator.randint(6, 16)
        texts.append(" ".join(WORDS[(first + 3 * step) % len(WORDS)] for step in range(length)))
    return datasets.Dataset.from_dict({"text": texts})


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )


def tiny_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


@torch.no_grad()
def accuracy(model: torch.nn.Module, texts: datasets.Dataset, encode: Callable[..., Any]) -> float:
    """The share of words that are predicted from the words before them."""
    model.eval()
    right = total = 0
    for text in texts["text"]:
        ids = torch.tensor([encode(text)["input_ids"]])
        predicted = model(input_ids=ids).logits[0, :-1].argmax(1)
        right += int((predicted == ids[0, 1:]).sum())
        total += ids.shape[1] - 1
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's SFTTrainer, with privacy and LoRA.")
    parser.add_argument("--quick", action="store_true", help="train for fewer steps")
    chosen = parser.parse_args()

    torch.manual_seed(0)  # the same initial weights; the noise stays secret
    texts, tokenizer = invented_texts(4100), word_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateSFTTrainer(
            model=tiny_model(),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=256,
                max_steps=15 if chosen.quick else 40,
                learning_rate=0.02,
                logging_steps=20,
                save_strategy="no",
                report_to=[],
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=texts.select(range(4000)),
            processing_class=tokenizer,
            # the head starts from random weights, so it is trained as a whole
            peft_config=peft.LoraConfig(r=8, modules_to_save=["lm_head", "embed_tokens"]),
            privacy={"epsilon": 8.0, "delta": 1e-5, "clip": 0.1},
        )
        trainer.train()
    assert trainer.run is not None and trainer.model is not None
    measured = accuracy(trainer.model, texts.select(range(4000, 4100)), tokenizer)
    print(f"test accuracy {measured:.3f}  epsilon {trainer.run.epsilon()}")


if __name__ == "__main__":
    main()
