"""Which keywords ``make_private`` knows: one that nobody reads is an error."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from opacus import PrivacyEngine

from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.engine.options import PrivateOptions

#: What only ``clipping="adaptive"`` takes.
ADAPTIVE = [field.name for field in fields(AdaptiveBound)]


def check_keywords(given: dict[str, Any], clipping: str, of_epsilon: set[str]) -> None:
    """Raise ``TypeError`` for an argument that nobody would read."""
    known = {*inspect.signature(PrivacyEngine.make_private).parameters, *of_epsilon}
    known |= {*PrivateOptions.__annotations__} - {*ADAPTIVE}
    if clipping == "adaptive":
        known |= {*ADAPTIVE}
    if unknown := [name for name in given if name not in known]:
        listed = ", ".join(sorted(known - {"self", "args", "kwargs"}))
        only = [name for name in unknown if name in ADAPTIVE]
        raise TypeError(
            f"make_private: found {', '.join(unknown)}, which nothing would read. Known with "
            f"clipping={clipping!r} are {listed}."
            + (f" ({', '.join(only)}: with clipping='adaptive'.)" if only else "")
        )
