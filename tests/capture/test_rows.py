"""What the look at rows leaves as it was, and when it is made."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_by_autograd,
    mean_squares,
)
from tests.support.wrapping import MODES


@dataclass(frozen=True)
class Fields:
    ids: Tensor
    length: int = 5


class Attributes:
    def __init__(self, ids: Tensor):
        self.inner = {"fields": [Fields(ids)]}

    @property
    def ids(self) -> Tensor:
        return self.inner["fields"][0].ids


class Packed(nn.Module):
    """Takes its batch in one object; one layer may read it with time first."""

    def __init__(self, transposed: bool):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.transposed = transposed

    def forward(self, batch: Any) -> Tensor:
        x = self.embed(batch.ids if hasattr(batch, "ids") else batch["ids"])
        if self.transposed:
            return self.head(torch.tanh(self.mix(x.transpose(0, 1))).transpose(0, 1))
        return self.head(torch.tanh(self.mix(x)))


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "pack",
    [
        lambda ids: {"ids": ids},
        lambda ids: UserDict(ids=ids),
        lambda ids: BatchEncoding({"ids": ids}),
        Fields,
        Attributes,
    ],
    ids=["dict", "UserDict", "BatchEncoding", "dataclass", "attributes"],
)
def test_batch_inside_an_object_is_exact(
    pack: Callable[[Tensor], Any], transposed: bool, mode: str
) -> None:
    """The size of the batch is known however its tensors are packed."""
    torch.manual_seed(0)
    model = Packed(transposed).double()
    batch = (torch.randint(0, 9, (5, 5)),)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return mean_squares(model(pack(*batch)))

    check_by_autograd(model, batch, loss, mode=mode)


def test_arguments_after_a_rehearsal_are_as_they_were() -> None:
    """The run on fewer samples gets copies of the objects that hold the batch."""
    ids = torch.randint(0, 9, (5, 5))
    batch = Attributes(ids)
    model = Packed(transposed=False)
    seen: list[Any] = []
    model.embed.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    GradSampleModuleFlashClipping(model)(batch)
    assert seen == [4, 3, 4, 4, 4, 5]
    assert batch.ids is ids and batch.inner["fields"][0].length == 5
