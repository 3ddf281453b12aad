"""The loss of each sample's own tokens.

A mean over the labels of the whole batch makes the gradient of one sample depend on how many labels
the others have: with ``n_b`` labels in sample ``b``, that is ``sum_b S_b / sum_b n_b``, and no
clipping of gradients bounds what one sample changes. The loss of a sample is ``S_b / n_b`` here.

Shape suffixes: ``B`` samples, ``T`` positions, ``V`` classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.errors import InvalidType, InvalidValue


def per_sample_loss(
    logits: Any,
    labels: Tensor,
    *,
    shift: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of every sample, as the mean over its own labels.

    Args:
        logits: ``[B, ..., V]``, floating point, or an output of transformers that has them.
        labels: ``[B, ...]``, integers below ``V``, or ``ignore_index``.
        shift: position ``t`` predicts label ``t + 1``, as causal models of transformers take
            ``labels=`` that are their own input ids.
        ignore_index: labels that do not count.
        label_smoothing: as of ``torch.nn.functional.cross_entropy``.

    Returns:
        ``[B]``, fp32 (fp64 for logits in fp64); 0 for a sample without labels. Take ``.mean()`` of
        it with ``loss_reduction="mean"``, ``.sum()`` with ``"sum"``.

    Guarantees:
        The loss of one sample does not depend on the others, nor on how long the batch is padded.
        Nothing waits for the device.

    Raises:
        ValueError: the shapes do not fit.
    """
    logits = logits if isinstance(logits, Tensor) else logits_of(logits)
    if logits.shape[:-1] != labels.shape or labels.dim() == 0:
        raise InvalidValue(
            f"FC303 per_sample_loss: found logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)}; expected logits [B, ..., V] and labels [B, ...]."
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = F.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if labels.dim() == 1:
        return losses
    shape = len(labels), labels[:1].numel()
    counts_B = (labels != ignore_index).reshape(shape).sum(1).clamp(min=1)
    return losses.reshape(shape).sum(1) / counts_B


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned; ``TypeError`` if there are none."""
    logits = part_of(output, "logits")
    if not isinstance(logits, Tensor):
        raise InvalidType(f"FC303 found {type(output).__name__}; expected logits, or with .logits.")
    return logits


def part_of(output: Any, name: str) -> Any:
    """The part of a model's output by this name; ``None`` if it is not there."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
