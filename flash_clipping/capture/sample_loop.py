"""Modules whose parameters stand-ins cannot follow: their forward runs once for each sample.

Each run gets one row of a view ``[B, *parameter]``, so that autograd itself delivers per-sample
gradients. Exact, and slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flash_clipping._compat import pytree
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.layer_inputs import ReadsNoSamples
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import DenseGrad


class PerSampleView(torch.autograd.Function):
    """A parameter as one view per sample, ``[B, *parameter]``, whose gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, tap: Any, param: nn.Parameter, batch_size: int) -> Tensor:
        ctx.tap, ctx.param = tap, param
        ctx.recomputed = in_backward()
        call = tap.session.current_forward
        ctx.samples = None if call is None else call.batch_size
        return param.expand(batch_size, *param.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> Any:
        tap: Any = ctx.tap
        if not tap.session.mode.enabled:
            return None, grads.sum(0), None
        tap.record([ctx.param], [DenseGrad(grads)], ctx.recomputed, samples=ctx.samples)
        return None, None, None


class _Original(nn.Module):
    """Calls a tapped module's own forward, without its hooks, which the outer call runs already."""

    def __init__(self, tap: Any):
        super().__init__()
        self.module = tap.layer
        self._call = tap.original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def forward_by_sample(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's own forward on batches of one sample, and the outputs of these as one batch.

    Arguments of one row for each sample are divided; every sample gets all others as they are.

    Raises:
        ReadsNoSamples: no argument has a row for each sample.
        FlashClippingError: an argument or a result cannot be divided into samples.
    """
    session, axis = tap.session, tap.session.options.batch_axis
    leaves, spec = pytree.tree_flatten((args, kwargs))
    divided = [
        isinstance(x, Tensor)
        and x.dim() > axis
        and session.is_batched(
            tap.path, x, axis, sure=x.requires_grad and not isinstance(x, nn.Parameter)
        )
        for x in leaves
    ]
    sizes = [leaf.shape[axis] for leaf, yes in zip(leaves, divided, strict=True) if yes]
    if not sizes:
        raise ReadsNoSamples
    call = session.current_forward
    B = (call and call.batch_size) or min(sizes)
    if not B:
        _refuse(tap, "the batch has no samples")
    # Heads, windows or streams of each sample lie one behind the other, as the oracle will see.
    is_compared = not axis and session.proof.has_oracle
    if any(size % B or (size != B and not is_compared) for size in sizes):
        _refuse(tap, f"its inputs have different numbers of samples: {sizes}")
    for leaf in leaves if B > 1 else ():
        held = () if isinstance(leaf, Tensor) else tensors_in(leaf)
        if any(x.shape[axis : axis + 1] == (B,) for x in held):
            _refuse(tap, f"it is called with a {type(leaf).__name__} that holds tensors")
    views = {
        f"module.{name}": PerSampleView.apply(tap, param, B).unbind(0)
        for name, param in tap.layer.named_parameters()
        if param.requires_grad
    }
    parts = [
        leaf.split(leaf.shape[axis] // B, axis) if yes else [leaf] * B
        for leaf, yes in zip(leaves, divided, strict=True)
    ]
    shim = _Original(tap)
    outputs = []
    with session.bypass():
        for b in range(B):
            one_args, one_kwargs = pytree.tree_unflatten([part[b] for part in parts], spec)
            params = {name: rows[b] for name, rows in views.items()}
            outputs.append(torch.func.functional_call(shim, params, one_args, one_kwargs))
    for leaf in pytree.tree_leaves(outputs[0]):
        if isinstance(leaf, Tensor):
            rows = leaf.shape[axis] if leaf.dim() > axis else 0
            if rows != 1 and not (rows and is_compared):
                _refuse(tap, f"it returns a tensor of shape {tuple(leaf.shape)} for one sample")
        elif any(True for _ in tensors_in(leaf)):
            _refuse(tap, f"it returns a {type(leaf).__name__} that holds tensors")
    return pytree.tree_map(
        lambda *found: torch.cat(found, axis) if isinstance(found[0], Tensor) else found[0],
        *outputs,
    )


def _refuse(tap: Any, found: str) -> None:
    raise FlashClippingError(
        f"FC151 {tap.path}: this module's forward runs once for each sample, and {found}. Give and "
        "return tensors with the batch as first axis, in tuples, lists or dicts; or write a rule "
        f"for the module (flash_clipping.register_rule).{ONE_BY_ONE}"
    )
