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

Why this covers rounding. A Gram norm adds up ``(a_t·a_s)(g_t·g_s)``. A product errs by a small part
ε of ``‖a_t‖‖a_s‖``, so that all terms together err by up to ``2 ε spread²``. ε is not that of
random roundings: a sample can hold one large product and a thousand that are each just too small to
count beside it. On a CPU Gram matrices are in float64, where ε is below 2⁻⁴⁰. Those of tensor cores
have a bound of their own in place of the formula above, :func:`gram_doubt`.
The released sum errs by some ``u·√n`` of the spread for ``n`` additions (unit roundoff
``u = 2⁻²⁴``; Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019); for
every ratio of spread to norm the formula leaves 116 u of the spread, 330 u on a GPU.
Rows of short segments are released times their coefficients, as two bf16 numbers each
(:mod:`flash_clipping.ops.segments.hopper`): at most 2⁻¹⁷ of every row, 128 u of the spread, more.
Where PyTorch's products may lose more than the formula leaves, their additions are counted:
:func:`additions_doubt`.

Tables have a bound of their own as well (:func:`runs_doubt`): one id of a sample may be that of all
of its rows, and L additions of them may lose up to L u of what they add up, by this formula more
than is granted from some 200 on. (Seen: 1.0012 C of 1024 rows, 3 C of 65536.)

What is released as it was measured needs no bound: stored gradients, biases, norm layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

FLOOR = 2.0**-103
"""Added to squared norms of rows for each feature. A square below 2**-126 may be lost, and the
other operand may be large enough for its product to count; times any CANCELLATION, this is more."""

SLACK = 5e-5
"""How far the bound may lie below the norm of what is released, relative to it; in float64 it does
not, as there ordinary samples are raised by nothing that could be seen."""


def spread(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """``Σ_t ‖a_t‖ ‖g_t‖``, ``[B]``: see :func:`row_norms`."""
    return row_norms(A_BTd, G_BTp).sum(1)


def row_norms(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """``‖a_t‖ ‖g_t‖``, ``[B, T]`` in fp32 (float64 for float64); rows slightly enlarged by
    :data:`FLOOR`. Reads both operands once and writes nothing of their size."""
    dtype = accumulator(A_BTd, G_BTp)
    A_sq_BT, G_sq_BT = squared_rows(A_BTd, dtype), squared_rows(G_BTp, dtype)
    return A_sq_BT.mul_(G_sq_BT).sqrt_()


def squared_rows(X_BTf: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms of rows ``[B, T]``, enlarged by :data:`FLOOR` for each feature."""
    squares_BT = torch.linalg.vector_norm(X_BTf, dim=-1, dtype=dtype).square_()
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
    if not flat.is_cpu:
        return torch.linalg.vector_norm(flat, dim=1, dtype=dtype).square_()
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if flat.shape[1] <= ROW:
        return torch.linalg.vector_norm(flat, dim=1, dtype=dtype).square_()
    whole = flat.shape[1] // ROW * ROW
    parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, ROW)), dim=2, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=dtype)
    return parts.square_().sum(1).add_(rest.square_())


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


def lost_of(dtype: torch.dtype) -> float:
    """What tensor cores lose for each product of operands of this dtype."""
    return LOST_OF_SINGLES if dtype == torch.float32 else LOST_OF_HALVES


ALONE = 64
"""Products of fp32 that tensor cores add up by themselves, outside of :func:`gram_doubt`; of 16-bit
operands twice as many, which lose less."""


def cancellation(device_type: str, dtype: torch.dtype, *features: int) -> float:
    """Share of the squared spread by which squared norms of this dtype are raised.

    Args:
        features: widths of the matrices whose rows were multiplied with each other, if norms are
            made of such products (embeddings, segments). Tensor cores err by at most so much of the
            norms of two rows, whatever these hold, and so do all products together of the squared
            spread (see :func:`gram_doubt`).
    """
    if dtype == torch.float64:
        return 2.0**-47
    matrices = 1 + 2.5 * len(features)
    if device_type == "cpu":
        return 2.0**-21 * matrices
    # ALONE · LOST_OF_SINGLES is 2.25 · 2**-18. Sums of so many products are added up in fp32.
    return 2.0**-18 * matrices + sum(features) / ALONE * 2.0**-24


def error_bound(spread_B: Tensor, *features: int) -> Tensor:
    """The error bound of squared norms of samples with this spread, ``CANCELLATION · spread²``."""
    share = cancellation(spread_B.device.type, spread_B.dtype, *features)
    return spread_B.square().mul_(share)


TOGETHER = 256
"""Rows whose products references add up by themselves; such results are then added up in turn."""

APART = 128
"""Above so many positions references add up a sample by itself, before it meets others."""


def additions(rows: int) -> int:
    """How many a product of so many rows meets at most, in a reference."""
    return min(rows, TOGETHER) + math.ceil(rows / TOGETHER)


def additions_among(rows: int, others: int) -> int:
    """The same of rows that stand anywhere among so many, as those of a unit: it is a row's sum, a
    remainder or a chunk that is added to what is there, three for :data:`TOGETHER` rows at most (a
    sample above :data:`APART` by itself is one for half as many)."""
    return min(rows, TOGETHER + math.ceil(3 * others / TOGETHER))


def additions_doubt(
    sq_B: Tensor, spread_B: Tensor, met: int | Tensor, apart: bool = False
) -> Tensor:
    """The error bound of squared norms of products ``G_bᵀ A_b`` that were added up in the dtype of
    ``sq_B``, whatever a sample holds.

    Args:
        sq_B: the squared norms.
        spread_B: the spread of every sample, of the same shape.
        met: additions that a product meets, when it is measured and when it is released together
            (:func:`additions`; none that are in float64). A tensor: of every sample.
        apart: whether a sample is added up by itself, and only the result to those of others.

    A sum of n numbers is off by at most ``n u`` of the sum of their absolutes, in any order and
    with the roundings of products (Jeannerod and Rump, "Improved error bounds for inner products in
    floating-point arithmetic", 2013). So what is released of a sample whose measured norm is n has
    a norm of at most ``n + δ``, with ``δ = (met + 8) u spread``. Its square is at most
    ``n² + (2 n + δ) δ``, and at most ``(1 + s) n² + (1 + 1/s) δ²`` for any s, of which
    ``s = 2 SLACK`` is granted. Up to some 100 additions on a CPU this is what
    :func:`error_bound` grants.

    Of a sample whose positions cancel, nothing but rounding may be released, up to the norm C. If
    it is not added up by itself this depends on who else is there: then the bound is
    ``δ² / (2 SLACK)``, which leaves a hundredth of C of it, or at least :func:`error_bound`, which
    leaves ``met u / √CANCELLATION``.
    """
    off = (met + 8) * (torch.finfo(sq_B.dtype).eps / 2)
    by_slack = off * off / (2 * SLACK)
    granted = cancellation(spread_B.device.type, sq_B.dtype)
    if sq_B.dtype == torch.float64 or not isinstance(met, Tensor) and by_slack <= granted:
        return spread_B.square().mul_(granted)  # error_bound
    delta_B = spread_B * off
    if not apart:
        return _doubt_of_shared(sq_B, delta_B, spread_B.square().mul_(granted))
    by_slack_B = delta_B.square().mul_(1 / (2 * SLACK))
    return torch.minimum(doubt_by_norm(sq_B, delta_B), by_slack_B)


def doubt_by_norm(sq_B: Tensor, delta_B: Tensor) -> Tensor:
    """``(n + δ)² - n²`` of squared norms n²: the error bound of what is off by δ."""
    return sq_B.clamp(min=0).sqrt_().mul_(2).add_(delta_B).mul_(delta_B)


def _doubt_of_shared(sq_B: Tensor, delta_B: Tensor, general_B: Tensor) -> Tensor:
    """The same where a sample is not added up by itself; ``general_B``: of :func:`error_bound`."""
    doubt_B = torch.maximum(doubt_by_norm(sq_B, delta_B), general_B)
    return torch.minimum(doubt_B, delta_B.square().mul_(1 / (2 * SLACK)))


def gram_doubt(
    sq_B: Tensor,
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
        sq_B: the squared norms.
        spread_sq_B: the squared spread, ``(Σ_t ‖a_t‖ ‖g_t‖)²``.
        AA_sq_B, GG_sq_B: squared Frobenius norms of ``A Aᵀ`` and ``G Gᵀ``.
        T: positions.
        promoted: features that tensor cores add up by themselves.
        sums: how many such results are then added up in fp32, at most.
        dtype: of the operands, the wider.

    *What is measured.* Running sums of ``a_t·a_s`` are at most ``‖a_t‖‖a_s‖``, by Cauchy and
    Schwarz, and so are the terms. So entries of ``A Aᵀ`` err by at most ``ε ‖a_t‖‖a_s‖`` with
    ``ε = promoted · LOST + sums · u``; those of ``G Gᵀ`` likewise. Let E be the one error and F the
    other. What is measured errs by ``⟨E, G Gᵀ⟩ + ⟨A Aᵀ, F⟩``, which is at most

    * ``2 ε spread²``, as ``|g_t·g_s| ≤ ‖g_t‖‖g_s‖``;
    * ``ε (‖A‖² ‖G Gᵀ‖ + ‖G‖² ‖A Aᵀ‖)`` in Frobenius' norm, by Cauchy and Schwarz once more, as
      ``‖E‖ ≤ ε Σ_t ‖a_t‖²``. ``‖A‖²`` is the sum of the T eigenvalues of ``A Aᵀ``, so at
      most √T times the root of the sum of their squares. This is at most ``2 ε √T overlap``, where
      ``overlap = ‖A Aᵀ‖ ‖G Gᵀ‖``.

    Where rows are far from parallel ``overlap`` is little more than the squared norm, of which
    ``spread²`` is T times as much. Where few rows are much longer than all others ``spread²`` may
    be less. It is the smaller that counts.

    *What is released.* A partial sum ``P = Σ_{t≤k} g_t a_tᵀ`` has ``‖P‖² = ⟨A Aᵀ, G Gᵀ⟩`` over the
    first k positions: at most ``overlap``, and at most ``spread²``. So have the terms that one
    instruction adds. So a sum that tensor cores add up without a rounding in between loses at most
    ``δ = T · LOST · √(2 overlap)`` of a sample whose norm is n, and
    ``(n + δ)² ≤ (1 + s) n² + (1 + 1/s) δ²`` for any s; that of which both are small is taken. Up to
    ``s = 2 · SLACK`` the first costs nothing: the bound is promised to within that.
    """
    lost = lost_of(dtype)
    of_entry = promoted * lost + sums * 2.0**-24
    added_up = 2.0**-18  # what sums over a tile's entries, and over tiles, lose in fp32: some 60 u
    s = gram_slack(T, dtype)
    released = 2 * (T * lost) ** 2 / s
    # Squares of entries below 2**-63 may be lost; there are at most T² of them.
    AA_B, GG_B = (x_B.sqrt().add_(T * 2.0**-62) for x_B in (AA_sq_B, GG_sq_B))
    by_overlap_B = AA_B.mul_(GG_B).mul_(2 * of_entry * math.sqrt(T) + added_up + released)
    by_spread_B = spread_sq_B * (2 * of_entry + added_up + released)
    # fmin: an overlap that is not a number, as inf times 0, says nothing.
    return torch.fmin(by_overlap_B, by_spread_B).mul_(1 + s).add_(sq_B, alpha=s - 2 * SLACK)


def gram_slack(T: int, dtype: torch.dtype) -> float:
    """s of :func:`gram_doubt`. Its bound holds ``δ² / s``."""
    lost = lost_of(dtype)
    return max(2 * SLACK, math.sqrt(8) * T * lost)


BLOCK = 64
"""Positions that :func:`product_doubt` counts together: a multiple of what an instruction adds, and
what kernels load at one time or a multiple of that."""


def product_doubt(
    sq_B: Tensor, rows_BT: Tensor, *, measured: int, released: int, dtype: torch.dtype
) -> Tensor:
    """The error bound of squared norms of products ``G_bᵀ A_b`` that tensor cores added up and that
    were not kept, whatever a sample holds.

    Args:
        sq_B: the squared norms, of products as they were rounded.
        rows_BT: ``‖a_t‖ ‖g_t‖`` (:func:`row_norms`).
        measured: positions, one after the other, that tensor cores added up by themselves for the
            norms; such results were then added up in fp32. A multiple of :data:`BLOCK`, or all.
        released: the same for the sums.
        dtype: of the operands.

    An instruction loses at most ``LOST`` for each product that it adds, of the greatest number in
    the sum. In entry (i, j) that is at most ``Σ_{s≤t} |g_si| |a_sj|`` over the positions up to its
    last, and such entries together have a Frobenius norm of at most ``Σ_{s≤t} ‖g_s‖ ‖a_s‖``. So a
    position counts as often as there are positions from its :data:`BLOCK` on to the end of what is
    added up with it: a product is off by at most

        ``δ = Σ_t (LOST · to_end_t + (results + 4) · u) ‖a_t‖ ‖g_t‖``

    when it is measured (δ₁), and when it is released (δ₂). What is released of a sample whose
    measured norm is n has a norm of at most ``n + δ₁ + δ₂``, the square of which is above ``n²`` by
    ``(2 n + δ₁ + δ₂) (δ₁ + δ₂)``.
    """
    T = rows_BT.shape[1]
    lost = lost_of(dtype)
    results = math.ceil(T / measured) + math.ceil(T / released)
    first_T = torch.arange(T, device=rows_BT.device).div_(BLOCK, rounding_mode="floor").mul_(BLOCK)
    to_end_T = torch.minimum(T - first_T, measured - first_T % measured)
    to_end_T += torch.minimum(T - first_T, released - first_T % released)
    weight_T = to_end_T.to(rows_BT.dtype).mul_(lost).add_((results + 8) * 2.0**-24)
    delta_B = (rows_BT * weight_T).sum(1)
    return sq_B.sqrt().mul_(2).add_(delta_B).mul_(delta_B)


def runs_doubt(
    sq_B: Tensor,
    ids_BT: Tensor,
    norms_BT: Tensor,
    on_tensor_cores: bool = False,
    shared: Sequence[int] | None = None,
) -> Tensor:
    """The error bound of squared norms ``Σ_i ‖Σ_{t: id_t = i} G_t‖²`` of which the inner sums were
    added up row by row, in the dtype of ``norms_BT``, and once more for what is released.

    Args:
        sq_B: the squared norms.
        ids_BT: of every position.
        norms_BT: ``‖G_t‖``.
        on_tensor_cores: whether these added up what was measured, as products with one-hot vectors.
        shared: where rows of a sample meet those of others before they are added up: features.
    """
    sorted_BT = ids_BT.sort(dim=1).values.contiguous()
    ids_BT = ids_BT.contiguous()
    rows_BT = torch.searchsorted(sorted_BT, ids_BT, right=True)
    rows_BT -= torch.searchsorted(sorted_BT, ids_BT)
    lost_B = lost_of_runs(rows_BT, norms_BT).sum(1)
    shared_B = None if shared is None else error_bound(norms_BT.sum(1), *shared)
    return doubt_of_runs(sq_B, lost_B, on_tensor_cores, shared_B)


def lost_of_runs(rows: Tensor, norms: Tensor) -> Tensor:
    """``L (L + 4)² ‖G_t‖²``: for rows of these norms, and how many L have the same id."""
    weight = rows.to(norms.dtype)
    weight *= (weight + 4).square_()
    return weight.mul_(norms.square())


def doubt_of_runs(
    sq_B: Tensor, lost_B: Tensor, on_tensor_cores: bool = False, shared_B: Tensor | None = None
) -> Tensor:
    """See :func:`runs_doubt`; ``lost_B``: :func:`lost_of_runs`, summed over a sample; ``shared_B``:
    what :func:`error_bound` says of those that meet others' rows (:func:`additions_doubt`).

    Let L be the rows of an id, of norms that add up to s. The sum of L numbers is off by at most
    ``L u`` of the sum of their absolutes, in any order (Jeannerod and Rump, "Improved error bounds
    for inner products in floating-point arithmetic", 2013), so that both sums, and the coefficient,
    are off by ``2 (L + 4) u s``. And ``s² ≤ L Σ ‖G_t‖²``. So all together are off by
    ``δ = 2 u √(Σ_t L (L + 4)² ‖G_t‖²)``, and the square of a norm n by ``2 n δ + δ²``. Rows of
    different ids do not cancel each other.

    Of a product with one-hot vectors, an instruction of tensor cores loses nothing where it adds
    zeros, and at most ``5 · 2⁻²⁵`` for a row that it adds (:data:`LOST_OF_HALVES`): with what is
    added up in fp32, both sums are then off by less than ``5 (L + 4) u s``.
    """
    u = torch.finfo(lost_B.dtype).eps / 2
    delta_B = lost_B.sqrt().mul_((5 if on_tensor_cores else 2) * u)
    if shared_B is not None:
        return _doubt_of_shared(sq_B, delta_B, shared_B)
    return doubt_by_norm(sq_B, delta_B)


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
