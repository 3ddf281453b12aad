"""Hugging Face's ``Trainer`` with differential privacy.

``transformers`` owns the loop, the schedule, logs, evaluation and checkpoints. This class replaces
four things in it: the training loader (Poisson batches), the loss (one for each sample), the
optimizer (clipped sums with noise), and what is logged and saved of privacy. A batch of the loader
is all samples of one step, in parts: one batch is one step to the Trainer.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn

from flash_clipping.engine.options import Kernels
from flash_clipping.errors import FlashClippingError, InvalidValue, missing_extra

try:
    import accelerate as accelerate  # which Trainer needs later
    from accelerate.optimizer import AcceleratedOptimizer
    from tqdm.auto import tqdm
    from transformers import (
        Seq2SeqTrainer as Seq2SeqTrainer,
        Trainer as Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES
except ImportError as error:
    raise missing_extra("transformers", __name__, error) from error

from flash_clipping._compat import let_memory_grow
from flash_clipping.capture.inputs import batched_inputs
from flash_clipping.capture.units import UnitsOfCalls
from flash_clipping.distributed import has_shards, reshard
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.dashboard import line
from flash_clipping.trainers.few_shapes import FewShapes
from flash_clipping.trainers.private_run import (
    LogicalBatch,
    LogicalLoader,
    PrivateRun,
    ReportsPrivacy,
)
from flash_clipping.trainers.refused import (
    layers_cut_by_transformers,
    refuse_arguments,
    refuse_loader,
    refuse_trainer,
)
from flash_clipping.trainers.sample_losses import asking, compare, sample_losses, shifts_labels

__all__ = ["PrivacyArguments", "PrivateSeq2SeqTrainer", "PrivateTrainer"]

#: In a checkpoint's folder: accountant and settings.
STATE_NAME = "privacy.pt"


class PrivateTrainer(ReportsPrivacy, Trainer):
    """``transformers.Trainer``, with differential privacy for every sample of ``train_dataset``.

    Example::

        trainer = PrivateTrainer(
            model=model, args=args, train_dataset=dataset,
            privacy=PrivacyArguments(target_epsilon=3.0, target_delta=1e-5))
        trainer.train()
        trainer.save_model("model")  # as from_pretrained takes it

    Args:
        *arguments, **kwargs: as in ``Trainer``, or in the trainer that a subclass stands before
            (``class PrivateDPO(PrivateTrainer, DPOTrainer)``).
        privacy: how private the run is.

    A step draws each sample with one probability, and clips its gradient by ``max_grad_norm``.
    ``docs/trainers.md`` says what the arguments of ``TrainingArguments`` mean here.

    ``trainer.args`` is a copy, in which these hold what the Trainer's own loop is to do.

    Guarantees:
        ``(ε, δ)`` of :meth:`flash_clipping.FlashPrivacyEngine.get_epsilon`, for the weights after
        every step and all checkpoints of one run. Every step that changes the weights is accounted,
        also one whose batch is empty; a checkpoint holds as many steps as its weights have seen.
        Logs of losses and norms are not covered.

    Raises:
        ValueError: an argument with which a step would not be private; in :meth:`train`, a
            checkpoint of another run, or sample losses that are not the model's own loss.
    """

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        bound = _bound(type(self), arguments, kwargs)
        given = bound.arguments.get("args") or TrainingArguments(output_dir="tmp_trainer")
        refuse_arguments(given)
        self.privacy, self.run = privacy, PrivateRun(privacy)
        self._max_grad_norm = _clipping_bound(given.max_grad_norm, privacy.max_grad_norm)
        self._logical_batch_size: int = (
            given.per_device_train_batch_size * given.gradient_accumulation_steps * given.world_size
        ) // layers_cut_by_transformers(bound.arguments.get("model"))
        self._usual_parts = given.gradient_accumulation_steps
        bound.arguments["args"] = own = copy.copy(given)
        own.gradient_accumulation_steps = 1
        own.max_grad_norm = 0.0
        # The Trainer would begin its loop again, with batches of another rate.
        self._finds_batch_size = given.auto_find_batch_size
        own.auto_find_batch_size = False
        own.logging_nan_inf_filter = False  # it waits for the device in every step
        sample_of = None if privacy.unit is None else privacy.unit.argument
        self._units = None if sample_of is None else UnitsOfCalls(sample_of, batch_first=True)
        part_size = privacy.max_physical_batch_size or given.per_device_train_batch_size
        self._shapes = FewShapes(part_size, privacy.few_shapes and self._units is None)
        #: Samples of the batch whose losses are computed.
        self._samples = 0
        #: Whether the model's own loss shifts labels; ``None`` if nobody knows.
        self._shifts: bool | None = None
        self._loader: Any = None
        self._data_parallel: nn.Module | None = None
        self._trainings = 0
        super().__init__(*bound.args[1:], **bound.kwargs)
        refuse_trainer(self)
        self.add_callback(_Watch(self))

    # -- before the first step ------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in ``Trainer``. A second call goes on with the same accountant, also on another
        ``train_dataset``: ε is then for a sample of either. At the end the model has no hooks.

        Raises:
            ValueError: ``target_epsilon`` would be exceeded; a resumed trainer has trained before;
                sample losses that are not the model's own loss.
        """
        self.run.steps_before = self.run.steps
        # Accelerate keeps this number for the process; another Accelerator may have set it.
        self.accelerator.gradient_accumulation_steps = 1
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._trainings += 1
            self.run.detach()

    def get_train_dataloader(self) -> Any:
        """Poisson batches of ``train_dataset``, each a ``LogicalBatch``; in training, its own."""
        if self.run.hooks is not None:
            return self._loader
        plain = super().get_train_dataloader()
        refuse_loader(plain)
        limit = self.privacy.max_physical_batch_size
        is_cut = self.is_fsdp_enabled or layers_cut_by_transformers(self.model) > 1
        self._loader = LogicalLoader.from_data_loader(
            plain,
            sample_rate=1 / -(-len(plain.dataset) // self._logical_batch_size),  # type: ignore[arg-type]
            part_size=limit or self.args.per_device_train_batch_size,
            # Units have several rows, or parts of one: a part of these cannot be cut.
            usual=None if limit or is_cut or self._units else self._usual_parts,
            stream=self.run.sampling_stream,
            distributed=self.args.world_size > 1,
        )
        return self._loader

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's schedule, of an optimizer that adds noise to clipped sums: this is called
        when Accelerate has prepared (and sharded) model and optimizer, before either is used."""
        run, prepared = self.run, self.optimizer
        is_drawn = self._loader is not None  # or _Watch refuses to begin
        if is_drawn and run.hooks is None and isinstance(prepared, AcceleratedOptimizer):
            let_memory_grow()
            self._compare_with_own_loss()
            assert self.model is not None
            kernels = Kernels(cuda_graphs="off" if self.args.world_size > 1 else "auto")
            options: dict[str, Any] = {"kernels": kernels}
            model = self.accelerator.unwrap_model(self.model)
            inside = model.get_base_model() if hasattr(model, "peft_config") else model
            names = {cls.__name__ for cls in type(inside).__mro__}
            if names & set(MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()):
                options["folded_modules"] = ("*",)  # choices [B, C, T] become rows [B · C, T]
            run.attach(
                self._data_parallel or self.model,
                prepared.optimizer,
                self._loader,
                max_grad_norm=self._max_grad_norm,
                steps=num_training_steps,
                options=options,
            )
            prepared.optimizer = run.optimizer
            parts, collate = run.in_parts, self._loader.collate_fn
            parts.halves, parts.fits = self._finds_batch_size, collate.part_size
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    def _compare_with_own_loss(self) -> None:
        model, loader = self.accelerator.unwrap_model(self.model), self._loader
        cls, own_losses = type(self), PrivateTrainer.compute_sample_losses
        is_ours = self.compute_loss_func is None and cls.compute_sample_losses is own_losses

        def collate(samples: list[Any]) -> Any:
            return self._prepare_inputs(loader.collate_fn.part(samples))

        with asking(model), self.accelerator.autocast():
            samples = [loader.dataset[index] for index in range(min(8, len(loader.dataset)))]
            # Batches may be for the losses of a subclass only.
            with nullcontext() if is_ours else suppress(Exception):
                self._shifts = shifts_labels(model, samples, collate)
            if is_ours:
                compare(model, samples, collate, partial(self._losses, model))
        reshard(model)

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if training and self.args.world_size > 1 and not self.is_fsdp_enabled:
            if has_shards(model):  # each process has a part of the layers, and all samples
                return model
            if self._data_parallel is None:
                self._data_parallel = DifferentiallyPrivateDistributedDataParallel(self.model)  # type: ignore[arg-type]  # "| None" there
            return self._data_parallel
        return super()._wrap_model(model, training, *args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected size of a step's batch."""
        return self._logical_batch_size

    # -- a step ---------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """The next batches, and no count of their tokens."""
        return list(islice(epoch_iterator, num_batches)), None

    def _prepare_input(self, data: Any) -> Any:
        """As in ``Trainer``; a pinned tensor's copy does not wait for the step before to end."""
        if isinstance(data, Tensor) and data.is_pinned() and not self.is_deepspeed_enabled:
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Leave the clipped sums of a batch with the optimizer; return the mean of its losses, in
        which those that are not finite count nothing, as in the step."""
        if self.run.hooks is None or not isinstance(inputs, LogicalBatch):
            raise InvalidValue(
                f"FC807 PrivateTrainer: found a training batch of type {type(inputs).__name__}; "
                "expected one of its own loader. Do not override get_train_dataloader; change "
                "train_dataset or data_collator."
            )
        hooks, parts = self.run.hooks, self.run.in_parts
        model.train()

        def backward(part: Any, size: int) -> Tensor:
            limits = parts.most, parts.fits, self._loader.collate_fn.most
            most = next((limit for limit in limits if limit and size <= limit), size)
            inputs, filled = self._shapes.rounded(part, size, most, hooks, self._prepare_inputs)
            hooks.expect_samples(filled or size)
            hooks._session.rows.padding.expect(size, filled)
            rows = self._samples = filled or max(1, size)  # one of nobody stands for none
            with self.compute_loss_context_manager():
                losses = self.compute_sample_losses(model, inputs)
            if losses.shape != (rows,):
                raise InvalidValue(
                    f"FC804 compute_sample_losses: found losses of shape {[*losses.shape]} for "
                    f"{rows} samples; expected one loss for each sample, [B], not reduced."
                )
            # A sum's gradients are each sample's own, however many samples a part has.
            with hooks.summed_loss():
                losses.sum().backward()
            self.run.statistics.note_backward()
            losses = losses.detach().float()[:size]
            return torch.where(losses.isfinite(), losses, 0.0).sum()

        self._shapes.cut(inputs, hooks)
        try:
            totals = parts.run(inputs, backward)
        except torch.OutOfMemoryError as error:
            if not self._finds_batch_size:
                error.add_note(
                    "PrivateTrainer: let parts of a batch that do not fit be halved:\n"
                    "    TrainingArguments(..., auto_find_batch_size=True)"
                )
            raise
        hooks.expect_samples(None)
        hooks._session.rows.padding.expect(0, None)
        if (most := parts.most) is not None:  # parts that are collated from now on
            self._loader.collate_fn.part_size = self._loader.collate_fn.most = most
        return torch.stack(totals).sum() / max(1, sum(inputs.sizes))

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of every sample, ``[B]``, each a function of that sample only; by
        ``compute_loss_func(outputs, labels, num_items_in_batch=None)``, where it was given. For
        tokens it is the mean over a sample's own. Override it for another loss, for training;
        evaluation has the Trainer's own ``compute_loss``."""
        return self._losses(model, inputs, self._samples, self.args.label_smoothing_factor)

    def _losses(
        self, model: nn.Module, inputs: dict[str, Any], samples: int, label_smoothing: float = 0.0
    ) -> Tensor:
        inputs = dict(inputs)
        plain = self.accelerator.unwrap_model(self.model)
        units = None
        if self._units is not None:
            index, without = self._units.argument(plain, (), inputs)
            if not isinstance(index, Tensor):
                raise InvalidValue(
                    f"FC808 PrivateTrainer: unit={self.privacy.unit}: found "
                    f"{type(index).__name__} in a batch; expected a tensor by that name from "
                    "data_collator, with the unit of every row, [R], or of every position, [R, T]."
                )
            found = self._units.of_call(index, batched_inputs((), without), samples)
            units = found.map.index_M.view(found.shape), found.count
            if self.run.hooks is None:  # which would take the argument off
                inputs = without
        if self.compute_loss_func is not None:
            target = inputs.pop("labels", None)
            losses: Tensor = self.compute_loss_func(
                model(**inputs), target, num_items_in_batch=None
            )
            return losses
        # Scripts for masked images name these as labels; losses of such models are refused.
        names = [n for n in self.label_names if n not in ("pixel_values", "bool_masked_pos")]
        labels = {name: inputs.pop(name) for name in names if name in inputs}
        called = inputs
        if labels.keys() == {"labels"} and labels["labels"].dim() > 1:
            called = inputs | _decoder_inputs(plain, inputs, labels["labels"])
        inside = plain.get_base_model() if hasattr(plain, "peft_config") else plain
        if "use_cache" in inspect.signature(inside.forward).parameters:
            called = {"use_cache": False} | called  # no replay can return a cache for generation
        return sample_losses(
            model(**called),
            labels,
            model=plain,
            inputs=inputs,
            shift=self._shifts,
            label_smoothing=label_smoothing,
            units=units,
        )

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: samples are clipped already."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: before the step gradients are sums without noise."""

    def floating_point_ops(self, inputs: Any) -> int:
        """The number for all parts of a batch."""
        return sum(int(super(PrivateTrainer, self).floating_point_ops(p)) for p in inputs.parts)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in inputs.parts:
            super()._track_num_input_tokens(part)  # type: ignore[no-untyped-call]

    # -- logs -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in ``Trainer``; logs of training have ``epsilon`` and ``samples_per_second``.
        Norms are shown, and in ``run.readings``: ``trainer_state.json`` has all logs."""
        if self.run.steps:
            if "loss" in logs and self.run.statistics is not None:
                reading = self.run.read()
                logs.update(reading.logs(self.epsilon))  # of self.relation
                if self.is_world_process_zero():
                    tqdm.write(line(self.state.global_step, self.epsilon, reading))
            elif "train_loss" in logs:
                logs["epsilon"] = self.epsilon
        super().log(logs, *args, **kwargs)

    # -- checkpoints ----------------------------------------------------------------------------

    @contextmanager
    def _without_noise(self) -> Iterator[None]:
        """What saves and loads the optimizer of shards takes a step of it to learn its state."""
        prepared: Any = self.optimizer
        if self.is_fsdp_enabled:
            self.optimizer = self.run.optimizer.original_optimizer
        try:
            yield
        finally:
            self.optimizer = prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._without_noise():
            super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:  # another process does, and all have taken the same steps
            return
        state = self.run.state_dict()
        state["trainings"] = self._trainings
        torch.save(state, os.path.join(output_dir, STATE_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._without_noise():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE_NAME)
        if not os.path.isfile(path):
            raise InvalidValue(
                f"FC582 resume_from_checkpoint: {checkpoint} has no {STATE_NAME}. It was written "
                "by another trainer, or with save_only_model=True. Resume from one that "
                "PrivateTrainer wrote."
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.run.load_state_dict(state)
        self._trainings = state["trainings"]


class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with differential privacy for every sample of
    ``train_dataset``; ``args`` are ``Seq2SeqTrainingArguments``, the rest is as in
    :class:`PrivateTrainer`."""


class _Watch(TrainerCallback):
    """Follows the Trainer's loop: every step of it must be one that is accounted."""

    def __init__(self, trainer: PrivateTrainer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._trainer.run
        if run.optimizer is None:
            raise FlashClippingError(
                "FC807 PrivateTrainer: training begins, and the optimizer is not private. Do not "
                "override create_scheduler or get_train_dataloader."
            )
        run.check_steps(state.global_step)
        run.check_budget(state.max_steps - state.global_step)
        run.statistics.read()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._trainer.run
        run.begin_epoch(self._trainer._loader, self._trainer._trainings, int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.run.check_steps(state.global_step)


def _decoder_inputs(plain: Any, inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """Inputs of the decoder, made of the labels as the model would; none where they are given."""
    if any(inputs.get(f"decoder_{name}") is not None for name in ("input_ids", "inputs_embeds")):
        return {}
    shifted = getattr(plain, "prepare_decoder_input_ids_from_labels", None)
    if shifted is not None:
        return {"decoder_input_ids": shifted(labels)}
    # Others shift them themselves; their loss is left aside.
    return {"labels": labels} if getattr(plain.config, "is_encoder_decoder", False) else {}


def _clipping_bound(of_trainer: float | None, of_privacy: float | None) -> float:
    """``C``, from where it was given."""
    differ = of_privacy is not None and of_trainer and of_trainer not in (1.0, of_privacy)
    bound = of_privacy or of_trainer
    if differ or not bound:  # the Trainer's default is 1, for the gradient of a batch
        raise InvalidValue(
            f"FC803 max_grad_norm: found {of_trainer} in TrainingArguments and {of_privacy} in "
            "PrivacyArguments; expected the clipping bound of a sample in one of them."
        )
    return bound


def _bound(cls: type, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Arguments by the names of the trainer that comes after ``PrivateTrainer``; ``self`` first."""
    for base in cls.__mro__[cls.__mro__.index(PrivateTrainer) + 1 :]:
        signature = inspect.signature(vars(base).get("__init__", lambda: None))
        named = signature.parameters.get("args")
        if named is not None and named.kind is not inspect.Parameter.VAR_POSITIONAL:
            break  # the others are mixins, which hand them on
    bound = signature.bind(None, *arguments, **kwargs)
    if base is not Trainer and bound.arguments.get("args") is None:
        raise InvalidValue(
            f"FC809 PrivateTrainer: found no args; expected those of {base.__name__}, "
            f"args={signature.parameters['args'].annotation}."
        )
    return bound
