"""Losses of samples that belong together: pairs are units; what a whole batch shares is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from flash_clipping import Documents, FlashLoss, GradSampleModuleFlashClipping
from flash_clipping.diagnostics import check
from flash_clipping.engine.optimizer import FlashDPOptimizer
from tests.support.errors import raises
from tests.support.hugging_face import gpt2
from tests.support.oracle import assert_close

PAIRS, T, BETA = 3, 8, 0.7


def log_likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    """``[R]``, over each row's own labels; the first of them are a prompt, which does not count."""
    targets = labels[:, 1:]
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (chosen * (targets != -100)).sum(1)


def preference_losses(logits: Tensor, labels: Tensor, frozen_R: Tensor) -> Tensor:
    """DPO: ``[pairs]``, of rows that are first all chosen ones, then all rejected ones."""
    gain_R = log_likelihoods(logits, labels) - frozen_R
    chosen, rejected = gain_R.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected))


def pairs() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model, ids and labels of answers of different lengths, and a frozen model's likelihoods."""
    model = gpt2()
    ids = torch.randint(17, (2 * PAIRS, T))
    labels = ids.clone()
    labels[:, :2] = -100
    for row in range(2 * PAIRS):
        labels[row, 3 + row % 5 :] = -100
    frozen = copy.deepcopy(model)
    with torch.no_grad():
        for param in frozen.parameters():
            param += 0.1 * torch.randn_like(param)
        return model, ids, labels, log_likelihoods(frozen(ids).logits, labels)


def one_pair_at_a_time(
    model: nn.Module, ids: Tensor, labels: Tensor, frozen_R: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Norms of the pairs, and the sum of what a bound of the median norm leaves of them."""
    gradients = []
    for pair in range(PAIRS):
        rows = torch.tensor([pair, PAIRS + pair])
        losses = preference_losses(model(ids[rows]).logits, labels[rows], frozen_R[rows])
        gradients.append(torch.autograd.grad(losses.sum(), [*model.parameters()]))
    norms = torch.stack([torch.cat([g.flatten() for g in pair]).norm() for pair in gradients])
    coefs = (norms.median() / norms).clamp(max=1.0)
    return norms, [
        sum(coef * g for coef, g in zip(coefs, of_param, strict=True))  # type: ignore[misc]
        for of_param in zip(*gradients, strict=True)
    ]


@pytest.mark.parametrize("criterion", [False, True])
def test_preference_pairs_are_units(criterion: bool) -> None:
    """DPO through ``Documents``: a pair is clipped once, by the norm over both of its rows."""
    model, ids, labels, frozen_R = pairs()
    norms, sums = one_pair_at_a_time(model, ids, labels, frozen_R)
    wrapped = GradSampleModuleFlashClipping(
        model, unit=Documents("pair"), loss_reduction="sum", max_grad_norm=norms.median().item()
    )
    number = torch.arange(PAIRS).repeat(2)
    logits = wrapped(ids, pair=number).logits
    if criterion:

        class Preference(nn.Module):
            reduction = "sum"

            def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
                return preference_losses(logits, labels, frozen_R)

        optimizer = FlashDPOptimizer(
            torch.optim.SGD(model.parameters()),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=PAIRS,
            loss_reduction="sum",
        )
        FlashLoss(wrapped, optimizer, Preference(), "sum")(logits, labels).backward()
    else:
        preference_losses(logits, labels, frozen_R).sum().backward()
    assert_close(wrapped.get_norm_sample(), norms, 1e-9)
    for param, expected in zip(model.parameters(), sums, strict=True):
        assert_close(param.grad, expected, 1e-5)  # Opacus adds 1e-6 to norms


def test_removing_a_pair_moves_the_sum_by_the_bound() -> None:
    model, ids, labels, frozen_R = pairs()
    wrapped = GradSampleModuleFlashClipping(
        model, unit=Documents("pair"), loss_reduction="sum", max_grad_norm=0.5
    )

    def clipped_sum(kept: list[int]) -> Tensor:
        rows = torch.tensor([*kept, *(PAIRS + pair for pair in kept)])
        number = torch.arange(len(kept)).repeat(2)
        model.zero_grad(set_to_none=True)
        logits = wrapped(ids[rows], pair=number).logits
        preference_losses(logits, labels[rows], frozen_R[rows]).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = clipped_sum([0, 1, 2])
    for kept in ([1, 2], [0, 2], [0, 1]):
        assert (whole - clipped_sum(kept)).norm() <= 0.5 * (1 + 1e-4)


class TwoTowers(nn.Module):
    """CLIP in small: what is returned are embeddings, or similarities of the batch."""

    def __init__(self, similarities: bool):
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.similarities = similarities

    def forward(self, image: Tensor, text: Tensor) -> Any:
        image, text = F.normalize(self.image(image)), F.normalize(self.text(text))
        return image @ text.T if self.similarities else (image, text)


def contrastive(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(*batch)
    similarities = found if isinstance(found, Tensor) else found[0] @ found[1].T
    return F.cross_entropy(similarities, torch.arange(len(similarities)))


@pytest.mark.parametrize("similarities", [False, True])
def test_in_batch_negatives_are_found_by_the_check(similarities: bool) -> None:
    report = check(TwoTowers(similarities), (torch.randn(4, 4), torch.randn(4, 5)), contrastive)
    assert not report.passed
    assert any("depends on the other samples" in failure for failure in report.failures)
    assert any("samples are not independent" in failure for failure in report.failures)


def clip() -> Any:
    shared = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.CLIPConfig(
        text_config=shared | dict(vocab_size=17, max_position_embeddings=8, eos_token_id=16),
        vision_config=shared | dict(image_size=4, patch_size=2),
        projection_dim=4,
    )
    torch.manual_seed(0)
    return transformers.CLIPModel(config).double()


def test_the_loss_of_clip_is_refused() -> None:
    """``return_loss=True``; with the scale frozen, which every pair of samples shares."""
    model = clip()
    model.logit_scale.requires_grad_(False)
    wrapped = GradSampleModuleFlashClipping(model)
    batch = {
        "input_ids": torch.randint(16, (3, 8)),
        "pixel_values": torch.randn(3, 3, 4, 4, dtype=torch.float64),
    }
    loss = wrapped(**batch, return_loss=True).loss
    with raises("FC440", match="return_loss=True"):
        loss.backward()
