"""Data parallelism of PyTorch's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat.lookup import attribute, find, load, refuse


def runs_in_ddp() -> bool:
    """Whether a DistributedDataParallel's forward runs. Without: an error where processes were
    started."""
    kind = nn.parallel.DistributedDataParallel
    if hasattr(kind, "_active_ddp_module"):
        return kind._active_ddp_module is not None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        refuse("torch.nn.parallel.DistributedDataParallel._active_ddp_module")
    return False


def is_replica(module: nn.Module) -> bool:
    """Whether DataParallel made this module. Without: its parameters are no leaves, and refused."""
    return bool(getattr(module, "_is_replica", False))


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP has made it a part of a flat parameter. Without: it is no ``nn.Parameter``."""
    return bool(getattr(param, "_fsdp_flattened", False))


def is_awaited(x: Any) -> bool:
    """Whether a collective may still be writing this tensor; its ``wait()`` gives a plain one.
    Without: no; operators wait by themselves."""
    # Nobody has such a tensor before the module is there.
    functions = sys.modules.get("torch.distributed._functional_collectives")
    kind = find(functions, "AsyncCollectiveTensor")
    return kind is not None and isinstance(x, kind)


def awaits_gradient(param: Tensor) -> bool:
    """Whether a hook waits until autograd has accumulated a gradient, which never happens here.
    Without: not noticed; such hooks do not run."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def applied_to(module: nn.Module) -> Sequence[str]:
    """Composable functions of torch.distributed that were applied. Without: not noticed before the
    module's class is changed."""
    registry = find(load("torch.distributed._composable"), "_get_registry")
    return () if registry is None else tuple(registry(module) or ())


def parts_of_schedule(schedule: object) -> tuple[Any, Any, int]:
    """The one stage of a schedule of torch.distributed.pipelining, its loss function, and how many
    micro-batches it has. Without: an error where a schedule is made private."""
    stage, loss_fn = attribute(schedule, "_stage"), attribute(schedule, "_loss_fn")
    return stage, loss_fn, attribute(schedule, "_n_microbatches")


def reduce_scatter_many(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any) -> Any:
    """Begin to add these tensors up over the processes of a group, each of which gets its part of
    every sum in its output, in one operation; what is returned is to be waited for. Without: an
    error where the first sums are reduced."""
    options = torch.distributed.ReduceScatterOptions()
    options.asyncOp = True
    name = "reduce_scatter_single_coalesced"
    if not hasattr(group, name):
        name = "reduce_scatter_tensor_coalesced"  # older, and deprecated
    return attribute(group, name)([*outputs], [*inputs], options)


def local_tensor(tensor: Any) -> Tensor:
    """This process's part of a ``DTensor``, outside of autograd: what ``to_local`` gives there, in
    a hundredth of the time. Without: an error where a model with shards is wrapped."""
    found: Tensor = attribute(tensor, "_local_tensor")
    return found


def layout_of_dtensor(tensor: Any) -> Any:
    """What :func:`dtensor_of` needs of a ``DTensor``, and can be kept. Without: an error where the
    first sums are left in ``p.grad``."""
    return attribute(tensor, "_spec")


def dtensor_of(shard: Tensor, layout: Any) -> Any:
    """A ``DTensor`` of this process's shard that is laid out as another one of its dtype: what
    ``DTensor.from_local`` makes, in a tenth of the time. Without: likewise."""
    from torch.distributed.tensor import DTensor

    return DTensor(shard, layout, requires_grad=False)
