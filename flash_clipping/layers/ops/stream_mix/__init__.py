"""Residual streams, mixed with each other and with what a layer wrote.

B samples, S positions, n streams, D features.
"""

from __future__ import annotations

from torch import Tensor

from flash_clipping.layers.ops import check_streams
from flash_clipping.layers.ops.stream_mix import reference
from flash_clipping.ops.runtime import backend as backends

STREAMS = range(1, 9)
"""How many there may be."""


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
    check_streams(x_BSnD, STREAMS, y_BSD=y_BSD, post_BSn=post_BSn, comb_BSnn=comb_BSnn)
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
    others = {"y_BSD": y_BSD, "post_BSn": post_BSn, "comb_BSnn": comb_BSnn}
    check_streams(x_BSnD, STREAMS, **others, grad_BSnD=grad_BSnD)
    operands = x_BSnD, y_BSD, post_BSn, comb_BSnn, grad_BSnD
    return backends.run(reference.stream_mix_backward, backend, x_BSnD, *operands, transposed)
