"""Runs of a model that leave no trace: buffers, attributes and random numbers are put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: What a model that does not run on another batch size, or on this one, raises.
MODELS_OWN = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError)


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Put back buffers and attributes of all modules; writing in place hits copies of buffers.

    What dicts and lists among the attributes hold is put back as well: a model that hooks its own
    layers once, and notes that on itself, would otherwise do it again in the next forward.
    """
    modules = list(root.modules())
    before = [(vars(module).copy(), module._buffers.copy()) for module in modules]
    held = [
        (value, value.copy())
        for attributes, _ in before
        for name, value in attributes.items()
        if isinstance(value, dict | list) and name not in ("_parameters", "_buffers", "_modules")
    ]
    copies: dict[int, Tensor] = {}
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copies[id(buffer)] = copies.get(id(buffer), buffer.detach().clone())
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            put_back(module, attributes, buffers)
        for value, content in held:
            if isinstance(value, dict):
                value.clear()
                value.update(content)
            else:
                value[:] = content


def put_back(
    module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Tensor | None]
) -> None:
    """Give a module these attributes and buffers, and no others."""
    module._buffers.clear()
    module._buffers.update(buffers)
    now = vars(module)
    for name in now.keys() - attributes.keys():
        del now[name]
    now.update(attributes)


@contextlib.contextmanager
def random_state(devices: list[torch.device], seed: int) -> Iterator[None]:
    """Seed the generators of PyTorch, Python and, where it is in use, NumPy; put them back."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            torch.random.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def without_activations() -> Any:
    """Autograd that saves nothing: the first step needs no more memory than the others."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _nothing_saved)


def _nothing_saved(_: None) -> Tensor:
    raise RuntimeError("this forward has no backward")


class PlainCheckpoint:
    """Re-entrant checkpoints hide from taps what was computed by tapped layers: see through."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)
