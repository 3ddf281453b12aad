"""Kernels for hyper-connections.

N = B·S positions, n streams, D features of each, K = n·D, m = n² + 2n logits. ``ROWS`` positions
and ``COLUMNS`` features at a time; ``LOGITS`` and ``STREAMS`` are m and n with room up to a power
of 2.

Forward reads ``x`` twice: for the product with ``w = phi·gamma`` together with the mean square, and
for ``h``. What stands between (:mod:`.gates`) reads m numbers of a position, and is a launch of its
own. Backward reads ``x`` twice as well, since the gradient of
``pre`` is a sum over features, on which all of ``dx`` depends. In its second pass a program keeps
its columns: ``w`` is read once, and sums over positions stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.layers.ops.hyper_connections.gates import gates, gates_backward
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
    """Some columns of one stream, for a chunk of one sample's positions: ``dx``, and this chunk's
    part of ``dmixᵀ x``. What nobody wants is None, which a kernel sees when it is compiled."""
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


def hyper_connections(x_BSnD: Tensor, params: Parameters, settings: Settings) -> tuple[Tensor, ...]:
    """See :func:`.reference.hyper_connections`."""
    phi_mK, alpha_3, bias_m, gamma_nD = params
    norm_eps, hc_eps, iterations = settings
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, phi_mK.shape[0]
    x = x_BSnD.contiguous()
    mix_BSm = torch.empty((B, S, m), dtype=torch.float32, device=x.device)
    inv_BS = torch.empty((B, S), dtype=torch.float32, device=x.device)
    # Enough programs for all multiprocessors, where there are few positions.
    rows = tiles.next_power_of_2(tiles.cdiv(N, tiles.sm_count(x.device)))
    rows = max(16, min(MIX_ROWS if _room(m) <= 32 else MIX_ROWS // 2, rows))
    splits = _splits(x.dtype)
    launch(
        _mix_kernel, tiles.cdiv(N, rows),
        x, _scaled(phi_mK, gamma_nD), mix_BSm, inv_BS, N, K, m,
        EPS=norm_eps, ROWS=rows, COLUMNS=MIX_COLUMNS, LOGITS=_room(m), SPLIT=splits,
        PRECISION=tiles.dot_precision(torch.float32),
        num_warps=8 if rows == MIX_ROWS else 4, num_stages=STAGES[splits],
    )  # fmt: skip
    pre_BSn, post_BSn, comb_BSnn, _ = gates(
        mix_BSm, inv_BS, alpha_3, bias_m, n, hc_eps, iterations, keep=False
    )
    h_BSD = torch.empty((B, S, D), dtype=x.dtype, device=x.device)
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
    phi_mK, alpha_3, bias_m, gamma_nD = params
    _, hc_eps, iterations = settings
    dh_BSD, dpost_BSn, dcomb_BSnn = grads
    B, S, n, D = x_BSnD.shape
    N, K, m = B * S, n * D, phi_mK.shape[0]
    x, dh = x_BSnD.contiguous(), dh_BSD.contiguous()
    inv_BS, mix_BSm = (tensor.contiguous() for tensor in saved)
    dpre_BSn = torch.empty((B, S, n), dtype=torch.float32, device=x.device)
    launch(
        _pre_grad_kernel, N,
        x, dh, dpre_BSn, D, n,
        STREAMS=tiles.next_power_of_2(n), COLUMNS=_streamed(D),
        num_warps=4,
    )  # fmt: skip
    pre_BSn, _, comb_BSnn, divisors = gates(
        mix_BSm, inv_BS, alpha_3, bias_m, n, hc_eps, iterations, keep=True
    )
    assert divisors is not None
    upstream = dpre_BSn, dpost_BSn.contiguous(), dcomb_BSnn.contiguous()
    dalpha_BS3, dlogits_BSm, dmix_BSm, of_square_BS = gates_backward(
        mix_BSm, inv_BS, alpha_3, bias_m, K, iterations, comb_BSnn, divisors, *upstream
    )
    dx = torch.empty_like(x) if input_grad else None
    product_BmK = parts_BCmK = None
    if input_grad or matrix_grad:
        logits, splits = _room(m), _splits(x.dtype)
        columns = max(16, min(128 if logits <= 32 else 64, tiles.next_power_of_2(D)))
        blocks = tiles.cdiv(D, columns)
        chunks = tiles.cdiv(S, CHUNK)
        if matrix_grad:
            shape = (B, chunks, m, K)
            parts_BCmK = torch.empty(shape, dtype=torch.float32, device=x.device)
        launch(
            _input_grad_kernel, B * chunks * blocks * n,
            x, dh, _scaled(phi_mK, gamma_nD), pre_BSn, dmix_BSm, of_square_BS, dx, parts_BCmK, S, D,
            n, m, chunks, blocks,
            CHUNK=CHUNK, ROWS=GRAD_ROWS, COLUMNS=columns, LOGITS=logits, SPLIT=splits,
            PRECISION=tiles.dot_precision(torch.float32), STAGES=STAGES[splits],
            num_warps=4,
        )  # fmt: skip
        if parts_BCmK is not None:
            product_BmK = parts_BCmK.squeeze(1) if chunks == 1 else parts_BCmK.sum(1)
    return dx, product_BmK, dalpha_BS3, dlogits_BSm, dmix_BSm


def _scaled(phi_mK: Tensor, gamma_nD: Tensor) -> Tensor:
    """``w = phi·gamma``: what ``x`` is multiplied by, here and there, so that both agree."""
    return (phi_mK.float() * gamma_nD.float().flatten()).contiguous()


def _splits(dtype: torch.dtype) -> bool:
    """Whether fp32 operands of products with ``x`` become two of its dtype. Not so for fp16, in
    which small gradients are 0: its products are those of fp32."""
    return dtype == torch.bfloat16


def _room(m: int) -> int:
    return max(16, tiles.next_power_of_2(m))


def _streamed(D: int) -> int:
    return min(STREAMED, tiles.next_power_of_2(D))
