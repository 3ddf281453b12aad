"""What the taps of one model share: its calls, how to clip, and the backward pass that runs.

A :class:`ClippingSession` lives as long as the model is wrapped and holds no tensors of batches.
Everything that belongs to one call of the root is in a
:class:`~flash_clipping.capture.forward_call.ForwardCall`, which lives as long as somebody holds
what that call returned.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import (
    at_end_of_backward,
    graph_task,
    is_autograd_compiled,
    is_fake,
    memory_id,
)
from flash_clipping.capture.draws import (
    EVERY_ROW,
    CountedRows,
    DrawnBatch,
    Draws,
    Padding,
    of_one_draw,
)
from flash_clipping.capture.forward_call import Doubted, ForwardCall, in_backward
from flash_clipping.capture.non_finite import NonFiniteWarning
from flash_clipping.capture.proof.coverage import Coverage
from flash_clipping.capture.proof.knowledge import Knowledge
from flash_clipping.capture.proof.reads import Reads
from flash_clipping.capture.refused_forwards import (
    refuse_compiled_autograd,
    refuse_graph_capture,
    refuse_threads,
)
from flash_clipping.capture.units import Offsets, Units, UnitsOfCalls, the_same
from flash_clipping.errors import FlashClippingError, to_freeze
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import ClipFunction
from flash_clipping.finish.plan import Plans
from flash_clipping.ops.runtime.checks import Check


def _no_pass() -> None:
    """The weak reference to no backward pass."""


#: Sessions are told apart in compiled code by these.
_keys = itertools.count()


@dataclass
class GraphedResults:
    """What backward passes that are captured as a CUDA graph leave for its replays to hand on.

    Attributes:
        plans: those that were made meanwhile: their tables are in the graph's memory.
        norms: :class:`~flash_clipping.engine.grad_ledger.Norms`, backward by backward.
        coefs: coefficients, likewise.
        checks: what is checked on the device.
    """

    plans: Plans
    norms: list[Any] = field(default_factory=list)
    coefs: list[Tensor] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


class ClippingSession:
    """What all taps of one model share.

    Args (the others are options of the wrapped model):
        clip: from per-parameter norms to coefficients; also where norms are published.
        note_sums: told of the parameters whose clipped sums are in ``p.grad``.
        trainable: the trainable parameters, in order.
        state: yields the model's parameters and buffers.
    """

    def __init__(
        self,
        *,
        clip: ClipFunction,
        note_sums: Callable[[Iterable[nn.Parameter]], None],
        trainable: Callable[[], list[nn.Parameter]],
        state: Callable[[], Iterator[Tensor]],
        loss_reduction: str,
        batch_first: bool,
        backend: str,
        fp32_precision: str = "ieee",
        sample_of: str | Offsets | None = None,
    ):
        self.key = next(_keys)
        #: An input of every tapped layer, which users cannot name: autograd comes by its node only
        #: in a backward that was asked for the gradients of all parameters.
        self.anchor = torch.empty(0, requires_grad=True)
        self.clip, self.note_sums = clip, note_sums
        self.trainable, self.state = trainable, state
        self.loss_reduction, self.batch_first = loss_reduction, batch_first
        #: Axis of every tapped layer's input that holds the samples.
        self.batch_axis = 0 if batch_first else 1
        self.backend = backend
        self.fp32_precision = fp32_precision
        #: Who is told which privacy units rows belong to.
        self.units_of_calls = UnitsOfCalls(sample_of, batch_first)
        #: The batches that the loader has given.
        self.draws = Draws()
        #: Which rows of a batch are padding.
        self.padding = Padding()
        #: Whether the loader's batches must come whole.
        self.whole_batches = False
        #: The units of the last call of the root, where they are parts of rows.
        self.positions: Units | None = None
        #: Class of the backward pass; probes and sharded models substitute their own.
        self.backward_pass_class: Callable[[ClippingSession], BackwardPass] = BackwardPass
        #: Whether layers are cut over processes, which see DTensors (tensor parallelism).
        self.layers_are_cut = False
        self.enabled = False
        #: The call of the root that runs, while layers may take the short way (``Tap.proven``).
        self.proven_call: ForwardCall | None = None
        #: The taps that take it.
        self.on_short_way: list[Any] = []
        #: How often the samples' rows were looked for anew: earlier proofs do not count.
        self.epoch = 0
        #: True while tapped layers run as ordinary ones.
        self.bypassed = False
        #: While a layer runs uncompiled in the midst of a compiled region.
        self.by_itself = False
        #: While a compiled region learns what its layers see: what each tap, by ``id``, has seen.
        self.seen: dict[int, list[Any]] | None = None
        #: The taps of the region that ran last, which go by their numbers.
        self.numbered: Sequence[Any] = ()
        #: Where samples lie in what layers read, as far as it was shown.
        self.known = Knowledge(Coverage(self.batch_axis))
        #: Layers that fail where what is no input of the model is taken for samples by its size.
        self.doubted: set[str] = set()
        #: While gradients of single samples are compared with autograd's: nothing runs compiled.
        self.comparing = False
        #: While it is looked at where samples lie: told of operations between bare parameters and
        #: samples, which run as they are.
        self.probing: Any = None
        #: How many parameters were watched at the last proof; new ones ask for another.
        self.proven_with = 0
        #: While parameters are looked for that are used past all taps: those, by ``id``, that no
        #: module can stand in for.
        self.lost: set[int] | None = None
        #: How often layers, by their paths, were looked for that only some forwards reach.
        self.looked_for: dict[frozenset[str], int] = {}
        #: Whether the oracle can be asked about calls.
        self.has_oracle = True
        #: Whether processes share the model's parameters: all run forward and backward alike.
        self.is_sharded = False
        #: How many samples the loader drew for the next forward, where that is known.
        self.drawn: int | None = None
        #: Parameters that have a stand-in now: (module, name, parameter).
        self.stood_in: list[tuple[nn.Module, str, nn.Parameter]] = []
        #: Modules, by path, that must have stand-ins while their checkpoints recompute in backward.
        self.recomputed: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self.non_finite = NonFiniteWarning()
        #: How factors of the layouts that were met are handled.
        self.plans = Plans()
        #: While steps are captured as a CUDA graph.
        self.captured: GraphedResults | None = None
        self._forwards: weakref.WeakSet[ForwardCall] = weakref.WeakSet()
        #: Whether gradients were cleared while results of a call without a backward were held.
        self._some_are_forgotten = False
        self._current_forward: weakref.ref[ForwardCall] | None = None
        #: The call of the root whose forward runs: afterwards its outputs hold it, and only then.
        self.returning: ForwardCall | None = None
        # The thread that runs the root's forward, under one key: setting a default is one step for
        # all threads.
        self._running: dict[str, int] = {}
        #: The backward pass that runs, if it has reached a tapped layer.
        self.running_pass: Callable[[], BackwardPass | None] = _no_pass

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps.
        state = self.__dict__.copy()
        state.update(_forwards=[], _current_forward=None, returning=None, proven_call=None)
        state.update(_running={}, running_pass=_no_pass, captured=None, positions=None)
        return state | {"plans": Plans()}  # parameters go by their id there

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.key = next(_keys)
        self._forwards = weakref.WeakSet()

    # -- forward ------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether a tapped layer that runs now is to be recorded in backward."""
        return self.enabled and not self.bypassed and torch.is_grad_enabled()

    @property
    def current_forward(self) -> ForwardCall | None:
        return self._current_forward() if self._current_forward is not None else None

    def enter_forward(self) -> None:
        """The root's forward begins, in this thread; no other may run its forward or backward."""
        if graph_task() != -1:  # recomputed, in a thread of autograd's, maybe
            return
        thread = threading.get_ident()
        if self._running.setdefault("forward", thread) != thread:
            refuse_threads("forward", "forward")
        if self.running_pass is not _no_pass:
            running = self.running_pass()
            if running is not None and running.thread not in (None, thread):
                self.leave_forward()
                refuse_threads("forward", "backward")
        if self.stood_in:  # before anything looks at parameters
            self.recover()

    def leave_forward(self, *_: Any) -> None:
        """The root's forward has ended, or failed; a hook of the root."""
        self.proven_call = self.returning = None
        if self._running.get("forward") == threading.get_ident() and graph_task() == -1:
            del self._running["forward"]

    def check_thread(self, call: ForwardCall) -> None:
        """Refuse a backward of ``call`` while another thread's forward or backward runs: it would
        be recorded as a part of that."""
        running = self.running_pass()
        if running is not None and running.thread not in (None, call.thread):
            refuse_threads("backward", "backward")
        if self._running.get("forward", call.thread) != call.thread:
            refuse_threads("backward", "forward")

    def draw_of(self, tensors: list[Tensor]) -> DrawnBatch | None:
        """The loader's batch that the root is called with; a call that is recorded and is of
        several, or of other rows, is refused."""
        draws = self.draws
        known = draws.waiting or draws.strict or draws.have_nobody
        if not known or in_backward() or self.captured is not None:
            return None
        if not torch.is_grad_enabled():
            draws.look(tensors, self.batch_axis)
            return None
        if draws.paused:
            return None
        if not draws.strict and (
            self.drawn is not None or self.units_of_calls.sample_of is not None
        ):
            return draws.of_part()  # somebody else counts; or rows are no samples
        return draws.of_forward(tensors, self.batch_axis)

    def are_nobody(self, draw: DrawnBatch | None) -> bool:
        """Whether the rows of a call that is recorded, of this draw, are no sample's: what the
        loader gives where it has drawn none."""
        if self.padding.rows is not None or not torch.is_grad_enabled() or in_backward():
            return False  # a mask says which rows count
        return self.drawn == 0 or (draw is not None and not draw.samples)

    def units_of(
        self,
        given: Any,
        tensors: list[Tensor],
        draw: DrawnBatch | None = None,
        nobody: bool = False,
    ) -> Units | None:
        """The units, where these are no rows, of a call of the root with these tensors; ``given``
        is the map, if it got one, ``draw`` the loader's batch; ``nobody``: rows of none. A call
        that is recorded must have a map that fits."""
        if not torch.is_grad_enabled() or in_backward():
            return None
        if nobody:
            none = torch.empty(0, dtype=torch.int64)
            return Units(none, 0, none)
        drawn = self.drawn
        if drawn is None and draw is not None and not self.draws.ahead:
            drawn = draw.samples
        return self.units_of_calls.of_call(given, tensors, drawn, draw)

    def begin_forward(
        self, tensors: list[Tensor], reads: Reads | None = None, units: Units | None = None
    ) -> ForwardCall:
        """Start a call of the root module with these tensor inputs; ``reads`` gets what layers
        read."""
        left = self.running_pass is not _no_pass or self.probing is not None or self.bypassed
        if (left or self.by_itself or self.comparing or self.stood_in) and graph_task() == -1:
            self.recover()  # also from a proof that was broken off
        axis = self.batch_axis
        sizes: dict[int, None] = {}  # in order
        storages: set[int] = set()
        for tensor in tensors:
            storages.add(memory_id(tensor.untyped_storage()))
            if tensor.dim() > axis:
                sizes[tensor.shape[axis]] = None
        forward = ForwardCall(
            recorded=torch.is_grad_enabled(),
            batch_sizes=tuple(sizes),
            input_storages=frozenset(storages),
            reads=reads,
            units=units,
        )
        self.positions = units if units is not None and units.by_position else None
        self._forwards.add(forward)
        self._current_forward, self.proven_call = weakref.ref(forward), None
        return forward

    @contextmanager
    def apart(self, call: ForwardCall | None = None) -> Iterator[None]:
        """Calls of the root in here have nothing to do with the user's before, but for ``call``."""
        before = self._forwards, self._current_forward
        self._forwards, self.proven_call = weakref.WeakSet(), None
        if call is not None:
            self._forwards.add(call)
            self._current_forward = weakref.ref(call)
        try:
            yield
        finally:
            self._forwards, self._current_forward = before
            self.proven_call = None

    def may_prove(self) -> bool:
        """Whether a forward that starts now is one of training, which may be looked at first."""
        return (
            torch.is_grad_enabled()
            and not self.bypassed
            and not in_backward()
            and self.captured is None
        )

    def recover(self) -> None:
        """Put right what an interrupt between two lines may have left behind."""
        if (failed := self.running_pass()) is not None:  # somebody keeps its frames
            failed.put_back()
        self.running_pass = _no_pass
        self.begin_epoch()  # layers that read one input take the same way again, all of them
        self.bypassed = self.by_itself = self.comparing = False
        self.probing = None
        while self.stood_in:
            module, name, param = self.stood_in[-1]
            module._parameters[name] = param
            self.stood_in.pop()

    def begin_epoch(self) -> None:
        """Earlier proofs do not count any more: every layer goes the long way again."""
        self.epoch += 1
        self.proven_call = None
        while self.on_short_way:
            self.on_short_way.pop().leave_short_way()

    def count_use(self, *of_layers: Sequence[nn.Parameter]) -> None:
        """Note that tapped layers read their parameters, unless this is a recomputation."""
        forward = self.current_forward
        if forward is not None and not in_backward():
            forward.used += of_layers

    def uses(self) -> Counter[int]:
        """Uses of every parameter that a backward may still ask about, by ``id``."""
        counts: Counter[int] = Counter()
        for forward in self._unspent():
            counts.update(forward.uses)
        return counts

    def is_batched(
        self,
        path: str,
        x: Tensor,
        axis: int,
        *,
        sure: bool,
        beside: bool = False,
        rows: int | None = None,
        also: Sequence[Tensor] = (),
    ) -> bool:
        """Whether the rows of something that a tapped layer reads are samples.

        That was shown before the first step. Of layers that were not reached there, what was
        computed by tapped layers is taken for samples, and so is what has as many rows as the
        batch; it is looked at afterwards whether that was right.

        Args:
            sure: the tensor was computed by tapped layers from samples.
            beside: it stands beside such a tensor in one operation.
            rows: how many rows it has, if not the size of its axis.
            also: other tensors that it stands for.
        """
        call = self.current_forward
        if call is None or call.batch_size is None:  # layers can only agree with each other
            return sure
        if is_fake(x):
            raise FlashClippingError(
                f"{path}: called inside an operator that traces its body (torch.cond, while_loop, "
                "scan), where its per-sample gradients cannot be recorded. Call the layer outside "
                "of the operator, use plain Python for it, or freeze the layer's parameters."
                f"{to_freeze(path)}"
            )
        read = call.next_read(path)
        if self.positions is not None:
            # Such a layer has got every position as a row.
            answer = (x.shape[axis] if rows is None else rows) == len(self.positions.map)
            if answer and call.reads is not None:
                call.reads.note(read, x, axis, rows, answer, sure=True)
            return answer
        recomputed, key = in_backward(), (path, x.shape, x.dtype)
        known = call.answers.get(key) if recomputed else None
        if known is None:
            known = self.known.is_samples(read, any_call=recomputed)
        if known is None and recomputed and not sure:
            raise FlashClippingError(
                f"{path}: under activation checkpointing it reads a tensor of shape "
                f"{tuple(x.shape)} that may or may not be samples. Call this layer outside the "
                "checkpoint, or always with samples; or freeze its parameters."
                f"{to_freeze(path)}"
            )
        answer = sure if known is None else known
        if known is None:
            found, size = x.shape[axis] if rows is None else rows, call.batch_size
            if not sure:
                storages = {memory_id(t.untyped_storage()) for t in (x, *also)}
                fits = found == size or (
                    path in self.known.folded and size > 0 and found % size == 0
                )
                is_doubted = call.reads is not None and path in self.doubted
                # By its size, if it is not memory of the model's.
                answer = bool(storages & call.input_storages and not beside) or (
                    fits
                    and not is_doubted
                    and storages.isdisjoint(memory_id(t.untyped_storage()) for t in self.state())
                )
            if not recomputed:
                call.guesses[read] = answer
                others = x.shape[1:-1] if x.is_floating_point() else x.shape[1:]
                if answer and size > 1 and (found != size or (not axis and size in others)):
                    call.ambiguous.add(read)
        if call.reads is not None:
            of_parts = path in self.known.folded
            call.reads.note(read, x, axis, rows, answer, sure=sure, beside=beside, folded=of_parts)
        if call.answers.setdefault(key, answer) is not answer:
            call.answers[key] = None
        return answer

    def knows_samples(self, call: ForwardCall, path: str, reads: int = 1) -> bool:
        """Whether the next reads of this layer, which count as read then, are known to be samples;
        their shapes are those of reads before them."""
        if self.positions is not None or path not in call.turns:
            return False
        if path in self.known.proven:
            return True
        of_call, place = call.turns[path]
        known = self.known.reads.get(path, ())
        if of_call >= len(known) or known[of_call][place : place + reads] != [True] * reads:
            return False
        call.turns[path][1] += reads
        return True

    def doubt(self, path: str) -> None:
        """Let a look of the proof, which compares two batches, begin anew (``Doubted``) if this
        layer, which has failed, took something for samples by its size: it may be chance."""
        call = self.current_forward
        if call is None or call.reads is None or path in self.doubted or not self.has_oracle:
            return
        if any(read[0] == path and answer for read, answer in call.guesses.items()):
            self.doubted.add(path)
            raise Doubted

    def forget(self, path: str) -> None:
        """Drop what was noted of this layer's reads: it starts again."""
        self.begin_epoch()
        self.known.forget([path])
        call = self.current_forward
        if call is not None:
            call.turns.pop(path, None)
            for read in [read for read in call.guesses if read[0] == path]:
                del call.guesses[read]
            if call.reads is not None:
                for read in [read for read in call.reads if read[0] == path]:
                    del call.reads[read]

    def live_calls(self) -> int:
        """Calls of the root whose norms have not been taken."""
        return len([*self._unspent()])

    def _unspent(self) -> Iterable[ForwardCall]:
        found, forgotten = list[ForwardCall](), list[ForwardCall]()
        for forward in self._forwards:
            if not forward.spent:
                (forgotten if forward.forgotten else found).append(forward)
        return found or forgotten

    def forget_calls(self, draw: DrawnBatch | None) -> None:
        """Gradients are cleared: calls whose results are still held have no backward, unless one
        comes. ``draw``: whose clipped sums were there."""
        if draw is not None:
            self.draws.cleared = draw
        for forward in self._forwards:
            forward.forgotten = True
            self._some_are_forgotten |= not forward.spent

    def are_of_nobody(self) -> bool:
        """Whether all calls whose norms have not been taken are of nobody's rows, or none: others
        are refused."""
        found = {forward.of_nobody for forward in self._unspent()}
        if len(found) > 1:
            raise FlashClippingError(
                "backward() goes through calls of the model with samples and without. Call "
                "backward() for each of them by itself."
            )
        return found == {True}

    def samples(self) -> int | None:
        """Samples in the batch that the root module was called with."""
        sizes = {forward.batch_size for forward in self._unspent()}
        return sizes.pop() if len(sizes) == 1 else None

    def units(self) -> Units | None:
        """The units of the calls whose norms have not been taken, all the same."""
        if self.units_of_calls.sample_of is None and not self.units_of_calls.from_loader:
            return None
        return the_same([forward.units for forward in self._unspent() if forward.recorded])

    def rows_and_draw(self) -> tuple[CountedRows, DrawnBatch | None]:
        """Which rows of the calls whose norms have not been taken are no padding, and of which draw
        these calls are."""
        rows: dict[int, CountedRows] = {}
        draws: list[DrawnBatch] = []
        for forward in self._unspent() if self._some_are_forgotten else self._forwards:
            if forward.spent or not forward.recorded:
                continue
            if forward.counted_rows is not None:
                rows[id(forward.counted_rows)] = forward.counted_rows
            if forward.draw is not None:
                draws.append(forward.draw)
        if len(rows) > 1:
            raise FlashClippingError(
                "the model: it was called with several padded batches before backward, of which "
                "other rows are padding. Call backward() for each batch before the next is taken."
            )
        counted = rows.popitem()[1] if rows else EVERY_ROW
        return counted, of_one_draw(draws) if draws else None

    def expected_batch_sizes(self) -> set[int]:
        """Sizes that the batch may have: that of the first input of every call of the root."""
        sizes: set[int] = set()
        for forward in self._unspent() if self._some_are_forgotten else self._forwards:
            if forward.batch_sizes and not forward.spent:
                sizes.add(forward.batch_sizes[0])
        return sizes

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Run tapped layers as ordinary ones."""
        before = self.bypassed, self.proven_call
        self.bypassed, self.proven_call = True, None
        try:
            yield
        finally:
            self.bypassed, self.proven_call = before

    # -- backward -----------------------------------------------------------------------------

    def begin_backward(self, call: ForwardCall | None = None) -> BackwardPass:
        """The running backward pass; made, and set to be finished at its end, if new. ``call``:
        of the root, whose output it has reached."""
        if is_autograd_compiled():
            refuse_compiled_autograd()
        backward_pass = self.running_pass()
        if call is not None:
            call.forgotten = False
            if backward_pass is not None or self._running:
                self.check_thread(call)
        if backward_pass is None:
            if self.captured is None and torch.cuda.is_initialized():
                refuse_graph_capture()
            backward_pass = self.backward_pass_class(self)
            self.running_pass = weakref.ref(backward_pass)
            backward_pass.thread = None if call is None else call.thread
            # The engine's callback is the only owner: a failed backward frees the records.
            at_end_of_backward(backward_pass.finish)
        return backward_pass

    @contextmanager
    def captures(self) -> Iterator[GraphedResults]:
        """Let backward passes be captured as a CUDA graph; what each replay has to leave."""
        # Their tables would be found by steps outside before any replay has filled them.
        before = self.plans, self.note_sums
        self.plans, self.note_sums = Plans(), lambda params: None  # sums are noted by replays
        self.captured = GraphedResults(self.plans)
        try:
            yield self.captured
        finally:
            self.plans, self.note_sums = before
            self.captured = None

    def end_backward(self, norms_taken: bool = True) -> None:
        self.running_pass = _no_pass
        if not norms_taken:
            return
        for forward in self._forwards:
            forward.spent = forward.spent or not forward.forgotten
