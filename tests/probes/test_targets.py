"""The probe loss: one number per probe, by its formula, against targets of the right form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dpkfc.probes.probe import Probes
from dpkfc.probes.targets import probe_losses
from dpkfc.probes.tokens import Tokens

IMAGES = Probes(torch.zeros(5, 3, 4, 4))


def losses(
    loss: Any, output: Any, probes: Probes = IMAGES, seed: int = 0, **options: Any
) -> Tensor:
    return probe_losses(loss, output, probes, torch.Generator().manual_seed(seed), **options)


def text(rows: int, length: int = 8, **options: Any) -> Probes:
    return Tokens(30, length, pad=0, **options).draw(rows, torch.Generator().manual_seed(3))


def logits_that_tell(classes: int, *shape: int) -> Tensor:
    """Logits [*shape, classes] with loss k + const for class k: the loss reveals the target."""
    return (-torch.arange(classes, dtype=torch.float32)).expand(*shape, classes).clone()


def cost(classes: int) -> Tensor:
    return -torch.log_softmax(logits_that_tell(classes)[None], dim=1)[0]


def revealed(values: Tensor, classes: int) -> Tensor:
    """The class of each loss."""
    distance, found = (values[..., None] - cost(classes)).abs().min(-1)
    assert distance.max() < 1e-4
    return found


def test_classes_are_uniform() -> None:
    values = losses("cross_entropy", logits_that_tell(10, 5000), Probes(torch.zeros(5000, 2)))
    assert values.shape == (5000,)
    assert chisquare(torch.bincount(revealed(values, 10), minlength=10).numpy()).pvalue > 1e-3


def test_gradients_are_per_sample() -> None:
    """softmax(z) - e_y with no 1/B: each row sums to 0 and has one entry below 0."""
    logits = torch.zeros(5, 4, requires_grad=True)
    losses("cross_entropy", logits).sum().backward()
    assert logits.grad.sort(1).values.allclose(torch.tensor([-0.75, 0.25, 0.25, 0.25]).expand(5, 4))


def test_classes_of_images_are_in_dimension_one() -> None:
    logits = logits_that_tell(3, 5, 2, 2).movedim(-1, 1)  # [5, 3, 2, 2]
    values = losses("cross_entropy", logits, classes=3)
    middle = values * 4 - 4 * cost(3)[0]  # the sum of four whole targets
    assert (
        values.shape == (5,)
        and (middle - middle.round()).abs().max() < 1e-4
        and len(values.unique()) > 1
    )
    alike = logits_that_tell(3, 5, 7).movedim(
        -1, 1
    )  # [5, 3, 7]: three dimensions, but no token ids
    assert losses("cross_entropy", alike, Probes(torch.zeros(5, 1, 7)), classes=3).shape == (5,)


def test_classes_of_tokens_are_in_the_last_dimension_and_padding_does_not_count() -> None:
    probes = text(40)
    active = probes.inputs["attention_mask"]
    assert 0 < active.sum() < active.numel()
    logits = logits_that_tell(6, 40, 8)
    logits[active == 0] = 1e4 * torch.randn(6)  # would be seen at once
    logits.requires_grad_()
    values = losses("cross_entropy", logits, probes, classes=6)
    total = (values.detach() - cost(6)[0]) * active.sum(1)
    assert (total - total.round()).abs().max() < 1e-3 and len(values.unique()) > 5
    values.sum().backward()
    assert (logits.grad.abs().sum(2) > 0).equal(active == 1)


def test_one_output_a_sequence_is_plain_classification() -> None:
    values = losses("cross_entropy", logits_that_tell(8, 40), text(40, length=8))
    assert set(revealed(values, 8).tolist()) <= set(range(8))


@pytest.mark.parametrize("probes", [text(9), text(9, mask=None), text(9, mask="keep", ids="words")])
def test_padding_is_known_however_the_mask_is_called(probes: Probes) -> None:
    logits = torch.randn(9, 8, 5, requires_grad=True)
    losses("cross_entropy", logits, probes).sum().backward()
    assert (logits.grad.abs().sum(2) > 0).equal(probes.active) and not probes.active.all()


def test_an_attention_mask_of_public_records_counts() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    probes = Probes({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": mask})
    logits = torch.randn(2, 3, 5, requires_grad=True)
    losses("cross_entropy", logits, probes).sum().backward()
    assert (logits.grad.abs().sum(2) > 0).equal(mask == 1)


def test_public_targets_are_used() -> None:
    targets = torch.tensor([4, 0, 2, 2, -100])
    values = losses("cross_entropy", logits_that_tell(6, 5), Probes(torch.zeros(5, 2), targets))
    assert values[:4].allclose(cost(6)[targets[:4]]) and values[4] == 0
    tokens = Probes(torch.ones(1, 3, dtype=torch.long), torch.tensor([[5, -100, 1]]))
    for loss in ("cross_entropy", "masked_lm"):
        assert losses(loss, logits_that_tell(6, 1, 3), tokens).allclose(
            (cost(6)[5] + cost(6)[1]) / 2
        )


def test_mse_is_a_sum_of_squares_to_standard_normal_targets() -> None:
    """(z - y)² with y ~ N(0, 1) has mean z² + 1 and gradient 2 (z - y)."""
    outputs = torch.full((4000, 3), 2.0, requires_grad=True)
    values = losses("mse", outputs, Probes(torch.zeros(4000, 1)))
    assert values.shape == (4000,) and values.mean().item() == pytest.approx(3 * 5, rel=0.03)
    values.sum().backward()
    targets = 2.0 - outputs.grad / 2
    assert targets.mean().abs() < 0.03 and targets.std().item() == pytest.approx(1, abs=0.03)
    assert losses("mse", torch.randn(5)).shape == (5,)  # one number per sample
    column = Probes(torch.zeros(2, 1), torch.tensor([1.0, 5.0]))
    assert losses("mse", torch.tensor([[3.0], [3.0]]), column).tolist() == [4, 4]
    assert losses("mse", torch.tensor([[3.0], [4.0]]), column).tolist() == [4, 1]


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_padded_outputs_do_not_count_in_sums(loss: str) -> None:
    probes, outputs = text(9), torch.randn(9, 8, 2, requires_grad=True)
    losses(loss, outputs, probes).sum().backward()
    assert (outputs.grad.abs().sum(2) > 0).equal(probes.active)


def test_bce_has_fair_bits_for_targets() -> None:
    outputs = torch.full((3000, 4), 1.0, requires_grad=True)
    values = losses("bce", outputs, Probes(torch.zeros(3000, 1)), classes=4)
    values.sum().backward()
    bits = torch.sigmoid(torch.tensor(1.0)) - outputs.grad  # the gradient is s(z) - y
    assert bits.round().unique().tolist() == [0, 1] and bits.mean().item() == pytest.approx(
        0.5, abs=0.02
    )
    ones = bits.round().sum(1)
    assert values.detach().allclose(0.313262 * ones + 1.313262 * (4 - ones), atol=1e-4)
    for shape in ((5, 1), (5,)):  # one output stands for two classes
        assert losses("bce", torch.zeros(shape), classes=2).tolist() == pytest.approx(
            [0.6931472] * 5
        )
    given = Probes(torch.zeros(2, 1), torch.tensor([[1, 0], [0, 0]]))
    assert losses("bce", torch.full((2, 2), 1.0), given).tolist() == pytest.approx(
        [1.626523, 2.626523]
    )


def test_masked_lm_asks_for_15_percent_of_the_active_positions() -> None:
    probes = text(200, length=40)
    logits = torch.zeros(200, 40, 30, requires_grad=True)
    losses("masked_lm", logits, probes).sum().backward()
    asked = logits.grad.abs().sum(2) > 0
    lengths = probes.active.sum(1)
    assert not (asked & ~probes.active).any() and lengths.min() < 4 and lengths.max() > 30
    assert (asked.sum(1) - (0.15 * lengths).clamp(min=1)).abs().max() < 0.501 and asked.any(1).all()
    assert asked[:, 0].any() and asked.sum(0)[:5].min() > 0  # any position may be asked for
    targets = logits.grad.argmin(2)[asked]
    assert len(targets.unique()) > 25 and targets.max() < 30
    # the mean over the positions asked for, not the sum
    assert losses("masked_lm", torch.zeros(200, 40, 30), probes).allclose(torch.tensor(3.4011974))


def test_masked_lm_without_a_mask_asks_anywhere() -> None:
    logits = torch.zeros(50, 10, 30, requires_grad=True)
    losses("masked_lm", logits, Probes(torch.ones(50, 10, dtype=torch.long))).sum().backward()
    asked = logits.grad.abs().sum(2) > 0
    assert (asked.sum(1) == 2).all() and asked.any(0).all()


def test_next_token_predicts_the_probes_themselves() -> None:
    ids, mask = (
        torch.tensor([[3, 1, 2, 0], [5, 4, 0, 0], [1, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]),
    )
    probes = Probes({"input_ids": ids, "attention_mask": mask})
    values = losses("next_token", logits_that_tell(6, 3, 4), probes)
    assert values.allclose(
        torch.stack([(cost(6)[1] + cost(6)[2]) / 2, cost(6)[4], torch.tensor(0.0)])
    )
    logits = torch.randn(3, 4, 6, requires_grad=True)
    losses("next_token", logits, probes).sum().backward()
    assert (logits.grad.abs().sum(2) > 0).int().tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    own = Probes(ids, targets=torch.tensor([[9, 0, 0, 0]] * 3))
    assert losses("next_token", logits_that_tell(6, 3, 4), own).allclose(cost(6)[0])


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(5, 4),
        (torch.zeros(5, 4), torch.ones(5, 9)),
        {"hidden": torch.ones(5, 9), "logits": torch.zeros(5, 4)},
        SimpleNamespace(logits=torch.zeros(5, 4), hidden=None),
        torch.zeros(5, 4, dtype=torch.bfloat16),
    ],
    ids=["tensor", "tuple", "dict", "object", "bfloat16"],
)
def test_logits_are_found_in_what_models_return(output: Any) -> None:
    values = losses("cross_entropy", output)
    assert values.tolist() == pytest.approx([1.3862944] * 5) and values.dtype == torch.float32


def test_hugging_face_outputs_have_logits() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = outputs.SequenceClassifierOutput(logits=torch.zeros(5, 4))
    assert losses("cross_entropy", found).shape == (5,)
    with pytest.raises(TypeError, match=r"returned BaseModelOutput without logits: pass loss="):
        losses("cross_entropy", outputs.BaseModelOutput(last_hidden_state=torch.zeros(5, 4)))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce", "masked_lm"])
def test_targets_follow_the_generator_alone(loss: str) -> None:
    probes = text(20, min_length=8)
    logits = torch.randn(20, 8, 7)
    torch.manual_seed(1)
    first = losses(loss, logits, probes, seed=5)
    torch.manual_seed(2)
    assert losses(loss, logits, probes, seed=5).equal(first) and not losses(
        loss, logits, probes, seed=6
    ).equal(first)


def test_a_loss_of_the_users_own_sees_everything() -> None:
    generator = torch.Generator()

    def own(output: Any, probes: Probes, given: torch.Generator) -> Tensor:
        assert output == "anything" and probes is IMAGES and given is generator
        return torch.arange(5.0)

    assert probe_losses(own, "anything", IMAGES, generator).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("loss", "output", "probes", "options", "error", "message"),
    [
        (
            lambda *_: torch.tensor(1.0),
            None,
            IMAGES,
            {},
            ValueError,
            r"returned torch.float32 of shape \(\) for 5 probes.*\(5,\)",
        ),
        (lambda *_: torch.ones(5, 1), None, IMAGES, {}, ValueError, r"of shape \(5, 1\)"),
        (lambda *_: torch.ones(5).long(), None, IMAGES, {}, ValueError, r"returned torch.int64"),
        (lambda *_: 1.0, None, IMAGES, {}, TypeError, r"loss= returned float for 5 probes"),
        (
            "hinge",
            torch.zeros(5, 4),
            IMAGES,
            {},
            ValueError,
            r"loss='hinge': give one of cross_entropy, mse",
        ),
        (
            "cross_entropy",
            torch.zeros(5, 4),
            IMAGES,
            {"classes": 10},
            ValueError,
            r"classes=10, but the model's output has 4",
        ),
        (
            "bce",
            torch.zeros(5, 4),
            IMAGES,
            {"classes": 2},
            ValueError,
            r"classes=2, but the model's output has 4",
        ),
        (
            "masked_lm",
            torch.zeros(5, 8, 30),
            text(5),
            {"classes": 31},
            ValueError,
            r"classes=31.*has 30",
        ),
        (
            "next_token",
            torch.zeros(5, 8, 30),
            text(5),
            {"classes": 31},
            ValueError,
            r"classes=31.*has 30",
        ),
        (
            "cross_entropy",
            torch.zeros(5, 1),
            IMAGES,
            {},
            ValueError,
            r"two or more classes.*\(5, 1\): use loss='bce'",
        ),
        ("cross_entropy", torch.zeros(5), IMAGES, {}, ValueError, r"two or more classes"),
        ("cross_entropy", "text", IMAGES, {}, TypeError, r"returned str without logits"),
        (
            "cross_entropy",
            torch.zeros(()),
            IMAGES,
            {},
            ValueError,
            r"shape \(\) for 5 probes: the leading dimension",
        ),
        ("mse", torch.zeros(4, 3), IMAGES, {}, ValueError, r"shape \(4, 3\) for 5 probes"),
        (
            "masked_lm",
            torch.zeros(5, 4),
            IMAGES,
            {},
            ValueError,
            r"shape \(5, 4\) and no token ids: use Tokens",
        ),
        (
            "next_token",
            torch.zeros(5, 9, 30),
            text(5),
            {},
            ValueError,
            r"\(5, 9, 30\) and ids of shape \(5, 8\)",
        ),
        (
            "next_token",
            torch.zeros(5, 1, 30),
            text(5, length=1),
            {},
            ValueError,
            r"length 1 have no next token: raise",
        ),
        (
            "next_token",
            torch.zeros(1, 2, 9),
            Probes(torch.ones(1, 2).long(), torch.ones(1)),
            {},
            ValueError,
            r"one target per token",
        ),
        (
            "cross_entropy",
            torch.zeros(2, 9),
            Probes(torch.ones(2, 2), torch.tensor([1, 9])),
            {},
            ValueError,
            r"to 9, but .* 9 c",
        ),
        (
            "cross_entropy",
            torch.zeros(2, 9),
            Probes(torch.ones(2, 2), torch.tensor([-1, 0])),
            {},
            ValueError,
            r"from -1 to 0",
        ),
        (
            "cross_entropy",
            torch.zeros(2, 9),
            Probes(torch.ones(2, 2), torch.ones(2)),
            {},
            ValueError,
            r"float32.*class ids",
        ),
        (
            "cross_entropy",
            torch.zeros(2, 9),
            Probes(torch.ones(2, 2), torch.ones(2, 9).long()),
            {},
            ValueError,
            r"of shape \(2,\)",
        ),
        (
            "mse",
            torch.zeros(2, 3),
            Probes(torch.ones(2, 2), torch.ones(2)),
            {},
            ValueError,
            r"targets have shape \(2,\).*\(2, 3\)",
        ),
        (
            "bce",
            torch.zeros(2, 3),
            Probes(torch.ones(2, 2), torch.ones(2)),
            {},
            ValueError,
            r"targets have shape \(2,\).*\(2, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    loss: Any, output: Any, probes: Probes, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        losses(loss, output, probes, **options)
