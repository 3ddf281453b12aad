"""What a graph is found by: the layout of arguments, and what Python decides on the way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import hooks_of_module, hooks_of_parameter
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.ops.runtime.backend import matmul_settings

#: Types of attributes that a module's forward may decide by.
SETTINGS = (bool, int, float, str)


def layout(leaf: Any) -> Hashable:
    """What of an argument a graph was captured for: all but the values of tensors."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), repr(leaf)  # 0.0 and -0.0 are equal


def circumstances(
    modules: Sequence[nn.Module],
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
) -> Hashable:
    """What Python decides on the way through the step."""
    bounds: list[Hashable] = []
    for wrapped in models:
        bound = wrapped.max_grad_norm
        bounds += [
            tuple(bound) if isinstance(bound, Sequence) else bound,
            wrapped.clipping,
            wrapped.loss_reduction,
            wrapped._session.enabled,
            wrapped._session.backend,
            wrapped._session.padding.rows,
        ]
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
    """Which memory a tensor of the model is, and how it is read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _settings(module: nn.Module) -> Hashable:
    """What a module's forward may decide by: its plain attributes (``training``, ``p``, ``eps``),
    and its hooks, by the numbers that PyTorch gives them."""
    hooks = tuple(chain.from_iterable(hooks_of_module(module)))
    if isinstance(module, GradSampleHooksFlashClipping):
        return hooks  # it counts backward passes; what it decides by is told one by one
    return *hooks, *[(k, v) for k, v in vars(module).items() if type(v) in SETTINGS]


def _precision() -> list[str]:
    """Of float32 matmuls and convolutions, by the newer of PyTorch's settings: once these are used,
    it refuses to tell the older."""
    convolutions: Any = torch.backends.cudnn
    return [place.fp32_precision for place in (*matmul_settings(), convolutions.conv)]
