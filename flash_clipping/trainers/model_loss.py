"""The model's own loss: whether it shifts labels, and whether sample losses are equal to it.

``transformers`` has no public answer to the first question, and a wrong one trains a language model
to copy its input while every number of the run looks healthy. So the model is asked, before the
first step, with samples of the training data, without gradients and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.engine.token_losses import loss_of
from flash_clipping.trainers.sample_losses import IGNORED

#: Relative differences that are rounding: losses are means of many terms.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_16_BITS = 5e-2


@contextmanager
def asking(model: nn.Module) -> Iterator[None]:
    """Run a model for its answer: without gradients and dropout; nothing of it is changed."""
    with untouched(model), _seeded(model), torch.no_grad():
        model.eval()
        yield


def _seeded(model: nn.Module) -> Any:
    return random_state(list({p.device for p in model.parameters() if p.is_cuda}), seed=0)


def own_loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """The loss that a model of ``transformers`` returns, a scalar; ``None`` if it has none."""
    with _seeded(model):
        return loss_of(_without_penalty(model)(**inputs))


def _without_penalty(model: Any) -> nn.Module:
    """PEFT's AdaLoRA adds a penalty on weights to the loss of the model inside."""
    adapters = getattr(model, "peft_config", {})
    if any(hasattr(config, "orth_reg_weight") for config in adapters.values()):
        inside: nn.Module = model.get_base_model()
        return inside
    return model


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
        loss = own_loss(model, {**inputs, "labels": first})
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
        own = own_loss(model, batch) if isinstance(batch, Mapping) else None
        if own is None:
            return
        if own.isfinite():  # a mean over no label is NaN
            with _seeded(model):  # ViTMAE draws what it hides
                ours = losses(batch, 1)
            _compare(model, own, ours, "one sample")
            found.setdefault(_count_of_labels(batch), sample)
        if len(found) == 2:
            break
    pair = list(found.values())
    batch = collate(pair) if len(pair) == 2 else {}
    if not batch or any(not isinstance(x, Tensor) or len(x) != 2 for x in batch.values()):
        return  # rows of the batch are no samples
    both = losses(batch, 2)
    for row in (0, 1):
        own = own_loss(model, {name: x[row : row + 1] for name, x in batch.items()})
        if own is not None and own.isfinite():
            _compare(model, own, both[row : row + 1], "a sample in a batch of two")


def _compare(model: nn.Module, own: Tensor, losses: Tensor, what: str) -> None:
    dtypes = {own.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    if torch.is_autocast_enabled(own.device.type):
        dtypes.add(torch.get_autocast_dtype(own.device.type))
    tolerance = max(_TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS) for dtype in dtypes)
    ours, expected = float(losses.sum()), float(own)
    if losses.shape == (1,) and abs(ours - expected) <= tolerance * max(1.0, abs(expected)):
        return
    name = type(model).__name__
    raise ValueError(
        f"PrivateTrainer: found a loss of {ours:.6g} for {what} of train_dataset, where {name} "
        f"itself has {expected:.6g}. compute_sample_losses would train for something else than "
        f"{name} is evaluated by. Override it, with one loss for each sample:\n"
        "    class MyTrainer(PrivateTrainer):\n"
        "        def compute_sample_losses(self, model, inputs):  # [B], not reduced\n"
        "            ..."
    )


def _count_of_labels(batch: Mapping[str, Any]) -> int:
    """How many labels count: samples of different length differ in it."""
    labels = [x for name, x in batch.items() if name.endswith("labels") and isinstance(x, Tensor)]
    return sum(int((x != IGNORED).sum()) for x in labels)
