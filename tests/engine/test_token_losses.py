"""Losses of tokens, in samples of different lengths: right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from flash_clipping import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
    per_sample_loss,
)
from tests.support.errors import raises
from tests.support.hugging_face import gpt2, tiny
from tests.support.oracle import assert_close, per_sample_truth
from tests.support.wrapping import WRAPPERS

LENGTHS = (2, 8, 3, 5)


def ragged(lengths: tuple[int, ...] = LENGTHS, T: int = 8) -> tuple[Tensor, Tensor]:
    """Ids and labels, which are the ids of as many tokens as the sample has."""
    tokens = torch.randint(17, (len(lengths), T))
    labels = tokens.clone()
    for b, length in enumerate(lengths):
        labels[b, length:] = -100
    return tokens, labels


def own_mean(shift: bool, reduction: str = "mean") -> Callable[..., Tensor]:
    """The loss of one sample, by hand."""

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, labels = batch
        logits = model(tokens).logits[0]
        labels = labels[0]
        if shift:
            logits, labels = logits[:-1], labels[1:]
        losses_T = F.cross_entropy(logits, labels, reduction="none")
        count = (labels != -100).sum() if reduction == "mean" else 1
        return (losses_T.sum() / count)[None]

    return losses


# -- the helper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [False, True])
def test_per_sample_loss_is_that_of_one_sample_at_a_time(shift: bool) -> None:
    logits = torch.randn(4, 8, 17, dtype=torch.float64)
    _, labels = ragged((2, 8, 3, 0))
    found = per_sample_loss(logits, labels, shift=shift)
    for b, length in enumerate((2, 8, 3)):
        begin = int(shift)
        expected = F.cross_entropy(logits[b, : length - begin], labels[b, begin:length])
        assert_close(found[b], expected, 1e-12)
    assert found[3] == 0
    longer = F.pad(logits, (0, 0, 0, 5)), F.pad(labels, (0, 5), value=-100)
    assert_close(per_sample_loss(*longer, shift=shift), found, 1e-12)


# -- the model's own loss --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapper, reduction, mode",
    [("wrapped", "mean", "one_pass"), ("hooks", "sum", "one_pass"), ("wrapped", "sum", "two_pass")],
)
def test_labels_of_a_causal_model(wrapper: str, reduction: str, mode: str) -> None:
    """``model(**batch, labels=labels).loss`` is of each sample's own tokens."""
    model = gpt2()
    tokens, labels = ragged()
    truth = per_sample_truth(model, (tokens, labels), own_mean(True))
    flash = WRAPPERS[wrapper](model, loss_reduction=reduction, mode=mode)
    called: Any = flash if wrapper == "wrapped" else model
    output = called(input_ids=tokens, labels=labels)
    expected = per_sample_loss(output.logits.float(), labels, shift=True)
    assert output.loss == (expected.mean() if reduction == "mean" else expected.sum())
    output.loss.backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-6)  # its loss is in fp32
    for name, grad in truth.clipped(1.0).items():
        assert_close(model.get_parameter(name).grad, grad, 1e-6, name)


def test_evaluation_has_the_models_own_loss() -> None:
    """The mean over all tokens, of which perplexity is made; and the model gets its own back."""
    model = gpt2()
    plain = copy.deepcopy(model)
    tokens, labels = ragged()
    wrapped = GradSampleModuleFlashClipping(model)
    with torch.no_grad():
        expected = plain(input_ids=tokens, labels=labels).loss
        assert wrapped(input_ids=tokens, labels=labels).loss == expected
    wrapped.disable_hooks()
    assert wrapped(input_ids=tokens, labels=labels).loss == expected
    wrapped.enable_hooks()
    assert wrapped(input_ids=tokens, labels=labels).loss != expected
    assert wrapped.to_standard_module()(input_ids=tokens, labels=labels).loss == expected
    assert vars(model).keys() == vars(plain).keys()


def test_one_long_sample_moves_the_sum_by_the_bound() -> None:
    """The trap, and that it is closed: a sample of 64 tokens among seven of 3 that are alike."""
    model = gpt2(positions=64).float()
    tokens, labels = ragged((64,) + (3,) * 7, T=64)
    tokens[1:], labels[1:, :3] = tokens[1], tokens[1, :3]
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=5.0)

    def change(loss: Callable[[Tensor, Tensor], Tensor], removed: int) -> float:
        sums = []
        for rows in (range(8), [b for b in range(8) if b != removed]):
            model.zero_grad(set_to_none=True)
            loss(tokens[rows], labels[rows]).backward()
            sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        return (sums[0] - sums[1]).norm().item() / 5.0

    def own(tokens: Tensor, labels: Tensor) -> Tensor:
        return flash(input_ids=tokens, labels=labels).loss

    def over_the_batch(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = flash(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    assert max(change(own, removed) for removed in (0, 1)) <= 1 + 1e-4
    assert change(over_the_batch, 0) > 2


@pytest.mark.parametrize("reduction, items", [("mean", 50), ("sum", 50), ("sum", torch.tensor(14))])
def test_a_number_of_items_is_refused(reduction: str, items: Any) -> None:
    flash = GradSampleModuleFlashClipping(gpt2(), loss_reduction=reduction)
    tokens, labels = ragged()
    with raises("FC442"):
        flash(input_ids=tokens, labels=labels, num_items_in_batch=items)
    with torch.no_grad():
        flash(input_ids=tokens, labels=labels, num_items_in_batch=items)


# -- losses that are refused, and the lines that help ----------------------------------------------


@pytest.mark.parametrize("wrapper, kind", [("wrapped", "T5"), ("hooks", "BertForMaskedLM")])
def test_a_mean_over_the_batch_is_refused(wrapper: str, kind: str) -> None:
    """And the two lines of the message are exact, with the same labels in the same call."""
    model = tiny(kind)
    tokens, labels = ragged()
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if kind == "T5" else {})
    expected = []
    for b in range(len(tokens)):
        model.zero_grad()
        one = {name: ids[b : b + 1] for name, ids in given.items()}
        F.cross_entropy(model(**one).logits[0], labels[b]).backward()
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        expected.append(torch.stack(squares).sum().sqrt())
    model.zero_grad()
    flash = WRAPPERS[wrapper](model)
    called: Any = flash if wrapper == "wrapped" else model
    for options in ({}, {"return_dict": False}):
        loss = called(**given, labels=labels, **options)[0]
        with raises("FC440", match=r"labels \(4, 8\) is.* over the labels"):
            (2 * loss).backward()
        assert all(p.grad is None for p in model.parameters())
    output = called(**given, labels=labels)
    per_sample_loss(output, labels).mean().backward()
    assert_close(flash.get_norm_sample(), torch.stack(expected), 1e-9)


def test_a_balance_of_the_batch_is_refused() -> None:
    model = tiny("MixtralForCausalLM")
    wrapped = GradSampleHooksFlashClipping(model)
    tokens = torch.randint(17, (3, 4))
    loss = model(input_ids=tokens, labels=tokens, output_router_logits=True).loss
    with raises("FC440", match="aux_loss, which balances"):
        loss.backward()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert wrapped.get_norm_sample().shape == (3,)


# -- models of transformers inside of others, and what else divides losses -------------------------


class Inside(nn.Module):
    """A user's module around a model of transformers, which returns its output or its loss."""

    def __init__(self, model: nn.Module, loss_alone: bool) -> None:
        super().__init__()
        self.model, self.loss_alone = model, loss_alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        return output.loss if self.loss_alone else output


def own_loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


@pytest.mark.every_pair
@pytest.mark.parametrize("mode, found", [("one_pass", "FC440"), ("two_pass", "FC444")])
@pytest.mark.parametrize("loss_alone", [False, True])
@pytest.mark.parametrize("kind", ["T5", "BertForMaskedLM"])
def test_a_mean_over_the_batch_inside_of_a_module(
    kind: str, loss_alone: bool, mode: Any, found: str
) -> None:
    """Its samples have as many labels here, those of another batch need not."""
    flash = GradSampleModuleFlashClipping(Inside(tiny(kind), loss_alone), mode=mode)
    tokens = torch.randint(1, 17, (4, 8))
    output = flash(input_ids=tokens, labels=tokens)
    with raises(found):
        own_loss_of(output).backward()


def test_labels_by_position_are_found() -> None:
    flash = GradSampleModuleFlashClipping(tiny("BertForMaskedLM"))
    tokens = torch.randint(17, (4, 8))
    loss = flash(tokens, None, None, None, None, None, None, tokens).loss
    with raises("FC440", match=r"the model: its.*of labels \(4, 8\)"):
        loss.backward()


def test_a_compiled_model_is_compared() -> None:
    """No hook sees the arguments of what is compiled: the look before the first step does."""
    model = torch.compile(tiny("BertForMaskedLM"), backend="eager")
    flash = GradSampleModuleFlashClipping(Inside(model, True))
    tokens = torch.randint(1, 17, (4, 8))
    with raises("FC444", match="output 0"):
        own_loss_of(flash(input_ids=tokens, labels=tokens)).backward()


@pytest.mark.parametrize("loss_alone", [False, True])
def test_labels_of_a_causal_model_inside_of_a_module(loss_alone: bool) -> None:
    """Each sample's own tokens, as of a model by itself."""
    model = gpt2()
    tokens, labels = ragged()
    truth = per_sample_truth(model, (tokens, labels), own_mean(True))
    flash = GradSampleModuleFlashClipping(Inside(model, loss_alone))
    own_loss_of(flash(input_ids=tokens, labels=labels)).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-6)


def of_series() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=8,
        context_length=4,
        lags_sequence=[1],
        num_time_features=1,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        dropout=0.1,
    )
    past, future = torch.rand(4, 5, 1), torch.rand(4, 8, 1)
    return transformers.TimeSeriesTransformerForPrediction(config), {
        "past_values": past[..., 0],
        "past_time_features": past,
        "past_observed_mask": torch.ones(4, 5),
        "future_values": future[..., 0],
        "future_time_features": future,
        "future_observed_mask": torch.ones(4, 8),
    }


def of_patches() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=16,
        patch_size=4,
        encoder_stride=4,
    )
    hidden = torch.ones(4, 16, dtype=torch.bool)
    model = transformers.ViTForMaskedImageModeling(config)
    return model, {"pixel_values": torch.randn(4, 3, 16, 16), "bool_masked_pos": hidden}


@pytest.mark.parametrize("make", [of_series, of_patches])
@pytest.mark.parametrize("inside", [False, True])
def test_a_mean_over_a_mask_is_refused(make: Callable[..., Any], inside: bool) -> None:
    """Which counts as many entries of all samples here."""
    torch.manual_seed(0)
    model, batch = make()
    flash = GradSampleModuleFlashClipping(Inside(model, True) if inside else model)
    with raises("FC444", match="output 0"):
        own_loss_of(flash(**batch)).backward()
