"""Checks of values that may be on a device."""

from __future__ import annotations

from torch import Tensor

from flash_clipping._compat import assert_async
from flash_clipping.errors import FlashClippingError


def check_on_device(holds: Tensor, message: str) -> None:
    """Refuse what does not hold: on a CPU at once, by a ``FlashClippingError``; elsewhere later, by
    an assertion on the device, which is not waited for."""
    if holds.device.type != "cpu":
        assert_async(holds, message)
    elif not holds:
        raise FlashClippingError(message)
