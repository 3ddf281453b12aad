"""Which module owns a parameter, and which parts of a parameter mean something on their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from flash_clipping.diagnostics.batch import BadBatchError

_QKV = ("q", "k", "v")
_LSTM = ("input", "forget", "cell", "output")
_GRU = ("reset", "update", "new")
_SECTIONS: dict[str, tuple[re.Pattern[str], tuple[str, ...]]] = {
    "MultiheadAttention": (re.compile(r"in_proj_(weight|bias)$"), _QKV),
    **{
        name: (re.compile(r"(weight|bias)(_ih|_hh)?(_l\d+)?(_reverse)?$"), gates)
        for gates, names in (
            (_LSTM, ("LSTM", "LSTMCell", "DPLSTM", "DPLSTMCell")),
            (_GRU, ("GRU", "GRUCell", "DPGRU", "DPGRUCell")),
        )
        for name in names
    },
}


def sections_of(model: nn.Module, name: str, param: nn.Parameter) -> tuple[str, ...]:
    """Names of the equal parts along axis 0 of a parameter of a known layer."""
    path, local = next(
        (
            (path, local)
            for path, module in model.named_modules()
            for local, own in module._parameters.items()
            if own is param
        ),
        ("", name),
    )
    # A recurrent layer may keep its weights in linear layers of its cells.
    steps = path.split(".") if path else []
    for depth in range(len(steps), -1, -1):
        owner = model.get_submodule(".".join(steps[:depth]))
        for cls in type(owner).__mro__:
            pattern, parts = _SECTIONS.get(cls.__name__, (None, ()))
            if pattern is not None and pattern.match(local):
                return parts if param.dim() and param.shape[0] % len(parts) == 0 else ()
        if depth < len(steps) - 2:
            break
    return ()


def all_sections(
    model: nn.Module, asked_for: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Names of the equal parts of parameters: those that were asked for, and those that are known.

    Raises:
        BadBatchError: a name is of no parameter, or parts cannot be equal.
    """
    sections = dict(asked_for)
    names = dict(model.named_parameters())
    for name in sections:
        if name not in names:
            raise BadBatchError(
                f"sections names the parameter {name!r}, which the model does not have."
            )
    for name, param in names.items():
        if name not in sections:
            found = sections_of(model, name, param)
            if found:
                sections[name] = found
    for name, parts in sections.items():
        axis = section_axis(model, name)
        if names[name].shape[axis] % len(parts):
            raise BadBatchError(
                f"sections gives {name} {len(parts)} equal parts, but its axis {axis} has "
                f"{names[name].shape[axis]} entries."
            )
    return sections


def section_axis(model: nn.Module, name: str) -> int:
    """Output features are axis 0, except in ``transformers``' transposed ``Conv1D``."""
    path, _, _ = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:  # a layer that renames its parameters
        return 0
    transposed = (
        type(owner).__name__ == "Conv1D" and dict(model.named_parameters())[name].dim() == 2
    )
    return 1 if transposed else 0


def owned_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, str, nn.Module]]:
    """(name, parameter, path of the owner, owner) in the model's order, each parameter once."""
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, (path, module))
    return [
        (name, param, *owners.get(param, (name.rpartition(".")[0], model)))
        for name, param in model.named_parameters()
    ]
