"""A pretrained network with a new head: frozen, adapted by LoRA, or fine-tuned.

    frozen:PATH    its outputs are the features of a linear model, computed once per record
    lora:PATH      low-rank updates of its linear layers, and the head (Hu et al., 2022)
    full:PATH      every weight is trained

PATH is a folder, or a name known to Hugging Face transformers, or timm/NAME for a model of timm.
Epsilon covers what is learned from the private records: the pretrained weights must come from other
data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.probes.tokens import Tokens

MODES = ("frozen", "lora", "full")
RANK = 8  # of LoRA
TOKENS = 128  # longest text
MEAN = STD = (0.5, 0.5, 0.5)  # default scaling of pixels: from [0, 1] to [-1, 1]


def parse(name: str) -> tuple[str, str] | None:
    """The mode and the path of a backbone; None if the name is not one.

    >>> parse("lora:prajjwal1/bert-tiny"), parse("net.py:network")
    (('lora', 'prajjwal1/bert-tiny'), None)
    """
    mode, colon, path = name.partition(":")
    return (mode, path) if colon and mode in MODES else None


class TextEncoder(nn.Module):
    """Token ids [N, T] to vectors: the mean of the last hidden states, without padding."""

    def __init__(self, backbone: nn.Module, pad: int, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.pad = pad
        self.width = width
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != self.pad
        hidden = self.backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(2).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        y: Tensor = self.norm(pooled)
        return y


class ImageEncoder(nn.Module):
    """Images [N, C, H, W] in [0, 1] to vectors: the mean over tokens or pixels.

    A backbone may also pool them itself.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: nn.Module, width: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.width = width
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


def text_tokenizer(path: str) -> tuple[Callable[[Sequence[str]], Tensor], Tokens]:
    """A function from texts to the model's token ids [N, T], and token noise of the same shape."""
    transformers = _transformers()
    tokenizer = _load(path, lambda: transformers.AutoTokenizer.from_pretrained(path))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{path}: its tokenizer has no padding token: name one in tokenizer_config.json"
        )
    config = _load(path, lambda: transformers.AutoConfig.from_pretrained(path))
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))

    def encode(texts: Sequence[str]) -> Tensor:
        encoded = tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids: Tensor = encoded["input_ids"]
        return ids

    noise = replace(Tokens.from_tokenizer(tokenizer, length), mask=None)
    return encode, replace(noise, sep=None) if noise.sep == noise.pad else noise


def text_encoder(path: str, pad: int) -> TextEncoder:
    """The pretrained network; `pad` is the padding token, which it ignores."""
    backbone, config = _pretrained(path)
    return TextEncoder(backbone, pad, _width(path, config))


def image_encoder(path: str) -> ImageEncoder:
    """The pretrained network, with the scaling of pixels that it expects."""
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


def classifier(encoder: Encoder, classes: int, mode: str) -> nn.Sequential:
    """The encoder and a linear head, initialised at zero; `mode` says which weights are trained."""
    backbone = encoder.backbone
    backbone.requires_grad_(mode == "full")
    for name, part in backbone.named_modules():
        if name.split(".")[-1] == "pooler":  # its output is not used
            part.requires_grad_(False)
    if mode == "lora":
        try:
            import peft
        except ImportError:
            raise ImportError("lora:PATH needs peft: pip install peft") from None
        config = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", exclude_modules=".*pooler.*"
        )
        encoder.backbone = peft.get_peft_model(backbone, config)
    head = nn.Linear(encoder.width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(encoder, head)


def features(encoder: Encoder, batch: int = 64) -> Callable[[Tensor], Tensor]:
    """The outputs of a frozen encoder, per record: BatchNorm and dropout are in evaluation mode."""
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
        raise ImportError(
            "a pretrained model needs transformers: pip install transformers"
        ) from None
    return transformers


def _pretrained(path: str) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    backbone = _load(path, lambda: transformers.AutoModel.from_pretrained(path))
    return backbone, backbone.config


def _load(path: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(
            f"{path} is not a model that can be loaded here ({reason}): give a folder with one"
        ) from problem


def _width(path: str, config: Any) -> int:
    width = (
        getattr(config, "hidden_size", None)
        or (getattr(config, "hidden_sizes", None) or [None])[-1]
    )
    if not isinstance(width, int):
        raise ValueError(f"{path}: its config has no hidden_size: use a text or image encoder")
    return width


def _timm(name: str) -> ImageEncoder:
    try:
        import timm
    except ImportError:
        raise ImportError(f"timm/{name} needs timm: pip install timm") from None
    backbone = _load(
        f"timm/{name}", lambda: timm.create_model(name, pretrained=True, num_classes=0)
    )
    pixels = timm.data.resolve_model_data_config(backbone)
    return ImageEncoder(backbone, backbone.num_features, pixels["mean"], pixels["std"])
