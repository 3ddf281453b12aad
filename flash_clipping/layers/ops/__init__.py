"""Operations that the layers here are made of, laid out as those in :mod:`flash_clipping.ops`."""

from __future__ import annotations

from torch import Tensor

from flash_clipping.errors import InvalidValue


def check_streams(x_BSnD: Tensor, streams: range, **others: Tensor) -> None:
    """Raise ``ValueError`` where ``x`` has other streams, or another tensor does not fit it: their
    names end in their axes, where K is n·D and m is n² + 2n."""
    x = x_BSnD
    if x.dim() != 4 or x.shape[2] not in streams or not x.is_floating_point():
        raise InvalidValue(
            f"FC303 x has shape {tuple(x.shape)} and dtype {x.dtype}; expected floating point "
            f"numbers of shape [B, S, n, D] with n from {streams[0]} to {streams[-1]} streams."
        )
    B, S, n, D = x.shape
    sizes = {"B": B, "S": S, "n": n, "D": D, "K": n * D, "m": n * n + 2 * n, "3": 3}
    for named, found in others.items():
        name, axes = named.split("_")
        expected = tuple(sizes[axis] for axis in axes)
        if found.shape != expected or found.get_device() != x.get_device():
            raise InvalidValue(
                f"FC303 {name} has shape {tuple(found.shape)} on {found.device}; expected "
                f"[{', '.join(axes)}] = {expected} on {x.device}, as x has shape "
                f"{tuple(x.shape)}."
            )
