"""When a model is looked at again: for another kind of call, and in some steps of each kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flash_clipping._compat import is_autocasting, pytree
from flash_clipping.capture.inputs import batched_inputs

#: Kinds that are told apart by the numbers among their arguments: one that counts steps would make
#: a new kind in every step.
KINDS = 8


def kind_of_call(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axis: int,
    numbers: bool = True,
) -> Hashable:
    """A key of everything that may change how a model computes: which of its parts train, which
    arguments there are, their kinds, and their shapes as far as a size is none, one or several.

    The number of samples is no part of it, but for whether there are several: one sample shows
    nothing of samples that reach each other.

    Args:
        root: the model.
        args, kwargs: of the call.
        axis: that holds the samples.
        numbers: whether numbers among the arguments are told apart by value.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = batched_inputs(args, kwargs)
    B = next((x.shape[axis] for x in tensors if x.dim() > axis), 0)
    return (
        tuple([module.training for module in root.modules()]),
        str(structure),
        tuple([_of_argument(leaf, numbers) for leaf in leaves]),
        tuple([_of_tensor(x, axis, B) for x in tensors]),
        is_autocasting(),
    )


def _of_argument(leaf: Any, numbers: bool) -> Hashable:
    if leaf is None or isinstance(leaf, bool | str):
        return leaf
    if numbers and isinstance(leaf, int | float):
        return leaf
    return type(leaf).__qualname__


def _of_tensor(x: Tensor, axis: int, B: int) -> Hashable:
    sizes = [min(n, 2) for n in x.shape]
    has_samples = x.dim() > axis and x.shape[axis] == B
    return x.dtype, has_samples, tuple(sizes)


class Coverage:
    """Which kinds of calls were looked at, and which step is to be looked at next.

    After a proof, the 1st, 2nd, 4th, 8th ... step of that kind are audited: what all audits cost
    together grows as the logarithm of the steps.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        #: Steps of each kind since its proof, and audits among them.
        self._steps: dict[Hashable, int] = {}
        self._audits: dict[Hashable, int] = {}
        self._trainable = -1

    def due(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trainable: int
    ) -> int | None:
        """The proof that the next step needs: 0 for the first, ``n`` for the ``n``-th audit,
        ``None`` for nothing.

        Args:
            root: the model.
            args, kwargs: of the call.
            trainable: a number that is another one when other parameters are trainable.
        """
        if trainable != self._trainable:
            self._trainable = trainable
            self._steps.clear()
            self._audits.clear()
        kind = kind_of_call(root, args, kwargs, self._axis, numbers=len(self._steps) < KINDS)
        if kind not in self._steps:
            if len(self._steps) >= KINDS:  # its numbers are told apart no longer
                kind = kind_of_call(root, args, kwargs, self._axis, numbers=False)
            if kind not in self._steps:
                self._steps[kind], self._audits[kind] = 0, 0
                return 0
        self._steps[kind] += 1
        step = self._steps[kind]
        if step & (step - 1):
            return None
        self._audits[kind] += 1
        return self._audits[kind]

    def forget(self) -> None:
        """Start afresh: a proof failed, or was broken off."""
        self._steps.clear()
        self._audits.clear()
