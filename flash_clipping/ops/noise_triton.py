"""Noise drawn in registers: the sum is read once and the noisy mean written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles

_KEY = 0x9E3779B97F4A7C15
_BLOCK = 4096  # elements per program; every Philox call gives four normals


@triton.jit
def _noisy_mean_kernel(
    summed_ptr, out_ptr, numel, std, inverse, seed, offset_low, offset_high, BLOCK: tl.constexpr
):
    quads: tl.constexpr = BLOCK // 4
    pid = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, quads)
    counter = pid * quads + lane
    # One counter per four elements; the generator's offset keeps calls apart.
    c0 = (counter & 0xFFFFFFFF).to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + tl.cast(offset_low, tl.uint32)
    c3 = tl.zeros_like(c0) + tl.cast(offset_high, tl.uint32)
    u0, u1, u2, u3 = tl.philox(seed, c0, c1, c2, c3)
    n0, n1 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(u0), tl.uint_to_uniform_float(u1))
    n2, n3 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(u2), tl.uint_to_uniform_float(u3))
    # Interleaved so that a thread's four elements lie side by side in memory.
    noise = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
    index = pid * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    value = tl.load(summed_ptr + index, mask=inside, other=0.0).to(tl.float32)
    noisy = (value + std * noise) * inverse
    tl.store(out_ptr + index, noisy.to(out_ptr.dtype.element_ty), mask=inside)


def noisy_mean(
    summed: Tensor, std: float, divisor: float, generator: torch.Generator | None
) -> Tensor:
    """``(summed + N(0, std^2)) / divisor`` with the default generator of the sum's device."""
    assert generator is None
    source = torch.cuda.default_generators[summed.device.index or 0]
    offset = source.get_offset()
    # CUDA generators count in fours, and this call uses one Philox counter per four elements.
    source.set_offset(offset + 4)
    return draw(summed, std, divisor, seed=source.initial_seed(), offset=offset)


def draw(summed: Tensor, std: float, divisor: float, *, seed: int, offset: int) -> Tensor:
    """The same from a seed and an offset; equal ones give equal noise."""
    out = torch.empty_like(summed)
    _noisy_mean_kernel[(tiles.cdiv(summed.numel(), _BLOCK),)](
        summed,
        out,
        summed.numel(),
        std,
        1.0 / divisor,
        # A key of its own: PyTorch's kernels use the seed with counters that ours could meet.
        (seed ^ _KEY) & 0x7FFFFFFFFFFFFFFF,
        offset & 0xFFFFFFFF,
        offset >> 32,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
