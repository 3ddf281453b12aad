"""Kernels for hyper-connections.

N = B·S positions, n streams, D features of each, K = n·D, m = n² + 2n logits. ``ROWS`` positions
and ``COLUMNS`` features at a time; ``LOGITS`` and ``STREAMS`` are m and n with room up to a power
of 2.

Forward reads ``x`` twice: for the product with ``w = phi·gamma`` together with the mean square, and
for ``h``. What stands between reads m numbers of a position, and is a launch of its
own: a position's n×n matrix stays in registers. Backward reads ``x`` twice as well, since the
gradient of ``pre`` is a sum over features, on which all of ``dx`` depends. What goes by way of
``post`` and ``comb`` is computed beside the first pass. In the second a program keeps its columns:
``w`` is read once, and sums over positions stay in registers.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.layers.ops.hyper_connections.reference import Parameters, Settings
from flash_clipping.layers.ops.stream_mix.triton import columns_at_once
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tiles import launch, load_rows, store_rows

MIX_ROWS = 64
"""Positions of one product with ``w``, which every program reads whole."""
COLUMNS = 64
"""Of a tile of ``x`` that is multiplied."""
GRAD_ROWS = 64
GRAD_STREAMS = 2
"""Of so many streams a program of backward's second pass keeps sums; it reads ``dh`` once for them:
as many as fit into registers."""
CHUNK = 1024
"""Positions that one program of backward's second pass adds up: 3 % of traffic, for four streams.
Not chosen by the batch's size, so that a sample is rounded alike in every batch."""
GATE_ROWS = 32


@triton.jit
def _high_and_low(x, DTYPE: tl.constexpr):
    """An fp32 tile as a sum of two of 16 bits, with an error of 2⁻¹⁷."""
    high = x.to(DTYPE)
    return high, (x - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _weights_kernel(
    phi_ptr, gamma_ptr, w_ptr, K, m,
    COLUMNS: tl.constexpr, LOGITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """``w = phi·gamma``; where ``SPLIT``, its high part and behind it its low one."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    logit = tl.arange(0, LOGITS)
    in_logits, in_width = logit < m, column < K
    gamma = tl.load(gamma_ptr + column, mask=in_width, other=0.0).to(tl.float32)
    w = load_rows(phi_ptr, logit, K, column, in_logits, in_width).to(tl.float32) * gamma[None, :]
    if SPLIT:
        high, low = _high_and_low(w, w_ptr.dtype.element_ty)
        store_rows(w_ptr, logit, K, column, high, in_logits, in_width)
        store_rows(w_ptr, LOGITS + logit, K, column, low, in_logits, in_width)
    else:
        store_rows(w_ptr, logit, K, column, w, in_logits, in_width)


@triton.jit
def _mix_kernel(
    x_ptr, w_ptr, mix_ptr, inv_ptr,
    N, K, m,
    EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOGITS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``mix = x wᵀ`` and ``inv = rsqrt(mean(x²) + eps)``, both from one pass over ``x``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    HEIGHT: tl.constexpr = 2 * LOGITS if SPLIT else LOGITS
    tall, logit = tl.arange(0, HEIGHT), tl.arange(0, LOGITS)
    in_rows = row < N
    mix = tl.zeros((ROWS, LOGITS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS // 8), tl.float32)  # of eight columns in a thread
    for first in tl.range(0, K, COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        in_width = column < K
        x = load_rows(x_ptr, row, K, column, in_rows, in_width)
        w = load_rows(w_ptr, tall, K, column, tall % LOGITS < m, in_width)
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (ROWS, COLUMNS // 8, 8)), 2)
        if SPLIT:
            # Added up outside of the product: were it still under way in the next iteration, Triton
            # (3.6, 3.7) would load over rows that it reads, as squares read them too.
            parts = tl.reshape(tl.dot(x, tl.trans(w)), (ROWS, 2, LOGITS))
            mix += tl.sum(parts, 1)
        else:
            mix = tl.dot(wide, tl.trans(w), mix, input_precision=PRECISION)
    inv = tl.rsqrt(tl.sum(squares, 1) / K + EPS)
    tl.store(inv_ptr + row, inv, mask=in_rows)
    store_rows(mix_ptr, row, m, logit, mix, in_rows, logit < m)


@triton.jit
def _gather_kernel(
    x_ptr, pre_ptr, h_ptr, D, n, blocks, STREAMS: tl.constexpr, COLUMNS: tl.constexpr
):
    """``h = Σ_n pre_n x_n``, a block of one position's columns."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    stream = tl.arange(0, STREAMS)
    in_streams, in_width = stream < n, column < D
    pre = tl.load(pre_ptr + row * n + stream, mask=in_streams, other=0.0)
    x = load_rows(x_ptr, row * n + stream, D, column, in_streams, in_width).to(tl.float32)
    h = tl.sum(x * pre[:, None], 0)
    tl.store(h_ptr + row * D + column, h.to(h_ptr.dtype.element_ty), mask=in_width)


@triton.jit
def _input_grad_kernel(
    x_ptr, dh_ptr, w_ptr, pre_ptr, dmix_ptr, of_square_ptr, dx_ptr, product_ptr,
    S, D, n, m, chunks, blocks, groups,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOGITS: tl.constexpr,
    EACH: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx`` of some columns of ``EACH`` streams, for a chunk of one sample's positions, and this
    chunk's part of ``dmixᵀ x``. Pointers of results that are not wanted are None.

    Where ``SPLIT``, the two parts of ``dmix`` lie side by side, so that one product takes both.
    """
    pid = tl.program_id(0)
    group = pid % groups  # programs side by side read the same dh
    block = pid // groups % blocks
    part = (pid // groups // blocks).to(tl.int64)  # b · chunks + chunk
    b, chunk = part // chunks, part % chunks
    first = chunk * CHUNK
    last = min(first + CHUNK, S)
    K = n * D
    HEIGHT: tl.constexpr = 2 * LOGITS if SPLIT else LOGITS
    tall, logit = tl.arange(0, HEIGHT), tl.arange(0, LOGITS)
    feature = block * COLUMNS + tl.arange(0, COLUMNS)
    in_width, in_logits = feature < D, logit < m
    weights = ()
    products = ()
    for i in tl.static_range(EACH):
        stream = group * EACH + i
        inside = in_width & (stream < n)
        w = load_rows(w_ptr, tall % LOGITS, K, stream * D + feature, tall % LOGITS < m, inside)
        weights = weights + (w,)
        products = products + (tl.zeros((HEIGHT, COLUMNS), tl.float32),)
    for begin in tl.range(first, last, ROWS, num_stages=STAGES):
        position = begin + tl.arange(0, ROWS)
        in_rows = position < last
        row = b * S + position
        at = dmix_ptr + row[:, None] * HEIGHT + tall[None, :]
        dmix = tl.load(at, mask=in_rows[:, None], other=0.0)
        if dx_ptr is not None:
            dh = load_rows(dh_ptr, row, D, feature, in_rows, in_width).to(tl.float32)
            of_square = tl.load(of_square_ptr + 2 * row, mask=in_rows, other=0.0)
            of_square += tl.load(of_square_ptr + 2 * row + 1, mask=in_rows, other=0.0)
        added = ()
        for i in tl.static_range(EACH):
            stream = group * EACH + i
            column, inside = stream * D + feature, in_width & (stream < n)
            x = load_rows(x_ptr, row, K, column, in_rows, inside)
            if product_ptr is not None:
                if SPLIT:
                    product = tl.dot(tl.trans(dmix), x, products[i])
                else:
                    wide = x.to(tl.float32)
                    product = tl.dot(tl.trans(dmix), wide, products[i], input_precision=PRECISION)
                added = added + (product,)
            if dx_ptr is not None:
                pre = tl.load(pre_ptr + row * n + stream, mask=in_rows & (stream < n), other=0.0)
                dx = tl.dot(dmix, weights[i], input_precision=PRECISION)
                dx += pre[:, None] * dh + of_square[:, None] * x.to(tl.float32)
                store_rows(dx_ptr, row, K, column, dx, in_rows, inside)
        if product_ptr is not None:
            products = added
    if product_ptr is not None:
        for i in tl.static_range(EACH):
            stream = group * EACH + i
            product = products[i]
            if SPLIT:
                product = tl.sum(tl.reshape(product, (2, LOGITS, COLUMNS)), 0)
            column, inside = stream * D + feature, in_width & (stream < n)
            store_rows(product_ptr, part * m + logit, K, column, product, in_logits, inside)


@triton.jit
def _parameter_grads_kernel(
    parts_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr,
    K, m, chunks, blocks,
    COLUMNS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """The gradient of ``w`` from its chunks, and of ``phi`` and ``gamma`` from that, of one sample
    and some columns."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    logit = tl.arange(0, LOGITS)
    in_logits, in_width = logit < m, column < K
    dw = tl.zeros((LOGITS, COLUMNS), tl.float32)
    for chunk in range(0, chunks):
        row = (b * chunks + chunk) * m + logit
        dw += load_rows(parts_ptr, row, K, column, in_logits, in_width)
    phi = load_rows(phi_ptr, logit, K, column, in_logits, in_width).to(tl.float32)
    gamma = tl.load(gamma_ptr + column, mask=in_width, other=0.0).to(tl.float32)
    store_rows(dphi_ptr, b * m + logit, K, column, dw * gamma[None, :], in_logits, in_width)
    tl.store(dgamma_ptr + b * K + column, tl.sum(dw * phi, 0), mask=in_width)


# -- what stands between products: logits of a position become pre, post and comb ------------------


@triton.jit
def _places(first, n, m, N, STREAMS: tl.constexpr, ROWS: tl.constexpr):
    """Rows, streams, where a position's matrix is among its logits, and what of it is there."""
    row = first + tl.arange(0, ROWS)
    stream = tl.arange(0, STREAMS)
    entry = (stream[:, None] * n + stream[None, :])[None, :, :]
    in_rows, in_streams = row < N, stream < n
    in_vector = in_rows[:, None] & in_streams[None, :]
    in_matrix = (in_streams[:, None] & in_streams[None, :])[None, :, :]
    return row, stream, entry, in_rows, in_vector, in_matrix


@triton.jit
def _softmax(logits, in_matrix):
    """Softmax of every row, and 0 outside of the matrix."""
    logits = tl.where(in_matrix, logits, float("-inf"))
    top = tl.max(logits, 2)
    top = tl.where(top == float("-inf"), 0.0, top)
    powers = tl.exp(logits - top[:, :, None])
    total = tl.sum(powers, 2)
    return powers / tl.where(total == 0.0, 1.0, total)[:, :, None]


@triton.jit
def _sinkhorn(
    mix_ptr, inv, alpha_ptr, bias_ptr, divisors_ptr, first, N, n, m,
    EPS: tl.constexpr, ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The product's part of ``comb``, softmax of the logits, and the doubly stochastic matrix.
    ``divisors_ptr``, if not None, gets what each of the ``2 · ITERATIONS - 1`` steps divided by,
    columns in the first and the last."""
    row, stream, entry, in_rows, in_vector, in_matrix = _places(first, n, m, N, STREAMS, ROWS)
    in_all = in_rows[:, None, None] & in_matrix
    bias = tl.load(bias_ptr + 2 * n + entry, mask=in_matrix, other=0.0).to(tl.float32)
    mix = tl.load(mix_ptr + row[:, None, None] * m + 2 * n + entry, mask=in_all, other=0.0)
    logits = tl.load(alpha_ptr + 2).to(tl.float32) * (mix * inv[:, None, None]) + bias
    softmax = _softmax(logits, in_matrix)
    matrix = tl.where(in_matrix, softmax + EPS, 0.0)
    of_divisors = (row * (2 * ITERATIONS - 1))[:, None] * n + stream[None, :]
    divisor = tl.sum(matrix, 1) + EPS
    matrix = matrix / divisor[:, None, :]
    if divisors_ptr is not None:
        tl.store(divisors_ptr + of_divisors, divisor, mask=in_vector)
    for iteration in range(1, ITERATIONS):
        divisor = tl.sum(matrix, 2) + EPS
        matrix = matrix / divisor[:, :, None]
        if divisors_ptr is not None:
            step = divisors_ptr + of_divisors + (2 * iteration - 1) * n
            tl.store(step, divisor, mask=in_vector)
        divisor = tl.sum(matrix, 1) + EPS
        matrix = matrix / divisor[:, None, :]
        if divisors_ptr is not None:
            step = divisors_ptr + of_divisors + 2 * iteration * n
            tl.store(step, divisor, mask=in_vector)
    return mix, softmax, matrix


@triton.jit
def _gates_kernel(
    mix_ptr, inv_ptr, alpha_ptr, bias_ptr, pre_ptr, post_ptr, comb_ptr,
    N, n, m,
    EPS: tl.constexpr, ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``pre``, ``post`` and ``comb`` of some positions."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, stream, entry, in_rows, in_vector, in_matrix = _places(first, n, m, N, STREAMS, ROWS)
    inv = tl.load(inv_ptr + row, mask=in_rows, other=0.0)
    of_vector = row[:, None] * m + stream[None, :]
    bias = tl.load(bias_ptr + stream, mask=stream < n, other=0.0).to(tl.float32)
    t = tl.load(mix_ptr + of_vector, mask=in_vector, other=0.0) * inv[:, None]
    pre = tl.sigmoid(tl.load(alpha_ptr).to(tl.float32) * t + bias[None, :]) + EPS
    store_rows(pre_ptr, row, n, stream, pre, in_rows, stream < n)
    bias = tl.load(bias_ptr + n + stream, mask=stream < n, other=0.0).to(tl.float32)
    t = tl.load(mix_ptr + of_vector + n, mask=in_vector, other=0.0) * inv[:, None]
    post = 2 * tl.sigmoid(tl.load(alpha_ptr + 1).to(tl.float32) * t + bias[None, :])
    store_rows(post_ptr, row, n, stream, post, in_rows, stream < n)
    _, _, comb = _sinkhorn(
        mix_ptr, inv, alpha_ptr, bias_ptr, None, first, N, n, m, EPS, ITERATIONS, STREAMS, ROWS
    )
    in_all = in_rows[:, None, None] & in_matrix
    tl.store(comb_ptr + row[:, None, None] * (n * n) + entry, comb, mask=in_all)


@triton.jit
def _position_grads_kernel(
    x_ptr, dh_ptr, mix_ptr, inv_ptr, alpha_ptr, bias_ptr, dpost_ptr, dcomb_ptr, divisors_ptr,
    pre_ptr, dalpha_ptr, dlogits_ptr, dmix_ptr, parts_ptr, of_square_ptr,
    N, D, n, m, gates,
    EPS: tl.constexpr, ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, LOGITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVERY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradients of ``pre, post, comb`` to those of logits, product, ``alpha`` and ``bias``: a row
    for every position. One program in ``EVERY`` has ``ROWS`` positions' ``post`` and ``comb``, and
    computes while the others, of one position's ``pre``, read; it is at most ``ROWS + 1``.

    ``of_square`` is the factor of ``x`` in ``dx`` by way of the mean square: what ``pre`` adds,
    and all others. ``parts``, if not None, gets the two parts of ``dmix``, as ``SPLIT`` says.
    """
    pid = tl.program_id(0)
    if (pid % EVERY == 0) & (pid < gates * EVERY):
        _gates_grad(
            mix_ptr, inv_ptr, alpha_ptr, bias_ptr, dpost_ptr, dcomb_ptr, divisors_ptr,
            dalpha_ptr, dlogits_ptr, dmix_ptr, parts_ptr, of_square_ptr,
            (pid // EVERY).to(tl.int64) * ROWS,
            N, D, n, m, EPS, ITERATIONS, STREAMS, LOGITS, ROWS, SPLIT,
        )  # fmt: skip
    else:
        _pre_grad(
            x_ptr, dh_ptr, mix_ptr, inv_ptr, alpha_ptr, bias_ptr, pre_ptr, dalpha_ptr,
            dlogits_ptr, dmix_ptr, parts_ptr, of_square_ptr,
            (pid - min(gates, tl.cdiv(pid, EVERY))).to(tl.int64),
            D, n, m, EPS, STREAMS, LOGITS, COLUMNS, SPLIT,
        )  # fmt: skip


@triton.jit
def _store_dmix(
    dmix_ptr, parts_ptr, dmix, row, m, logit, inside,
    LOGITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """``dmix`` as it is, and as the second pass reads it."""
    tl.store(dmix_ptr + row * m + logit, dmix, mask=inside)
    _store_parts(parts_ptr, dmix, row, logit, inside, LOGITS, SPLIT)


@triton.jit
def _store_parts(
    parts_ptr, dmix, row, logit, inside, LOGITS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    if SPLIT:
        high, low = _high_and_low(dmix, parts_ptr.dtype.element_ty)
        at = parts_ptr + row * (2 * LOGITS) + logit
        tl.store(at, high, mask=inside)
        tl.store(at + LOGITS, low, mask=inside)
    else:
        tl.store(parts_ptr + row * LOGITS + logit, dmix, mask=inside)


@triton.jit
def _pre_grad(
    x_ptr, dh_ptr, mix_ptr, inv_ptr, alpha_ptr, bias_ptr, pre_ptr, dalpha_ptr, dlogits_ptr,
    dmix_ptr, parts_ptr, of_square_ptr, row, D, n, m,
    EPS: tl.constexpr, STREAMS: tl.constexpr, LOGITS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """``dpre_n = Σ_d x_nd dh_d`` of one position, and what follows from it."""
    stream = tl.arange(0, STREAMS)
    in_streams = stream < n
    products = tl.zeros((STREAMS, COLUMNS), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        in_width = column < D
        dh = tl.load(dh_ptr + row * D + column, mask=in_width, other=0.0).to(tl.float32)
        x = load_rows(x_ptr, row * n + stream, D, column, in_streams, in_width).to(tl.float32)
        products += x * dh[None, :]
    alpha, inv = tl.load(alpha_ptr).to(tl.float32), tl.load(inv_ptr + row)
    bias = tl.load(bias_ptr + stream, mask=in_streams, other=0.0).to(tl.float32)
    mix = tl.load(mix_ptr + row * m + stream, mask=in_streams, other=0.0)
    share = tl.sigmoid(alpha * (mix * inv) + bias)
    dlogit = tl.sum(products, 1) * share * (1 - share)
    dlogit = tl.where(in_streams, dlogit, 0.0)
    dt = alpha * dlogit
    tl.store(pre_ptr + row * n + stream, share + EPS, mask=in_streams)
    tl.store(dlogits_ptr + row * m + stream, dlogit, mask=in_streams)
    tl.store(dalpha_ptr + row * 3, tl.sum(dlogit * (mix * inv), 0))
    tl.store(of_square_ptr + 2 * row, -inv * inv * inv * tl.sum(dt * mix, 0) / (n * D))
    _store_dmix(dmix_ptr, parts_ptr, dt * inv, row, m, stream, in_streams, LOGITS, SPLIT)


@triton.jit
def _gates_grad(
    mix_ptr, inv_ptr, alpha_ptr, bias_ptr, dpost_ptr, dcomb_ptr, divisors_ptr, dalpha_ptr,
    dlogits_ptr, dmix_ptr, parts_ptr, of_square_ptr, first, N, D, n, m,
    EPS: tl.constexpr, ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, LOGITS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradients by way of ``post`` and ``comb``."""
    row, stream, entry, in_rows, in_vector, in_matrix = _places(first, n, m, N, STREAMS, ROWS)
    inv = tl.load(inv_ptr + row, mask=in_rows, other=0.0)
    alpha = tl.load(alpha_ptr + 1).to(tl.float32)
    bias = tl.load(bias_ptr + n + stream, mask=stream < n, other=0.0).to(tl.float32)
    of_vector, logit = row[:, None] * m + n + stream[None, :], n + stream[None, :]
    mix = tl.load(mix_ptr + of_vector, mask=in_vector, other=0.0)
    t = mix * inv[:, None]
    share = tl.sigmoid(alpha * t + bias[None, :])
    grad = tl.load(dpost_ptr + row[:, None] * n + stream[None, :], mask=in_vector, other=0.0)
    dlogit = 2 * grad.to(tl.float32) * share * (1 - share)
    dt = alpha * dlogit
    dinv = tl.sum(dt * mix, 1)
    tl.store(dlogits_ptr + of_vector, dlogit, mask=in_vector)
    tl.store(dalpha_ptr + row * 3 + 1, tl.sum(dlogit * t, 1), mask=in_rows)
    dmix = dt * inv[:, None]
    _store_dmix(dmix_ptr, parts_ptr, dmix, row[:, None], m, logit, in_vector, LOGITS, SPLIT)

    mix, softmax, after = _sinkhorn(
        mix_ptr, inv, alpha_ptr, bias_ptr, divisors_ptr,
        first, N, n, m, EPS, ITERATIONS, STREAMS, ROWS,
    )  # fmt: skip
    tl.debug_barrier()  # divisors are read by other threads
    in_all = in_rows[:, None, None] & in_matrix
    of_matrix = row[:, None, None] * (n * n) + entry
    # Backwards through the steps: of after = before / d, with d = Σ before + eps, the gradient is
    # dbefore = (dafter - Σ dafter·after) / d, and before = after · d.
    grad = tl.load(dcomb_ptr + of_matrix, mask=in_all, other=0.0).to(tl.float32)
    of_divisors = (row * (2 * ITERATIONS - 1))[:, None] * n + stream[None, :]
    for back in range(1, ITERATIONS):
        step = divisors_ptr + of_divisors + 2 * (ITERATIONS - back) * n
        divisor = tl.load(step, mask=in_vector, other=1.0)
        grad = (grad - tl.sum(grad * after, 1)[:, None, :]) / divisor[:, None, :]
        after = after * divisor[:, None, :]
        divisor = tl.load(step - n, mask=in_vector, other=1.0)
        grad = (grad - tl.sum(grad * after, 2)[:, :, None]) / divisor[:, :, None]
        after = after * divisor[:, :, None]
    divisor = tl.load(divisors_ptr + of_divisors, mask=in_vector, other=1.0)
    grad = (grad - tl.sum(grad * after, 1)[:, None, :]) / divisor[:, None, :]
    dlogit = softmax * (grad - tl.sum(grad * softmax, 2)[:, :, None])
    alpha = tl.load(alpha_ptr + 2).to(tl.float32)
    dt = alpha * dlogit
    dinv += tl.sum(tl.sum(dt * mix, 2), 1)
    tl.store(dlogits_ptr + row[:, None, None] * m + 2 * n + entry, dlogit, mask=in_all)
    of_alpha = tl.sum(tl.sum(dlogit * (mix * inv[:, None, None]), 2), 1)
    tl.store(dalpha_ptr + row * 3 + 2, of_alpha, mask=in_rows)
    tl.store(of_square_ptr + 2 * row + 1, -inv * inv * inv * dinv / (n * D), mask=in_rows)
    dmix = dt * inv[:, None, None]
    _store_dmix(
        dmix_ptr, parts_ptr, dmix, row[:, None, None], m, 2 * n + entry, in_all, LOGITS, SPLIT
    )
    room = tl.arange(0, LOGITS)[None, :]
    inside = in_rows[:, None] & (room >= m)
    nothing = tl.zeros((ROWS, LOGITS), tl.float32)
    _store_parts(parts_ptr, nothing, row[:, None], room, inside, LOGITS, SPLIT)


def hyper_connections(x_BSnD: Tensor, params: Parameters, settings: Settings) -> tuple[Tensor, ...]:
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, len(params[0])
    x = x_BSnD.contiguous()
    _, alpha_3, bias_m, _ = params
    mix_BSm = x.new_empty((B, S, m), dtype=torch.float32)
    inv_BS, pre_BSn = mix_BSm.new_empty((B, S)), mix_BSm.new_empty((B, S, n))
    # Enough programs for all multiprocessors, where there are few positions.
    rows = tiles.next_power_of_2(tiles.cdiv(N, tiles.sm_count(x.device)))
    logits, splits = _room(m), _splits(x.dtype)
    rows = max(16, min(MIX_ROWS if logits <= 32 else MIX_ROWS // 2, rows))
    launch(
        _mix_kernel, tiles.cdiv(N, rows),
        x, _weights(x, params), mix_BSm, inv_BS, N, K, m,
        EPS=settings.norm_eps, ROWS=rows, COLUMNS=COLUMNS, LOGITS=logits, SPLIT=splits,
        PRECISION=tiles.dot_precision(torch.float32), STAGES=_stages(4, logits, splits),
        num_warps=4,
    )  # fmt: skip
    post_BSn, comb_BSnn = torch.empty_like(pre_BSn), mix_BSm.new_empty((B, S, n, n))
    launch(
        _gates_kernel, tiles.cdiv(N, _gate_rows(n)),
        mix_BSm, inv_BS, alpha_3.contiguous(), bias_m.contiguous(), pre_BSn, post_BSn, comb_BSnn,
        N, n, m,
        EPS=settings.hc_eps, ITERATIONS=settings.iterations, STREAMS=tiles.next_power_of_2(n),
        ROWS=_gate_rows(n),
        num_warps=4,
    )  # fmt: skip
    h_BSD = x.new_empty((B, S, D))
    columns = columns_at_once(D)
    blocks = tiles.cdiv(D, columns)
    launch(
        _gather_kernel, N * blocks,
        x, pre_BSn, h_BSD, D, n, blocks,
        STREAMS=tiles.next_power_of_2(n), COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return h_BSD, post_BSn, comb_BSnn, inv_BS, mix_BSm


def hyper_connections_backward(
    x_BSnD: Tensor,
    params: Parameters,
    settings: Settings,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    input_grad: bool,
    matrix_grad: bool,
) -> tuple[Any, ...]:
    dh_BSD, dpost_BSn, dcomb_BSnn = grads
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, len(params[0])
    x, dh = x_BSnD.contiguous(), dh_BSD.contiguous()
    inv_BS, mix_BSm = (tensor.contiguous() for tensor in saved)
    phi_mK, alpha_3, bias_m, gamma_nD = params
    logits, splits, iterations = _room(m), _splits(x.dtype), settings.iterations
    pre_BSn, dalpha_BS3 = mix_BSm.new_empty((B, S, n)), mix_BSm.new_empty((B, S, 3))
    dlogits_BSm, dmix_BSm = torch.empty_like(mix_BSm), torch.empty_like(mix_BSm)
    width = 2 * logits if splits else logits
    dmix_parts = mix_BSm.new_empty((N, width), dtype=x.dtype if splits else torch.float32)
    of_square_N2 = mix_BSm.new_empty((N, 2))
    gates = tiles.cdiv(N, _gate_rows(n))
    launch(
        _position_grads_kernel, gates + N,
        x, dh, mix_BSm, inv_BS, alpha_3.contiguous(), bias_m.contiguous(), dpost_BSn.contiguous(),
        dcomb_BSnn.contiguous(), mix_BSm.new_empty((N, 2 * iterations - 1, n)), pre_BSn,
        dalpha_BS3, dlogits_BSm, dmix_BSm, dmix_parts, of_square_N2, N, D, n, m, gates,
        EPS=settings.hc_eps, ITERATIONS=iterations, STREAMS=tiles.next_power_of_2(n),
        LOGITS=logits, ROWS=_gate_rows(n), COLUMNS=columns_at_once(D), EVERY=_gate_rows(n) // 2 + 1,
        SPLIT=splits,
        num_warps=4,
    )  # fmt: skip
    dx = torch.empty_like(x) if input_grad else None
    dphi_BmK = dgamma_BnD = parts_BCmK = None
    if input_grad or matrix_grad:
        is_small = splits and logits <= 32
        columns = max(16, min(COLUMNS, tiles.next_power_of_2(D)))
        blocks, each = tiles.cdiv(D, columns), GRAD_STREAMS if is_small else 1
        groups, chunks = tiles.cdiv(n, each), tiles.cdiv(S, CHUNK)
        if matrix_grad:
            parts_BCmK = mix_BSm.new_empty((B, chunks, m, K))
        launch(
            _input_grad_kernel, B * chunks * blocks * groups,
            x, dh, _weights(x, params), pre_BSn, dmix_parts, of_square_N2, dx, parts_BCmK, S, D,
            n, m, chunks, blocks, groups,
            CHUNK=CHUNK, ROWS=GRAD_ROWS if is_small else GRAD_ROWS // 2, COLUMNS=columns,
            LOGITS=logits, EACH=each, SPLIT=splits,
            PRECISION=tiles.dot_precision(torch.float32), STAGES=_stages(3, logits, splits),
            num_warps=4,
        )  # fmt: skip
        if parts_BCmK is not None:
            dphi_BmK, dgamma_BnD = mix_BSm.new_empty((B, m, K)), mix_BSm.new_empty((B, n, D))
            blocks = tiles.cdiv(K, COLUMNS)
            launch(
                _parameter_grads_kernel, B * blocks,
                parts_BCmK, phi_mK.contiguous(), gamma_nD.contiguous(), dphi_BmK, dgamma_BnD,
                K, m, chunks, blocks,
                COLUMNS=COLUMNS, LOGITS=logits,
                num_warps=4,
            )  # fmt: skip
    return dx, dphi_BmK, dgamma_BnD, dalpha_BS3, dlogits_BSm, dmix_BSm


def _weights(x: Tensor, params: Parameters) -> Tensor:
    """``w = phi·gamma``: what ``x`` is multiplied by, here and there, so that both agree."""
    phi_mK, _, _, gamma_nD = params
    (m, K), splits = phi_mK.shape, _splits(x.dtype)
    height = 2 * _room(m) if splits else m
    w = x.new_empty((height, K), dtype=x.dtype if splits else torch.float32)
    launch(
        _weights_kernel, tiles.cdiv(K, 256),
        phi_mK.contiguous(), gamma_nD.contiguous(), w, K, m,
        COLUMNS=256, LOGITS=_room(m), SPLIT=splits,
        num_warps=4,
    )  # fmt: skip
    return w


def _splits(dtype: torch.dtype) -> bool:
    """Whether fp32 operands of products with ``x`` become two of its dtype. In fp16 small gradients
    would be 0: its products are those of fp32."""
    return dtype == torch.bfloat16


def _stages(most: int, logits: int, splits: bool) -> int:
    """Loads in flight: within 99 KiB of shared memory, with fp32 and with many streams as well."""
    return (most if logits <= 32 else most - 1) if splits else 2


def _gate_rows(n: int) -> int:
    """Positions whose matrices stay in registers."""
    return GATE_ROWS if n <= 4 else GATE_ROWS // 4


def _room(m: int) -> int:
    return max(16, tiles.next_power_of_2(m))
