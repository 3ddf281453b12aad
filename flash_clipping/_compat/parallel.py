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
