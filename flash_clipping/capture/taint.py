"""Which tensors derive from the samples, while a rehearsal runs the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import (
    DispatchMode,
    memory_id,
    pytree,
    weak_storage,
)
from flash_clipping.capture.proof.draws import calm_result, without_dropout

#: Operators that only look at the shape of what they are given.
_SHAPE_ONLY = {
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_zeros",
    "new_ones",
    "new_full",
}

#: Operators that put rows where other tensors say: an index, or the order of values.
_BY_INDEX = (
    "index",
    "gather",
    "scatter",
    "take",
    "put",
    "sort",
    "topk",
    "kthvalue",
    "searchsorted",
)

#: Methods that give Python all values of a tensor.
_READING = {"tolist", "numpy", "__array__", "__dlpack__"}


class Reads(TorchFunctionMode):
    """Tells a :class:`Taint` of tensors that Python gets all values of, which no operator does."""

    def __init__(self, taint: Taint):
        super().__init__()
        self.taint = taint

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READING and isinstance(args[0], Tensor):
            self.taint.note_read(args[0])
        return func(*args, **(kwargs or {}))


class Taint(DispatchMode):
    """Follows what derives from some tensors, and takes the chance out of random operators.

    A tensor is followed by its memory, so that views and changes in place are seen. Floating
    tensors that an operator would draw at random are filled with one value, and dropout inside
    attention is switched off: two runs can be compared row by row.
    """

    def __init__(self, sources: Iterable[Tensor]):
        super().__init__()
        # A weak reference keeps the address from being used again, not the memory.
        self._seen: dict[int, Any] = {}
        self._chosen: dict[int, Any] = {}
        self._of_floats: dict[int, Any] = {}
        #: Whether Python got to know values of samples: what it then does may follow from them.
        self._read = False
        self._looks_away = False
        for tensor in sources:
            self._add(tensor, of_floats=tensor.is_floating_point())

    def __contains__(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._seen

    def is_chosen(self, tensor: Tensor) -> bool:
        """Whether values of samples decided which rows a tensor has, or in which order: a router
        that picks tokens, a sort, a condition in Python. Such rows may lie otherwise in another
        batch. A condition on integers alone is none: models ask whether a mask has any 0."""
        return self._read or _storage(tensor) in self._chosen

    def row_by_row(self, inputs: Sequence[Any], compute: Callable[..., Any], *args: Any) -> Any:
        """``compute(*args)``, a layer's output for each row of its inputs by itself: rows lie as
        those of the first input, however they are sorted on the way."""
        with self.looking_away():
            output = compute(*args)
        if any(x in self for x in _tensors_in(inputs)):
            self._add(output, self.is_chosen(inputs[0]), of_floats=True)
        return output

    def note_read(self, tensor: Tensor) -> None:
        """Python gets all values of a tensor (``tolist``, ``numpy``)."""
        self._read = self._read or tensor in self

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """While operators run that are none of the model's, on which nothing of it depends: most
        of a rehearsal's are, and following one takes ten times as long as running it."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def _add(self, tensor: Tensor, chosen: bool = False, of_floats: bool = False) -> None:
        key = _storage(tensor)
        if key is None:
            return
        kinds = [(self._seen, True), (self._chosen, chosen), (self._of_floats, of_floats)]
        for noted, holds in kinds:
            if holds and key not in noted:
                noted[key] = weak_storage(tensor.untyped_storage())

    def _is_of_floats(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._of_floats

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._looks_away:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = _tensors_in((*args, *kwargs.values()))
        args, kwargs = without_dropout(func, args, kwargs)
        result = calm_result(func, args, kwargs)
        if name not in _SHAPE_ONLY and any(x in self for x in given):
            chosen = any(self.is_chosen(x) for x in given) or self._chooses(func, name, given)
            # A mask of integers stays one as floats; what a table or a weight meets does not.
            of_floats = any(
                self._is_of_floats(x) or (x.is_floating_point() and x.numel() > 1 and x not in self)
                for x in given
            )
            if name == "_local_scalar_dense":
                self._read = self._read or of_floats
            for leaf in _tensors_in((result,)):
                self._add(leaf, chosen, of_floats)
        return result

    def _chooses(self, func: Any, name: str, given: list[Tensor]) -> bool:
        """Whether an operator that got samples chooses among rows by their values.

        A table that ids look up is none of the samples, so its rows lie as the ids do.
        """
        by_truth = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if name.startswith("index_put") and by_truth and given[-1].numel() == 1:
            return False  # rows stay in their places, as by ``masked_fill``
        if torch.Tag.dynamic_output_shape in func.tags and (name != "index" or by_truth):
            return True  # an index of numbers has the shape of these, and is looked at below
        if name == "where" and len(given) == 3 and all(x in self for x in given):
            counts = [x.shape[:1].numel() for x in given]
            return counts[0] < max(counts)  # one condition for several rows
        if name == "embedding" or not any(word in name for word in _BY_INDEX):
            return False
        # The first is what rows are taken from, or put into; indices are no floats.
        rows = [given[0], *(x for x in given[1:] if x.is_floating_point() or x.is_complex())]
        choosers = [x for x in given[1:] if not (x.is_floating_point() or x.is_complex())]
        return any(x in self for x in rows) and (not choosers or any(x in self for x in choosers))


#: What an operator takes and gives besides tensors.
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def _tensors_in(things: Iterable[Any]) -> list[Tensor]:
    """The tensors of an operator's arguments or results, in order; these are seldom nested, and
    PyTorch's own walk through them takes longer than most operators."""
    found: list[Tensor] = []
    for thing in things:
        if isinstance(thing, Tensor):
            found.append(thing)
        elif not isinstance(thing, _PLAIN):
            found += [x for x in pytree.tree_leaves(thing) if isinstance(x, Tensor)]
    return found


def _storage(tensor: Tensor) -> int | None:
    if hasattr(tensor, "placements"):  # a DTensor: what this process has of it
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    try:
        return memory_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return None
