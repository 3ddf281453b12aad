"""Flash clipping's norms for Opacus' own ``"ghost"`` mode."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import register_norm_sampler
from torch import Tensor, nn

from flash_clipping.factors import accumulation_dtype
from flash_clipping.ops.embedding import embedding_sqnorms
from flash_clipping.ops.gram import gram_sqnorms
from flash_clipping.rules.registry import as_BTd


def register_flash_norm_samplers(backend: str = "auto") -> None:
    """Make Opacus' ``grad_sample_mode="ghost"`` compute its norms with this library.

    Replaces Opacus' norm samplers for ``nn.Linear`` and ``nn.Embedding`` through its public
    ``register_norm_sampler``, for models wrapped already and later ones alike. Training code stays
    as it is. The second backward pass stays too; for one pass use
    :class:`~flash_clipping.FlashPrivacyEngine`.

    Args:
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Guarantees:
        Norms are accumulated in fp32 whatever the model's dtype, inputs may have any number of
        dimensions, and no ``B x T x T`` matrix is written.
    """

    @register_norm_sampler(nn.Linear)
    def linear_norms(
        layer: Any, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        A_BTd, G_BTp = as_BTd(activations[0]), as_BTd(backprops)
        norms: dict[nn.Parameter, Tensor] = {}
        has_bias = layer.bias is not None and layer.bias.requires_grad
        if layer.weight.requires_grad:
            sq_LB, bias_sq_LB = gram_sqnorms(
                A_BTd.to(G_BTp.dtype), [G_BTp], bias=has_bias, backend=backend
            )
            norms[layer.weight] = sq_LB[0].sqrt()
            if bias_sq_LB is not None:
                norms[layer.bias] = bias_sq_LB[0].clamp(min=0).sqrt()
        elif has_bias:
            sums = G_BTp.sum(1, dtype=accumulation_dtype(G_BTp.dtype))
            norms[layer.bias] = torch.linalg.vector_norm(sums, dim=1)
        return norms

    @register_norm_sampler(nn.Embedding)
    def embedding_norms(
        layer: Any, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        if not layer.weight.requires_grad:
            return {}
        ids = activations[0]
        ids_BT = ids.reshape(ids.shape[0], ids.shape[1:].numel())
        sq_B = embedding_sqnorms(
            ids_BT, as_BTd(backprops), padding_idx=layer.padding_idx, backend=backend
        )
        return {layer.weight: sq_B.sqrt()}
