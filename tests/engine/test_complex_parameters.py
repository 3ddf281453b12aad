"""Complex parameters (Fourier layers), as pairs of reals: ``mode="one_by_one"``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.ops.error_bounds import ETA
from tests.support.errors import raises

B, T, D = 5, 8, 3


class Fourier(nn.Module):
    """As in a Fourier neural operator: modes are multiplied by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.modes = nn.Parameter(torch.randn(3, D, D, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.first(x), dim=1)[:, :3]
        mixed = torch.einsum("bki,kio->bko", found, self.modes)
        return self.last(torch.fft.irfft(mixed, n=T, dim=1) + x).mean((1, 2))


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Fourier().double()
    model.modes.data = model.modes.data.to(torch.cdouble)
    return model, torch.randn(B, T, D).double()


def reals(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def flat(tensors: Any) -> Tensor:
    return torch.cat([reals(x.detach()).flatten() for x in tensors])


def truth(model: nn.Module, x: Tensor) -> Tensor:
    plain, found = copy.deepcopy(model), []
    for b in range(len(x)):
        plain.zero_grad()
        plain(x[b : b + 1]).square().sum().backward()
        found.append(flat(p.grad for p in plain.parameters()))
    return torch.stack(found)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_norms_and_sums_are_those_of_pairs_of_reals(clipping: Any) -> None:
    model, x = made()
    grads = truth(model, x)
    norms = grads.norm(dim=1)
    C = norms.median().item()
    flash = GradSampleModuleFlashClipping(
        model, mode="one_by_one", max_grad_norm=C, clipping=clipping, loss_reduction="sum"
    )
    flash(x).square().sum().backward()
    torch.testing.assert_close(flash.get_norm_sample(), norms, rtol=1e-10, atol=0)
    coef = (C / (norms + 1e-6)).clamp(max=1) if clipping == "flat" else C / (norms + 0.01)
    expected = (coef[:, None] * grads).sum(0)
    found = flat(p.grad for p in model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert model.modes.grad is not None and model.modes.grad.dtype == torch.cdouble


def private(model: nn.Module, x: Tensor, noise: float, bound: float) -> Any:
    return FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        data_loader=DataLoader(TensorDataset(x), batch_size=B),
        criterion=lambda y, _: y.square(),
        noise_multiplier=noise,
        max_grad_norm=bound,
        loss_reduction="sum",
        poisson_sampling=False,
        mode="one_by_one",
    )


@pytest.mark.filterwarnings("ignore:Batches are not drawn by Poisson sampling")
def test_training_is_that_of_the_plain_optimizer() -> None:
    model, x = made()
    plain = copy.deepcopy(model)
    wrapped, optimizer, _, _ = private(model, x, 0.0, 1e6)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for _ in range(3):
        for net, opt in ((wrapped, optimizer), (plain, adam)):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
    torch.testing.assert_close(flat(model.parameters()), flat(plain.parameters()))


@pytest.mark.filterwarnings("ignore:Batches are not drawn by Poisson sampling")
def test_noise_is_added_to_both_parts() -> None:
    torch.manual_seed(0)
    model = Fourier()
    model.modes = nn.Parameter(torch.zeros(64, 64, dtype=torch.cfloat))
    model.forward = lambda x: (x.sum((1, 2)) * model.modes.sum()).real  # type: ignore
    for part in (model.first, model.last):
        part.requires_grad_(False)
    wrapped, optimizer, _, _ = private(model, torch.randn(B, T, D), 2.0, 0.5)
    wrapped(torch.randn(B, T, D)).sum().backward()
    seen = []
    optimizer.attach_step_hook(lambda _: seen.append(model.modes.grad.clone()))
    optimizer.step()
    for values in (seen[0].real, seen[0].imag):
        assert float(values.std()) == pytest.approx(2.0 * 0.5 * (1 + ETA), rel=0.05)


def test_other_modes_offer_it() -> None:
    model, x = made()
    with raises("FC115", match='(?s)modes.*mode="one_by_one"'):
        GradSampleModuleFlashClipping(model)(x)
