"""Lightning's trainer with ``PrivateTraining``, against the engine in a plain loop."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    Documents,
    GradSampleModuleFlashClipping,
    Users,
)
from flash_clipping.trainers.lightning import PrivateTraining
from tests.support.errors import raises
from tests.support.trainers import privacy

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]

BOUND, RATE = 0.05, 0.5


def data(size: int = 20) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator)
    y = torch.randint(0, 3, (size,), generator=generator)
    return DataLoader(TensorDataset(x.double(), y), batch_size=5, shuffle=True)


class Classifier(lightning.LightningModule):
    def __init__(self, *, whole: bool = False, manual: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.automatic_optimization = not manual
        self.whole = whole
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        self.drawn.append(batch)
        x, y = batch
        loss = F.cross_entropy(self(x) if self.whole else self.model(x), y)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.5)
        # Asks for the loader, before it was made private.
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    module: Classifier,
    folder: Path,
    *,
    of_privacy: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    physical: int | None = None,
    loader: Any = None,
    **settings: Any,
) -> tuple[lightning.Trainer, PrivateTraining]:
    given = {"max_grad_norm": BOUND, "max_physical_batch_size": physical} | (of_privacy or {})
    callback = PrivateTraining(privacy(**given), module=None if module.whole else "model")
    defaults: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 2, "devices": 1}
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **(defaults | {"logger": False, "enable_checkpointing": False} | settings),
    )
    # Lightning before 2.6 reads all of a checkpoint, and has no such argument.
    more = {"weights_only": False} if "weights_only" in signature(trainer.fit).parameters else {}
    trainer.fit(module, loader or data(), data(6), ckpt_path=checkpoint, **more)
    return trainer, callback


def oracle(drawn: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Steps on these batches, one sample at a time, by plain autograd."""
    model = Classifier().model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    for x, y in drawn:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for row in range(len(x)):
            loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
            for total, grad in zip(sums, grads, strict=True):
                total += grad * (BOUND / (norm + 1e-6)).clamp(max=1)
        for param, total in zip(model.parameters(), sums, strict=True):
            param.grad = total / 5
        optimizer.step()
    return model


@pytest.mark.parametrize("settings", [{}, {"whole": True}, {"manual": True}], ids=str)
def test_steps_are_those_of_one_sample_at_a_time(tmp_path: Path, settings: Any) -> None:
    module = Classifier(**settings)
    trainer, callback = fit(module, tmp_path, of_privacy={"noise_multiplier": 0.0})
    assert trainer.global_step == callback.run.steps == len(module.drawn) == 4
    for param, expected in zip(
        module.model.parameters(), oracle(module.drawn).parameters(), strict=True
    ):
        torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-12)
    assert list(module.state_dict())[0] == "model.0.weight"
    # As it was: no hooks.
    module.model(torch.zeros(1, 4).double()).sum().backward()
    assert not hasattr(module.model, "autograd_grad_sample_hooks")


def test_parts_are_one_step(tmp_path: Path) -> None:
    """The same noise and the same samples, in parts of two; the schedule counts steps."""
    whole, in_parts = Classifier(), Classifier()
    fit(whole, tmp_path, max_epochs=2)
    trainer, callback = fit(in_parts, tmp_path, max_epochs=2, physical=2)
    assert max(len(x) for x, _ in in_parts.drawn) == 2
    assert trainer.global_step == callback.run.steps == 8
    for a, b in zip(whole.parameters(), in_parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    logged = trainer.callback_metrics
    assert logged["epsilon"].item() == pytest.approx(callback.epsilon)
    assert 0 <= logged["clipped_share"] <= 1
    assert logged["median_norm"] > 0 and logged["samples_per_second"] > 0
    assert "val_loss" in logged


def test_checkpoints_hold_the_accountant(tmp_path: Path) -> None:
    first = Classifier()
    trainer, callback = fit(first, tmp_path)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    resumed = Classifier()
    trainer, after = fit(resumed, tmp_path, max_epochs=2, checkpoint=tmp_path / "model.ckpt")
    assert after.run.steps == trainer.global_step == 8
    assert after.epsilon > callback.epsilon
    assert after.run.engine.accountant.history == [(1.0, 0.25, 8)]
    with raises("FC582", ValueError, match="noise_multiplier was 1.0, is 2.0"):
        fit(
            Classifier(),
            tmp_path,
            of_privacy={"noise_multiplier": 2.0},
            checkpoint=tmp_path / "model.ckpt",
        )
    # One without an accountant.
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)
    torch.save(saved | {"callbacks": {}}, tmp_path / "model.ckpt")
    with raises("FC584", RuntimeError, match="counts 4.*0"):
        fit(Classifier(), tmp_path, max_epochs=2, checkpoint=tmp_path / "model.ckpt")


def test_target_epsilon_is_for_the_steps_of_the_run(tmp_path: Path) -> None:
    _, callback = fit(
        Classifier(),
        tmp_path,
        of_privacy={"noise_multiplier": None, "target_epsilon": 3.0},
        limit_train_batches=2,
    )
    assert callback.run.planned_steps == callback.run.steps == 2
    assert 2.9 < callback.epsilon <= 3.0


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*max_physical_batch_size"),
        ({"overfit_batches": 2}, "overfit_batches"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: Any, found: str) -> None:
    with raises("FC820", ValueError, match=found):
        fit(Classifier(), tmp_path, **settings)


def test_more_that_is_refused(tmp_path: Path) -> None:
    with raises("FC820", ValueError):
        fit(Classifier(manual=True), tmp_path, physical=2)
    with raises("FC822", ValueError, match="list"):
        fit(Classifier(), tmp_path, loader=[data()])
    with raises("FC803", ValueError):
        PrivateTraining(privacy())

    class TwoOptimizers(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=1) for layer in self.model[::2]]

    with raises("FC820", ValueError, match="2 optimizers"):
        fit(TwoOptimizers(manual=True), tmp_path)


def test_units_are_refused(tmp_path: Path) -> None:
    with raises("FC801", ValueError, match="expected.*Documents.*a loop of your own"):
        fit(Classifier(), tmp_path, of_privacy={"unit": Users([0] * 20)})
    module = Classifier()
    module.model = GradSampleModuleFlashClipping(module.model, unit=Documents("user"))
    with raises("FC172", ValueError):
        fit(module, tmp_path)
