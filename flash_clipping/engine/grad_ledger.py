"""What backward has left of a step: clipped sums in ``p.grad``, until the optimizer takes them, and
the norms of samples, where Opacus' users look for them.

Noise is for sums of one known bound. So it is remembered which tensors they are and what they were
clipped by, and the optimizer is given the record of these, or an error.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping.capture.draws import DrawnBatch, of_one_draw
from flash_clipping.errors import FlashClippingError, InvalidValue, checked_number

#: One bound, or one for each trainable parameter (per-layer clipping).
Bound = float | list[float]


@dataclass(frozen=True)
class StepRecord:
    """What the sums of one logical step have in common.

    Attributes:
        bound: what the samples were clipped by; a tuple with one for each parameter when per layer.
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

    @property
    def sensitivity(self) -> float:
        """How far one sample can move all sums together."""
        return total_bound(self.bound)

    def check_same_bound(self, bound: float | tuple[float, ...], clipping: str) -> None:
        """Raise ``FlashClippingError`` unless a further backward pass of this step clips alike."""
        if (bound, clipping) == (self.bound, self.clipping):
            return
        found = f"clipping={clipping!r}, max_grad_norm={_shown(bound)}"
        raise FlashClippingError(
            f"This backward pass clips by {found}, but the step that it belongs to has been "
            f"clipped by clipping={self.clipping!r}, max_grad_norm={_shown(self.bound)} so far, "
            "and its noise is for that. Change the bound between steps: after optimizer.step(), "
            "not skipped, and before the next backward(). Or let go of the step first: "
            "optimizer.zero_grad(), after skipped steps also optimizer.discard_step()."
        )

    def plus(self, later: StepRecord) -> StepRecord:
        """The record of these sums and of those of a later part of the same step;
        ``FlashClippingError`` if they were clipped differently, have other parameters, or are of
        several draws."""
        self.check_same_bound(later.bound, later.clipping)
        if self.params != later.params:
            raise FlashClippingError(
                "The parts of this step have clipped sums of different parameters: "
                f"{len(self.params)} until now, {len(later.params)} in this one. Freeze and "
                "unfreeze parameters (requires_grad) between steps, not between the parts of one; "
                "optimizer.discard_step() lets go of the parts."
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
    """The sensitivity of the sum: the bound, or the norm of the bounds of all parameters."""
    return math.hypot(*bound) if isinstance(bound, Sequence) else bound


def rescaled(bound: Bound, value: Any) -> Bound:
    """What a bound becomes when it is set to ``value``. Bounds of many parameters keep their
    proportions when one number is given, which becomes their norm: clipping schedulers of Opacus
    know one number only."""
    new = checked_bound(value)
    if isinstance(bound, list) and isinstance(new, float):
        factor = new / total_bound(bound)
        return [one * factor for one in bound]
    return new


def _shown(bound: float | tuple[float, ...]) -> str:
    if not isinstance(bound, tuple):
        return f"{bound:.6g}"
    return f"{len(bound)} bounds of norm {total_bound(bound):.6g}"


_VERSION = operator.attrgetter("_version")


class GradLedger:
    """What is known of ``p.grad`` of a wrapped model's parameters.

    Args:
        model: the model without its wrapper.

    Attributes:
        bound: what samples are clipped by, from the next backward pass on that begins a step.
        record: of the sums that nobody has taken yet, ``None`` without any.
        clipped_backwards: clipped backward passes since the model was wrapped.
        counts_unclipped: whether steps count the samples within the bound: adaptive clipping.
        awaits_backward: whether a forward was recorded since the last backward: norms that were
            published are of an earlier batch.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.bound: Bound = 1.0
        self.record: StepRecord | None = None
        self.clipped_backwards = 0
        self.counts_unclipped = False
        self.awaits_backward = False
        #: What ``p.grad`` holds that is known: clipped sums, or zeros; by the parameter's id the
        #: tensor and its version.
        self._left: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}
        #: Parameters whose ``p.grad`` held something else when the last sums were added to it.
        self._foreign: set[int] = set()
        self._follower: weakref.ref[Any] | None = None
        #: Of the hook that looks at steps of the optimizer which the follower wraps.
        self._plain_steps: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps, with no optimizer.
        state = self.__dict__.copy()
        state.update(record=None, _left={}, _versions={}, _foreign=set(), _follower=None)
        state["_plain_steps"] = None
        return state

    @property
    def follower(self) -> Any:
        """The optimizer that adds noise to this model's sums, or ``None``. The one that it wraps
        does not step on sums by itself, until another follower, or ``None``, is set."""
        return None if self._follower is None else self._follower()

    @follower.setter
    def follower(self, optimizer: Any) -> None:
        if self._plain_steps is not None:
            self._plain_steps.remove()
        self._follower = self._plain_steps = None
        if optimizer is None:
            return
        self._follower = weakref.ref(optimizer)
        plain = optimizer.original_optimizer
        while self._plain_steps is None and plain is not None:
            try:
                self._plain_steps = plain.register_step_pre_hook(self._refuse_plain_step)
            except AttributeError:  # Accelerate's has no hooks; the one in it has
                plain = getattr(plain, "optimizer", None)

    def _refuse_plain_step(self, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``FlashClippingError`` if this step would move parameters by sums without noise.

        The private optimizer has taken the sums when it calls the one that it wraps, with no
        closure. What else may be in ``p.grad`` is left alone: zeros, by which PyTorch makes the
        state that it saves; noisy means; gradients of data that are public, with hooks disabled.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # Sums that were changed are still the samples', so nothing is asked of the tensors.
        if not callable(closure) and (
            self.record is None
            or all(p.grad is None for group in plain.param_groups for p in group["params"])
        ):
            return
        raise FlashClippingError(
            f"optimizer.step(): found a step of {type(plain).__name__} itself, the optimizer that "
            "make_private was given; expected one of the optimizer that it returned. Parameters "
            "would move by clipped sums without noise, and nobody would account for it. Nothing "
            "was released. Keep what make_private returns, and step on that:\n"
            "    model, optimizer, criterion, data_loader = engine.make_private(...)"
        )

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(
        self, params: Iterable[nn.Parameter], clipping: str, may_accumulate: bool
    ) -> None:
        """Look at what the sums of these parameters will be added to: ``FlashClippingError`` for
        sums that were clipped otherwise; ``ValueError`` for any, unless they ``may_accumulate``."""
        held, foreign = 0, set()
        for param in params:
            if (grad := param.grad) is not None:
                held += 1
                if not self._is_left(param, grad):
                    foreign.add(id(param))
        running = self.record
        # A backward pass that failed has counted nothing; sums that are gone were taken by hand.
        if running is not None and (not running.backwards or len(foreign) == held):
            running = None
        before = running
        if before is None and (follower := self.follower) is not None:
            before = follower.step_record
        bound = tuple(self.bound) if isinstance(self.bound, list) else self.bound
        if before is not None:
            before.check_same_bound(bound, clipping)
        if running is not None and not may_accumulate:
            raise InvalidValue(
                "Poisson sampling is not compatible with grad accumulation. You need to call "
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
            within = (total_B <= record.sensitivity).sum(dtype=torch.float64) - total_B.numel() / 2
            unclipped = added(unclipped, within)
        if record.draw is not draw:
            draw = of_one_draw((record.draw, draw))
        self.record = replace(record, backwards=backwards, unclipped=unclipped, draw=draw)

    def note_cleared(self, params: Iterable[nn.Parameter]) -> None:
        """Gradients were cleared: those of these parameters that are there are zero."""
        self.record, self._foreign = None, set()
        self.note_sums(params)

    def note_moved(self, param: nn.Parameter, before: Tensor) -> None:
        """``p.grad`` is a copy of what it was, made by this library."""
        if (left := self._left.get(id(param))) is not None and left() is before:
            assert param.grad is not None
            self._left[id(param)] = weakref.ref(param.grad)
            self._versions[id(param)] = param.grad._version

    def forget(self) -> None:
        """The sums in ``p.grad`` were taken, or cleared."""
        self.record, self._left = None, {}

    def note_sums(self, params: Iterable[nn.Parameter]) -> None:
        """What ``p.grad`` of these parameters holds is known: their sums are there."""
        grads: dict[int, Tensor] = {}
        for param in params:
            if (grad := param.grad) is not None:
                grads[id(param)] = grad
        for key in self._foreign:
            grads.pop(key, None)
        left = dict(zip(grads, map(weakref.ref, grads.values()), strict=True))
        self._versions = dict(zip(grads, map(_VERSION, grads.values()), strict=True))
        self._left = left  # the last: an interrupt before it leaves nothing known

    def _is_left(self, param: nn.Parameter, grad: Tensor) -> bool:
        """Whether ``p.grad`` is the tensor that was left there, unchanged."""
        key = id(param)
        left = self._left.get(key)
        return left is not None and left() is grad and self._versions[key] == grad._version

    # -- the optimizer's step -------------------------------------------------------------------

    def pending_record(self, params: Sequence[nn.Parameter]) -> StepRecord:
        """The record of the sums in ``p.grad`` of these parameters; ``ValueError`` if there was no
        clipped backward pass, or some ``p.grad`` is not what it left."""
        record = self.record
        if record is None or not record.backwards:
            raise InvalidValue(
                "No clipped backward pass was recorded since the last step: p.grad is not a "
                "clipped sum. Call loss.backward() with hooks enabled (module.enable_hooks()) "
                "before optimizer.step()."
            )
        for param in params:
            if param.grad is None or not self._is_left(param, param.grad):
                self._refuse_grad(param)
        return replace(record, params=frozenset(map(id, params)))

    def name_of(self, param: Tensor, where: str = "optimizer") -> str:
        """The parameter's name in the model; ``ValueError`` for one that is not there."""
        for name, found in self.model.named_parameters():
            if found is param:
                return name
        raise InvalidValue(
            f"{where}: found a parameter of shape {tuple(param.shape)} that the wrapped model has "
            "not, or had not when it was wrapped: its gradients are not clipped. Wrap the model "
            "when it is complete, and give the optimizer its parameters."
        )

    def _refuse_grad(self, param: nn.Parameter) -> NoReturn:
        name = self.name_of(param)
        if param.grad is None:
            raise InvalidValue(
                f"{name}: this parameter has no clipped sum; its p.grad is None. Call "
                "loss.backward() on the wrapped model's output before optimizer.step(), after "
                "freezing, unfreezing and clearing gradients. (backward(inputs=...) leaves sums in "
                "the named parameters only.)"
            )
        raise InvalidValue(
            f"{name}: its p.grad is not the clipped sum that backward() left, so noise for the "
            "clipping bound would not hide a sample. It was changed or replaced between backward() "
            "and step() (torch.nn.utils.clip_grad_norm_, a trainer's gradient clipping, p.grad += "
            "..., a backward() with hooks disabled), or was not cleared before. Leave p.grad alone "
            "(samples are clipped already; switch the trainer's clipping off), and clear gradients "
            "with optimizer.zero_grad()."
        )


def publish_norms(
    params: Sequence[nn.Parameter], norms_PB: Tensor, one_device: bool = False
) -> None:
    """Leave every parameter its row of norms, ``[B]``, on its own device (``one_device``: it is
    known to be the same for all)."""
    index = norms_PB.get_device()
    near = one_device and params[0].get_device() == index
    for param, norm_B in zip(params, norms_PB.unbind(0), strict=True):
        if not near and param.get_device() != index:
            norm_B = norm_B.to(param.device)
        param.__dict__["_norm_sample"] = norm_B


def published_norms(params: Iterable[nn.Parameter]) -> Tensor:
    """What was left with these parameters: ``[P, B]``; ``FlashClippingError`` where no backward
    pass has left anything with one of them."""
    rows = published_rows(params)
    found = [row for row in rows if row is not None]
    if not found or len(found) < len(rows):
        raise FlashClippingError(
            "There are no per-sample norms yet: they are taken during backward. Call the "
            "model, then loss.backward(), with hooks enabled, and ask again."
        )
    return torch.stack([row.to(found[0].device) for row in found])


def published_rows(params: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """What was left with each of these parameters."""
    return [getattr(param, "_norm_sample", None) for param in params]


def put_back_norms(params: Iterable[nn.Parameter], rows: Iterable[Tensor | None]) -> None:
    """Leave what :func:`published_rows` gave."""
    for param, row in zip(params, rows, strict=True):
        setattr(param, "_norm_sample", row)  # noqa: B010
