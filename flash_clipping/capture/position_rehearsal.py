"""Do documents of one row reach each other? A rehearsal shows it.

Before the first step with two documents or more, and when the model is called with other kinds of
arguments, it runs on the batch as it is, and again with other tokens in some documents; their
places stay. What layers read at the positions of all others must stay as it was. Documents are
changed all but one (the first, the last, one between), and every second one.

``R`` rows of the batch, ``T`` positions of each, ``N = R·T``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.forward_call import Read
from flash_clipping.capture.inputs import map_tensors
from flash_clipping.capture.rehearsal import MODELS_OWN, Rehearsals, Run
from flash_clipping.capture.row_values import are_alike, digest_of, is_low
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.taint import Taint
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError, to_freeze

#: Relative difference from which on a position was reached from another document. Kernels compute
#: rows of one batch alike whatever the others hold, but experts that get other numbers of rows.
REACHED, REACHED_LOW = 1e-5, 1e-2


@dataclass
class _Note:
    """What one read was: a few numbers for every position, and whether it derives from inputs."""

    digest_N: Tensor | None
    tainted: bool
    low: bool


@dataclass
class PositionWitness:
    """Notes what layers read in one rehearsal."""

    taint: Taint
    positions: int
    notes: dict[Read, _Note] = field(default_factory=dict)
    offsets: Tensor | None = None

    def note(self, read: Read, rows: Tensor, given: Sequence[Any]) -> None:
        """A layer reads these rows, ``[N, ...]``, of what it was given."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        tainted = any(x in self.taint for x in tensors) or rows.requires_grad
        with self.taint.looking_away():
            digest_N = digest_of(rows if rows.dim() > 1 else rows.unsqueeze(1), 0)
        self.notes[read] = _Note(digest_N, tainted, is_low(rows))

    def reads_samples(
        self, read: Read, x: Tensor, axis: int, *, rows: int | None = None, **_: Any
    ) -> bool:
        """Of what a module's own parameters meet, which has got positions as rows."""
        if (x.shape[axis] if rows is None else rows) != self.positions:
            return False
        if rows is None:
            with self.taint.looking_away():
                self.notes[read] = _Note(digest_of(x, axis), True, is_low(x))
        return True

    def forget(self, path: str) -> None:
        for read in [read for read in self.notes if read[0] == path]:
            del self.notes[read]


class _PositionRehearsals(Rehearsals):
    """Runs of one model on one batch, and on that batch with other tokens."""

    def __init__(self, units: Units, *given: Any):
        super().__init__(*given)
        self.units: Units | None = units

    def witness(self, taint: Taint, size: Callable[[], int]) -> Any:
        assert self.units is not None
        return PositionWitness(taint, len(self.units.map))

    def run(self, *args: Any, **kwargs: Any) -> Run:
        """With other tokens other documents may not be finite: that is none of the step's."""
        assert self.units is not None
        try:
            return super().run(*args, **kwargs)
        finally:
            self.units.forget_lost()


def _kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which arguments a model is called with: what masks are made of depends on that."""

    def of(x: Any) -> Any:
        return x.dim() if isinstance(x, Tensor) else type(x)

    return tuple(map(of, args)), tuple((name, of(x)) for name, x in sorted(kwargs.items()))


def rehearse_positions(
    root: nn.Module,
    forward: Callable[..., Any],
    session: ClippingSession,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    units: Units,
    watched: int,
) -> None:
    """See that every layer reads positions in order, and documents do not reach each other.

    Leaves in ``session.units_of_calls`` what was shown, for so many ``watched`` parameters.

    Raises:
        FlashClippingError: they do, or it cannot be seen; all layers are named.
    """
    known = session.units_of_calls
    kind = watched, _kind_of_call(args, kwargs)
    if kind in known.apart or not len(units.map):
        return
    runs = _PositionRehearsals(units, root, forward, session, args, kwargs)
    sources = _sources(units, args, kwargs)
    try:
        whole = runs.run(None, sources)
    except MODELS_OWN as error:
        if isinstance(error, FlashClippingError | torch.OutOfMemoryError):
            raise
        return  # the forward itself will raise it
    if whole.refused is not None:
        raise whole.refused
    notes: dict[Read, Any] = {**whole.notes}
    _refuse_constants(notes)
    known.proven = {read[0] for read in notes}
    index_N = units.map.index_M.cpu()  # a rehearsal may wait for the device
    documents = index_N[index_N >= 0].unique()
    if len(documents) < 2:
        return
    content = _content(units, sources)
    for kept in _kept(documents.tolist()):
        kept_N = torch.isin(index_N, torch.tensor(kept))
        stays_N = kept_N | (index_N < 0)  # padding is nobody's
        try:
            run = runs.run(partial(other_tokens, stays_N), content)
        except MODELS_OWN as error:
            raise FlashClippingError(
                "the model: units are parts of rows, and it could not be seen whether documents "
                f"reach each other: with other tokens it raised {type(error).__name__}: {error}"
            ) from error
        if run.refused is not None:
            raise run.refused
        _compare(notes, {**run.notes}, kept_N, ~stays_N)
    known.apart.add(kind)


def _sources(units: Units, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The model's inputs that have an entry for every position."""
    R, T = units.shape
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        if tuple(x.shape[:2]) == (R, T) or (x.dim() and x.shape[0] == R * T):
            found.append(x)
        return x

    map_tensors(note, (args, kwargs))
    return found


def _content(units: Units, sources: list[Tensor]) -> list[Tensor]:
    """Those that hold what documents say, not where they are: no map, places or masks."""
    index_N = units.map.index_M
    candidates: list[Tensor] = []
    places: list[Tensor] = []
    for x in sources:
        flat = x.detach().reshape(len(index_N), -1)
        if flat.shape[1] == 1 and not x.is_floating_point():
            values = flat[:, 0].to(torch.int64)
            inside = index_N.to(x.device)
            if bool((values == inside).all()):
                continue
            one = (inside[1:] == inside[:-1]) & (inside[1:] >= 0)
            if bool((values.diff()[one] == 1).all()) and bool(one.any()):
                places.append(x)
                continue
        candidates.append(x)
    said = [x for x in candidates if x.dim() > 2 or len(x.detach().flatten().unique()) > 2]
    return said or candidates or places[:1]  # tokens may be consecutive, too; they come first


def _kept(documents: list[int]) -> list[list[int]]:
    """Which documents stay as they are, run by run."""
    first, last, between = documents[:1], documents[-1:], [documents[len(documents) // 2]]
    chosen = [last, first, documents[::2], documents[1::2], between]
    return [list(kept) for kept in dict.fromkeys(map(tuple, chosen))]


def other_tokens(stays_N: Tensor, x: Tensor) -> Tensor:
    """The same with other values wherever a position does not stay; all occur in ``x``."""
    flat = x.detach().reshape(len(stays_N), -1)
    stays_N1 = stays_N.to(x.device).unsqueeze(1)
    if x.is_floating_point():
        changed = 0.5 - flat.roll(1, 1) if flat.shape[1] > 1 else 0.5 - flat
    else:
        known = flat[flat >= 0].unique()
        if len(known) > 1:
            places = torch.searchsorted(known, flat.contiguous())
            changed = known[(places + 1) % len(known)]
        else:
            changed = (flat - 1).abs()
        changed = torch.where(flat < 0, flat, changed)  # marks that nobody reads
    return torch.where(stays_N1, flat, changed.to(flat.dtype)).view(x.shape)


def _refuse_constants(notes: dict[Read, _Note]) -> None:
    paths = dict.fromkeys(read[0] for read, note in notes.items() if not note.tainted)
    if paths:
        raise FlashClippingError(
            f"{', '.join(paths)}: units are parts of rows (sample_of with a map of positions), and "
            "what it reads does not derive from the model's inputs: positions that the model makes "
            "itself, say. Pass them to the model (position_ids, which begin anew in every "
            "document), or freeze the parameters of this layer."
            f"{to_freeze(*paths)}"
        )


def _compare(
    whole: dict[Read, Any], other: dict[Read, Any], kept_N: Tensor, moved_N: Tensor
) -> None:
    """What layers read of documents that were kept must have stayed, and have changed elsewhere."""
    reached: dict[str, None] = {}
    changed = False
    for read, a in whole.items():
        b = other.get(read)
        if b is None:
            reached[read[0]] = None
            continue
        if a.digest_N is None or b.digest_N is None:
            continue
        different = REACHED_LOW if a.low or b.low else REACHED
        if not are_alike(a.digest_N[kept_N], b.digest_N[kept_N], different):
            reached[read[0]] = None
        if not torch.equal(a.digest_N[moved_N], b.digest_N[moved_N]):
            changed = True
    if reached:
        raise FlashClippingError(
            f"{', '.join(reached)}: units are parts of rows (sample_of with a map of positions), "
            "and what is read at the positions of a document changes with the tokens of others. "
            "Attention reaches from one document to another, so that no clipping bounds what one "
            "adds: give the model a block-diagonal mask; or position_ids that begin anew in every "
            "document, without an attention_mask and with use_cache=False (transformers makes the "
            "mask of them); or cu_seqlens (flash-attention). A layer that mixes positions or "
            "changes their order looks like this as well."
        )
    if not changed:
        raise FlashClippingError(
            "the model: units are parts of rows, and other tokens changed nothing that its layers "
            "read, so that it cannot be seen whether documents reach each other. Give the model "
            "its tokens as a tensor with an entry for every position, [R, T] or [R, T, features]."
        )
