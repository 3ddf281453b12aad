"""Runs of a model on a batch and on variants of it, and notes of what its layers read in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flash_clipping._compat import checkpoints_replaced, pytree
from flash_clipping.capture.collectives import collectives_refused
from flash_clipping.capture.forward_call import Read
from flash_clipping.capture.image_patches import parts_of_samples, rows_of_samples
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_trace import (
    MODELS_OWN,
    PlainCheckpoint,
    random_state,
    untouched,
    without_activations,
)
from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_LOW, are_alike, digest_of, is_low
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.taint import Reads, Taint
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError


@dataclass
class Note:
    """What one read was, in one rehearsal.

    Attributes:
        rows: size of its batch axis.
        tainted: it derives from the model's inputs.
        sure: it was computed by tapped layers from what was taken for samples.
        beside: it stands beside such a tensor; it may be the same for all samples.
        answer: what the layer was told: whether it reads samples.
        chosen: values of samples decided which rows it has, or their order.
        digest: a few numbers for every row, and how large these are.
        meets: names of the bare parameters that meet it in one operation.
        key: what its layout goes by, if it is not the first axis that the samples lie along.
        free: how many axes samples may lie along, and in any regular order; 0: only together.
        along: where samples may lie along other axes, the digests of these.
        ids: its values are whole numbers.
    """

    rows: int
    tainted: bool
    sure: bool
    beside: bool
    folded: bool
    answer: bool
    low: bool
    chosen: bool
    digest: Tensor | None
    meets: tuple[str, ...] = ()
    key: str = ""
    free: int = 0
    along: dict[int, Tensor | None] = field(default_factory=dict)
    ids: bool = False


@dataclass
class _Witness:
    """Notes what layers read in one rehearsal."""

    taint: Taint
    followers: set[Read]
    size: Callable[[], int]
    #: Reads in which samples were looked for along all axes.
    searched: set[Read] = field(default_factory=set)
    notes: dict[Read, Note] = field(default_factory=dict)
    offsets: Tensor | None = None

    def reads_samples(
        self,
        read: Read,
        x: Tensor,
        axis: int,
        *,
        sure: bool,
        beside: bool = False,
        rows: int | None = None,
        also: Sequence[Tensor] = (),
        folded: bool = False,
        low: bool = False,
        meets: Sequence[str] = (),
        free: int = 1,
        use: str = "",
    ) -> bool:
        tainted = sure or any(tensor in self.taint for tensor in (x, *also))
        size = self.size()
        found = x.shape[axis] if rows is None else rows
        fits = found == size or (folded and size > 0 and found % size == 0)
        answer = fits if beside else tainted or read in self.followers
        digest, along = None, {}
        if rows is None and not beside:
            with self.taint.looking_away():
                digest = digest_of(x, axis)
                along = self._along(read, x, axis, free, use)
        self.notes[read] = Note(
            rows=found,
            tainted=tainted,
            sure=sure,
            beside=beside,
            folded=folded,
            answer=answer,
            low=low or is_low(x),
            chosen=self.taint.is_chosen(x),
            digest=digest,
            meets=tuple(meets),
            key=use or read[0],
            free=0 if axis else free,
            along=along,
            ids=not (x.is_floating_point() or x.is_complex()),
        )
        return answer

    def _along(
        self, read: Read, x: Tensor, axis: int, free: int, use: str
    ) -> dict[int, Tensor | None]:
        """Other axes that samples may lie along. Where the batch's own has as many entries as there
        are samples, that may be chance: of layers, which are many, only an axis that has as many
        is looked at there."""
        size = self.size()
        if axis or not size:
            return {}
        if x.shape[0] != size:
            self.searched.add(read)
        every = read in self.searched or use != ""
        return {
            other: digest_of(x, other)
            for other in range(1, min(free, x.dim()))
            if x.shape[other] and not x.shape[other] % size
            if every or x.shape[other] == size
        }

    def forget(self, path: str) -> None:
        for read in [read for read in self.notes if read[0] == path]:
            del self.notes[read]


@dataclass
class Run:
    """One rehearsal: on how many samples, and what was read."""

    size: int
    notes: dict[Read, Note]
    #: Where a bag of embeddings begins for each sample, if that says how many samples there are.
    offsets: Tensor | None
    #: What ended it before its time.
    refused: FlashClippingError | None = None
    #: Which samples of the first run these are; ``None``: the same.
    order: list[int] | None = None


@dataclass(frozen=True)
class Variant:
    """Another batch: which samples of the first it has, how inputs change, and which."""

    order: list[int]
    change: Callable[[Tensor], Tensor]
    sources: list[Tensor]


class Rehearsals:
    """Runs of one model on one batch and its variants."""

    def __init__(
        self,
        root: nn.Module,
        forward: Callable[..., Any],
        session: ClippingSession,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.root, self.forward, self.session = root, forward, session
        self.args, self.kwargs = args, kwargs
        #: Reads that derive from nothing and have one row for each sample all the same.
        self.followers: set[Read] = set()
        #: Reads in which samples were looked for along all axes.
        self.searched: set[Read] = set()
        #: Another one after every rehearsal that told nothing: what is skipped at random changes.
        self.seed = len(session.undecided)
        #: Inputs with rows of samples that have no axis for them.
        self.parts = parts_of_samples(root, kwargs)
        #: The units of this batch, where these are parts of rows.
        self.units: Units | None = None

    def witness(self, taint: Taint, size: Callable[[], int]) -> Any:
        """Who notes what layers read in one run."""
        return _Witness(taint, self.followers, size, self.searched)

    def sources(self, size: int) -> list[Tensor]:
        """The model's inputs that hold one row for each of ``size`` samples."""
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            if id(x) in self.parts or self.axis_of(x, size) is not None:
                found.append(x)
            return x

        map_tensors(note, (self.args, self.kwargs))
        return found

    def axis_of(self, x: Tensor, size: int) -> int | None:
        axis = self.session.batch_axis
        if x.dim() > axis and x.shape[axis] == size:
            return axis
        return 0 if x.dim() == 1 and len(x) == size else None  # labels beside [T, B] inputs

    def run(
        self, change: Callable[[Tensor], Tensor] | None, sources: list[Tensor], again: int = 0
    ) -> Run:
        """The model on its inputs, changed or as they are; ``sources`` hold the samples.

        Raises:
            whatever the model raises.
        """
        session = self.session
        changed: list[Tensor] = list(sources)
        args, kwargs = self.args, self.kwargs
        if change is not None:
            ids = {id(x) for x in sources}
            changed = []

            def of(x: Tensor) -> Tensor:
                if id(x) not in ids:
                    return x
                changed.append(change(x))
                return changed[-1]

            args, kwargs = map_tensors(of, (args, kwargs))
        for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_packed):
            if _is_packed(leaf):
                changed.append(leaf.data)
        tensors = batched_inputs(args, kwargs)
        before = session.current_forward
        taint = Taint(changed)
        witness = self.witness(taint, lambda: rehearsal.batch_size or 0)
        rehearsal = session.begin_forward(tensors, witness, self.units)
        refused: FlashClippingError | None = None
        devices = {x.device for x in (*tensors, *session.state()) if x.is_cuda}
        try:
            with (
                untouched(self.root),
                random_state(list(devices), self.seed + again),
                without_activations(),
                checkpoints_replaced(PlainCheckpoint),
                taint,
                Reads(taint),
                collectives_refused(),
            ):
                # Recording, so that taps note what they read; detached, so nothing comes of it.
                self.forward(*args, **kwargs)
        except FlashClippingError as error:
            refused = error
        finally:
            rehearsal.spent = True
            rehearsal.end()
            rehearsal.witness = None  # who asks it for the batch: no cycle may keep what it noted
            if before is not None:
                session.resume_forward(before)
        return Run(rehearsal.batch_size or 0, witness.notes, witness.offsets, refused)

    def variants(self, whole: Run, sources: list[Tensor]) -> Iterator[Variant]:
        """Other batches that the model may run on: one sample less, or one more, in reverse; where
        it runs on one size only, as many, with one sample twice in the place of another.

        An input may have as many rows as there are samples by chance: positions, a mask that all
        samples share. That takes another axis of that size, and a model that runs on another number
        of samples with that input as it is. Without such an axis the rows are the samples', and
        what would be left as it is could carry some of them into all others.
        """
        size = whole.size
        less, more = [*reversed(range(size - 1))], [size - 1, *reversed(range(size))]
        orders = [less, more] if size > 2 else [more, less]
        chosen = [sources]
        if len(sources) > 1 and whole.offsets is None and self.has_other_axis(size, sources):
            most = max(x.dim() for x in sources)
            chosen.append([x for x in sources if x.dim() > 1])
            chosen.append([x for x in sources if x.dim() == most])
            chosen.append(sources[:1])
        tried = [(order, of) for of in chosen if of for order in orders]
        if size > 1:
            tried.append((more[:size], sources))
        for order, of in tried:
            if order:
                yield self.variant(whole, order, of)

    def variant(self, whole: Run, order: list[int], sources: list[Tensor]) -> Variant:
        """The batch of these samples, in this order."""
        if whole.offsets is not None:
            return Variant(order, self.other_bags(whole, order), sources)
        return Variant(order, functools.partial(self.reordered, whole.size, order), sources)

    def run_variant(self, variant: Variant) -> Run | None:
        """It as a run; ``None`` if the model does not run on it, or not as on so many samples."""
        try:
            run = self.run(variant.change, variant.sources)
        except torch.OutOfMemoryError:
            raise
        except MODELS_OWN:
            return None
        if run.size != len(variant.order):
            return None
        run.order = variant.order
        return run

    def has_other_axis(self, size: int, sources: list[Tensor]) -> bool:
        """Whether one of these has as many entries along another axis as there are samples."""
        return any(
            size in (*x.shape[:axis], *x.shape[axis + 1 :])
            for x in sources
            if (axis := self.axis_of(x, size)) is not None
        )

    def reordered(self, size: int, order: list[int], x: Tensor) -> Tensor:
        if id(x) in self.parts:
            return rows_of_samples(x, self.parts[id(x)], order)
        axis = self.axis_of(x, size) or 0
        return x.detach().index_select(axis, torch.tensor(order, device=x.device))

    def other_bags(self, whole: Run, order: list[int]) -> Callable[[Tensor], Tensor]:
        """Ids of all bags lie end to end, and so they do in another order."""
        offsets, size, ids = whole.offsets, whole.size, self.first_size()
        assert offsets is not None
        edges = [*offsets.tolist(), ids][: size + 1]
        bags = [range(edges[b], edges[b + 1]) for b in order]
        numbers = [n for bag in bags for n in bag]
        starts = [0]
        for bag in bags:
            starts.append(starts[-1] + len(bag))

        def change(x: Tensor) -> Tensor:
            if x is offsets:
                return torch.tensor(starts, dtype=x.dtype, device=x.device)[
                    : len(order) + len(x) - size
                ]
            if x.dim() == 1 and len(x) == ids:
                return x.detach()[torch.tensor(numbers, dtype=torch.long, device=x.device)]
            return self.reordered(size, order, x)

        return change

    def whole(self) -> tuple[Run, list[Tensor]]:
        """The batch as it is, and the inputs that hold the samples."""
        size = self.first_size()
        sources = self.sources(size)
        whole = self.run(None, sources)
        if whole.offsets is not None:
            also = [x for x in self.sources(whole.size) if all(x is not y for y in sources)]
            sources += also
            if all(x is not whole.offsets for x in sources):
                sources.append(whole.offsets)
            whole = self.run(None, sources)
        return whole, sources

    def pair(self) -> tuple[Run, Run | None, list[Tensor]]:
        """The batch as it is, and another one if the model runs on any."""
        whole, sources = self.whole()
        for variant in self.variants(whole, sources):
            other = self.run_variant(variant)
            if other is None:
                continue
            if len(variant.sources) != len(sources):
                try:
                    whole = self.run(None, variant.sources)
                except torch.OutOfMemoryError:
                    raise
                except MODELS_OWN:
                    continue
            return whole, other, variant.sources
        return whole, None, sources

    def first_size(self) -> int:
        return first_size(self.args, self.kwargs, self.session.batch_axis)


def first_size(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
    """Samples in a call with these arguments: in the first tensor that has the axis."""
    return next((x.shape[axis] for x in batched_inputs(args, kwargs) if x.dim() > axis), 0)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def same_rows(a: Note, b: Note, other: Run, different: float | None = None) -> bool:
    """Whether the samples of ``other`` have the same values in both, as far as their dtype can
    tell, or but for this relative difference."""
    if a.digest is None or b.digest is None or not len(b.digest):
        return True
    first, second = a.digest, b.digest
    if other.order is not None:
        parts = len(second) // len(other.order)  # of a sample, in a folded module
        of_parts = [b * parts + part for b in other.order for part in range(parts)]
        first = first[of_parts]
    if len(first) != len(second):
        return False
    if different is None:
        different = DIFFERENT_LOW if a.low or b.low else DIFFERENT
    return are_alike(first, second, different)
