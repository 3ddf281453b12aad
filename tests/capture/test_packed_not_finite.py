"""A document that is not finite reaches no other, whatever stands before and behind attention.

Every pass that keeps it from that is needed by one of these models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping
from tests.support.oracle import assert_close
from tests.support.packed import VOCABULARY, Row, Scale, documents, losses, packed, truth_of

pytestmark = pytest.mark.without_gate


def attention(x: Tensor, document: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, document[:, :, None] == document[:, None])


class Root(Scale):
    """Its gradient is infinite where something large is read, its output is not."""

    def forward(self, x: Tensor) -> Tensor:
        is_large = x.abs().amax(-1, keepdim=True) > 20
        root = torch.where(is_large, x - x.detach(), 1.0).sqrt()
        return self.gain * torch.where(is_large, root, x)


class Mixing(Scale):
    """Mixes positions itself, as a frozen module may."""

    document: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return attention(self.gain * x, self.document)


class Between(nn.Module):
    """A module, attention, another module; one token becomes infinite, or large, in front."""

    def __init__(self, before: nn.Module, after: nn.Module, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.before, self.after = nn.Embedding(VOCABULARY, 6), before, after
        self.table.weight.data[-1] = 100.0
        self.value = value

    def forward(self, ids: Tensor, places: Tensor, document: Tensor) -> Tensor:
        if isinstance(self.after, Mixing):
            self.after.document = document
        x = self.table(ids) + torch.linspace(0, 1, 6) * places.unsqueeze(-1)
        x = self.before(torch.where(x[..., :1] > 50, self.value, x))
        output: Tensor = self.after(attention(x, document))
        return output


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def linear() -> nn.Module:
    return nn.Linear(6, 6)


CASES: dict[str, tuple[Callable[[], Between], float]] = {
    "output of a layer": (lambda: Between(linear(), linear(), torch.inf), 1.0),
    "gradient of a layer": (lambda: Between(linear(), linear(), 100.0), torch.inf),
    "output of a module": (lambda: Between(Scale(6), linear(), torch.inf), 1.0),
    "gradient of a module": (lambda: Between(linear(), Scale(6), 100.0), torch.inf),
    "output of a frozen module": (lambda: Between(frozen(Scale(6)), linear(), torch.inf), 1.0),
    "gradient into a frozen module": (lambda: Between(linear(), frozen(Mixing(6)), 1.0), torch.inf),
    "gradient of a frozen module": (lambda: Between(linear(), frozen(Root(6)), 100.0), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_reaches_no_other(name: str) -> None:
    make, weight = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    own = [document.clamp(max=VOCABULARY - 2) for document in documents()]
    own[1][2] = VOCABULARY - 1
    rows: list[Row] = [list(enumerate(own))]
    truth = truth_of(copy.deepcopy(model), rows)
    flash = GradSampleModuleFlashClipping(model, unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = packed(rows, padding=1)
    weights = torch.where(numbers == 1, weight, 1.0) * (numbers >= 0)
    (losses(flash(ids, places, numbers)) * weights).sum().backward()
    coef, others = flash.get_clipping_coef(), [0, 2, 3]
    assert coef[1] == 0
    assert_close(flash.get_norm_sample()[others], truth.norms[others], 1e-9)
    assert torch.isfinite(model.table.weight.grad).all()


@pytest.mark.parametrize("spoiled", [0, 1])
def test_in_one_of_two_calls(spoiled: int) -> None:
    torch.manual_seed(0)
    model = Between(linear(), linear(), torch.inf).double()
    flash = GradSampleModuleFlashClipping(model, unit=Documents("document"), loss_reduction="sum")
    loss = torch.zeros((), dtype=torch.double)
    for call in range(2):
        own = [document.clamp(max=VOCABULARY - 2) for document in documents()]
        if call == spoiled:
            own[1][2] = VOCABULARY - 1
        ids, places, numbers = packed([list(enumerate(own))])
        loss = loss + losses(flash(ids, places, numbers)).sum()
    loss.backward()
    coef = flash.get_clipping_coef()
    assert coef[1] == 0 and (coef[[0, 2, 3]] > 0).all()
