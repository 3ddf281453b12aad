"""Hugging Face's GPT-2: tied weights, its own loss, its checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.autograd import (
    Loss,
    check_by_autograd,
    check_with_dropout,
    id_batch,
    mean_squares,
)
from tests.support.hugging_face import gpt2, own_loss
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


def outer_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = batch
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", [own_loss, outer_loss])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gpt2(wrapper: str, loss: Loss, tied: bool, mode: str) -> None:
    """GPT-2 with its head tied to the token embedding, and its own loss."""
    model = gpt2(tied)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    check_by_autograd(model, id_batch(4, 8, vocabulary=17), loss, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["OPTForCausalLM", "RobertaForMultipleChoice"])
def test_padded_batches_of_models_that_fold(kind: str, side: str) -> None:
    """Positions, and choices, become rows; a mask is looked up by numbers, which choose no rows."""
    torch.manual_seed(0)
    small: Any = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "pad_token_id": 1}
    small |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    if kind == "OPTForCausalLM":
        config: Any = transformers.OPTConfig(
            **small, ffn_dim=8, word_embed_proj_dim=8, dropout=0.0, attention_dropout=0.0
        )
    else:
        config = transformers.RobertaConfig(
            **small, intermediate_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    model = getattr(transformers, kind)(config).double().train()
    shape = (3, 7) if kind == "OPTForCausalLM" else (3, 2, 7)
    ids = torch.randint(3, 17, shape)
    mask = torch.arange(7) < torch.tensor([7, 4, 6]).view(3, *[1] * (len(shape) - 1))
    mask = (mask if side == "right" else mask.flip(-1)).expand(shape).long()
    batch = (ids.where(mask == 1, 1), mask)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, mask = batch
        logits = model(input_ids=tokens, attention_mask=mask).logits
        if logits.dim() == 3:  # what is padding takes no part
            logits = logits * mask.unsqueeze(-1)
        return mean_squares(logits)

    check_by_autograd(model, batch, loss, tolerance=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_masks_of_frames(mode: str) -> None:
    """SpecAugment in wav2vec 2.0: NumPy draws frames by the length of each sound, an embedding is
    written into them, features are set to 0; and dropout is drawn."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    layers = dict(conv_dim=(8,), conv_kernel=(4,), conv_stride=(4,), num_feat_extract_layers=1)
    masks = dict(mask_time_prob=0.4, mask_time_length=2, mask_time_min_masks=1)
    masks |= dict(mask_feature_prob=0.2, mask_feature_length=2)
    positions = dict(num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=2)
    config = transformers.Wav2Vec2Config(vocab_size=5, **sizes, **layers, **masks, **positions)
    model = transformers.Wav2Vec2ForCTC(config).double().train()
    lengths = torch.tensor([80, 60, 44, 72])
    mask = (torch.arange(80) < lengths[:, None]).long()

    def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        np.random.seed(3)
        logits = model(input_values=batch[0], attention_mask=batch[1]).logits
        return logits.square().flatten(1).mean(1)

    embedding = model.wav2vec2.masked_spec_embed
    losses(model, (torch.randn(4, 80).double(), mask)).sum().backward()
    assert float(embedding.grad.norm()) > 1e-4  # frames are masked
    check_with_dropout(model, (torch.randn(4, 80).double(), mask), losses, mode=mode)
