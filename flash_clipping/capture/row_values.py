"""What is kept of a row that a layer reads, to tell it from others: a few numbers."""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

from flash_clipping._compat import unseen_functions, unseen_operators

#: Relative difference from which on two rows are not the same sample's; the second where values
#: have a few digits only (TF32, bf16, fp16, autocast).
DIFFERENT, DIFFERENT_LOW = 1e-3, 5e-2

#: Features of a row that its digest is made of; of longer rows, as many at equal distances.
FEATURES = 1 << 16

#: Elements that are read at one time.
PART = 1 << 26


def is_low(x: Tensor) -> bool:
    """Whether what computed these values may have rounded to a few digits."""
    kind = x.device.type
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(kind)
        or (x.is_cuda and x.dtype == torch.float32)  # TF32
    )


def digest_of(x: Tensor, axis: int) -> Tensor | None:
    """A few numbers for every row, which tell it from others; the last is how large it is."""
    if type(x) is Tensor:  # modes that watch the model take longer to see an operation than it does
        with unseen_functions(), unseen_operators():
            return _digest_of(x, axis)
    return _digest_of(x, axis)


def _digest_of(x: Tensor, axis: int) -> Tensor | None:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows = x.detach().transpose(0, axis)
        rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
        if not rows.numel():
            return None
        if rows.shape[1] > FEATURES:
            rows = rows[:, :: -(-rows.shape[1] // FEATURES)]
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        signs = _signs(rows.shape[1]).to(rows.device, torch.float64)
        # On the device: activations of a large model take the host seconds. In parts, as float64
        # is up to four times as large as what is read.
        parts = rows.split(max(1, PART // rows.shape[1]))
        return torch.cat([_digest_of_rows(part, signs) for part in parts]).cpu()


def _digest_of_rows(rows: Tensor, signs: Tensor) -> Tensor:
    rows = rows.to(torch.float64).nan_to_num(0.0, 1e30, -1e30)
    size = rows.square().mean(1, keepdim=True).sqrt()
    return torch.cat([rows @ signs / rows.shape[1] ** 0.5, size], 1)


#: For every bit of a byte that is read: all bytes -> 1 as int8 where it is set, and -1 elsewhere.
_SIGN_OF_BIT = [bytes(1 if byte >> bit & 1 else 255 for byte in range(256)) for bit in range(3)]


def _signs(n: int) -> Tensor:
    """``[n, 3]`` random signs, the same at every call: rows of one sum and size, as a normalization
    leaves them, differ by these. Not drawn by PyTorch, whose random numbers are one number while a
    model is looked at."""
    return torch.frombuffer(bytearray(_drawn_signs(n)), dtype=torch.int8).view(n, 3)


@functools.lru_cache(maxsize=64)
def _drawn_signs(n: int) -> bytes:
    """They are kept as bytes: a tensor would be of the modes in which it was made first."""
    drawn, signs = random.Random(n).randbytes(n), bytearray(3 * n)
    for bit, sign_of in enumerate(_SIGN_OF_BIT):
        signs[bit::3] = drawn.translate(sign_of)
    return bytes(signs)


def are_alike(first: Tensor, second: Tensor, different: float) -> bool:
    """Whether digests of rows are of the same values, but for this relative difference."""
    scale = torch.maximum(first[:, -1], second[:, -1])
    scale = scale.clamp(min=1e-3 * float(scale.max()))
    error = (first - second).abs().amax(1) / scale.clamp(min=1e-300)
    return float(error.max()) <= different
