"""Opacus' ghost-clipping criterion with one backward pass in the place of two."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch import Tensor, nn

from flash_clipping.capture.no_trace import untouched
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.separable import compares_samples
from flash_clipping.engine.token_losses import logits_of
from flash_clipping.errors import (
    HALVE_PARTS,
    FlashClippingError,
    InvalidType,
    InvalidValue,
    NoAttribute,
)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A criterion's arguments, by position, with logits in the place of a model's output; logits
    ``[B, T, V]`` with targets ``[B, T]`` are flattened, and ``shape`` says so."""
    for name in ("input", "target"):  # where targets are looked for, and no others
        if name in kwargs and len(args) == (name == "target"):
            args = *args, kwargs.pop(name)
    if not args or isinstance(args[0], Tensor) or not hasattr(args[0], "logits"):
        return args
    logits, *others = logits_of(args[0]), *args[1:]
    target = others[0] if others else None
    if isinstance(target, Tensor) and logits.dim() == 3 and logits.shape[:2] == target.shape:
        kwargs["shape"] = logits.shape
        return logits.flatten(0, 1), target.flatten(), *others[1:]
    return logits, *others


class FlashTensor(DPTensorFastGradientClipping):
    """A loss per sample that reduces itself and runs one ordinary backward; or the user's scalar,
    whose backward is its own."""

    module: GradSampleHooksFlashClipping

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Leave norms, coefficients and clipped sums, as ``loss.backward()`` on a scalar does.

        Losses are added up: a 16-bit gradient over the batch's size would be rounded by the number
        of others. They are averaged where the model's input requires a gradient (a generator's).
        """
        losses, step = self.loss_per_sample, self.module.running_step
        try:
            if not losses.dim():
                losses.backward(*args, **kwargs)
            elif step.inputs_want_gradients and self.loss_reduction == "mean" and len(losses):
                step.inputs_want_gradients = False
                losses.mean().backward(*args, **kwargs)
            else:
                with self.module.summed_loss() as summed:
                    reduce = torch.sum if summed or self.loss_reduction == "sum" else torch.mean
                    reduce(losses).backward(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            error.add_note(HALVE_PARTS)
            raise

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __getattr__(self, name: str) -> Any:
        raise NoAttribute(
            f"FC463 loss.{name}: found a loss of each sample, which has backward() and arithmetic. "
            "For its number and tensor:\n"
            "    number, losses = loss.item(), loss.loss_per_sample"
        )


def _keeps_type(name: str) -> Any:
    # Opacus' arithmetic names its own class; the result must stay a one-pass loss.
    def operate(self: FlashTensor, *args: Any) -> Any:
        mine, kind = self.loss_per_sample, DPTensorFastGradientClipping
        of_losses = [x.loss_per_sample for x in args if isinstance(x, kind)]
        if all(x.shape == mine.shape for x in of_losses):
            if (found := getattr(mine, name)(*of_losses or args)) is NotImplemented:
                return found
            if found.shape == mine.shape:
                return FlashTensor(self.module, self.optimizer, found, self.loss_reduction)
            of_losses = [found]
        shapes = " and ".join(str([*x.shape]) for x in (mine, *of_losses))
        raise InvalidValue(
            f"FC462 loss.{name}: found losses of shape {shapes}. A scalar would count once for "
            "every sample: give both one for each sample (a torch.nn loss, a function with "
            "reduction=), and weights of the same shape. Of batches, add numbers:\n    loss.item()"
        )

    operate.__name__ = name
    return operate


for _name in ("truediv", "mul", "rmul", "add", "radd", "sub", "rsub", "neg"):
    setattr(FlashTensor, f"__{_name}__", _keeps_type(f"__{_name}__"))


def _is_of_pytorch(criterion: Any) -> bool | None:
    """Whether it is PyTorch's own, and the mean of its losses; ``None`` of ``CTCLoss``, whose mean
    is one over the lengths of targets, too."""
    while isinstance(criterion, partial):
        criterion = criterion.func
    if criterion is F.ctc_loss or isinstance(criterion, nn.CTCLoss):
        return None
    of_module = type(criterion) if isinstance(criterion, nn.Module) else criterion
    return getattr(of_module, "__module__", "") in (nn.modules.loss.__name__, F.__name__)


class FlashLoss(DPLossFastGradientClipping):
    """The user's criterion, called as before; ``loss.backward()`` runs one backward pass.

    Built and called like Opacus' ``DPLossFastGradientClipping``. Norms and clipped sums are those
    of ``loss.backward()`` on the mean, or sum, of the losses of samples:

    * A module with an attribute ``reduction``, or a function with such an argument, gives a loss
      for each sample. Where that has further axes, a sample's loss is the mean over them (their
      sum, if losses are summed); targets that are ``ignore_index`` do not count.
    * Any other criterion is called as it is, and so is ``nn.CTCLoss``. A scalar goes backward as it
      would without this class.

    It takes the logits of an output of transformers. With logits ``[B, T, V]`` and targets
    ``[B, T]`` a sample's loss is the mean over its own targets (their sum, if losses are summed).
    Targets are not shifted. Weights of classes weigh a sample's loss; none divides another's.

    Raises:
        ValueError: the reductions of criterion, module and optimizer do not agree; in a call, the
            criterion's scalar is no mean (or sum) over samples, or it broadcasts targets over them.
    """

    module: GradSampleHooksFlashClipping

    def __init__(self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean"):
        while isinstance(criterion, DPLossFastGradientClipping):  # of an earlier make_private
            criterion = criterion.criterion
        own = getattr(criterion, "reduction", None)
        self._is_attribute = isinstance(own, str)
        #: Defaults of a function's arguments, by name.
        self._takes: dict[str, Any] = {}
        if not isinstance(criterion, nn.Module):
            with contextlib.suppress(TypeError, ValueError):  # some of C have no signature
                known = inspect.signature(criterion).parameters
                self._takes = {name: one.default for name, one in known.items()}
        if not self._is_attribute:
            default = self._takes.get("reduction")
            own = default if default in ("mean", "sum") else None
        self._name = getattr(criterion, "__name__", type(criterion).__name__)
        found = {
            "loss_reduction": loss_reduction,
            "module.loss_reduction": module.loss_reduction,
            "optimizer.loss_reduction": optimizer.loss_reduction,
            "criterion.reduction": own or module.loss_reduction,
        }
        if len(set(found.values())) > 1 or loss_reduction not in ("mean", "sum"):
            listed = ", ".join(f"{name}={value!r}" for name, value in found.items())
            raise InvalidValue(
                f"FC461 The loss reductions do not match: {listed}. Norms would be off by the "
                "batch size. Give all of them the same reduction, 'mean' or 'sum':\n"
                f"    make_private(loss_reduction={own or module.loss_reduction!r}, ...)"
            )
        self._buffers: BufferWatch | None = None
        if isinstance(criterion, nn.Module) and module.strict and [*criterion.buffers()]:
            self._buffers = BufferWatch(criterion, module._session, "criterion.criterion")
        is_of_pytorch = _is_of_pytorch(criterion)
        #: Whether it can be asked for a loss for each sample.
        self._gives_losses = self._is_attribute or "reduction" in self._takes
        self._gives_losses &= is_of_pytorch is not None
        #: Whether its own mean, or sum, is known to be that of its losses.
        self._is_known = own is None or bool(is_of_pytorch)
        #: Whether it was checked whether it compares samples; losses of PyTorch do not.
        self._is_separable = bool(is_of_pytorch)
        # Opacus' own writes into the criterion that it is given.
        self.module, self.optimizer, self.criterion = module, optimizer, criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, **kwargs: Any) -> FlashTensor:
        """The user's loss of these arguments, sample by sample where it can be had.

        Args:
            *args: of the criterion; in the place of logits an output of transformers that has them.
            **kwargs: of the criterion; and ``shape``, that of logits ``[B, T, V]`` which were
                flattened: a sample's loss is over its own targets then.

        Raises:
            FlashClippingError: there are not as many losses as samples; the criterion compares
                samples.
            NotImplementedError: the criterion changes a buffer of its own.
            ValueError: there are more losses than outputs, of targets that were broadcast over
                samples.
        """
        args = _arguments(args, kwargs)
        shape = kwargs.pop("shape", None)
        if kwargs.get("reduction", self.loss_reduction) not in (self.loss_reduction, "none"):
            raise InvalidValue(
                f"FC461 criterion: found reduction={kwargs['reduction']!r} in a call, and "
                f"make_private(loss_reduction={self.loss_reduction!r}). Leave it out of the call."
            )
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        asks, own = self._gives_losses or shape is not None, None
        if shape is None and asks and not (self._is_known or captures):
            with torch.no_grad(), torch.random.fork_rng():
                own = self.criterion(*args, **kwargs)
        if shape is None and not (self._is_separable or captures):
            self._refuse_comparison(args, kwargs)
        losses = self._losses(args, kwargs, alone=asks)
        self._refuse_broadcast((*args, *kwargs.values()), losses)
        if shape is not None and losses.dim() and losses.shape[0] == shape[0] * shape[1]:
            losses = losses.unflatten(0, shape[:2])
        if losses.dim() > 1:
            losses = self._of_samples(losses, self._counted(args, kwargs, losses))
        if isinstance(own, Tensor) and not own.dim() and losses.numel():
            mine = losses.detach()
            self._compare(own, mine.mean() if self.loss_reduction == "mean" else mine.sum())
        self.module.check_losses(losses)
        return FlashTensor(self.module, self.optimizer, losses, self.loss_reduction)

    def _refuse_comparison(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``FlashClippingError`` for one that compares samples, by a batch that can be halved."""
        session = self.module._session
        call = session.current_forward
        if call is None or not (call.recorded and session.mode.enabled):
            return
        samples = call.batch_size or 0
        if samples < 4 or not session.options.batch_first or call.units is not None:
            return
        whole: Any = self.criterion if isinstance(self.criterion, nn.Module) else nn.Module()
        loss: Any = self.criterion
        if self._gives_losses:
            loss = lambda *x, **named: self._losses(x, named, alone=True)  # noqa: E731
        given, is_mean = (loss, args, kwargs, samples), self.loss_reduction == "mean"
        with untouched(whole):
            compares = compares_samples(*given, is_mean)
            is_other = compares and not compares_samples(*given, not is_mean)
        self._is_separable = not compares
        if is_other:
            raise InvalidValue(
                f"FC461 criterion ({self._name}): found a scalar that is no {self.loss_reduction} "
                "over samples: what one of them adds would depend on how many there are. Give the "
                "reduction that it has, be it divided by a constant:\n"
                f"    make_private(loss_reduction={'sum' if is_mean else 'mean'!r}, ...)"
            )
        if compares:
            raise FlashClippingError(
                f"FC440 criterion ({self._name}): found a loss that compares the samples of a "
                "batch: a sample's gradient changes with the others. Divide by a mean, weight or "
                "count of public data, make samples that must be compared one unit "
                "(docs/units.md), or give PyTorch's own loss as it is:\n"
                "    make_private(criterion=nn.CrossEntropyLoss(weight=weight), ...)"
            )

    def _of_samples(self, losses: Tensor, counted: Tensor | None) -> Tensor:
        """``[B]``: over the further axes of losses, which lie behind that of samples; ``counted``:
        which of them count, if not all."""
        session = self.module._session
        call = None if session.options.batch_first else session.current_forward
        axis = int(call is not None and call.batch_size not in (None, len(losses)))
        total_B = losses.movedim(axis, 0).flatten(1).sum(1)
        if self.loss_reduction == "sum":
            return total_B
        if counted is None:
            return total_B / max(1, losses.numel() // max(1, len(total_B)))
        return total_B / counted.movedim(axis, 0).flatten(1).sum(1).clamp(min=1)

    def _losses(self, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool) -> Tensor:
        """The criterion's losses; those of samples ``alone``, if it can be asked for them. An error
        if it has changed a buffer of its own."""
        watch = self._buffers if torch.is_grad_enabled() else None
        if watch is not None:
            watch.before_forward(modules := [*self.criterion.modules()])
        if not (alone and self._is_attribute):
            if alone and "reduction" in self._takes:
                kwargs = {**kwargs, "reduction": "none"}
            found = self.criterion(*args, **kwargs)
        else:
            before = self.criterion.reduction
            self.criterion.reduction = "none"
            try:
                found = self.criterion(*args, **kwargs)
            finally:
                self.criterion.reduction = before
        if watch is not None:
            watch.after_forward(modules)
        if not isinstance(found, Tensor):
            raise InvalidType(
                f"FC462 criterion ({self._name}): found {type(found).__name__}; expected a "
                "tensor: a loss for each sample, or a scalar."
            )
        return found

    def _refuse_broadcast(self, args: tuple[Any, ...], losses: Tensor) -> None:
        """``ValueError`` for more losses than outputs, by a target whose axis 0 is not theirs: a
        sample's losses would be of the targets of all others."""
        output = args[0] if args else None
        if not isinstance(output, Tensor) or losses.numel() <= output.numel():
            return
        for target in args[1:]:
            if not isinstance(target, Tensor) or target.numel() < 2:
                continue
            lacks, each = output.dim() - target.dim(), target.shape[:1] == output.shape[:1]
            if not lacks and each:
                continue  # more targets than outputs, each sample with its own
            line = "target.expand(len(output), *target.shape)"  # of no sample
            if lacks == 1 and each:
                line = "target.unsqueeze(1)"
            elif target.numel() == output.numel():
                line = "target.view_as(output)"
            shapes = " and ".join(str([*x.shape]) for x in (output, target))
            raise InvalidValue(
                f"FC460 criterion ({self._name}): found losses of shape {[*losses.shape]}, for an "
                f"output and a target of shapes {shapes}; expected no more losses than outputs. "
                "The two are broadcast against each other. Give the target the output's axes:\n"
                f"    loss = criterion(output, {line})"
            )

    def _counted(self, args: tuple[Any, ...], kwargs: dict[str, Any], losses: Tensor) -> Any:
        """Which losses count, where targets say that some do not; ``None``: all of them."""
        target: Any = kwargs.get("target", args[1] if len(args) > 1 else None)
        index = getattr(self.criterion, "ignore_index", self._takes.get("ignore_index"))
        index = kwargs.get("ignore_index", index)
        shapes = losses.shape, losses.flatten(0, 1).shape  # the latter with shape=
        is_label = isinstance(target, Tensor) and not target.is_floating_point()
        if not is_label or target.shape not in shapes or not isinstance(index, int):
            return None
        return torch.ne(target, index).reshape(losses.shape)

    def _compare(self, own: Tensor, reduced: Tensor) -> None:
        """Refuse a criterion whose ``own`` scalar is another number than its ``reduced`` losses."""
        if not bool(own.isfinite() & reduced.isfinite()):
            return
        slack = 1e-3 if own.dtype in (torch.float32, torch.float64) else 3e-2
        if torch.allclose(own.double(), reduced.double(), rtol=slack, atol=1e-6):
            self._is_known = True
            return
        raise InvalidValue(
            f"FC441 criterion ({self._name}): found {float(own):.6g} with its own reduction, and "
            f"{float(reduced):.6g} by reducing its losses of samples: it divides by something else "
            "than their number. Divide each sample's loss by what belongs to that sample. If the "
            "divisor does not depend on samples, train on the sum:\n"
            "    make_private(criterion=lambda *args: criterion(*args), loss_reduction='sum', ...)"
        )
