"""Models that return objects: exact, or refused where they cannot be opened."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.autograd import mean_squares, truth_by_autograd
from tests.support.errors import raises
from tests.support.uses import Batch, D, Data, measured, seeded_batch
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


Named = collections.namedtuple("Named", "a b")


def pack_of_model_output(y: Tensor, z: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return y, BaseModelOutput(last_hidden_state=z)


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
OPEN: dict[str, tuple[Pack, Unpack]] = {
    "dataclass": (Data, lambda o: (o.a, o.b)),
    "in_a_tuple": (lambda y, z: (y, Data(z)), lambda o: (o[0], o[1].a)),
    "in_a_dict": (
        lambda y, z: {"y": y, "z": {"q": Data([z])}},
        lambda o: (o["y"], o["z"]["q"].a[0]),
    ),
    "in_a_dataclass": (lambda y, z: Data(Data(y), [Data(z)]), lambda o: (o.a.a, o.b[0].a)),
    "named_tuple": (lambda y, z: Named(y, Data(z)), lambda o: (o.a, o.b.a)),
    "object": (lambda y, z: [y, types.SimpleNamespace(a=z)], lambda o: (o[0], o[1].a)),
    "slots": (lambda y, z: (y, Slotted(z)), lambda o: (o[0], o[1].a)),
    "frozen": (lambda y, z: (y, Frozen(z)), lambda o: (o[0], o[1].a)),
    "user_dict": (
        lambda y, z: collections.UserDict(y=y, z=[z]),
        lambda o: (o["y"], o["z"][0]),
    ),
    "distribution": (
        lambda y, z: (y, torch.distributions.Normal(z, 1.0)),
        lambda o: (o[0], o[1].loc),
    ),
    "twice": (lambda y, z: (y, Data(y), Data(z)), lambda o: (o[1].a, o[2].a + 0 * o[0].sum())),
    "model_output": (pack_of_model_output, lambda o: (o[0], o[1].last_hidden_state)),
}
CLOSED: dict[str, tuple[Pack, Unpack]] = {
    "closure": (lambda y, z: (y, lambda: z), lambda o: (o[0], o[1]())),
    "set": (lambda y, z: (y, {z}), lambda o: (o[0], next(iter(o[1])))),
    "only_a_closure": (lambda y, z: lambda: (y, z), lambda o: o()),
}


class Returns(nn.Module):
    def __init__(self, pack: Pack):
        super().__init__()
        self.pack = pack
        self.first, self.a, self.b = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.pack(self.a(h), self.b(h))


def make_returns(pack: Pack) -> nn.Module:
    torch.manual_seed(0)
    return Returns(pack).double()


def loss_of(unpack: Unpack) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        y, z = unpack(model(*batch))
        return mean_squares(y) + mean_squares(torch.tanh(z))

    return loss


@pytest.mark.every_pair
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*OPEN, *CLOSED])
def test_outputs_in_objects(name: str, mode: str, wrapper: str) -> None:
    """Exact; under ``two_pass``, in what cannot be opened: refused, with what was found there."""
    pack, unpack = (OPEN | CLOSED)[name]
    loss = loss_of(unpack)
    truth = truth_by_autograd(make_returns(pack), seeded_batch(), loss)
    if mode == "two_pass" and name in CLOSED:
        with raises("FC414|FC415", match=r"two_pass.*(function|set)"):
            measured(make_returns(pack), truth, seeded_batch(), mode, wrapper, loss)
    else:
        measured(make_returns(pack), truth, seeded_batch(), mode, wrapper, loss)
