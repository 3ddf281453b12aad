"""A convolution's per-sample gradients on a CPU: both ways to form them, and when they are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.factors import Convolution
from flash_clipping.ops.convolution import reference

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


def factor_and_truth(name: str, dtype: torch.dtype, B: int = 5) -> tuple[Convolution, Tensor]:
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
    factor = Convolution(x, G, weight, options[0], options[1], *options[2:])
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
def test_norms(
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


@layers
def test_a_bad_sample_leaves_the_others_alone(name: str) -> None:
    """Also in the way that lays the samples side by side as channels of one."""
    factor, truth = factor_and_truth(name, torch.float32)
    factor.x[2] = float("nan")
    factor.G[3] = float("inf")
    keep = torch.tensor([True, True, False, False, True])
    operands = factor.x, factor.G, factor.geometry
    ways = [reference.by_patches(*operands), reference.by_groups(*operands)]
    for dense in (*ways, factor.stored("torch").dense()):
        assert error(dense[keep], truth[keep]) <= 1e-5
        assert not dense[~keep].flatten(1).isfinite().all(1).any()


@pytest.mark.parametrize(
    ("size", "channels", "kept"),
    [(32, 8, True), (2, 32, False)],
    ids=["large image", "small image"],
)
def test_gradients_are_kept_only_where_they_are_small(
    size: int, channels: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept instead of input and output gradient takes at most half as much again."""
    sizes = []

    def stored(self: Convolution, backend: str) -> Any:
        result = original(self, backend)
        sizes.append((result.dense().numel(), self.x.numel() + self.G.numel()))
        return result

    original = Convolution.stored
    monkeypatch.setattr(Convolution, "stored", stored)
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.Flatten())
    module = GradSampleModuleFlashClipping(model)
    module(torch.randn(4, channels, size, size)).square().sum(1).mean().backward()
    assert len(sizes) == kept
    assert all(kept_now <= 1.5 * replaced for kept_now, replaced in sizes)
