"""The tensors in a model's arguments, however they are packed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: How many objects inside each other are opened.
DEPTH = 4


def batched_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors in a call's arguments; a packed sequence counts by its samples, not its rows.

    Where there are none, those in the arguments' attributes and in mappings of other types: what
    tokenizers return, a dataclass, a batch of graphs.
    """
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_packed)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if isinstance(leaf, PackedSequence):
            samples = int(leaf.batch_sizes[0])  # on the CPU by definition
            tensors[:0] = [torch.empty(samples, samples, device="meta")]
            tensors.append(leaf.data)
    if not tensors:

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(note, leaves)
    return tensors


def map_tensors(change: Callable[[Tensor], Tensor], arguments: Any, depth: int = DEPTH) -> Any:
    """The same arguments with every tensor changed; packed sequences are left alone.

    Objects that hold a changed tensor are shallow copies of themselves.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if depth == 0 or _is_packed(leaf) or isinstance(leaf, nn.Module | type):
            return leaf
        if isinstance(leaf, Mapping):
            content: Mapping[Any, Any] = leaf
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            content = vars(leaf)
        else:
            return leaf
        changed = {}
        for key, value in content.items():
            new = map_tensors(change, value, depth - 1)
            before, after = pytree.tree_leaves(value), pytree.tree_leaves(new)
            if any(a is not b for a, b in zip(before, after, strict=True)):
                changed[key] = new
        if not changed:
            return leaf
        leaf = copy.copy(leaf)
        target = leaf if isinstance(leaf, MutableMapping) else vars(leaf)
        target.update(changed)
        return leaf

    return pytree.tree_map(of_leaf, arguments, is_leaf=_is_packed)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)
