"""Small models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(tied: bool = True, positions: int = 8) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=17,
        n_positions=positions,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double().train()


def llama(**options: Any) -> Any:
    """A small Llama in float64."""
    small = {
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small | options)).double()


def tiny(kind: str) -> Any:
    """A model of this class, in float64, without dropout; 17 tokens, 3 classes."""
    shared = {"vocab_size": 17, "num_hidden_layers": 1, "attn_implementation": "eager"}
    if kind == "T5":
        config = transformers.T5Config(
            vocab_size=17,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
        model: Any = transformers.T5ForConditionalGeneration
    elif kind.startswith("Bert"):
        config = transformers.BertConfig(
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=8,
            num_labels=3,
            **shared,
        )
        model = getattr(transformers, kind)
    else:
        config = transformers.MixtralConfig(
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=3,
            experts_implementation="eager",
            **shared,
        )
        model = transformers.MixtralForCausalLM
    torch.manual_seed(0)
    return model(config).double().train()


def own_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The model's own loss; samples have one length: its mean over tokens is that over samples."""
    (tokens,) = batch
    return model(input_ids=tokens, labels=tokens).loss
