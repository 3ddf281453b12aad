"""Differential privacy in Lightning's ``Trainer``: a callback.

When ``fit`` begins, the callback replaces the training loader by one of Poisson batches, puts hooks
on the module that is to be private, and wraps the optimizer: all keep their types and names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from flash_clipping.distributed import has_shards
from flash_clipping.errors import FlashClippingError, InvalidValue, missing_extra

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise missing_extra("lightning", __name__, error) from error

from flash_clipping.engine.sampling.loaders import PoissonLoader, refuse_loader
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.private_run import (
    LogicalBatch,
    LogicalLoader,
    PrivateRun,
    ReportsPrivacy,
)
from flash_clipping.trainers.refused import refuse_lightning

__all__ = ["PrivacyArguments", "PrivateTraining"]


class PrivateTraining(ReportsPrivacy, Callback):
    """Differential privacy for every sample of the training data::

        trainer = lightning.Trainer(max_epochs=3, callbacks=[PrivateTraining(
            PrivacyArguments(target_epsilon=3.0, target_delta=1e-5, max_grad_norm=1.0))])
        trainer.fit(module, loader)

    Args:
        privacy: how private the run is; with ``max_grad_norm``. With automatic optimization,
            batches above its ``max_physical_batch_size`` are given to ``training_step`` in parts,
            in one step of the optimizer.
        module: the name of the attribute of the ``LightningModule`` that holds the model, such as
            ``"model"``; ``None``: all of the ``LightningModule``, whose ``training_step`` must then
            call ``self(...)``.

    The loss that ``training_step`` returns is a mean over the samples it was given, of terms that
    each depend on one sample. Logged every ``log_every_n_steps``: ``epsilon`` and
    ``samples_per_second``; on the progress bar, and in no file, ``clipped_share`` and
    ``median_norm``.

    Guarantees:
        ``(ε, δ)`` of :meth:`flash_clipping.FlashPrivacyEngine.get_epsilon`, for the weights after
        every step and all checkpoints of one run. Checkpoints hold the accountant.

    Raises:
        ValueError: in ``fit``: settings of the trainer with which a step would not be private; a
            checkpoint of another run.
    """

    def __init__(self, privacy: PrivacyArguments, *, module: str | None = None):
        if privacy.max_grad_norm is None:
            raise InvalidValue(
                "FC803 PrivateTraining: found no max_grad_norm in PrivacyArguments; expected the "
                "clipping bound of a sample."
            )
        if privacy.unit is not None:
            raise InvalidValue(
                f"FC820 PrivateTraining: found unit={privacy.unit}; expected samples that "
                "are items of the dataset and rows of the batch. Use FlashPrivacyEngine in a loop "
                "of your own (docs/units.md)."
            )
        self.privacy, self.run = privacy, PrivateRun(privacy)
        self.module = module
        self._loader: Any = None
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Accountant and settings; empty before the first ``fit``."""
        return {} if self.run.optimizer is None else self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Taken by the next ``fit``; where Lightning loads after it has begun, by that one."""
        self._loaded = dict(state_dict)
        if self._loader is not None and self._loaded:
            self.run.load_state_dict(self._loaded)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make loader, module and optimizer private."""
        model = pl_module if self.module is None else getattr(pl_module, self.module)
        refuse_lightning(trainer, model)
        if self._loader is not None:
            raise InvalidValue(
                "FC821 PrivateTraining: found a second fit(). Give the number of epochs at once, "
                "or resume from a checkpoint with new objects (Trainer, LightningModule, callback)."
            )
        self._loader = self._private_loader(trainer, pl_module, distributed=has_shards(model))
        loop = trainer.fit_loop
        loop._data_source.instance = self._loader
        loop._combined_loader = None  # configure_optimizers may have asked for its length
        self.run.attach(
            model,
            trainer.optimizers[0],
            self._loader,
            max_grad_norm=self.run.arguments.max_grad_norm or 0.0,
            steps=int(trainer.estimated_stepping_batches),
        )
        if self._loaded:
            self.run.load_state_dict(self._loaded)
        if self.privacy.max_physical_batch_size is not None:
            pl_module.training_step = self._in_parts(pl_module.training_step)

    def _private_loader(self, trainer: Any, pl_module: Any, *, distributed: bool) -> Any:
        plain = trainer.fit_loop._data_source.dataloader()
        if not isinstance(plain, DataLoader):
            raise InvalidValue(
                f"FC822 PrivateTraining: found training data of type {type(plain).__name__}; "
                "expected one torch.utils.data.DataLoader."
            )
        refuse_loader(plain, poisson_sampling=True, distributed=distributed)
        options: dict[str, Any] = {"stream": self.run.sampling_stream, "distributed": distributed}
        if (part_size := self.privacy.max_physical_batch_size) is None:
            return PoissonLoader.from_data_loader(plain, **options)
        if not pl_module.automatic_optimization:
            raise InvalidValue(
                "FC820 PrivateTraining: found max_physical_batch_size with manual optimization, "
                "whose training_step takes steps itself. Leave it out, or use automatic "
                "optimization."
            )
        return LogicalLoader.from_data_loader(plain, part_size=part_size, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let Lightning step with noise, now that it has loaded the plain optimizer's state."""
        trainer.strategy.optimizers = [self.run.optimizer]
        if trainer.train_dataloader is not self._loader:
            raise FlashClippingError(
                f"FC822 PrivateTraining: Lightning trains with a {type(trainer.train_dataloader)}, "
                "not with the Poisson loader. Do not reload dataloaders, or change the fit loop."
            )
        self.run.check_steps(trainer.global_step)
        self.run.check_budget(int(trainer.estimated_stepping_batches) - trainer.global_step)

    def _in_parts(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """``training_step`` for a logical batch: all parts but the last have had their backward
        when it returns, and their sums are with the optimizer."""

        @functools.wraps(training_step)
        def step(batch: LogicalBatch, *args: Any, **kwargs: Any) -> Any:
            self.run.in_parts.begin()
            *parts, last = zip(batch.parts, batch.sizes, strict=True)
            for part, size in parts:
                self.run.hooks.expect_samples(size)
                result = training_step(part, *args, **kwargs)
                loss = result["loss"] if isinstance(result, dict) else result
                with torch.autocast(loss.device.type, enabled=False):
                    loss.backward()
                self.run.statistics.note_backward()
                self.run.in_parts.keep_sums()
            self.run.hooks.expect_samples(last[1])
            return training_step(last[0], *args, **kwargs)

        return step

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Gather what the dashboard shows."""
        self.run.statistics.note_backward()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Check that the step is accounted; log."""
        self.run.check_steps(trainer.global_step)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            reading = self.run.read()
            pl_module.log_dict(reading.logs(self.epsilon), batch_size=1)
            # No file is written of these.
            pl_module.log_dict(reading.shown(), batch_size=1, logger=False, prog_bar=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off; the module is as it was."""
        pl_module.__dict__.pop("training_step", None)
        self.run.detach()
