"""Two habits of Hugging Face models that capture has to know.

**Caches.** A language model keeps keys and values for the next token unless `use_cache=False`. What
a module under vmap writes to a cache cannot leave vmap. Training has no next token.

**Prompts.** PEFT's prompt tuning and P-tuning encode their virtual tokens once and repeat the
result for every sample. Captured, the encoder returns one result per sample already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

REPEATED = ("PROMPT_TUNING", "P_TUNING")  # names of PEFT's types whose prompts are repeated


def models_with_cache(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that keep a cache unless they are called with ``use_cache=False``."""
    for module in model.modules():
        keeps = getattr(getattr(module, "config", None), "use_cache", False)
        if keeps and "use_cache" in inspect.signature(module.forward).parameters:
            yield module


def models_with_prompt(model: nn.Module) -> Iterator[nn.Module]:
    """Models of PEFT that put virtual tokens before their inputs."""
    for module in model.modules():
        if hasattr(module, "get_prompt") and isinstance(
            getattr(module, "prompt_encoder", None), nn.Module
        ):
            yield module


def prompt_per_sample(
    module: nn.Module, get_prompt: Callable[..., Any], batch_size: int, *args: Any, **kwargs: Any
) -> Any:
    """``get_prompt(batch_size)`` of a model whose prompt encoder returns one prompt per sample."""
    kind: Any = getattr(module.active_peft_config, "peft_type", None)
    encoder = module.prompt_encoder
    assert isinstance(encoder, nn.Module)
    trained = any(p.requires_grad for p in encoder.parameters())
    repeats = 1 if trained and getattr(kind, "name", "") in REPEATED else batch_size
    return get_prompt(repeats, *args, **kwargs)
