"""What a replayed step may be given, and what it may return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import pytree

#: What arguments may hold besides tensors: what is known by its value.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def check_arguments(leaves: Sequence[Any]) -> None:
    """Refuse arguments that are neither tensors nor plain values.

    Raises:
        TypeError: one is something else.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(
                f"GraphedStep: found {type(leaf).__name__} in the step's arguments; expected "
                "tensors and plain values (numbers, strings, None) in lists, tuples and dicts, as "
                "it knows nothing else by its contents. Pass dict(batch) where a tokenizer made "
                "the batch."
            )


def are_odd(leaves: Sequence[Any]) -> bool:
    """Whether there are tensors that no copy can stand in for: gradients flow back to them, or
    they are no plain memory; or hold nothing: a batch without samples does not reach the model."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return any(
        x.requires_grad or type(x) is not Tensor or x.layout != torch.strided or not x.numel()
        for x in tensors
    )


def detached(output: Any) -> Any:
    """Results without their history: tensors and ``None``, as a replay renews nothing else.

    Raises:
        TypeError: one is something else.
    """
    for leaf in pytree.tree_leaves(output):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"GraphedStep: found {type(leaf).__name__} in the step's results; expected tensors "
                "or None, in lists, tuples and dicts: anything else would be the captured step's "
                "in every replay. Return the loss as a tensor, or nothing."
            )
    return pytree.tree_map_only(Tensor, Tensor.detach, output)
