"""Linear layers and embeddings on wires.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` and ``p`` features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.capture.compiled.wiring import Meta, Seen, Wires, Wiring, operands_of, sum_rows
from flash_clipping.factors import Dense, Factor, Lookup, Outer, RowSum, accumulation_dtype
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.registry import as_BTd


class _LinearFunction(torch.autograd.Function):
    """``y = x Wᵀ + b``, whose wires get ``x``, ``G`` and ``Σ_t G``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_x: Tensor | None,
        of_G: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wired = of_x is not None, of_bias is not None
        return F.linear(x, weight, bias).detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        product, vector = ctx.wired
        # Keys get theirs transposed. One copy in the graph, which the product needs as well, is in
        # place of one for every kernel that reads it.
        G = G.contiguous()
        return (
            G @ weight,
            None,
            None,
            x if product else None,
            G if product else None,
            sum_rows(G) if vector else None,
        )


class LinearWiring(Wiring):
    any_axes = True
    transposed = False

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        y_shape, dtype = seen.y_shape, seen.y_dtype  # that of both operands
        vector = ((y_shape[0], y_shape[-1]), accumulation_dtype(dtype))
        return (seen.x_shape, dtype), (y_shape, dtype), vector

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        product = "weight" in names  # which a bias needs no more than
        return product, product, not product

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = operands_of(x, layer.weight, layer.bias)
        return _LinearFunction.apply(x, weight.mT if self.transposed else weight, bias, *wires)

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        x, G, vector_Bp = grads
        if x is None:
            return {"bias": Dense(vector_Bp)}
        A_BTd, G_BTp = as_BTd(x), on_16_bytes(as_BTd(G))
        outer = Outer(G_BTp, A_BTd) if self.transposed else Outer(A_BTd, G_BTp)
        return {"weight": outer, "bias": RowSum(G_BTp)}


class TransposedLinearWiring(LinearWiring):
    transposed = True


class _EmbeddingFunction(torch.autograd.Function):
    """Rows of a table, whose wires get the ids and ``G``."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, of_ids: Tensor, of_G: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight).detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        return None, None, ids.to(torch.float64), G  # a gradient holds no integers


class EmbeddingWiring(Wiring):
    any_axes = True

    def serves(self, layer: Any) -> bool:
        return not layer.scale_grad_by_freq and layer.max_norm is None

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        return (seen.x_shape, torch.float64), (seen.y_shape, seen.y_dtype)

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return True, True

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        return _EmbeddingFunction.apply(x, layer.weight.detach(), *wires)

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        ids, G = grads
        ids_BT = ids.to(torch.int64).reshape(ids.shape[0], ids.shape[1:].numel())
        lookup = Lookup(ids_BT, as_BTd(G), layer.num_embeddings, layer.padding_idx)
        return {"weight": lookup}
