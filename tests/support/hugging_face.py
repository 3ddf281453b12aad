"""A small GPT-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(tied: bool = True) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=17,
        n_positions=8,
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


def own_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The model's own loss; all samples have one length, so its mean is the mean over samples."""
    (tokens,) = batch
    return model(input_ids=tokens, labels=tokens).loss
