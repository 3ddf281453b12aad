"""The tensors in a model's arguments, however they are packed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flash_clipping._compat import is_awaited, pytree
from flash_clipping.errors import FlashClippingError

#: How many objects inside each other are opened.
DEPTH = 4

_T = TypeVar("_T")


def batched_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors in a call's arguments; a packed sequence, and a list with an entry for each
    sample, count by their samples, not by rows.

    Where there are none, those in the arguments' attributes and in mappings of other types: what
    tokenizers return, a dataclass, a batch of graphs.
    """
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        return [args[0]]
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_packed)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors and (count := entries_of(args, kwargs)):
        tensors.insert(0, torch.empty(count, count, device="meta"))
    for leaf in leaves:
        if isinstance(leaf, PackedSequence):
            samples = int(leaf.batch_sizes[0])  # on the CPU by definition
            tensors[:0] = [torch.empty(samples, samples, device="meta")]
            tensors.append(leaf.data)
    return tensors or tensors_of(leaves)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: in containers, packed sequences, and the attributes of objects."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value, is_leaf=_is_packed):
        if isinstance(leaf, Tensor):  # nearly all: nothing is put together again for them
            found.append(leaf)
        elif leaf is not None:
            found += tensors_of(leaf, packed=True)
    return found


def tensors_of(value: Any, packed: bool = False) -> list[Tensor]:
    """The tensors in a value; if ``packed``, those of packed sequences too."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value, packed=packed)
    return found


def map_tensors(
    change: Callable[[Tensor], Tensor], arguments: _T, depth: int = DEPTH, *, packed: bool = False
) -> _T:
    """``arguments`` with every tensor changed; if ``packed``, the data of packed sequences too.

    Objects that hold a changed tensor are shallow copies of themselves.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, PackedSequence):
            data = change(leaf.data) if packed else leaf.data
            return leaf if data is leaf.data else leaf._replace(data=data)
        is_mapping = isinstance(leaf, Mapping)
        if depth == 0 or isinstance(leaf, nn.Module | type) or (callable(leaf) and not is_mapping):
            return leaf
        content = leaf if is_mapping else attributes_of(leaf)
        changed = {}
        for key, value in content.items():
            new = map_tensors(change, value, depth - 1, packed=packed)
            before, after = pytree.tree_leaves(value), pytree.tree_leaves(new)
            if any(a is not b for a, b in zip(before, after, strict=True)):
                changed[key] = new
        return rebuilt(leaf, changed) if changed else leaf

    found: _T = pytree.tree_map(of_leaf, arguments, is_leaf=_is_packed)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds, in its ``__dict__`` and in its slots."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                found[name] = getattr(value, name)
    return found


def parts_of(name: str, value: Any) -> dict[Any, tuple[str, Any]]:
    """What a mapping or an object of data holds, each with its name."""
    if isinstance(value, Mapping):
        return {key: (f"{name}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, nn.Module | type) or callable(value):
        return {}
    if hasattr(value, "_fields") or dataclasses.is_dataclass(value) or tensors_in(value):
        fields = getattr(value, "_fields", ())
        held = dict(zip(fields, value, strict=True)) if fields else attributes_of(value)
        return {key: (f"{name}.{key}", part) for key, part in held.items()}
    return {}


def rebuilt(like: Any, content: Mapping[str, Any]) -> Any:
    """An object of the same type that holds these in the place of its own."""
    if hasattr(like, "_fields"):
        return like._replace(**content)
    made: Any = copy.copy(like)
    # A frozen dataclass has the way of object's only.
    put = type(made).__setitem__ if isinstance(like, Mapping) else object.__setattr__
    for key, value in content.items():
        put(made, key, value)
    return made


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def entries_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many samples there are, where the first argument is a list with a tensor for each: they
    are of several lengths, or stand beside a list of as many mappings, as targets of detectors."""
    first, *others = (*args, *kwargs.values())
    if type(first) is not list or not all(isinstance(x, Tensor) for x in first):
        return 0
    differ = len({x.shape[:1] for x in first}) > 1
    beside = any(list_of_samples(x, len(first)) and isinstance(x[0], Mapping) for x in others)
    return len(first) if differ or beside else 0


def list_of_samples(value: Any, count: int, axis: int = 0) -> bool:
    """Whether a list has an entry for each of ``count`` samples: targets of a detector (or in a
    tuple), texts, lengths. Tensors that all have a row for each are something else."""
    if type(value) not in (list, tuple) or len(value) != count or not count:
        return False
    if all(isinstance(x, Mapping) for x in value):
        return True
    if type(value) is tuple:
        return False
    if all(isinstance(x, Tensor) for x in value):
        alike = len({(x.dim(), x.dtype) for x in value}) == 1
        return alike and any(x.dim() <= axis or x.shape[axis] != count for x in value)
    return len({type(x) for x in value}) == 1 and isinstance(value[0], str | int | float | list)


def refuse_layout(root: nn.Module, x: Tensor) -> NoReturn:
    """Refuse an input of ``root`` that is sparse or nested."""
    line = "torch.nested.to_padded_tensor(x, 0.0)" if x.is_nested else "x.to_dense()"
    raise FlashClippingError(
        f"FC206 the model ({type(root).__name__}): found a sparse or nested tensor among its "
        "inputs, whose rows cannot be told apart in any mode. Give it dense, and convert it in "
        "forward:\n"
        f"    x = {line}"
    )


def refuse_graphs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse batches of graphs whose rows are nodes, as ``torch_geometric`` makes them.

    Raises:
        FlashClippingError: there is one among these arguments.
    """
    for x in (*args, *kwargs.values()):
        if hasattr(x, "edge_index") or hasattr(x, "num_graphs"):
            raise FlashClippingError(
                f"FC207 the model: found a {type(x).__name__} among its arguments, whose rows are "
                "nodes of graphs: samples have several, and not as many each. Let graphs run one "
                "at a time:\n"
                '    mode="one_by_one"'
            )


def arrived(x: Any) -> Any:
    """A plain tensor where a collective may still be writing: kernels of ours read its memory."""
    return _Arrived.apply(x) if is_awaited(x) else x


class _Arrived(torch.autograd.Function):
    """Its own ``wait()`` leaves autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.wait()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
