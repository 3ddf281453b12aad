"""Losses of single samples: each is what the model itself returns for a batch of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.trainer_pt_utils import LabelSmoother

from flash_clipping.trainers.sample_losses import sample_losses

B, T, VOCABULARY = 4, 6, 13
TOKENS = torch.randint(1, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))


def bert(cls: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        **settings,
    )
    return cls(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=T, n_embd=8, n_layer=1, n_head=1)
    return GPT2LMHeadModel(config).eval()


#: Different numbers of tokens that count; the last sample has none.
PADDED = TOKENS.clone()
for _row, _length in enumerate((6, 2, 4, 0)):
    PADDED[_row, _length:] = -100

CASES: dict[str, tuple[Any, dict[str, Tensor], bool]] = {
    "classes": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        {"labels": torch.tensor([0, 2, 1, 1])},
        False,
    ),
    "a number": (
        lambda: bert(BertForSequenceClassification, num_labels=1),
        {"labels": torch.tensor([0.5, 2.0, -1.0, 0.0])},
        False,
    ),
    "several numbers": (
        lambda: bert(BertForSequenceClassification, num_labels=2, problem_type="regression"),
        {"labels": torch.randn(B, 2)},
        False,
    ),
    "several classes at once": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        {"labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])},
        False,
    ),
    "tokens": (
        lambda: bert(BertForTokenClassification, num_labels=VOCABULARY),
        {"labels": PADDED},
        False,
    ),
    "next tokens": (gpt2, {"labels": PADDED}, True),
    "answers": (
        lambda: bert(BertForQuestionAnswering),
        {
            "start_positions": torch.tensor([0, 3, 5, 1]),
            "end_positions": torch.tensor([1, 5, 5, 2]),
        },
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_loss_is_the_models_own_for_one_sample(case: str) -> None:
    make, labels, shift = CASES[case]
    model = make()
    with torch.no_grad():
        losses = sample_losses(
            model(TOKENS), labels, shift=shift, problem_type=model.config.problem_type
        )
        for row in range(B):
            one = slice(row, row + 1)
            own = model(TOKENS[one], **{name: value[one] for name, value in labels.items()}).loss
            expected = own.nan_to_num(0.0)  # of no tokens at all
            torch.testing.assert_close(losses[row], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shift", [False, True])
def test_label_smoothing_is_that_of_transformers(shift: bool) -> None:
    logits = torch.randn(B, T, VOCABULARY)
    losses = sample_losses({"logits": logits}, {"labels": PADDED}, shift=shift, label_smoothing=0.2)
    for row in range(B - 1):
        one = slice(row, row + 1)
        own = LabelSmoother(epsilon=0.2)({"logits": logits[one]}, PADDED[one], shift_labels=shift)
        torch.testing.assert_close(losses[row], own, rtol=1e-6, atol=1e-6)


def test_an_answer_outside_of_the_text_counts_nothing() -> None:
    outputs = {"start_logits": torch.randn(2, T), "end_logits": torch.randn(2, T)}
    labels = {"start_positions": torch.tensor([T, 1]), "end_positions": torch.tensor([T + 3, 2])}
    assert (sample_losses(outputs, labels) > 0).tolist() == [False, True]


@pytest.mark.parametrize(
    ("outputs", "labels", "found"),
    [
        ({"logits": torch.zeros(2, 3)}, {"labels": torch.zeros(2, 5)}, "shape"),
        ({"logits": torch.zeros(2, 3)}, {"targets": torch.zeros(2)}, "targets"),
        ({"hidden": torch.zeros(2, 3)}, {"labels": torch.zeros(2)}, "hidden"),
        ({"logits": torch.zeros(2, 4, 3)}, {"labels": torch.zeros(2, 3).long()}, "shape"),
    ],
)
def test_other_labels_are_refused(outputs: Any, labels: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"{found}.*compute_loss_func"):
        sample_losses(outputs, labels)
