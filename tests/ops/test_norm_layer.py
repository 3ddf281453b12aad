from __future__ import annotations

import pytest
import torch

from flash_clipping.ops.norm_layer import norm_backward
from tests.ops.cases import Case, every_case, every_case_interpreted_once, relative_error
from tests.support.errors import raises


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    x, rstd = torch.randn(2, 3, 8), torch.ones(2, 3)
    wanted = {"input_grad": True, "weight_grad": True, "bias_grad": True}
    for shape in ((2, 4, 8), (2, 3, 4)):
        with raises("FC303", ValueError, match="they must agree"):
            norm_backward(x, torch.randn(*shape), None, rstd, None, **wanted)
    for mean, rstd_of_others in ((None, rstd[:1]), (rstd[:, :2], rstd)):
        with raises("FC303", ValueError, match=r"one for every row, \[B, ...\] or \[B, ..., 1\]"):
            norm_backward(x, x, mean, rstd_of_others, None, **wanted)


@every_case
def test_statistics_as_layers_have_them(case: Case) -> None:
    x, G = case.randn(2, 3, 5, 8, seed=1), case.randn(2, 3, 5, 8, seed=2)
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    rstd = torch.rand(2, 3, 5, device=x.device, dtype=dtype)
    wanted = {"input_grad": True, "weight_grad": True, "bias_grad": True, "backend": case.backend}
    results = [
        norm_backward(x, G, mean, mean, None, **wanted)
        for mean in (rstd, rstd.unsqueeze(-1), rstd.flatten(1))
    ]
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@every_case_interpreted_once
@pytest.mark.parametrize("kept", [None, 0, 10**9])
def test_sums_are_left_in_parts_where_these_are_few(case: Case, kept: int | None) -> None:
    x, G = case.randn(2, 300, 8), case.randn(2, 300, 8, seed=1)
    mean, rstd = torch.zeros_like(x[..., 0]).float(), torch.ones_like(x[..., 0]).float()
    if case.dtype == torch.float64:
        mean, rstd = mean.double(), rstd.double()
    _, weight, bias = norm_backward(
        x, G, mean, rstd, None, input_grad=False, weight_grad=True, bias_grad=True,
        parts_kept=kept, backend=case.backend,
    )  # fmt: skip
    assert weight is not None and bias is not None
    if kept is None:
        weight, bias = weight.unsqueeze(1), bias.unsqueeze(1)
    assert weight.shape == bias.shape == (2, weight.shape[1], 8)
    many = case.backend == "triton" and kept == 10**9
    assert (weight.shape[1] > 1) == many
    wide, G_wide = x.cpu().double(), G.cpu().double()
    assert relative_error(weight.sum(1), (wide * G_wide).sum(1)) <= 1e-5
    assert relative_error(bias.sum(1), G_wide.sum(1)) <= 1e-5
    _, *none = norm_backward(
        x, G, mean, rstd, None, input_grad=True, weight_grad=False, bias_grad=False,
        parts_kept=kept, backend=case.backend,
    )  # fmt: skip
    assert none == [None, None]
