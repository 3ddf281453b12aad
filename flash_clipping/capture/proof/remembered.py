"""What was shown for one model holds for the next that is made in the same way, in one process:
clients of federated rounds, folds of a cross-validation, trials of a search.

Two models are made in the same way if they pickle to the same bytes, values of parameters left out,
and their classes and functions are the same objects with the same code. A model that does not
pickle is not remembered.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn
from torch.utils.hooks import RemovableHandle

from flash_clipping.capture.proof.gate import Gate
from flash_clipping.capture.proof.knowledge import Knowledge
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap

#: How many kinds of models are remembered, and how many bytes of each.
KINDS, LARGEST = 16, 2**20

#: Attributes of every module that hold hooks, and where what wraps a model is.
_HOOKS = {name for name, kept in vars(nn.Module()).items() if "_hooks" in name and kept is not None}
_OURS = "flash_clipping.capture.", "flash_clipping.engine."

#: How many models were made in a way, and what was shown of one.
_models: Counter[Hashable] = Counter()
_known: dict[Hashable, tuple[list[Any], Knowledge, Gate]] = {}


class _Pickler(pickle.Pickler):
    """Pickles modules, parameters, classes and functions as their numbers, what wraps a
    model as its class. ``held``: classes, functions, and code."""

    def __init__(self, file: io.BytesIO, parts: list[nn.Module | nn.Parameter]):
        super().__init__(file, protocol=4)
        self.file = file
        self.numbers, self.held = {id(part): n for n, part in enumerate(parts)}, list[Any]()

    def persistent_id(self, value: Any) -> Any:
        if (number := self.numbers.get(id(value))) is not None:
            return number
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            bases = value.__mro__ if isinstance(value, type) else ()
            own = [vars(base) for base in bases if not base.__module__.startswith("torch.")]
            for part in (value, *[part for each in own for part in each.values()]):
                self.held += part, getattr(part, "__code__", None)
            return self.numbers.setdefault(id(value), len(self.numbers))
        if self.file.tell() > LARGEST or getattr(value, "nbytes", 0) > LARGEST:
            raise pickle.PicklingError
        if isinstance(value, Tensor) and not value.requires_grad:
            values = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return type(value), value.dtype, value.device, value.shape, values
        if isinstance(value, Tap):
            kind = type(value), type(value.rule), (value.by_function, value.loops), value.borrows
            return *kind, value.instance_forward
        if isinstance(value, RemovableHandle) or type(value).__module__.startswith(_OURS):
            return type(value), getattr(value, "original", None)
        if isinstance(value, nn.Module | Tensor):  # none of the model's
            raise pickle.PicklingError
        return None


def key_of(root: nn.Module, inputs: list[Tensor], *options: Any) -> tuple[Hashable, list[Any]]:
    """How this model is made and called, and what must stay alive. Raises as pickling does."""
    modules, params = [*root.modules()], [*root.parameters()]
    pickler = _Pickler(file := io.BytesIO(), [*modules, *params])
    pickler.dump(options)
    for x in inputs:
        cast = is_autocast_enabled(x.device.type), get_autocast_dtype(x.device.type)
        pickler.dump((x.dtype, x.device, x.requires_grad, *cast))
    for param in params:
        pickler.dump((type(param), param.shape, param.dtype, param.device, param.requires_grad))
    for module in modules:
        held = dict(vars(module))
        for name in held.keys() & _HOOKS:  # by numbers, which go up
            held[name] = [*held[name].values()]
        pickler.dump((type(module), held))
    return (file.getvalue(), *map(id, pickler.held)), pickler.held


def recall(key: Hashable, session: ClippingSession) -> Gate | None:
    """Tell a new model's session what was shown for one that was made in the same way; what is
    known of its outputs. ``None`` if there was none, or whenever there are twice as many: what one
    proof does not see, the next may."""
    if key not in _models and len(_models) >= KINDS:
        forget()
    _models[key] += 1
    if not _models[key] & (_models[key] - 1):
        _known.pop(key, None)
    if (found := _known.get(key)) is None:
        return None
    session.known, gate = copy.deepcopy(found[1:])
    return gate


def remember(key: Hashable, held: list[Any], session: ClippingSession, gate: Gate) -> None:
    """Keep what was shown for a model."""
    _known[key] = held, *copy.deepcopy((session.known, gate))


def forget() -> None:
    """Forget all models."""
    _models.clear()
    _known.clear()
