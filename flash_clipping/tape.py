"""One backward pass's records: factors -> norms -> coefficients -> clipped gradients.

A :class:`Recorder` lives as long as the model is wrapped and holds no tensors. A :class:`Tape`
lives as long as the backward pass that fills it: autograd's engine owns it through the callback
that will finish it, so a backward that fails takes its records with it.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from flash_clipping.factors import (
    Convolution,
    Dense,
    Factor,
    Outer,
    RowSum,
    VectorStack,
    merge,
)
from flash_clipping.ops import cost
from flash_clipping.ops.clipped_sum import clipped_sums_many, clipped_sums_of, is_small
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer import weighted_sums_many
from flash_clipping.ops.upload import to_device

#: Elements of ``p.grad`` made from stored gradients in one go: enough to keep the device busy, and
#: little beside what letting go of the stored gradients frees.
STORED_AT_ONCE = 1 << 26

#: Bytes of operands of clipped sums that are let go of together.
HELD_AT_ONCE = 1 << 28

#: Norms ``[P, B]`` of the parameters, in their order, -> coefficients ``[B]`` or ``[P, B]``.
ClipFunction = Callable[[list[nn.Parameter], Tensor], Tensor]


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


class FlashClippingError(RuntimeError):
    """A model or a step that would give a wrong norm; the message says what to change."""


@dataclass(slots=True)
class Readers:
    """How many tapped layers read one input."""

    count: int = 0


@dataclass(eq=False)
class Forward:
    """One call of the root module: what a later backward has to know about it."""

    #: Sizes of the batch axis of the root's tensor inputs; empty when it has none.
    batch_sizes: tuple[int, ...] = ()
    #: How often each parameter, by ``id``, was used by a tapped layer (checkpointed: once).
    uses: Counter[int] = field(default_factory=Counter)
    #: The input that the last tapped layer read, and how many have read it in a row.
    last_input: weakref.ref[Tensor] | None = None
    last_readers: Readers | None = None
    #: Whether the norms of this call have been taken.
    spent: bool = False
    #: Memory of the root's tensor inputs, and the stride of their batch axis.
    input_storages: frozenset[tuple[int, int]] = frozenset()
    #: Whether autograd is on: what then runs without it in this call is checkpointed.
    recorded: bool = False
    #: A run on fewer samples: how many the batch really has.
    whole_batch: int | None = None
    #: Memory of buffers that such a run works on copies of.
    put_aside: frozenset[int] = frozenset()
    #: What tapped layers read whose rows are not proven to be samples: (path of the layer, rows).
    rows: list[tuple[str, int]] = field(default_factory=list)
    #: Layers some of whose rows may be something else. Only another batch size can tell.
    unproven: set[str] = field(default_factory=set)

    def note_rows(
        self, path: str, x: Tensor, axis: int, recorder: Recorder, features: int = 0
    ) -> None:
        """Note what a tapped layer reads, until its rows are proven to be samples.

        They are in doubt where ``x`` is neither the root's own input nor computed by tapped
        layers, and where the batch could be another of its axes, or a part of one; not one of the
        last ``features``, whose sizes the layer's parameters fix.
        """
        batch_size = self.batch_size
        if path in recorder.proven or batch_size is None or x.dim() <= axis:
            return
        if batch_size < 2 and self.whole_batch is None:
            return
        self.rows.append((path, x.shape[axis]))
        if x.requires_grad:
            axes = x.shape[: x.dim() - features]
            if sum(size % batch_size == 0 for size in axes) > 1:
                self.unproven.add(path)
        elif (x.untyped_storage().data_ptr(), x.stride(axis)) not in self.input_storages:
            self.unproven.add(path)

    def doubt(self, path: str, recorder: Recorder) -> None:
        """Note a layer that will read something only when it is recomputed in backward."""
        if path not in recorder.proven and self.batch_size is not None and self.batch_size > 1:
            self.rows.append((path, self.batch_size))
            self.unproven.add(path)

    def readers_of(self, x: Tensor) -> Readers:
        """Count one more reader of this input; layers that share one are called in a row."""
        if self.last_readers is None or self.last_input is None or self.last_input() is not x:
            self.last_input, self.last_readers = weakref.ref(x), Readers()
        self.last_readers.count += 1
        return self.last_readers

    @property
    def batch_size(self) -> int | None:
        """Size of the batch axis of the root's first tensor input."""
        return self.batch_sizes[0] if self.batch_sizes else None


class Recorder:
    """What all taps of one model share.

    Args:
        clip: from per-parameter norms to coefficients; also where norms are published.
        trainable: the trainable parameters, in order.
        state: yields the model's parameters and buffers.
        loss_reduction: ``"mean"`` (the gradient that arrives is ``1/B`` of the sample's own) or
            ``"sum"``.
        batch_first: whether samples are axis 0 of every tapped layer's input, or axis 1.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
    """

    def __init__(
        self,
        *,
        clip: ClipFunction,
        trainable: Callable[[], list[nn.Parameter]],
        state: Callable[[], Iterator[Tensor]],
        loss_reduction: str,
        batch_first: bool,
        backend: str,
    ):
        self.clip = clip
        self.trainable = trainable
        self.state = state
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self.backend = backend
        self.enabled = False
        #: True while a generic rule runs a module whose own children are tapped too.
        self.bypassed = False
        #: Layers whose rows were declared to be parts of samples.
        self.folded: set[str] = set()
        #: Layers whose rows are known to be samples (:mod:`flash_clipping.rows`).
        self.proven: set[str] = set()
        #: Shapes of inputs on which another batch size was tried, and told nothing.
        self.undecided: set[tuple[torch.Size, ...]] = set()
        #: Parameters that have a stand-in now: (module, name, parameter).
        self.stood_in: list[tuple[nn.Module, str, nn.Parameter]] = []
        #: Modules, by path, that must have stand-ins while their checkpoints recompute in backward.
        self.recomputed: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self.warned_non_finite = False
        #: ``mode="two_pass"``: what the running outer backward will end with.
        self.walks: weakref.ref[Any] | None = None
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._current_forward: weakref.ref[Forward] | None = None
        self._tape: weakref.ref[Tape] | None = None
        self._pending_flag: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps.
        state = self.__dict__.copy()
        state.update(
            _forwards=[], _current_forward=None, _tape=None, _pending_flag=None, walks=None
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forwards = weakref.WeakSet()

    # -- forward ------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether a tapped layer that runs now is to be recorded in backward."""
        return self.enabled and not self.bypassed and torch.is_grad_enabled()

    @property
    def current_forward(self) -> Forward | None:
        return self._current_forward() if self._current_forward is not None else None

    def begin_forward(self, tensors: list[Tensor]) -> Forward:
        """Start a call of the root module with these tensor inputs."""
        if not in_backward():
            self._recover()
        axis = 0 if self.batch_first else 1
        sizes = [tensor.shape[axis] for tensor in tensors if tensor.dim() > axis]
        forward = Forward(
            recorded=torch.is_grad_enabled(),
            batch_sizes=tuple(dict.fromkeys(sizes)),
            input_storages=frozenset(
                (t.untyped_storage().data_ptr(), t.stride(axis)) for t in tensors if t.dim() > axis
            ),
        )
        self._forwards.add(forward)
        self._current_forward = weakref.ref(forward)
        return forward

    def _recover(self) -> None:
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
            uses = forward.uses
            for param in params:
                key = id(param)
                uses[key] = uses.get(key, 0) + 1

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

    def model_storages(self) -> set[int]:
        """Memory that belongs to the model, not to a batch."""
        forward = self.current_forward
        aside = forward.put_aside if forward is not None else ()
        return {tensor.untyped_storage().data_ptr() for tensor in self.state()}.union(aside)

    def live_calls(self) -> int:
        """Calls of the root whose norms have not been taken."""
        return sum(not forward.spent for forward in self._forwards)

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
    def tape(self) -> Tape | None:
        """The tape of the backward pass that is running, if it has one already."""
        return self._tape() if self._tape is not None else None

    def begin_backward(self) -> Tape:
        """The running backward's tape; made, and set to be finished at its end, if new."""
        tape = self.tape
        if tape is None:
            tape = self.new_tape()
            # The engine's callback is the only owner: a failed backward frees the records.
            Variable._execution_engine.queue_callback(tape.finish)
        return tape

    def new_tape(self) -> Tape:
        tape = Tape(self)
        tape.stand_in()
        self._tape = weakref.ref(tape)
        return tape

    def end_backward(self) -> None:
        self._tape = None
        for forward in self._forwards:
            forward.spent = True

    def note_non_finite(self, bad: Tensor) -> None:
        """Warn once when some sample was not finite, without waiting for the device."""
        if self.warned_non_finite:
            return
        if self._pending_flag is not None:
            flag, event = self._pending_flag
            if event is None or event.query():
                self._pending_flag = None
                if bool(flag):
                    self._warn_non_finite()
                    return
        if bad.is_cuda:
            if self._pending_flag is None and not torch.cuda.is_current_stream_capturing():
                flag = torch.empty((), dtype=torch.bool, pin_memory=True)
                flag.copy_(bad.any(), non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._pending_flag = (flag, event)
        elif bool(bad.any()):
            self._warn_non_finite()

    def _warn_non_finite(self) -> None:
        self.warned_non_finite = True
        warnings.warn(
            "The gradient of at least one sample was not finite (inf or NaN). Such samples get "
            "clipping coefficient 0 and add nothing to the sum. This is said once.",
            stacklevel=2,
        )


class Linear:
    """Linear maps that read one input: ``G_l^T A`` for every ``l``."""

    __slots__ = ("A_BTd", "Gs", "keys")

    def __init__(self, A_BTd: Tensor):
        self.A_BTd = A_BTd
        self.keys: list[int] = []
        self.Gs: list[Tensor] = []

    def items(self) -> Iterator[tuple[int, Tensor]]:
        return zip(self.keys, self.Gs, strict=True)

    @property
    def nbytes(self) -> int:
        """Memory of the operands."""
        return self.A_BTd.nbytes + sum([G.nbytes for G in self.Gs])


class Tape:
    """The records of one backward pass.

    Parameters go by their ``id`` (``key``): hashing one costs more than the rest of recording it.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.params: dict[int, nn.Parameter] = {}
        self.factors: dict[int, list[Factor]] = {}
        #: ``mode="two_pass"``: squared norms of factors that were dropped as they came.
        self.sqnorms_B: dict[int, Tensor] = {}
        # The same factors once their norms are asked for, by how they are handled together.
        self.linear: list[Linear] = []
        self.stacks: list[VectorStack] = []
        self.stored: dict[int, Dense] = {}
        self.others: dict[int, Factor] = {}
        self.uses = recorder.uses()
        self.batch_size: int | None = None
        self.first_path = ""
        #: Coefficients by parameter; while the second pass of ``mode="two_pass"`` runs they are
        #: known before the factors.
        self.coef: dict[int, Tensor] | None = None
        #: ``mode="two_pass"``: reduce factors to norms at once, keep nothing.
        self.norms_only = False

        self._stand_ins = ExitStack()

    # -- recording ----------------------------------------------------------------------------

    def stand_in(self) -> None:
        """Let checkpoints recompute with stand-ins, as they computed."""
        for make in self.recorder.recomputed.values():
            self._stand_ins.enter_context(make())

    def put_back(self) -> None:
        """The parameters themselves again."""
        self._stand_ins.close()

    def record(
        self, path: str, factors: Iterable[tuple[nn.Parameter, Factor]], readers: int = 0
    ) -> None:
        """Take the factors of one layer call.

        ``readers`` layers read the same input; 0 if the call's parameters have other uses in the
        same call of the root, or may have, so that none is worth storing by itself.
        """
        stored = False
        for param, factor in factors:
            key = id(param)
            if factor.batch_size != self.batch_size:
                self._check_batch_size(path, factor.batch_size)
            if self.coef is not None:
                add_into_grad(param, factor.clipped_sum(self.coef[key], self.backend))
                continue
            if key in self.sqnorms_B:
                raise FlashClippingError(
                    f"{path}: a parameter that was used once in forward received a second "
                    "gradient. Call backward() once over everything that was computed from the "
                    "model, before the next forward()."
                )
            self.params[key] = param
            if self.norms_only:
                if self.uses[key] == 1:
                    self.sqnorms_B[key] = factor.sqnorms(self.backend)
                    continue
            elif readers and type(factor) is Outer and _worth_storing(factor, readers):
                factor, stored = factor.stored(self.backend), True
            elif readers and type(factor) is Convolution and factor.is_worth_storing():
                factor = factor.stored()
            elif stored and type(factor) is RowSum:
                factor = Dense(factor.dense())  # nobody else keeps these rows
            if key in self.factors:
                self.factors[key].append(factor)
            else:
                self.factors[key] = [factor]

    @property
    def backend(self) -> str:
        return self.recorder.backend

    def _check_batch_size(self, path: str, found: int) -> None:
        expected = self.recorder.expected_batch_sizes()
        axis = "first" if self.recorder.batch_first else "second"
        advice = (
            f"The batch must be the {axis} axis of the input of every layer that has parameters: "
            "keep other axes (windows, positions) behind it, declare modules whose rows are parts "
            "of samples (folded_modules=[...]), or give this part a rule of its own "
            "(flash_clipping.register_rule)."
        )
        if expected and found not in expected:
            sizes = " or ".join(map(str, sorted(expected)))
            raise FlashClippingError(
                f"{path}: found {found} samples along the batch axis, but the model was called "
                f"with a batch of {sizes}. {advice}"
            )
        if self.batch_size is not None:
            raise FlashClippingError(
                f"{path}: found {found} samples along the batch axis, but {self.first_path} "
                f"recorded {self.batch_size} in the same backward. {advice}"
            )
        self.batch_size, self.first_path = found, path

    # -- finishing ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Norms, coefficients, clipped sums into ``p.grad``; never waits for the device."""
        with torch.no_grad():
            try:
                self.put_back()
                self.take_norms()
                self.add_clipped_sums()
            finally:
                self.forget()
                self.recorder.end_backward()

    def forget(self) -> None:
        """Let go of all factors."""
        self.factors.clear()
        self.linear.clear()
        self.stacks.clear()
        self.stored.clear()
        self.others.clear()

    def take_norms(self) -> None:
        """Complete the norms of all parameters and turn them into coefficients."""
        self._sort(self.merged())
        # Squared norms [n, B] of several parameters at a time, and whose they are.
        blocks = [([key], sq_B.unsqueeze(0)) for key, sq_B in self.sqnorms_B.items()]
        self.sqnorms_B.clear()
        operands = [(linear.A_BTd, linear.Gs) for linear in self.linear]
        sqnorms = linear_sqnorms(operands, backend=self.backend)
        blocks += [(linear.keys, sq) for linear, sq in zip(self.linear, sqnorms, strict=True)]
        blocks += [(stack.keys, stack.sqnorms_PB()) for stack in self.stacks]
        blocks += self._stored_sqnorms()
        blocks += [
            ([key], factor.sqnorms(self.backend).unsqueeze(0))
            for key, factor in self.others.items()
        ]
        params = self.recorder.trainable()
        coef = self.recorder.clip(params, self._norms(params, blocks))
        self.recorder.note_non_finite(coef == 0)
        # Loss reduction "mean": what arrived is 1/B of every sample's own gradient.
        scaled = coef * self._own_gradient_scale()
        if scaled.dim() == 2:
            self.coef = {
                id(param): row.to(param.device, non_blocking=True)
                for param, row in zip(params, scaled.unbind(0), strict=True)
            }
        else:
            devices = {param.device for param in params}
            on_device = {device: scaled.to(device, non_blocking=True) for device in devices}
            self.coef = {id(param): on_device[param.device] for param in params}
        self.params.update({id(param): param for param in params})

    def merged(self) -> dict[int, Factor]:
        """One factor per parameter: all of its uses are in."""
        return {
            key: factors[0] if len(factors) == 1 else merge(factors)
            for key, factors in self.factors.items()
        }

    def _sort(self, merged: Mapping[int, Factor]) -> None:
        """Put factors that can be handled in one go together."""
        self.factors.clear()
        linear: dict[Any, Linear] = {}
        kind: Any  # what members of one stack have in common
        sums: dict[Any, list[tuple[int, RowSum]]] = {}
        vectors: dict[Any, list[tuple[int, Dense]]] = {}
        for key, factor in merged.items():
            # Exactly these: a subclass may have its own way with norms and sums.
            if type(factor) is Outer:
                shared = factor.shares_input_with()
                if shared not in linear:
                    linear[shared] = Linear(factor.A_BTd)
                linear[shared].keys.append(key)
                linear[shared].Gs.append(factor.G_BTp)
            elif type(factor) is RowSum:
                rows = factor.rows_BTn
                kind = (rows.shape, rows.dtype, rows.device, self.params[key].dtype)
                sums.setdefault(kind, []).append((key, factor))
            elif type(factor) is not Dense:
                self.others[key] = factor
            elif factor.sq_parts_Bn is None and factor.is_small:
                grads = factor.grads
                size = grads.shape[1:].numel()
                kind = (grads.dtype, grads.device, self.params[key].dtype, size)
                vectors.setdefault(kind, []).append((key, factor))
            else:
                self.stored[key] = factor
        self.linear = list(linear.values())
        for members in sums.values():
            keys, rows_of = [key for key, _ in members], [factor for _, factor in members]
            self.stacks.append(VectorStack.of_sums(keys, rows_of, self.backend))
        for alike in vectors.values():
            keys, dense = [key for key, _ in alike], [factor for _, factor in alike]
            if len(keys) > 1:
                self.stacks.append(VectorStack.of_dense(keys, dense))
            else:
                self.stored[keys[0]] = dense[0]

    def _stored_sqnorms(self) -> list[tuple[list[int], Tensor]]:
        """Norms of stored gradients; those that came with parts of it are added up together."""
        blocks = []
        by_shape: dict[Any, list[int]] = {}
        for key, factor in self.stored.items():
            parts_Bn = factor.sq_parts_Bn
            if parts_Bn is None:
                blocks.append(([key], factor.sqnorms(self.backend).unsqueeze(0)))
            else:
                by_shape.setdefault((parts_Bn.shape, parts_Bn.device), []).append(key)
        for keys in by_shape.values():
            parts = [self.stored[key].sq_parts_Bn for key in keys]
            blocks.append((keys, torch.stack([part for part in parts if part is not None]).sum(-1)))
        return blocks

    def _own_gradient_scale(self) -> float:
        mean = self.recorder.loss_reduction == "mean"
        return float(self.batch_size or 0) if mean else 1.0

    def _norms(self, params: list[nn.Parameter], blocks: list[tuple[list[int], Tensor]]) -> Tensor:
        """Norms ``[P, B]`` of every sample's own gradient; 0 for what backward did not reach."""
        device = blocks[0][1].device if blocks else params[0].device
        wide = any(sq.dtype == torch.float64 for _, sq in blocks)
        dtype = torch.float64 if wide else torch.float32
        row_of: dict[int, int] = {}
        for keys, _ in blocks:
            for key in keys:
                row_of[key] = len(row_of)
        zero = len(row_of)
        rows = [row_of.get(id(param), zero) for param in params]
        found = [
            sq
            if sq.device == device and sq.dtype == dtype
            # Norms are few: once per step, and without waiting.
            else sq.to(device=device, dtype=dtype, non_blocking=True)
            for _, sq in blocks
        ]
        if zero in rows:
            found.append(torch.zeros((1, self.batch_size or 0), dtype=dtype, device=device))
        sq_PB = torch.cat(found).index_select(0, to_device(rows, device, torch.int64))
        return sq_PB.sqrt_().mul_(self._own_gradient_scale())

    def add_clipped_sums(self) -> None:
        """Add every parameter's clipped sum into ``p.grad``, letting go of factors on the way."""
        assert self.coef is not None
        self._add_small_products()
        self._add_products()
        while self.stacks:
            stack = self.stacks.pop()
            coefs = [self.coef[key] for key in stack.keys]
            dtype = self.params[stack.keys[0]].dtype
            self._add(stack.keys, stack.clipped_sums(coefs, dtype, self.backend))
        self._add_stored()
        while self.others:
            key, factor = self.others.popitem()
            self._add([key], [factor.clipped_sum(self.coef[key], self.backend)])
            del factor
        # A parameter that this batch did not reach still takes part in the step: it gets noise.
        for key in self.coef:
            param = self.params[key]
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def _add(self, keys: Sequence[int], grads: Sequence[Tensor]) -> None:
        for key, grad in zip(keys, grads, strict=True):
            add_into_grad(self.params[key], grad)

    def _alike(self, keys: Iterable[int]) -> list[list[int]]:
        """Those of these parameters together that are clipped by the same coefficients."""
        assert self.coef is not None
        by_coef: dict[int, list[int]] = {}
        for key in keys:
            by_coef.setdefault(id(self.coef[key]), []).append(key)
        return list(by_coef.values())

    def _add_small_products(self) -> None:
        """Linear maps that are bound by launches, many in one launch."""
        assert self.coef is not None
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        large = []
        for linear in self.linear:
            if is_small(linear.A_BTd, linear.Gs):
                A_BTd = linear.A_BTd
                pairs.update({key: (A_BTd, G) for key, G in linear.items()})
            else:
                large.append(linear)
        self.linear = large
        for keys in self._alike(pairs):
            products = [pairs[key] for key in keys]
            coef_B = self.coef[keys[0]]
            self._add(keys, clipped_sums_many(products, coef_B, backend=self.backend))

    def _add_products(self) -> None:
        """Linear maps that are worth a launch each; a shared input is scaled once."""
        assert self.coef is not None
        while self.linear:
            # On a GPU a few at a time: their operands live until the launch that all share.
            batch = [self.linear.pop()]
            room = HELD_AT_ONCE - batch[0].nbytes if batch[0].A_BTd.is_cuda else 0
            while self.linear and self.linear[-1].nbytes <= room:
                batch.append(self.linear.pop())
                room -= batch[-1].nbytes
            # Per-layer clipping scales a shared input differently for every reader.
            for alike in self._alike([key for linear in batch for key in linear.keys]):
                chosen = set(alike)
                groups = [
                    (linear.A_BTd, [G for k, G in linear.items() if k in chosen])
                    for linear in batch
                ]
                groups = [(A_BTd, Gs) for A_BTd, Gs in groups if Gs]
                sums = clipped_sums_of(groups, self.coef[alike[0]], backend=self.backend)
                self._add(alike, [grad for grads in sums for grad in grads])
                del groups, sums
            del batch

    def _add_stored(self) -> None:
        """Stored gradients, several at a time."""
        assert self.coef is not None
        for keys in self._alike(self.stored):
            while keys:
                batch: list[int] = []
                elements = 0
                while keys and (
                    not batch or elements + self.params[keys[-1]].numel() <= STORED_AT_ONCE
                ):
                    batch.append(keys.pop())
                    elements += self.params[batch[-1]].numel()
                grads = [self.stored.pop(key).dense() for key in batch]
                coef_B = self.coef[batch[0]]
                self._add(batch, weighted_sums_many(grads, coef_B, backend=self.backend))


def _worth_storing(factor: Outer, readers: int) -> bool:
    """Whether forming the per-sample gradients now is cheapest and takes no more memory."""
    B, T, d = factor.A_BTd.shape
    G = factor.G_BTp
    p, itemsize = G.shape[-1], G.element_size()
    return cost.choose_on(G.device.type, B, T, d, p, itemsize, readers, True) == "outer_store"


def add_into_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Where gradients go: add to ``p.grad`` as autograd would."""
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    if grad.shape != param.shape:
        grad = grad.view_as(param)
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
