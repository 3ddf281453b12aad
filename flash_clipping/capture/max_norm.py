"""Embeddings with ``max_norm``, which write into their weights in forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from flash_clipping.errors import FlashClippingError, module_at

_WHY = (
    "It writes renormalised rows into the weight in every forward, without noise: which rows, "
    "tells which ids the batch holds. Frozen weights are no exception. Set max_norm=None; to keep "
    "rows short, renormalise all of them after optimizer.step()."
)


def refuse_max_norm(embeddings: Iterable[tuple[str, Any]]) -> None:
    """Refuse those of these embeddings, by path, that have a ``max_norm``.

    Raises:
        NotImplementedError: one has.
    """
    for path, module in embeddings:
        if module.max_norm is not None:
            raise NotImplementedError(
                f"{path or 'the model'} ({type(module).__name__}): found max_norm="
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
    """Refuses functions that renormalise rows of a weight while it is on.

    Raises:
        FlashClippingError: one is called; the weight is as it was.
    """

    def __enter__(self) -> NoRenormalisation:
        self._grad_mode = torch.is_grad_enabled()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        if kind is not None:
            # ``torch.no_grad`` ends through this mode: an interrupt here must not leave it on.
            torch.set_grad_enabled(self._grad_mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            if kwargs.get("max_norm") is not None:
                raise FlashClippingError(
                    f"torch.nn.functional.{func.__name__}: found max_norm={kwargs['max_norm']} in "
                    f"the model's forward. {_WHY}"
                )
        elif func is torch.embedding_renorm_:
            raise FlashClippingError(f"torch.embedding_renorm_ in the model's forward. {_WHY}")
        return func(*args, **kwargs)
