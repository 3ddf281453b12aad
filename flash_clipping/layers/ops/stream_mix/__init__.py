"""Residual streams, mixed with each other and with what a layer wrote.

B samples, S positions, n streams, D features.
"""

from __future__ import annotations

from torch import Tensor

from flash_clipping.layers.ops.stream_mix import reference
from flash_clipping.ops.runtime import backend as backends

MOST_STREAMS = 8


def stream_mix(
    x_BSnD: Tensor,
    y_BSD: Tensor,
    post_BSn: Tensor,
    comb_BSnn: Tensor,
    *,
    transposed: bool = True,
    backend: str = "auto",
) -> Tensor:
    """``x'_j = Σ_i comb_ij x_i + post_j y`` at every position, a fresh tensor in ``x``'s dtype.

    That is ``combᵀ x + post y``, as in ``transformers``' DeepSeek-V4. With ``transposed=False`` it
    is ``comb x + post y``, ``Σ_i comb_ji x_i``, as in Liger's ``LigerMHC``. Sums are in fp32
    (float64 for float64) and rounded once.

    Args:
        x_BSnD: the streams.
        y_BSD: what the layer wrote, in any floating dtype.
        post_BSn, comb_BSnn: as forward of the hyper-connections returns them.
        transposed: which index of ``comb`` is summed over.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: shapes or devices that do not fit.

    Guarantees:
        Bitwise equal from run to run. No wait for the device.
    """
    _check(x_BSnD, y_BSD, post_BSn, comb_BSnn)
    operands = x_BSnD, y_BSD, post_BSn, comb_BSnn
    return backends.run(reference.stream_mix, backend, x_BSnD, *operands, transposed)


def stream_mix_backward(
    x_BSnD: Tensor,
    y_BSD: Tensor,
    post_BSn: Tensor,
    comb_BSnn: Tensor,
    grad_BSnD: Tensor,
    *,
    transposed: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x`` and ``y`` in their dtypes, and of ``post`` and ``comb`` in fp32 (float64
    for float64). ``grad_BSnD`` is that of the result of :func:`stream_mix`, whose
    other arguments, errors and guarantees are the same.
    """
    _check(x_BSnD, y_BSD, post_BSn, comb_BSnn, grad_BSnD)
    operands = x_BSnD, y_BSD, post_BSn, comb_BSnn, grad_BSnD
    return backends.run(reference.stream_mix_backward, backend, x_BSnD, *operands, transposed)


_AXES = {"y": "BSD", "post": "BSn", "comb": "BSnn", "grad": "BSnD"}


def _check(x: Tensor, *others: Tensor) -> None:
    if x.dim() != 4 or not 1 <= x.shape[2] <= MOST_STREAMS:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; expected [B, S, n, D] with up to {MOST_STREAMS} "
            "streams n."
        )
    sizes = dict(zip("BSnD", x.shape, strict=True))
    for found, (name, axes) in zip(others, _AXES.items(), strict=False):
        expected = tuple(sizes[axis] for axis in axes)
        if found.shape != expected or found.get_device() != x.get_device():
            raise ValueError(
                f"{name} has shape {tuple(found.shape)} on {found.device}; expected "
                f"[{', '.join(axes)}] = {expected} on {x.device}, as x has shape {tuple(x.shape)}."
            )
