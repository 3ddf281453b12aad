"""Product keys: the best k of s² experts, each the sum of one score of either axis.

N rows (tokens), s entries of an axis, E = s² experts, k choices of each row. Expert ``ix · s + iy``
is at entry ``ix`` of axis x and ``iy`` of axis y. No tensor ``[N, E]`` is ever formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.layers.ops.product_key import reference
from flash_clipping.ops.runtime import backend as backends

__all__ = ["product_key_backward", "product_key_scores"]

MOST_CHOICES = 128
MOST_ENTRIES = 46340
"""Entries of an axis, whose square int32 counts."""
WIDEST = 4096
"""Entries of an axis that a program of the kernels holds at once; PyTorch does wider ones."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def product_key_scores(
    logits_x: Tensor, logits_y: Tensor, k: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The k best experts of every row, and the logarithms of their probabilities.

    Expert ``ix · s + iy`` has the score ``log_softmax(logits_x)[ix] + log_softmax(logits_y)[iy]``,
    computed in fp32 (float64 for float64). Experts are in the order of their sums of logits, the
    greatest first and compared as if added without rounding; of equal sums the smallest index comes
    first. Kernel and reference so choose the same experts, bit for bit, also where scores tie.

    Args:
        logits_x, logits_y: ``[N, s]``, of one dtype and device.
        k: how many experts each row gets: at most 128, and at most ``s²``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``; axes of more than 4096 entries always run
            in PyTorch.

    Returns:
        Scores ``[N, k]`` in the logits' dtype, not increasing along k, and indices ``[N, k]``,
        int32.

        An expert of probability 0 (a logit of ``-inf``) is never chosen: where no other is left,
        the index is -1 and the score ``-inf``.

        A row that has no probabilities (a NaN, ``+inf``, an axis of nothing but ``-inf``, or a sum
        beyond the range of fp32) gets scores NaN and indices 0 ... k-1. Its loss is NaN, and
        nothing outside of the table is addressed.

    Raises:
        ValueError: logits that are not two matrices of one shape, dtype and device; a k that is out
            of range; more experts than int32 counts.

    Guarantees:
        A row of the results depends on this row of the logits alone. Bitwise equal from run to run;
        no wait for the device.
    """
    _check_logits(logits_x, logits_y)
    side = logits_x.shape[1]
    if not 1 <= k <= min(MOST_CHOICES, side * side):
        raise InvalidValue(
            f"FC302 product_key_scores: found k = {k} for {side} x {side} experts; expected 1 to "
            f"{min(MOST_CHOICES, side * side)}. At most {MOST_CHOICES} are chosen, and each once."
        )
    return backends.run(
        reference.product_key_scores, _served_by(backend, side), logits_x, logits_x, logits_y, k
    )


def product_key_backward(
    grad_scores: Tensor,
    indices: Tensor,
    logits_x: Tensor,
    logits_y: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients of both axes' logits, given which experts were chosen.

    With ``d_j`` the gradient of score j, ``dx_i = Σ_j [ix_j = i] d_j - softmax(x)_i Σ_j d_j``, and
    likewise for y: the derivative of a log-softmax, of which a row reads k entries.

    Args:
        grad_scores: ``[N, k]``.
        indices: ``[N, k]``, integers. One outside of ``0 ... s² - 1``, as -1 is, stands for no
            expert: it addresses nothing, and its gradient is not read. A row without an expert has
            a gradient of exactly 0, whatever its logits hold.
        logits_x, logits_y: ``[N, s]``, as the scores were computed from.

    Returns:
        Two tensors ``[N, s]`` in the logits' dtype, computed in fp32 (float64 for float64).

    Raises:
        ValueError: tensors that do not belong together.

    Guarantees:
        Bitwise equal from run to run: no atomics, one order of summation. Every element is written.
    """
    _check_logits(logits_x, logits_y)
    N, side = logits_x.shape
    fits = indices.dim() == 2 and indices.shape[0] == N and grad_scores.shape == indices.shape
    one_device = grad_scores.get_device() == indices.get_device() == logits_x.get_device()
    if not fits or not one_device or indices.is_floating_point():
        raise InvalidValue(
            f"FC303 product_key_backward: found gradients {tuple(grad_scores.shape)} and indices "
            f"{tuple(indices.shape)} of {indices.dtype} on {grad_scores.device} and "
            f"{indices.device}; expected [{N}, k] for both, and integers as indices, on "
            f"{logits_x.device}, as logits are {tuple(logits_x.shape)} there."
        )
    run, backend = reference.product_key_backward, _served_by(backend, side)
    return backends.run(run, backend, logits_x, grad_scores, indices, logits_x, logits_y)


def _served_by(backend: str, side: int) -> str:
    return "torch" if side > WIDEST else backend


def _check_logits(logits_x: Tensor, logits_y: Tensor) -> None:
    x, y = logits_x, logits_y
    same = x.shape == y.shape and x.dtype == y.dtype and x.get_device() == y.get_device()
    if not same or x.dtype not in _DTYPES or x.dim() != 2 or not 1 <= x.shape[1] <= MOST_ENTRIES:
        raise InvalidValue(
            f"FC303 product keys: found logits {tuple(x.shape)} and {tuple(y.shape)} of {x.dtype} "
            f"and {y.dtype} on {x.device} and {y.device}; expected two matrices [N, s] of one "
            "shape, device and dtype (float64, float32, bfloat16 or float16), s at least 1 and, as "
            f"indices are int32, at most {MOST_ENTRIES}. Flatten the axes before the last."
        )
