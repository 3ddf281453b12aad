"""A user's batch and loss: the whole batch, single samples, all samples but one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import DROPOUTS, pytree
from flash_clipping.capture.image_patches import parts_of_samples, rows_of_samples

#: ``loss(model, batch)``: one loss per sample, or a scalar reduced over the samples.
Loss = Callable[[Any, Any], Tensor]


class BadBatchError(ValueError):
    """A batch or a loss that no check can be made with; the message says what to change."""


class Samples:
    """A batch of a model, and parts of it."""

    def __init__(self, batch: Any, batch_first: bool, model: nn.Module):
        tree = _plain_mapping(batch)
        self._leaves, self._spec = pytree.tree_flatten(tree)
        parts = parts_of_samples(model, tree) if isinstance(tree, Mapping) else {}
        #: The sample of each row of tensors that have no axis for samples.
        self._parts = [parts.get(id(leaf)) for leaf in self._leaves]
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        axis = 0 if batch_first else 1
        sizes = [leaf.shape[axis] for leaf in tensors if leaf.dim() > axis]
        if not sizes:
            raise BadBatchError(
                f"The batch ({type(batch).__name__}) holds no tensor with a batch axis "
                f"(axis {axis}). Return tensors, or tuples, lists or dicts of tensors."
            )
        self.size = sizes[0]
        if self.size == 0:
            raise BadBatchError("The batch is empty: there is no sample to check.")
        self._axes = [self._axis(leaf, axis) for leaf in self._leaves]
        self.notes = [
            f"A tensor of shape {tuple(leaf.shape)} in the batch has no axis of {self.size} "
            "samples: every sample sees all of it."
            for leaf, found, part in zip(self._leaves, self._axes, self._parts, strict=True)
            if isinstance(leaf, Tensor) and leaf.dim() and found is None and part is None
        ]

    def _axis(self, leaf: Any, axis: int) -> int | None:
        if not isinstance(leaf, Tensor):
            return None
        # With batch_first=False, labels are still one per sample.
        for candidate in (axis, 0) if leaf.dim() == 1 else (axis,):
            if leaf.dim() > candidate and leaf.shape[candidate] == self.size:
                return candidate
        return None

    @property
    def all(self) -> Any:
        return pytree.tree_unflatten(list(self._leaves), self._spec)

    def take(self, samples: Sequence[int]) -> Any:
        leaves = []
        for leaf, axis, part in zip(self._leaves, self._axes, self._parts, strict=True):
            if part is not None:
                leaf = rows_of_samples(leaf, part, samples)
                leaf = leaf if len(leaf) else None  # texts without images
            elif axis is not None:
                leaf = leaf.index_select(axis, torch.tensor(samples, device=leaf.device))
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self._spec)

    def other_sizes(self) -> list[int]:
        """Sizes of at least 2 that other axes of the tensors with samples have, none twice."""
        found: dict[int, None] = {}
        for leaf, axis in zip(self._leaves, self._axes, strict=True):
            if axis is not None:
                for other, size in enumerate(leaf.shape):
                    if other != axis and size > 1:
                        found[size] = None
        return [*found]

    def with_fewer_labels(self, ignored: int) -> Iterator[tuple[bool, Any]]:
        """Batches in which the last half of the first sample is ``ignored``, in one tensor of
        integers that may be labels; and whether some were ignored before. Where none were, not on
        a GPU, which an index that is out of range would take down."""
        for number, (leaf, axis) in enumerate(zip(self._leaves, self._axes, strict=True)):
            if axis != 0 or leaf.dim() != 2 or leaf.shape[1] < 2 or leaf.dtype != torch.int64:
                continue
            some = bool((leaf == ignored).any())
            if leaf.device.type != "cpu" and not some:
                continue
            shorter = leaf.clone()
            shorter[0, leaf.shape[1] // 2 :] = ignored
            leaves = [*self._leaves[:number], shorter, *self._leaves[number + 1 :]]
            yield some, pytree.tree_unflatten(leaves, self._spec)

    def without(self, sample: int) -> Any:
        return self.take([b for b in range(self.size) if b != sample])


@dataclass
class Task:
    """The loss, and how to call it."""

    loss: Loss
    reduction: str
    batch_size: int
    seed: int
    #: How many losses there were the last time, if they were not reduced.
    counted: int | None = None

    def __call__(self, model: Any, batch: Any, seed: int = 0) -> Tensor:
        """The loss of the batch as a scalar; the generators are left as they were."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed + seed)
            losses = self.loss(model, batch)
        if not isinstance(losses, Tensor) or losses.dim() > 1:
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            raise BadBatchError(
                "loss(model, batch) must return one loss per sample, [B], or a scalar tensor; "
                f"found {found[:200]}."
            )
        self.counted = len(losses) if losses.dim() == 1 else None
        if losses.dim() == 1:
            return losses.mean() if self.reduction == "mean" else losses.sum()
        return losses

    def value(self, model: nn.Module, batch: Any, seed: int = 0) -> float:
        with torch.no_grad():
            return float(self(model, batch, seed))


def squared_outputs(batch_first: bool) -> Loss:
    """The loss when the user gives none: a weighted square, so that no gradient is constant."""

    def loss(model: Any, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        parts = []
        for leaf in _output_tensors(output):
            if leaf.is_floating_point() and leaf.dim() > 1:
                values = (leaf if batch_first else leaf.transpose(0, 1)).flatten(1)
                weight = torch.linspace(0.5, 1.5, values.shape[1], device=values.device)
                parts.append((values.square() * weight.to(values.dtype)).mean(1))
        if not parts:
            raise BadBatchError(
                f"The model's output ({type(output).__name__}) holds no floating-point tensor "
                "[B, ...] to make a loss of. Give a loss: return (model, batch, loss)."
            )
        return torch.stack(parts).sum(0)

    return loss


def _output_tensors(output: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = [getattr(output, f.name) for f in dataclasses.fields(output)]
    leaves = pytree.tree_leaves(_plain_mapping(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _plain_mapping(tree: Any) -> Any:
    # A user's own mapping (Hugging Face's BatchEncoding) is a leaf to pytree.
    return dict(tree) if isinstance(tree, Mapping) else tree


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, _plain_mapping(tree)
    )


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            vars(module)["p"] = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            vars(module)["dropout"] = 0.0  # nn.MultiheadAttention and recurrent layers
    return model
