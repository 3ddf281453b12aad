"""``mode="one_by_one"`` in training: the engine, trainers, models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_clipping import (
    AdaptiveBound,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    Kernels,
    Users,
)
from tests.support import trainers
from tests.support.private import TwoLayers, data

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(mode: str, steps: int = 6, **options: Any) -> tuple[list[Tensor], Any]:
    """Parameters after some steps by an engine with a seed, and its history."""
    torch.manual_seed(0)
    engine = FlashPrivacyEngine(accountant="rdp", seed=3)
    given = {"noise_multiplier": 0.8, "max_grad_norm": 0.5} | options
    size, wraps = given.pop("size", 16), given.get("wrap_model", True)
    plain = TwoLayers()
    model, optimizer, criterion, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(reduction=given.get("loss_reduction", "mean")),
        data_loader=DataLoader(data(), batch_size=size),
        mode=mode,
        **given,
    )
    model = model if wraps else plain
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], engine.accountant.history


ADAPTIVE = {"clipping": AdaptiveBound(min_clipbound=0.1, max_clipbound=9.0)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_reduction": "sum"},
        {"clipping": "per_layer", "max_grad_norm": [0.1, 0.2, 0.3, 0.4]},
        ADAPTIVE,
        {"unit": Users([n // 3 for n in range(64)])},
        {"size": 1, "steps": 40},  # batches without samples
        {"wrap_model": False},
        {"kernels": Kernels(cuda_graphs="auto")},  # which runs samples as they are
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_engine_trains_as_in_other_modes(options: dict[str, Any]) -> None:
    found, history = trained("one_by_one", **options)
    expected, other = trained("one_pass", **options)
    assert history == other
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_16_bit_sums_are_wide() -> None:
    torch.manual_seed(0)
    model = TwoLayers().bfloat16()
    wrapped = GradSampleModuleFlashClipping(model, mode="one_by_one", max_grad_norm=0.1)
    x = data().tensors[0][:8].bfloat16()
    (wrapped(x).float().square().sum(1).mean()).backward()
    total = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    assert total.dtype == torch.float32 and total.norm() <= 0.8 * (1 + 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        wide = GradSampleModuleFlashClipping(TwoLayers(), mode="one_by_one", max_grad_norm=0.1)
        wide(x.float()).float().square().sum(1).mean().backward()
    assert wide.get_norm_sample().shape == (8,)


def test_private_trainer(tmp_path: Any) -> None:
    trainer = trainers.trainer(
        tmp_path,
        of_privacy={"max_grad_norm": 0.5, "engine_options": {"mode": "one_by_one"}},
        size=12,
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 3
    moved = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in moved)
