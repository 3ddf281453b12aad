"""Kernel for the clipped sum of one large layer: per-sample products, weighted in registers.

B samples, T positions, d input features, p output features.

A program owns a tile of the result and walks over all positions of all samples. What the tensor
cores add up is one sample's product, or a part of it; its coefficient is applied to that in fp32.
So nothing is scaled in memory, one sample's rounding does not depend on another's, and a dropped
sample (coefficient 0) adds nothing even where its operands are not finite. Small layers go
together: :mod:`flash_clipping.ops.clipped_sum.grouped`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.clipped_sum.grouped import grouped_products
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import has_gluon, launch
from flash_clipping.ops.runtime.shapes import Memo, part_of, remembered
from flash_clipping.ops.runtime.tiles import load_tile

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.dtype]


@triton.jit
def _clipped_sum_kernel(
    A_ptr,
    G_ptr,
    coef_ptr,
    out_ptr,
    B,
    T,
    d,
    p,
    A_stride_b,
    A_stride_t,
    G_stride_b,
    G_stride_t,
    tiles_p,
    tiles_d,
    TMA: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if TMA:
        A = tl.make_tensor_descriptor(
            A_ptr, [B, T, d], [A_stride_b, A_stride_t, 1], [1, BLOCK_T, BLOCK_D]
        )
        G = tl.make_tensor_descriptor(
            G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1], [1, BLOCK_T, BLOCK_P]
        )
    else:
        A, G = A_ptr, G_ptr
    steps = tl.cdiv(T, BLOCK_T)
    for tile in range(tl.program_id(0), tiles_p * tiles_d, tl.num_programs(0)):
        first = (tile // (GROUP * tiles_d)) * GROUP
        height = min(tiles_p - first, GROUP)
        within = tile % (GROUP * tiles_d)
        p0 = (first + within % height) * BLOCK_P
        d0 = (within // height) * BLOCK_D
        product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        for step in range(0, B * steps):
            b = step // steps
            part = step % steps
            t = part * BLOCK_T
            g = load_tile(G, b, t, p0, T, p, G_stride_b, G_stride_t, BLOCK_T, BLOCK_P, TMA)
            a = load_tile(A, b, t, d0, T, d, A_stride_b, A_stride_t, BLOCK_T, BLOCK_D, TMA)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            # See gram/triton.py: the accumulator of the tensor cores truncates.
            if (part % PROMOTE == PROMOTE - 1) | (part == steps - 1):
                coef = tl.load(coef_ptr + b).to(tl.float32)
                total += tl.where(coef == 0, 0.0, coef * product)
                product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        rows = p0 + tl.arange(0, BLOCK_P)[:, None]
        columns = d0 + tl.arange(0, BLOCK_D)[None, :]
        place = out_ptr + rows.to(tl.int64) * d + columns
        tl.store(place, total, mask=(rows < p) & (columns < d))


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks."""

    block_p: int = 128
    block_d: int = 128
    block_t: int = 64
    promote: int = 16
    num_warps: int = 8
    num_stages: int = 4
    tma: bool = True


RING = Config(num_stages=6)
"""That of :mod:`flash_clipping.ops.clipped_sum.hopper`."""


def is_for_ring(x_BTf: Tensor) -> bool:
    """Whether that kernel can read an operand which a descriptor can address."""
    B, T, _ = x_BTf.shape
    return (
        tiles.is_hopper(x_BTf.device)
        and has_gluon()
        and x_BTf.element_size() == 2
        and T % 64 == 0
        and (B == 1 or x_BTf.stride(0) == T * x_BTf.stride(1))
    )


@functools.cache
def _hopper_kernel() -> Any:
    # Not by every Triton, and not before it is wanted.
    from flash_clipping.ops.clipped_sum.hopper import _clipped_sum_ring_kernel

    return _clipped_sum_ring_kernel


@functools.lru_cache(maxsize=1024)
def config_for(dtype: torch.dtype, T: int, d: int, p: int, tma: bool) -> Config:
    """By rule, not by search: few kernels, quick to compile."""
    block_p, block_d = 64 if p <= 64 else 128, 64 if d <= 64 else 128
    if dtype == torch.float32:
        return Config(block_p, block_d, 32, promote=2, num_stages=3, tma=tma)
    if not tma:
        return Config(block_p, block_d, 32, promote=32, num_stages=3, tma=False)
    return Config(block_p, block_d)


def clipped_sums(A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums`."""
    return [launch_clipped_sum(A_BTd, G, coef_B) for G in Gs]


def launch_clipped_sum(
    A_BTd: Tensor, G_BTp: Tensor, coef_B: Tensor, config: Config | None = None
) -> Tensor:
    """``[p, d]`` in fp32; with the launch's parameters open to benchmarks."""
    if A_BTd.dtype != G_BTp.dtype:
        common = torch.promote_types(A_BTd.dtype, G_BTp.dtype)
        A_BTd, G_BTp = A_BTd.to(common), G_BTp.to(common)
    A_BTd, G_BTp = tiles.with_unit_stride(A_BTd), tiles.with_unit_stride(G_BTp)
    B, T, d = A_BTd.shape
    p = G_BTp.shape[2]
    tma = tiles.has_tma(A_BTd.device) and tiles.fits_tma(A_BTd, G_BTp)
    if config is None:
        ring = tma and is_for_ring(A_BTd) and is_for_ring(G_BTp)
        config = RING if ring else config_for(A_BTd.dtype, T, d, p, tma)
    tma = tma and config.tma
    tiles_p, tiles_d = tiles.cdiv(p, config.block_p), tiles.cdiv(d, config.block_d)
    out_pd = torch.empty((p, d), dtype=torch.float32, device=A_BTd.device)
    programs = min(tiles_p * tiles_d, tiles.sm_count(A_BTd.device))
    if config is RING:
        launch(
            _hopper_kernel(),
            programs,
            A_BTd,
            G_BTp,
            coef_B.contiguous(),
            out_pd,
            B * T,
            T,
            d,
            p,
            A_BTd.stride(1),
            G_BTp.stride(1),
            tiles_p,
            tiles_d,
            DTYPE=tiles.TL_DTYPE[A_BTd.dtype],
            workspace=True,
            num_warps=4,
        )
        return out_pd
    launch(
        _clipped_sum_kernel,
        programs,
        A_BTd,
        G_BTp,
        coef_B.contiguous(),
        out_pd,
        B,
        T,
        d,
        p,
        *A_BTd.stride()[:2],
        *G_BTp.stride()[:2],
        tiles_p,
        tiles_d,
        TMA=tma,
        BLOCK_P=config.block_p,
        BLOCK_D=config.block_d,
        BLOCK_T=config.block_t,
        PROMOTE=config.promote,
        GROUP=8,
        PRECISION=tiles.dot_precision(A_BTd.dtype),
        workspace=tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_pd


def clipped_sums_many(
    pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor, memo: Memo | None = None
) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_many`."""
    sums: dict[int, Tensor] = {}
    for kind, members in remembered(memo, "launches", lambda: _launches(pairs)).items():
        alike = [pairs[i] for i in members]
        _, A_dtype, G_dtype = kind
        if A_dtype != G_dtype:
            dtype = torch.promote_types(A_dtype, G_dtype)
            alike = [(A.to(dtype), G.to(dtype)) for A, G in alike]
            products = grouped_products(alike, coef_B)
        else:
            products = grouped_products(alike, coef_B, memo=part_of(memo, kind))
        sums.update(zip(members, products, strict=True))
    return [sums[i] for i in range(len(pairs))]


def _launches(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[_Kind, list[int]]:
    """What one launch serves: all pairs of one kind."""
    kinds: dict[_Kind, list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        kinds.setdefault((A.shape[:2], A.dtype, G.dtype), []).append(i)
    return kinds
