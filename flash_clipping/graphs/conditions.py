"""When a replay is what the step is: keys of graphs (the layout of arguments, and everything that
Python decides by on the way), and a look at the step before it is captured."""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping._compat import (
    global_hooks,
    hooks_of_module,
    hooks_of_parameter,
    memory_id,
    pytree,
)
from flash_clipping.capture.tap import Tap
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.errors import FlashClippingError
from flash_clipping.ops.runtime.backend import matmul_settings

#: Types of attributes that a module's forward may decide by.
SETTINGS = (bool, int, float, str)


class Key(NamedTuple):
    """What a graph is found by: the layout of arguments, and all else that Python decides by."""

    layout: tuple[Any, ...]
    hooks: Hashable
    settings: Hashable


def key_of(
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    modules: Sequence[nn.Module],
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
) -> Key:
    """The key of a call with these arguments, of private ``models`` among ``modules``."""
    bounds: list[Hashable] = []
    convolutions: Any = torch.backends.cudnn
    # The newer settings: once these are used, PyTorch refuses to tell the older.
    precise = [place.fp32_precision for place in (*matmul_settings(), convolutions.conv)]
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    for wrapped in models:
        bound, session = wrapped.max_grad_norm, wrapped._session
        bounds += [tuple(bound) if isinstance(bound, Sequence) else bound, wrapped.clipping]
        bounds += [wrapped.loss_reduction, session.mode.enabled, session.options.backend]
    settings = (
        torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        *precise,
        torch.are_deterministic_algorithms_enabled(),
        *bounds,
        *map(id, modules),
        *[_Same(kind.forward) for kind in kinds],
        *[_settings(module) for module in modules],
        *[(id(p), p.requires_grad, _place(p)) for p in own_tensors(modules, "_parameters")],
        *[_place(buffer) for buffer in own_tensors(modules, "_buffers")],
    )
    padded = tuple(wrapped._session.rows.padding.rows for wrapped in models)
    layout = (str(structure), padded, *map(_layout, leaves))
    return Key(layout, hooks_of(modules), settings)


def are_alike(one: Key, other: Key) -> bool:
    """Whether two calls differ in the sizes of tensors at most."""
    return one[1:] == other[1:] and _kinds(one) == _kinds(other)


def _kinds(key: Key) -> list[Hashable]:
    structure, padded, *leaves = key.layout
    kinds = [(len(x[0]), x[2]) if isinstance(x[0], torch.Size) else x for x in leaves]
    return [structure, [rows is None for rows in padded], kinds]


def hooks_of(modules: Sequence[nn.Module]) -> Hashable:
    """The hooks of all modules alike, of each, and of its parameters, by PyTorch's numbers."""
    return (
        *chain.from_iterable(global_hooks()),
        *[tuple(chain.from_iterable(hooks_of_module(module))) for module in modules],
        *[tuple(hooks_of_parameter(param) or ()) for param in own_tensors(modules, "_parameters")],
    )


def own_tensors(modules: Sequence[nn.Module], kind: str) -> list[Tensor]:
    """Their parameters, or buffers, module by module."""
    return [x for module in modules for x in getattr(module, kind).values() if x is not None]


def _layout(leaf: Any) -> Hashable:
    """All of an argument but the values of tensors."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), repr(leaf)  # 0.0 and -0.0 are equal


class _Same:
    """A key that is equal for the same object, which it holds: no other comes in its place."""

    def __init__(self, held: Any):
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held


def _place(tensor: Tensor) -> Hashable:
    """The memory of a tensor of the model, and how it is read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _settings(module: nn.Module) -> Hashable:
    """What a module's forward may decide by: its plain attributes (``training``, ``p``, ``eps``),
    lists and dicts of such; or a forward of its own."""
    if isinstance(module, GradSampleHooksFlashClipping):
        return ()  # it counts backward passes; what it decides by is told one by one
    found: list[Hashable] = [module.training]
    for name, value in own_attributes(module):
        kind = type(value)
        if kind in SETTINGS:
            found.append((name, value))
        elif name == "forward":
            # A tap has several ways, of which each leaves the same.
            tap = getattr(value, "__self__", value)
            found.append((name, _Same(tap if isinstance(tap, Tap) else value)))
        elif kind in (list, tuple, dict) and value:
            found.append((name, _plain(value)))  # adapters keep theirs so
    return tuple(found)


def _plain(held: Any) -> Hashable | None:
    """What a list, tuple or dict holds, if these are settings, or pairs of a name and one."""
    values = held.items() if isinstance(held, dict) else held
    leaves = [x for each in values for x in (each if isinstance(each, tuple) else (each,))]
    return tuple(leaves) if all(type(x) in SETTINGS for x in leaves) else None


_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module besides those that every module has, which are most."""
    return [pair for pair in vars(module).items() if pair[0] not in _EVERY_MODULE]


def tensors_held(value: Any) -> Sequence[Tensor]:
    """The tensors that an attribute is, or holds in lists, tuples and dicts."""
    if isinstance(value, list | tuple | dict) and _plain(value) is None:
        return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return [value] if isinstance(value, Tensor) else ()


#: Types that arguments may hold besides tensors: these are known by their values.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def are_odd(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors that no copy can stand in for: gradients flow back to them, or
    they are no plain memory; or hold nothing."""
    return any(
        x.requires_grad or type(x) is not Tensor or x.layout != torch.strided or not x.numel()
        for x in tensors
    )


def may_be_nobody(tensors: Sequence[Tensor], models: Sequence[Any]) -> bool:
    """Whether these may be of a batch without samples, whose row is no sample of the capture's."""
    sessions = [wrapped._session for wrapped in models]
    if any(session.rows.drawn == 0 for session in sessions):
        return True
    has_one = any(1 in x.shape[:2] for x in tensors)
    return has_one and any(session.rows.draws.have_nobody for session in sessions)


# -- a step is checked once before it is captured: what a replay would not do is refused ---------


def rehearse(
    run: Callable[[], Any],
    module: nn.Module,
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
    *,
    told: bool = True,
) -> Any:
    """Run a step that is to be captured; ``FlashClippingError`` where a replay would differ.

    Args:
        told: whether the step hears that a graph is being captured, if it asks.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    weights = [p._version for p in params]
    held = [(p, p.grad, p.grad._version) for p in params if p.grad is not None]
    held = [each for each in held if each[1].layout == torch.strided]
    counts = [wrapped.running_step.clipped_backwards for wrapped in models]
    randomness = _randomness_of_the_host()
    with answers(told), _never_waits(device):
        output = run()
    if randomness != _randomness_of_the_host():
        refuse(
            "draws random numbers on the host (random, numpy.random, torch's CPU generator), "
            "which every replay would find as they were drawn for the capture. Draw on the "
            "GPU, or before the step, and pass them as an argument"
        )
    if weights != [p._version for p in params]:
        refuse("changes parameters. Call the optimizer's step() outside")
    # How often a model in one pass has added to its gradients; others are not known to count.
    additions = {
        id(param): wrapped.running_step.clipped_backwards - count
        for wrapped, count in zip(models, counts, strict=True)
        if wrapped.mode == "one_pass" and wrapped._session.mode.enabled
        for param in wrapped.trainable_parameters
    }
    # Gradients in one memory, as views of one sum are, count their changes together.
    most: dict[int, float] = {}
    for param, grad, _ in held:
        memory = memory_id(grad.untyped_storage())
        most[memory] = most.get(memory, 0) + additions.get(id(param), math.inf)
    for param, grad, version in held:
        changes = grad._version - version
        if param.grad is not grad or changes > most[memory_id(grad.untyped_storage())]:
            refuse(
                "clears gradients, or does more to them than adding, which no replay would do. "
                "Call zero_grad() outside"
            )
    return output


def _randomness_of_the_host() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy


@contextmanager
def answers(told: bool) -> Iterator[None]:
    """Let who asks whether a graph is being captured hear this. (``transformers`` writes masks out
    in a capture that it leaves out elsewhere, where it may look into them, and waits for them.)"""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: told
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


@contextmanager
def _never_waits(device: torch.device) -> Iterator[None]:
    """Refuse what waits for the device."""
    on_gpu = device.type == "cuda"
    mode = torch.cuda.get_sync_debug_mode() if on_gpu else 0
    try:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        if not on_gpu or "synchroniz" not in str(error):
            raise
        refuse(
            f"waits for the device ({error}), which no CUDA graph can. Take item(), print() of "
            "values, nonzero() and copies to the CPU out of it",
            error,
        )
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode(mode)


def refuse(what: str, cause: Exception | None = None) -> NoReturn:
    """Say why a step cannot be replayed."""
    raise FlashClippingError(
        f"FC703 GraphedStep: the step {what}, or call it without GraphedStep."
    ) from cause


def reason(refusal: FlashClippingError) -> str:
    """What a model does that no replay would, out of such an error."""
    said = str(refusal).splitlines()[0].removesuffix(", or call it without GraphedStep.")
    return said.replace("GraphedStep: the step", "it", 1)
