"""One promise, ``C (1 + ETA)``, and the upper bounds of norms that samples are clipped by for it.

B samples, T positions, d input features, p output features. ``u = 2⁻²⁴`` is fp32's unit roundoff.

The norm of a sample's gradient ``Σ_t g_t a_tᵀ`` is measured by one sequence of roundings, and the
clipped gradient is released by another. Both err by a small part of the *spread*
``Σ_t ‖a_t‖ ‖g_t‖``, the norm that there would be if no position cancelled another. So a sample is
clipped by an upper bound U, such that what is released of it, before its coefficient, has a norm of
at most ``(1 + SLACK)² U``. Squares add up over parameters: *doubts* are what functions here add to
squared norms, and :func:`upper_bound` makes U of both. ``docs/guarantees.md`` has the derivation.

Gradients that are released as they were measured need no bound: stored ones, biases, norm layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

ETA = 0.01
"""A sample moves the released sum by at most ``C (1 + ETA)``, and noise is drawn for that."""

SLACK = 3e-3
"""How far an upper bound may lie below what it bounds, and again how much of their norm the sums of
a sample may lose; in float64 neither."""

FLOOR = 2.0**-103
"""Added to squared norms of rows for each feature. A square below 2**-126 may be lost, and the
other operand may be large enough for its product to count; times any CANCELLATION, this is more."""


def spread(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """``Σ_t ‖a_t‖ ‖g_t‖``, ``[B]`` in fp32 (float64 for float64); rows slightly enlarged by
    :data:`FLOOR`. Reads both operands once and writes nothing of their size."""
    dtype = accumulator(A_BTd, G_BTp)
    A_sq_BT, G_sq_BT = squared_rows(A_BTd, dtype), squared_rows(G_BTp, dtype)
    return A_sq_BT.mul_(G_sq_BT).sqrt_().sum(1)


def squared_rows(X_BTf: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms of rows ``[B, T]``, enlarged by :data:`FLOOR` for each feature."""
    squares_BT: Tensor = torch.linalg.vector_norm(X_BTf, dim=-1, dtype=dtype).square_()
    return squares_BT.add_(FLOOR * X_BTf.shape[-1])


ROW = 2**11
"""Elements of a row that are added up together on a CPU, as eight running sums."""


def squared_norms(grads: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Squared norms ``[B]`` of gradients that are there, ``[B, ...]``, in ``dtype`` or their own.

    On a CPU, PyTorch adds a row up as eight running sums, of strided elements as one, and loses
    what does not count beside these: 6e-5 of the norm at 2¹⁴ elements of fp32, 4e-3 at 2²⁰. So long
    rows are added up in parts, to within 8e-6.
    """
    flat = grads.reshape(len(grads), grads.shape[1:].numel())
    if flat.is_cpu and flat.stride(1) != 1:
        flat = flat.contiguous()
    if not flat.is_cpu or flat.shape[1] <= ROW:
        norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=dtype)
        return norms.square_()
    whole = flat.shape[1] // ROW * ROW
    parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, ROW)), dim=2, dtype=dtype)
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=dtype)
    return rest.square_().add_(parts.square_().sum(1))


LOST_OF_HALVES = 1.5 * 2.0**-25
"""What tensor cores lose for each product that they add up, of the greatest number in the sum.

An instruction adds 16 products of bf16 or fp16 to its accumulator, on some GPUs 8. On an H100 each
of the 17 numbers is cut at 2⁻²⁵ of the power of two below the greatest of them, and the sum at
2⁻²³, always towards zero: at most 20 · 2⁻²⁵, and 12 · 2⁻²⁵ for 8 products. (Seen: of
``1 + 1023 x²``, with x² just below 2⁻²⁵, the 1 is left. Fasi et al., "Numerical behavior of NVIDIA
tensor cores", 2021, found the same of GPUs before it.)"""
LOST_OF_SINGLES = 4.5 * 2.0**-25
"""The same of fp32 operands: a product is three in TF32, and an instruction adds 8. Three times
12 · 2⁻²⁵ for 8 products."""


def cores_of(*operands: Tensor) -> torch.dtype | None:
    """The dtype in which tensor cores multiply these; None where none do."""
    return max(operands, key=Tensor.element_size).dtype if operands[0].is_cuda else None


def lost_of(dtype: torch.dtype) -> float:
    """What tensor cores lose for each product of operands of this dtype."""
    return LOST_OF_SINGLES if dtype == torch.float32 else LOST_OF_HALVES


ALONE = 64
"""Products of fp32 that tensor cores add up separately, outside of :func:`gram_doubt`; of 16-bit
operands twice as many, which lose less."""


def cancellation(on_tensor_cores: bool, dtype: torch.dtype, *features: int) -> float:
    """Share of the squared spread that squared norms of this dtype are at least, or, of Gram
    matrices of tensor cores, are raised by.

    Args:
        features: widths of the matrices whose rows were multiplied with each other, if norms are
            made of such products (embeddings, segments). Tensor cores err by at most so much of the
            norms of two rows, whatever these hold, and so do all products together of the squared
            spread (see :func:`gram_doubt`).
    """
    if dtype == torch.float64:
        return 2.0**-47
    if not on_tensor_cores:
        return 2.0**-21
    # ALONE · LOST_OF_SINGLES is 2.25 · 2**-18. Sums of so many products are added up in fp32.
    return 2.0**-18 * (1 + 2.5 * len(features)) + sum(features) / ALONE * 2.0**-24


def error_bound(spread_B: Tensor, *features: int) -> Tensor:
    """The error bound of squared norms of samples with this spread, ``CANCELLATION · spread²``, as
    tensor cores add up."""
    return spread_B.square().mul_(cancellation(True, spread_B.dtype, *features))


TOGETHER = 256
"""Rows whose products references add up separately; such results are then added up in turn."""

APART = 128
"""Above so many positions references add up a sample separately, before it meets others."""


def additions(positions: int, cores: torch.dtype | None = None) -> float:
    """D: unit roundoffs of the spread that two sums of so many positions may lose together.

    References, and all sums of rows of a table, add up :data:`TOGETHER` positions, and then their
    results. Rows of a unit among others are up to three results for as many positions. Tensor
    cores lose ``lost_of(cores)`` for each product that they add up separately: of fp32 64, else
    1024; for norms of up to 2048 positions all.

    Args:
        cores: the dtype of the operands where tensor cores add up, else None.
    """
    if cores is None:
        return 2 * TOGETHER + 8 + positions / 64
    if cores == torch.float32:
        return 600 + positions / 32
    if positions > 2048:
        return 1580 + positions / 200
    return 0.75 * (positions + min(positions, 1024)) + 80


def doubt_of_sums(
    sq_B: Tensor, spread_B: Tensor, positions: int, cores: torch.dtype | None = None
) -> Tensor:
    """The error bound of squared norms of gradients that were added up, once to measure and once to
    release them, whatever a sample holds.

    Args:
        sq_B: the squared norms.
        spread_B: the spread of every sample, of the same shape.
        positions, cores: of :func:`additions`.
    """
    least_B = spread_B.square().mul_(cancellation(cores is not None, sq_B.dtype))
    if sq_B.dtype == torch.float64:
        return least_B
    delta_B = spread_B * (additions(positions, cores) * 2.0**-24)
    raised_B = delta_B.add_(sq_B.clamp(min=0).sqrt_()).mul_(1 / (1 + SLACK)).square_()
    return torch.maximum(raised_B, least_B).sub_(sq_B).clamp_(min=0)


def doubt_of_term(
    sq_B: Tensor, spread_B: Tensor, positions: int, cores: torch.dtype | None = None
) -> Tensor:
    """By how much measured squared norms of a term may be too small. Other terms may cancel it, so
    that nothing is granted of its own norm. It is released with them."""
    u = torch.finfo(sq_B.dtype).eps / 2
    delta_B = spread_B * (additions(positions, cores) / 2 * u)
    return sq_B.clamp(min=0).sqrt_().mul_(2).add_(delta_B).mul_(delta_B)


def gram_doubt(
    spread_sq_B: Tensor,
    AA_sq_B: Tensor,
    GG_sq_B: Tensor,
    *,
    T: int,
    promoted: int,
    sums: int,
    dtype: torch.dtype,
) -> Tensor:
    """The error bound of squared norms from Gram matrices by tensor cores, whatever a sample holds.

    Args:
        spread_sq_B: the squared spread, ``(Σ_t ‖a_t‖ ‖g_t‖)²``.
        AA_sq_B, GG_sq_B: squared Frobenius norms of ``A Aᵀ`` and ``G Gᵀ``.
        T: positions.
        promoted: features that tensor cores add up separately.
        sums: how many such results are then added up in fp32, at most.
        dtype: of the operands, the wider.

    The smaller of two bounds, by the spread and by ``‖A Aᵀ‖ ‖G Gᵀ‖``, and what the released sum may
    lose. ``docs/guarantees.md`` derives them.
    """
    lost = lost_of(dtype)
    of_entry = promoted * lost + sums * 2.0**-24
    added_up = 2.0**-18  # what sums over a tile's entries, and over tiles, lose in fp32: some 60 u
    s = 2 * SLACK
    released = 2 * (T * lost) ** 2 / s
    # Squares of entries below 2**-63 may be lost; there are at most T² of them.
    AA_B, GG_B = (x_B.sqrt().add_(T * 2.0**-62) for x_B in (AA_sq_B, GG_sq_B))
    by_overlap_B = AA_B.mul_(GG_B).mul_(2 * of_entry * math.sqrt(T) + added_up + released)
    by_spread_B = spread_sq_B * (2 * of_entry + added_up + released)
    # fmin: an overlap that is not a number, as inf times 0, says nothing.
    return torch.fmin(by_overlap_B, by_spread_B)


def upper_bound(norm: Tensor, error_bound: Tensor | None) -> Tensor:
    """At least the norm of what is released, up to :data:`SLACK`: what samples are clipped by.

    Args:
        norm: measured norms; NaN and inf for samples that are not finite, which stay so.
        error_bound: what to add to their squares, of the same shape; None for nothing.
    """
    if error_bound is None:
        return norm
    raised = torch.addcmul(error_bound, norm, norm).sqrt_()
    if raised.dtype != torch.float64:
        raised.mul_(1 / (1 + SLACK))
    return torch.maximum(norm, raised)  # propagates NaN
