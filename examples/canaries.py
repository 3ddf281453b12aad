"""Canaries of an audit, and scores of them: to copy into a run of your own (docs/auditing.md).

Shape suffixes: ``M`` canaries, ``B`` samples.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from flash_clipping.auditing import Audit, audit


class Canaries:
    """Samples that fair coins put into the training data.

    Args:
        samples: m canaries, as the training data's own samples are.
        seed: of the coins, for tests; ``None``: the operating system's.

    Attributes:
        included_M: which of them are in the data, bool. Code that computes scores must not
            know it.
    """

    def __init__(self, samples: Dataset[Any], seed: int | None = None) -> None:
        self.samples = samples
        m = len(samples)  # type: ignore[arg-type]
        if seed is None:
            self.included_M: Tensor = torch.tensor([bool(secrets.randbits(1)) for _ in range(m)])
        else:
            self.included_M = torch.rand(m, generator=torch.Generator().manual_seed(seed)) < 0.5

    def among(self, dataset: Dataset[Any]) -> ConcatDataset[Any]:
        """The training data with those canaries that are in it, at its end."""
        chosen = self.included_M.nonzero().flatten().tolist()
        return ConcatDataset([dataset, Subset(self.samples, chosen)])

    def audit(self, score_M: Tensor, **how: Any) -> Audit:
        """As :func:`audit`, with the coins of these canaries."""
        return audit(score_M, self.included_M, **how)


@torch.no_grad()
def loss_scores(
    model: nn.Module,
    samples: Dataset[Any],
    losses: Callable[[nn.Module, Any], Tensor],
    *,
    reference: nn.Module | None = None,
    batch_size: int = 64,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Tensor:
    """``[M]``, fp64: minus the loss of every canary, in evaluation mode.

    Args:
        model: after training.
        losses: ``losses(model, batch)`` gives one loss for each sample, ``[B]``.
        reference: a model that has not seen them, whose losses are subtracted: how likely a sample
            is anyhow says nothing.
        batch_size, collate_fn: of the loader.

    Raises:
        ValueError: not one loss for each sample.
    """
    found = []
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate_fn)
    for one in [model] if reference is None else [model, reference]:
        modes = [module.training for module in one.modules()]
        one.eval()
        found.append(torch.cat([losses(one, batch).double().cpu() for batch in loader]))
        for module, mode in zip(one.modules(), modes, strict=True):
            module.training = mode
    if found[0].shape != (len(samples),):  # type: ignore[arg-type]
        raise ValueError(f"found losses of shape {[*found[0].shape]}; expected one for each sample")
    return -found[0] if reference is None else found[1] - found[0]
