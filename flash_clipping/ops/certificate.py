"""An upper bound of what is released of a sample, from what was measured of it.

B samples, T positions, d input features, p output features.

The norm of a sample's gradient ``Σ_t g_t a_tᵀ`` is measured by one sequence of roundings, and its
clipped gradient released by another. Both err by a small part of the *spread* ``Σ_t ‖a_t‖ ‖g_t‖``,
the norm that there would be if no position cancelled another. Where positions nearly cancel the
spread is far above the norm, and what was measured may be rounding alone. So a sample is clipped by

    ``sqrt(norm² + CANCELLATION · spread²)``

which is at least the norm of what is released, whatever the sample holds: a sample whose positions
cancel to less than 1/1448 of their spread (1/512 on a GPU) is clipped as if they cancelled to that.
For ordinary samples (spread at most 14 times the norm, 5 times on a GPU) nothing changes: the bound
may be :data:`SLACK` too low.

Why this covers rounding. A Gram norm adds up ``(a_t·a_s)(g_t·g_s)``. A product errs by a few ``u``
of ``‖a_t‖‖a_s‖`` (unit roundoff ``u = 2⁻²⁴``), and by up to 4e-6 of it on tensor cores, which
truncate; all terms together are at most ``spread²``. The released sum errs by some ``u·√n`` of the
spread for ``n`` additions (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019); for every ratio of spread to norm the formula leaves 116 u of the spread, 330 u on
a GPU.
Rows of short segments are released times their coefficients, as two bf16 numbers each
(:mod:`flash_clipping.ops.segments.hopper`): at most 2⁻¹⁷ of every row, 128 u of the spread, more.

What is released as it was measured needs no bound: stored gradients, biases, norm layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

FLOOR = 2.0**-103
"""Added to squared norms of rows for each feature. A square below 2**-126 may be lost, and the
other operand may be large enough for its product to count; times any CANCELLATION, this is more."""

SLACK = 5e-5
"""How far the bound may lie below the norm of what is released, relative to it; in float64 it does
not, as there ordinary samples are raised by nothing that could be seen."""


TRUNCATED = 21 * 2.0**-25


def spread(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """``Σ_t ‖a_t‖ ‖g_t‖``, ``[B]`` in fp32 (float64 for float64); rows slightly enlarged by
    :data:`FLOOR`. Reads both operands once and writes nothing of their size."""
    dtype = accumulator(A_BTd, G_BTp)
    A_sq_BT, G_sq_BT = squared_rows(A_BTd, dtype), squared_rows(G_BTp, dtype)
    return A_sq_BT.mul_(G_sq_BT).sqrt_().sum(1)


def squared_rows(X_BTf: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms of rows ``[B, T]``, enlarged by :data:`FLOOR` for each feature."""
    squares_BT = torch.linalg.vector_norm(X_BTf, dim=-1, dtype=dtype).square_()
    return squares_BT.add_(FLOOR * X_BTf.shape[-1])


def cancellation(device_type: str, dtype: torch.dtype) -> float:
    """Share of the squared spread by which squared norms of this dtype are raised."""
    if dtype == torch.float64:
        return 2.0**-47
    return 2.0**-21 if device_type == "cpu" else 2.0**-18  # tensor cores truncate


def doubt(spread_B: Tensor) -> Tensor:
    """The error bound of squared norms of samples with this spread, ``CANCELLATION · spread²``."""
    return spread_B.square().mul_(cancellation(spread_B.device.type, spread_B.dtype))


def gram_doubt(
    spread_B: Tensor, AA_sq_B: Tensor, GG_sq_B: Tensor, T: int, promoted: int
) -> Tensor:
    """The error bound of squared norms from Gram matrices by tensor cores.

    Args:
        AA_sq_B, GG_sq_B: squared Frobenius norms of ``A Aᵀ`` and ``G Gᵀ`` of every sample.
        T: positions.
        promoted: features that tensor cores add up before a sum that rounds.
    """
    lost = TRUNCATED * -(-promoted // 16)
    spread_sq_B = spread_B.square()
    # Squares of entries below 2**-63 may be lost: at most T² of them.
    AA_B, GG_B = (x.sqrt().add_(T * 2.0**-62) for x in (AA_sq_B, GG_sq_B))
    overlap_B = AA_B.mul_(GG_B)
    measured = torch.fmin(overlap_B * (2 * lost * math.sqrt(T)), spread_sq_B * (2 * lost))
    released = TRUNCATED * -(-T // 16)
    share = released**2 / (2 * SLACK)
    return measured + torch.fmin(overlap_B.mul_(2 * share), spread_sq_B.mul_(share))


def upper_bound(norm: Tensor, doubt: Tensor | None) -> Tensor:
    """At least the norm of what is released, up to :data:`SLACK`: what samples are clipped by.

    Args:
        norm: measured norms; NaN and inf for samples that are not finite, which stay so.
        doubt: what to add to their squares, of the same shape; None for nothing.
    """
    if doubt is None:
        return norm
    raised = torch.addcmul(doubt, norm, norm).sqrt_()
    if raised.dtype != torch.float64:
        raised.mul_(1 / (1 + SLACK))
    return torch.maximum(norm, raised)  # propagates NaN
