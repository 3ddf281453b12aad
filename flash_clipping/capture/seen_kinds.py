"""Kinds of calls on which it was shown where samples lie in what layers read.

A model may lay its rows out otherwise when a part of it is in evaluation, for another argument
(``channels_last=True``), or when the number of samples fits into another size by chance. Each of
that makes another kind of call, which is rehearsed before it is trusted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.inputs import batched_inputs

#: Kinds that are told apart; an argument that counts steps makes a new one in every step.
KINDS = 8


class SeenKinds:
    """Kinds of calls of one model that were rehearsed.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._plain: set[Hashable] = set()
        self._seen: set[Hashable] = set()
        self._modules: tuple[nn.Module, ...] = ()
        self._sizes: tuple[int, ...] = ()

    def note(
        self, root: nn.Module, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A call of ``root`` with these arguments, ``size`` samples, was rehearsed."""
        self._modules = tuple(root.modules())
        held = (*root.parameters(), *root.buffers())
        self._sizes = tuple(sorted({n for x in held for n in x.shape if n > 1}))
        if len(self._plain) < KINDS:
            self._plain.add(self._plain_kind(root.training, size, args, kwargs))
        if len(self._seen) < KINDS:
            self._seen.add(self._kind(size, args, kwargs))

    def cover(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of this kind was rehearsed, or there are too many kinds."""
        return len(self._seen) >= KINDS or self._kind(size, args, kwargs) in self._seen

    def cover_plain(
        self, training: bool, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """The same of a model whose layers all read a row for each sample: what else they may get
        is refused by its size, unless it has as many rows by chance. What the model returns may
        depend on other arguments."""
        if size <= 1 or len(self._plain) >= KINDS:
            return True
        return self._plain_kind(training, size, args, kwargs) in self._plain

    def _plain_kind(
        self, training: bool, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Hashable:
        shapes = [x.shape for x in batched_inputs(args, kwargs)]
        axes = [tuple([a for a, n in enumerate(of) if size and n % size == 0]) for of in shapes]
        return training, tuple(axes), of_arguments(args, kwargs)

    def _other_sizes(self, inputs: Sequence[Tensor]) -> list[int]:
        axis = self._axis
        return [n for x in inputs for n in (*x.shape[:axis], *x.shape[axis + 1 :])]

    def _kind(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        sizes = self._other_sizes(
            [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        )
        return (
            tuple([module.training for module in self._modules]),
            of_arguments(args, kwargs),
            _multiples(size, self._sizes),
            bool(_multiples(size, sizes)),
        )


def of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What a call was given, tensors' values and shapes aside."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return tuple([x if _is_plain(x) else type(x) for x in leaves]), str(structure)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _multiples(size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of these sizes that so many samples may be taken for, or each for several rows."""
    return tuple([n for n in sizes if size > 1 and n % size == 0])
