"""Norms, gradients and clipped sums of convolutions, against one sample at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.convolution import (
    Geometry,
    convolution_grads,
    convolution_sqnorms,
    convolution_sum,
    geometry,
)
from flash_clipping.ops.convolution.reference import cut
from tests.ops.cases import (
    Case,
    every_case,
    relative_error,
)
from tests.ops.opcases import convolution, of_convolution
from tests.support.errors import raises

# What it is, input channels and sides, output channels, and how channels lie in x and in G.
PLAIN, LAST = False, True
SHAPES: dict[str, tuple[Geometry, tuple[int, ...], int, bool, bool]] = {
    "same": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), (16, 7, 5), 20, PLAIN, PLAIN),
    "small": (Geometry((2, 2), (1, 1), (1, 1), (1, 1), 1), (4, 4, 4), 5, LAST, LAST),
    "same, last": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), (16, 7, 5), 20, LAST, LAST),
    "strided": (Geometry((3, 2), (2, 1), (1, 2), (1, 1), 1), (5, 9, 6), 18, PLAIN, LAST),
    "dilated": (Geometry((2, 3), (1, 2), (0, 2), (3, 2), 1), (33, 8, 9), 3, LAST, PLAIN),
    "groups": (Geometry((3, 3), (2, 2), (1, 1), (1, 1), 2), (6, 9, 8), 34, PLAIN, PLAIN),
    "wide groups": (Geometry((1, 2), (1, 1), (0, 0), (1, 1), 3), (48, 4, 5), 9, LAST, LAST),
    "1 x 1": (Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1), (70, 3, 5), 66, PLAIN, PLAIN),
    "1 x 1, strided": (Geometry((1, 1), (2, 1), (0, 0), (1, 1), 1), (4, 5, 4), 5, PLAIN, LAST),
    "1d": (Geometry((5,), (2,), (3,), (1,), 1), (4, 40), 6, PLAIN, PLAIN),
    "3d": (Geometry((2, 3, 1), (1, 2, 1), (1, 0, 1), (2, 1, 1), 1), (5, 4, 7, 3), 17, PLAIN, LAST),
    "whole": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), (64, 4, 4), 128, PLAIN, PLAIN),
    "whole, last": (Geometry((1, 2), (1, 1), (0, 1), (1, 1), 1), (16, 4, 3), 24, LAST, LAST),
    "1 x 1, whole": (Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1), (8, 4, 4), 16, PLAIN, PLAIN),
    "one position": (Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1), (4, 3, 3), 5, LAST, LAST),
    "depthwise": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 6), (6, 4, 4), 6, PLAIN, PLAIN),
    "depthwise, last": (Geometry((3, 5), (1, 2), (1, 2), (2, 1), 5), (5, 4, 19), 10, LAST, LAST),
    "depthwise, whole": (
        Geometry((5, 4), (2, 1), (2, 1), (1, 1), 16),
        (16, 5, 4),
        16,
        PLAIN,
        LAST,
    ),
    "depthwise, 3d": (
        Geometry((2, 1, 2), (1, 1, 2), (1, 0, 0), (1, 1, 1), 3),
        (3, 3, 4, 5),
        3,
        LAST,
        PLAIN,
    ),
}
shapes = pytest.mark.parametrize("name", SHAPES)


def of_kernels(cases: pytest.MarkDecorator) -> pytest.MarkDecorator:
    of = [case for case in cases.args[1] if case.values[0].backend == "triton"]
    return pytest.mark.parametrize("case", of)


kernels = of_kernels(every_case)


def lying(x: Tensor, channels_last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


def operands(name: str, case: Case, B: int = 3) -> tuple[Tensor, Tensor, Geometry]:
    of, x_shape, channels, x_last, G_last = SHAPES[name]
    x = case.randn(B, *x_shape)
    G = case.randn(B, channels, *of.out_sizes(x.shape), seed=1)
    return lying(x, x_last), lying(G, G_last), of


def check(
    x: Tensor, G: Tensor, of: Geometry, case: Case, given: Sequence[Tensor] = (), **options: Any
) -> None:
    """All three operations against the truth, of operands that are what was ``given``."""
    coef_B = torch.linspace(0.1, 2, len(x)).to(x.device)
    for op in convolution("", of, **options).values():
        found = op.call(case.backend, *(given or (x, G)), coef_B)
        op.check(case, found, op.expected([x, G], coef_B))


@every_case
@pytest.mark.parametrize("name", ["same", "strided", "1 x 1, whole", "groups"])
def test_operands_in_tf32_are_cut_alike_everywhere(case: Case, name: str) -> None:
    """Norms, gradients and sums are of the cut operands, whoever cuts them: a kernel that falls
    back to PyTorch in between goes on with the same numbers."""
    if case.dtype != torch.float32 or (case.backend == "triton" and case.device == "cpu"):
        pytest.skip("nothing is cut: of fp32 alone, and not in the interpreter")
    x, G, of = operands(name, case)
    expected, whole = (of_convolution(a, b, of) for a, b in ((cut(x), cut(G)), (x, G)))
    assert relative_error(expected, whole) > 1e-4, "TF32 would not be noticed"
    check(cut(x), cut(G), of, case, given=(x, G), tf32=True)


def test_cut_numbers_lose_less_than_a_thousandth() -> None:
    """Less than 2^-10 of a number, of each sign; what is not finite stays so."""
    x = torch.randn(10_000, dtype=torch.float32) * 10.0 ** torch.randint(-30, 30, (10_000,))
    lost = (x.double() - cut(x).double()).abs() / x.double().abs()
    assert 5e-4 < lost.max() < 2**-10
    assert torch.equal(cut(cut(x)), cut(x)) and torch.equal(cut(-x), -cut(x))
    not_finite = [0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    bits = torch.tensor(not_finite, dtype=torch.int64).to(torch.int32)
    for x in (bits.view(torch.float32), -bits.view(torch.float32)):
        assert not x.isfinite().any() and not cut(x).isfinite().any()


@every_case
@shapes
def test_batch_equals_its_samples_one_after_the_other(case: Case, name: str) -> None:
    interpreted = case.backend == "triton" and case.device == "cpu"
    in_half = case.dtype == torch.float16
    if interpreted and name != "same" and list(SHAPES).index(name) % 2 == in_half:
        pytest.skip("interpreted in the other dtype: there a shape takes a second")
    check(*operands(name, case), case)


@every_case
def test_operands_that_lie_anyhow(case: Case) -> None:
    """Part of a larger image, on no 16 bytes; an output gradient that is the same everywhere."""
    of = SHAPES["same"][0]
    x = case.randn(2, 9, 12, 11)[:, 1:6, 2:9, 1::2]
    check(x, case.randn(2, 3, 1, 1, seed=1).expand(2, 3, 7, 5), of, case)
    check(x, case.randn(2, 7, 5, 3, seed=1).permute(0, 3, 2, 1).transpose(2, 3), of, case)


@kernels
@pytest.mark.parametrize("name", ["small", "3d"])
def test_offsets_of_64_bits_are_the_same_places(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("flash_clipping.ops.convolution.triton")

    def wide(*convolution: Any) -> geometry.InThree:
        return geometry.in_three(*convolution)._replace(is_wide=True)

    monkeypatch.setattr(module, "in_three", wide)
    check(*operands(name, case), case)


def test_samples_that_need_64_bits_are_known() -> None:
    of = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    x, y = (torch.empty(2, C, 1 << 15, 1 << 14, device="meta") for C in (4, 5))
    for seen, is_wide in ((x[:, :3], False), (x, False), (y, True)):
        assert geometry.in_three(of, seen.shape, seen.stride()).is_wide is is_wide


@kernels
def test_what_is_released_is_what_was_measured(case: Case) -> None:
    """Positions that cancel leave nothing but rounding: the norm is of the rounding released."""
    of = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    half, G_half = case.randn(2, 4, 10, 5), case.randn(2, 4, 10, 5, seed=1)
    half[..., [0, 4]], G_half[..., [0, 4]] = 0, 0  # so that windows of one half see none of another
    x, G = torch.cat([half, half], 3), torch.cat([G_half, -G_half], 3)
    assert of_convolution(x, G, of).abs().max() <= 1e-12
    parts, error_bound = convolution_sqnorms(x, G, of, backend="triton")
    assert error_bound is None
    for sample in range(2):
        coef = torch.zeros(2, device=case.device)
        coef[sample] = 1
        released = convolution_sum(x, G, coef, of, backend="triton").double().square().sum()
        measured = parts[sample].double().sum()
        # Products of 16-bit numbers are exact, and cancel to nothing where order allows it.
        assert released > 0 or case.dtype != torch.float32
        assert abs(measured - released) <= 1e-6 * released


def test_operands_that_do_not_fit_are_refused() -> None:
    of = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2)
    x = torch.randn(2, 4, 5, 5)
    with raises("FC303", ValueError, match=r"expected \[B, O, 5, 5\]"):
        convolution_sqnorms(x, torch.randn(2, 4, 4, 5), of)
    with raises("FC302", ValueError, match="multiple of 2 groups"):
        convolution_sqnorms(x, torch.randn(2, 3, 5, 5), of)
    with raises("FC303", ValueError, match="2 more axes"):
        convolution_grads(x[0], torch.randn(2, 4, 5, 5), of)
    with raises("FC303", ValueError, match="one coefficient"):
        convolution_sum(x, torch.randn(2, 4, 5, 5), torch.ones(3), of)
