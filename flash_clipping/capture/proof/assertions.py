"""Numbers that a GPU asserts: indices, targets and probabilities out of their range.

A CPU raises, and goes on; a GPU ends the process. A batch of the look before a first step may hold
numbers that no batch of the user's does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import arguments_of

#: Operators whose numbers a GPU asserts: those with these arguments, and those of these names.
_ALONG = {"self", "dim", "index"}
_TABLES = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_INDEXED = {"index", "index_put", "_index_put_impl", "take", "put"}
_LOSSES = {"nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy"}
_ASSERTED = {*_TABLES, *_INDEXED, *_LOSSES, "bernoulli", "multinomial"}


@functools.lru_cache(maxsize=4096)
def _asserted(func: Any) -> tuple[str, Sequence[str]] | None:
    """The name, without ``_`` at the end, and the arguments of such an operator."""
    name, arguments = func.overloadpacket.__name__.rstrip("_"), arguments_of(func)
    return (name, arguments) if name in _ASSERTED or {*arguments} >= _ALONG else None


def _ranges(name: str, given: dict[str, Any]) -> Iterator[tuple[Any, float, float]]:
    """What may be a tensor of numbers, and the least and the largest that the operator takes.

    Args:
        given: its arguments by their names, None where the default was left.
    """
    x: Any = given.get("self")
    if name in _TABLES:
        yield given["indices"], 0, len(given["weight"]) - 1
    elif "indices" in given:
        axis = 0
        for index in given["indices"]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is not None and not is_mask:
                yield index, -x.shape[axis], x.shape[axis] - 1
            axis += index.dim() if is_mask else 1
    elif "dim" in given:  # also one of Python's
        size = x.shape[given["dim"]] if x.dim() else 1
        yield given["index"], -size if name == "index_fill" else 0, size - 1
    elif "index" in given:
        yield given["index"], -x.numel(), x.numel() - 1
    elif "ignore_index" in given:
        target, ignored = given["target"], given["ignore_index"]
        counts = target != (-100 if ignored is None else ignored)
        yield target.where(counts, 0), 0, x.shape[1 if x.dim() > 1 else 0] - 1
    else:
        yield given.get("p", x), 0, sys.float_info.max if name == "multinomial" else 1


def refuse_assertions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Look at an operator's numbers before it does.

    Raises:
        IndexError: as the operator does on a CPU.
    """
    if (found := _asserted(func)) is None:
        return
    name, arguments = found
    given = {**dict.fromkeys(arguments), **dict(zip(arguments, args, strict=False)), **kwargs}
    for x, least, most in _ranges(name, given):
        if type(x) is not Tensor or x.is_meta or not x.numel():
            continue
        low, high = x.aminmax()
        if not bool((low >= least) & (high <= most)):
            raise IndexError(
                f"{name}: found numbers from {low.item()} to {high.item()}, expected {least} to "
                f"{most}, which would be a device-side assertion of a GPU"
            )
