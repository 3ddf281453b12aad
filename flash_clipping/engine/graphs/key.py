"""Keys of graphs: the layout of arguments, and everything that Python decides by on the way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import hooks_of_module, hooks_of_parameter, pytree
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.ops.runtime.backend import matmul_settings

#: Types of attributes that a module's forward may decide by.
SETTINGS = (bool, int, float, str)


def key(
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    modules: Sequence[nn.Module],
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
) -> tuple[Hashable, Hashable]:
    """The key of a graph: the layout of arguments, and the circumstances of the call."""
    layout = str(structure), *map(_layout, leaves)
    return layout, _circumstances(modules, models, device)


def _layout(leaf: Any) -> Hashable:
    """All of an argument but the values of tensors."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), repr(leaf)  # 0.0 and -0.0 are equal


def _circumstances(
    modules: Sequence[nn.Module],
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
) -> Hashable:
    """All that Python decides by on the way through the step."""
    bounds: list[Hashable] = []
    for wrapped in models:
        bound, session = wrapped.max_grad_norm, wrapped._session
        bounds += [tuple(bound) if isinstance(bound, Sequence) else bound, wrapped.clipping]
        bounds += [wrapped.loss_reduction, session.enabled, session.backend, session.padding.rows]
    return (
        torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        *_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *bounds,
        *map(id, modules),
        *[_settings(module) for module in modules],
        *[
            (id(param), param.requires_grad, _place(param), *(hooks_of_parameter(param) or ()))
            for module in modules
            for param in module._parameters.values()
            if param is not None
        ],
        *[
            _place(buffer)
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ],
    )


def _place(tensor: Tensor) -> Hashable:
    """The memory of a tensor of the model, and how it is read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _settings(module: nn.Module) -> Hashable:
    """A module's plain attributes (``training``, ``p``, ``eps``) and its hooks, by the numbers that
    PyTorch gives them: what its forward may decide by."""
    hooks = tuple(chain.from_iterable(hooks_of_module(module)))
    if isinstance(module, GradSampleHooksFlashClipping):
        return hooks  # it counts backward passes; what it decides by is told one by one
    return *hooks, *[(k, v) for k, v in vars(module).items() if type(v) in SETTINGS]


def _precision() -> list[str]:
    """The precision of float32 matmuls and convolutions, by the newer settings: once these are
    used, PyTorch refuses to tell the older."""
    convolutions: Any = torch.backends.cudnn
    return [place.fp32_precision for place in (*matmul_settings(), convolutions.conv)]


#: Types that arguments may hold besides tensors: these are known by their values.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def check_arguments(leaves: Sequence[Any]) -> None:
    """Raise ``TypeError`` for arguments that are neither tensors nor plain values."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(
                f"GraphedStep: found {type(leaf).__name__} in the step's arguments; expected "
                "tensors and plain values (numbers, strings, None) in lists, tuples and dicts, as "
                "it knows nothing else by its contents. Pass dict(batch) where a tokenizer made "
                "the batch."
            )


def are_odd(leaves: Sequence[Any]) -> bool:
    """Whether there are tensors that no copy can stand in for: gradients flow back to them, or
    they are no plain memory; or hold nothing: a batch without samples does not reach the model."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return any(
        x.requires_grad or type(x) is not Tensor or x.layout != torch.strided or not x.numel()
        for x in tensors
    )


def detached(output: Any) -> Any:
    """Results without their history; ``TypeError`` unless they are tensors or ``None``, as a replay
    renews nothing else."""
    for leaf in pytree.tree_leaves(output):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"GraphedStep: found {type(leaf).__name__} in the step's results; expected tensors "
                "or None, in lists, tuples and dicts: anything else would be the captured step's "
                "in every replay. Return the loss as a tensor, or nothing."
            )
    return pytree.tree_map_only(Tensor, Tensor.detach, output)
