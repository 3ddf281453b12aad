"""What the taps of one model share: its calls, how to clip, and the backward pass that runs.

A :class:`ClippingSession` lives as long as the model is wrapped and holds no tensors of batches.
Everything that belongs to one call of the root is in a
:class:`~flash_clipping.capture.forward_call.ForwardCall`, which lives as long as somebody holds
what that call returned.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

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
from flash_clipping.capture.draws import DrawnBatch, Draws, of_one_draw
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.non_finite import NonFiniteWarning
from flash_clipping.capture.padding import EVERY_ROW, CountedRows, Padding
from flash_clipping.capture.proof.kinds import Kinds
from flash_clipping.capture.proof.knowledge import Knowledge
from flash_clipping.capture.proof.reads import Reads
from flash_clipping.capture.refused_forwards import (
    refuse_compiled_autograd,
    refuse_graph_capture,
    refuse_threads,
)
from flash_clipping.capture.units import Offsets, Units, UnitsOfCalls, the_same
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import ClipOptions
from flash_clipping.finish.plan import Plans
from flash_clipping.ops.runtime.checks import Check


def _no_pass() -> None:
    """The weak reference to no backward pass."""


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


@dataclass
class RowsOfCalls:
    """Whose the rows of the model's calls are, as the loader and the user tell it.

    Attributes:
        units_of_calls: told which privacy units rows belong to.
        draws: the batches that the loader has given.
        padding: which rows of a batch are padding.
        whole_batches: the loader's batches must come whole.
        drawn: how many samples the loader drew for the next forward, where that is known.
        positions: the units of the last call, where they are parts of rows.
    """

    units_of_calls: UnitsOfCalls
    draws: Draws = field(default_factory=Draws)
    padding: Padding = field(default_factory=Padding)
    whole_batches: bool = False
    drawn: int | None = None
    positions: Units | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"positions": None}


@dataclass
class ProofState:
    """How far it was shown where samples lie. What was shown is a
    :class:`~flash_clipping.capture.proof.knowledge.Knowledge`.

    Attributes:
        kinds: of calls, and what was shown of each.
        epoch: how often the samples' rows were looked for again: earlier proofs do not count.
        on_short_way: the taps that take the short way since (``Tap.proven``).
        proven_with: parameters that were watched at the last proof; new ones ask for another.
        lost: while parameters are looked for that are used past all taps: those, by ``id``, that no
            module can stand in for.
        has_oracle: the oracle can be asked about calls.
    """

    kinds: Kinds
    epoch: int = 0
    on_short_way: list[Any] = field(default_factory=list)
    proven_with: int = 0
    lost: set[int] | None = None
    has_oracle: bool = True


@dataclass
class Mode:
    """What taps do now.

    Attributes:
        enabled: backward passes are recorded.
        bypassed: tapped layers run as ordinary ones.
        by_itself: a layer runs uncompiled in the midst of a compiled region.
        learning: while a compiled region learns what its layers leave: where they note it.
        numbered: the taps of the region that ran last, which go by their numbers.
        comparing: gradients of single samples are compared with autograd's: nothing runs compiled.
    """

    enabled: bool = False
    bypassed: bool = False
    by_itself: bool = False
    learning: Any = None
    numbered: Sequence[Any] = ()
    comparing: bool = False


@dataclass
class Calls:
    """The calls of the root and the backward pass that run, and what their end needs.

    Attributes:
        backward_pass_class: probes and sharded models substitute their own.
        proven_call: the call that runs, while layers may take the short way.
        returning: the call whose forward runs: afterwards its outputs hold it, and only then.
        running_pass: the backward pass that runs, if it has reached a tapped layer.
        captured: while steps are captured as a CUDA graph.
        plans: how factors of the layouts that were met are handled.
        stood_in: parameters that have a stand-in now: (module, name, parameter).
        recomputed: modules, by path, that must have stand-ins while their checkpoints recompute.
        current: the call that began last.
        forwards: calls that somebody holds.
        some_are_forgotten: gradients were cleared while results of a call without a backward were
            held.
        threads: the thread that runs the root's forward, under one key: setting a default is one
            step for all threads.
    """

    backward_pass_class: Callable[[Any], BackwardPass] = BackwardPass
    proven_call: ForwardCall | None = None
    returning: ForwardCall | None = None
    running_pass: Callable[[], BackwardPass | None] = _no_pass
    captured: GraphedResults | None = None
    plans: Plans = field(default_factory=Plans)
    stood_in: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    recomputed: dict[str, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)
    non_finite: NonFiniteWarning = field(default_factory=NonFiniteWarning)
    current: weakref.ref[ForwardCall] | None = None
    forwards: weakref.WeakSet[ForwardCall] = field(default_factory=weakref.WeakSet)
    some_are_forgotten: bool = False
    threads: dict[str, int] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps. Plans know parameters by id.
        kept = "backward_pass_class", "stood_in", "recomputed", "non_finite", "some_are_forgotten"
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Calls()) | state)


class ClippingSession:
    """What all taps of one model share, in five objects and what was shown.

    Args:
        options: how samples are clipped.
        sample_of: which privacy units rows belong to.
    """

    def __init__(self, options: ClipOptions, sample_of: str | Offsets | None = None):
        self.options = options
        self.rows = RowsOfCalls(UnitsOfCalls(sample_of, options.batch_first))
        #: Where samples lie in what layers read, as far as it was shown.
        self.known = Knowledge()
        self.proof, self.mode = ProofState(Kinds(options.batch_axis)), Mode()
        self.calls = Calls()

    # -- forward ------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether a tapped layer that runs now is to be recorded in backward."""
        return self.mode.enabled and not self.mode.bypassed and torch.is_grad_enabled()

    @property
    def current_forward(self) -> ForwardCall | None:
        return self.calls.current() if self.calls.current is not None else None

    def enter_forward(self) -> None:
        """The root's forward begins, in this thread; no other may run its forward or backward."""
        if graph_task() != -1:  # recomputed, in a thread of autograd's, maybe
            return
        thread = threading.get_ident()
        if self.calls.threads.setdefault("forward", thread) != thread:
            refuse_threads("forward", "forward")
        if self.calls.running_pass is not _no_pass:
            running = self.calls.running_pass()
            if running is not None and running.thread not in (None, thread):
                self.leave_forward()
                refuse_threads("forward", "backward")
        if self.calls.stood_in:  # before anything looks at parameters
            self.recover()

    def leave_forward(self, *_: Any) -> None:
        """The root's forward has ended, or failed; a hook of the root."""
        self.calls.proven_call = self.calls.returning = None
        if self.calls.threads.get("forward") == threading.get_ident() and graph_task() == -1:
            del self.calls.threads["forward"]

    def check_thread(self, call: ForwardCall) -> None:
        """Refuse a backward of ``call`` while another thread's forward or backward runs: it would
        be recorded as a part of that."""
        running = self.calls.running_pass()
        if running is not None and running.thread not in (None, call.thread):
            refuse_threads("backward", "backward")
        if self.calls.threads.get("forward", call.thread) != call.thread:
            refuse_threads("backward", "forward")

    def begin_forward(
        self, tensors: list[Tensor], reads: Reads | None = None, units: Units | None = None
    ) -> ForwardCall:
        """Start a call of the root module with these tensor inputs; ``reads`` gets what layers
        read."""
        left = self.calls.running_pass is not _no_pass or self.mode.bypassed
        left = left or self.mode.by_itself or self.mode.comparing
        if (left or self.calls.stood_in) and graph_task() == -1:
            self.recover()  # also from a proof that was broken off
        axis = self.options.batch_axis
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
        self.rows.positions = units if units is not None and units.by_position else None
        self.calls.forwards.add(forward)
        self.calls.current, self.calls.proven_call = weakref.ref(forward), None
        return forward

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Calls of the root in here have nothing to do with the user's before."""
        before = self.calls.forwards, self.calls.current
        self.calls.forwards, self.calls.proven_call = weakref.WeakSet(), None
        try:
            yield
        finally:
            self.calls.forwards, self.calls.current = before
            self.calls.proven_call = None

    def may_prove(self) -> bool:
        """Whether a forward that starts now is one of training, which may be checked first."""
        return (
            torch.is_grad_enabled()
            and not self.mode.bypassed
            and not in_backward()
            and self.calls.captured is None
        )

    def recover(self) -> None:
        """Put right what an interrupt between two lines may have left behind."""
        if (failed := self.calls.running_pass()) is not None:  # somebody keeps its frames
            failed.put_back()
        self.calls.running_pass = _no_pass
        self.begin_epoch()  # layers that read one input take the same way again, all of them
        self.mode.bypassed = self.mode.by_itself = self.mode.comparing = False
        while self.calls.stood_in:
            module, name, param = self.calls.stood_in[-1]
            module._parameters[name] = param
            self.calls.stood_in.pop()

    def begin_epoch(self) -> None:
        """Earlier proofs do not count any more: every layer goes the long way again."""
        self.proof.epoch += 1
        self.calls.proven_call = None
        while self.proof.on_short_way:
            self.proof.on_short_way.pop().leave_short_way()

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
        batch; it is checked afterwards whether that was right.

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
                f"FC403 {path}: called inside an operator that traces its body (torch.cond, "
                "while_loop, scan), where its per-sample gradients cannot be recorded. Call the "
                f"layer outside of the operator, or use plain Python for it.{ONE_BY_ONE}"
            )
        read = call.next_read(path)
        if self.rows.positions is not None:
            # Such a layer has got every position as a row.
            answer = (x.shape[axis] if rows is None else rows) == len(self.rows.positions.map)
            if answer and call.reads is not None:
                call.reads.note(read, x, axis, rows, answer, sure=True)
            return answer
        recomputed, key = in_backward(), (path, x.shape, x.dtype)
        known = call.answers.get(key) if recomputed else None
        if known is None:
            known = self.known.is_samples(read, any_call=recomputed)
        if known is None and recomputed and not sure:
            raise FlashClippingError(
                f"FC233 {path}: under activation checkpointing it reads a tensor of shape "
                f"{tuple(x.shape)} that may or may not be samples. Call this layer outside the "
                f"checkpoint, or always with samples.{ONE_BY_ONE}"
            )
        answer = sure if known is None else known
        if known is None:
            found, size = x.shape[axis] if rows is None else rows, call.batch_size
            if not sure:
                storages = {memory_id(t.untyped_storage()) for t in (x, *also)}
                fits = found == size or (
                    path in self.known.folded and size > 0 and found % size == 0
                )
                # By its size, if it is not memory of the model's.
                answer = bool(storages & call.input_storages and not beside) or (
                    fits
                    and storages.isdisjoint(
                        memory_id(t.untyped_storage()) for t in self.options.state()
                    )
                )
            if not recomputed:
                call.guesses[read] = answer
        if call.reads is not None:
            of_parts = path in self.known.folded
            call.reads.note(read, x, axis, rows, answer, sure=sure, beside=beside, folded=of_parts)
        if call.answers.setdefault(key, answer) is not answer:
            call.answers[key] = None
        return answer

    def live_calls(self) -> int:
        """Calls of the root whose norms have not been taken."""
        return len([*self._unspent()])

    def _unspent(self) -> Iterable[ForwardCall]:
        found, forgotten = list[ForwardCall](), list[ForwardCall]()
        for forward in self.calls.forwards:
            if not forward.spent:
                (forgotten if forward.forgotten else found).append(forward)
        return found or forgotten

    def forget_calls(self, draw: DrawnBatch | None) -> None:
        """Gradients are cleared: calls whose results are still held have no backward, unless one
        comes. ``draw``: whose clipped sums were there."""
        if draw is not None:
            self.rows.draws.cleared = draw
        for forward in self.calls.forwards:
            forward.forgotten = True
            self.calls.some_are_forgotten |= not forward.spent

    def samples(self) -> int | None:
        """Samples in the batch that the root module was called with."""
        sizes = {forward.batch_size for forward in self._unspent()}
        return sizes.pop() if len(sizes) == 1 else None

    def units(self) -> Units | None:
        """The units of the calls whose norms have not been taken, all the same."""
        if self.rows.units_of_calls.sample_of is None and not self.rows.units_of_calls.from_loader:
            return None
        return the_same([forward.units for forward in self._unspent() if forward.recorded])

    def rows_and_draw(self) -> tuple[CountedRows, DrawnBatch | None]:
        """Which rows of the calls whose norms have not been taken are no padding, and of which draw
        these calls are."""
        rows: dict[int, CountedRows] = {}
        draws: list[DrawnBatch] = []
        for forward in self._unspent() if self.calls.some_are_forgotten else self.calls.forwards:
            if forward.spent or not forward.recorded:
                continue
            if forward.counted_rows is not None:
                rows[id(forward.counted_rows)] = forward.counted_rows
            if forward.draw is not None:
                draws.append(forward.draw)
        if len(rows) > 1:
            raise FlashClippingError(
                "FC275 the model: it was called with several batches before backward, of which "
                "other rows count (padding, or a draw without samples). Call backward() for each "
                "batch before the next is taken."
            )
        counted = rows.popitem()[1] if rows else EVERY_ROW
        return counted, of_one_draw(draws) if draws else None

    def expected_batch_sizes(self) -> set[int]:
        """Sizes that the batch may have: that of the first input of every call of the root."""
        sizes: set[int] = set()
        for forward in self._unspent() if self.calls.some_are_forgotten else self.calls.forwards:
            if forward.batch_sizes and not forward.spent:
                sizes.add(forward.batch_sizes[0])
        return sizes

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Run tapped layers as ordinary ones."""
        before = self.mode.bypassed, self.calls.proven_call
        self.mode.bypassed, self.calls.proven_call = True, None
        try:
            yield
        finally:
            self.mode.bypassed, self.calls.proven_call = before

    # -- backward -----------------------------------------------------------------------------

    def begin_backward(self, call: ForwardCall | None = None) -> BackwardPass:
        """The running backward pass; made, and set to be finished at its end, if new. ``call``:
        of the root, whose output it has reached."""
        if is_autograd_compiled():
            refuse_compiled_autograd()
        backward_pass = self.calls.running_pass()
        if call is not None:
            call.forgotten = False
            if backward_pass is not None or self.calls.threads:
                self.check_thread(call)
        if backward_pass is None:
            if self.calls.captured is None and torch.cuda.is_initialized():
                refuse_graph_capture()
            backward_pass = self.calls.backward_pass_class(self)
            self.calls.running_pass = weakref.ref(backward_pass)
            backward_pass.thread = None if call is None else call.thread
            # The engine's callback is the only owner: a failed backward frees the records.
            at_end_of_backward(backward_pass.finish)
        return backward_pass

    @contextmanager
    def captures(self) -> Iterator[GraphedResults]:
        """Let backward passes be captured as a CUDA graph; what each replay has to leave."""
        # Their tables would be found by steps outside before any replay has filled them.
        before = self.calls.plans, self.options.note_sums
        self.calls.plans = Plans()
        self.options.note_sums = lambda params: None  # replays note sums
        self.calls.captured = GraphedResults(self.calls.plans)
        try:
            yield self.calls.captured
        finally:
            self.calls.plans, self.options.note_sums = before
            self.calls.captured = None

    def end_backward(self, norms_taken: bool = True) -> None:
        self.calls.running_pass = _no_pass
        if not norms_taken:
            return
        for forward in self.calls.forwards:
            forward.spent = forward.spent or not forward.forgotten
