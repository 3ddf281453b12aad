"""Settings of a wrapped model that have a few values each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from flash_clipping.finish.clipping import check_clipping
from flash_clipping.ops.runtime.backend import BACKENDS

Mode = Literal["one_pass", "two_pass"]

#: What clipped sums are left in: fp32, or the parameter's own dtype.
SUM_DTYPES = ("float32", "parameter")


def check_options(
    loss_reduction: str, mode: str, backend: str, sum_dtype: str, clipping: str
) -> None:
    """Raise ``ValueError`` for a value that is unknown."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} is unknown; expected 'mean' or 'sum'.")
    _check_one_of("mode", mode, get_args(Mode))
    _check_one_of("backend", backend, BACKENDS)
    _check_one_of("sum_dtype", sum_dtype, SUM_DTYPES)
    check_clipping(clipping)


def _check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; expected one of {', '.join(known)}.")
