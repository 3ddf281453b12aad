"""Are the rows of what a layer reads the samples? A rehearsal shows it; no size decides.

Before the first step, and when another layer becomes trainable, the model runs on the batch as it
is, and once more in reverse order without the last sample (or with that one twice). Nothing is kept
of these runs. What a tapped layer reads are samples where it derives from the model's inputs, has
as many rows as there are samples in both runs, and the same values for the samples that are in
both. What does not derive from the inputs and does not follow the batch (positions, tables) is a
constant: a layer that reads it computes a function of parameters alone
(:mod:`flash_clipping.capture.bare`). Anything else is refused, all layers in one error.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flash_clipping._compat import checkpoints_replaced, pytree
from flash_clipping.capture.forward_call import ForwardCall, Read
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.taint import Taint
from flash_clipping.errors import FlashClippingError

#: Shapes of inputs that are tried for the same layers where other batch sizes tell nothing.
ATTEMPTS = 3

#: Relative difference from which on two rows are not the same sample's; the second where values
#: have a few digits only (TF32, bf16, fp16, autocast).
DIFFERENT, DIFFERENT_LOW = 1e-3, 5e-2

#: Features of a row that its digest is made of; of longer rows, as many at equal distances.
FEATURES = 1 << 16

#: Layers that an error names.
NAMED = 20

#: What a model that does not run on another batch size, or on this one, raises.
_MODELS_OWN = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError)


@dataclass
class _Note:
    """What one read was, in one rehearsal.

    Attributes:
        rows: size of its batch axis.
        tainted: it derives from the model's inputs.
        sure: it was computed by tapped layers from what was taken for samples.
        beside: it stands beside such a tensor; it may be the same for all samples.
        answer: what the layer was told: whether it reads samples.
        digest: a few numbers for every row, and how large these are.
    """

    rows: int
    tainted: bool
    sure: bool
    beside: bool
    folded: bool
    answer: bool
    low: bool
    digest: Tensor | None


@dataclass
class _Witness:
    """Notes what layers read in one rehearsal."""

    taint: Taint
    followers: set[Read]
    size: Callable[[], int]
    notes: dict[Read, _Note] = field(default_factory=dict)
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
    ) -> bool:
        tainted = sure or any(tensor in self.taint for tensor in (x, *also))
        size = self.size()
        found = x.shape[axis] if rows is None else rows
        fits = found == size or (folded and size > 0 and found % size == 0)
        answer = fits if beside else tainted or read in self.followers
        self.notes[read] = _Note(
            rows=found,
            tainted=tainted,
            sure=sure,
            beside=beside,
            folded=folded,
            answer=answer,
            low=_is_low(x),
            digest=None if rows is not None or beside else _digest(x, axis),
        )
        return answer

    def forget(self, path: str) -> None:
        for read in [read for read in self.notes if read[0] == path]:
            del self.notes[read]


@dataclass
class _Run:
    """One rehearsal: on how many samples, and what was read."""

    size: int
    notes: dict[Read, _Note]
    #: Where a bag of embeddings begins for each sample, if that says how many samples there are.
    offsets: Tensor | None
    #: What ended it before its time.
    refused: FlashClippingError | None = None
    #: Which samples of the first run these are; ``None``: the same.
    order: list[int] | None = None


@dataclass(frozen=True)
class _Variant:
    """Another batch: which samples of the first it has, how inputs change, and which."""

    order: list[int]
    change: Callable[[Tensor], Tensor]
    sources: list[Tensor]


@dataclass(frozen=True)
class _Finding:
    read: Read
    words: str
    #: Whether it is the values of the rows that differ.
    of_values: bool = False


class _Rehearsals:
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
        #: Another one after every rehearsal that told nothing: what is skipped at random changes.
        self.seed = len(session.undecided)

    def sources(self, size: int) -> list[Tensor]:
        """The model's inputs that hold one row for each of ``size`` samples."""
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            if self.axis_of(x, size) is not None:
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
    ) -> _Run:
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
        witness = _Witness(taint, self.followers, lambda: rehearsal.batch_size or 0)
        rehearsal = session.begin_forward(tensors, witness)
        refused: FlashClippingError | None = None
        devices = {x.device for x in (*tensors, *session.state()) if x.is_cuda}
        try:
            with (
                _untouched(self.root),
                _random_state(list(devices), self.seed + again),
                _without_activations(),
                checkpoints_replaced(_Through),
                taint,
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
        return _Run(rehearsal.batch_size or 0, witness.notes, witness.offsets, refused)

    def variants(self, whole: _Run, sources: list[Tensor]) -> Iterator[_Variant]:
        """Other batches that the model may run on: one sample less, or one more, in reverse.

        A vector of the batch's size may be something else: positions, say.
        """
        size = whole.size
        less, more = [*reversed(range(size - 1))], [size - 1, *reversed(range(size))]
        orders = [less, more] if size > 2 else [more, less]
        vectors = [x for x in sources if x.dim() == 1]
        chosen = [sources]
        if vectors and len(vectors) < len(sources) and whole.offsets is None:
            chosen.append([x for x in sources if x.dim() != 1])
        for of in chosen:
            for order in orders:
                if not order:
                    continue
                if whole.offsets is not None:
                    yield _Variant(order, self.other_bags(whole, order), of)
                else:
                    yield _Variant(order, functools.partial(self.reordered, size, order), of)

    def reordered(self, size: int, order: list[int], x: Tensor) -> Tensor:
        axis = self.axis_of(x, size) or 0
        return x.detach().index_select(axis, torch.tensor(order, device=x.device))

    def other_bags(self, whole: _Run, order: list[int]) -> Callable[[Tensor], Tensor]:
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

    def whole(self) -> tuple[_Run, list[Tensor]]:
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

    def pair(self) -> tuple[_Run, _Run | None, list[Tensor]]:
        """The batch as it is, and another one if the model runs on any."""
        whole, sources = self.whole()
        for variant in self.variants(whole, sources):
            try:
                other = self.run(variant.change, variant.sources)
                if len(variant.sources) != len(sources):
                    whole = self.run(None, variant.sources)
            except torch.OutOfMemoryError:
                raise
            except _MODELS_OWN:
                continue
            if other.size == len(variant.order):
                other.order = variant.order
                return whole, other, variant.sources
        return whole, None, sources

    def first_size(self) -> int:
        axis = self.session.batch_axis
        sizes = (x.shape[axis] for x in batched_inputs(self.args, self.kwargs) if x.dim() > axis)
        return next(sizes, 0)


def rehearse(
    root: nn.Module,
    forward: Callable[..., Any],
    session: ClippingSession,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: ForwardCall | None = None,
) -> None:
    """Find out which reads of tapped layers are samples, and leave that in ``session.evidence``.

    ``forward`` runs ``root``. With ``call``, a forward that has run already: what was assumed there
    must turn out right. Leaves buffers, attributes of modules and random number generators as they
    were. Where the model runs on no other batch size, only what derives from its inputs is taken
    for samples, by its shape; this is tried again on inputs of a few other shapes.

    Raises:
        FlashClippingError: layers read what is neither samples nor a constant; all are named.
    """
    shapes = tuple(tensor.shape for tensor in batched_inputs(args, kwargs))
    if call is not None:
        doubtful = frozenset(read[0] for read in call.guesses)
        tried = session.undecided.setdefault(doubtful, set())
        if shapes in tried or len(tried) >= ATTEMPTS:
            return
    runs = _Rehearsals(root, forward, session, args, kwargs)
    if not runs.first_size():
        return  # no inputs, or no samples in them
    try:
        whole, other, sources = runs.pair()
        for _ in range(ATTEMPTS):  # what is computed from such rows has such rows
            followers = _followers(whole, other) - runs.followers
            if not followers:
                break
            runs.followers |= followers
            whole, other, sources = runs.pair()
    except _MODELS_OWN as error:
        if call is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        return  # the forward itself will raise it, or the model cannot be run twice
    findings = _findings(whole, other)
    if any(finding.of_values for finding in findings):
        findings = _without_chance(runs, whole, sources, findings)
    if findings:
        raise FlashClippingError(_refusal(findings, session))
    for run in (whole, other):
        if run is not None and run.refused is not None:
            raise run.refused
    _conclude(session, whole, other)
    if call is None:
        if other is None:
            session.undecided.setdefault(frozenset(), set()).add(shapes)
        else:
            session.undecided.pop(frozenset(), None)
        return
    for read, answer in call.guesses.items():
        known = session.evidence.known(read, any_call=False)
        if known is None or other is None:
            tried.add(shapes)
        if known is not None and known is not answer:
            kinds = ("samples", "the same for all samples")
            raise FlashClippingError(
                f"{read[0]}: this layer was reached for the first time, and what it read was taken "
                f"for {kinds[not answer]}, but is {kinds[answer]}: by its size it could be either. "
                "It is known now: clear the gradients and run this step again."
            )


def may_tell_more(session: ClippingSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no rehearsal has told anything yet, and inputs of these shapes were not tried."""
    tried = session.undecided.get(frozenset())
    if not tried or len(tried) >= ATTEMPTS:
        return False
    return tuple(tensor.shape for tensor in batched_inputs(args, kwargs)) not in tried


def _follows(a: _Note, whole: _Run, b: _Note, other: _Run) -> bool:
    """Whether the rows of a read are as many as samples, or as many for each, in both runs."""
    if a.folded:
        parts, rest = divmod(a.rows, max(whole.size, 1))
        return not rest and parts > 0 and b.rows == parts * other.size
    return a.rows == whole.size and b.rows == other.size


def _followers(whole: _Run, other: _Run | None) -> set[Read]:
    """Reads that derive from nothing and have one row for each sample all the same."""
    found: set[Read] = set()
    if other is None:
        return found
    for read in whole.notes.keys() & other.notes.keys():
        a, b = whole.notes[read], other.notes[read]
        plain = not (a.tainted or b.tainted or a.beside or b.beside)
        if plain and _follows(a, whole, b, other) and _same_rows(a, b, other):
            found.add(read)
    return found


def _findings(whole: _Run, other: _Run | None) -> list[_Finding]:
    """Reads that derive from the samples and are not these."""
    findings = []
    for read, a in whole.notes.items():
        if a.beside or not a.answer or not a.tainted:
            continue
        if other is None:
            # By its shape alone.
            parts, rest = divmod(a.rows, max(whole.size, 1))
            if rest or not parts or (parts > 1 and not a.folded):
                words = f"what it reads has {a.rows} rows for a batch of {whole.size}"
                findings.append(_Finding(read, words))
            continue
        b = other.notes.get(read)
        if b is None or b.beside:
            continue
        if not _follows(a, whole, b, other):
            still = "still " if a.rows == b.rows else ""
            words = (
                f"what it reads has {a.rows} rows for a batch of {whole.size}, and {still}{b.rows} "
                f"for a batch of {other.size}"
            )
            findings.append(_Finding(read, words))
        elif not _same_rows(a, b, other):
            change = "one sample less" if other.size < whole.size else "one sample more"
            words = (
                "what it reads has a row for each sample, but other values for the same samples "
                f"in a batch of {change} and in reverse order"
            )
            findings.append(_Finding(read, words, of_values=True))
    return findings


def _without_chance(
    runs: _Rehearsals, whole: _Run, sources: list[Tensor], findings: list[_Finding]
) -> list[_Finding]:
    """Without those whose values change by chance: they do on the very same batch."""
    try:
        again = runs.run(None, sources, again=1)
    except _MODELS_OWN:
        return [finding for finding in findings if not finding.of_values]
    return [
        finding
        for finding in findings
        if not finding.of_values
        or (
            (b := again.notes.get(finding.read)) is not None
            and _same_rows(whole.notes[finding.read], b, again)
        )
    ]


def _conclude(session: ClippingSession, whole: _Run, other: _Run | None) -> None:
    """Leave what the runs have shown."""
    evidence = session.evidence
    by_path: dict[str, dict[Read, bool]] = {}
    uncertain: set[str] = set()
    for run, against in ((whole, other), (other, whole)):
        for read, note in () if run is None else run.notes.items():
            if against is not None and read not in against.notes:
                uncertain.add(read[0])  # the model does something else now and then
                continue
            # Beside another one, it may have as many rows in one run only.
            answer = note.answer and (against is None or against.notes[read].answer)
            by_path.setdefault(read[0], {})[read] = answer
    for path, answers in by_path.items():
        calls: list[list[bool]] = []
        for (_, call, place), answer in sorted(answers.items()):
            while len(calls) <= call:
                calls.append([])
            if place == len(calls[call]):  # what comes after a gap is not known
                calls[call].append(answer)
        evidence.proven.discard(path)
        evidence.reads[path] = calls
        if all(answers.values()) and other is not None and path not in uncertain:
            evidence.proven.add(path)


def _refusal(findings: list[_Finding], session: ClippingSession) -> str:
    """One error that names every layer."""
    by_path: dict[str, str] = {}
    for finding in findings:
        by_path.setdefault(finding.read[0], finding.words)
    lines = [f"{path}: {words}" for path, words in by_path.items()]
    if len(lines) > NAMED:
        lines[NAMED:] = [f"... and {len(lines) - NAMED} more layers"]
    rows = any(not finding.of_values for finding in findings)
    values = any(finding.of_values for finding in findings)
    axis = "first" if session.batch_first else "second"
    advice = []
    if rows:
        advice.append(
            "The rows are not samples, and parameters of these layers have no per-sample "
            f"gradients. Keep the batch the {axis} axis of what a layer reads and other axes "
            "(windows, positions) behind it; declare modules whose rows are parts of samples "
            "(folded_modules=[...]); give them a rule of their own (flash_clipping.register_rule); "
            "or freeze their parameters (or use LoRA on other layers). "
            "A weight that a hook computes (weight_norm, spectral_norm, prune) looks like this as "
            "well: use torch.nn.utils.parametrizations, or prune.remove(module, name)."
        )
    if values:
        advice.append(
            "Rows are in another order than the samples, were chosen among those of all samples "
            "(sorted, shuffled, routed to experts), or depend on other samples (a mean over the "
            "batch). Keep the order of the batch and compute each sample by itself, or freeze "
            "the parameters of these layers."
        )
    return "\n".join((*lines, *advice))


# -- the values of rows ----------------------------------------------------------------------------


def _is_low(x: Tensor) -> bool:
    """Whether what computed these values may have rounded to a few digits."""
    kind = x.device.type
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(kind)
        or (x.is_cuda and x.dtype == torch.float32)  # TF32
    )


def _digest(x: Tensor, axis: int) -> Tensor | None:
    """A few numbers for every row, which tell it from others; the last is how large it is."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows = x.detach().transpose(0, axis)
        rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
        if not rows.numel():
            return None
        if rows.shape[1] > FEATURES:
            rows = rows[:, :: -(-rows.shape[1] // FEATURES)]
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        rows = rows.to("cpu", torch.float64).nan_to_num(0.0, 1e30, -1e30)
        n = rows.shape[1]
        signs = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=rows.dtype)
        size = rows.square().mean(1, keepdim=True).sqrt()
        return torch.cat([rows @ signs / n**0.5, size], 1)


def _same_rows(a: _Note, b: _Note, other: _Run) -> bool:
    """Whether the samples of ``other`` have the same values in both, as far as their dtype can
    tell."""
    if a.digest is None or b.digest is None or not len(b.digest):
        return True
    first, second = a.digest, b.digest
    if other.order is not None:
        parts = len(second) // len(other.order)  # of a sample, in a folded module
        of_parts = [b * parts + part for b in other.order for part in range(parts)]
        first = first[of_parts]
    if len(first) != len(second):
        return False
    scale = torch.maximum(first[:, -1], second[:, -1])
    scale = scale.clamp(min=1e-3 * float(scale.max()))
    error = (first - second).abs().amax(1) / scale.clamp(min=1e-300)
    # Digests are in float64 whatever was read.
    tolerance = DIFFERENT_LOW if a.low or b.low else DIFFERENT
    return float(error.max()) <= tolerance


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


# -- what leaves no trace --------------------------------------------------------------------------


@contextlib.contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Put back buffers and attributes of all modules; writing in place hits copies of buffers."""
    modules = list(root.modules())
    before = [(vars(module).copy(), module._buffers.copy()) for module in modules]
    copies: dict[int, Tensor] = {}
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copies[id(buffer)] = copies.get(id(buffer), buffer.detach().clone())
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


@contextlib.contextmanager
def _random_state(devices: list[torch.device], seed: int) -> Iterator[None]:
    """Seed the generators of PyTorch, Python and, where it is in use, NumPy; put them back."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            torch.random.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _without_activations() -> Any:
    """Autograd that saves nothing: the first step needs no more memory than the others."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _nothing_saved)


def _nothing_saved(_: None) -> Tensor:
    raise RuntimeError("this forward has no backward")


class _Through:
    """Re-entrant checkpoints hide from taps what was computed by tapped layers: see through."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)
