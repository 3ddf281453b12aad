"""PyTorch's own data parallelism, in all its forms, and why a private model refuses it.

It reduces gradients as autograd accumulates them. Those of a private model are clipped sums, which
autograd never sees: what comes out is exactly 0, or one process's own.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flash_clipping._compat import (
    applied_to,
    awaits_gradient,
    is_flattened,
    is_replica,
    runs_in_ddp,
)
from flash_clipping.distributed import is_sharded, processes_of
from flash_clipping.errors import FlashClippingError

#: Where context_parallel stands, in PyTorch.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"

#: Where stages of pipelines run models. Nobody has such a stage before it is imported.
PIPELINES = "torch.distributed.pipelining.stage"

_INSTEAD = (
    "Wrap the model in opacus.distributed.DifferentiallyPrivateDistributedDataParallel, or call "
    "fully_shard on its blocks and on it; give that to make_private(module=...), and leave it to "
    "nobody else (with Accelerate: do not pass model or optimizer to prepare())."
)

_UNREDUCED = (
    "A private model's gradients are clipped sums, which autograd does not see: they would not be "
    f"reduced. {_INSTEAD}"
)


def _form_of(module: nn.Module) -> str | None:
    """The form of PyTorch's data parallelism that this module is, or is managed by."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return f"torch.nn.parallel.{type(module).__name__}"
    if not dist.is_available():
        return None
    # Imported when first needed: they load half of torch.distributed.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return "torch.distributed.fsdp.FullyShardedDataParallel"
    if isinstance(module, FSDPModule):
        return "torch.distributed.fsdp.fully_shard"
    if "replicate" in applied_to(module):
        return "torch.distributed's replicate"
    return None


def refuse_inside(path: str, module: nn.Module) -> None:
    """Refuse a module of a model that is about to be wrapped, if it reduces or shards gradients."""
    if (form := _form_of(module)) is not None and not is_sharded(module):
        raise NotImplementedError(
            f"{path or 'the model'}: found {form}, which reduces gradients before they are "
            f"clipped. {_INSTEAD}"
        )


def refuse_around(module: nn.Module, may_be_replica: bool = True) -> None:
    """Refuse a forward of a private model that is a replica, or runs inside
    DistributedDataParallel, or with the positions of a sample in several processes."""
    # All forms of context_parallel put a function of theirs in the place of this builtin.
    if _CONTEXT_PARALLEL in (getattr(F.scaled_dot_product_attention, "__module__", None) or ""):
        raise FlashClippingError(
            f"the model ({type(module).__name__}): found torch.distributed's context_parallel "
            "around a private model. The positions of a sample lie in several processes, and each "
            "would clip its own part of the sample's gradient: of R parts, a sample could move the "
            "sum by R times max_grad_norm. Give every sample to one process: fully_shard, with "
            "activation checkpointing or mode='two_pass' for long sequences."
        )
    in_ddp = runs_in_ddp()
    if in_ddp or (may_be_replica and is_replica(module)):
        form = DistributedDataParallel if in_ddp else DataParallel
        raise FlashClippingError(
            f"the model ({type(module).__name__}): found torch.nn.parallel.{form.__name__} around "
            f"a private model. {_UNREDUCED}"
        )


def refuse_in_pipeline(module: nn.Module) -> None:
    """Refuse a forward of a private model that a stage of a pipeline runs by itself: every stage
    would clip by its own norms."""
    if is_dynamo_compiling():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == PIPELINES:
            raise FlashClippingError(
                f"the model ({type(module).__name__}): found a stage of "
                "torch.distributed.pipelining that runs a private model. Every stage would clip by "
                "the norms of its own parameters: of S stages, a sample could move the released "
                "sums by sqrt(S) times max_grad_norm. Run the schedule by "
                "flash_clipping.PrivateSchedule(schedule, microbatch_size=...), on all stages."
            )
        frame = frame.f_back


def refuse_since(module: nn.Module, sharded: Container[nn.Module] = ()) -> None:
    """Refuse a private model that was sharded or replicated after it was wrapped (``sharded``:
    modules that were before), or in which something waits for gradients that autograd will not
    accumulate."""
    for path, part in module.named_modules():
        form = None if part in sharded else _form_of(part)
        for name, param in part._parameters.items():
            if param is None:
                continue
            # Parts of one flat parameter take the parameters' places.
            if is_flattened(param) or not isinstance(param, nn.Parameter):
                form = "torch.distributed.fsdp.FullyShardedDataParallel"
            elif awaits_gradient(param):
                raise FlashClippingError(
                    f"{path}.{name}: found a hook that waits until autograd has accumulated its "
                    "gradient (register_post_accumulate_grad_hook), which never happens to a "
                    "private model: clipped sums are put into p.grad at the end of backward. Do "
                    "what the hook does after loss.backward(), or around optimizer.step()."
                )
        if form is not None:
            where = path or "the model"
            raise FlashClippingError(f"{where}: found {form} on a private model. {_UNREDUCED}")


def refuse_new_class(module: nn.Module, new: Any) -> None:
    """Refuse to become a module of another class, as fully_shard and replicate do with modules."""
    raise FlashClippingError(
        f"{type(module).__name__}: found something that would make it a {new.__name__}, as "
        f"torch.distributed's fully_shard and replicate do. {_UNREDUCED}"
    )


def refuse_alone(module: Any, distributed: bool | None) -> None:
    """Raise ``ValueError`` for a model that several processes of ``torch.distributed`` would train
    apart, with nothing to reduce its gradients; unless ``distributed=False`` says that this is
    meant."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    if isinstance(module, DifferentiallyPrivateDistributedDataParallel) or is_sharded(module):
        return
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if running else 1
    if (processes := processes_of(module)) is not None:
        if distributed is None and processes.mesh.size() < world:
            raise ValueError(
                f"module ({type(module).__name__}): its layers are cut over "
                f"{processes.mesh.size()} of {world} processes, and nothing would "
                "reduce the gradients of the others' samples. Call fully_shard over the data "
                "dimension of the mesh as well, on blocks and on the model. Or pass "
                "distributed=False to make_private, if every group of processes is to train a "
                "model of its own."
            )
        return
    if distributed:
        raise ValueError(f"distributed=True: found {type(module).__name__} as module. {_INSTEAD}")
    if distributed is None and world > 1:
        for path, part in module.named_modules():
            refuse_inside(path, part)
        raise ValueError(
            f"module ({type(module).__name__}): torch.distributed runs {world} processes, and "
            f"nothing would reduce the model's gradients. {_INSTEAD} Or pass "
            "distributed=False to make_private, if every process is to train a model of its own."
        )
