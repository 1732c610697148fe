"""Predictions for new records, by the model of a finished run.

Epsilon covers the weights. Anything computed from the weights and *new* records is post-processing
and costs nothing. Predictions for the training records are different once they are compared with
the true classes: which of them are correct is a statistic of those records, and no epsilon covers
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from dpkfc.app.models.default import Built, build
from dpkfc.app.models.user_model import is_user_model
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.readers.unlabelled import kind_of, probe_of, read_inputs

BATCH = 500
READING = ("limits", "indicators", "tokenizer")  # options, besides the schema, that change inputs


class Prediction(NamedTuple):
    """The most probable class of a record, and its probability according to the model."""

    name: str  # the file, or the number of the row, from 1
    label: str
    probability: float


def predict(run_directory: str | Path, source: str | Path) -> list[Prediction]:
    """Predict the class of every record in a file or folder.

    Args:
        run_directory: the folder of a finished run. Its config.json says how to read the records.
        source: records of the kind that the run was trained on: a table, an .npz file, images or
            texts. They need no classes; existing ones are ignored.
    """
    config = read_config(run_directory)
    model = restore(run_directory)
    inputs = read_inputs(source, config)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in inputs.x.split(BATCH)]).float().softmax(1)
    probabilities, classes = outputs.max(1)
    return [
        Prediction(name, config["classes"][number], probability)
        for name, number, probability in zip(
            inputs.names, classes.tolist(), probabilities.tolist(), strict=True
        )
    ]


def restore(run_directory: str | Path, loaded: Loaded | None = None) -> nn.Module:
    """The trained model of a finished run.

    Args:
        loaded: if given, it is checked that its inputs were made like those of the run.
    """
    folder = Path(run_directory)
    config = read_config(folder)
    if loaded is None:
        kind, probe = kind_of(config), probe_of(config)
    else:
        _check_agreement(folder, config, loaded)
        kind, probe = loaded.kind, loaded.probe
    name, code = config["settings"]["model"], config.get("code")
    if is_user_model(name) and not (isinstance(code, str) and code):
        raise ValueError(
            f'{folder}/config.json names the model {name} without a digest of its file ("code"), '
            "so nobody can tell whether the file is still the one of the run. The file was not "
            "run. Restore config.json as the run wrote it"
        )
    built = build(name, kind, tuple(config["shape"]), len(config["classes"]), probe, code)
    try:
        load_model(built.model, str(folder / "model.safetensors"))
    except Exception as problem:  # of safetensors, or of torch where sizes differ
        reason = str(problem).splitlines()[0]
        raise ValueError(
            f"{folder}/model.safetensors does not fit the model {built.name} ({reason})"
        ) from problem
    return Restored(built).eval()


def read_config(run_directory: str | Path) -> dict[str, Any]:
    """config.json of a finished run."""
    folder = Path(run_directory)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no run in {folder}: give the folder that dpkfc train wrote (--out), such as "
            "runs/NAME"
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError as problem:
        raise ValueError(f"{file} is damaged ({problem}): restore it") from problem
    if not (folder / "model.safetensors").is_file() or not (folder / "result.json").is_file():
        raise FileNotFoundError(
            f"the run in {folder} is not finished: repeat its command, which resumes it"
        )
    return config


def _check_agreement(folder: Path, config: dict[str, Any], loaded: Loaded) -> None:
    """Raise ValueError if `loaded` was read in another way than the records of the run."""
    trained = config["source"]
    given = json.loads(json.dumps(dict(loaded.source)))
    pairs = {
        "shape of inputs": (config["shape"], list(loaded.shape)),
        "list of classes": (config["classes"], list(loaded.names)),
    }
    if trained:
        pairs["kind"] = (kind_of(config), loaded.kind)
    if trained and given:
        pairs["schema"] = (_feature_columns(trained), _feature_columns(given))
        pairs |= {name: (trained.get(name) or None, given.get(name) or None) for name in READING}
    for what, (wanted, other) in pairs.items():
        if wanted != other:
            raise ValueError(
                f"{folder}: the run was trained with the {what} {_short(wanted)}, but the data was "
                f"loaded with {_short(other)}: load it as the run's config.json says, or use "
                "dpkfc.app.workflow.predict.predict"
            )


def _feature_columns(source: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schema without the target. Its order is that of the features."""
    return [
        (name, values)
        for name, values in (source.get("schema") or {}).items()
        if name != source.get("target")
    ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class Restored(nn.Module):
    """A trained model, with the features that are computed from its inputs."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.features = built.features
        self.model = built.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x if self.features is None else self.features(x))  # type: ignore[no-any-return]
