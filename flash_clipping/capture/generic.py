"""Modules without a rule, under ``vmap``: one view of every parameter per sample, so that autograd
itself delivers their per-sample gradients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import pytree
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError, to_freeze
from flash_clipping.factors import DenseGrad


class ReadsNoSamples(Exception):
    """All that a module reads is the same for all samples."""


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
        if not tap.session.enabled:
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


def generic_forward(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any module that owns parameters: forward under ``vmap`` with per-sample parameters.

    Every tensor argument whose batch axis has the batch's size is mapped over; anything else is
    handed to every sample as it is. A module that ``vmap`` cannot run (data-dependent control
    flow, an operator without a batching rule) is run sample by sample instead, with one warning.
    """
    session, layer = tap.session, tap.layer
    axis = session.batch_axis
    leaves, spec = pytree.tree_flatten((args, kwargs))
    mapped = _mapped(tap, leaves, axis)
    sizes = {leaf.shape[axis] for leaf, is_mapped in zip(leaves, mapped, strict=True) if is_mapped}
    if not sizes:
        raise ReadsNoSamples
    call = session.current_forward
    B = 0 if call is None else call.batch_size or 0
    # Heads, windows or streams of each sample, one behind the other: all of them at once.
    parts = [1] * len(leaves)
    if B and sizes != {B} and _is_compared(session, axis) and not any(n % B for n in sizes):
        for n, is_mapped in enumerate(mapped):
            if is_mapped and (size := len(leaves[n])) != B:
                parts[n] = size // B
                leaves[n] = leaves[n].unflatten(0, (B, -1))
        sizes = {B}
    if len(sizes) > 1:
        raise FlashClippingError(
            f"{tap.path}: its inputs have different numbers of samples along the batch axis: "
            f"{', '.join(map(str, sorted(sizes)))}. Give all of them one row per sample."
            f"{ONE_BY_ONE}"
        )
    batch_size = sizes.pop()
    views = {
        f"module.{name}": PerSampleView.apply(tap, param, batch_size)
        for name, param in layer.named_parameters()
        if param.requires_grad
    }
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            _refuse_hidden(tap, leaf, "is called with", axis, batch_size)
    shim = _Original(tap)

    def one_sample(params: dict[str, Tensor], *sample: Any) -> Any:
        batch_of_one = [
            leaf.unsqueeze(axis) if is_mapped and part == 1 else leaf
            for leaf, is_mapped, part in zip(sample, mapped, parts, strict=True)
        ]
        one_args, one_kwargs = pytree.tree_unflatten(batch_of_one, spec)
        output = torch.func.functional_call(shim, params, one_args, one_kwargs)
        if any(x.dim() > axis and x.shape[axis] != 1 for x in tensors_in(output)):
            with torch.no_grad():
                folds[:] = _folds(tap, output, shim(*args, **kwargs), axis, batch_size)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.squeeze(axis), output)

    folds: list[bool] = []
    with session.bypass(), _PaddingStays(tap):
        outputs, failed = None, ""
        if not tap.loops:
            in_dims = 0, *(axis if is_mapped else None for is_mapped in mapped)
            mapped_call = torch.func.vmap(one_sample, in_dims, axis, randomness="different")
            try:
                outputs = mapped_call(views, *leaves)
            except FlashClippingError:
                raise
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if not _is_of_vmap(error):
                    raise
                failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if tap.loops or failed:
            outputs = _sample_by_sample(tap, one_sample, views, leaves, mapped, axis, batch_size)
    if failed:
        tap.loops = True  # the loop works where vmap does not: stay with it
        warnings.warn(
            f"{tap.path}: torch.func.vmap cannot run this module ({failed}); it runs sample by "
            "sample, which is exact but slow. A rule of its own (flash_clipping.register_rule) "
            "makes it fast.",
            stacklevel=2,
        )
    if not any(folds):
        return outputs
    leaves, spec = pytree.tree_flatten(outputs)  # [B, rows, ...] of those that fold
    found = [leaf.flatten(0, 1) if fold else leaf for leaf, fold in zip(leaves, folds, strict=True)]
    return pytree.tree_unflatten(found, spec)


def _folds(tap: Any, alone: Any, together: Any, axis: int, B: int) -> list[bool]:
    """Which outputs hold several rows of each sample along the batch axis (heads, windows), one
    sample's behind the other's: the module was run ``alone`` on one sample, and ``together`` on all
    ``B``. The oracle compares afterwards whether they lie so; without it they are refused."""
    found = []
    for one, own in zip(pytree.tree_leaves(alone), pytree.tree_leaves(together), strict=False):
        found.append(False)
        if not isinstance(one, Tensor) or not isinstance(own, Tensor) or one.dim() <= axis:
            continue
        rows = one.shape[axis]
        if rows == 1 or own.dim() != one.dim() or own.shape[axis] == rows:
            continue
        found[-1] = _is_compared(tap.session, axis) and own.shape[axis] == rows * B
        if not found[-1]:
            raise FlashClippingError(
                f"{tap.path}: this module runs under torch.func.vmap, and returns a tensor of "
                f"shape {tuple(own.shape)} with {rows} rows of each sample; expected one. Keep "
                "what is folded into the batch (heads, windows) on an axis of its own in what the "
                "module returns; freeze all parameters that this module uses and train LoRA on "
                "other layers; or write a rule for it (flash_clipping.register_rule)."
                f"{to_freeze(tap.path)}"
            )
    return found


def _is_compared(session: ClippingSession, axis: int) -> bool:
    """Whether the oracle will have seen that rows lie as they are taken to."""
    return not axis and session.has_oracle


#: What vmap's own errors speak of: itself, what it lacks for an operator, tensors of its that have
#: no memory to look at, that are too large for what they are written into, or outside autograd.
_VMAP_SPEAKS_OF = (
    "vmap",
    "functorch",
    "atching rule",
    "data pointer",
    "storage",
    "match the broadcast shape",
    "does not have a grad_fn",
)


def _is_of_vmap(error: BaseException | None) -> bool:
    """Whether an error is vmap's, or was raised because of one; what a module says is its own."""
    while error is not None:
        if any(word in str(error) for word in _VMAP_SPEAKS_OF):
            return True
        error = error.__cause__ or error.__context__
    return False


_LOOKUPS: Any = {F.embedding: tuple(inspect.signature(F.embedding).parameters)}
_LOOKUPS[torch.embedding] = "weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"


class _PaddingStays(TorchFunctionMode):
    """Embeddings whose ``padding_idx`` gets no gradient: under ``vmap``, with a weight per sample,
    PyTorch itself would give it one."""

    def __init__(self, tap: Any):
        super().__init__()
        self.tap = tap

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(zip(_LOOKUPS.get(func, ()), args, strict=False)) | (kwargs or {})
        if func in _LOOKUPS and given.get("scale_grad_by_freq"):
            raise FlashClippingError(
                f"{self.tap.path}: an embedding with scale_grad_by_freq=True mixes samples: its "
                "gradient depends on how often an id occurs in the whole batch. Set "
                "scale_grad_by_freq=False; or freeze it."
                f"{to_freeze(self.tap.path)}"
            )
        result = func(*args, **(kwargs or {}))
        padding = given.get("padding_idx") if func in _LOOKUPS else None
        if padding is None or (padding < 0 and func is torch.embedding):
            return result
        ids = given["input" if func is F.embedding else "indices"]
        is_padding = (ids == padding % given["weight"].shape[0]).unsqueeze(-1)
        return torch.where(is_padding, result.detach(), result)


def _refuse_hidden(
    tap: Any, value: Any, verb: str, axis: int, batch_size: int | None = None
) -> None:
    """Refuse an object whose tensors vmap does not see: one sample would get, or give, them all."""
    for x in tensors_in(value):
        if batch_size is None or (x.dim() > axis and x.shape[axis] == batch_size > 1):
            raise FlashClippingError(
                f"{tap.path}: this module runs under torch.func.vmap, and {verb} a "
                f"{type(value).__name__} that holds a tensor of shape {tuple(x.shape)}, which vmap "
                "cannot divide into samples. Use tensors, or tuples, lists or dicts of tensors, "
                "freeze the module's parameters, or write a rule for it "
                f"(flash_clipping.register_rule).{to_freeze(tap.path)}"
            )


def _sample_by_sample(
    tap: Any,
    one_sample: Callable[..., Any],
    views: dict[str, Tensor],
    leaves: list[Any],
    mapped: list[bool],
    axis: int,
    batch_size: int,
) -> Any:
    # Unbound once: selecting row after row would make backward add up B tensors of B rows each.
    rows = {name: view.unbind(0) for name, view in views.items()}
    outputs = [
        one_sample(
            {name: row[b] for name, row in rows.items()},
            *(
                leaf.select(axis, b) if is_mapped else leaf
                for leaf, is_mapped in zip(leaves, mapped, strict=True)
            ),
        )
        for b in range(batch_size)
    ]
    for leaf in pytree.tree_leaves(outputs[0]):
        if not isinstance(leaf, Tensor):
            _refuse_hidden(tap, leaf, "returns", axis)
    return pytree.tree_map(
        lambda *parts: torch.stack(parts, axis) if isinstance(parts[0], Tensor) else parts[0],
        outputs[0],
        *outputs[1:],
    )


def _mapped(tap: Any, leaves: list[Any], axis: int) -> list[bool]:
    """Which of a module's arguments have a row per sample (one must be a tensor that could); the
    others every sample sees as a whole."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not tensors:
        raise FlashClippingError(
            f"{tap.path}: none of its inputs has a batch axis, so its parameters have no "
            "per-sample gradients. Pass it a batched tensor, or freeze its parameters."
            f"{to_freeze(tap.path)}"
        )
    session = tap.session
    call = session.current_forward
    if call is None or call.batch_size is None:
        size = tensors[0].shape[axis]
        return [isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] == size for x in leaves]
    # One of them must be the samples: what was computed from them, if anything was.
    fitting = (x for x in tensors if x.shape[axis] == call.batch_size)
    first = next((x for x in tensors if x.requires_grad), next(fitting, tensors[0]))
    mapped = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() <= axis:
            mapped.append(False)
            continue
        sure = leaf.requires_grad and not isinstance(leaf, nn.Parameter)
        beside = leaf is not first
        rows, plain = leaf.shape[axis], first.shape[axis]
        if beside and sure and plain == call.batch_size and rows > plain and rows % plain == 0:
            mapped.append(_is_compared(session, axis))  # heads that another layer has folded
            continue
        mapped.append(session.is_batched(tap.path, leaf, axis, sure=sure, beside=beside))
    return mapped
