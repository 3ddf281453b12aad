"""On what every operation is tested, and how near to the float64 oracle it must come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.error_bounds import SLACK, additions, cancellation, gram_doubt
from flash_clipping.ops.runtime.backend import is_interpreting

#: How far a sample's own sums may move what it is clipped to; the rest of ETA is for others'.
OWN = (1 + SLACK) ** 2


@dataclass(frozen=True)
class Case:
    backend: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def tolerance(self) -> float:
        """Of norms and vectors summed in the accumulator's dtype."""
        return 1e-10 if self.dtype == torch.float64 else 1e-5

    @property
    def rounding(self) -> float:
        """Of results that are rounded once to the operands' dtype."""
        return max(self.tolerance, 1.01 * torch.finfo(self.dtype).eps)

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed + sum(shape))
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(self.dtype).to(self.device)


def _cases(
    itemsizes: tuple[int, ...] = (2, 4, 8),
    left_to_slow: torch.dtype | None = None,
    in_interpreter: bool | None = None,
    half_on_cpu: bool = True,
) -> list[object]:
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    if itemsizes == (2,):  # elsewhere references treat both alike
        dtypes.append(torch.float16)
    cases = [Case("torch", "cpu", dtype) for dtype in dtypes]
    # Triton's interpreter multiplies the raw bits of bf16, so bf16 kernels run on a GPU only.
    interpreted = [Case("triton", "cpu", dtype) for dtype in (torch.float32, torch.float16)]
    on_gpu = [
        Case("triton", "cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ] + [Case("torch", "cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
    no_interpreter = pytest.mark.skipif(
        not is_interpreting(), reason="kernels are compiled for the GPU in this run"
    )
    groups = ((cases, ()), (interpreted, (no_interpreter,)), (on_gpu, (pytest.mark.gpu,)))

    def marks_of(case: Case, marks: tuple[Any, ...]) -> tuple[Any, ...]:
        slow = case in interpreted and case.dtype == left_to_slow
        return (*marks, pytest.mark.slow) if slow else marks

    return [
        pytest.param(case, id=str(case), marks=marks_of(case, marks))
        for group, marks in groups
        for case in group
        if case.dtype.itemsize in itemsizes and in_interpreter in (None, group is interpreted)
        if half_on_cpu or case.device == "cuda" or case.dtype.itemsize > 2
    ]


every_case = pytest.mark.parametrize("case", _cases())
#: For what takes the interpreter long, and is about places rather than numbers: there masks and
#: orders are those of fp32, and each operation has tests of both dtypes.
every_case_interpreted_once = pytest.mark.parametrize("case", _cases(left_to_slow=torch.float16))
#: For what has more combinations than the interpreter has time for.
every_case_but_interpreted = pytest.mark.parametrize("case", _cases(in_interpreter=False))
every_interpreted_case = pytest.mark.parametrize("case", _cases(in_interpreter=True))
#: For what is about places rather than numbers, where even references take long.
every_case_wide_on_cpu = pytest.mark.parametrize("case", _cases(half_on_cpu=False))
every_half_case = pytest.mark.parametrize("case", _cases(itemsizes=(2,)))


def in_rows_on_16_bytes(x: Tensor) -> Tensor:
    """The same numbers in rows on 16 bytes, with NaN in between, which nothing may read."""
    each = 16 // x.element_size()
    *outer, width = x.shape
    room = x.new_full((*outer, -(-width // each) * each), float("nan"))
    room[..., :width] = x
    return room[..., :width]


def sizes_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each product of batches of matrices, from now on."""
    sizes: list[int] = []

    def watched(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def watch(x: Tensor, y: Tensor) -> Tensor:
            product = multiply(x, y)
            sizes.append(product.numel())
            return product

        return watch

    monkeypatch.setattr(torch, "bmm", watched(torch.bmm))
    monkeypatch.setattr(Tensor, "__matmul__", watched(Tensor.__matmul__))
    return sizes


def relative_error(result: Tensor, oracle: Tensor) -> float:
    """``‖result - oracle‖ / ‖oracle‖``; NaN, or a wrong shape, never passes."""
    assert result.shape == oracle.shape, (result.shape, oracle.shape)
    if oracle.numel() == 0:
        return 0.0
    result, oracle = result.detach().cpu().double(), oracle.detach().cpu().double()
    error = (result - oracle).norm() / oracle.norm().clamp_min(1e-300)
    return float(error) if torch.isfinite(error) else float("inf")


def worst_relative_error(result: Tensor, oracle: Tensor) -> float:
    """The largest relative error of any element: for norms, where each counts for itself."""
    assert result.shape == oracle.shape, (result.shape, oracle.shape)
    if oracle.numel() == 0:
        return 0.0
    result, oracle = result.detach().cpu().double(), oracle.detach().cpu().double()
    error = ((result - oracle).abs() / oracle.abs().clamp_min(1e-300)).max()
    return float(error) if torch.isfinite(error) else float("inf")


def doubt_of(backend: str, A: Tensor, G: Tensor, widest: int = 1) -> Tensor:
    """The oracle of what rounding may hide of Gram norms, [B]; ``widest``: of a launch's layers."""
    dtype, T = torch.promote_types(A.dtype, G.dtype), A.shape[1]
    device_type = A.device.type
    A, G = A.cpu().double(), G.cpu().double()
    spread_B = (A.norm(dim=2) * G.norm(dim=2)).sum(1)
    if backend == "torch":
        sq_B = ((A @ A.mT) * (G @ G.mT)).sum((1, 2))
        return doubt_of_reference(device_type, dtype, sq_B, spread_B, T)
    promoted = 64 if dtype == torch.float32 else 256
    AA, GG = A @ A.mT, G @ G.mT
    return gram_doubt(
        spread_B.square(), AA.square().sum((1, 2)), GG.square().sum((1, 2)),
        T=T, promoted=promoted, sums=-(-max(widest, A.shape[2], G.shape[2]) // promoted),
        dtype=dtype,
    )  # fmt: skip


def doubt_of_reference(
    device_type: str, dtype: torch.dtype, sq: Tensor, spread: Tensor, positions: int
) -> Tensor:
    """The oracle of what PyTorch's sums of so many positions may lose, in float64."""
    on_gpu, accumulator = device_type == "cuda", torch.promote_types(dtype, torch.float32)
    least = cancellation(on_gpu, accumulator) * spread.square()
    if accumulator == torch.float64:
        return least
    delta = additions(positions, dtype if on_gpu else None) * 2.0**-24 * spread
    return torch.maximum(((sq.sqrt() + delta) / (1 + SLACK)) ** 2, least).sub(sq).clamp(min=0)


def cut(x: Tensor, bits: int, of: Tensor) -> Tensor:
    """Cut at ``bits`` below the power of two that is below ``of``, towards zero."""
    step = 2.0 ** (of.abs().clamp(min=1e-300).log2().floor() - bits)
    return (x / step).trunc() * step


def per_sample_gradients(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """The oracle: ``[B, p, d]`` in float64 on the CPU."""
    A, G = A_BTd.cpu().double(), G_BTp.cpu().double()
    return torch.einsum("btp,btd->bpd", G, A)
