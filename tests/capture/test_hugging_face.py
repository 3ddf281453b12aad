"""Hugging Face's GPT-2: tied weights, its own loss, its checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.support.autograd import (
    Loss,
    check_by_autograd,
    id_batch,
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
