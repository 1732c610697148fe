"""A pretrained network with a new head: frozen, adapted at low rank, or trained whole.

    frozen:PATH    its outputs are the features of a linear model, computed once for each record
    lora:PATH      low-rank changes of its linear layers are trained, and the head (Hu et al., 2022)
    full:PATH      every weight is trained

PATH is a folder or a name that Hugging Face's transformers knows, or timm/NAME for a model of timm. Epsilon covers what
is learned from the records, so the pretrained weights must come from other data than these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.probes.tokens import Tokens

WAYS = ("frozen", "lora", "full")
RANK = 8
TOKENS = 128
MEAN = STD = (0.5, 0.5, 0.5)  # of pixels, where a model does not say: from [0, 1] to [-1, 1]


def parse(name: str) -> tuple[str, str] | None:
    """The way and the path of a backbone; None if it is not one.

    >>> parse("lora:prajjwal1/bert-tiny"), parse("net.py:network")
    (('lora', 'prajjwal1/bert-tiny'), None)
    """
    way, colon, path = name.partition(":")
    return (way, path) if colon and way in WAYS else None


class TextEncoder(nn.Module):
    """Token ids [N, T] to vectors: the mean of the last hidden states over what is not padding."""

    def __init__(self, backbone: nn.Module, pad: int, width: int) -> None:
        super().__init__()
        self.backbone, self.pad, self.width = backbone, pad, width
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != self.pad
        hidden = self.backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(2).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        y: Tensor = self.norm(pooled)
        return y


class ImageEncoder(nn.Module):
    """Images [N, C, H, W] in [0, 1] to vectors: the mean over tokens or places, or what the backbone pools itself."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: nn.Module, width: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.backbone, self.width = backbone, width
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        output = self.backbone(
            (images.expand(-1, self.mean.shape[1], -1, -1) - self.mean) / self.std
        )
        hidden = output if isinstance(output, Tensor) else output.last_hidden_state
        while hidden.dim() > 2:  # [N, tokens, width], or [N, width, height, width]
            hidden = hidden.mean(1) if hidden.dim() == 3 else hidden.flatten(2).transpose(1, 2)
        y: Tensor = self.norm(hidden)
        return y


Encoder = TextEncoder | ImageEncoder


def tokenizer(path: str) -> tuple[Callable[[Sequence[str]], Tensor], Tokens]:
    """What turns texts into the token ids [N, T] that the model reads, and token noise of the same form."""
    transformers = _transformers()
    found = _found(path, lambda: transformers.AutoTokenizer.from_pretrained(path))
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    if found.pad_token_id is None:
        raise PrivacyError(
            f"{path}: its tokenizer has no padding token: name one in tokenizer_config.json"
        )
    config = _found(path, lambda: transformers.AutoConfig.from_pretrained(path))
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))

    def encode(texts: Sequence[str]) -> Tensor:
        coded = found(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids: Tensor = coded["input_ids"]
        return ids

    noise = replace(Tokens.from_tokenizer(found, length), mask=None)
    return encode, replace(noise, sep=None) if noise.sep == noise.pad else noise


def text_encoder(path: str, pad: int) -> TextEncoder:
    """The network; `pad` is the token that it is to pass over."""
    backbone, config = _pretrained(path)
    return TextEncoder(backbone, pad, _width(path, config))


def image_encoder(path: str) -> ImageEncoder:
    if path.startswith("timm/"):
        return _timm(path.removeprefix("timm/"))
    from_pretrained: Any = (
        _transformers().image_processing_base.ImageProcessingMixin.get_image_processor_dict
    )
    backbone, config = _pretrained(path)
    try:
        pixels = from_pretrained(path)[0]
    except (OSError, ValueError):
        pixels = {}
    return ImageEncoder(
        backbone,
        _width(path, config),
        pixels.get("image_mean") or MEAN,
        pixels.get("image_std") or STD,
    )


def classifier(encoder: Encoder, classes: int, way: str) -> nn.Sequential:
    """The encoder and a linear head that begins at zero, with those weights trainable that `way` says."""
    backbone = encoder.backbone
    backbone.requires_grad_(way == "full")
    for name, part in backbone.named_modules():
        if name.split(".")[-1] == "pooler":  # it is passed by
            part.requires_grad_(False)
    if way == "lora":
        try:
            import peft
        except ImportError:
            raise PrivacyError("lora: needs peft: pip install peft") from None
        config = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", exclude_modules=".*pooler.*"
        )
        encoder.backbone = peft.get_peft_model(backbone, config)
    head = nn.Linear(encoder.width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(encoder, head)


def features(encoder: Encoder, batch: int = 64) -> Callable[[Tensor], Tensor]:
    """What a frozen encoder gives for each record on its own: BatchNorm and dropout are off."""
    encoder.eval().requires_grad_(False)

    def compute(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([encoder(part) for part in x.split(batch)])

    return compute


def _transformers() -> Any:
    try:
        import transformers
        import transformers.image_processing_base
    except ImportError:
        raise PrivacyError(
            "a pretrained model needs transformers: pip install transformers"
        ) from None
    return transformers


def _pretrained(path: str) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    backbone = _found(path, lambda: transformers.AutoModel.from_pretrained(path))
    return backbone, backbone.config


def _found(path: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError) as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise PrivacyError(
            f"{path} is not a model that can be loaded here ({first}): give a folder with one"
        ) from problem


def _width(path: str, config: Any) -> int:
    width = (
        getattr(config, "hidden_size", None)
        or (getattr(config, "hidden_sizes", None) or [None])[-1]
    )
    if not isinstance(width, int):
        raise PrivacyError(f"{path}: its config names no hidden_size: use a text or image encoder")
    return width


def _timm(name: str) -> ImageEncoder:
    try:
        import timm
    except ImportError:
        raise PrivacyError(f"timm/{name} needs timm: pip install timm") from None
    backbone = _found(
        f"timm/{name}", lambda: timm.create_model(name, pretrained=True, num_classes=0)
    )
    pixels = timm.data.resolve_model_data_config(backbone)
    return ImageEncoder(backbone, backbone.num_features, pixels["mean"], pixels["std"])
