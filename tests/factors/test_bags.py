"""Norms of bags whose factors lie far apart."""

from __future__ import annotations

import torch

from flash_clipping.factors import EmbeddingBagGrad


def test_a_tiny_gradient_under_a_huge_weight_is_not_lost() -> None:
    """The square of the gradient is below what fp32 can hold; the product is not."""
    G_Bd = torch.full((1, 4), 1e-24)
    weights_N = torch.full((1,), 1e19)
    zeros = torch.zeros(1, dtype=torch.long)
    bag = EmbeddingBagGrad(zeros, zeros, weights_N, G_Bd, num_embeddings=3)
    expected = (G_Bd.double() * weights_N.double()).norm().item()
    found = bag.sqnorms("torch").sqrt().item()
    assert abs(found / expected - 1) <= 1e-5
