"""Reference for product keys.

N rows, s entries of an axis, w = min(k, s) best entries of an axis, c candidates, k choices.

The best k experts are among the pairs of ranks with ``(a + 1)(b + 1) <= k``, if axes break ties by
the entry, and a greater logit makes a greater sum (``docs/product-key-router.md`` has the proof). A
rounded sum need not be greater: sums are compared by a rounded sum and what it lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.embedding.reference import sums_by_index
from flash_clipping.ops.runtime.shapes import accumulator


def product_key_scores(logits_x: Tensor, logits_y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.layers.ops.product_key.product_key_scores`."""
    side = logits_x.shape[1]
    dtype = accumulator(logits_x)
    x_Nw, ix_Nw, log_x_N1 = _best_of_axis(logits_x.to(dtype), k)
    y_Nw, iy_Nw, log_y_N1 = _best_of_axis(logits_y.to(dtype), k)
    a_c, b_c = staircase(k, x_Nw.shape[1], logits_x.device)
    x_Nc, y_Nc = x_Nw[:, a_c], y_Nw[:, b_c]
    # The rounded sum, and what it lacks: both exact (Knuth's two-sum).
    sum_Nc = x_Nc + y_Nc
    of_y_Nc = sum_Nc - x_Nc
    rest_Nc = (x_Nc - (sum_Nc - of_y_Nc)) + (y_Nc - of_y_Nc)
    rest_Nc = rest_Nc.masked_fill(~sum_Nc.isfinite(), 0)
    index_Nc = ix_Nw[:, a_c] * side + iy_Nw[:, b_c]
    # The last sort decides first: by sum, then by what it lacks, then by index.
    order_Nc = index_Nc.argsort(dim=1)
    for key_Nc in (rest_Nc, sum_Nc):
        again_Nc = key_Nc.gather(1, order_Nc).argsort(dim=1, descending=True, stable=True)
        order_Nc = order_Nc.gather(1, again_Nc)
    chosen_Nk = order_Nc[:, :k]
    sum_Nk, index_Nk = sum_Nc.gather(1, chosen_Nk), index_Nc.gather(1, chosen_Nk)
    # The first is the sum of both axes' greatest. Of sums, not of two scores: they cannot increase.
    most_N1 = sum_Nk[:, :1]
    score_Nk = (sum_Nk - most_N1) - (log_x_N1 + log_y_N1)
    index_Nk = index_Nk.masked_fill(sum_Nk == -torch.inf, -1)
    none_N1 = (log_x_N1 + log_y_N1).isnan() | most_N1.isinf()
    score_Nk = score_Nk.masked_fill(none_N1, torch.nan)
    index_Nk = torch.where(none_N1, torch.arange(k, device=index_Nk.device), index_Nk)
    return score_Nk.to(logits_x.dtype), index_Nk.to(torch.int32)


def _best_of_axis(logits_Ns: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The greatest logits and their entries, ``[N, w]``, and ``log Σ exp(logit - greatest)``."""
    logits_Ns = logits_Ns + 0.0  # -0 becomes 0: they are equal, and may not be told apart
    values_Ns, entries_Ns = logits_Ns.sort(dim=1, descending=True, stable=True)
    w = min(k, logits_Ns.shape[1])
    sum_N1 = (logits_Ns - values_Ns[:, :1]).exp().sum(1, keepdim=True)
    return values_Ns[:, :w], entries_Ns[:, :w], sum_N1.log()


def staircase_size(k: int, w: int) -> int:
    """How many pairs of ranks :func:`staircase` has."""
    return sum(min(k // (a + 1), w) for a in range(w))


def staircase(k: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All pairs of ranks a, b below w with ``(a + 1)(b + 1) <= k``, ``[c]`` each."""
    a_w = torch.arange(w, device=device)
    widths_w = (k // (a_w + 1)).clamp(max=w)
    # Told how many there are, it does not wait for the device.
    size = staircase_size(k, w)
    a_c = torch.repeat_interleave(a_w, widths_w, output_size=size)
    starts_w = widths_w.cumsum(0) - widths_w
    return a_c, torch.arange(size, device=device) - starts_w[a_c]


def product_key_backward(
    grad_scores: Tensor, indices: Tensor, logits_x: Tensor, logits_y: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.layers.ops.product_key.product_key_backward`."""
    side = logits_x.shape[1]
    inside_Nk = (indices >= 0) & (indices < side * side)
    grad_Nk = grad_scores.to(accumulator(logits_x)).masked_fill(~inside_Nk, 0)
    # In Python -1 // s is -1, and -1 % s is s - 1: neither may be used.
    index_Nk = indices.long().masked_fill(~inside_Nk, 0)
    any_N1 = inside_Nk.any(1, keepdim=True)
    dx_Ns = _of_axis(grad_Nk, index_Nk // side, any_N1, logits_x)
    dy_Ns = _of_axis(grad_Nk, index_Nk % side, any_N1, logits_y)
    return dx_Ns, dy_Ns


def _of_axis(grad_Nk: Tensor, entry_Nk: Tensor, any_N1: Tensor, logits_Ns: Tensor) -> Tensor:
    N, side = logits_Ns.shape
    rows_N1 = torch.arange(N, device=logits_Ns.device).unsqueeze(1)
    place_Nk = rows_N1 * side + entry_Nk
    sums_Ns = sums_by_index(grad_Nk.reshape(-1, 1), place_Nk.reshape(-1), N * side).view(N, side)
    softmax_Ns = logits_Ns.to(grad_Nk.dtype).softmax(1)
    dlogits_Ns = sums_Ns - softmax_Ns * grad_Nk.sum(1, keepdim=True)
    return dlogits_Ns.masked_fill(~any_N1, 0).to(logits_Ns.dtype)
