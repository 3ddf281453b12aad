"""The model's own loss decides what is learnt: labels are shifted where it shifts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertGenerationConfig,
    BertGenerationDecoder,
    BertLMHeadModel,
    CTRLConfig,
    CTRLLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    ReformerConfig,
    ReformerModelWithLMHead,
    XLNetConfig,
    XLNetLMHeadModel,
)

from flash_clipping.trainers.sample_losses import sample_losses
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import arguments, privacy

VOCABULARY, LENGTH, COUNTED = 13, 8, 11


class OfAnotherName(LlamaForCausalLM):
    """A subclass, as people write them."""


def bert(cls: Any = BertConfig) -> Any:
    return cls(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        is_decoder=True,
    )


def gpt(cls: Any, **settings: Any) -> Any:
    sizes = dict(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return cls(**(sizes | settings))


def llama(cls: Any = LlamaForCausalLM) -> Any:
    return cls(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def reformer() -> Any:
    return ReformerModelWithLMHead(
        ReformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            attention_head_size=8,
            num_attention_heads=2,
            attn_layers=["local"],
            feed_forward_size=32,
            local_attn_chunk_length=4,
            axial_pos_shape=(2, 4),
            axial_pos_embds_dim=(8, 8),
            is_decoder=True,
            max_position_embeddings=16,
        )
    )


def bart() -> Any:
    return BartForCausalLM(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=16,
        )
    )


def xlnet() -> Any:
    return XLNetLMHeadModel(
        XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=32)
    )


#: Models, and whether their own loss shifts labels.
FAMILIES: dict[str, tuple[Any, bool]] = {
    "GPT-2": (lambda: GPT2LMHeadModel(gpt(GPT2Config)), True),
    "OpenAI GPT": (lambda: OpenAIGPTLMHeadModel(gpt(OpenAIGPTConfig)), True),
    "BERT": (lambda: BertLMHeadModel(bert()), True),
    "CTRL": (lambda: CTRLLMHeadModel(gpt(CTRLConfig, dff=32)), True),
    "Reformer": (reformer, True),
    "BertGeneration": (lambda: BertGenerationDecoder(bert(BertGenerationConfig)), True),
    "Llama": (llama, True),
    "a subclass": (lambda: llama(OfAnotherName), True),
    "XLNet": (xlnet, False),
    "BART": (bart, False),
}


def counting(shifted: bool, size: int = 22) -> list[dict[str, Tensor]]:
    """Texts in which every token is the one before plus 1; of two lengths.

    ``shifted``: the model shifts labels, which are the inputs; otherwise they are the next tokens.
    """
    rows = []
    for start in range(size):
        length = LENGTH if start % 2 else LENGTH // 2
        ids = 2 + (start + torch.arange(length)) % COUNTED
        labels = ids if shifted else 2 + (ids - 1) % COUNTED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """On the right, with a mask, and labels of -100."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> Tensor:
        return torch.stack(
            [F.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows]
        )

    tokens = pad("input_ids", 0)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens > 0).long(),
        "labels": pad("labels", -100),
    }


def trainer(folder: Path, model: nn.Module, cls: Any = PrivateTrainer, **more: Any) -> Any:
    given: dict[str, Any] = {"train_dataset": counting(True), "data_collator": padded}
    settings = more.pop("args", {})
    return cls(
        model=model,
        args=arguments(
            folder,
            per_device_train_batch_size=11,
            gradient_accumulation_steps=1,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            max_grad_norm=1e4,
            **({"max_steps": 1} | settings),
        ),
        privacy=privacy(noise_multiplier=0.0),
        **(given | more),
    )


#: They call the loss function that another of these families calls.
ALIKE = {"OpenAI GPT", "CTRL", "BertGeneration", "a subclass"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in FAMILIES]
)
def test_the_loss_of_each_sample_is_the_models_own(tmp_path: Path, family: str) -> None:
    """Labels are shifted by models that shift them, and by no other."""
    build, shifted = FAMILIES[family]
    torch.manual_seed(0)
    model = build()
    if family == "Reformer":  # whose texts are padded by itself in evaluation only
        data = [row for row in counting(shifted, 44) if len(row["input_ids"]) == LENGTH]
    else:
        data = counting(shifted)
    private = trainer(tmp_path, model, train_dataset=data)
    private.train()
    model.eval()
    with torch.no_grad():
        batch = padded(data[:4])
        losses = private.compute_sample_losses(model, {**batch})
        own = [model(**padded([row])).loss for row in data[:4]]
        others = sample_losses(model(**batch), {"labels": batch["labels"]}, shift=not shifted)
    torch.testing.assert_close(losses, torch.stack(own), rtol=1e-5, atol=1e-6)
    assert (losses - others).abs().min() > 1e-3  # labels tell the two apart


class Scaled(LlamaForCausalLM):
    """Its own loss is another one."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = 3 * outputs.loss
        return outputs


class OverPadding(LlamaForCausalLM):
    """Its own loss is the model's for one sample, and less for one that is padded."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = outputs.loss * (labels != -100).float().mean()
        return outputs


@pytest.mark.parametrize(
    ("cls", "found"),
    [(Scaled, "for one sample of"), (OverPadding, "for a sample in a batch of two of")],
)
def test_a_loss_that_is_not_the_models(tmp_path: Path, cls: Any, found: str) -> None:
    """Both numbers, and the method to override; before any step."""
    torch.manual_seed(0)
    private = trainer(tmp_path, llama(cls))
    error = (
        rf"(?s)found a loss of 2\.\d+ {found} train_dataset, where {cls.__name__} itself has "
        r"\d\.\d+\..*class MyTrainer\(PrivateTrainer\):\n +def compute_sample_losses"
    )
    with raises("FC806", ValueError, match=error):
        private.train()
    assert private.run.steps == 0
    assert not hasattr(private.model, "autograd_grad_sample_hooks")


class OfItsOwn(PrivateTrainer):
    def compute_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        return 3 * super().compute_sample_losses(model, inputs)


def test_a_loss_of_ones_own_is_not_compared(tmp_path: Path) -> None:
    private = trainer(tmp_path, llama(), OfItsOwn)
    private.train()
    assert private.run.steps == 1


class Lossless(nn.Module):
    """Without a loss of its own, labels of tokens may mean two things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.config = LlamaConfig()

    def forward(self, input_ids: Tensor, labels: Any = None, **_: Any) -> dict[str, Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


def test_without_a_loss_of_its_own(tmp_path: Path) -> None:
    with raises("FC805", ValueError, match="model without a loss of its own.*compute_loss_func"):
        trainer(tmp_path, Lossless()).train()


def test_asking_leaves_no_trace(tmp_path: Path) -> None:
    """Modes of modules and random numbers are those of a run that does not ask."""
    model = GPT2LMHeadModel(gpt(GPT2Config))
    model.transformer.h[0].eval()
    private = trainer(tmp_path, model)
    private.get_train_dataloader()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    private._compare_with_own_loss()
    assert private._shifts
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert not model.transformer.h[0].training
