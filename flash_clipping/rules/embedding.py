"""``nn.Embedding``: row ``id_t`` of the gradient receives ``G_t``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.factors import Factor, Lookup
from flash_clipping.rules.registry import Needs, Rule, as_BTd, register_rule


@register_rule(nn.Embedding)
class EmbeddingRule(Rule):
    """``padding_idx`` receives no gradient; ``sparse=True`` still gives a dense ``p.grad``.

    Raises:
        ValueError: ``scale_grad_by_freq`` divides by counts over the whole batch, so one sample's
            gradient depends on the others.
    """

    broadcasts_over_batch = True

    def forward(self, layer: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if layer.scale_grad_by_freq:
            raise ValueError(
                "nn.Embedding(scale_grad_by_freq=True) mixes samples: its gradient depends on how "
                "often an id occurs in the whole batch. Set scale_grad_by_freq=False."
            )
        output = F.embedding(ids, layer.weight, layer.padding_idx, layer.max_norm, layer.norm_type)
        return output, (ids,)

    def backward(
        self, layer: Any, saved: tuple[Any, ...], grad_output: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Mapping[str, Factor]]:
        (ids,) = saved
        ids_BT = ids.reshape(ids.shape[0], ids.shape[1:].numel())
        lookup = Lookup(ids_BT, as_BTd(grad_output), layer.num_embeddings, layer.padding_idx)
        return None, {"weight": lookup}
