"""One backward pass's records: factors -> norms -> coefficients -> clipped gradients.

A :class:`Recorder` lives as long as the model is wrapped and holds no tensors. A :class:`Tape`
lives as long as the backward pass that fills it: autograd's engine owns it through the callback
that will finish it, so a backward that fails takes its records with it.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from flash_clipping.factors import Convolution, Dense, Factor, Outer, VectorStack, merge
from flash_clipping.ops import cost
from flash_clipping.ops.clipped_sum import clipped_sums, clipped_sums_many, is_small
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer import weighted_sums_many

#: Elements of ``p.grad`` made from stored gradients in one go: enough to keep the device busy, and
#: little beside what letting go of the stored gradients frees.
STORED_AT_ONCE = 1 << 26

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
    #: Inputs of tapped layers that do not require grad: (path of the layer, rows).
    rows: list[tuple[str, int]] = field(default_factory=list)
    #: Layers some of whose rows are neither the root's nor computed by tapped layers. Whether they
    #: are samples, only another batch size can tell.
    unproven: set[str] = field(default_factory=set)

    def note_rows(self, path: str, x: Tensor, axis: int, recorder: Recorder) -> None:
        """Note an input of a tapped layer that does not require grad, and its batch axis."""
        if recorder.rows_are_proven or x.dim() <= axis:
            return
        self.rows.append((path, x.shape[axis]))
        if (x.untyped_storage().data_ptr(), x.stride(axis)) not in self.input_storages:
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
        #: Whether another batch size has shown which rows are samples.
        self.rows_are_proven = False
        #: Parameters that have a stand-in now: (module, name, parameter).
        self.stood_in: list[tuple[nn.Module, str, nn.Parameter]] = []
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
        self._tape = None  # somebody may keep a failed backward's frames, and with them its tape
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
                uses[id(param)] += 1

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
        return {tensor.untyped_storage().data_ptr() for tensor in self.state()}

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


class Tape:
    """The records of one backward pass."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        # By id: hashing a parameter costs more than the rest of recording it.
        self.params: dict[int, nn.Parameter] = {}
        self.factors: dict[int, list[Factor]] = {}
        self.sqnorms_B: dict[int, Tensor] = {}
        self.vectors: list[tuple[list[int], VectorStack]] = []
        self.uses = recorder.uses()
        self.batch_size: int | None = None
        self.first_path = ""
        #: Set while the second pass of ``mode="two_pass"`` adds clipped gradients.
        self.coef: dict[int, Tensor] | None = None
        #: ``mode="two_pass"``: reduce factors to norms at once, keep nothing.
        self.norms_only = False

    # -- recording ----------------------------------------------------------------------------

    def record(
        self, path: str, factors: Iterable[tuple[nn.Parameter, Factor]], readers: int = 0
    ) -> None:
        """Take the factors of one layer call.

        ``readers`` layers read the same input; 0 if the call's parameters have other uses in the
        same call of the root, or may have, so that none is worth storing by itself.
        """
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
                factor = factor.stored(self.backend)
            elif readers and type(factor) is Convolution and factor.is_worth_storing():
                factor = factor.stored()
            self.factors.setdefault(key, []).append(factor)

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
                self.take_norms()
                self.add_clipped_sums()
            finally:
                self.forget()
                self.recorder.end_backward()

    def forget(self) -> None:
        """Let go of all factors."""
        self.factors.clear()
        self.vectors.clear()

    def take_norms(self) -> None:
        """Complete the norms of all parameters and turn them into coefficients."""
        merged = {key: merge(factors) for key, factors in self.factors.items()}
        self.factors = {key: [factor] for key, factor in merged.items()}
        self._outer_sqnorms(merged)
        self._stack_vectors(merged)
        self._sum_parts(merged)
        for key, factor in merged.items():
            if key not in self.sqnorms_B:
                self.sqnorms_B[key] = factor.sqnorms(self.backend)
        params = self.recorder.trainable()
        norms_PB = self._norms(params)
        coef = self.recorder.clip(params, norms_PB)
        self.recorder.note_non_finite(coef == 0)
        # Loss reduction "mean": what arrived is 1/B of every sample's own gradient.
        scaled = coef * self._own_gradient_scale()
        if scaled.dim() == 2:
            rows = scaled.unbind(0)
            self.coef = {
                id(param): row.to(param.device, non_blocking=True)
                for param, row in zip(params, rows, strict=True)
            }
        else:
            on_device = {scaled.device: scaled}
            for param in params:
                if param.device not in on_device:
                    on_device[param.device] = scaled.to(param.device, non_blocking=True)
            self.coef = {id(param): on_device[param.device] for param in params}
        self.params.update((id(param), param) for param in params)
        self.sqnorms_B.clear()

    def _own_gradient_scale(self) -> float:
        mean = self.recorder.loss_reduction == "mean"
        return float(self.batch_size or 0) if mean else 1.0

    def _outer_sqnorms(self, merged: Mapping[int, Factor]) -> None:
        """Norms of all linear maps; those that read one input share the work on it."""
        groups = group_by_input(merged)
        if not groups:
            return
        operands = [(group[0][1].A_BTd, [factor.G_BTp for _, factor in group]) for group in groups]
        for group, sq_LB in zip(
            groups, linear_sqnorms(operands, backend=self.backend), strict=True
        ):
            for (key, _), sq_B in zip(group, sq_LB.unbind(0), strict=True):
                self.sqnorms_B[key] = sq_B

    def _stack_vectors(self, merged: Mapping[int, Factor]) -> None:
        """Lay small per-sample gradients of one shape side by side, and take their norms at once.

        A model has a bias and a norm layer for every few matrices; one by one, their launches
        take longer than their arithmetic.
        """
        by_shape: dict[Any, list[int]] = {}
        for key, factor in merged.items():
            if type(factor) is Dense and factor.is_small and factor.sq_parts_Bn is None:
                grads = factor.grads
                by_shape.setdefault((grads.shape, grads.dtype, grads.device), []).append(key)
        for keys in by_shape.values():
            if len(keys) < 2:
                continue
            vectors = VectorStack([self.factors.pop(key)[0].dense() for key in keys])
            self.vectors.append((keys, vectors))
            self.sqnorms_B.update(zip(keys, vectors.sqnorms_PB().unbind(0), strict=True))

    def _sum_parts(self, merged: Mapping[int, Factor]) -> None:
        """Add up the norms that came with stored gradients, those of one shape at once."""
        by_shape: dict[Any, list[tuple[int, Tensor]]] = {}
        for key, factor in merged.items():
            if type(factor) is Dense and factor.sq_parts_Bn is not None:
                parts_Bn = factor.sq_parts_Bn
                by_shape.setdefault((parts_Bn.shape, parts_Bn.device), []).append((key, parts_Bn))
        for members in by_shape.values():
            sums_PB = torch.stack([parts_Bn for _, parts_Bn in members]).sum(-1)
            self.sqnorms_B.update(zip([key for key, _ in members], sums_PB.unbind(0), strict=True))

    def _norms(self, params: list[nn.Parameter]) -> Tensor:
        found = list(self.sqnorms_B.values())
        device = found[0].device if found else params[0].device
        wide = any(sq.dtype == torch.float64 for sq in found)
        dtype = torch.float64 if wide else torch.float32
        zero_B = torch.zeros(self.batch_size or 0, dtype=dtype, device=device)
        rows = [self.sqnorms_B.get(id(param), zero_B) for param in params]
        if wide or any(row.device != device for row in rows):
            rows = [row.to(device=device, dtype=dtype, non_blocking=True) for row in rows]
        return torch.stack(rows).sqrt_().mul_(self._own_gradient_scale())

    def add_clipped_sums(self) -> None:
        """Add every parameter's clipped sum into ``p.grad``, letting go of factors on the way."""
        assert self.coef is not None
        merged = {key: factors[0] for key, factors in self.factors.items()}
        self.factors.clear()
        groups = group_by_input(merged)
        for group in groups:
            for key, _ in group:
                del merged[key]
        self._add_small_products(groups)
        while groups:
            # Per-layer clipping scales a shared input differently for every reader.
            by_coef: dict[int, list[tuple[int, Outer]]] = {}
            for key, outer in groups.pop():
                by_coef.setdefault(id(self.coef[key]), []).append((key, outer))
            while by_coef:
                _, part = by_coef.popitem()
                grads = clipped_sums(
                    part[0][1].A_BTd,
                    [member.G_BTp for _, member in part],
                    self.coef[part[0][0]],
                    backend=self.backend,
                )
                for (key, _), grad in zip(part, grads, strict=True):
                    add_into_grad(self.params[key], grad)
            del part, outer, grads, grad
        while self.vectors:
            keys, vectors = self.vectors.pop()
            rows = vectors.clipped_sums([self.coef[key] for key in keys], self.backend)
            for key, row in zip(keys, rows, strict=True):
                add_into_grad(self.params[key], row)
        self._add_stored(merged)
        while merged:
            key, factor = merged.popitem()
            add_into_grad(self.params[key], factor.clipped_sum(self.coef[key], self.backend))
            del factor
        # A parameter that this batch did not reach still takes part in the step: it gets noise.
        for key in self.coef:
            param = self.params[key]
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def _add_stored(self, merged: dict[int, Factor]) -> None:
        """Take stored gradients out of ``merged``, and add several at a time, then let them go."""
        assert self.coef is not None
        by_coef: dict[int, list[int]] = {}
        for key, factor in merged.items():
            if type(factor) is Dense:
                by_coef.setdefault(id(self.coef[key]), []).append(key)
        for keys in by_coef.values():
            while keys:
                batch: list[int] = []
                elements = 0
                while keys and (
                    not batch or elements + self.params[keys[-1]].numel() <= STORED_AT_ONCE
                ):
                    batch.append(keys.pop())
                    elements += self.params[batch[-1]].numel()
                sums = weighted_sums_many(
                    [merged.pop(key).dense() for key in batch],
                    self.coef[batch[0]],
                    backend=self.backend,
                )
                for key, grad in zip(batch, sums, strict=True):
                    add_into_grad(self.params[key], grad)

    def _add_small_products(self, groups: list[list[tuple[int, Outer]]]) -> None:
        """Take out of ``groups`` those that are bound by launches, and launch them together."""
        assert self.coef is not None
        small: list[list[tuple[int, Outer]]] = []
        large: list[list[tuple[int, Outer]]] = []
        for group in groups:
            Gs = [outer.G_BTp for _, outer in group]
            (small if is_small(group[0][1].A_BTd, Gs) else large).append(group)
        groups[:] = large
        by_coef: dict[int, list[tuple[int, Outer]]] = {}
        for group in small:
            for key, outer in group:
                by_coef.setdefault(id(self.coef[key]), []).append((key, outer))
        for members in by_coef.values():
            grads = clipped_sums_many(
                [(outer.A_BTd, outer.G_BTp) for _, outer in members],
                self.coef[members[0][0]],
                backend=self.backend,
            )
            for (key, _), grad in zip(members, grads, strict=True):
                add_into_grad(self.params[key], grad)


def _worth_storing(factor: Outer, readers: int) -> bool:
    """Whether forming the per-sample gradients now is cheapest and takes no more memory."""
    B, T, d = factor.A_BTd.shape
    G = factor.G_BTp
    return _choice(B, T, d, G.shape[-1], G.element_size(), readers, G.device.type) == "outer_store"


@functools.lru_cache(maxsize=4096)
def _choice(B: int, T: int, d: int, p: int, itemsize: int, shared: int, device_type: str) -> str:
    machine = cost.machine_for(device_type, itemsize)
    return cost.choose(
        B=B, T=T, d=d, p=p, itemsize=itemsize, may_store=True, shared=shared, machine=machine
    )


def group_by_input(merged: Mapping[int, Factor]) -> list[list[tuple[int, Outer]]]:
    """Linear maps that read the same input together, in the order in which they were recorded."""
    groups: dict[Any, list[tuple[int, Outer]]] = {}
    for key, factor in merged.items():
        if type(factor) is Outer:
            groups.setdefault(factor.shares_input_with(), []).append((key, factor))
    return list(groups.values())


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
