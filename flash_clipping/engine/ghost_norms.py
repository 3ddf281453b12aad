"""Flash clipping's norms for Opacus' own ``"ghost"`` mode."""

from __future__ import annotations

import math
from typing import Any

from opacus.grad_sample import register_norm_sampler
from torch import Tensor, nn

from flash_clipping.factors import EmbeddingGrad, LinearGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.ops.error_bounds import squared_norms, upper_bound
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
        What is released is formed by Opacus' second backward. What its products may lose of a
        sample whose positions nearly cancel is in no norm;
        :class:`~flash_clipping.FlashPrivacyEngine` bounds what it releases itself.
    """

    @register_norm_sampler(nn.Linear)
    def linear_norms(
        layer: Any, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        A_BTd, G_BTp = as_BTd(activations[0]), as_BTd(backprops)
        norms: dict[nn.Parameter, Tensor] = {}
        if layer.weight.requires_grad:
            factor = LinearGrad(A_BTd.to(G_BTp.dtype), G_BTp)
            norms[layer.weight] = _bound(factor, backend)
        if layer.bias is not None and layer.bias.requires_grad:
            sums = G_BTp.sum(1, dtype=accumulation_dtype(G_BTp.dtype))
            norms[layer.bias] = squared_norms(sums).sqrt_()
        return norms

    @register_norm_sampler(nn.Embedding)
    def embedding_norms(
        layer: Any, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        if not layer.weight.requires_grad:
            return {}
        ids = activations[0]
        ids_BT = ids.reshape(ids.shape[0], ids.shape[1:].numel())
        factor = EmbeddingGrad(ids_BT, as_BTd(backprops), layer.num_embeddings, layer.padding_idx)
        return {layer.weight: _bound(factor, backend)}


def _bound(factor: PerSampleGrad, backend: str) -> Tensor:
    """Norms ``[B]``; of samples whose positions nearly cancel, what is at least their norm."""
    sq_B = factor.sqnorms(backend)
    finite_B = sq_B.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.nan)
    return upper_bound(finite_B.clamp_(min=0).sqrt_(), factor.error_bound(backend))
