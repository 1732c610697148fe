"""Hugging Face's Trainer: the plain loop's bits, the planned steps, and the guarantee."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
import trl
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

import dpkfc
from dpkfc.integrations.transformers import STATE_FOLDER, PrivateTrainer, token_loss

N, LENGTH, VOCABULARY, CLIP = 26, 8, 30, 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}


def classifier() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.BertConfig(**SIZES, num_labels=3)  # dropout 0.1
    return transformers.BertForSequenceClassification(config)


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=1,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


class Texts(Dataset[dict[str, Tensor]]):
    """Of different lengths; the last is unlike the others, so that a batch statistic shows it."""

    def __init__(self, per_token: bool, count: int = N) -> None:
        generator = torch.Generator().manual_seed(0)
        self.records = []
        for index in range(count):
            length = 2 + index % (LENGTH - 2) if index < N - 1 else LENGTH
            ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
            mask = (torch.arange(LENGTH) < length).long()
            labels = ids.masked_fill(mask == 0, -100) if per_token else torch.tensor(index % 3)
            self.records.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.records[index]


PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "clip": CLIP, "seed": 5}


class Seeded(TrainerCallback):
    """Dropout as in the plain loop, from the same state of the generator."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            torch.manual_seed(7)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": 6,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **changed})


def trainer_of(
    folder: Path,
    model: nn.Module | None = None,
    data: Any = None,
    kind: type[PrivateTrainer] = PrivateTrainer,
    privacy: dict[str, Any] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **changed: Any,
) -> PrivateTrainer:
    return kind(
        model=classifier() if model is None else model,
        args=arguments(folder, **changed),
        train_dataset=Texts(False) if data is None else data,
        privacy={**PRIVACY, **(privacy or {})},
        callbacks=[Seeded(), *(callbacks or [])],
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# -- the plain loop

Optimizers = Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]


def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)


def plain_loop(
    model: nn.Module, data: Any, optimizers: Optimizers, bf16: bool, batch: int, part: int
) -> tuple[Tensor, float]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            out = model(**{k: v for k, v in batch.items() if k != "labels"})
        logits, labels = out.logits.float(), batch["labels"]
        if labels.dim() == 1:
            return nn.functional.cross_entropy(logits, labels)
        return token_loss(logits, labels, shifted=True)

    optimizer, scheduler = optimizers(model)
    model.train()
    run = dpkfc.make_private(
        model,
        optimizer,
        data,
        loss=loss,
        steps=6,
        batch_size=batch,
        max_physical_batch_size=part,
        **PRIVACY,
    )
    run.after_step(scheduler.step)
    torch.manual_seed(7)
    for each in run.loader:
        loss(model, each).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), run.epsilon()


@pytest.mark.parametrize("task", ["classify", "language model"])
@pytest.mark.parametrize(
    ("optimizers", "bf16", "accumulate"),
    [(sgd, False, 1), (adamw, False, 1), (adamw, False, 3), (adamw, True, 1), (adamw, True, 2)],
    ids=["SGD", "AdamW", "accumulation", "bf16", "bf16 and accumulation"],
)
@pytest.mark.parametrize("interrupted", [False, True], ids=["", "resumed"])
def test_bit_identical_to_the_plain_loop(
    task: str,
    optimizers: Optimizers,
    bf16: bool,
    accumulate: int,
    interrupted: bool,
    tmp_path: Path,
) -> None:
    per_token = task == "language model"
    data = Texts(per_token)

    def build() -> nn.Module:
        return language_model(dropout=0.1) if per_token else classifier()

    want, epsilon = plain_loop(build(), data, optimizers, bf16, 4 * accumulate, 4)

    def trainer(stop: bool = False) -> PrivateTrainer:
        model = build()
        settings: dict[str, Any] = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": accumulate,
            "bf16": bf16,
        }
        return PrivateTrainer(
            model=model,
            args=arguments(tmp_path, **settings),
            train_dataset=data,
            privacy=PRIVACY,
            optimizers=optimizers(model),
            callbacks=[Seeded(), *([StopAt(4)] if stop else [])],
        )

    if interrupted:
        first = trainer(stop=True)
        first.train()
        assert first.run is not None and first.run.steps == 4 and first.run.epsilon() < epsilon
    resumed = trainer()
    resumed.train(resume_from_checkpoint=interrupted)
    assert resumed.run is not None and resumed.run.steps == resumed.state.global_step == 6
    assert resumed.run.epsilon() == epsilon
    assert torch.equal(weights(resumed.model), want)


@pytest.mark.parametrize(
    ("length", "steps"),
    [({"max_steps": 5}, 5), ({"max_steps": -1, "num_train_epochs": 2}, 8)],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_epochs_schedule_and_epsilon_are_as_planned(
    length: dict[str, int], steps: int, accumulate: int, tmp_path: Path
) -> None:
    trainer = trainer_of(
        tmp_path,
        privacy={"epsilon": 2.0, "noise_multiplier": None},
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="linear",
        **length,
    )
    trainer.train()
    run = trainer.run
    assert run is not None and run.steps == run.plan.steps == trainer.state.global_step == steps
    assert run.plan.batch_size == 8 and 1.9 < run.epsilon() <= 2.0
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx(
        [0.01 * (steps - step) / steps for step in range(steps)]
    )
    spent = [entry["epsilon"] for entry in logs]
    assert spent == sorted(spent) and run.epsilon() <= spent[-1] < run.epsilon() + 1e-3
    assert logs[-1]["epoch"] == pytest.approx(steps / 4)


def test_empty_batches_are_steps_of_the_schedule_too(tmp_path: Path) -> None:
    """Batches of one record: about every third is empty."""
    trainer = trainer_of(tmp_path, per_device_train_batch_size=1, max_steps=20)
    trainer.train()
    assert trainer.run is not None and trainer.run.steps == trainer.state.global_step == 20
    assert trainer.run.not_private.samples != 20
    assert trainer.lr_scheduler.last_epoch == 20


# -- the guarantee


class Sums(TrainerCallback):
    """Takes the place of the noise and keeps the sums that it would have been added to."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.trainer: PrivateTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None and self.trainer.run is not None
        self.trainer.run._noise = self  # type: ignore[assignment]
        self.batch_size = self.trainer.run.plan.batch_size

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self.steps.append(torch.cat([x.flatten().double() for x in sums]) * self.batch_size)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("task", ["classify", "language model"])
def test_neighbouring_data_sets_differ_by_at_most_the_clip(
    task: str, accumulate: int, tmp_path: Path
) -> None:
    """Measured before: 5.5 times the clip, for the mean over all tokens of a batch."""
    per_token = task == "language model"
    sums = []
    for count in (N, N - 1):
        seen = Sums()
        model = language_model() if per_token else classifier()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        trainer = trainer_of(
            tmp_path,
            model,
            Texts(per_token, count),
            privacy={"records": N},
            callbacks=[seen],
            per_device_train_batch_size=N if accumulate == 1 else 7,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
        )
        if accumulate > 1:  # every record at every step
            trainer.get_total_train_batch_size = lambda args: N  # type: ignore[method-assign]
        seen.trainer = trainer
        trainer.train()
        sums += seen.steps
    difference = float((sums[0] - sums[1]).norm()) / CLIP
    assert 0.1 < difference <= 1 + 1e-5


class MeanOverTokens(PrivateTrainer):
    """What Trainer computes without privacy."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


class Weighted(PrivateTrainer):
    def record_loss(self, model: Any, inputs: Any) -> Tensor:
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        weight = torch.tensor([1.0, 5.0, 50.0])
        return nn.functional.cross_entropy(logits, inputs["labels"], weight=weight)


@pytest.mark.parametrize(
    ("kind", "per_token"), [(MeanOverTokens, True), (Weighted, False)], ids=["tokens", "weights"]
)
def test_an_overridden_loss_that_mixes_records_is_refused(
    kind: type[PrivateTrainer], per_token: bool, tmp_path: Path
) -> None:
    model = language_model() if per_token else classifier()
    trainer = trainer_of(tmp_path, model, Texts(per_token), kind)
    before = weights(model)
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records|is not the mean over records"):
        trainer.train()
    assert trainer.run is None and torch.equal(weights(model), before)


def test_an_overridden_loss_that_is_a_mean_over_records_is_used(tmp_path: Path) -> None:
    class Doubled(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss * 2

    losses = []
    for kind in (PrivateTrainer, Doubled):
        trainer = trainer_of(tmp_path, kind=kind, max_steps=1)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(2 * losses[0])


def test_padding_on_the_left_without_positions_is_refused(tmp_path: Path) -> None:
    """The positions of a text, and so its gradient, would depend on the longest text."""

    def collate(side: str) -> Callable[[list[Any]], dict[str, Tensor]]:
        def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            texts = [row["input_ids"][row["attention_mask"] == 1] for row in rows]
            ids = nn.utils.rnn.pad_sequence(texts, True, -100, side)
            return {
                "input_ids": ids.clamp(min=0),
                "attention_mask": (ids >= 0).long(),
                "labels": ids,
            }

        return padded

    for side in ("right", "left"):
        trainer = trainer_of(tmp_path, language_model(), Texts(True))
        trainer.data_collator = collate(side)
        if side == "right":
            trainer.train()
            continue
        with pytest.raises(dpkfc.PrivacyError, match="how far its batch is padded"):
            trainer.train()


# -- losses of tokens


def masked_lm() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def tagger() -> nn.Module:
    config = transformers.BertConfig(**SIZES, num_labels=VOCABULARY)
    return transformers.BertForTokenClassification(config)


def translator() -> nn.Module:
    config = transformers.BartConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
    )
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "shifted"),
    [(language_model, True), (masked_lm, False), (tagger, False), (translator, False)],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_one_record_is_the_models_own(
    build: Callable[[], nn.Module], shifted: bool, smoothing: float, tmp_path: Path
) -> None:
    """Of several records it is the mean of these, whatever their lengths."""
    data = Texts(True)
    trainer = trainer_of(tmp_path, build(), data, max_steps=1, label_smoothing_factor=smoothing)
    trainer.train()
    assert trainer._labels_shifted is shifted
    model = trainer.model.eval()
    smoother = transformers.trainer_pt_utils.LabelSmoother(smoothing)
    own = []
    for record in data.records[:4]:
        inputs = {name: value.unsqueeze(0) for name, value in record.items()}
        out = model(**inputs)
        own.append(smoother(out, inputs["labels"], shift_labels=shifted) if smoothing else out.loss)
    batch = torch.utils.data.default_collate(data.records[:4])
    torch.testing.assert_close(trainer.record_loss(model, batch), torch.stack(own).mean())


def test_a_loss_that_is_no_mean_over_tokens_asks_for_record_loss(tmp_path: Path) -> None:
    class Penalised(transformers.GPT2LMHeadModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = None if out.loss is None else 2 * out.loss
            return out

    model = Penalised(language_model().config)
    trainer = trainer_of(tmp_path, model, Texts(True), remove_unused_columns=False)
    with pytest.raises(ValueError, match=r"not the mean over the record's tokens.*record_loss"):
        trainer.train()


# -- settings


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_grad_norm": 0.3}, r'privacy=\{"clip"'),
        ({"auto_find_batch_size": True}, "repeats steps"),
        ({"torch_compile": True}, "compiled model"),
        ({"enable_jit_checkpoint": True}, "middle of a batch"),
        ({"neftune_noise_alpha": 0.1}, "longest record"),
        ({"include_num_input_tokens_seen": "all"}, "number of tokens"),
        ({"hub_strategy": "all_checkpoints"}, "keys of future noise"),
    ],
)
def test_settings_that_privacy_replaces_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        trainer_of(tmp_path, **changed)


@pytest.mark.parametrize(
    ("privacy", "error", "said"),
    [
        ({"epsilo": 1}, ValueError, "Did you mean epsilon"),
        ({"batch_size": 3}, ValueError, "per_device_train_batch_size"),
        ({"steps": 3}, ValueError, "max_steps"),
        (3.0, TypeError, "is a dict"),
    ],
)
def test_a_wrong_privacy_argument_is_refused(
    privacy: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        PrivateTrainer(classifier(), arguments(tmp_path), train_dataset=[], privacy=privacy)


def test_settings_that_are_changed_later_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args.hub_strategy = "checkpoint"
    with pytest.raises(ValueError, match="keys of future noise"):
        trainer.train()
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    with pytest.raises(ValueError, match="WANDB_LOG_MODEL=checkpoint uploads"):
        trainer_of(tmp_path)


def test_batches_by_length_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(dpkfc.PrivacyError, match="LengthGroupedSampler"):
        trainer.train()


def test_a_search_over_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dpkfc.PrivacyError, match="each time spends"):
        trainer_of(tmp_path).hyperparameter_search()


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    after = []
    for enabled in (False, True):
        model = language_model()
        trainer = trainer_of(tmp_path, model, Texts(True), gradient_checkpointing=enabled)
        trainer.train()
        after.append(weights(model))
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=1e-6)


# -- training again, and resuming


def test_a_second_training_is_refused_unless_a_ledger_adds_up(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    with pytest.raises(dpkfc.PrivacyError, match="trained already.*ledger"):
        trainer.train()
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="texts")
    trainer = trainer_of(tmp_path, privacy={"ledger": ledger})
    trainer.train()
    once = ledger.epsilon(PRIVACY["delta"])
    trainer.train()
    assert ledger.epsilon(PRIVACY["delta"]) > 1.2 * once
    last = trainer.state.log_history[-1]
    assert last["epsilon"] == pytest.approx(once, rel=1e-3)
    assert last["epsilon_of_all_runs"] >= ledger.epsilon(PRIVACY["delta"])


def test_the_checkpoint_of_another_run_does_not_excuse_a_second_training(tmp_path: Path) -> None:
    other = trainer_of(tmp_path, callbacks=[StopAt(2)])
    other.train()
    trainer = trainer_of(tmp_path / "own")
    trainer.train()
    with pytest.raises(dpkfc.PrivacyError, match="trained already"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_model_of_another_run_is_refused(tmp_path: Path) -> None:
    """As with an output_dir that an earlier training, private or not, has used."""
    trainer = trainer_of(tmp_path, callbacks=[StopAt(4)])
    trainer.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    trainer._load_best_model()
    other = trainer_of(tmp_path / "other", callbacks=[StopAt(4)])
    other.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "other" / "checkpoint-4")
    with pytest.raises(dpkfc.PrivacyError, match="was not saved by this run"):
        trainer._load_best_model()


def test_a_finished_run_beside_other_weights_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, callbacks=[StopAt(6)], max_steps=6).train()
    trainer_of(tmp_path / "other", callbacks=[StopAt(6)], max_steps=6, learning_rate=0.02).train()
    name = "checkpoint-6/model.safetensors"
    os.replace(tmp_path / "other" / name, tmp_path / name)
    with pytest.raises(dpkfc.PrivacyError, match="weights are not those"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_the_run_is_refused(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, callbacks=[StopAt(3)], save_only_model=True)
    first.train()
    assert not (tmp_path / "checkpoint-3" / STATE_FOLDER).exists()
    with pytest.raises(dpkfc.PrivacyError, match="holds no state of a private run"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_weights_of_another_step_are_refused(tmp_path: Path) -> None:
    for step in (2, 4):
        trainer_of(tmp_path, callbacks=[StopAt(step)], max_steps=6).train()
    weights_file = "model.safetensors"
    os.replace(tmp_path / "checkpoint-4" / weights_file, tmp_path / "checkpoint-2" / weights_file)
    with pytest.raises(dpkfc.PrivacyError, match="weights are not those"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_transformers as t
import dpkfc

class Killed(t.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os._exit(9)  # two steps after the last checkpoint

folder = Path(sys.argv[1])
ledger = dpkfc.Ledger(folder / "ledger.db", dataset="texts")
t.trainer_of(
    folder, privacy={"ledger": ledger}, callbacks=[Killed()], save_strategy="steps", save_steps=3,
    max_steps=8,
).train()
"""


def test_a_killed_training_resumes_and_its_lost_steps_stay_charged(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], timeout=300)
    assert ended.returncode == 9
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", dataset="texts")
    trainer = trainer_of(tmp_path, privacy={"ledger": ledger}, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    run = trainer.run
    # 3 steps were saved, 2 were lost, 3 are left
    assert run is not None and (run.steps, run.charged) == (6, 8)
    assert trainer.state.global_step == 6
    assert ledger.epsilon(PRIVACY["delta"]) == pytest.approx(run.plan.epsilon(8))


# -- TRL


class PrivateSFTTrainer(PrivateTrainer, trl.SFTTrainer):
    pass


def sentences(count: int = N) -> datasets.Dataset:
    chosen = random.Random(0)
    texts = [chosen.choices(WORDS[3:], k=2 + index % 6) for index in range(N - 1)]
    texts.append([WORDS[-1]] * 14)
    return datasets.Dataset.from_list([{"text": " ".join(text)} for text in texts[:count]])


WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(VOCABULARY - 3))]


def tokenizer() -> Any:
    ids = {word: index for index, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def sft_trainer(
    folder: Path,
    data: Any,
    privacy: dict[str, Any] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **changed: Any,
) -> PrivateSFTTrainer:
    usual = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    model = language_model()
    return PrivateSFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), **{**usual, **changed}),
        train_dataset=data,
        processing_class=tokenizer(),
        privacy={**PRIVACY, **(privacy or {})},
        optimizers=adamw(model),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_sft_is_bit_identical_to_the_plain_loop(accumulate: int, tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, sentences(), gradient_accumulation_steps=accumulate)
    data = torch.utils.data.DataLoader(
        trainer.train_dataset.select_columns(["input_ids", "labels"]),
        collate_fn=trainer.data_collator,
        batch_size=4,
    )
    want, epsilon = plain_loop(language_model(), data, adamw, False, 4 * accumulate, 4)
    trainer.train()
    assert trainer.run is not None and trainer.run.epsilon() == epsilon
    assert torch.equal(weights(trainer.model), want)


def test_sft_on_neighbouring_data_sets_differs_by_at_most_the_clip(tmp_path: Path) -> None:
    sums = []
    for count in (N, N - 1):
        seen = Sums()
        settings = {"per_device_train_batch_size": N, "max_steps": 1}
        privacy = {"records": N}
        trainer = sft_trainer(tmp_path, sentences(count), privacy, [seen], **settings)
        seen.trainer = trainer
        trainer.train()
        sums += seen.steps
    assert 0.1 < float((sums[0] - sums[1]).norm()) / CLIP <= 1 + 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"packing": True, "max_length": 16}, "several records"),
        ({"padding_free": True, "max_length": None}, "into one row"),
        ({"loss_type": "dft"}, "only 'nll'"),
    ],
)
def test_sft_settings_that_join_records_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        sft_trainer(tmp_path, sentences(), **changed)


def test_the_auxiliary_loss_of_experts_is_refused(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **{**SIZES, "num_hidden_layers": 1},
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    with pytest.raises(ValueError, match="auxiliary loss"):
        trainer_of(tmp_path, transformers.MixtralForCausalLM(config), Texts(True))


# -- evaluation, logs, the model card


def test_evaluation_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    trainer = PrivateTrainer(
        model=classifier(),
        args=arguments(
            tmp_path,
            max_steps=12,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            load_best_model_at_end=True,
            learning_rate=1.0,  # so that it gets worse
        ),
        train_dataset=Texts(False),
        eval_dataset=Texts(False),
        privacy=PRIVACY,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=1)],
    )
    trainer.train()
    assert trainer.run is not None and trainer.run.steps == trainer.state.global_step < 12
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best)
    assert trainer.run.epsilon() < trainer.run.plan.epsilon(12)


def test_evaluation_on_the_private_records_is_not_private_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Texts(False)
    for evaluated, said in ((Texts(False), False), (data, True), ({"train": data}, True)):
        caplog.clear()
        PrivateTrainer(
            classifier(),
            arguments(tmp_path),
            train_dataset=data,
            eval_dataset=evaluated,
            privacy=PRIVACY,
        )
        assert ("metrics are exact, not private" in caplog.text) is said


def test_what_is_logged_and_the_model_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="dpkfc.integrations.transformers"):
        trainer = trainer_of(
            tmp_path, logging_strategy="steps", logging_steps=2, save_strategy="steps", save_steps=6
        )
        trainer.train()
    assert caplog.text.count("max_grad_norm is not used") == 1
    names = {name for entry in trainer.state.log_history for name in entry}
    assert {"epsilon", "loss_not_private", "train_loss_not_private", "learning_rate"} <= names
    assert not names & {"loss", "train_loss", "grad_norm", "num_input_tokens_seen"}
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0 and state["num_input_tokens_seen"] == 0
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Differential privacy") == 1
    assert f"epsilon = {trainer.state.log_history[-1]['epsilon']} after 6 steps" in card
    assert "not checked: ledger" in card
