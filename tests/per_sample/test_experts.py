"""Mixture of experts: every sample's gradients equal one autograd pass a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkfc
from dpkfc.per_sample.capture import GradientCapture
from dpkfc.per_sample.layers.experts import is_experts
from dpkfc.per_sample.partition import partition
from oracle import (
    captured_grads,
    largest_error,
    private_sum,
    reference_grads,
    reference_norms,
    reference_sum,
)

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCABULARY = 4, 6, 19
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "use_cache": False,
}
MODELS = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "GraniteMoe"]


def tiny(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for p in model.parameters():  # so that routers have preferences and biases are not zero
        nn.init.normal_(p, std=0.4)
    return model


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"ids": torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"]).logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, batch["ids"][:, 1:], reduction="none").mean(1).mean()


@pytest.mark.parametrize("name", MODELS)
def test_full_training_is_exact(name: str) -> None:
    model = tiny(name)
    assert sum(is_experts(module) for module in model.modules()) == 2
    assert largest_error(model, loss_of, tokens(), ROWS) < 1e-3
    model.set_experts_implementation("eager")  # the class's own forward; grouped_mm has no float64
    assert largest_error(model.double(), loss_of, tokens(), ROWS) < 1e-6  # float32 in routers


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("frozen", ["", "gate_up_proj", "down_proj", "experts", "gate.weight"])
def test_frozen_in_part_and_any_implementation(frozen: str, implementation: str) -> None:
    model = tiny("Mixtral")
    model.set_experts_implementation(implementation)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    assert largest_error(model, loss_of, tokens(), ROWS) < 1e-3


def test_a_router_that_does_not_run_under_vmap_is_refused_by_name_unless_frozen() -> None:
    """Phi-MoE's router has an autograd function of its own."""
    model = tiny("Phimoe")
    with pytest.raises(dpkfc.PrivacyError, match=r"mlp.router' \(PhimoeTopKRouter\).*freeze it"):
        captured_grads(model, loss_of, tokens())
    for layer in model.model.layers:
        layer.mlp.router.requires_grad_(False)
    assert largest_error(model.eval(), loss_of, tokens(), ROWS) < 1e-3


def test_outputs_are_those_of_the_plain_model() -> None:
    model, batch = tiny("Mixtral"), tokens()
    plain = model(input_ids=batch["ids"]).logits
    capture = GradientCapture(model)
    torch.testing.assert_close(model(input_ids=batch["ids"]).logits, plain, rtol=1e-4, atol=1e-5)
    capture.remove()


def test_clipped_sums_through_the_whole_pipeline() -> None:
    model, batch = tiny("Mixtral"), tokens()
    grads = reference_grads(model, loss_of, batch, ROWS)
    clip = float(reference_norms(grads).median())
    got = private_sum(model, loss_of, batch, ROWS, clip)
    for name, want in reference_sum(grads, clip).items():
        torch.testing.assert_close(got[name].double(), want, rtol=1e-3, atol=1e-5 * clip)


def test_an_expert_that_no_token_of_a_sample_chose_has_no_gradient() -> None:
    """And zeros that fill up are not multiplied by what is not finite."""
    experts = tiny("Mixtral").model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj[3].fill_(float("inf"))
    model = Routed(experts)
    x = torch.randn(3, 2, 8)
    index = torch.tensor([[[0, 1], [0, 2]], [[4, 0], [4, 1]], [[1, 3], [2, 0]]])
    capture = GradientCapture(model)
    with capture.accumulating() as grads:
        model(x, index).square().sum((1, 2)).mean().backward()
    captured = grads.take().grads
    capture.remove()
    for key, grad in captured.items():
        (per_sample,) = grad.per_sample()
        assert key[0] is experts.gate_up_proj or key[0] is experts.down_proj
        used = [[True, True, True, False, False], [True, True, False, False, True]]
        assert (per_sample[:2].flatten(2).abs().sum(2) > 0).tolist() == used
        assert per_sample[:2].isfinite().all() and not per_sample[2].isfinite().all()


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        weights = torch.full(index.shape, 0.5).flatten(0, 1)
        return self.experts(x.flatten(0, 1), index.flatten(0, 1), weights).view_as(x)


def test_a_subclass_with_its_own_forward_is_not_recognised() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Other(MixtralExperts):
        def forward(self, *args: Tensor) -> Tensor:
            return 2 * super().forward(*args)

    config = transformers.MixtralConfig(**TINY)
    assert is_experts(MixtralExperts(config)) and not is_experts(Other(config))
    extended = MixtralExperts(config)
    extended.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    assert not is_experts(extended)
    assert [one.adapter for one in partition(nn.Sequential(Other(config)))] == [None]


def test_a_balancing_loss_over_all_tokens_is_refused() -> None:
    """The auxiliary loss counts how many tokens of the whole batch an expert received."""
    model = tiny("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = [{"ids": one} for one in torch.randint(1, VOCABULARY, (16, LENGTH))]

    def with_balance(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["ids"], labels=batch["ids"]).loss

    budget = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 2, "batch_size": 8}
    with pytest.raises(dpkfc.PrivacyError, match="mixes the records"):
        dpkfc.make_private(model, optimizer, records, loss=with_balance, **budget)
    model.config.output_router_logits = False
    dpkfc.make_private(model, optimizer, records, loss=with_balance, **budget).detach()
