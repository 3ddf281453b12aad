"""Whether a criterion compares the samples of a batch: checked once, on the first batch.

The gradient of the summed losses for a sample's output must be the sample's own. Halves of the
batch tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import pytree
from flash_clipping.capture.no_trace import random_state

#: By how much gradients of one sample may differ, relative to the largest of the batch.
_SLACK = {torch.float64: 1e-6, torch.float32: 1e-4}


class _Unknown(Exception):
    """Gradients are not finite: nothing can be told."""


def compares_samples(
    loss: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int,
    is_mean: bool = False,
) -> bool:
    """Whether a batch shows that this loss of model outputs depends, for one sample, on others.

    Args:
        loss: the criterion, of any shape; it is added up.
        args, kwargs: its arguments. The outputs are those that require gradients.
        samples: how many there are, along axis 0 of outputs and targets; 4 or more.
        is_mean: whether a scalar is taken for the mean over samples; otherwise for their sum.

    Returns:
        ``True`` only if halves of the batch show it, also in float64 where that runs.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    outputs = [i for i in tensors if leaves[i].requires_grad]
    if not outputs or any(leaves[i].shape[:1] != (samples,) for i in outputs):
        return False
    # What has as many rows by chance, weights of classes say, may be no sample's.
    of_size = [i for i in tensors if leaves[i].shape[:1] == (samples,)]
    cuts = {tuple(of_size), tuple(i for i in of_size if i in outputs or i < 2)}
    half = samples // 2
    order = torch.arange(2 * half)
    splits = order, torch.cat([order[::2], order[1::2]])  # at the half

    def shown(wide: bool) -> bool:
        def grads(rows: Tensor, cut: Sequence[int], seed: int = 0) -> list[Tensor]:
            parts = [*leaves]
            for i in tensors:
                x = leaves[i].detach()
                x = x[rows.to(x.device)] if i in cut else x
                parts[i] = x.double() if wide and x.is_floating_point() else x
            for i in outputs:
                parts[i] = parts[i].clone().requires_grad_()
            given, named = pytree.tree_unflatten(parts, structure)
            devices = [*{leaves[i].device for i in tensors if leaves[i].is_cuda}]
            with random_state(devices, seed=seed), torch.enable_grad():
                losses = loss(*given, **named)
                total = losses.sum() * (len(rows) if is_mean and not losses.dim() else 1)
            found = torch.autograd.grad(
                total, [parts[i] for i in outputs], allow_unused=True, materialize_grads=True
            )
            if not all(bool(grad.isfinite().all()) for grad in found):
                raise _Unknown
            return [*found]

        def differ(rows: Tensor, found: list[Tensor]) -> bool:
            slack = max(_SLACK.get(grad.dtype, 0.1) for grad in whole)
            slack *= max(float(grad.abs().max()) for grad in whole)
            pairs = [(x[rows.to(x.device)], y) for x, y in zip(whole, found, strict=True)]
            return any(float((x - y).abs().max()) > slack for x, y in pairs)

        for cut in cuts:
            whole, compares = grads(order, cut), False
            for rows in splits:
                halves = grads(rows[:half], cut), grads(rows[half:], cut)
                apart = [*map(torch.cat, zip(*halves, strict=True))]
                compares |= differ(rows, apart)
            # With noise of its own, or a count of its calls, it differs again.
            if not compares or differ(order, grads(order, cut, seed=1)):
                return False
        return True

    with torch.no_grad():
        for wide in (False, True):
            try:
                if not shown(wide):
                    return False
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001
                # It does not run on a part of the batch; or its own constants are not in float64.
                return wide and not isinstance(error, _Unknown)
        return True
