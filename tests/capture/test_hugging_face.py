"""Hugging Face's GPT-2: tied weights, its own loss, its checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import TOLERANCE, Loss, check_by_autograd, id_batch, truth_by_autograd
from tests.support.hugging_face import gpt2, own_loss
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES, WRAPPERS


def outer_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = batch
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", [own_loss, outer_loss])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gpt2(wrapper: str, loss: Loss, tied: bool, mode: str) -> None:
    """GPT-2 with its head tied to the token embedding, and its own loss."""
    model = gpt2(tied)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    check_by_autograd(model, id_batch(4, 8, vocabulary=17), loss, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_gpt2_gradient_checkpointing(mode: str) -> None:
    """``gradient_checkpointing_enable``, as the Trainer does."""
    model = gpt2()
    batch = id_batch(4, 8, vocabulary=17)
    truth = truth_by_autograd(copy.deepcopy(model), batch, own_loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    own_loss(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, TOLERANCE, "norms")
    for name, grad in truth.clipped(1.0).items():
        assert_close(model.get_parameter(name).grad, grad, 1e-7, name)


def test_gpt2_batch_as_large_as_the_sequence() -> None:
    """Positions are read as ``[1, T]``; with ``T = B`` they must not pass for samples."""
    check_by_autograd(gpt2(), id_batch(8, 8, vocabulary=17), own_loss)
