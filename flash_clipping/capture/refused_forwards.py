"""What a model's forward may not do (renormalise rows of a weight, communicate by hand), and how a
wrapped model may not be run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.cuda import is_current_stream_capturing
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import DispatchMode
from flash_clipping.errors import FlashClippingError, NotServed, module_at

_WHY = (
    "It writes renormalised rows into the weight in every forward, without noise: which rows, "
    "tells which ids the batch holds. Frozen weights are no exception. Set max_norm=None; to keep "
    "rows short, renormalise all of them after optimizer.step()."
)


def refuse_max_norm(embeddings: Iterable[tuple[str, Any]]) -> None:
    """Refuse those of these embeddings, by path, that have a ``max_norm``."""
    for path, module in embeddings:
        if module.max_norm is not None:
            raise NotServed(
                f"FC103 {path or 'the model'} ({type(module).__name__}): found max_norm="
                f"{module.max_norm}. {_WHY}\n    {module_at(path)}.max_norm = None"
            )


def embeddings_of(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The embeddings in a model, by path."""
    return [
        (path, module)
        for path, module in root.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]


class NoRenormalisation(TorchFunctionMode):
    """Refuses functions that renormalise rows of a weight, which stays as it was."""

    def __enter__(self) -> NoRenormalisation:
        self._grad_mode = torch.is_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)  # type: ignore[no-untyped-call]
        if kind is not None:
            # ``torch.no_grad`` ends through this mode: an interrupt here must not leave it on.
            torch.set_grad_enabled(self._grad_mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            if kwargs.get("max_norm") is not None:
                raise FlashClippingError(
                    f"FC103 torch.nn.functional.{func.__name__}: found "
                    f"max_norm={kwargs['max_norm']} in the model's forward. {_WHY}"
                )
        elif func is torch.embedding_renorm_:
            raise FlashClippingError(f"FC103 found torch.embedding_renorm_ in forward. {_WHY}")
        return func(*args, **kwargs)


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
    """While a model is checked: collectives of its own on plain tensors are an error, as nobody
    knows what they mean. A layer whose output is added up over processes holds a part of the
    gradient, and a statistic over processes mixes samples; ``DTensor`` and ``fully_shard`` say
    what they do, and are supported."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _Refuses() if several else nullcontext()


class _Refuses(DispatchMode):  # type: ignore[misc]  # a private class
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
        f"FC650 the model: found a collective, {operator}, in its forward{where}: a layer that is "
        "cut over processes by hand has a part of a sample's gradient in each. Cut layers by "
        "torch.distributed.tensor.parallel.parallelize_module, whose DTensors say how they lie."
    )


def refuse_compiled_autograd() -> NoReturn:
    """Refuse a backward that Dynamo traces: nothing would be recorded, and norms would be old."""
    raise FlashClippingError(
        "FC436 the model: compiled autograd is on (torch._dynamo.compiled_autograd, or "
        "torch._dynamo.config.compiled_autograd = True with a compiled training step). It replaces "
        "autograd's engine. Switch it off; compile the model alone, wrapped.compile()."
    )


def refuse_graph_capture() -> None:
    """Refuse a backward pass that is captured as a CUDA graph, but not by ``GraphedStep``."""
    if is_current_stream_capturing():
        raise FlashClippingError(
            "FC701 A backward pass of flash clipping is being captured as a CUDA graph. A replay "
            "would read tables that are gone by then, and leave no norms. Capture the step with "
            "flash_clipping.GraphedStep, which is given the wrapped model (or what holds the "
            "hooks), or run it outside torch.cuda.graph."
        )


def refuse_threads(found: str, running: str) -> NoReturn:
    """Refuse that a second thread calls one model's forward or backward."""
    raise FlashClippingError(
        f"FC435 Two threads use one wrapped model at the same time: {found} was called while "
        f"another thread's {running} runs (or failed, with its exception still held). Hold a lock "
        "from forward to the end of backward, or give each thread a copy of the model."
    )
