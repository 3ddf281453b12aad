"""Runs of a model that leave no trace: buffers, attributes and random numbers are put back."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ModelsOwnError(Exception):
    """What a model raised where it was run: its own error is the cause."""


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Errors in here, where nothing but a model runs, are ``ModelsOwnError``; those of this
    library stay what they are, and so do those of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if type(error).__module__.startswith(__name__.partition(".")[0]):
            raise
        raise ModelsOwnError(f"{type(error).__name__}: {error}") from error


class Holdings:
    """What the modules of a model hold, to be put back as often as it is run.

    Buffers, attributes, containers among the attributes (a model that hooks its own layers once,
    and notes that in a list, would otherwise do it again in the next forward), and generators.
    Objects stay as forward leaves them: nobody knows what else belongs to their state.
    """

    def __init__(self, root: nn.Module):
        modules = self._modules = list(root.modules())
        self._before = [(vars(module).copy(), module._buffers.copy()) for module in modules]
        values: list[Any] = []
        for attributes, _ in self._before:
            values += [x for name, x in attributes.items() if name not in _OF_MODULES]
        self._states = [_put_back(x) for x in values if isinstance(x, _generators())]
        found = _contents([x for x in values if isinstance(x, _HOLDERS)])
        self._held = [pair for pair in found if isinstance(pair[0], _CONTAINERS)]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put all of it back; writing in place hits copies of buffers."""
        copies: dict[int, Tensor] = {}
        try:
            for module in self._modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        copies[id(buffer)] = copies.get(id(buffer), buffer.detach().clone())
                        module._buffers[name] = copies[id(buffer)]
            yield
        finally:
            for module, (attributes, buffers) in zip(self._modules, self._before, strict=True):
                now = vars(module)
                for name in now.keys() - attributes.keys():
                    del now[name]
                now.update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            for container, content in self._held:
                _refill(container, content)
            for put_back, state in self._states:
                put_back(state)


def untouched(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put back what the modules of a model hold."""
    return Holdings(root).kept()


def _generators() -> tuple[type, ...]:
    """Kinds of generators, of PyTorch, Python and, where it is in use, NumPy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return torch.Generator, random.Random
    return torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState


def _put_back(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """What sets a generator's state, and the state that it has."""
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    held = getattr(generator, "bit_generator", generator)
    return held.__setstate__, held.__getstate__()


#: Attributes of every module that are not looked into.
_OF_MODULES = "_parameters", "_buffers", "_modules"

#: Entries of a container that is looked into: not a vocabulary.
_LOOKED_INTO = 1000


#: Containers, and what may hold some.
_CONTAINERS = dict, list, set, deque
_HOLDERS = (*_CONTAINERS, tuple)

#: Of these it is known what their truth value says; and what empty ones hold.
_PLAIN: frozenset[type] = frozenset((dict, OrderedDict, list, set))
_NOTHING: list[Any] = []


def _contents(values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Every container and tuple among these values, and in those among them, with its content."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    while values:
        value = values.pop()
        if type(value) in _PLAIN and not value:  # most hooks
            found[id(value)] = value, _NOTHING
        elif id(value) not in found and isinstance(value, _HOLDERS):
            found[id(value)] = value, _content(value)
            content = found[id(value)][1]
            if len(content) <= _LOOKED_INTO:
                values += [x for x in content if isinstance(x, _HOLDERS)]
    return [*found.values()]


# The functions of the base types: those of a subclass may refuse (frozen), copy or count.


def _base_of(value: Any) -> Any:
    return next(kind for kind in (OrderedDict, *_HOLDERS) if isinstance(value, kind))


def _content(value: Any) -> list[Any]:
    """What a container holds, in order: keys and values of a dict by turns."""
    if isinstance(value, dict):
        base = _base_of(value)
        return [x for pair in base.items(value) for x in pair]
    return [*_base_of(value).__iter__(value)]


def _refill(container: Any, content: list[Any]) -> None:
    """Have a container hold what it held, if it holds anything else."""
    if content is _NOTHING and not container:
        return
    now = _content(container)
    if len(now) == len(content) and all(map(operator.is_, now, content)):
        return
    base = _base_of(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, value in zip(content[::2], content[1::2], strict=True):
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, content)


@contextlib.contextmanager
def without_gradients(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Nothing in ``p.grad`` at first; afterwards what was there before."""
    before = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextlib.contextmanager
def generators_put_back(devices: list[torch.device]) -> Iterator[None]:
    """Put back the generators of PyTorch, Python and, where it is in use, NumPy."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def random_state(devices: list[torch.device], seed: int) -> Iterator[None]:
    """Seed these generators; put them back."""
    with generators_put_back(devices):
        torch.random.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        yield


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
