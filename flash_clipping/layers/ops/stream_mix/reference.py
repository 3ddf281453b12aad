"""Reference for mixing residual streams. B samples, S positions, n streams, D features.

``weight_ij`` is how much of stream i goes into stream j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator


def stream_mix(
    x_BSnD: Tensor, y_BSD: Tensor, post_BSn: Tensor, comb_BSnn: Tensor, transposed: bool
) -> Tensor:
    """See :func:`flash_clipping.layers.ops.stream_mix.stream_mix`."""
    wide = accumulator(x_BSnD)
    weight_BSnn = (comb_BSnn if transposed else comb_BSnn.mT).to(wide)
    mixed = weight_BSnn.mT @ x_BSnD.to(wide)
    added = post_BSn.to(wide).unsqueeze(-1) * y_BSD.to(wide).unsqueeze(2)
    return (mixed + added).to(x_BSnD.dtype)


def stream_mix_backward(
    x_BSnD: Tensor,
    y_BSD: Tensor,
    post_BSn: Tensor,
    comb_BSnn: Tensor,
    grad_BSnD: Tensor,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`flash_clipping.layers.ops.stream_mix.stream_mix_backward`."""
    wide = accumulator(x_BSnD)
    operands = x_BSnD, y_BSD, post_BSn, comb_BSnn
    leaves = [operand.detach().to(wide).requires_grad_() for operand in operands]
    x, y, post, comb = leaves
    with torch.enable_grad():
        mixed = stream_mix(x, y, post, comb, transposed)
    dx, dy, dpost, dcomb = torch.autograd.grad(mixed, leaves, grad_BSnD.to(wide))
    return dx.to(x_BSnD.dtype), dy.to(y_BSD.dtype), dpost, dcomb
