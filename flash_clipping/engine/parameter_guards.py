"""Parameters that no tap serves: a gradient that autograd brings there went past every tap, and
layers that come after wrapping have none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import nn

from flash_clipping.capture.factor_source import Guard
from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.unsupported import refuse_complex
from flash_clipping.errors import FlashClippingError, to_freeze_parameters

_PAST_THE_TAP = (
    "added without being clipped. Use it in its own module's forward, which others call; or detach "
    "it where it is used elsewhere. For a penalty on weights, use the optimizer's weight_decay. A "
    "weight that a hook computes needs torch.nn.utils.parametrize instead; after pruning, "
    "torch.nn.utils.prune.remove(module, name). Freeze it, and train adapters (LoRA on the model's "
    "linear layers)."
)


_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")


class TrainableParameters:
    """The parameters of these modules that are trainable now, each once, in their order: the same
    list again while nothing changes."""

    def __init__(self, owners: Sequence[nn.Module]):
        self.owners = owners
        self._seen: tuple[list[int], list[bool]] | None = None
        self._found: list[nn.Parameter] = []

    def __call__(self) -> list[nn.Parameter]:
        # Every step asks twice: walking the module tree takes milliseconds, and a loop a tenth.
        held = [*chain.from_iterable(map(dict.values, map(_PARAMETERS, self.owners)))]
        is_trainable = [*map(getattr, held, repeat("requires_grad"), repeat(False))]
        seen = [*map(id, held)], is_trainable
        if seen != self._seen:
            self._found = [*dict.fromkeys(compress(held, is_trainable))]
            self._seen = seen
        return self._found


class ParameterGuards:
    """Watches the trainable parameters of a wrapped model, and lets ``p.grad`` hold sums in fp32.

    Args:
        root: the model.
        trainable: gives its trainable parameters.
        session: what its taps share.
        sum_dtype: ``"float32"`` or ``"parameter"``: of clipped sums in ``p.grad``.
        handles: hooks are added to these; who removes those ends the watch.

    Attributes:
        count: how many parameters are watched.
    """

    def __init__(
        self,
        root: nn.Module,
        trainable: TrainableParameters,
        session: ClippingSession,
        sum_dtype: str,
        handles: list[Any],
    ):
        self.root = root
        self.trainable = trainable
        self.session = session
        self.sum_dtype = sum_dtype
        self.handles = handles
        self.count = 0
        self._guarded: dict[int, nn.Parameter] = {}
        self._looked_at: list[nn.Parameter] | None = None
        #: Parameters whose gradients had to have a dtype before, and which.
        self._grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []

    def watch_new(self) -> bool:
        """Watch parameters that have become trainable since the last look; whether any has.

        Raises:
            FlashClippingError: one is complex.
            NotImplementedError: one is in 16 bits, and this PyTorch has no sums in fp32 for it.
        """
        found, guarded = self.trainable(), self._guarded
        if found is self._looked_at:
            return False
        new = {id(param): param for param in found if id(param) not in guarded}
        names = {id(param): name for name, param in self.root.named_parameters()} if new else {}
        for key, param in new.items():
            refuse_complex(names[key], param)
            self._allow_sums(names[key], param)
            why = _PAST_THE_TAP + to_freeze_parameters(names[key])
            guard = Guard(names[key], why, self.session)
            self.handles.append(param.register_hook(guard.__getitem__))
            guarded[key] = param  # the last: what was refused is looked at again
            self.count += 1
        self._looked_at = found
        return bool(new)

    def _allow_sums(self, name: str, param: nn.Parameter) -> None:
        """Let ``param.grad`` hold sums in fp32."""
        if param.dtype not in (torch.bfloat16, torch.float16) or self.sum_dtype == "parameter":
            return
        self._grad_dtypes.append((param, param.grad_dtype))
        param.grad_dtype = None  # any

    def remove(self) -> None:
        """Gradients have to have the dtype again that they had to have before."""
        self._guarded, self._looked_at = {}, None
        while self._grad_dtypes:
            param, dtype = self._grad_dtypes.pop()
            if param.grad is None or dtype in (None, param.grad.dtype):
                param.grad_dtype = dtype


class Structure:
    """The modules and parameters of a model as it was wrapped.

    ``root`` is the wrapper, or the model itself where it is not wrapped; ``modules`` are all that
    were there when this was last looked at.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self._look()
        #: Modules that had parameters, and so have a tap, or a parent that serves them.
        self._served = {
            module
            for module in self.modules
            if any(param is not None for param in module._parameters.values())
        }

    def _look(self) -> None:
        self.modules = [*self.root.modules()]
        self._parts = self._parts_now()

    def _parts_now(self) -> list[nn.Module | nn.Parameter | None]:
        """Children and parameters of all modules that are known."""
        # Flat, without a loop in Python: walking the tree of modules takes milliseconds a step.
        held = chain(map(_CHILDREN, self.modules), map(_PARAMETERS, self.modules))
        return [*chain.from_iterable(map(dict.values, filter(None, held)))]

    def check(self) -> None:
        """Raise ``FlashClippingError`` for trainable parameters that have come since the model was
        wrapped, in a module that has no tap."""
        before, now = self._parts, self._parts_now()
        # Lists of tensors cannot be compared by ==, and modules need not be.
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return
        for path, module in self.root.named_modules():
            if module in self._served:
                continue
            for name, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    where = path.removeprefix("_module.") or "the model"
                    raise FlashClippingError(
                        f"{where} ({type(module).__name__}): its parameter {name!r} came after the "
                        "model was wrapped, so its gradients would not be clipped. Wrap the model "
                        "(make_private) when it is complete: take the wrapper off with "
                        "to_standard_module() (or cleanup()), change the model, and wrap it again. "
                        "What is no part of the model goes elsewhere than onto the wrapper."
                    )
        self._look()
