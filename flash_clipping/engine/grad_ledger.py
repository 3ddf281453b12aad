"""What backward has left of a step, until noise is added: clipped sums and the norms of samples.

Sums are in ``p.grad`` until the optimizer takes them. Whatever else has no noise yet is here, where
nothing that saves or copies a model or its parameters finds it.

Noise is for sums of one known bound. So it is remembered which tensors they are and what they were
clipped by, and the optimizer is given the record of these, or an error.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flash_clipping._compat import is_alias_of, local_tensor, memory_id, never_compiled
from flash_clipping.capture.draws import DrawnBatch, of_one_draw
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.engine.unsupported import refuse_lacking
from flash_clipping.errors import FlashClippingError, InvalidValue, checked_number, warn
from flash_clipping.finish.clipping import total_norm
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.ops.runtime.checks import check_on_device

#: One bound, or one for each trainable parameter (per-layer clipping).
Bound = float | list[float]


@dataclass(frozen=True)
class StepRecord:
    """What the sums of one logical step have in common.

    Attributes:
        bound: what the samples were clipped by; a tuple with one for each parameter when per layer.
            Noise is drawn for :func:`sensitivity_of` it.
        clipping: how they were clipped.
        backwards: backward passes that the sums add up.
        params: ``id`` of every parameter that has a sum.
        unclipped: adaptive clipping: over all samples, the sum of 1/2 for each one within the bound
            and of -1/2 for each other one; ``[]``.
        draw: the loader's batch whose samples they are, if that is known.
    """

    bound: float | tuple[float, ...]
    clipping: str
    backwards: int = 1
    params: frozenset[int] = frozenset()
    unclipped: Tensor | None = None
    draw: DrawnBatch | None = None

    def check_same_bound(self, bound: float | tuple[float, ...], clipping: str) -> None:
        """Raise ``FlashClippingError`` unless a further backward pass of this step clips alike."""
        if (bound, clipping) == (self.bound, self.clipping):
            return
        found = f"clipping={clipping!r}, max_grad_norm={_shown(bound)}"
        raise FlashClippingError(
            f"FC520 This backward pass clips by {found}, but the step that it belongs to has been "
            f"clipped by clipping={self.clipping!r}, max_grad_norm={_shown(self.bound)} so far. "
            "Change the bound after optimizer.step(), or let go of the step first: "
            "optimizer.zero_grad(), after skipped steps also optimizer.discard_step()."
        )

    def plus(self, later: StepRecord) -> StepRecord:
        """The record of these sums and of those of a later part of the same step; an error if they
        were clipped differently, have other parameters, or are of several draws."""
        self.check_same_bound(later.bound, later.clipping)
        if self.params != later.params:
            raise FlashClippingError(
                "FC505 The parts of this step have clipped sums of different parameters: "
                f"{len(self.params)} until now, {len(later.params)} in this one. Freeze and "
                "unfreeze parameters (requires_grad) between steps; optimizer.discard_step() lets "
                "go of the parts."
            )
        return replace(
            later,
            backwards=max(self.backwards, later.backwards),
            unclipped=added(self.unclipped, later.unclipped),
            draw=of_one_draw((self.draw, later.draw)),
        )


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of what there is."""
    if first is None or second is None:
        return first if second is None else second
    return first + second


def checked_bound(value: Any) -> Bound:
    """A clipping bound as it is kept; ``ValueError`` unless it is positive and finite."""
    of_parameters = isinstance(value, Sequence) and not isinstance(value, str)
    bounds = [
        checked_number("max_grad_norm", one, "(0, inf)", example=1.0)
        for one in (value if of_parameters else [value])
    ]
    return bounds if of_parameters else bounds[0]


def total_bound(bound: float | Sequence[float]) -> float:
    """The bound ``C``, or the norm of the bounds of all parameters."""
    return math.hypot(*bound) if isinstance(bound, Sequence) else bound


def sensitivity_of(bound: float | Sequence[float]) -> float:
    """How far one sample can move a sum that is clipped by this bound: all noise is for that."""
    return total_bound(bound) * (1 + ETA)


def rescaled(bound: Bound, value: Any) -> Bound:
    """What a bound becomes when it is set to ``value``. Bounds of many parameters keep their
    proportions when one number is given, which becomes their norm: Opacus' schedulers know one."""
    new = checked_bound(value)
    if isinstance(bound, list) and isinstance(new, float):
        factor = new / total_bound(bound)
        return [one * factor for one in bound]
    return new


def _shown(bound: float | tuple[float, ...]) -> str:
    if not isinstance(bound, tuple):
        return f"{bound:.6g}"
    return f"{len(bound)} bounds of norm {total_bound(bound):.6g}"


@dataclass(frozen=True)
class Norms:
    """Norms of the samples of one backward pass.

    Attributes:
        params: the parameters, P of them.
        norms_PB: of every parameter's gradient, ``[P, B]``.
        total_B: over all parameters, ``[B]``; in a pipeline over all stages.
        upper: what samples are clipped by: at least the norms of what is released of them, ``[B]``,
            or ``[P, B]`` when per layer.
    """

    params: Sequence[nn.Parameter]
    norms_PB: Tensor
    total_B: Tensor
    upper: Tensor


_IS_THERE = operator.is_not
_VERSION, _GRAD, _DATA = map(operator.attrgetter, ("_version", "grad", "data"))


#: Those of models that a private optimizer has followed.
_followed: weakref.WeakSet[GradLedger] = weakref.WeakSet()

#: Of the hook of all optimizers, once a model is private.
_handles: list[Any] = []


@never_compiled  # what it asks may change while a step is compiled
def _refuse_without_noise(plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a step of any optimizer of PyTorch's: :meth:`GradLedger.refuse_step`, once more behind
    each call of a closure. Returns arguments that do so."""
    for ledger in _followed:
        ledger.refuse_step(plain)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not _followed:
        return None

    def checked() -> Any:
        loss = closure()
        for ledger in _followed:
            ledger.refuse_step(plain)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


class GradLedger:
    """What is known of ``p.grad`` of a wrapped model's parameters.

    Args:
        model: the model without its wrapper.

    Attributes:
        bound: what samples are clipped by, from the next backward pass on that begins a step.
        record: of the sums that nobody has taken yet, ``None`` without any.
        sums: those that the optimizer has taken for the running step, by the parameter's ``id``.
        norms: of the last backward pass, until its step adds noise.
        clipped_backwards: clipped backward passes since the model was wrapped.
        counts_unclipped: whether steps count the samples within the bound: adaptive clipping.
        awaits_backward: whether a forward was recorded since the last backward: norms that were
            published are of an earlier batch.
        inputs_want_gradients: whether a forward since the last backward of the criterion had an
            input that requires a gradient, which is somebody else's: a generator's, say.
        returned_after: memory of what a recorded forward has returned, by the clipped backward
            passes before it.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.bound: Bound = 1.0
        self.record: StepRecord | None = None
        self.sums: dict[int, Tensor] = {}
        self.norms: Norms | None = None
        self.clipped_backwards = 0
        self.counts_unclipped = False
        self.awaits_backward = self.inputs_want_gradients = False
        self.returned_after = weakref.WeakKeyDictionary[torch.UntypedStorage, float]()
        #: What ``p.grad`` holds that is known: clipped sums, or zeros; by the parameter's id the
        #: tensor and its version.
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        #: Parameters whose ``p.grad`` held something else when the last sums were added to it.
        self._foreign: set[int] = set()
        #: Some of these sums' elements: of these parameters, from this number on, their bits.
        self._elements: tuple[Sequence[nn.Parameter], int, Tensor] | None = None
        #: How many parameters the last backward pass had, their versions together, its number and
        #: some of their bits, until noise is added.
        self._written: tuple[int, int, int, Tensor | None] | None = None
        self._follower: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps, with no optimizer.
        state = self.__dict__.copy()
        state.update(record=None, sums={}, norms=None, _follower=None)
        state.update(_left={}, _foreign=set(), _elements=None, _written=None)
        del state["returned_after"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, returned_after=weakref.WeakKeyDictionary())

    @property
    def draw(self) -> DrawnBatch | None:
        """The loader's batch whose sums are in ``p.grad``, if there are some."""
        return None if self.record is None or not self.record.backwards else self.record.draw

    @property
    def follower(self) -> Any:
        """The optimizer that adds noise to this model's sums, or ``None``. Others do not step on
        them, until this is set to ``None``."""
        return None if self._follower is None else self._follower()

    @follower.setter
    def follower(self, optimizer: Any) -> None:
        self._follower = None
        _followed.discard(self)
        if optimizer is not None:
            self._follower = weakref.ref(optimizer)
            _followed.add(self)
            if not _handles:
                _handles.append(register_optimizer_step_pre_hook(_refuse_without_noise))

    def refuse_step(self, plain: Any) -> None:
        """Raise ``FlashClippingError`` if this optimizer would step on sums without noise.

        The private optimizer has taken the sums when it calls the one that it wraps. What else may
        be in ``p.grad`` is left alone: zeros, by which PyTorch makes the state that it saves; noisy
        means; gradients of data that are public, with hooks disabled.
        """
        if self.record is None:
            return
        # Sums that were changed are still the samples', so nothing is asked of the tensors.
        mine = {*self._left, *self._foreign, *map(id, self.model.parameters())}
        held = (p for group in plain.param_groups for p in group["params"] if id(p) in mine)
        if any(p.grad is not None for p in held):
            raise FlashClippingError(
                f"FC539 optimizer.step(): found a step of {type(plain).__name__} itself, on "
                "parameters of a private model; expected one of the optimizer that make_private "
                "returned. Parameters would move by sums without noise. Nothing was released. Step "
                "on what it returns:\n"
                "    model, optimizer, data_loader = engine.make_private(...)"
            )

    # -- forward --------------------------------------------------------------------------------

    def await_backward(self, inputs: Sequence[Tensor]) -> None:
        """A forward of these is recorded. Warn of one that a forward has returned before the last
        backward pass, which was of other samples."""
        self.awaits_backward = True
        for number, x in enumerate(inputs, 1):
            if x.requires_grad:
                self.inputs_want_gradients = True
            before = self.returned_after.get(x.untyped_storage(), math.inf)
            if before >= self.clipped_backwards:
                continue
            if any(is_alias_of(x, p) for p in (*self.model.parameters(), *self.model.buffers())):
                continue
            warn(
                f"FC515 the model: tensor {number} of {len(inputs)} among its inputs is a result "
                "of an earlier call, from before the last backward(): gradients depend on that "
                "batch, too. Begin every batch without it, unless row b is of one sample in both:\n"
                "    mems = None",
                stacklevel=2,
            )

    def note_results(self, call: ForwardCall, outputs: Iterable[Tensor]) -> None:
        """What a recorded forward has returned, but for its own inputs."""
        own = call.input_storages
        for x in outputs:
            if x.layout is torch.strided and memory_id(x.untyped_storage()) not in own:
                self.returned_after.setdefault(x.untyped_storage(), self.clipped_backwards)

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(
        self, params: Sequence[nn.Parameter], clipping: str, may_accumulate: bool
    ) -> None:
        """Look at what the sums of these parameters will be added to: ``FlashClippingError`` for
        sums that were clipped otherwise; ``ValueError`` for any, unless they ``may_accumulate``."""
        grads = [*map(_GRAD, params)]
        held = [*compress(zip(params, grads, strict=True), map(_IS_THERE, grads, repeat(None)))]
        foreign = set[int]()
        for param, grad in held:
            if not self._is_left(param, grad):
                foreign.add(id(param))
        versions = sum(map(_VERSION, params))
        earlier, self._written = self._written, None
        if self._follower is not None:
            n = self.clipped_backwards  # of every 17: where a step has two, each in turn
            bits = _bits_of(params, n, _DATA) if n % 17 == 4 else None
            self._written = len(params), versions, n, bits
            if earlier and earlier[0] == len(params) and not hasattr(params[0], "placements"):
                if earlier[1] != versions:
                    raise FlashClippingError(_WRITTEN)
                _, _, m, left = earlier
                same = None if left is None else _is_same(_bits_of(params, m, _DATA), left)
                if same is not None:
                    check_on_device(same, _WRITTEN, FlashClippingError)
        running = self.record
        # A backward pass that failed has counted nothing; sums that are gone were taken by hand.
        if running is not None and (not running.backwards or len(foreign) == len(held)):
            running = None
        before = running
        if before is None and (follower := self.follower) is not None:
            before = follower.step_record
        bound = tuple(self.bound) if isinstance(self.bound, list) else self.bound
        if before is not None:
            before.check_same_bound(bound, clipping)
        if running is not None and not may_accumulate:
            raise InvalidValue(
                "FC510 Poisson sampling is not compatible with grad accumulation. You need to call "
                "optimizer.step() after every forward/backward pass or consider using "
                "BatchMemoryManager"
            )
        # Nothing is known of p.grad until the sums are in: a failure here leaves it so.
        self.record = running or StepRecord(bound, clipping, backwards=0)
        self._left, self._foreign = {}, foreign

    def count_backward(self, total_B: Tensor, draw: DrawnBatch | None = None) -> None:
        """Add a backward pass, whose samples have these norms and are of this draw, to the record;
        ``FlashClippingError`` if that is of another draw."""
        self.awaits_backward = False
        self.clipped_backwards += 1
        record = self.record
        assert record is not None
        backwards, unclipped = record.backwards + 1, record.unclipped
        if self.counts_unclipped:
            within = (total_B <= total_bound(record.bound)).sum(
                dtype=torch.float64
            ) - total_B.numel() / 2
            unclipped = added(unclipped, within)
        if record.draw is not draw:
            draw = of_one_draw((record.draw, draw))
        self.record = replace(record, backwards=backwards, unclipped=unclipped, draw=draw)

    def note_cleared(self, params: Iterable[nn.Parameter]) -> None:
        """Gradients were cleared: those of these parameters that are there are zero."""
        self.record, self._foreign = None, set()
        self.note_sums(params)
        self._elements = None

    def note_moved(self, param: nn.Parameter, before: Tensor) -> None:
        """``p.grad`` is a copy of what it was, made by this library."""
        if (left := self._left.get(id(param))) is not None and left[0]() is before:
            assert param.grad is not None
            self._left[id(param)] = weakref.ref(param.grad), param.grad._version

    def forget(self) -> None:
        """The sums in ``p.grad`` were taken, or cleared."""
        self.record, self._left = None, {}

    def end_step(self) -> None:
        """Noise was added: nothing without it is left."""
        self.sums, self.norms = {}, None
        self._elements = self._written = None

    def norms_of(self, params: Sequence[nn.Parameter]) -> Norms:
        """The norms of these parameters' gradients in the last backward pass;
        ``FlashClippingError`` where there are none, or a later forward awaits its own."""
        found = self.norms
        rows = {} if found is None else {id(param): n for n, param in enumerate(found.params)}
        wanted = [rows.get(id(param)) for param in params]
        if found is None or None in wanted or self.awaits_backward:
            of_last = " of the last forward" * (found is not None and None not in wanted)
            raise FlashClippingError(
                f"FC525 There are no per-sample norms{of_last} yet: they are taken during "
                "backward, with hooks enabled. Ask before optimizer.step(), which lets go of "
                "them:\n"
                "    loss.backward(); norms = model.get_norm_sample(); optimizer.step()"
            )
        if wanted == [*range(len(rows))]:
            return found
        norms_PB = found.norms_PB[wanted]
        return replace(found, params=params, norms_PB=norms_PB, total_B=total_norm(norms_PB))

    def note_sums(self, params: Iterable[nn.Parameter]) -> None:
        """What ``p.grad`` of these parameters holds is known: their sums are there."""
        params = [*params]
        if self._foreign:
            params = [param for param in params if id(param) not in self._foreign]
        some = [*compress(params, map(_IS_THERE, map(_GRAD, params), repeat(None)))]
        grads = [*map(_GRAD, some)]
        pairs = zip(map(weakref.ref, grads), map(_VERSION, grads), strict=True)
        left = dict(zip(map(id, some), pairs, strict=True))
        n, self._elements = self.clipped_backwards, None
        # Versions of a DTensor miss what functions of many tensors write (clip_grad_norm_).
        often = n < 8 or n % 16 == 0 or {*map(type, grads)} != {Tensor}
        looks = some and self._follower is not None and often
        if looks and (bits := _bits_of(some, n, _GRAD)) is not None:
            self._elements = some, n, bits
        self._left = left  # the last: an interrupt before it leaves nothing known

    def _is_left(self, param: nn.Parameter, grad: Tensor) -> bool:
        """Whether ``p.grad`` is the tensor that was left there, unchanged."""
        left = self._left.get(id(param))
        return left is not None and left[0]() is grad and left[1] == grad._version

    # -- the optimizer's step -------------------------------------------------------------------

    def pending_record(self, params: Sequence[nn.Parameter]) -> StepRecord:
        """The record of the sums in ``p.grad`` of these parameters; ``ValueError`` if there was no
        clipped backward pass, or some ``p.grad`` is not what it left."""
        record = self.record
        if record is None or not record.backwards:
            raise InvalidValue(
                "FC501 No clipped backward pass was recorded since the last step: p.grad is not a "
                "clipped sum. Call loss.backward() with hooks enabled (module.enable_hooks()) "
                "before optimizer.step()."
            )
        for param in params:
            if param.grad is None or not self._is_left(param, param.grad):
                self._refuse_grad(param)
        if len(self._left) > len(params):  # some were unfrozen since
            refuse_lacking(self.model, self.follower)
        if self._elements is not None:  # versions do not count what is written past autograd
            some, n, left = self._elements
            if (same := _is_same(_bits_of(some, n, _GRAD), left)) is None:
                self._refuse_grad(some[0])
            check_on_device(same, f"FC503 optimizer.step(): a {_NOT_THE_SUM}", InvalidValue)
        return replace(record, params=frozenset(map(id, params)))

    def name_of(self, param: Tensor, where: str = "optimizer") -> str:
        """The parameter's name in the model; ``ValueError`` for one that is not there."""
        for name, found in self.model.named_parameters():
            if found is param:
                return name
        raise InvalidValue(
            f"FC170 {where}: found a parameter of shape {tuple(param.shape)} that the wrapped "
            "model has not, or had not when it was wrapped: its gradients are not clipped. Wrap "
            "the model when it is complete, and give the optimizer its parameters."
        )

    def _refuse_grad(self, param: nn.Parameter) -> NoReturn:
        name = self.name_of(param)
        if param.grad is None:
            raise InvalidValue(
                f"FC502 {name}: this parameter has no clipped sum; its p.grad is None. Call "
                "loss.backward() on the wrapped model's output before optimizer.step(), after "
                "freezing, unfreezing and clearing gradients, and without inputs=."
            )
        raise InvalidValue(f"FC503 {name}: its {_NOT_THE_SUM}")


_NOT_THE_SUM = (
    "p.grad is not the clipped sum that backward() left. It was changed between backward() and "
    "step() (torch.nn.utils.clip_grad_norm_, a trainer's gradient clipping, GradScaler.unscale_, "
    "p.grad += ..., a backward() with hooks disabled), or was not cleared. Leave p.grad alone "
    "(switch the trainer's clipping off), and clear gradients with optimizer.zero_grad()."
)

_WRITTEN = (
    "FC504 backward(): found parameters that were written since the last backward(), without an "
    "optimizer.step(). An ascent step (SAM) counts samples twice, without noise. Where weights "
    "were only loaded, begin the step again before this:\n    optimizer.discard_step()"
)

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_same(found: Tensor | None, left: Tensor) -> Tensor | None:
    """Whether bits are as they were, on the device; ``None`` where there are others, or none."""
    if found is None or (found.dtype, found.device) != (left.dtype, left.device):
        return None
    return (found == left).all() if found.shape == left.shape else None


def _bits_of(params: Sequence[nn.Parameter], n: int, of: Callable[[Any], Any]) -> Tensor | None:
    """Bits of up to 64 elements of 16 parameters' sums, or values, those of one dtype on one
    device; without waiting. ``n`` says which of them; ``None`` where there are none."""
    parts: list[Tensor] = []
    for param in [*params, *params][16 * n % len(params) :][: min(16, len(params))]:
        grad = of(param)
        if hasattr(grad, "placements"):
            grad = local_tensor(grad)
        if type(grad) is not Tensor or not grad.numel() or not grad.is_contiguous():
            continue
        if parts and (grad.dtype != parts[0].dtype or grad.device != parts[0].device):
            continue
        count, step = min(64, grad.numel()), max(1, grad.numel() // 64)
        parts.append(grad.real.as_strided((count,), (step,), grad.storage_offset() + n % step))
    return torch.cat(parts).view(_INTEGERS[parts[0].itemsize]) if parts else None
