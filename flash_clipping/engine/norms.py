"""The norms of samples, where Opacus' users look for them: ``p._norm_sample``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from flash_clipping.errors import FlashClippingError


def publish(params: Sequence[nn.Parameter], norms_PB: Tensor, one_device: bool = False) -> None:
    """Leave every parameter its row of norms, ``[B]``, on its own device.

    ``one_device``: the parameters are known to be all on one.
    """
    index = norms_PB.get_device()
    near = one_device and params[0].get_device() == index
    for param, norm_B in zip(params, norms_PB.unbind(0), strict=True):
        if not near and param.get_device() != index:
            norm_B = norm_B.to(param.device)
        param.__dict__["_norm_sample"] = norm_B


def published(params: Iterable[nn.Parameter]) -> Tensor:
    """What was left with these parameters: ``[P, B]``.

    Raises:
        FlashClippingError: no backward pass has left anything with one of them.
    """
    rows = published_rows(params)
    found = [row for row in rows if row is not None]
    if not found or len(found) < len(rows):
        raise FlashClippingError(
            "There are no per-sample norms yet: they are taken during backward. Call the "
            "model, then loss.backward(), with hooks enabled, and ask again."
        )
    return torch.stack([row.to(found[0].device) for row in found])


def published_rows(params: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """What was left with each of these parameters."""
    return [getattr(param, "_norm_sample", None) for param in params]


def put_back(params: Iterable[nn.Parameter], rows: Iterable[Tensor | None]) -> None:
    """Leave what :func:`published_rows` gave."""
    for param, row in zip(params, rows, strict=True):
        setattr(param, "_norm_sample", row)  # noqa: B010
