"""One private training run inside a trainer: engine, hooks, optimizer, and what a checkpoint keeps.

The model keeps its class and its names: it gets hooks, no wrapper.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from flash_clipping.capture.inputs import map_tensors
from flash_clipping.distributed import processes_of
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.engine.accounting import least_noise
from flash_clipping.engine.micro_batches import Parts, StepInParts, bounds_of, count_of
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine
from flash_clipping.engine.sampling.loaders import PoissonLoader
from flash_clipping.errors import FlashClippingError, InvalidValue
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.dashboard import ClippingStatistics, Reading


class ReportsPrivacy:
    """A trainer, or its callback, whose run tells what it has spent."""

    run: PrivateRun

    @property
    def epsilon(self) -> float:
        """ε that is spent so far, for ``privacy.target_delta``."""
        return self.run.epsilon()

    @property
    def relation(self) -> str:
        """The neighbouring relation of ε, in words."""
        return self.run.engine.relation

    def report(self) -> dict[str, Any]:
        """All that ε depends on, for ``privacy.target_delta``: see
        :meth:`~flash_clipping.FlashPrivacyEngine.report`."""
        return self.run.engine.report(self.run.arguments.target_delta)


class PrivateRun:
    """Makes a trainer's run private: make it, draw batches with :attr:`sampling_stream`,
    :meth:`attach`, train.

    Attributes:
        hooks, optimizer, statistics, in_parts: after :meth:`attach`: the hooks on the model, the
            private optimizer, the :class:`~flash_clipping.trainers.dashboard.ClippingStatistics`,
            and the :class:`~flash_clipping.engine.micro_batches.StepInParts` of its steps.
        planned_steps: how many steps the noise was computed for.
        readings: what the dashboard showed, and after how many steps. No ε covers it: it is in
            memory alone.
    """

    hooks: Any = None
    optimizer: Any = None
    statistics: Any = None
    in_parts: Any = None
    noise_multiplier: float
    sample_rate: float
    planned_steps: int

    def __init__(self, arguments: PrivacyArguments):
        self.arguments = arguments
        self.engine = FlashPrivacyEngine(
            accountant=arguments.accountant, secure_mode=arguments.secure_mode, seed=arguments.seed
        )
        #: Steps that were accounted for before the trainer began to count its own.
        self.steps_before = 0
        self.sampling_stream = self.engine.stream.another()
        self.readings: list[tuple[int, Reading]] = []

    def begin_epoch(self, loader: LogicalLoader, run: int, epoch: int) -> None:
        """Let a run with a seed draw this epoch's batches as it would after any interruption; all
        processes of a sharded model call it."""
        if self.arguments.seed is not None:
            self.sampling_stream = stream = self.engine.stream.another(run, epoch)
            if (processes := loader.processes) is not None:
                stream = processes.shared_stream(stream)
            loader.batch_sampler.stream = stream

    def attach(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        *,
        max_grad_norm: float,
        steps: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Make the model's gradients clipped sums, and the optimizer one that adds noise.

        Again after :meth:`detach`: the accountant, the bound and the noise go on.

        Args:
            model: in several processes inside of Opacus'
                ``DifferentiallyPrivateDistributedDataParallel``.
            loader: draws Poisson batches, with the rate ``1 / len(loader)``.
            steps: of the whole run.
            options: of the engine, unless the user gave others.
        """
        options = {**(options or {})}
        if (own := self.arguments.kernels) is not None:
            usual = options.get("kernels", own).cuda_graphs
            options["kernels"] = replace(own, cuda_graphs=own.cuda_graphs or usual)
        arguments, before, rate = self.arguments, self.optimizer, 1 / len(loader)
        if not self.steps:
            self.planned_steps, self.max_grad_norm = steps, max_grad_norm
            if (noise := arguments.noise_multiplier) is None:
                noise = least_noise(
                    self.engine.accountant,
                    target_epsilon=arguments.target_epsilon,  # type: ignore[arg-type]  # is given
                    target_delta=arguments.target_delta,
                    sample_rate=rate,
                    steps=steps,
                )
            self.noise_multiplier = noise
        elif arguments.target_epsilon is not None and rate > self.sample_rate:
            raise InvalidValue(
                f"FC583 target_epsilon={arguments.target_epsilon}: its noise was computed for "
                f"steps that draw a sample with probability {self.sample_rate:.4g}; found a "
                f"dataset of which each is drawn with {rate:.4g}. Instead of target_epsilon give "
                f"noise_multiplier={self.noise_multiplier:.4g}: epsilon then grows further."
            )
        self.sample_rate = rate
        if (processes := processes_of(model)) is not None:
            loader.share(processes)
        modes = [module.training for module in model.modules()]
        model.train()  # Opacus takes no others
        self.hooks, self.optimizer, _ = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=max_grad_norm,
            wrap_model=False,
            # The loader draws Poisson batches already; the engine must not replace it.
            poisson_sampling=False,
            mechanism=arguments.mechanism,
            unit=arguments.unit,
            **options | arguments.engine_options,
        )
        self.engine.check_delta(arguments.target_delta)
        if before is not None:
            self.optimizer.max_grad_norm = before.max_grad_norm  # adaptive clipping has moved it
        self.in_parts = StepInParts(self.optimizer, halves=False)
        self.statistics = ClippingStatistics(self.hooks)
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode

    def detach(self) -> None:
        """Take the hooks off."""
        if self.hooks is not None:
            self.hooks.cleanup()
            self.hooks = None

    @property
    def steps(self) -> int:
        """Steps that are accounted for."""
        return len(self.engine.accountant)

    def epsilon(self) -> float:
        """ε that is spent, for ``target_delta``."""
        return float(self.engine.get_epsilon(self.arguments.target_delta))

    def read(self) -> Reading:
        """What clipping did since the last reading; kept in :attr:`readings`."""
        reading: Reading = self.statistics.read()
        self.readings.append((self.steps, reading))
        return reading

    def check_steps(self, counted: int) -> None:
        """Raise ``RuntimeError`` unless the steps that a trainer counts are those accounted for."""
        accounted = self.steps - self.steps_before
        if accounted != counted:
            raise FlashClippingError(
                f"FC584 The trainer counts {counted} steps, and {accounted} are accounted. "
                "Something overrides the optimizer, its step() or the loading of a checkpoint."
            )

    def check_budget(self, remaining: int) -> None:
        """Raise ``ValueError`` for more steps than the noise of ``target_epsilon`` is for."""
        if self.arguments.target_epsilon is None or self.steps + remaining <= self.planned_steps:
            return
        raise InvalidValue(
            f"FC583 target_epsilon={self.arguments.target_epsilon}: its noise was computed for "
            f"{self.planned_steps} steps, of which {self.steps} are done; found {remaining} more. "
            "Give the number of steps of the whole training at once, or noise_multiplier="
            f"{self.noise_multiplier:.4g} instead of target_epsilon: epsilon then grows further. "
            "After an interrupt, go on from a checkpoint with a new trainer:\n"
            "    trainer.train(resume_from_checkpoint=True)"
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def _settings(self) -> dict[str, float]:
        """What a run may not change when it is resumed, beside the data."""
        names = ("noise_multiplier", "sample_rate", "max_grad_norm")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, beside model and optimizer; no objects of classes."""
        state: dict[str, Any] = {
            "accountant": dict(self.engine.accountant.state_dict()),
            "settings": self._settings(),
            # That of the next step, which adaptive clipping moves.
            "bound": self.optimizer.max_grad_norm,
            "noise_stream": self.optimizer.stream.state_dict(),
            "steps_before": self.steps_before,
        }
        if self.arguments.seed is not None:
            state["sampling_stream"] = self.sampling_stream.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the accounting of a checkpoint, of this run, in which no step was done yet;
        noise is drawn afresh, unless from a seed."""
        now, then = self._settings(), state["settings"]
        changed = [name for name in then if now[name] != then[name]]
        if changed:
            listed = "; ".join(f"{name} was {then[name]}, is {now[name]}" for name in changed)
            raise InvalidValue(
                f"FC582 resume: the checkpoint is of another run: {listed}. Use the same data, "
                "batch size, number of steps and privacy arguments."
            )
        self.steps_before = state["steps_before"]
        self.engine.accountant.load_state_dict(state["accountant"])
        self.optimizer.max_grad_norm = state["bound"]
        self.optimizer.stream.load_state_dict(state["noise_stream"])
        if self.arguments.seed is not None and "sampling_stream" in state:
            self.sampling_stream.load_state_dict(state["sampling_stream"])


# -- Poisson batches in parts that fit in memory ------------------------------------------------


class LogicalBatch(Parts):
    """All samples of one step, in parts that were collated separately. A part without samples
    has one row, the first of the data, and the size 0."""

    def samples(self, part: Any, size: int, start: int, stop: int) -> Any:
        if count_of(part, axis=0) != size:
            raise InvalidValue(
                f"FC810 PrivateTrainer: found a part of {size} samples that runs out of memory, "
                "and whose tensors do not have a row for each of them. Say how many samples fit:\n"
                f"    PrivacyArguments(..., max_physical_batch_size={size // 2})"
            )
        return super().samples(part, size, start, stop)

    def pin_memory(self) -> LogicalBatch:
        """Called by PyTorch's loader, which does not look into classes."""
        return replace(self, parts=map_tensors(Tensor.pin_memory, self.parts, packed=True))


class CollateParts:
    """Collates a logical batch in equal parts.

    Attributes:
        part_size: samples of a part.
        usual, most: no more parts than ``usual`` are made where they have ``most`` samples at most.
    """

    def __init__(self, collate: Any, dataset: Any, part_size: int, usual: int | None):
        self.collate, self.dataset = collate, dataset
        self.part_size, self.usual = part_size, usual or 1
        # Poisson draws of a mean of b samples are hardly ever larger.
        self.most = part_size if usual is None else part_size + math.ceil(5 * math.sqrt(part_size))

    def part(self, samples: list[Any]) -> Any:
        """One part."""
        return self.collate(samples or [self.dataset[0]])

    def __call__(self, samples: list[Any]) -> LogicalBatch:
        least, count = (-(-len(samples) // size) for size in (self.most, self.part_size))
        pairs = bounds_of(0, len(samples), max(1, min(count, max(least, self.usual))))
        parts = [samples[start:stop] for start, stop in pairs]
        return LogicalBatch([self.part(part) for part in parts], [*map(len, parts)])


class LogicalLoader(PoissonLoader):
    """Poisson batches in parts of ``part_size`` samples at most; or, with ``usual``, of a few more
    than that where these are no more parts than that."""

    announces = False
    collate_fn: CollateParts

    def __init__(
        self,
        dataset: Any,
        *,
        part_size: int,
        collate_fn: Any,
        usual: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(dataset, collate_fn=collate_fn, **kwargs)
        collate = collate_fn or default_collate
        self.collate_fn = CollateParts(collate, dataset, part_size, usual)
        self.processes: ProcessGroups | None = None

    def share(self, processes: ProcessGroups) -> None:
        """Draw this process's samples, in as many parts as the other processes have, some of them
        without: all run the model equally often."""
        super().share(processes)
        self.processes, self.batch_sampler.part_size = processes, self.collate_fn.part_size

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.processes is not None:
                while len(batch.parts) < self.batch_sampler.parts[0]:
                    batch.parts.append(self.collate_fn.part([]))
                    batch.sizes.append(0)
                self.batch_sampler.parts.popleft()
            yield batch
