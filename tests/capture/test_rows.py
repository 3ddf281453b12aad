"""What the look at rows leaves as it was, and when it is made."""

from __future__ import annotations

import copy
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_by_autograd,
    float64s,
    mean_squares,
    squares,
)
from tests.support.errors import raises
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


class Remembers(nn.Module):
    """Everything that a forward may change: buffers, attributes, random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))
        self.alias = self.in_place
        self.calls, self.cache = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.in_place += 1
        self.rebound = self.rebound + 1
        self.cache = x
        self.seen_by = len(x)
        self.drawn = torch.rand(3).sum().item() + random.random() + np.random.rand()
        return self.mix(self.mix(x))


def test_state_after_a_rehearsal_is_that_of_one_forward() -> None:
    torch.manual_seed(0)
    plain = Remembers().double()
    probed = copy.deepcopy(plain)
    probed.alias = probed.in_place
    (x,) = float64s(4, 4, 4)

    def run(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        squares(model, (x,))
        return [torch.rand(3).tolist(), random.random(), np.random.rand()]

    expected = run(plain)
    flash = GradSampleModuleFlashClipping(probed, strict=False)
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    probed.mix.register_forward_hook(count)
    assert run(flash) == expected
    assert runs == 12  # the rehearsals, and runs that the oracle compares, did happen
    assert (probed.calls, probed.seen_by, probed.cache is x) == (1, 4, True)
    assert probed.in_place == probed.rebound == 1 and probed.alias is probed.in_place
    assert probed.state_dict().keys() == plain.state_dict().keys()


def test_model_of_one_batch_size_is_run_on_other_samples() -> None:
    class OneSize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.mix(x)) + torch.ones(5, 1, 1)

    model = OneSize().double()
    runs = []
    model.mix.register_forward_hook(lambda _, args, __: runs.append(len(args[0])))
    flash = GradSampleModuleFlashClipping(model)
    for _ in range(3):
        squares(flash, float64s(5, 5, 5)).backward()
    # Steps, each of two runs of the layer, come after looks at the whole batch.
    assert len(runs) > 6 and runs[-4:] == [5] * 4


class Contrasts(nn.Module):
    """Returns embeddings, and the similarities of all pairs: CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) * self.gain
        return h, h @ h.T * self.scale.exp() + self.shift


def of_embeddings(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_squares(model(*batch)[0])


class Later(Contrasts):
    """Compares samples only after the first call, by the same parameter and in another place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, pairs = super().forward(x)
        if self.training:
            return h, pairs
        return (h @ h.T).sum(1, keepdim=True) * self.scale, pairs


def test_second_use_of_a_parameter_that_compares_samples_is_refused() -> None:
    """Once it was seen to compare samples, it is not trusted anywhere."""
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Later().double())
    batch = float64s(4, 3)
    of_embeddings(flash, batch).backward()
    flash.eval()
    with raises("FC202", match="output 0: the outputs of a sample change"):
        of_embeddings(flash, batch).backward()
