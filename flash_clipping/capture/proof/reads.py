"""What the layers of a model read in one run of it, and a few numbers of every row of that."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_clipping._compat import unseen_functions, unseen_operators
from flash_clipping.capture.draws import scrambled
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.errors import FlashClippingError

#: Something that a tapped layer reads: the layer's path, which of its calls in one call of the
#: root, and which read in that call.
Read: TypeAlias = tuple[str, int, int]

#: After the path of a layer: repetitions of its parameters, which may be one for each sample.
REPEATED = ", repeated"


@dataclass
class Note:
    """One read.

    Attributes:
        rows: size of its batch axis.
        answer: whether the layer took it for samples.
        sure: it was computed from the model's inputs.
        beside: it stands beside such a tensor; it may be the same for all samples.
        folded: as many rows for every sample were declared, or found.
        low: its values were rounded to few digits.
        digest: a few numbers for every row.
        axis: that holds samples in most models.
        shape: of all of it; of its rows alone where the layer's rule knows these.
        use: of bare parameters: what the layout of such operations goes by.
        result: the shape of what came of that.
    """

    rows: int
    answer: bool
    sure: bool
    beside: bool
    folded: bool
    low: bool
    digest: Tensor | None
    axis: int
    shape: Sequence[int]
    use: str = ""
    result: Sequence[int] | None = None

    def is_alike(
        self, other: Note, rows: Tensor | None = None, of_other: Tensor | None = None
    ) -> bool:
        """Whether these rows of both have the same values, as far as their dtypes can tell."""
        a, b = self.digest, other.digest
        if a is None or b is None:
            return self.rows == other.rows or rows is not None
        a = a if rows is None else a[rows]
        b = b if of_other is None else b[of_other]
        if len(a) != len(b):
            return False
        return not len(a) or are_alike(a, b, DIFFERENT_LOW if self.low or other.low else DIFFERENT)


def layout_of(
    shapes: Sequence[Sequence[int] | None],
    sizes: Sequence[int],
    first: int,
    has_parts: bool = True,
) -> Layout | None:
    """The axis that is as many times as long as there are samples, the ``first`` one if several
    are; ``None`` if none is.

    Args:
        shapes, sizes: of one tensor, in batches of so many samples.
        has_parts: whether it may be longer than there are samples.
    """
    found = [shape for shape in shapes if shape is not None]
    if len(found) < len(shapes) or len({*map(len, found)}) > 1 or 0 in sizes:
        return None
    for axis in sorted(range(len(found[0])), key=lambda axis: axis != first):
        parts = {divmod(shape[axis], size) for shape, size in zip(found, sizes, strict=True)}
        if len(parts) == 1 and (parts == {(1, 0)} or (has_parts and next(iter(parts))[1] == 0)):
            return Layout(axis)
    return None


class Reads(dict[Read, Note]):
    """All reads of one run, in order.

    Attributes:
        size: how many samples there were.
        refused: what ended the run before its time.
        offsets: where a bag of embeddings begins for each sample, if that says how many there are.
        outputs: shapes of the tensors that the model returned.
        bags: offsets of bags beside other inputs of the samples, and the ids that they point into.
        places: of samples that stand in another run as well, as rows of this one; and their
            numbers there.
    """

    size = 0
    refused: FlashClippingError | None = None
    offsets: Tensor | None = None
    outputs: Sequence[torch.Size] = ()
    bags: list[tuple[Tensor, Tensor]]
    places: tuple[list[int], list[int]] = ([], [])

    def __init__(self) -> None:
        super().__init__()
        self.bags = []

    def note(
        self,
        read: Read,
        x: Tensor,
        axis: int,
        rows: int | None,
        answer: bool,
        *,
        sure: bool = False,
        beside: bool = False,
        folded: bool = False,
    ) -> None:
        """A layer reads ``x``; ``rows``: what the rule says of its rows, if it knows them."""
        digest = digest_of(x, axis) if rows is None and not beside else None
        found = x.shape[axis] if rows is None else rows
        shape = x.shape if rows is None else (rows,)
        self[read] = Note(found, answer, sure, beside, folded, is_low(x), digest, axis, shape)

    def note_end(self, tensors: Sequence[Tensor], size: int, originals: dict[int, Tensor]) -> None:
        """The run has returned these, of so many samples; by ``id`` what its inputs are copies
        of."""
        self.outputs, self.size = [x.shape for x in tensors], size
        if self.offsets is not None:
            self.offsets = originals.get(id(self.offsets), self.offsets)
        own = [pair for pair in self.bags if all(id(x) in originals for x in pair)]
        self.bags = [(originals[id(starts)], originals[id(ids)]) for starts, ids in own]

    def note_use(self, use: str, reads: Sequence[Read], result: Any) -> None:
        """A bare parameter has met what these reads are of, and this has come of it."""
        for read in reads:
            if (note := self.get(read)) is not None:
                note.use, note.result = use, getattr(result, "shape", None)


# -- digests of rows -------------------------------------------------------------------------------

#: Relative difference from which on two rows are not the same sample's; the second where values
#: have a few digits only (TF32, bf16, fp16, autocast).
DIFFERENT, DIFFERENT_LOW = 1e-3, 5e-2

#: Features of a row that its digest is made of; of longer rows, as many at equal distances.
FEATURES = 1 << 16


def is_low(x: Tensor) -> bool:
    """Whether what computed these values may have rounded to a few digits."""
    kind = x.device.type
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(kind)
        or (x.is_cuda and x.dtype == torch.float32)  # TF32
    )


def digest_of(x: Tensor, axis: int) -> Tensor | None:
    """A few numbers for every row, which tell it from others; the last is how large it is."""
    with ExitStack() as stack:
        if type(x) is Tensor:  # modes that watch take longer to see an operation than it does
            stack.enter_context(unseen_functions())
            stack.enter_context(unseen_operators())
        # After: modes that watch must not see autocast change either.
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
        rows = x.detach().transpose(0, axis)
        rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
        if not rows.numel():
            return None
        if rows.shape[1] > FEATURES:
            rows = rows[:, :: -(-rows.shape[1] // FEATURES)]
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        signs = _signs(rows.shape[1], rows.device).double()
        # On the device: activations of a large model take the host seconds.
        wide = rows.to(torch.float64).nan_to_num(0.0, 1e30, -1e30)
        size = wide.square().mean(1, keepdim=True).sqrt()
        return torch.cat([wide @ signs / wide.shape[1] ** 0.5, size], 1).cpu()


@functools.lru_cache(maxsize=8)
def _signs(n: int, device: torch.device) -> Tensor:
    """``[n, 3]`` signs, int8, the same at every call: rows of one sum and size, as a normalization
    leaves them, differ by these. Not drawn: random numbers are one number while a model is looked
    at."""
    with unseen_functions(), unseen_operators():  # it stays, and must not be of their kind
        bits = scrambled(torch.arange(1, n + 1, device=device))
        bits = torch.stack([bits >> 20, bits >> 31, bits >> 42], 1) & 1
        return (2 * bits - 1).to(torch.int8)


def are_alike(first: Tensor, second: Tensor, different: float) -> bool:
    """Whether digests of rows are of the same values, but for this relative difference."""
    scale = torch.maximum(first[:, -1], second[:, -1])
    scale = scale.clamp(min=1e-3 * float(scale.max()))
    error = (first - second).abs().amax(1) / scale.clamp(min=1e-300)
    return float(error.max()) <= different
