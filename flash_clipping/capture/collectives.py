"""Communication that a model does by hand, in its forward: refused, as nobody knows what it means.

A layer that adds its output up over processes (tensor parallelism as Megatron has it) holds a part
of the gradient, and its norm would be taken for the whole. A statistic over processes makes a
sample's gradient depend on samples elsewhere. ``DTensor`` and ``fully_shard`` say what they do, and
are served; of a collective on plain tensors nothing is known. It is looked for before any step.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch import distributed as dist

from flash_clipping._compat import DispatchMode
from flash_clipping.errors import FlashClippingError

#: Namespaces of operators that communicate, and what of them does not.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_HARMLESS = ("wait_tensor", "barrier", "monitored_barrier_")

#: Who may communicate: packages of PyTorch that know how tensors lie, and what looks together.
_MAY = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "flash_clipping.distributed",
    "flash_clipping.layers.exchange",
)


def collectives_refused() -> AbstractContextManager[Any]:
    """While a model is looked at: collectives of its own are an error.

    Raises:
        FlashClippingError: inside, by what runs one.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _Refuses() if several else nullcontext()


class _Refuses(DispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "namespace", ""), func.overloadpacket.__name__
        if name[0] in _NAMESPACES and name[1] not in _HARMLESS:
            _refuse_by_hand("::".join(name))
        return func(*args, **(kwargs or {}))


def _refuse_by_hand(operator: str) -> None:
    caller: FrameType | None = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_MAY):
            return
        if module == __name__.rpartition(".")[0] + ".proof.runs":
            break  # what runs the model
        if caller is None and not module.startswith(("torch.", "flash_clipping.")):
            caller = frame
        frame = frame.f_back
    where = "" if caller is None else f" ({caller.f_code.co_filename}:{caller.f_lineno})"
    raise FlashClippingError(
        f"the model: found a collective, {operator}, in its forward{where}. What processes tell "
        "each other there by hand cannot be followed: a layer that is cut over processes has a "
        "part of a sample's gradient, and its norm would be taken for the whole. Cut layers by "
        "torch.distributed.tensor.parallel.parallelize_module, whose DTensors say how they lie."
    )
