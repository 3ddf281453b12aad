"""An empty local batch: the process takes part in all that the others do.

Gathering parameters and reducing sums are operations of all processes, forward and backward. So the
model runs on two samples that are made up, and backward goes through it as everywhere. What layers
record of them is dropped, and the caller gets what the model returns, without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_samples import made_up
from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.tensor.local import local_of
from flash_clipping.errors import FlashClippingError

#: How many samples are made up.
_COUNT = 2


class EmptyBatches:
    """Hooks of a sharded model's root, around all others.

    Args:
        root: the model.
        session: what its taps share.

    Attributes:
        running: whether the call of the model that runs is one without samples.
    """

    def __init__(self, root: nn.Module, session: ClippingSession):
        self.session = session
        self.running = False
        self._has_bags = any(isinstance(module, nn.EmbeddingBag) for module in root.modules())

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before all other hooks: the arguments with samples, where there are none."""
        session = self.session
        self.running = False
        if not session.recording:
            return None
        axis = session.batch_axis
        sizes = [x.shape[axis] for x in batched_inputs(args, kwargs) if x.dim() > axis]
        if not sizes or sizes[0] or (self._has_bags and any(sizes)):
            return None
        self.running = True
        # Of ones: lengths, and masks of what is to be seen, must not be 0.
        return made_up(args, kwargs, axis, _COUNT, fill=1)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After all other hooks: what the model returned, without rows."""
        if not self.running:
            return None
        self.running = False
        return map_tensors(self._without_rows, output, packed=True)

    def _without_rows(self, x: Tensor) -> Tensor:
        axis = self.session.batch_axis
        if x.dim() <= axis:
            axis = -1
        elif x.shape[axis] % _COUNT:
            raise FlashClippingError(
                f"the model: called with an empty batch, it was run on {_COUNT} samples, and "
                f"returned a tensor of shape {tuple(x.shape)}. Expected samples along axis "
                f"{axis} of all that it returns."
            )
        return _WithoutRows.apply(x, axis) if x.requires_grad else _zeros(x, axis)


class _WithoutRows(torch.autograd.Function):
    """Zeros without rows, whose backward goes on with gradients of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        ctx.like = x.detach()
        return _zeros(x, axis)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return _zeros(ctx.like), None


def _zeros(like: Any, axis: int = -1) -> Tensor:
    """Zeros that lie as ``like`` over processes, without rows along ``axis`` unless that is -1."""

    def cut(sizes: Sequence[int]) -> list[int]:
        return [0 if i == axis else size for i, size in enumerate(sizes)]

    zeros: Tensor = local_of(like).new_zeros(cut(local_of(like).shape))
    if not isinstance(like, DTensor):
        return zeros
    shape = torch.Size(cut(like.shape))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides
    )
