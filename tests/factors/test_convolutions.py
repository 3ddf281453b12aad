"""A convolution's per-sample gradients on a CPU: both ways to form them, and when they are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, Kernels
from flash_clipping.factors import ConvolutionGrad
from flash_clipping.factors.units import UnitMap
from flash_clipping.ops.convolution import reference
from flash_clipping.ops.runtime.backend import full_precision, is_interpreting
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.models import Case, floats
from tests.support.oracle import per_sample_truth

pytestmark = pytest.mark.without_gate

LAYERS = {
    "1d": (nn.Conv1d(8, 16, 5, stride=2, padding=3), (40,)),
    "2d": (nn.Conv2d(8, 8, 3, padding=1), (9, 12)),
    "2d, 16 to 8": (nn.Conv2d(16, 8, (3, 2), stride=(2, 1), dilation=(1, 2)), (11, 12)),
    "2d, groups": (nn.Conv2d(16, 32, 3, groups=2), (10, 10)),
    "2d, depthwise": (nn.Conv2d(6, 6, 3, groups=6, padding=1), (8, 8)),
    "3d": (nn.Conv3d(8, 8, (1, 3, 2), padding=(0, 1, 1)), (3, 6, 6)),
    "1 x 1": (nn.Conv2d(8, 24, 1), (6, 6)),
}

layers = pytest.mark.parametrize("name", LAYERS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def factor_and_truth(name: str, dtype: torch.dtype, B: int = 5) -> tuple[ConvolutionGrad, Tensor]:
    """The factor of random operands, and the gradients of one sample after the other, float64."""
    layer: Any = LAYERS[name][0]
    torch.manual_seed(0)
    x = torch.randn(B, layer.in_channels, *LAYERS[name][1], dtype=dtype)
    weight = layer.weight.detach().double().requires_grad_()
    convolve = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[x.dim()]
    options = layer.stride, layer.padding, layer.dilation, layer.groups
    G = torch.randn_like(convolve(x, weight.to(dtype), None, *options).detach())
    truth = [
        torch.autograd.grad(
            convolve(x_1.double().unsqueeze(0), weight, None, *options),
            weight,
            G_1.double().unsqueeze(0),
        )[0]
        for x_1, G_1 in zip(x, G, strict=True)
    ]
    factor = ConvolutionGrad(x, G, weight, options[0], options[1], *options[2:])
    return factor, torch.stack(truth)


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@layers
@dtypes
@pytest.mark.parametrize("way", [reference.by_patches, reference.by_groups])
def test_gradients_are_the_samples_own(name: str, dtype: torch.dtype, way: Any) -> None:
    factor, truth = factor_and_truth(name, dtype)
    found = way(factor.x, factor.G, factor.geometry)
    assert error(found, truth) <= (1e-5 if dtype == torch.float32 else 1e-12)


@layers
@dtypes
@pytest.mark.parametrize("elements", [1, 1 << 24])
def test_norms_of_convolutions_in_chunks_match_autograd(
    name: str, dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS_CPU", elements)
    monkeypatch.setattr(reference, "COPIED_ELEMENTS", elements)
    factor, truth = factor_and_truth(name, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = truth.flatten(1).square().sum(1)
    assert error(factor.sqnorms("torch"), expected) <= tolerance
    stored = factor.stored("torch")
    assert error(stored.sqnorms("torch"), expected) <= tolerance
    assert error(stored.dense(), truth) <= tolerance


@pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled for the GPU in this run")
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_model_on_kernels(mode: str) -> None:
    """Gradients kept and not, padding that no kernel adds, strides, groups, channels of one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 16, 2),
        nn.Flatten(),
    )
    case = Case(lambda: model, floats(3, 2, 6, 6))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=bound, mode=mode, kernels=Kernels("triton")
    )
    step_case(module, case, batch, "mean")
    check_case(module, truth, bound, 1e-5)


def test_units_whose_rows_cancel_are_clipped_by_the_norms_of_these() -> None:
    factor, truth = factor_and_truth("2d", torch.float32, B=4)
    factor.x[1], factor.G[1] = factor.x[0], -factor.G[0]
    found = factor.by_units(UnitMap(torch.tensor([0, 0, 1, 1]), 2)).error_bound("torch")
    assert found is not None and found[1] == 0
    assert found[0] == pytest.approx(2.0**-21 * 4 * truth[0].square().sum().item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("size", [4, 24], ids=["measured", "kept"])
def test_what_is_measured_in_tf32_is_what_is_released(
    mode: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over one sample that is clipped has the norm of the bound, of fp32's precision; what
    another product of 484 positions may lose is taken off."""
    kept: list[bool] = []
    worth = ConvolutionGrad.is_worth_storing

    def is_worth_storing(self: ConvolutionGrad, readers: Any) -> bool:
        kept.append(worth(self, readers))
        return kept[-1]

    monkeypatch.setattr(ConvolutionGrad, "is_worth_storing", is_worth_storing)
    x = torch.randn(1, 16, size, size, generator=torch.Generator().manual_seed(0))
    sums = {}
    for precision in ("ieee", "tf32"):
        monkeypatch.setattr(
            "flash_clipping.factors.convolution.convolves_in_tf32",
            lambda tensor, is_cut=precision == "tf32": is_cut,
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.Tanh())
        flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.01, mode=mode)
        flash(x).square().sum().backward()
        assert model[0].weight.grad is not None
        sums[precision] = model[0].weight.grad.double()
        taken_off = 6e-4 if size == 24 and mode == "two_pass" else 0
        norm = sums[precision].norm().item()
        assert 0.01 * (1 - taken_off - 1e-5) <= norm <= 0.01 * (1 + 1e-5)
    assert 1e-4 < error(sums["tf32"], sums["ieee"]) < 2**-9
    if mode == "one_pass":
        assert all(kept) if size == 24 else not any(kept)


class OnGPU(Tensor):
    is_cuda = True


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_pytorch_s_setting_says_whether_convolutions_are_in_tf32(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fp32 on a GPU, but for depthwise ones; gradients of units are added up in fp32."""
    x = torch.randn(2, 4, 3).as_subclass(OnGPU)

    def factor_of(x: Tensor, G: Tensor) -> ConvolutionGrad:
        return ConvolutionGrad(x, G, torch.empty(4, 4 // groups, 1), (1,), (0,), (1,), groups)

    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert factor_of(x, x).tf32 == (allowed and groups < 4)
        for other in (torch.randn(2, 4, 3), x.bfloat16(), x.double()):
            assert not factor_of(x, other).tf32 and not factor_of(other, x).tf32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with full_precision(torch.device("cpu")):
        assert not factor_of(x, x).tf32
    factor = factor_of(x, x)
    factor.by_units(UnitMap(torch.tensor([0, 0]), 1))
    assert not factor.tf32
