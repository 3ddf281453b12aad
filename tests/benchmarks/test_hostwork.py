"""Operations of a private step, each of which is a launch on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lab import hostwork
from benchmarks.survey.inputs import SAMPLES
from benchmarks.survey.kinds import all_kinds
from benchmarks.survey.measure import losses_of
from benchmarks.survey.modes import Where
from flash_clipping import GradSampleModuleFlashClipping


class _Counted(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


#: What biases, keys or tokens are computed from in these goes back once for all samples, and what
#: lies along another axis than the first one does as well.
FAMILIES = [
    "DebertaV2, relative positions",
    "Swinv2ForImageClassification",
    "SamVisionModel",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_of_a_step_do_not_grow_with_the_batch(name: str) -> None:
    """Each is a launch on a GPU, and none shows in a norm: Swin v2 made 9 thousand of them with six
    samples, and 4 thousand with two."""
    pytest.importorskip("transformers")
    kind = next(kinds[name] for kinds in all_kinds().values() if name in kinds)
    models, batch = zip(*(Where(dtype="float32").made(kind) for _ in range(2)), strict=True)
    plain, private = models[0].train(), GradSampleModuleFlashClipping(models[1].train())
    given = batch[0]
    if "input_ids" in given:
        lengths = torch.tensor([[7], [5], [6]])
        given["attention_mask"] = (torch.arange(7) < lengths).long()

    def counts(model: nn.Module, B: int) -> int:
        rows = {name: x[: B * len(x) // SAMPLES] for name, x in given.items()}
        for _ in range(4):  # plans are made
            model.zero_grad()
            with _Counted() as counted:
                losses_of(model(**rows), rows, B).mean().backward()
        return counted.count

    few, many = (counts(plain, B) for B in (2, SAMPLES))
    counts(private, SAMPLES)  # who is a sample is shown
    with hostwork.no_kernels():
        of_few, of_many = (counts(private, B) for B in (2, SAMPLES))
    assert of_many - of_few <= many - few + 2  # every other step looks whether norms were finite
    assert of_many <= 2.5 * many
