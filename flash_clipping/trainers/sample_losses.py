"""The loss of every sample by itself, from what a Hugging Face model returns and the labels.

``outputs.loss`` of a model is a mean over the whole batch, often over its tokens: there one sample
changes how much another one counts. Here each sample's loss depends on that sample only: a mean
over its own tokens.

Shapes: ``B`` samples, ``T`` positions, ``K`` classes or tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Labels with this value count nothing.
IGNORED = -100


def sample_losses(
    outputs: Any,
    labels: Mapping[str, Tensor],
    *,
    shift: bool = False,
    problem_type: str | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """One loss for each sample: fp32 ``[B]``; fp64 for logits in fp64.

    Args:
        outputs: of the model, called without labels: ``logits`` ``[B, K]`` or ``[B, T, K]``; or
            ``start_logits`` and ``end_logits`` ``[B, T]``.
        labels: ``labels``: classes ``[B]`` or ``[B, T]``, numbers ``[B]`` or ``[B, K]``
            (regression), or one 0 or 1 for each class ``[B, K]``; or ``start_positions`` and
            ``end_positions`` ``[B]``.
        shift: position ``t`` predicts the label of position ``t + 1``.
        problem_type: as in the model's config; chosen as ``transformers`` does if ``None``.
        label_smoothing: weight of a uniform distribution over classes in every target.

    Guarantees:
        No loss depends on another sample. Labels of -100 count nothing; a sample without any other
        has loss 0.

    Raises:
        ValueError: labels and outputs of other kinds.
    """
    if {"start_positions", "end_positions"} == labels.keys():
        ends = [
            _positions_loss(_get(outputs, f"{end}_logits"), labels[f"{end}_positions"])
            for end in ("start", "end")
        ]
        return (ends[0] + ends[1]) / 2
    logits = _get(outputs, "logits")
    if labels.keys() != {"labels"} or logits is None:
        raise ValueError(
            f"sample_losses: found labels named {sorted(labels)} and outputs "
            f"{_described(outputs)}; expected 'labels' and 'logits', or start_positions and "
            "end_positions with their logits. Give compute_loss_func, which returns one loss for "
            "each sample, [B]."
        )
    target = labels["labels"]
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif target.is_floating_point():
            problem_type = "multi_label_classification"
        else:
            problem_type = "single_label_classification"
    logits = _at_least_fp32(logits)
    if problem_type == "single_label_classification" and _are_classes(logits, target):
        return _cross_entropy(logits, target, shift, label_smoothing)
    if target.numel() == logits.numel() and target.shape[:1] == logits.shape[:1]:
        target = target.view_as(logits).to(logits.dtype)
        if problem_type == "regression" and not label_smoothing:
            return _mean_of_sample(F.mse_loss(logits, target, reduction="none"))
        if problem_type == "multi_label_classification" and not label_smoothing:
            return _mean_of_sample(
                F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            )
    raise ValueError(
        f"sample_losses: found logits of shape {[*logits.shape]} and labels of shape "
        f"{[*target.shape]}, {target.dtype}, with problem_type={problem_type!r} and "
        f"label_smoothing={label_smoothing}; expected classes [B] or [B, T] for logits "
        "[B, K] or [B, T, K], or (without smoothing) numbers of the logits' shape. Give "
        "compute_loss_func, which returns one loss for each sample, [B]."
    )


def _are_classes(logits: Tensor, target: Tensor) -> bool:
    return logits.dim() in (2, 3) and logits.shape[:-1] == target.shape and logits.shape[-1] > 1


def _cross_entropy(logits: Tensor, target: Tensor, shift: bool, smoothing: float) -> Tensor:
    """The mean over a sample's own positions."""
    if target.dim() == 1:
        logits, target = logits.unsqueeze(1), target.unsqueeze(1)
    elif shift:
        logits, target = logits[:, :-1], target[:, 1:]
    losses_BT = F.cross_entropy(
        logits.transpose(1, 2),
        target,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    counted_B = (target != IGNORED).sum(1).clamp(min=1)
    return losses_BT.sum(1) / counted_B


def _positions_loss(logits_BT: Tensor, position_B: Tensor) -> Tensor:
    """Of the position where an answer starts or ends; positions outside count nothing."""
    length = logits_BT.shape[1]
    position_B = position_B.flatten()
    outside_B = (position_B < 0) | (position_B >= length)
    target_B = torch.where(outside_B, IGNORED, position_B)
    return F.cross_entropy(
        _at_least_fp32(logits_BT), target_B, reduction="none", ignore_index=IGNORED
    )


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _mean_of_sample(losses: Tensor) -> Tensor:
    if losses.dim() == 1:
        return losses
    return losses.flatten(1).mean(1)


def _get(outputs: Any, name: str) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    if isinstance(outputs, tuple | list) and name == "logits" and outputs:
        return outputs[0]  # return_dict=False
    return getattr(outputs, name, None)


def _described(outputs: Any) -> str:
    return str(sorted(outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
