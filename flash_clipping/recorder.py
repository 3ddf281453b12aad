"""What the taps of one model share: its calls, how to clip, and the tape of a running backward.

A :class:`Recorder` lives as long as the model is wrapped and holds no tensors. A :class:`Forward`
lives as long as somebody holds what that call of the root returned.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd import Variable

from flash_clipping.clipping import Doubts
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor
from flash_clipping.plan import Plans

#: Norms ``[P, B]`` of the parameters, in their order, what rounding may hide of them, and whether
#: the parameters are all on one device -> coefficients ``[B]`` or ``[P, B]``.
ClipFunction = Callable[[list[nn.Parameter], Tensor, Doubts, bool], Tensor]


class RunningTape(Protocol):
    """What a recorder, its taps and its walks ask of :class:`~flash_clipping.tape.Tape`."""

    norms_only: bool
    #: Parameters, by ``id``, whose gradients this backward was asked for.
    asked: set[int]
    #: That of the forward which it belongs to, where that is known.
    thread: int | None

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[Factor],
        readers: Readers | None = None,
    ) -> None: ...

    def record_no_samples(self, params: Sequence[nn.Parameter]) -> None: ...

    def stand_in(self) -> None: ...

    def take_norms(self) -> None: ...

    def add_clipped_sums(self) -> None: ...

    def forget(self) -> None: ...

    def put_back(self) -> None: ...

    def finish(self) -> None: ...


#: Recorders are told apart in compiled code by these.
_keys = itertools.count()

#: Attribute of a tapped layer's output, until the next tapped layer is called.
HANDED_ON = "_flash_clipping_handed_on"


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return _current_graph_task_id() != -1


#: Something that a tapped layer reads: the layer's path, which of its calls in one call of the
#: root, and which read in that call.
Read: TypeAlias = tuple[str, int, int]


class Witness(Protocol):
    """What notes reads in a rehearsal (:mod:`flash_clipping.rows`)."""

    #: Where a bag of embeddings begins for each sample, if that says how many samples there are.
    offsets: Tensor | None

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
    ) -> bool: ...

    def forget(self, path: str) -> None: ...


class Evidence:
    """What rehearsals have shown: which reads of tapped layers are samples.

    Attributes:
        proven: layers all of whose reads are samples.
        reads: for the others, read by read, in every call of the layer.
    """

    def __init__(self) -> None:
        self.proven: set[str] = set()
        self.reads: dict[str, list[list[bool]]] = {}

    def known(self, read: Read, any_call: bool) -> bool | None:
        """Whether this read is samples; ``None`` where no rehearsal has told.

        ``any_call``: calls come in another order than in forward, as they are recomputed.
        """
        path, call, place = read
        if path in self.proven:
            return True
        calls = self.reads.get(path, ())
        if not any_call and call < len(calls) and place < len(calls[call]):
            return calls[call][place]
        answers = {of_call[place] for of_call in calls if place < len(of_call)}
        return answers.pop() if len(answers) == 1 else None


@dataclass(eq=False)
class Forward:
    """One call of the root module: what a later backward has to know about it."""

    #: Sizes of the batch axis of the root's tensor inputs; empty when it has none.
    batch_sizes: tuple[int, ...] = ()
    #: Parameters that tapped layers used, call by call (checkpointed: once), not yet counted.
    used: list[Sequence[nn.Parameter]] = field(default_factory=list)
    counted: Counter[int] = field(default_factory=Counter)
    #: How many tapped layers in a row read one input, input by input, and the last of these.
    readers: list[int] = field(default_factory=list)
    last_input: weakref.ref[Tensor] | None = None
    #: The output of the last reader that handed its input on, that input's place, and its version
    #: then. The output holds what was handed on: who holds the call would keep a failed forward.
    handed_on: tuple[weakref.ref[Tensor], int, int] | None = None
    #: Whether the root has returned.
    ended: bool = False
    #: Whether the norms of this call have been taken.
    spent: bool = False
    #: Memory of the root's tensor inputs.
    input_storages: frozenset[int] = frozenset()
    #: Whether autograd is on: what then runs without it in this call is checkpointed.
    recorded: bool = False
    #: In which it was made. Autograd may run its backward in another.
    thread: int = field(default_factory=threading.get_ident)
    #: In a rehearsal: who notes what layers read.
    witness: Witness | None = None
    #: How often each layer that is not proven was called, and has read something in its last call.
    turns: dict[str, list[int]] = field(default_factory=dict)
    #: Reads of which no rehearsal has told yet whether they are samples, and what was assumed.
    guesses: dict[Read, bool] = field(default_factory=dict)

    def begin_call(self, path: str) -> None:
        """Note that a layer that is not proven is called."""
        turn = self.turns.get(path)
        if turn is None:
            self.turns[path] = [0, 0]
        else:
            turn[0] += 1
            turn[1] = 0

    def next_read(self, path: str) -> Read:
        """The place of what a layer reads now: its calls, and its reads in one call, in order."""
        turn = self.turns.setdefault(path, [0, 0])
        turn[1] += 1
        return path, turn[0], turn[1] - 1

    def note_reader(self, x: Tensor) -> int:
        """Count one more reader of this input; layers that share one are called in a row.

        Returns:
            Its place in ``readers``.
        """
        if self.last_input is None or self.last_input() is not x:
            self.last_input = weakref.ref(x)
            self.readers.append(0)
        self.readers[-1] += 1
        return len(self.readers) - 1

    def hand_on(self, x: Tensor, place: int, version: int, output: Tensor) -> None:
        """Let the next reader of the input at this place read ``x``, if the input has this version
        still, for as long as the output of the one before it is there."""
        if torch.compiler.is_compiling():  # Dynamo has its own idea of a tensor's attributes
            return
        vars(output)[HANDED_ON] = x
        self.handed_on = weakref.ref(output), place, version

    def in_place_of(self, x: Tensor, place: int) -> Tensor:
        """What the next reader of the input at this place is to read: ``x``, or what the reader
        before it handed on."""
        if (last := self.handed_on) is None:
            return x
        self.handed_on = None
        output = last[0]()
        if output is None:
            return x
        handed_on: Tensor = vars(output).pop(HANDED_ON)
        same = (
            last[1:] == (place, x._version)
            and handed_on.data_ptr() == x.data_ptr()  # x.data may be another's
            and handed_on.shape == x.shape
            and handed_on.stride() == x.stride()
        )
        return handed_on if same else x

    def end(self) -> None:
        """Nothing will be read any more."""
        self.ended = True
        if torch.compiler.is_compiling():  # which does not know attributes of tensors
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        if self.handed_on is not None and (output := self.handed_on[0]()) is not None:
            vars(output).pop(HANDED_ON, None)
        self.handed_on = None

    def count_readers(self, place: int, params: Sequence[nn.Parameter]) -> int:
        """How many layers read the input at this place; 0 where one of these parameters, of a
        layer that reads it, has, or may have, other uses."""
        uses = self.uses
        for param in params:
            if uses.get(id(param)) != 1:
                return 0
        return self.readers[place]

    @property
    def uses(self) -> Counter[int]:
        """How often each parameter, by ``id``, was used by a tapped layer."""
        if self.used:
            self.counted.update([id(param) for params in self.used for param in params])
            self.used.clear()
        return self.counted

    @property
    def batch_size(self) -> int | None:
        """Size of the batch axis of the root's first tensor input."""
        return self.batch_sizes[0] if self.batch_sizes else None


#: A call of the root, and the place among its readers of a tapped layer's input.
Readers: TypeAlias = tuple[Forward, int]


@dataclass
class Captured:
    """What backward passes would leave behind that are captured as a CUDA graph, for its replays.

    Attributes:
        plans: those that were made meanwhile: their tables are in the graph's memory.
        norms: the trainable parameters, their norms ``[P, B]`` and what these were clipped by,
            backward by backward.
        coefs: coefficients, likewise.
    """

    plans: Plans
    norms: list[tuple[list[nn.Parameter], Tensor, Tensor]] = field(default_factory=list)
    coefs: list[Tensor] = field(default_factory=list)


class Recorder:
    """What all taps of one model share.

    Args:
        clip: from per-parameter norms to coefficients; also where norms are published.
        note_sums: told of the parameters whose clipped sums are in ``p.grad``.
        trainable: the trainable parameters, in order.
        state: yields the model's parameters and buffers.
        loss_reduction: ``"mean"`` (the gradient that arrives is ``1/B`` of the sample's own) or
            ``"sum"``.
        batch_first: whether samples are axis 0 of every tapped layer's input, or axis 1.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        sum_dtype: ``"float32"`` or ``"parameter"``: of clipped sums in ``p.grad``.
        tape_class: makes the tape of a backward pass (:class:`~flash_clipping.tape.Tape`).
    """

    def __init__(
        self,
        *,
        tape_class: Callable[[Recorder], RunningTape],
        clip: ClipFunction,
        note_sums: Callable[[list[nn.Parameter]], None],
        trainable: Callable[[], list[nn.Parameter]],
        state: Callable[[], Iterator[Tensor]],
        loss_reduction: str,
        batch_first: bool,
        backend: str,
        sum_dtype: str,
    ):
        self.key = next(_keys)
        self.clip = clip
        self.note_sums = note_sums
        self.trainable = trainable
        self.state = state
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        #: Axis of every tapped layer's input that holds the samples.
        self.batch_axis = 0 if batch_first else 1
        self.backend = backend
        self.sum_dtype = sum_dtype
        self.tape_class = tape_class
        self.enabled = False
        #: True while a generic rule runs a module whose own children are tapped too.
        self.bypassed = False
        #: While a compiled region learns what its layers see (:mod:`flash_clipping.wires`): what
        #: each tap, by ``id``, has seen.
        self.seen: dict[int, list[Any]] | None = None
        #: The taps of the region that ran last, which go by their numbers.
        self.numbered: Sequence[Any] = ()
        #: Layers whose rows were declared to be parts of samples.
        self.folded: set[str] = set()
        #: Which reads of layers are samples (:mod:`flash_clipping.rows`).
        self.evidence = Evidence()
        #: How many parameters were watched at the last rehearsal; new ones ask for another.
        self.rehearsed = 0
        #: Shapes of inputs on which other batch sizes told nothing, by what is in doubt.
        self.undecided: dict[frozenset[str], set[tuple[torch.Size, ...]]] = {}
        #: How many samples the loader drew for the next forward, where that is known.
        self.drawn: int | None = None
        #: Parameters that have a stand-in now: (module, name, parameter).
        self.stood_in: list[tuple[nn.Module, str, nn.Parameter]] = []
        #: Modules, by path, that must have stand-ins while their checkpoints recompute in backward.
        self.recomputed: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self.warned_non_finite = False
        #: ``mode="two_pass"``: types of what the model returned beside tensors, for messages.
        self.returned: str | None = None
        #: ``mode="two_pass"``: what the running outer backward will end with.
        self.walks: weakref.ref[Any] | None = None
        #: ``mode="two_pass"``: the last backward in whose midst a call of the root was walked.
        self.walked_in: int | None = None
        #: How factors of the layouts that were met are handled.
        self.plans = Plans()
        #: While steps are captured as a CUDA graph.
        self.captured: Captured | None = None
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._current_forward: weakref.ref[Forward] | None = None
        #: The thread that runs the root's forward, under the one key that is ever used: setting a
        #: default is one step for all threads.
        self._running: dict[str, int] = {}
        self._tape: weakref.ref[RunningTape] | None = None
        #: On CUDA: the least coefficient of a step, when it is there, and whether that is awaited.
        self._least: tuple[Tensor, torch.cuda.Event, bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps.
        state = self.__dict__.copy()
        state.update(
            _forwards=[],
            _current_forward=None,
            _running={},
            _tape=None,
            _least=None,
            walks=None,
            walked_in=None,
            plans=Plans(),  # parameters go by their id there
            captured=None,
        )
        return state

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
    def current_forward(self) -> Forward | None:
        return self._current_forward() if self._current_forward is not None else None

    def enter_forward(self) -> None:
        """The root's forward begins, in this thread.

        Raises:
            FlashClippingError: another thread runs the model's forward or backward.
        """
        if in_backward():  # recomputed, in a thread of autograd's, maybe
            return
        thread = threading.get_ident()
        if self._running.setdefault("forward", thread) != thread:
            _refuse_threads("forward", "forward")
        tape = self.tape
        if tape is not None and tape.thread not in (None, thread):
            self.leave_forward()
            _refuse_threads("forward", "backward")

    def leave_forward(self) -> None:
        """The root's forward has ended, or failed."""
        if self._running.get("forward") == threading.get_ident() and not in_backward():
            del self._running["forward"]

    def check_thread(self, call: Forward) -> None:
        """Refuse a backward of ``call`` while another thread's forward or backward runs.

        Raises:
            FlashClippingError: it would be recorded as a part of that.
        """
        if (tape := self.tape) is not None and tape.thread not in (None, call.thread):
            _refuse_threads("backward", "backward")
        if self._running.get("forward", call.thread) != call.thread:
            _refuse_threads("backward", "forward")

    def begin_forward(self, tensors: list[Tensor], witness: Witness | None = None) -> Forward:
        """Start a call of the root module with these tensor inputs."""
        if not in_backward():
            self.recover()
        axis = self.batch_axis
        sizes = [tensor.shape[axis] for tensor in tensors if tensor.dim() > axis]
        forward = Forward(
            recorded=torch.is_grad_enabled(),
            batch_sizes=tuple(dict.fromkeys(sizes)),
            input_storages=frozenset(t.untyped_storage().data_ptr() for t in tensors),
            witness=witness,
        )
        self._forwards.add(forward)
        self._current_forward = weakref.ref(forward)
        return forward

    def may_rehearse(self) -> bool:
        """Whether a forward that starts now is one of training, which may be rehearsed."""
        return (
            torch.is_grad_enabled()
            and not self.bypassed
            and not in_backward()
            and self.captured is None
        )

    def check_drawn(self, forward: Forward) -> None:
        """Refuse a batch that is not what the loader drew."""
        if self.drawn is None or not forward.recorded or self.drawn in forward.batch_sizes:
            return
        sizes = " or ".join(map(str, forward.batch_sizes)) or "unknown size"
        raise FlashClippingError(
            f"the model: the loader drew {self.drawn} samples, but the model is called with a "
            f"batch of {sizes} (the size of axis {self.batch_axis} of its inputs). Samples that "
            "are packed end to end into one row, or flattened into their tokens, are not "
            "recognised: give the model one row per sample, padded to one length. If samples lie "
            f"along axis {1 - self.batch_axis}, wrap the model with "
            f"batch_first={not self.batch_first}."
        )

    def check_losses(self, losses: Tensor) -> None:
        """Refuse per-sample losses that are not as many as the samples of the last forward."""
        call = self.current_forward
        samples = None if call is None else call.batch_size
        if not self.enabled or samples is None or not losses.dim():
            return
        counts = losses.shape[:1] if self.batch_first else losses.shape[:2]
        if samples not in counts:
            raise FlashClippingError(
                f"the criterion: found {counts[0]} losses, but the model was called with a batch "
                f"of {samples} samples (the size of axis {self.batch_axis} of its input). One of "
                "the two does not count samples: give the model inputs whose axis "
                f"{self.batch_axis} is the batch (batch_first={self.batch_first}), and the "
                "criterion one row per sample."
            )

    def recover(self) -> None:
        """Put right what an interrupt between two lines may have left behind."""
        if (tape := self.tape) is not None:  # somebody keeps a failed backward's frames
            tape.put_back()
        self._tape = None
        self.bypassed = False
        while self.stood_in:
            module, name, param = self.stood_in[-1]
            module._parameters[name] = param
            self.stood_in.pop()

    def count_use(self, params: Sequence[nn.Parameter]) -> None:
        """Note that a tapped layer reads these parameters, unless this is a recomputation."""
        forward = self.current_forward
        if forward is not None and not in_backward():
            forward.used.append(params)

    def uses(self) -> Counter[int]:
        """Uses of every parameter that a backward may still ask about, by ``id``."""
        counts: Counter[int] = Counter()
        for forward in self._forwards:
            if not forward.spent:
                counts.update(forward.uses)
        return counts

    def resume_forward(self, forward: Forward) -> None:
        """Go on with a call of the root that another one came between."""
        self._current_forward = weakref.ref(forward)

    def reads_samples(
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

        A rehearsal has shown it. Where none has, what was computed by tapped layers is taken for
        samples, and so is what has as many rows as the batch; the forward is then rehearsed
        afterwards, to see whether that was right.

        Args:
            sure: the tensor was computed by tapped layers from samples.
            beside: it stands beside such a tensor in one operation.
            rows: how many rows it has, if not the size of its axis.
            also: other tensors that it stands for.
        """
        call = self.current_forward
        if call is None or call.batch_size is None:  # layers can only agree with each other
            return sure
        read = call.next_read(path)
        folded = path in self.folded
        if call.witness is not None:
            return call.witness.reads_samples(
                read, x, axis, sure=sure, beside=beside, rows=rows, also=also, folded=folded
            )
        recomputed = in_backward()
        known = self.evidence.known(read, any_call=recomputed)
        if known is not None or sure:
            if known is None and not recomputed:
                call.guesses[read] = True
            return known is not False
        if recomputed:
            raise FlashClippingError(
                f"{path}: under activation checkpointing it reads a tensor of shape "
                f"{tuple(x.shape)} that may or may not be samples. Call this layer outside the "
                "checkpoint, or always with samples."
            )
        rows = x.shape[axis] if rows is None else rows
        batch_size = call.batch_size
        storages = {t.untyped_storage().data_ptr() for t in (x, *also)}
        answer = bool(storages & call.input_storages) and not beside
        if rows == batch_size or (folded and batch_size and rows % batch_size == 0):
            answer = answer or not storages & self.model_storages()
        call.guesses[read] = answer
        return answer

    def forget(self, path: str) -> None:
        """What this layer has read is void: it starts again."""
        self.evidence.proven.discard(path)
        self.evidence.reads.pop(path, None)
        call = self.current_forward
        if call is not None:
            call.turns.pop(path, None)
            for read in [read for read in call.guesses if read[0] == path]:
                del call.guesses[read]
            if call.witness is not None:
                call.witness.forget(path)

    def model_storages(self) -> set[int]:
        """Memory that belongs to the model, not to a batch."""
        return {tensor.untyped_storage().data_ptr() for tensor in self.state()}

    def live_calls(self) -> int:
        """Calls of the root whose norms have not been taken."""
        return sum(not forward.spent for forward in self._forwards)

    def awaits_walks(self) -> bool:
        """Whether ``mode="two_pass"`` may clip a call of the root in the running backward, by
        itself: what else reaches layers must not be clipped beside it."""
        if self.returned is None:
            return False
        return self.live_calls() > 0 or self.walked_in == _current_graph_task_id()

    def samples(self) -> int | None:
        """Samples in the batch that the root module was called with."""
        sizes = {f.batch_size for f in self._forwards if not f.spent}
        return sizes.pop() if len(sizes) == 1 else None

    def expected_batch_sizes(self) -> set[int]:
        """Sizes that the batch may have: that of the first input of every call of the root."""
        sizes = (f.batch_size for f in self._forwards if not f.spent)
        return {size for size in sizes if size is not None}

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Run tapped layers as ordinary ones."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    # -- backward -----------------------------------------------------------------------------

    @property
    def tape(self) -> RunningTape | None:
        """The tape of the backward pass that is running, if it has one already."""
        return self._tape() if self._tape is not None else None

    def begin_backward(self, call: Forward | None = None) -> RunningTape:
        """The running backward's tape; made, and set to be finished at its end, if new.

        ``call`` is the call of the root whose output it has reached.
        """
        if call is not None:
            self.check_thread(call)
        tape = self.tape
        if tape is None:
            tape = self.new_tape()
            tape.thread = None if call is None else call.thread
            # The engine's callback is the only owner: a failed backward frees the records.
            Variable._execution_engine.queue_callback(tape.finish)
        return tape

    def new_tape(self) -> RunningTape:
        if (
            self.captured is None
            and torch.cuda.is_initialized()
            and torch.cuda.is_current_stream_capturing()
        ):
            raise FlashClippingError(
                "A backward pass of flash clipping is being captured as a CUDA graph. A replay "
                "would read tables that are gone by then, and leave no norms: capture the step "
                "with flash_clipping.GraphedStep, which is given the wrapped model (or what holds "
                "the hooks), or run it outside torch.cuda.graph."
            )
        tape = self.tape_class(self)
        tape.stand_in()
        self._tape = weakref.ref(tape)
        return tape

    @contextmanager
    def captures(self) -> Iterator[Captured]:
        """Let backward passes be captured as a CUDA graph; what each replay has to leave."""
        # Their tables would be found by steps outside before any replay has filled them.
        before, self.plans = self.plans, Plans()
        self.captured = Captured(self.plans)
        try:
            yield self.captured
        finally:
            self.plans, self.captured = before, None

    def end_backward(self, norms_taken: bool = True) -> None:
        self._tape = None
        if not norms_taken:
            return
        for forward in self._forwards:
            forward.spent = True

    def note_non_finite(self, coef: Tensor) -> None:
        """Warn once when some sample was not finite, without waiting for the device.

        Args:
            coef: coefficients, which are 0 for such samples and positive for all others.
        """
        if self.warned_non_finite or not coef.numel():
            return
        if self.captured is not None:
            self.captured.coefs.append(coef)
            return
        if not coef.is_cuda:
            if not bool(coef.all()):
                self._warn_non_finite()
            return
        if self._least is None:
            pinned = torch.empty((), dtype=coef.dtype, pin_memory=True)
            self._least = (pinned, torch.cuda.Event(), False)
        least, event, pending = self._least
        if pending:
            if not event.query():
                return
            self._least = (least, event, False)
            if float(least) == 0:
                self._warn_non_finite()
                return
        least.copy_(coef.amin(), non_blocking=True)
        event.record()
        self._least = (least, event, True)

    def _warn_non_finite(self) -> None:
        self.warned_non_finite = True
        warnings.warn(
            "The gradient of at least one sample was not finite (inf or NaN). Such samples get "
            "clipping coefficient 0 and add nothing to the sum. This is said once.",
            stacklevel=2,
        )


def _refuse_threads(found: str, running: str) -> NoReturn:
    raise FlashClippingError(
        f"Two threads use one wrapped model at the same time: {found} was called while another "
        f"thread's {running} runs (or failed, with its exception still held). Their samples would "
        "be mixed up. Use the model in one thread at a time: hold a lock from forward to the end "
        "of backward, or give each thread a copy of the model."
    )


class Place:
    """A module's place in the model, as far as recording its factors goes; a tap is one.

    Args:
        path: its name in the model and its type, for messages.
        owners: the module and the containers whose parameters its forward uses.
        folded: its rows are parts of samples (``folded_modules``).
    """

    def __init__(self, path: str, recorder: Recorder, owners: list[nn.Module], folded: bool):
        self.path = path
        self.recorder = recorder
        self.owners = owners
        self.folded = folded
        if folded:
            recorder.folded.add(path)
        #: Whether what its parameters meet is the same for all samples.
        self.reads_constants = False
        #: Under which circumstances the module's forward, if it is running, was entered.
        self.entered: Any = None

    def record(
        self,
        params: Sequence[nn.Parameter],
        factors: Sequence[Factor],
        recomputed: bool,
        readers: Readers | None = None,
    ) -> None:
        """Hand factors, one for each of these parameters, to the tape of the running backward."""
        tape = self.recorder.tape
        if tape is None:
            if recomputed:
                raise FlashClippingError(
                    f"{self.path}: re-entrant activation checkpointing reached this layer before "
                    "the model's own output. Compute the loss from what the wrapped model "
                    "returns, or use checkpoint(..., use_reentrant=False)."
                )
            if self.recorder.awaits_walks():
                raise FlashClippingError(
                    f"{self.path}: mode='two_pass' got a gradient past the model's outputs: the "
                    "loss uses a tensor that the model kept on a module or returned inside an "
                    f"object that cannot be opened (found: {self.recorder.returned}), or this "
                    "layer was called by itself. Return the tensor, in a tuple, list, dict or "
                    "dataclass; call the layer in the model's forward; or use mode='one_pass'."
                )
            tape = self.recorder.begin_backward()
        if self.folded:
            factors = [self._fold(factor) for factor in factors]
        tape.record(self.path, params, factors, readers)

    def _fold(self, factor: Factor) -> Factor:
        """Rows that the user declared to be parts of samples, as samples."""
        samples = self.recorder.samples()
        if samples is None or factor.batch_size % max(samples, 1):
            raise FlashClippingError(
                f"{self.path}: declared in folded_modules, but its {factor.batch_size} rows are no "
                f"multiple of the batch ({samples}) that the model was called with. Every sample "
                "must be folded into the same number of rows, which lie together."
            )
        return factor.fold(samples)
