"""Settings of Hugging Face's Trainer that a private run cannot have, each by its name."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler

from flash_clipping.distributed import has_shards
from flash_clipping.engine.unsupported import refuse_unloaded
from flash_clipping.errors import InvalidValue

_SEVERAL = (
    "PrivateTrainer trains with one device in each process. Start a process for every GPU "
    "(torchrun, accelerate launch), with fsdp_version: 2 (in TrainingArguments fsdp=True, "
    "fsdp_config={'version': 2}) for models that do not fit; or use FlashPrivacyEngine"
)


def layers_cut_by_transformers(model: Any) -> int:
    """Over how many processes ``transformers`` has cut a model's layers: 1 if it has not."""
    return (getattr(model, "tp_size", None) or 1) if has_shards(model) else 1


def refuse_arguments(args: Any) -> None:
    """Raise ``ValueError`` for ``TrainingArguments`` under which steps would not be private, or not
    be accounted."""
    _refuse_if(
        args.fp16,
        "fp16=True",
        "It scales the loss, and samples would be clipped by scaled gradients. Use bf16=True",
    )
    form = args.parallel_mode.value
    _refuse_if(
        args.world_size > 1 and form != "distributed", f"several processes ({form})", _SEVERAL
    )
    _refuse_if(args.deepspeed, "deepspeed", _SEVERAL)
    _refuse_if(args.n_gpu > 1, f"{args.n_gpu} GPUs (DataParallel)", _SEVERAL)
    compiles = "The Trainer would compile the model with its hooks. Leave it out"
    _refuse_if(args.torch_compile, "torch_compile=True", compiles)
    _refuse_if(
        args.neftune_noise_alpha is not None,
        f"neftune_noise_alpha={args.neftune_noise_alpha}",
        "Its noise is as large as the longest text of the batch. Leave it out",
    )
    _refuse_if(
        not str(args.train_sampling_strategy).endswith("random"),
        "batches by length, or in order (train_sampling_strategy)",
        "Poisson sampling draws every sample alike. Leave it out",
    )
    name = str(args.optim).rpartition(".")[2].lower()
    _refuse_if(
        "lomo" in name or "layerwise" in name,
        f"optim={name!r}",
        "It updates parameters during backward, before noise is added. Use another optimizer",
    )


def refuse_trainer(trainer: Any) -> None:
    """Raise ``ValueError`` for what else a trainer was given."""
    cls = type(trainer)
    losses: Any = next(base for base in cls.__mro__ if "compute_sample_losses" in vars(base))
    is_ours = losses.__module__.startswith("flash_clipping.")
    _refuse_if(
        trainer.model_init is not None,
        "model_init",
        "Every model that it makes would have an accountant of its own. Give model=",
    )
    _refuse_if(
        is_ours and cls.compute_loss is not losses.compute_loss,
        f"compute_loss of {cls.__name__}",
        "It returns one loss for the whole batch. Override compute_sample_losses(model, inputs), "
        "which returns one for each sample, [B]",
    )
    _refuse_if(
        hasattr(trainer.model, "autograd_grad_sample_hooks"),
        "a model that is private already",
        "Give model.to_standard_module(), or take the hooks off first: hooks.cleanup()",
    )
    cut = layers_cut_by_transformers(trainer.model)
    _refuse_if(
        has_shards(trainer.model) and cut == 1,
        "a model whose parameters are shards",
        "Give the plain model: Accelerate shards it (accelerate launch with fsdp_version: 2). For "
        "tensor parallelism let transformers cut it (from_pretrained(..., tp_plan='auto')), or use "
        "FlashPrivacyEngine after parallelize_module",
    )
    form = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        size = getattr(form, name, 1)
        _refuse_if(
            size > 1,
            f"parallelism_config with {name}={size}",
            "Positions of one sample would be in several processes. Give every sample to one: "
            "dp_replicate_size and dp_shard_size",
        )
    tensor = getattr(form, "tp_size", 1)
    _refuse_if(
        tensor > 1 and tensor != cut,
        f"parallelism_config with tp_size={tensor}, and layers cut over {cut} processes",
        "Nothing would cut them. Let transformers do it: from_pretrained(..., tp_plan='auto')",
    )
    _refuse_if(
        cut > 1 and (cut != trainer.args.world_size or trainer.is_fsdp_enabled),
        f"layers cut over {cut} of {trainer.args.world_size} processes",
        "Accelerate does not shard such models, nor give them parts of a batch. Cut layers over "
        "all processes, or use FlashPrivacyEngine after fully_shard",
    )
    saves = str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy))
    _refuse_if(
        cut > 1 and saves != "no",
        f"save_strategy={saves}, and layers that are cut over processes",
        "The Trainer saves in one process, which would wait for the parts that others have. Use "
        "save_strategy='no', and at the end in all processes "
        "trainer.model.save_pretrained(folder)",
    )
    refuse_unloaded(trainer.model)  # or the loss would be compared with one of other adapters
    asked, plugin = trainer.args.fsdp, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", 1)
    _refuse_if(plugin is not None and version != 2, f"fsdp with fsdp_version={version}", _SEVERAL)
    _refuse_if(
        asked and not trainer.is_fsdp_enabled,
        "fsdp, and Accelerate does not shard here",
        "It needs several processes with a GPU each (torchrun). Start them, or leave fsdp out",
    )
    _refuse_if(
        (trainer.is_fsdp_enabled or cut > 1) and trainer._finds_batch_size,
        "auto_find_batch_size=True, and shards",
        "All processes must run as many parts. Give per_device_train_batch_size what fits, and the "
        "rest to gradient_accumulation_steps",
    )
    config = getattr(trainer.model, "config", None)
    _refuse_if(
        getattr(config, "output_router_logits", False),
        "output_router_logits=True in the model's config",
        "Its auxiliary loss mixes the samples of a batch. Set it to False; with TRL's trainers, "
        "which set it themselves, router_aux_loss_coef=0.0",
    )


def refuse_loader(loader: Any) -> None:
    """Raise ``ValueError`` for a loader whose sampling is another than the Trainer's own."""
    dataset = loader.dataset
    _refuse_if(
        not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"),
        f"train_dataset of type {type(dataset).__name__}",
        "Samples are drawn by their index. Give a dataset with __len__ and __getitem__",
    )
    _refuse_if(not len(dataset), "a train_dataset without samples", "Give one that has some")
    # Accelerate's, which gives each of several processes some of the batches, has one inside.
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    sampler = getattr(batches, "sampler", None)
    _refuse_if(
        not isinstance(sampler, RandomSampler) or sampler.replacement,
        f"a training loader with {type(sampler).__name__}",
        "Poisson sampling would replace it by one that draws all samples alike. Do not override "
        "_get_train_sampler",
    )


def _refuse_if(found: Any, name: str, advice: str) -> None:
    if found:
        raise InvalidValue(f"FC802 PrivateTrainer: found {name}. {advice}.")
