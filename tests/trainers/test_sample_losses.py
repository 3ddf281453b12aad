"""Losses of single samples: each is what the model itself returns for a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    BeitConfig,
    BeitForMaskedImageModeling,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ParakeetCTCConfig,
    ParakeetForCTC,
    ViTConfig,
    ViTForMaskedImageModeling,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.trainer_pt_utils import LabelSmoother

from flash_clipping.trainers.sample_losses import sample_losses
from tests.support.errors import raises

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
        losses = sample_losses(model(TOKENS), labels, model=model, shift=shift)
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


def test_ctc_is_that_of_the_model() -> None:
    """Of signals and texts of different length, one at a time."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=VOCABULARY,
        pad_token_id=0,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        conv_dim=(8,),
        conv_kernel=(4,),
        conv_stride=(4,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=2,
    )
    model = Wav2Vec2ForCTC(config).eval()
    signals = torch.randn(3, 80)
    mask = (torch.arange(80) < torch.tensor([80, 60, 44])[:, None]).long()
    for reduction in ("sum", "mean"):
        model.config.ctc_loss_reduction = reduction
        inputs = {"input_values": signals, "attention_mask": mask}
        with torch.no_grad():
            losses = sample_losses(
                model(**inputs), {"labels": PADDED[:3]}, model=model, inputs=inputs
            )
            for row in range(3):
                one = {name: value[row : row + 1] for name, value in inputs.items()}
                own = model(**one, labels=PADDED[row : row + 1]).loss
                torch.testing.assert_close(losses[row], own, rtol=1e-5, atol=1e-5)


def test_ctc_of_labels_with_blanks_behind_them_is_that_of_the_model() -> None:
    """Parakeet: labels end in blanks, and its encoder makes fewer frames by a rule of its own."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = ParakeetCTCConfig(
        vocab_size=VOCABULARY, pad_token_id=0, encoder_config=sizes, ctc_loss_reduction="sum"
    )
    model = ParakeetForCTC(config).eval()
    mask = (torch.arange(80) < torch.tensor([80, 60, 48])[:, None]).long()
    inputs = {"input_features": torch.randn(3, 80, 80), "attention_mask": mask}
    labels = torch.tensor([[1, 2, 3], [4, 3, 0], [3, 0, 0]])
    with torch.no_grad():
        losses = sample_losses(model(**inputs), {"labels": labels}, model=model, inputs=inputs)
        for row in range(3):
            one = {name: value[row : row + 1] for name, value in inputs.items()}
            own = model(**one, labels=labels[row : row + 1]).loss
            torch.testing.assert_close(losses[row], own, rtol=1e-5, atol=1e-5)


IMAGE: dict[str, Any] = dict(image_size=8, patch_size=2, num_channels=3, hidden_size=16)
IMAGE |= dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
MASKED: dict[str, Callable[[], Any]] = {
    "ViT": lambda: ViTForMaskedImageModeling(ViTConfig(encoder_stride=2, **IMAGE)),
    "BEiT": lambda: BeitForMaskedImageModeling(
        BeitConfig(use_mask_token=True, vocab_size=VOCABULARY, **IMAGE)
    ),
    "ViTMAE": lambda: ViTMAEForPreTraining(
        ViTMAEConfig(decoder_hidden_size=16, decoder_num_attention_heads=2, **IMAGE)
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_images_are_refused(name: str) -> None:
    hidden = torch.arange(16) % 5 < torch.arange(1, 4)[:, None]
    inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "bool_masked_pos": hidden}
    labels = {"labels": torch.zeros(int(hidden.sum()), dtype=torch.long)} if name == "BEiT" else {}
    if name == "ViTMAE":
        del inputs["bool_masked_pos"]
    model = MASKED[name]()
    with raises("FC805", ValueError, match=r"override compute_sample_losses\(model, inputs\)"):
        sample_losses(model(**inputs), labels, model=model, inputs=inputs)


def test_replaced_tokens_are_those_of_the_model() -> None:
    """A 0 or 1 for each token; padding is left out by the mask."""
    torch.manual_seed(0)
    logits, mask = torch.randn(3, T), (torch.arange(T) < torch.tensor([6, 4, 2])[:, None]).long()
    target = torch.randint(0, 2, (3, T)).masked_fill(mask == 0, -100)
    losses = sample_losses({"logits": logits}, {"labels": target}, inputs={"attention_mask": mask})
    for row, length in enumerate((6, 4, 2)):
        own = F.binary_cross_entropy_with_logits(logits[row, :length], target[row, :length].float())
        torch.testing.assert_close(losses[row], own)


def test_losses_of_documents_and_of_rows_of_one_unit() -> None:
    logits, tokens = torch.randn(1, 7, VOCABULARY), torch.randint(0, VOCABULARY, (1, 7))
    index = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    losses = sample_losses({"logits": logits}, {"labels": tokens}, shift=True, units=(index, 3))
    first = F.cross_entropy(logits[0, :2], tokens[0, 1:3])
    second = F.cross_entropy(logits[0, 3:4], tokens[0, 4:5])
    torch.testing.assert_close(losses, torch.stack([first, second, torch.zeros(())]))
    rows = sample_losses(
        {"logits": logits[0]}, {"labels": tokens[0]}, units=(torch.tensor([1, 0] * 3 + [-1]), 2)
    )
    each = F.cross_entropy(logits[0], tokens[0], reduction="none")[:6]
    torch.testing.assert_close(rows, torch.stack([each[1::2].mean(), each[::2].mean()]))


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
    with raises("FC805", ValueError, match=rf"{found}.*compute_loss_func"):
        sample_losses(outputs, labels)
