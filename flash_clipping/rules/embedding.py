"""``nn.Embedding`` and ``nn.EmbeddingBag``: row ``id_t`` of the gradient receives ``G_t``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.factors import EmbeddingBagGrad, EmbeddingGrad
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    as_BTd,
    register_rule,
)


def embedding_factor(ids: Tensor, G: Tensor, rows: int, padding_idx: int | None) -> EmbeddingGrad:
    """The factor of a table with so many rows: row ``ids[b, t]`` receives ``G[b, t]``."""
    ids_BT = ids.reshape(ids.shape[0], ids.shape[1:].numel())
    return EmbeddingGrad(ids_BT, as_BTd(G), rows, padding_idx)


@register_rule(nn.Embedding)
class EmbeddingRule(Rule):
    """``padding_idx`` receives no gradient; ``sparse=True`` still gives a dense ``p.grad``.

    Raises:
        ValueError: ``scale_grad_by_freq`` divides by counts over the whole batch, so one sample's
            gradient depends on the others.
    """

    def works_by_position(self, layer: nn.Embedding) -> bool:
        return True

    def can_be_traced(self, layer: nn.Embedding) -> bool:
        return layer.max_norm is None  # which changes the weight in forward

    def forward(self, layer: nn.Embedding, ids: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if layer.scale_grad_by_freq:
            raise UnsupportedLayer(
                "FC102 nn.Embedding(scale_grad_by_freq=True) mixes samples: its gradient depends "
                "on how often an id occurs in the whole batch. Set scale_grad_by_freq=False.",
                "{layer}.scale_grad_by_freq = False",
            )
        output = F.embedding(ids, layer.weight, layer.padding_idx, layer.max_norm, layer.norm_type)
        return output, (ids,)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        (ids,) = saved
        rows, padding_idx = layer.num_embeddings, layer.padding_idx
        return None, {"weight": embedding_factor(ids, grad_output, rows, padding_idx)}


@register_rule(nn.EmbeddingBag)
class EmbeddingBagRule(Rule):
    """Modes ``"sum"`` (with ``per_sample_weights``) and ``"mean"``; one bag is one sample.

    Raises:
        ValueError: ``mode="max"``, or ``scale_grad_by_freq``, which mixes samples.
    """

    def batch_axis(self, layer: nn.EmbeddingBag, default: int) -> int:
        return 0  # of the output; the ids of all bags may lie end to end

    def rows(self, layer: nn.EmbeddingBag, *inputs: Any) -> tuple[int, Tensor, bool] | None:
        offsets = inputs[1] if len(inputs) > 1 else None
        if offsets is None:
            return None
        return len(offsets) - int(layer.include_last_offset), offsets, True

    def forward(
        self,
        layer: nn.EmbeddingBag,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if layer.mode == "max" or layer.scale_grad_by_freq:
            raise UnsupportedLayer(
                f"FC117 nn.EmbeddingBag(mode={layer.mode!r}, scale_grad_by_freq="
                f"{layer.scale_grad_by_freq}) has no per-sample gradients here; expected mode "
                "'sum' or 'mean' and scale_grad_by_freq=False.",
                "{layer}.scale_grad_by_freq = False" if layer.scale_grad_by_freq else "",
            )
        output = F.embedding_bag(
            ids,
            layer.weight,
            offsets,
            max_norm=layer.max_norm,
            norm_type=layer.norm_type,
            mode=layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
        )
        return output, (ids, offsets, per_sample_weights, layer.weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        ids, offsets, per_sample_weights, table = saved
        B = grad_output.shape[0]
        ids_N = ids.reshape(-1)
        # Which bag every id belongs to.
        bags_N = torch.arange(ids.shape[0], device=ids.device)
        if offsets is None:
            bags_N = bags_N[:, None].expand(ids.shape).reshape(-1)
        else:
            starts = offsets[:-1] if layer.include_last_offset else offsets
            places_N = bags_N.to(offsets.dtype)
            bags_N = torch.searchsorted(starts.contiguous(), places_N, right=True) - 1
        grad_weights = None
        if len(needs.inputs) > 2 and needs.inputs[2]:  # modes other than "sum" take no weights
            grad_weights = (grad_output[bags_N] * table[ids_N].to(grad_output.dtype)).sum(1)
            if layer.padding_idx is not None:
                grad_weights = grad_weights * (ids_N != layer.padding_idx)
            grad_weights = grad_weights.view_as(per_sample_weights).to(per_sample_weights.dtype)
        weights_N = grad_output.new_ones(ids_N.shape)
        if per_sample_weights is not None:
            weights_N = per_sample_weights.reshape(-1).to(grad_output.dtype)
        if layer.padding_idx is not None:
            weights_N = weights_N * (ids_N != layer.padding_idx)
        if layer.mode == "mean":
            counts_B = weights_N.new_zeros(B).index_put((bags_N,), weights_N, accumulate=True)
            weights_N = weights_N / counts_B.clamp(min=1)[bags_N]
        rows = layer.num_embeddings
        factor = EmbeddingBagGrad(bags_N, ids_N, weights_N, grad_output, rows)
        return (None, None, grad_weights), {"weight": factor}
