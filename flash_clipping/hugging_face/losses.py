"""Losses that models of ``transformers`` compute: of each sample's tokens, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.token_losses import part_of, per_sample_loss
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError

#: Loss functions of transformers that are means over tokens, and whether they shift labels.
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}

#: Arguments, besides labels, with which models of transformers compute losses that samples share.
_SHARED_BY = {"return_loss", "output_router_logits"}

_INSTEAD = """ Take the loss of each sample's own labels instead of the model's:
    output = model(**batch)
    loss = flash_clipping.per_sample_loss(output, batch["labels"]{shift}).{reduction}()"""

#: Why samples share a model's own loss, with what to do.
_WHY = {
    "return_loss": "(return_loss=True) compares the samples of a batch with each other. Use a loss "
    "in which a sample stands alone, or make each group of samples that are compared one privacy "
    "unit of fixed size (docs/units.md).",
    "aux_loss": "holds an aux_loss, which balances the experts' loads over all samples of the "
    "batch. Call the model with output_router_logits=False, and balance each sample by itself "
    "(docs/mixture-of-experts.md).",
    "positions": "of {labels} is a mean over rows, whose parts are units. Compute losses of "
    "positions from the logits, as docs/units.md does.",
    "objects": "of {labels} may divide by what is counted in all samples of the batch, boxes or "
    f"masks. Compute the loss of every sample from the model's other outputs.{ONE_BY_ONE}",
    "tokens": "of {labels} is a mean over the labels of the whole batch, so that each sample's "
    f"gradient depends on how many labels the others have.{_INSTEAD}",
}


class SampleMeans:
    """Stands in for a model's own loss function: means over samples of the means over their tokens.
    Where nothing is recorded, the loss function itself."""

    def __init__(self, module: Any, path: str, session: ClippingSession):
        self.module, self.path, self.session = module, path, session
        self.original: Callable[..., Tensor] = module.loss_function
        before = {*vars(module)}
        module.loss_function = self  # its public setter
        self._added = [name for name in vars(module) if name not in before]
        self.shift = _SHIFTS[self.original.__name__]
        #: How often a recorded loss was computed.
        self.calls = 0

    def remove(self) -> None:
        self.module.loss_function = self.original
        for name in self._added:
            delattr(self.module, name)

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.session.recording:
            return self.original(logits, labels, *args, **kwargs)
        if (items := kwargs.get("num_items_in_batch")) is not None:
            raise FlashClippingError(
                f"FC442 {self.path or 'the model'}: found num_items_in_batch "
                f"({type(items).__name__}). A number of tokens that is counted in the batch makes "
                "one sample's gradient depend on the others. Leave it out, and each sample's loss "
                "is the mean over its own labels."
            )
        self.calls += 1
        shifted = kwargs.get("shift_labels") if self.shift else None
        losses_B = per_sample_loss(
            logits.float(),  # as the original does
            labels if shifted is None else shifted,
            shift=self.shift and shifted is None,
            ignore_index=kwargs.get("ignore_index", -100),
        )
        return losses_B.mean() if self.session.options.loss_reduction == "mean" else losses_B.sum()


class ModelLosses:
    """The losses that models of transformers compute themselves: the root, or what is inside of it.

    Hooks are added to ``handles``.
    """

    def __init__(self, root: nn.Module, session: ClippingSession, handles: list[Any]):
        self.session = session
        #: The stand-ins for the models' loss functions.
        self.stand_ins: list[SampleMeans] = []
        self.penalised = has_penalty(root)
        for path, module in root.named_modules():
            cls = type(module)
            if not is_of(cls, "transformers"):
                continue
            _, *parameters = inspect.signature(cls.forward).parameters
            if not any(name.endswith("labels") or name in _SHARED_BY for name in parameters):
                continue
            after = partial(self.after_forward, path, parameters)
            handles.append(module.register_forward_hook(after, with_kwargs=True))
            original = getattr(module, "loss_function", None)
            is_known = is_of(original, "transformers") and "labels" in parameters
            if is_known and getattr(original, "__name__", "") in _SHIFTS:
                self.stand_ins.append(SampleMeans(module, path, session))
        if self.stand_ins or self.penalised:
            first = partial(root.register_forward_pre_hook, with_kwargs=True, prepend=True)
            handles.append(first(self.before_forward))  # before anything is checked

    def remove(self) -> None:
        while self.stand_ins:
            self.stand_ins.pop().remove()

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise ``FlashClippingError`` in a forward whose loss holds a penalty on weights, which no
        layer could be found to be at fault for."""
        for stand_in in self.stand_ins:
            stand_in.calls = 0
        if self.penalised and self.session.mode.enabled and kwargs.get("labels") is not None:
            reduction = self.session.options.loss_reduction
            raise FlashClippingError(
                "FC443 the model: its own loss holds AdaLoRA's penalty on weights "
                "(orth_reg_weight), whose gradient is no sample's."
                + _INSTEAD.format(shift=", shift=True", reduction=reduction)
            )

    def after_forward(
        self,
        path: str,
        parameters: Sequence[str],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Let a backward pass fail that reaches a loss which samples share; ``parameters``: the
        names of the arguments of the module's forward, in order."""
        session = self.session
        # Compiled code takes no hooks of tensors. A proof goes backward from losses itself, and
        # sees what is compiled as well.
        if torch.compiler.is_compiling() or not session.recording or session.mode.comparing:
            return
        loss = loss_of(output)
        if loss is None or not loss.requires_grad:
            return
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        why, labels = self._shared(path, module, given, output)
        if why:
            reduction = session.options.loss_reduction
            reason = _WHY[why].format(labels=labels, shift="", reduction=reduction)

            def refuse(grad: Tensor | None) -> None:
                # Where the model is one function of autograd's (mode="two_pass"), hooks of all
                # outputs are called: those that no gradient reaches get None.
                if session.mode.enabled and grad is not None:
                    raise FlashClippingError(f"FC440 {path or 'the model'}: its own loss {reason}")

            loss.register_hook(refuse)

    def _shared(
        self, path: str, module: nn.Module, given: Mapping[str, Any], output: Any
    ) -> tuple[str, str]:
        """Why samples share the loss, and by which labels; empty if they do not, as far as is
        known."""
        if given.get("return_loss"):
            return "return_loss", ""
        weight = getattr(module, "router_aux_loss_coef", 1.0)
        if isinstance(part_of(output, "aux_loss"), Tensor) and weight:
            return "aux_loss", ""
        by_position = self.session.rows.positions is not None
        inside = f"{path}." if path else ""
        means = (s.calls and f"{s.path}.".startswith(inside) for s in self.stand_ins)
        if not by_position and any(means):
            return "", ""
        for name, labels in given.items():
            if not name.endswith("labels") or labels is None:
                continue
            if not isinstance(labels, Tensor):
                return "objects", f"{name} ({type(labels).__name__})"
            if by_position:
                return "positions", name
            is_of_tokens = labels.dim() > 1 and labels.shape[1] > 1
            if is_of_tokens and len(labels) and not labels.is_floating_point():
                return "tokens", f"{name} {tuple(labels.shape)}"
        return "", ""


def has_penalty(model: Any) -> bool:
    """Whether PEFT's AdaLoRA adds a penalty on its weights to the model's own loss."""
    adapters = getattr(model, "peft_config", {})
    return any(hasattr(config, "orth_reg_weight") for config in adapters.values())


def is_of(thing: Any, library: str) -> bool:
    """Whether a class, or one that it derives from, or a function comes from a library."""
    kinds = thing.__mro__ if isinstance(thing, type) else (thing,)
    modules = [getattr(kind, "__module__", None) or "" for kind in kinds]
    return any(name.partition(".")[0] == library for name in modules)


def loss_of(output: Any) -> Tensor | None:
    """The loss in an output of transformers: by its name, or first in a tuple."""
    loss = output[0] if isinstance(output, tuple) and output else part_of(output, "loss")
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None
