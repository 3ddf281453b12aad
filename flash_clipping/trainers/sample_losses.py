"""The loss of every sample alone, from what a Hugging Face model returns and the labels.

Shapes: ``B`` samples, ``T`` positions, ``K`` classes or tokens of the vocabulary; ``R`` rows and
``U`` units where a sample is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.engine.token_losses import part_of, per_sample_loss
from flash_clipping.errors import InvalidValue
from flash_clipping.hugging_face.losses import has_penalty, loss_of

#: Labels with this value count nothing, in per_sample_loss as well.
IGNORED = -100

#: Relative differences that are rounding: losses are means of many terms. 5e-2 in 16 bits.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}

_INSTEAD = (
    "Give compute_loss_func, or override compute_sample_losses(model, inputs): one loss for each "
    "sample, [B]."
)


def sample_losses(
    outputs: Any,
    labels: Mapping[str, Tensor],
    *,
    model: Any = None,
    inputs: Mapping[str, Any] | None = None,
    shift: bool | None = False,
    label_smoothing: float = 0.0,
    units: tuple[Tensor, int] | None = None,
) -> Tensor:
    """One loss for each sample: fp32 ``[B]``; fp64 for logits in fp64.

    Args:
        outputs: of the model, called without labels: ``logits`` ``[B, K]`` or ``[B, T, K]``; or
            ``start_logits`` and ``end_logits`` ``[B, T]``.
        labels: ``labels``: classes ``[B]`` or ``[B, T]``, numbers ``[B]`` or ``[B, K]``
            (regression), one 0 or 1 for each class ``[B, K]``, or integers, for each token
            ``[B, T]``; or ``start_positions`` and ``end_positions`` ``[B]``.
        model: of ``transformers``, whose config has the kind of problem. Speech needs more of it.
        inputs: what it was called with. Where ``attention_mask`` ``[B, T]`` is 0, a token's 0 or 1
            counts nothing.
        shift: position ``t`` predicts the label of position ``t + 1``; ``None`` if it is not known,
            which is an error for labels ``[B, T]``.
        label_smoothing: weight of a uniform distribution over classes in every target.
        units: where a sample is no row: the unit of every row ``[R]``, or of every position
            ``[R, T]``, -1 for none, and how many units there are. Losses are then ``[U]``: means
            over a unit's rows, or over its own tokens. With ``shift`` the first label of a unit
            counts nothing: it is predicted from another unit.

    Guarantees:
        No loss depends on another sample. Labels of -100 count nothing; a sample without any other
        has loss 0.

    Raises:
        ValueError: labels and outputs of other kinds.
    """
    inputs, config = inputs or {}, getattr(model, "config", None)
    is_tuple = isinstance(outputs, tuple | list) and len(outputs) > 0  # return_dict=False
    logits = outputs[0] if is_tuple else part_of(outputs, "logits")
    if labels.keys() == {"start_positions", "end_positions"}:
        return _means(_of_answers(outputs, labels), None, units)
    if labels.keys() != {"labels"} or logits is None:
        names = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise InvalidValue(
            f"FC805 sample_losses: found labels named {sorted(labels)} and outputs {names}; "
            "expected 'labels' and 'logits', or start_positions and end_positions with their "
            f"logits. {_INSTEAD}"
        )
    target = labels["labels"]
    if hasattr(config, "ctc_loss_reduction") and logits.dim() == 3 and target.dim() == 2:
        return _means(_of_speech(model, inputs, logits, target), None, units)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    problem = getattr(config, "problem_type", None)
    if problem is None:
        kind = "multi" if target.is_floating_point() else "single"
        problem = "regression" if logits.shape[-1] == 1 else f"{kind}_label_classification"
    is_single = problem == "single_label_classification"
    are_classes = logits.dim() in (2, 3) and logits.shape[:-1] == target.shape
    if is_single and are_classes and logits.shape[-1] > 1:
        target = _shifted(target, shift, units) if target.dim() > 1 else target
        losses = per_sample_loss(
            logits.flatten(0, -2), target.flatten(), label_smoothing=label_smoothing
        )
        return _means(losses.view(target.shape), target != IGNORED, units)
    is_alike = target.numel() == logits.numel() and target.shape[:1] == logits.shape[:1]
    is_binary = is_single and logits.dim() == 2
    is_known = is_binary or problem in ("regression", "multi_label_classification")
    if not (is_alike and is_known) or label_smoothing:
        raise InvalidValue(
            f"FC805 sample_losses: found logits of shape {[*logits.shape]} and labels of shape "
            f"{[*target.shape]}, {target.dtype}, with problem_type={problem!r} and "
            f"label_smoothing={label_smoothing}; expected classes [B] or [B, T] for logits "
            f"[B, K] or [B, T, K], or (without smoothing) numbers of the logits' shape. {_INSTEAD}"
        )
    target = target.view_as(logits).to(logits.dtype)
    if problem == "regression":
        return _means(F.mse_loss(logits, target, reduction="none"), None, units)
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    mask = inputs.get("attention_mask") if is_binary else None
    return _means(losses, None if mask is None else mask == 1, units)


def _shifted(target: Tensor, shift: bool | None, units: tuple[Tensor, int] | None) -> Tensor:
    """``[R, T]``: the label that each position predicts."""
    if shift is None:
        raise InvalidValue(
            f"FC805 sample_losses: found labels of shape {[*target.shape]} for a model without a "
            "loss of its own; expected one, which tells whether a position predicts its own label "
            f"or the next one's. {_INSTEAD}"
        )
    if not shift:
        return target
    nexts, last_R1 = target[:, 1:], torch.full_like(target[:, :1], IGNORED)
    if units is not None and units[0].dim() > 1:
        # A document's last position would predict the first token of another.
        nexts = nexts.masked_fill(units[0][:, :-1] != units[0][:, 1:], IGNORED)
    return torch.cat([nexts, last_R1], 1)


def _of_answers(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """``[R]``: of where an answer starts and ends; positions outside count nothing."""
    losses = []
    for end in ("start", "end"):
        logits_RT, position_R = part_of(outputs, f"{end}_logits"), labels[f"{end}_positions"]
        position_R = position_R.flatten()
        outside_R = (position_R < 0) | (position_R >= logits_RT.shape[1])
        losses.append(per_sample_loss(logits_RT, torch.where(outside_R, IGNORED, position_R)))
    return (losses[0] + losses[1]) / 2


def _of_speech(model: Any, inputs: Mapping[str, Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Connectionist temporal classification ``[R]``, fp32, by a ``...ForCTC`` of ``transformers``.
    ``labels``: ``[R, L]``, characters, and negative numbers or blanks behind the last."""
    config = model.config
    signal, mask = inputs[model.main_input_name], inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(signal.shape[:2], dtype=torch.long, device=signal.device)
    lengths_R = mask.sum(-1).long()
    for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
        if (frames_of := getattr(model, name, None)) is not None:
            lengths_R = frames_of(lengths_R).long()
    blank = config.pad_token_id
    counted_R = ((labels >= 0) & (labels != blank)).sum(-1)
    with torch.backends.cudnn.flags(enabled=False):
        losses_R = F.ctc_loss(
            F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1),
            labels.clamp(min=0),
            lengths_R,
            counted_R,
            blank=blank,
            reduction="none",
            zero_infinity=config.ctc_zero_infinity,
        )
    return losses_R / counted_R.clamp(min=1) if config.ctc_loss_reduction == "mean" else losses_R


def _means(losses: Tensor, counted: Tensor | None, units: tuple[Tensor, int] | None) -> Tensor:
    """Means of the losses that count (``None``: all), of each row ``[R]``, or of each unit ``[U]``;
    0 for one without any."""
    of_rows = units is None or units[0].dim() == 1
    if counted is not None:
        # Not a product: it would make NaN of a loss that is infinite and does not count.
        losses = torch.where(counted, losses, 0.0)
    if of_rows and losses.dim() > 1:
        counts = losses[0].numel() if counted is None else counted.flatten(1).sum(1).clamp(min=1)
        losses = losses.flatten(1).sum(1) / counts
    if units is None:
        return losses
    index, count = units
    if index.shape != losses.shape:
        raise InvalidValue(
            f"FC805 sample_losses: found units that are parts of rows, {[*index.shape]}, and one "
            f"loss for each row; expected classes for each position. {_INSTEAD}"
        )
    is_of_unit = index >= 0 if of_rows or counted is None else counted & (index >= 0)
    index = index.clamp(min=0).long().flatten()
    numbers = losses.new_zeros(count).index_add(0, index, is_of_unit.to(losses.dtype).flatten())
    losses = torch.where(is_of_unit, losses, 0.0).flatten()
    return losses.new_zeros(count).index_add(0, index, losses) / numbers.clamp(min=1)


# -- the model's own loss: whether it shifts labels, and whether losses of samples are equal to it -
#
# transformers has no public answer to the first question, and a wrong one trains a language model
# to copy its input while every number of the run looks healthy. So the model is asked.


@contextmanager
def asking(model: nn.Module) -> Iterator[None]:
    """Run a model without gradients and dropout; nothing of it is changed."""
    with untouched(model), seeded(model), torch.no_grad():
        model.eval()
        yield


def seeded(model: nn.Module) -> Any:
    """Draws are the same in each of these contexts."""
    return random_state(list({p.device for p in model.parameters() if p.is_cuda}), seed=0)


def _own_loss(model: nn.Module, inputs: Any) -> Tensor | None:
    """The loss that a model of ``transformers`` returns, a scalar; ``None`` if it has none."""
    inside: Any = model.get_base_model() if has_penalty(model) else model  # type: ignore[operator]
    with seeded(model):
        return loss_of(inside(**inputs)) if isinstance(inputs, Mapping) else None


def shifts_labels(
    model: nn.Module, samples: list[Any], collate: Callable[[list[Any]], Any]
) -> bool | None:
    """Whether position ``t`` predicts the label of position ``t + 1`` in the model's own loss;
    ``None`` if it has none. A loss that shifts labels does not see the first one: with that label
    alone it is a mean of nothing."""
    for sample in samples:
        inputs = collate([sample])
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
            return False
        counted = labels[labels >= 0]
        if labels.shape[1] < 2 or not len(counted):
            continue
        first = torch.full_like(labels, IGNORED)
        first[:, 0] = counted[0]
        loss = _own_loss(model, {**inputs, "labels": first})
        return None if loss is None else not bool(loss > 0)
    return False


def compare(
    model: nn.Module,
    samples: list[Any],
    collate: Callable[[list[Any]], Any],
    losses: Callable[[Any, int], Tensor],
) -> None:
    """Raise ``ValueError``, with both numbers, where the losses of samples differ from the model's
    own: of one sample at a time, and of two with labels of different number in one batch."""
    found: dict[int, Any] = {}
    for sample in samples:
        batch = collate([sample])
        if (own := _own_loss(model, batch)) is None:
            return
        if own.isfinite():  # a mean over no label is NaN
            with seeded(model):  # ViTMAE draws what it hides
                _compare(model, own, losses(batch, 1), "one sample")
            # How many labels count: samples of different length differ in it.
            named = [x for name, x in batch.items() if name.endswith("labels")]
            counts = [int((x != IGNORED).sum()) for x in named if isinstance(x, Tensor)]
            found.setdefault(sum(counts), sample)
        if len(found) == 2:
            break
    else:
        return
    batch = collate([*found.values()])
    if any(not isinstance(x, Tensor) or len(x) != 2 for x in batch.values()):
        return  # rows of the batch are no samples
    both = losses(batch, 2)
    for row in (0, 1):
        own = _own_loss(model, {name: x[row : row + 1] for name, x in batch.items()})
        if own is not None and own.isfinite():
            _compare(model, own, both[row : row + 1], "a sample in a batch of two")


def _compare(model: nn.Module, own: Tensor, losses: Tensor, what: str) -> None:
    dtypes = {own.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    if torch.is_autocast_enabled(own.device.type):
        dtypes.add(torch.get_autocast_dtype(own.device.type))
    tolerance = max(_TOLERANCES.get(dtype, 5e-2) for dtype in dtypes)
    ours, expected = float(losses.sum()), float(own)
    if losses.shape == (1,) and abs(ours - expected) <= tolerance * max(1.0, abs(expected)):
        return
    raise InvalidValue(
        f"FC806 PrivateTrainer: found a loss of {ours:.6g} for {what} of train_dataset, where "
        f"{type(model).__name__} itself has {expected:.6g}. Override compute_sample_losses, with "
        "one loss for each sample:\n"
        "    class MyTrainer(PrivateTrainer):\n"
        "        def compute_sample_losses(self, model, inputs):  # [B], not reduced\n"
        "            ..."
    )
