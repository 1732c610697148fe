"""What the model of a finished run says of new records.

The weights are covered by epsilon, and whatever is computed from them and from *new* records is post-processing: it
costs nothing. Predictions of the training records are another matter once they are held against the true classes: which
of them are right is a statistic of those records that no epsilon covers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from dpkfc.app.models.default import Built, build, is_own
from dpkfc.app.readers.sources import Loaded
from dpkfc.app.readers.unlabelled import kind_of, probe_of, read_inputs
from dpkfc.errors import PrivacyError

PART = 500  # records at once
MATTERS = ("limits", "indicators", "tokenizer")  # of how data was loaded, besides the schema


class Prediction(NamedTuple):
    """The likeliest class of a record, and its probability by the model."""

    name: str  # the file, or the number of the row, from 1
    label: str
    probability: float


def predict(run_directory: str | Path, source: str | Path) -> list[Prediction]:
    """The class of every record of a file or folder, which is read as the run's own config.json says.

    Args:
        run_directory: of a finished run.
        source: records of the kind that the run was trained on: a table, an .npz file, images or texts. It needs no
            classes, and they are not looked at.
    """
    config = read_config(run_directory)
    model, found = restore(run_directory), read_inputs(source, config)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in found.x.split(PART)]).float().softmax(1)
    sure, places = outputs.max(1)
    return [
        Prediction(name, config["classes"][place], probability)
        for name, place, probability in zip(
            found.names, places.tolist(), sure.tolist(), strict=True
        )
    ]


def restore(run_directory: str | Path, loaded: Loaded | None = None) -> nn.Module:
    """The trained model of a finished run. If `loaded` is given, its inputs must be made as those of the run were."""
    folder = Path(run_directory)
    config = read_config(folder)
    if loaded is not None:
        _check_agreement(folder, config, loaded)
    kind, probe = (
        (kind_of(config), probe_of(config)) if loaded is None else (loaded.kind, loaded.probe)
    )
    name, code = config["settings"]["model"], config.get("code")
    if is_own(name) and not (isinstance(code, str) and code):
        raise PrivacyError(
            f'{folder}/config.json names the model {name} without a digest of its file ("code"), so nobody can tell '
            "whether it is the file that was trained with; it was not run. Restore config.json as the run wrote it"
        )
    built = build(name, kind, tuple(config["shape"]), len(config["classes"]), probe, code)
    try:
        load_model(built.model, str(folder / "model.safetensors"))
    except Exception as problem:  # of safetensors, or of torch where sizes differ
        first = str(problem).splitlines()[0]
        raise PrivacyError(
            f"{folder}/model.safetensors does not fit the model {built.name} ({first})"
        ) from problem
    return Restored(built).eval()


def read_config(run_directory: str | Path) -> dict[str, Any]:
    """config.json of a finished run."""
    folder = Path(run_directory)
    file = folder / "config.json"
    if not file.is_file():
        raise PrivacyError(
            f"there is no run in {folder}: give the folder that dpkfc train wrote (--out), runs/NAME say"
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError as problem:
        raise PrivacyError(f"{file} is damaged ({problem}): restore it") from problem
    if not (folder / "model.safetensors").is_file() or not (folder / "result.json").is_file():
        raise PrivacyError(
            f"the run in {folder} is not finished: repeat its command, which goes on where it stopped"
        )
    return config


def _check_agreement(folder: Path, config: dict[str, Any], loaded: Loaded) -> None:
    ran, given = config["source"], json.loads(json.dumps(dict(loaded.source)))
    pairs = {
        "shape of inputs": (config["shape"], list(loaded.shape)),
        "list of classes": (config["classes"], list(loaded.names)),
    }
    if ran:
        pairs["kind"] = (kind_of(config), loaded.kind)
    if ran and given:
        pairs["schema"] = (_features(ran), _features(given))
        pairs |= {name: (ran.get(name) or None, given.get(name) or None) for name in MATTERS}
    for what, (wanted, found) in pairs.items():
        if wanted != found:
            raise PrivacyError(
                f"{folder}: the run was trained with the {what} {_short(wanted)}, but the data was loaded with "
                f"{_short(found)}: load it as the run's config.json says, or use dpkfc.app.workflow.fit.predict"
            )


def _features(source: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schema without the target, in its order, which is that of the features."""
    return [
        (name, values)
        for name, values in (source.get("schema") or {}).items()
        if name != source.get("target")
    ]


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


class Restored(nn.Module):
    """The features of inputs, and the model on top of them."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.features, self.model = built.features, built.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x if self.features is None else self.features(x))  # type: ignore[no-any-return]
