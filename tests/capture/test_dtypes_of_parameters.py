"""Parameters of different dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import id_batch, squares, truth_by_autograd
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate


class MixedDtypes(nn.Module):
    """A bf16 body between an fp32 embedding and an fp64 head."""

    def __init__(self, body: torch.dtype, head: torch.dtype):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6).to(body)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3).to(head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(torch.tanh(self.body(x.to(self.body.weight.dtype))).to(x.dtype))
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [torch.float32, torch.float64])
def test_parameters_of_different_dtypes(head: torch.dtype, body: torch.dtype, mode: str) -> None:
    """Each sum is in fp32, or wider; norms are one number per sample over all."""
    torch.manual_seed(0)
    model = MixedDtypes(body, head)
    batch = id_batch(4, 5)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    bound = truth.norms.median().item()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    squares(flash, batch).backward()
    # The truth rounds every per-sample gradient to the dtype of its parameter.
    unit = torch.finfo(body).eps
    assert_close(flash.get_norm_sample(), truth.norms, max(unit, 1e-5), "norms")
    for name, grad in truth.clipped(bound).items():
        param = model.get_parameter(name)
        wide = torch.promote_types(param.dtype, torch.float32)
        assert param.grad is not None and param.grad.dtype == wide, name
        assert_close(param.grad, grad, max(4 * unit, 1e-5), name)


class OfChannels(nn.LayerNorm):
    """Normalizes the channels of images, by a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias).permute(0, 3, 1, 2)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_a_normalization_of_ones_own_in_16_bits(own: torch.dtype) -> None:
    """The kernel of a CPU keeps means in the dtype that input and weight have, or in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), OfChannels(4), nn.Conv2d(4, 2, 1)).bfloat16()
    model[1].to(own)
    batch = (torch.randn(4, 3, 6, 6, dtype=torch.bfloat16),)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    squares(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, torch.finfo(torch.bfloat16).eps, "norms")
