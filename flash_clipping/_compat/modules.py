"""Modules: their hooks, and what layers keep to themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from flash_clipping._compat.lookup import attribute, find, needed

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


_before_modules = needed("nn.modules.module.register_module_forward_pre_hook")
_after_modules = needed("nn.modules.module.register_module_forward_hook")


@contextmanager
def around_modules(
    enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of every module that is called in this thread when its forward begins and ends. Without
    hooks of all modules: an error."""
    thread = threading.get_ident()

    def mine(tell: Callable[[nn.Module], None], module: nn.Module) -> None:
        if threading.get_ident() == thread:
            tell(module)

    handles = [
        _before_modules(lambda module, _: mine(enter, module)),
        _after_modules(lambda module, *_: mine(leave, module)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def padding_of(layer: Any) -> list[int]:
    """A convolution's padding as ``F.pad`` takes it. Without: an error."""
    return list(attribute(layer, "_reversed_padding_repeated_twice"))


def lacks_batch_axis(layer: Any, x: Tensor) -> bool:
    """Whether an instance normalization was given one sample without its axis. Without: an error.

    Raises:
        ValueError: or what has neither as many axes as a sample nor as a batch.
    """
    attribute(layer, "_check_input_dim")(x)
    return bool(x.dim() == attribute(layer, "_get_no_batch_dim")())


#: Output and reciprocal root mean square of RMSNorm. Without: an error.
rms_norm: Callable[..., tuple[Tensor, Tensor]] = needed("ops.aten._fused_rms_norm.default")


def gate_of_experts(layer: Any) -> Any:
    """What ``transformers``' experts compute between gate and up projections and the down
    projection, or ``None``. Without: such layers have no rule, and are refused or served by the
    generic one."""
    return getattr(layer, "_apply_gate", None)
