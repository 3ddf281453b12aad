"""Which module owns a parameter, and which parts of a parameter mean something on their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from flash_clipping.diagnostics.batch import BadBatchError

_QKV = ("q", "k", "v")
_LSTM = ("input", "forget", "cell", "output")
_GRU = ("reset", "update", "new")
_RECURRENT = re.compile(r"(weight|bias)(_ih|_hh)?(_l\d+)?(_reverse)?$")

#: By the name of a class: which of its parameters have parts, and which.
_KNOWN: dict[str, tuple[re.Pattern[str], tuple[str, ...]]] = {
    "MultiheadAttention": (re.compile(r"in_proj_(weight|bias)$"), _QKV),
    **dict.fromkeys(("LSTM", "LSTMCell", "DPLSTM", "DPLSTMCell"), (_RECURRENT, _LSTM)),
    **dict.fromkeys(("GRU", "GRUCell", "DPGRU", "DPGRUCell"), (_RECURRENT, _GRU)),
}

#: A recurrent layer may keep its weights in linear layers of its cells, so many levels below.
_LEVELS = 4


class Owned(NamedTuple):
    """A parameter, and the module that has it."""

    name: str
    param: nn.Parameter
    path: str
    owner: nn.Module


@dataclass(frozen=True)
class Sections:
    """The equal parts of a parameter, along an axis: that of its output features."""

    names: Sequence[str]
    axis: int

    def of(self, x: Tensor, behind: int = 0) -> Sequence[Tensor]:
        """The parts of a tensor of the parameter's shape, ``behind`` other axes."""
        return x.chunk(len(self.names), self.axis + behind)


def owned_parameters(model: nn.Module) -> Iterator[Owned]:
    """The parameters in the model's order, each once."""
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, (path, module))
    for name, param in model.named_parameters():
        yield Owned(name, param, *owners.get(param, (name.rpartition(".")[0], model)))


def all_sections(model: nn.Module, asked_for: Mapping[str, Sequence[str]]) -> dict[str, Sections]:
    """The sections of parameters, by name: those that were asked for, and those that are known.

    Raises:
        BadBatchError: a name is of no parameter, or parts cannot be equal.
    """
    found = {}
    parameters = {owned.name: owned for owned in owned_parameters(model)}
    for name in asked_for:
        if name not in parameters:
            raise BadBatchError(
                f"sections names the parameter {name!r}, which the model does not have."
            )
    for name, owned in parameters.items():
        # transformers' Conv1D is transposed.
        axis = int(type(owned.owner).__name__ == "Conv1D" and owned.param.dim() == 2)
        size = owned.param.shape[axis] if owned.param.dim() else 0
        if name in asked_for:
            parts = asked_for[name]
            if size % len(parts):
                raise BadBatchError(
                    f"sections gives {name} {len(parts)} equal parts, but its axis {axis} has "
                    f"{size} entries."
                )
        else:
            parts = _known(model, owned)
        if parts and size and size % len(parts) == 0:
            found[name] = Sections(parts, axis)
    return found


def _known(model: nn.Module, owned: Owned) -> Sequence[str]:
    """Names of the equal parts of a parameter of a known layer."""
    local = next((n for n, p in owned.owner._parameters.items() if p is owned.param), owned.name)
    steps = owned.path.split(".") if owned.path else []
    for depth in range(len(steps), max(len(steps) - _LEVELS, -1), -1):
        for kind in type(model.get_submodule(".".join(steps[:depth]))).__mro__:
            pattern, parts = _KNOWN.get(kind.__name__, (None, ()))
            if pattern is not None and pattern.match(local):
                return parts
    return ()
