"""Layers that see parts of samples as rows: refused by name, or declared and then exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, FlashPrivacyEngine, GradSampleModuleFlashClipping
from tests.models import Attention, Case, floats
from tests.oracle import per_sample_truth
from tests.test_norms import bound_between, check, make, step


class Windowed(nn.Module):
    """Attention within windows of four positions, folded into the batch as Swin does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = Attention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
        windows = windows + self.attention(self.norm(windows))
        return self.head(windows.unflatten(0, (x.shape[0], -1)).flatten(1, 2))


CASE = Case(Windowed, floats(3, 12, 3))
FOLDED = ["attention*", "norm"]


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_declared_windows_are_exact(mode: str) -> None:
    model, batch = make(CASE, torch.float64)
    model.bias.requires_grad_(False)
    truth = per_sample_truth(model, batch, CASE.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model,
        max_grad_norm=bound,
        mode=mode,
        folded_modules=FOLDED,
    )
    step(module, CASE, batch, "mean")
    check(module, truth, bound, 1e-10)


def test_undeclared_windows_are_refused_by_name() -> None:
    model, batch = make(CASE, torch.float64)
    module = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError, match=r"attention.* found 9 samples .* batch of 3"):
        step(module, CASE, batch, "mean")


def test_wrong_declarations() -> None:
    model, batch = make(CASE, torch.float64)
    with pytest.raises(ValueError, match="no module is named like 'window'"):
        GradSampleModuleFlashClipping(model, folded_modules=["window"])


def test_through_the_engine() -> None:
    model, batch = make(CASE, torch.float32)
    dataset = torch.utils.data.TensorDataset(batch[0], torch.zeros(3, dtype=torch.long))
    module, *_ = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(dataset, batch_size=3),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        folded_modules=FOLDED,
    )
    step(module, CASE, batch, "mean")
    assert module.get_norm_sample().shape == (3,)
