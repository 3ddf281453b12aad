"""Kernels for hyper-connections.

N = B·S positions, n streams, D features of each, K = n·D, m = n² + 2n logits. ``ROWS`` positions
and ``COLUMNS`` features at a time; ``LOGITS`` and ``STREAMS`` are m and n with room up to a power
of 2.

Forward reads ``x`` twice: for the product with ``w = phi·gamma`` together with the mean square, and
for ``h``. What stands between reads m numbers of a position, and is a launch of its
own: a position's n×n matrix stays in registers. Backward reads ``x`` twice as well, since the
gradient of ``pre`` is a sum over features, on which all of ``dx`` depends. In its second pass a
program keeps its columns: ``w`` is read once, and sums over positions stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.layers.ops.hyper_connections.reference import Parameters, Settings
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.runtime.tiles import load_rows, store_rows

MIX_ROWS = 128
"""Positions of one product with ``w``, which every program reads whole."""
MIX_COLUMNS = 64
GRAD_ROWS = 32
"""Few enough for two programs on a multiprocessor."""
CHUNK = 1024
"""Positions that one program of backward's second pass adds up: 3 % of traffic, for four streams.
Not chosen by the batch's size, so that a sample is rounded alike in every batch."""
GATE_ROWS = 32
STREAMED = 1024
"""Columns at a time of what only moves memory: eight for each thread, of all streams, so that sums
over streams stay in one thread."""
STAGES = {True: 3, False: 2}
"""Loads in flight with operands of 16 bits and with fp32: within 99 KiB of shared memory."""


@triton.jit
def _high_and_low(x, DTYPE: tl.constexpr):
    """An fp32 tile as a sum of two of 16 bits, with an error of 2⁻¹⁷."""
    high = x.to(DTYPE)
    return high, (x - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _mix_kernel(
    x_ptr, w_ptr, mix_ptr, inv_ptr,
    N, K, m,
    EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOGITS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``mix = x wᵀ`` and ``inv = rsqrt(mean(x²) + eps)``, both from one pass over ``x``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    logit = tl.arange(0, LOGITS)
    in_rows, in_logits = row < N, logit < m
    mix = tl.zeros((ROWS, LOGITS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        in_width = column < K
        x = load_rows(x_ptr, row, K, column, in_rows, in_width)
        w = tl.load(
            w_ptr + logit[None, :] * K + column[:, None],
            mask=in_logits[None, :] & in_width[:, None],
            other=0.0,
        )
        wide = x.to(tl.float32)
        squares += wide * wide
        if SPLIT:
            high, low = _high_and_low(w, x.dtype)
            mix = tl.dot(x, high, mix)
            mix = tl.dot(x, low, mix)
        else:
            mix = tl.dot(wide, w, mix, input_precision=PRECISION)
    inv = tl.rsqrt(tl.sum(squares, 1) / K + EPS)
    tl.store(inv_ptr + row, inv, mask=in_rows)
    store_rows(mix_ptr, row, m, logit, mix, in_rows, in_logits)


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
def _pre_grad_kernel(x_ptr, dh_ptr, dpre_ptr, D, n, STREAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """``dpre_n = Σ_d x_nd dh_d`` of one position."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    in_streams = stream < n
    products = tl.zeros((STREAMS, COLUMNS), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        in_width = column < D
        dh = tl.load(dh_ptr + row * D + column, mask=in_width, other=0.0).to(tl.float32)
        x = load_rows(x_ptr, row * n + stream, D, column, in_streams, in_width).to(tl.float32)
        products += x * dh[None, :]
    tl.store(dpre_ptr + row * n + stream, tl.sum(products, 1), mask=in_streams)


@triton.jit
def _input_grad_kernel(
    x_ptr, dh_ptr, w_ptr, pre_ptr, dmix_ptr, of_square_ptr, dx_ptr, product_ptr,
    S, D, n, m, chunks, blocks,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOGITS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx`` of some columns of one stream, for a chunk of one sample's positions, and this chunk's
    part of ``dmixᵀ x``. Pointers of results that are not wanted are None."""
    pid = tl.program_id(0)
    stream = pid % n  # programs side by side read the same dh
    block = pid // n % blocks
    part = (pid // n // blocks).to(tl.int64)  # b · chunks + chunk
    b, chunk = part // chunks, part % chunks
    first = chunk * CHUNK
    last = min(first + CHUNK, S)
    K = n * D
    feature = block * COLUMNS + tl.arange(0, COLUMNS)
    column = stream * D + feature
    logit = tl.arange(0, LOGITS)
    in_width, in_logits = feature < D, logit < m
    w = load_rows(w_ptr, logit, K, column, in_logits, in_width)
    product = tl.zeros((LOGITS, COLUMNS), tl.float32)
    for begin in tl.range(first, last, ROWS, num_stages=STAGES):
        position = begin + tl.arange(0, ROWS)
        in_rows = position < last
        row = b * S + position
        x = load_rows(x_ptr, row, K, column, in_rows, in_width)
        dmix = load_rows(dmix_ptr, row, m, logit, in_rows, in_logits)
        if product_ptr is not None:
            if SPLIT:
                high, low = _high_and_low(dmix, x.dtype)
                product = tl.dot(tl.trans(high), x, product)
                product = tl.dot(tl.trans(low), x, product)
            else:
                product = tl.dot(
                    tl.trans(dmix), x.to(tl.float32), product, input_precision=PRECISION
                )
        if dx_ptr is not None:
            dh = load_rows(dh_ptr, row, D, feature, in_rows, in_width)
            pre = tl.load(pre_ptr + row * n + stream, mask=in_rows, other=0.0)
            of_square = tl.load(of_square_ptr + row, mask=in_rows, other=0.0)
            if SPLIT:  # dx is rounded to as few bits
                dx = tl.dot(dmix.to(x.dtype), w.to(x.dtype))
            else:
                dx = tl.dot(dmix, w, input_precision=PRECISION)
            dx += pre[:, None] * dh.to(tl.float32) + of_square[:, None] * x.to(tl.float32)
            store_rows(dx_ptr, row, K, column, dx, in_rows, in_width)
    if product_ptr is not None:
        store_rows(product_ptr, part * m + logit, K, column, product, in_logits, in_width)


# -- what stands between products: logits of a position become pre, post and comb ------------------


@triton.jit
def _places(n, m, N, STREAMS: tl.constexpr, ROWS: tl.constexpr):
    """Rows, streams, where a position's matrix is among its logits, and what of it is there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
def _gates_kernel(
    mix_ptr, inv_ptr, alpha_ptr, bias_ptr, pre_ptr, post_ptr, comb_ptr, divisors_ptr,
    N, n, m,
    EPS: tl.constexpr, ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``divisors_ptr``, if not None, gets what Sinkhorn's algorithm divided by in each of its ``2 ·
    ITERATIONS - 1`` steps, columns in the first and the last."""
    row, stream, entry, in_rows, in_vector, in_matrix = _places(n, m, N, STREAMS, ROWS)
    inv = tl.load(inv_ptr + row, mask=in_rows, other=0.0)
    of_vector = row[:, None] * m + stream[None, :]
    bias = tl.load(bias_ptr + stream, mask=stream < n, other=0.0).to(tl.float32)
    t = tl.load(mix_ptr + of_vector, mask=in_vector, other=0.0) * inv[:, None]
    pre = tl.sigmoid(tl.load(alpha_ptr).to(tl.float32) * t + bias[None, :]) + EPS
    tl.store(pre_ptr + row[:, None] * n + stream[None, :], pre, mask=in_vector)
    bias = tl.load(bias_ptr + n + stream, mask=stream < n, other=0.0).to(tl.float32)
    t = tl.load(mix_ptr + of_vector + n, mask=in_vector, other=0.0) * inv[:, None]
    post = 2 * tl.sigmoid(tl.load(alpha_ptr + 1).to(tl.float32) * t + bias[None, :])
    tl.store(post_ptr + row[:, None] * n + stream[None, :], post, mask=in_vector)

    in_all = in_rows[:, None, None] & in_matrix
    bias = tl.load(bias_ptr + 2 * n + entry, mask=in_matrix, other=0.0).to(tl.float32)
    t = tl.load(mix_ptr + row[:, None, None] * m + 2 * n + entry, mask=in_all, other=0.0)
    t = t * inv[:, None, None]
    logits = tl.load(alpha_ptr + 2).to(tl.float32) * t + bias
    matrix = tl.where(in_matrix, _softmax(logits, in_matrix) + EPS, 0.0)
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
    tl.store(comb_ptr + row[:, None, None] * (n * n) + entry, matrix, mask=in_all)


@triton.jit
def _gates_grad_kernel(
    mix_ptr, inv_ptr, alpha_ptr, bias_ptr, comb_ptr, divisors_ptr, dpre_ptr, dpost_ptr, dcomb_ptr,
    dalpha_ptr, dlogits_ptr, dmix_ptr, of_square_ptr,
    N, n, m, K,
    ITERATIONS: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ``pre, post, comb`` to those of logits, product, ``alpha`` and ``bias``: a row
    for every position. ``of_square`` is the factor of ``x`` in ``dx``, by way of the mean
    square."""
    row, stream, entry, in_rows, in_vector, in_matrix = _places(n, m, N, STREAMS, ROWS)
    inv = tl.load(inv_ptr + row, mask=in_rows, other=0.0)
    dinv = tl.zeros((ROWS,), tl.float32)
    of_vector = row[:, None] * m + stream[None, :]
    for section in tl.static_range(2):
        grad_ptr = dpre_ptr if section == 0 else dpost_ptr
        alpha = tl.load(alpha_ptr + section).to(tl.float32)
        bias = tl.load(bias_ptr + section * n + stream, mask=stream < n, other=0.0)
        mix = tl.load(mix_ptr + of_vector + section * n, mask=in_vector, other=0.0)
        t = mix * inv[:, None]
        share = tl.sigmoid(alpha * t + bias.to(tl.float32)[None, :])
        grad = tl.load(grad_ptr + row[:, None] * n + stream[None, :], mask=in_vector, other=0.0)
        dlogit = (section + 1) * grad.to(tl.float32) * share * (1 - share)
        dt = alpha * dlogit
        dinv += tl.sum(dt * mix, 1)
        tl.store(dlogits_ptr + of_vector + section * n, dlogit, mask=in_vector)
        tl.store(dmix_ptr + of_vector + section * n, dt * inv[:, None], mask=in_vector)
        tl.store(dalpha_ptr + row * 3 + section, tl.sum(dlogit * t, 1), mask=in_rows)

    in_all = in_rows[:, None, None] & in_matrix
    of_matrix = row[:, None, None] * (n * n) + entry
    of_logits = row[:, None, None] * m + 2 * n + entry
    alpha = tl.load(alpha_ptr + 2).to(tl.float32)
    bias = tl.load(bias_ptr + 2 * n + entry, mask=in_matrix, other=0.0).to(tl.float32)
    mix = tl.load(mix_ptr + of_logits, mask=in_all, other=0.0)
    t = mix * inv[:, None, None]
    softmax = _softmax(alpha * t + bias, in_matrix)
    # Backwards through the steps: of after = before / d, with d = Σ before + eps, the gradient is
    # dbefore = (dafter - Σ dafter·after) / d, and before = after · d.
    after = tl.load(comb_ptr + of_matrix, mask=in_all, other=0.0)
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
    dt = alpha * dlogit
    dinv += tl.sum(tl.sum(dt * mix, 2), 1)
    tl.store(dlogits_ptr + of_logits, dlogit, mask=in_all)
    tl.store(dmix_ptr + of_logits, dt * inv[:, None, None], mask=in_all)
    tl.store(dalpha_ptr + row * 3 + 2, tl.sum(tl.sum(dlogit * t, 2), 1), mask=in_rows)
    tl.store(of_square_ptr + row, -inv * inv * inv * dinv / K, mask=in_rows)


def hyper_connections(x_BSnD: Tensor, params: Parameters, settings: Settings) -> tuple[Tensor, ...]:
    """See :func:`.reference.hyper_connections`."""
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, len(params[0])
    x = x_BSnD.contiguous()
    mix_BSm = x.new_empty((B, S, m), dtype=torch.float32)
    inv_BS = x.new_empty((B, S), dtype=torch.float32)
    # Enough programs for all multiprocessors, where there are few positions.
    rows = tiles.next_power_of_2(tiles.cdiv(N, tiles.sm_count(x.device)))
    rows = max(16, min(MIX_ROWS if _room(m) <= 32 else MIX_ROWS // 2, rows))
    splits = _splits(x.dtype)
    launch(
        _mix_kernel, tiles.cdiv(N, rows),
        x, _scaled(params), mix_BSm, inv_BS, N, K, m,
        EPS=settings.norm_eps, ROWS=rows, COLUMNS=MIX_COLUMNS, LOGITS=_room(m), SPLIT=splits,
        PRECISION=tiles.dot_precision(torch.float32),
        num_warps=8 if rows == MIX_ROWS else 4, num_stages=STAGES[splits],
    )  # fmt: skip
    pre_BSn, post_BSn, comb_BSnn, _ = _gates(mix_BSm, inv_BS, params, settings, keep=False)
    h_BSD = x.new_empty((B, S, D))
    columns = _streamed(D)
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
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """See :func:`.reference.hyper_connections_backward`."""
    dh_BSD, dpost_BSn, dcomb_BSnn = grads
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, len(params[0])
    x, dh = x_BSnD.contiguous(), dh_BSD.contiguous()
    inv_BS, mix_BSm = (tensor.contiguous() for tensor in saved)
    dpre_BSn = mix_BSm.new_empty((B, S, n))
    launch(
        _pre_grad_kernel, N,
        x, dh, dpre_BSn, D, n,
        STREAMS=tiles.next_power_of_2(n), COLUMNS=_streamed(D),
        num_warps=4,
    )  # fmt: skip
    pre_BSn, _, comb_BSnn, divisors = _gates(mix_BSm, inv_BS, params, settings, keep=True)
    dalpha_BS3 = mix_BSm.new_empty((B, S, 3))
    dlogits_BSm, dmix_BSm = torch.empty_like(mix_BSm), torch.empty_like(mix_BSm)
    of_square_BS = torch.empty_like(inv_BS)  # the factor of x in dx
    launch(
        _gates_grad_kernel, tiles.cdiv(N, GATE_ROWS),
        mix_BSm, inv_BS, params[1].contiguous(), params[2].contiguous(), comb_BSnn, divisors,
        dpre_BSn, dpost_BSn.contiguous(), dcomb_BSnn.contiguous(), dalpha_BS3, dlogits_BSm,
        dmix_BSm, of_square_BS, N, n, m, K,
        ITERATIONS=settings.iterations, STREAMS=tiles.next_power_of_2(n), ROWS=GATE_ROWS,
        num_warps=4,
    )  # fmt: skip
    dx = torch.empty_like(x) if input_grad else None
    product_BmK = parts_BCmK = None
    if input_grad or matrix_grad:
        logits, splits = _room(m), _splits(x.dtype)
        columns = max(16, min(128 if logits <= 32 else 64, tiles.next_power_of_2(D)))
        blocks = tiles.cdiv(D, columns)
        chunks = tiles.cdiv(S, CHUNK)
        if matrix_grad:
            parts_BCmK = mix_BSm.new_empty((B, chunks, m, K))
        launch(
            _input_grad_kernel, B * chunks * blocks * n,
            x, dh, _scaled(params), pre_BSn, dmix_BSm, of_square_BS, dx, parts_BCmK, S, D,
            n, m, chunks, blocks,
            CHUNK=CHUNK, ROWS=GRAD_ROWS, COLUMNS=columns, LOGITS=logits, SPLIT=splits,
            PRECISION=tiles.dot_precision(torch.float32), STAGES=STAGES[splits],
            num_warps=4,
        )  # fmt: skip
        if parts_BCmK is not None:
            product_BmK = parts_BCmK.squeeze(1) if chunks == 1 else parts_BCmK.sum(1)
    return dx, product_BmK, dalpha_BS3, dlogits_BSm, dmix_BSm


def _gates(
    mix_BSm: Tensor, inv_BS: Tensor, params: Parameters, settings: Settings, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``pre, post, comb``, and to ``keep`` the divisors ``[B, S, 2·iterations - 1, n]``."""
    _, alpha_3, bias_m, gamma_nD = params
    _, eps, iterations = settings
    (B, S, m), n = mix_BSm.shape, len(gamma_nD)
    pre_BSn = mix_BSm.new_empty((B, S, n))
    post_BSn = torch.empty_like(pre_BSn)
    comb_BSnn = mix_BSm.new_empty((B, S, n, n))
    divisors = mix_BSm.new_empty((B, S, 2 * iterations - 1, n)) if keep else None
    launch(
        _gates_kernel, tiles.cdiv(B * S, GATE_ROWS),
        mix_BSm, inv_BS, alpha_3.contiguous(), bias_m.contiguous(), pre_BSn, post_BSn, comb_BSnn,
        divisors, B * S, n, m,
        EPS=eps, ITERATIONS=iterations, STREAMS=tiles.next_power_of_2(n), ROWS=GATE_ROWS,
        num_warps=4,
    )  # fmt: skip
    return pre_BSn, post_BSn, comb_BSnn, divisors


def _scaled(params: Parameters) -> Tensor:
    """``w = phi·gamma``: what ``x`` is multiplied by, here and there, so that both agree."""
    phi_mK, _, _, gamma_nD = params
    return (phi_mK.float() * gamma_nD.float().flatten()).contiguous()


def _splits(dtype: torch.dtype) -> bool:
    """Whether fp32 operands of products with ``x`` become two of its dtype. In fp16 small gradients
    would be 0: its products are those of fp32."""
    return dtype == torch.bfloat16


def _room(m: int) -> int:
    return max(16, tiles.next_power_of_2(m))


def _streamed(D: int) -> int:
    return min(STREAMED, tiles.next_power_of_2(D))
