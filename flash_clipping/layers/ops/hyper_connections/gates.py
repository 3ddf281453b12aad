"""Kernels for what stands between products: logits of a position become ``pre, post, comb``.

N = B·S positions, n streams, m = n² + 2n logits. ``ROWS`` positions at a time, each with its n×n
matrix in registers; ``STREAMS`` is n with room up to a power of 2, and what is too much is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch

ROWS = 32


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
    """Of every row, and 0 outside of the matrix."""
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
    """``divisors_ptr``, where backward wants them: what Sinkhorn's algorithm divided by in each of
    its ``2 · ITERATIONS - 1`` steps, columns in the first and the last."""
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
    """From the gradients of ``pre, post, comb`` to those of the logits, of the product, and of
    ``alpha`` and ``bias``, a row of each for every position.

    ``of_square`` is the factor of ``x`` in ``dx``, by way of the mean square.
    """
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


def gates(
    mix_BSm: Tensor,
    inv_BS: Tensor,
    alpha_3: Tensor,
    bias_m: Tensor,
    n: int,
    eps: float,
    iterations: int,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``pre, post, comb``, and to ``keep`` what was divided by, ``[B, S, 2·iterations - 1, n]``."""
    B, S, m = mix_BSm.shape
    pre_BSn = torch.empty((B, S, n), dtype=torch.float32, device=mix_BSm.device)
    post_BSn = torch.empty_like(pre_BSn)
    comb_BSnn = torch.empty((B, S, n, n), dtype=torch.float32, device=mix_BSm.device)
    divisors = None
    if keep:
        shape = (B, S, 2 * iterations - 1, n)
        divisors = torch.empty(shape, dtype=torch.float32, device=mix_BSm.device)
    launch(
        _gates_kernel, tiles.cdiv(B * S, ROWS),
        mix_BSm, inv_BS, alpha_3.contiguous(), bias_m.contiguous(), pre_BSn, post_BSn, comb_BSnn,
        divisors, B * S, n, m,
        EPS=eps, ITERATIONS=iterations, STREAMS=tiles.next_power_of_2(n), ROWS=ROWS,
        num_warps=4,
    )  # fmt: skip
    return pre_BSn, post_BSn, comb_BSnn, divisors


def gates_backward(
    mix_BSm: Tensor,
    inv_BS: Tensor,
    alpha_3: Tensor,
    bias_m: Tensor,
    K: int,
    iterations: int,
    comb_BSnn: Tensor,
    divisors: Tensor,
    dpre_BSn: Tensor,
    dpost_BSn: Tensor,
    dcomb_BSnn: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of ``dalpha``, of ``dlogits`` (which are those of ``dbias``) and of ``dmix``, and the
    factor of ``x`` in ``dx``, ``[B, S]``."""
    B, S, m = mix_BSm.shape
    n = comb_BSnn.shape[-1]
    dalpha_BS3 = torch.empty((B, S, 3), dtype=torch.float32, device=mix_BSm.device)
    dlogits_BSm, dmix_BSm = torch.empty_like(mix_BSm), torch.empty_like(mix_BSm)
    of_square_BS = torch.empty_like(inv_BS)
    launch(
        _gates_grad_kernel, tiles.cdiv(B * S, ROWS),
        mix_BSm, inv_BS, alpha_3.contiguous(), bias_m.contiguous(), comb_BSnn, divisors, dpre_BSn,
        dpost_BSn, dcomb_BSnn, dalpha_BS3, dlogits_BSm, dmix_BSm, of_square_BS, B * S, n, m, K,
        ITERATIONS=iterations, STREAMS=tiles.next_power_of_2(n), ROWS=ROWS,
        num_warps=4,
    )  # fmt: skip
    return dalpha_BS3, dlogits_BSm, dmix_BSm, of_square_BS
