"""Parameters among what a model returns (a decoder's sigma, prototypes, a temperature): parameters
they are, however long they happen to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd
from tests.support.errors import raises
from tests.support.uses import Holder

B, D = 4, 6


def with_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return {"mean": m.decode(torch.tanh(m.encode(x))), "sigma": m.sigma}


def with_computed_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return with_sigma(m, x) | {"sigma": m.sigma.exp()}


def with_rows_of_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return with_sigma(m, x) | {"sigma": m.sigma.expand(len(x), -1)}


def likelihood(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    found = model(*batch)
    each = (found["mean"] - batch[0]).square() / found["sigma"].square() + found["sigma"].log()
    return each.sum(1).mean()


def make_sigma(use: Any, length: int) -> nn.Module:
    torch.manual_seed(0)
    layers = {"encode": nn.Linear(length, D), "decode": nn.Linear(D, length)}
    return Holder(use, sigma=torch.rand(length) + 0.5, **layers).double()


@pytest.mark.parametrize("length", [B, D])
@pytest.mark.parametrize("use", [with_sigma, with_computed_sigma, with_rows_of_sigma])
def test_a_decoders_sigma(use: Any, length: int) -> None:
    x = torch.randn(B, length, dtype=torch.float64)
    check_by_autograd(make_sigma(use, length), (x,), likelihood)


@pytest.mark.parametrize("prototypes", [B, D, 3])
def test_prototypes_and_a_temperature(prototypes: int) -> None:
    def use(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        return m.embed(x), m.prototypes, m.temperature.exp()

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        z, places, scale = model(*batch)
        return (torch.cdist(z, places) * scale).square()[:, 0].mean()

    torch.manual_seed(0)
    held = {"prototypes": torch.randn(prototypes, B), "temperature": torch.tensor(0.3)}
    model = Holder(use, embed=nn.Linear(D, B), **held).double()
    check_by_autograd(model, (torch.randn(B, D, dtype=torch.float64),), loss)


def test_two_passes_refuse_what_no_sample_has_a_row_of() -> None:
    flash = GradSampleModuleFlashClipping(make_sigma(with_sigma, D), mode="two_pass")
    with raises("FC418"):
        flash(torch.randn(B, D, dtype=torch.float64))
