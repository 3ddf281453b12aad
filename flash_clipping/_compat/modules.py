"""Modules: their hooks, and what layers keep to themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat.lookup import find

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: A module's hooks, kind by kind. Without: others at every look, so that no graph is replayed.
hooks_of_module: Callable[[nn.Module], Sequence[Any]] = (
    attrgetter(*_HOOKS)
    if all(hasattr(nn.Module(), name) for name in _HOOKS)
    else lambda _: [[object()]]
)

#: A parameter's hooks, or ``None``. Without: others at every look, so that no graph is replayed.
hooks_of_parameter: Callable[[Tensor], Any] = (
    attrgetter("_backward_hooks") if hasattr(Tensor, "_backward_hooks") else lambda _: [object()]
)

#: All kinds of batch normalization. Without: those that PyTorch has now.
BATCH_NORMS: tuple[type[nn.Module], ...] = (
    find(nn, "modules.batchnorm._BatchNorm") or nn.BatchNorm1d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)

#: What ``nn.utils.parametrizations.spectral_norm`` puts before a weight. Without: it is refused, as
#: other modules that change buffers.
SPECTRAL_NORM: type[nn.Module] | None = find(nn.utils.parametrizations, "_SpectralNorm")

#: All kinds of dropout. Without: those that PyTorch has now.
DROPOUTS: tuple[Any, ...] = (
    find(nn, "modules.dropout._DropoutNd") or nn.Dropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@contextmanager
def around_modules(
    enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of every module that is called in this thread when its forward begins and ends. Without
    hooks of all modules: nothing is told."""
    before = find(nn, "modules.module.register_module_forward_pre_hook")
    after = find(nn, "modules.module.register_module_forward_hook")
    if before is None or after is None:
        yield
        return
    thread = threading.get_ident()

    def mine(tell: Callable[[nn.Module], None], module: nn.Module) -> None:
        if threading.get_ident() == thread:
            tell(module)

    handles = [
        before(lambda module, _: mine(enter, module)),
        after(lambda module, *_: mine(leave, module)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def padding_of(layer: Any) -> list[int]:
    """A convolution's padding as ``F.pad`` takes it. Without: computed from what is public."""
    known = getattr(layer, "_reversed_padding_repeated_twice", None)
    if known is not None:
        return list(known)
    found: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            found += [total // 2, total - total // 2]
        else:
            found += [0 if layer.padding == "valid" else layer.padding[axis]] * 2
    return found


def lacks_batch_axis(layer: Any, x: Tensor) -> bool:
    """Whether an instance normalization was given one sample without its axis. Without: by type.

    Raises:
        ValueError: or what has neither as many axes as a sample nor as a batch.
    """
    check, alone = (getattr(layer, n, None) for n in ("_check_input_dim", "_get_no_batch_dim"))
    if check is not None and alone is not None:
        check(x)
        return bool(x.dim() == alone())
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    axes = next(axes for axes, kind in enumerate(kinds, 2) if isinstance(layer, kind))
    if x.dim() not in (axes, axes + 1):
        raise ValueError(f"expected {axes}D or {axes + 1}D input (got {x.dim()}D input)")
    return x.dim() == axes


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor | None]:
    return F.rms_norm(x, [*shape], weight, eps), None


def _fused_rms_norm() -> Any:
    operator = find(torch.ops.aten, "_fused_rms_norm.default")
    schema = getattr(operator, "_schema", None)
    if schema is None or len(schema.returns) != 2:
        return _rms_norm
    names = [argument.name for argument in schema.arguments]
    return operator if names == ["input", "normalized_shape", "weight", "eps"] else _rms_norm


#: Output and reciprocal root mean square of RMSNorm. Without (before PyTorch 2.9): the output, and
#: ``None``, which the rule then computes.
rms_norm: Callable[..., tuple[Tensor, Tensor | None]] = _fused_rms_norm()


def gate_of_experts(layer: Any) -> Any:
    """What ``transformers``' experts compute between gate and up projections and the down
    projection, or ``None``. Without: such layers have no rule, and are refused or served by the
    generic one."""
    return getattr(layer, "_apply_gate", None)
