"""Parameters of different dtypes, and uses with different batch sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import id_batch, squares, truth_by_autograd
from tests.support.errors import raises, warns
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


class Uneven(nn.Module):
    """One layer reads the samples, and reads more rows than there are samples."""

    def __init__(self, kind: str, views: str) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3) if kind == "linear" else nn.Conv1d(3, 3, 1)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        # Backward comes to the other use, which is as it should be, first.
        if self.views == "apart":
            uneven = self.shared(torch.cat([x, x]))[: len(x)]
        else:
            uneven = self.shared(torch.stack([x, x], 1).flatten(0, 1))[::2]
        return self.shared(x) + uneven


SHAPES = {"linear": (4, 3), "convolution": (4, 3, 5)}
APART = (
    r"shared \(\w+\): what it reads has 8 rows for a batch of 4, and 6 for a batch of 3\n"
    r".*a sample's rows lie apart.*torch\.stack\(\[a, b\], 1\)\.flatten\(0, 1\) in place of "
    r'torch\.cat\(\[a, b\]\)(?s:.*)mode="one_by_one"'
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHAPES)
def test_two_views_of_a_sample_that_lie_together_are_exact(kind: str, mode: str) -> None:
    norms_are_exact(Uneven(kind, "together"), torch.randn(SHAPES[kind]), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHAPES)
def test_two_views_of_a_batch_one_behind_the_other_are_refused(kind: str, mode: str) -> None:
    wrapped = GradSampleModuleFlashClipping(Uneven(kind, "apart"), max_grad_norm=1.0, mode=mode)
    with raises("FC201", match=APART):
        wrapped(torch.randn(SHAPES[kind])).square().sum().backward()


@pytest.mark.parametrize("kind", SHAPES)
def test_two_views_of_a_batch_run_one_by_one(kind: str) -> None:
    with warns("FC180"):
        norms_are_exact(Uneven(kind, "apart"), torch.randn(SHAPES[kind]), "one_by_one")


def norms_are_exact(model: Uneven, x: Tensor, mode: str) -> None:
    truth = truth_of_twice(copy.deepcopy(model), x)
    wrapped = GradSampleModuleFlashClipping(
        model, max_grad_norm=1.0, mode=mode, loss_reduction="sum"
    )
    wrapped(x).square().sum().backward()
    assert_close(wrapped.get_norm_sample(), truth, 1e-5, "norms")


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_table_that_reads_some_samples_is_refused(mode: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.shared.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.shared(x[:2]).repeat(2, 1, 1))

    wrapped = GradSampleModuleFlashClipping(Tied(), max_grad_norm=1.0, mode=mode)
    with raises("FC201", match=r"shared \(Embedding\): what it reads has 2 rows"):
        wrapped(torch.randint(7, (4, 5))).square().sum().backward()


def truth_of_twice(model: Any, x: Tensor) -> Tensor:
    """Norms of single samples that go through the shared layer twice."""
    norms = []
    for x_1 in x.split(1):
        loss = (2 * model.shared(x_1)).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
    return torch.stack(norms)
