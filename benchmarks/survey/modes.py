"""Ways in which people run models: each is a column of the survey's table.

A mode changes the batch, what is around the forward, or the model; what cannot be run in one has an
empty cell. Shape suffixes: ``B`` samples, ``T`` positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.survey.inputs import SAMPLES
from benchmarks.survey.kinds import Kind
from benchmarks.survey.measure import (
    LABELS,
    TOLERANCE_16,
    TOLERANCE_32,
    Outcome,
    measure,
    without_chance,
)
from flash_clipping import per_sample_loss

#: Inputs whose last axis is positions of a text.
_TEXTS = ("input_ids", "attention_mask", "decoder_input_ids", "token_type_ids", "bbox")


@dataclass(frozen=True)
class Where:
    """On which device, and in which dtype (a name of ``torch``); ``None``: in that of the kind."""

    device: str = "cpu"
    dtype: str | None = None

    @property
    def tolerance(self) -> float | None:
        """Largest error, where it is not that of float64."""
        tolerances = {"bfloat16": TOLERANCE_16, "float16": TOLERANCE_16, "float32": TOLERANCE_32}
        return None if self.dtype is None else tolerances.get(self.dtype)

    def made(self, kind: Kind, chance: bool = False) -> tuple[Any, dict[str, Any]]:
        """A model of this kind, and a batch."""
        dtype = kind.dtype if self.dtype is None else getattr(torch, self.dtype)
        torch.manual_seed(0)
        # Some models make tensors beside their parameters; in 16 bits these stay in 32.
        torch.set_default_dtype(dtype if dtype.itemsize > 2 else torch.float32)
        model = kind.build(chance).to(self.device, dtype)
        return model, {
            name: x.to(self.device, dtype if x.is_floating_point() else x.dtype)
            if isinstance(x, Tensor)
            else x
            for name, x in kind.inputs(model).items()
        }


def with_group_norm(model: nn.Module) -> nn.Module:
    """What ``ModuleValidator.fix`` does, without its copy of the model, which hooks and
    parametrizations do not allow."""
    from opacus.validators import ModuleValidator

    fixers = ModuleValidator.FIXERS
    for path, module in list(model.named_modules()):
        if path and type(module) in fixers:
            parent, _, name = path.rpartition(".")
            like = next(module.parameters(), torch.empty(0))
            fixed = fixers[type(module)](module).to(like.device, like.dtype)
            setattr(model.get_submodule(parent), name, fixed)
    return model


def mixes_by_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


#: (model, batch) -> arguments of :func:`measure`, ``batch`` among them where it is another one;
#: ``None`` where there is nothing to run.
Change = Callable[[Any, dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class Mode:
    """One way to run a model.

    Attributes:
        words: what the table says of it.
        chance: with what the configuration leaves out by chance.
        autocast: parameters are in 32 bits, and products in 16.
    """

    words: str
    change: Change = lambda model, batch: {}
    chance: bool = False
    autocast: bool = False

    def run(self, kind: Kind, where: Where) -> Outcome | None:
        """With GroupNorm in the place of BatchNorm; ``None`` where there is nothing to run."""
        if self.autocast:
            if where.dtype not in (None, "float32"):
                return None
            where = Where(where.device, "float32")
        model, batch = where.made(kind, self.chance)
        if mixes_by_batch_norm(model):
            model = with_group_norm(model)
        changes = self.change(model, batch)
        if changes is None:
            return None
        options = {"batch": batch, "tolerance": where.tolerance, "chance": self.chance} | changes
        if self.autocast:
            options["around"] = partial(torch.autocast, where.device, torch.bfloat16)
            options["tolerance"] = TOLERANCE_16
        return measure(model, B=SAMPLES, **options)


def _padded(side: str, model: Any, batch: dict[str, Any]) -> dict[str, Any] | None:
    """Samples of several lengths."""
    ids = batch.get("input_ids")
    if ids is None or ids.shape[-1] < 5 or len(ids) != SAMPLES:
        return None
    arguments = inspect.signature(model.forward).parameters
    if "attention_mask" in batch or "attention_mask" not in arguments:
        return None
    T, axes = ids.shape[-1], [1] * (ids.dim() - 1)
    lengths = T - torch.arange(SAMPLES, device=ids.device).view(-1, *axes)
    mask = torch.arange(T, device=ids.device) < lengths
    mask = (mask if side == "right" else mask.flip(-1)).expand(ids.shape)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    given = {"input_ids": ids.where(mask, padding), "attention_mask": mask.long()}
    return {"batch": batch | given}


def _labels(model: Any, batch: dict[str, Any]) -> dict[str, Any] | None:
    """A loss of some tokens: the label of the others is -100."""
    with torch.no_grad():
        output = without_chance(model)(**batch)
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != SAMPLES:
        return None
    T, V = logits.shape[1:]
    if T < 3 or V < 2:
        return None
    labels = torch.randint(0, V, (SAMPLES, T), device=logits.device)
    labels[:, 0] = -100
    labels[0, : T - 1] = -100  # of one sample a single token counts

    def losses(output: Any, given: Mapping[str, Any], B: int) -> Tensor:
        return per_sample_loss(output["logits"], given[LABELS])

    return {"batch": batch | {LABELS: labels}, "losses": losses}


def _dropout(model: Any, batch: dict[str, Any]) -> dict[str, Any] | None:
    chances = (
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "drop" in name)
    )
    return {} if any(chances) else None


def _checkpointing(model: Any, batch: dict[str, Any]) -> dict[str, Any] | None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None

    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    return {"prepare": prepare}


def _second(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A second batch, of more samples, in another order, and of shorter texts."""
    order = [2, 0, 1, 0]

    def row(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or len(x) % SAMPLES:
            return x
        return torch.cat([x.view(SAMPLES, -1, *x.shape[1:])[b] for b in order])

    more = {name: row(x) for name, x in batch.items()}
    texts = {name for name in more if name in _TEXTS and isinstance(more[name], Tensor)}
    if texts == more.keys():  # nothing that other inputs must fit
        more = {name: _shorter(name, x) for name, x in more.items()}
    return {"then": [(more, len(order))]}


def _shorter(name: str, x: Tensor) -> Tensor:
    """A text without its last two positions, if it has more than four."""
    axis = x.dim() - (2 if name == "bbox" else 1)
    length = x.shape[axis]
    return x.narrow(axis, 0, length - 2 if length > 4 else length)


#: By the names that ``--modes`` takes.
MODES: dict[str, Mode] = {
    "whole": Mode("as it is"),
    "right": Mode("padded right", partial(_padded, "right")),
    "left": Mode("padded left", partial(_padded, "left")),
    "labels": Mode("labels of −100", _labels),
    "dropout": Mode("dropout", _dropout, chance=True),
    "checkpointing": Mode("checkpointing", _checkpointing),
    "autocast": Mode("autocast", autocast=True),
    "second": Mode("second batch", _second),
}
