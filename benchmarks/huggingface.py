"""Hugging Face models as they are, with the sizes of models that people use and random weights.

Shapes are written as suffixes: B samples, T positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Workload, draw_images, draw_tokens


class Logits(nn.Module):
    """A Hugging Face model as a map from its one input to logits."""

    def __init__(self, model: nn.Module, argument: str, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.argument = argument
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.argument: x}, **self.options).logits


def causal_lm(
    name: str, kind: str, config: dict[str, Any], *, batch: int, seq: int, checkpointing: bool
) -> Workload:
    """A language model of this class of ``transformers``, trained on the next token."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**config, attn_implementation="sdpa")
        model = getattr(transformers, LANGUAGE_MODELS[kind])(made)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return Logits(model, "input_ids", use_cache=False)

    draw = functools.partial(draw_tokens, batch=batch, seq=seq, vocab=config["vocab_size"])
    return Workload(name, build, draw, batch=batch, positions=seq)


LANGUAGE_MODELS = {
    "Llama": "LlamaForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Qwen3Moe": "Qwen3MoeForCausalLM",
}


def qwen3_moe(
    name: str, *, batch: int = 4, seq: int = 2048, layers: int = 4, checkpointing: bool = False
) -> Workload:
    """Qwen3-30B-A3B with fewer layers: 128 experts, 8 for each token."""
    config = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return causal_lm(name, "Qwen3Moe", config, batch=batch, seq=seq, checkpointing=checkpointing)


def llama_1b(
    name: str, *, batch: int = 4, seq: int = 1024, layers: int = 16, checkpointing: bool = False
) -> Workload:
    """Llama 3.2 1B: grouped queries, SwiGLU, a vocabulary of 128k tied to the head."""
    config = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    return causal_lm(name, "Llama", config, batch=batch, seq=seq, checkpointing=checkpointing)


def gpt2_medium(
    name: str, *, batch: int = 8, seq: int = 1024, layers: int = 24, checkpointing: bool = False
) -> Workload:
    """GPT-2 medium without dropout, its embedding tied to the head."""
    config = {
        "vocab_size": 50257,
        "n_embd": 1024,
        "n_layer": layers,
        "n_head": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return causal_lm(name, "GPT2", config, batch=batch, seq=seq, checkpointing=checkpointing)


def bert_base(name: str, *, batch: int = 64, seq: int = 128, layers: int = 12) -> Workload:
    """A BERT-base classifier of two classes, without dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        return Logits(transformers.BertForSequenceClassification(config), "input_ids")

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(30522, (batch, seq), generator=generator)
        return ids, torch.randint(2, (batch,), generator=generator)

    return Workload(name, build, draw, batch=batch, positions=seq)


def vit_large(name: str, *, batch: int = 64, layers: int = 24) -> Workload:
    """ViT-L/16 on images of 224 by 224, without dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.ViTConfig(
            hidden_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=1000,
            attn_implementation="sdpa",
        )
        return Logits(transformers.ViTForImageClassification(config), "pixel_values")

    draw = functools.partial(draw_images, batch=batch, size=224, classes=1000)
    return Workload(name, build, draw, batch=batch, positions=197)
