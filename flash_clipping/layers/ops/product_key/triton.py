"""Kernels for product keys: a program has some rows, and one launch does all of a direction.

R rows of a program, S entries of an axis, C candidates, K choices; all but R rounded up to a power
of 2. See ``reference.py`` for which candidates there are, and why.

The best entries of an axis are taken one by one: the greatest key that is below the last. A key
holds a logit and its entry in one integer, so that a logit's ties go to the smaller entry, and no
two keys are equal. Logits of 16 bits have keys of 32, with which this takes half as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.layers.ops.product_key.reference import staircase_size
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.backend import is_interpreting
from flash_clipping.ops.runtime.tiles import launch

ELEMENTS = 1024
"""Elements of an axis, or candidates, of a program, if that is more than one row."""
MOST_ROWS = 8
INTERPRETED_ROWS = 64  # the interpreter takes as long for one row as for many
OF_WARP = 1024
"""Elements of a row for which there is a warp more: one warp alone waits for no other."""

_NO_INDEX = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _load_axis(logits_ptr, n, N, s, stride, S: tl.constexpr):
    """``[R, S]``, and where it has entries."""
    column = tl.arange(0, S)
    inside = (n < N)[:, None] & (column < s)[None, :]
    at = logits_ptr + n.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=inside, other=0.0), inside


@triton.jit
def _mirrored(bits, SIGN: tl.constexpr):
    """Bits of a number as an integer that is ordered like the number; and back again."""
    return bits ^ ((bits >> SIGN) & ((1 << SIGN) - 1))


@triton.jit
def _best_of_axis(
    logits, inside, rank, w: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Logit and entry at each of the ranks ``[C]``, ``[R, C]`` each; and ``[R, 1]``, ``log Σ
    exp(logit - greatest)``: NaN for an axis with NaN, ``+inf`` or nothing but ``-inf``."""
    NARROW: tl.constexpr = logits.dtype.primitive_bitwidth == 16
    NONE: tl.constexpr = -(2**31) if NARROW else -(2**63)  # below every key
    column = tl.arange(0, S)[None, :]
    plain = logits.to(tl.float32) + 0.0  # -0 becomes 0
    if NARROW:
        bits = plain.to(logits.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        keys = _mirrored(bits, 15) * 65536 + (65535 - column)
    else:
        bits = plain.to(tl.int32, bitcast=True).to(tl.int64)
        keys = _mirrored(bits, 31) * 4294967296 + (4294967295 - column.to(tl.int64))
    keys = tl.where(inside, keys, NONE)
    best = tl.full((R, C), NONE, keys.dtype)
    key_R = tl.max(keys, 1)
    for of_rank in range(w):
        best = tl.where((rank == of_rank)[None, :], key_R[:, None], best)
        key_R = tl.max(tl.where(keys < key_R[:, None], keys, NONE), 1)
    if NARROW:
        entries = 65535 - (best & 65535)
        values = _mirrored(best >> 16, 15).to(tl.int16).to(logits.dtype, bitcast=True)
        values = values.to(tl.float32)
    else:
        entries = (4294967295 - (best & 4294967295)).to(tl.int32)
        values = _mirrored(best >> 32, 31).to(tl.int32).to(tl.float32, bitcast=True)
    greatest = tl.max(tl.where(inside, plain, -_INFINITY), 1)
    total = tl.sum(tl.where(inside, tl.exp(plain - greatest[:, None]), 0.0), 1)
    return values, entries, tl.log(total)[:, None]


@triton.jit
def _scores_kernel(
    x_ptr, y_ptr, scores_ptr, indices_ptr,
    N, x_stride, y_stride,
    s: tl.constexpr, k: tl.constexpr, w: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    # Ranks of the candidates: row a of the staircase begins where those before it end.
    candidate = tl.arange(0, C)
    a = tl.zeros((C,), tl.int32)
    start = tl.zeros((C,), tl.int32)
    begins = 0
    for row in range(w):
        a = tl.where(candidate >= begins, row, a)
        start = tl.where(candidate >= begins, begins, start)
        begins += tl.minimum(k // (row + 1), w)
    exists = candidate < begins
    b = candidate - start

    n = tl.program_id(0) * R + tl.arange(0, R)
    x, inside = _load_axis(x_ptr, n, N, s, x_stride, S)
    y, _ = _load_axis(y_ptr, n, N, s, y_stride, S)
    first, ix, log_x = _best_of_axis(x, inside, tl.where(exists, a, -1), w, S, R, C)
    second, iy, log_y = _best_of_axis(y, inside, tl.where(exists, b, -1), w, S, R, C)
    exists = exists[None, :]
    index = tl.where(exists, ix * s + iy, _NO_INDEX)

    # The rounded sum and what it lacks, as in the reference: products would be contracted, sums
    # are not.
    total = first + second
    of_second = total - first
    rest = (first - (total - of_second)) + (second - of_second)
    rest = tl.where(exists & (tl.abs(total) < _INFINITY), rest, 0.0)
    total = tl.where(exists, total, -_INFINITY)

    place = tl.arange(0, K)[None, :]
    sums = tl.zeros((R, K), tl.float32)
    chosen = tl.zeros((R, K), tl.int32)
    for j in range(k):
        most = tl.max(total, 1)
        tied = total == most[:, None]
        rest_of_most = tl.max(tl.where(tied, rest, -_INFINITY), 1)
        tied = tied & (rest == rest_of_most[:, None])
        found = tl.min(tl.where(tied, index, _NO_INDEX), 1)
        sums = tl.where(place == j, most[:, None], sums)
        chosen = tl.where(place == j, found[:, None], chosen)
        total = tl.where(index == found[:, None], -_INFINITY, total)

    log_xy = log_x + log_y
    most = tl.max(tl.where(place == 0, sums, -_INFINITY), 1)[:, None]
    none = (log_xy != log_xy) | (tl.abs(most) == _INFINITY)
    scores = tl.where(none, float("nan"), (sums - most) - log_xy)
    chosen = tl.where(sums == -_INFINITY, -1, chosen)
    chosen = tl.where(none, place, chosen)
    at = n.to(tl.int64)[:, None] * k + place
    inside = (n < N)[:, None] & (place < k)
    tl.store(scores_ptr + at, scores, mask=inside)
    tl.store(indices_ptr + at, chosen, mask=inside)


@triton.jit
def _grad_of_axis(
    logits_ptr, dlogits_ptr, indices_ptr, grad_ptr,
    n, N, stride,
    s: tl.constexpr, k: tl.constexpr, IS_X: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Softmax times the sum everywhere; then the chosen entries once more, with their own. Choices
    of one entry all write the same sum, added up in one order."""
    row = n.to(tl.int64)
    place = tl.arange(0, K)[None, :]
    at = row[:, None] * k + place
    asked = (n < N)[:, None] & (place < k)
    index = tl.load(indices_ptr + at, mask=asked, other=-1)
    valid = (index >= 0) & (index < s * s)
    grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
    of_row = tl.sum(grad, 1)[:, None]
    any_valid = tl.max(valid.to(tl.int32), 1)[:, None] > 0
    index = tl.where(valid, index, 0)
    entry = index // s if IS_X else index % s

    logits, inside = _load_axis(logits_ptr, n, N, s, stride, S)
    logits = tl.where(inside, logits.to(tl.float32), -_INFINITY)
    greatest = tl.max(logits, 1)[:, None]
    powers = tl.where(inside, tl.exp(logits - greatest), 0.0)
    total = tl.sum(powers, 1)[:, None]
    everywhere = tl.where(any_valid, -(powers / total) * of_row, 0.0)
    column = tl.arange(0, S)[None, :]
    dlogits_ptr += row[:, None] * s
    tl.store(dlogits_ptr + column, everywhere, mask=inside)

    own = tl.zeros((R, K), tl.float32)
    for j in range(k):
        one = tl.load(indices_ptr + row * k + j, mask=n < N, other=-1)
        is_one = (one >= 0) & (one < s * s)
        grad_of_one = tl.load(grad_ptr + row * k + j, mask=is_one, other=0.0).to(tl.float32)
        one = tl.where(is_one, one, 0)
        entry_of_one = one // s if IS_X else one % s
        own += tl.where(entry == entry_of_one[:, None], grad_of_one[:, None], 0.0)
    chosen = tl.load(logits_ptr + row[:, None] * stride + entry, mask=valid, other=0.0)
    power = tl.exp(chosen.to(tl.float32) - greatest)
    tl.debug_barrier()  # what was written everywhere is overwritten, not the other way round
    tl.store(dlogits_ptr + entry, own - (power / total) * of_row, mask=valid)


@triton.jit
def _logits_grad_kernel(
    grad_ptr, indices_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr,
    N, x_stride, y_stride,
    s: tl.constexpr, k: tl.constexpr, R: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * R + tl.arange(0, R)
    _grad_of_axis(x_ptr, dx_ptr, indices_ptr, grad_ptr, n, N, x_stride, s, k, True, R, S, K)
    _grad_of_axis(y_ptr, dy_ptr, indices_ptr, grad_ptr, n, N, y_stride, s, k, False, R, S, K)


def product_key_scores(logits_x: Tensor, logits_y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits_x, logits_y = tiles.with_unit_stride(logits_x), tiles.with_unit_stride(logits_y)
    N, side = logits_x.shape
    w = min(k, side)
    # Made from the logits, so that what follows them finds that these derive from them.
    scores_Nk = logits_x.new_empty((N, k))
    indices_Nk = logits_x.new_empty((N, k), dtype=torch.int32)
    S, C = tiles.next_power_of_2(side), tiles.next_power_of_2(staircase_size(k, w))
    rows, warps = _shape_of_program(max(S, C))
    launch(
        _scores_kernel, tiles.cdiv(N, rows),
        logits_x, logits_y, scores_Nk, indices_Nk, N, logits_x.stride(0), logits_y.stride(0),
        s=side, k=k, w=w, R=rows, S=S, C=C, K=tiles.next_power_of_2(k),
        num_warps=warps,
    )  # fmt: skip
    return scores_Nk, indices_Nk


def product_key_backward(
    grad_scores: Tensor, indices: Tensor, logits_x: Tensor, logits_y: Tensor
) -> tuple[Tensor, Tensor]:
    logits_x, logits_y = tiles.with_unit_stride(logits_x), tiles.with_unit_stride(logits_y)
    (N, side), k = logits_x.shape, indices.shape[1]
    dx_Ns, dy_Ns = logits_x.new_empty((N, side)), logits_y.new_empty((N, side))
    S = tiles.next_power_of_2(side)
    rows, warps = _shape_of_program(S)
    launch(
        _logits_grad_kernel, tiles.cdiv(N, rows),
        grad_scores.contiguous(), indices.contiguous(), logits_x, logits_y, dx_Ns, dy_Ns, N,
        logits_x.stride(0), logits_y.stride(0),
        s=side, k=k, R=rows, S=S, K=tiles.next_power_of_2(k),
        num_warps=warps,
    )  # fmt: skip
    return dx_Ns, dy_Ns


def _shape_of_program(elements: int) -> tuple[int, int]:
    """Rows and warps of a program whose rows have so many elements."""
    if is_interpreting():
        return INTERPRETED_ROWS, 1
    return max(1, min(MOST_ROWS, ELEMENTS // elements)), max(1, elements // OF_WARP)
