"""What a private run in somebody else's trainer cannot have, each by its name: tables from what was
found and what to do instead to whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import RandomSampler

from flash_clipping.distributed import has_shards
from flash_clipping.engine.unsupported import refuse_unloaded
from flash_clipping.errors import InvalidValue

_SEVERAL = (
    "PrivateTrainer trains with one device in each process. Start a process for every GPU "
    "(torchrun, accelerate launch), with fsdp_version: 2 (in TrainingArguments fsdp=True, "
    "fsdp_config={'version': 2}) for models that do not fit; or use FlashPrivacyEngine"
)


def _refuse(found: Mapping[str, Any]) -> None:
    for text, is_found in found.items():
        if is_found:
            raise InvalidValue(f"FC802 PrivateTrainer: found {text}.")


def layers_cut_by_transformers(model: Any) -> int:
    """Over how many processes ``transformers`` has cut a model's layers: 1 if it has not."""
    return (getattr(model, "tp_size", None) or 1) if has_shards(model) else 1


def refuse_arguments(args: Any) -> None:
    """Raise ``ValueError`` for ``TrainingArguments`` under which steps would not be private, or not
    be accounted."""
    form, noise = args.parallel_mode.value, args.neftune_noise_alpha
    optim = str(args.optim).rpartition(".")[2].lower()
    found = {
        "fp16=True. Samples would be clipped by scaled gradients. Use bf16=True": args.fp16,
        f"several processes ({form}). {_SEVERAL}": args.world_size > 1 and form != "distributed",
        f"deepspeed. {_SEVERAL}": args.deepspeed,
        f"{args.n_gpu} GPUs (DataParallel). {_SEVERAL}": args.n_gpu > 1,
        "torch_compile=True. The Trainer would compile the hooks. Leave it out, and call "
        "model.compile()": args.torch_compile,
        f"neftune_noise_alpha={noise}. Its noise is as large as the longest text of the batch. "
        "Leave it out": noise is not None,
        "batches by length, or in order (train_sampling_strategy). Poisson sampling draws every "
        "sample alike. Leave it out": not str(args.train_sampling_strategy).endswith("random"),
        f"optim={optim!r}. It updates parameters during backward, before noise is added. Use "
        "another optimizer": "lomo" in optim or "layerwise" in optim,
    }
    _refuse(found)


def refuse_trainer(trainer: Any) -> None:
    """Raise ``ValueError`` for what else a trainer was given."""
    cls, args, model = type(trainer), trainer.args, trainer.model
    losses: Any = next(base for base in cls.__mro__ if "compute_sample_losses" in vars(base))
    is_ours = losses.__module__.startswith("flash_clipping.")
    cut, is_sharded = layers_cut_by_transformers(model), trainer.is_fsdp_enabled
    form = getattr(trainer.accelerator, "parallelism_config", None)
    cp, sp, tp = (getattr(form, f"{name}_size", 1) for name in ("cp", "sp", "tp"))
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", 1)
    saves = str(getattr(args.save_strategy, "value", args.save_strategy))
    found = {
        "model_init. Every model that it makes would have an accountant of its own. Give "
        "model=": trainer.model_init is not None,
        f"compute_loss of {cls.__name__}. It returns one loss for the whole batch. Override "
        "compute_sample_losses(model, inputs), which returns one for each sample, [B]": (
            is_ours and cls.compute_loss is not losses.compute_loss
        ),
        "a model that is private already. Give model.to_standard_module(), or take the hooks off "
        "first: hooks.cleanup()": hasattr(model, "autograd_grad_sample_hooks"),
        "a model whose parameters are shards. Give the plain model: Accelerate shards it "
        "(accelerate launch with fsdp_version: 2). For tensor parallelism let transformers cut it "
        "(from_pretrained(..., tp_plan='auto')), or use FlashPrivacyEngine after "
        "parallelize_module": has_shards(model) and cut == 1,
        f"parallelism_config with {'sp' if sp > 1 else 'cp'}_size={max(cp, sp)}. Positions of one "
        "sample would be in several processes. Use dp_replicate_size and dp_shard_size": (
            cp > 1 or sp > 1
        ),
        f"parallelism_config with tp_size={tp}, and layers cut over {cut} processes. Nothing "
        "would cut them. Let transformers do it: from_pretrained(..., tp_plan='auto')": (
            tp not in (1, cut)
        ),
        f"layers cut over {cut} of {args.world_size} processes. Accelerate does not shard such "
        "models, nor give them parts of a batch. Cut layers over all processes, or use "
        "FlashPrivacyEngine after fully_shard": (
            cut > 1 and (cut != args.world_size or is_sharded)
        ),
        f"save_strategy={saves}, and layers that are cut over processes. The Trainer saves in one "
        "process, which would wait for the others. Use save_strategy='no', and at the end in all "
        "processes trainer.model.save_pretrained(folder)": cut > 1 and saves != "no",
    }
    _refuse(found)
    refuse_unloaded(model)  # or the loss would be compared with one of other adapters
    found = {
        f"fsdp with fsdp_version={version}. {_SEVERAL}": plugin is not None and version != 2,
        "fsdp, and Accelerate does not shard here. It needs several processes with a GPU each "
        "(torchrun). Start them, or leave fsdp out": args.fsdp and not is_sharded,
        "auto_find_batch_size=True, and shards. All processes must run as many parts. Give "
        "per_device_train_batch_size what fits, and the rest to gradient_accumulation_steps": (
            (is_sharded or cut > 1) and trainer._finds_batch_size
        ),
        "output_router_logits=True in the model's config. Its auxiliary loss mixes the samples of "
        "a batch. Set it to False; with TRL's trainers, which set it themselves, "
        "router_aux_loss_coef=0.0": (
            getattr(getattr(model, "config", None), "output_router_logits", False)
        ),
    }
    _refuse(found)


def refuse_loader(loader: Any) -> None:
    """Raise ``ValueError`` for a loader whose sampling is another than the Trainer's own."""
    dataset = loader.dataset
    is_drawn = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    # Accelerate's, which gives each of several processes some of the batches, has one inside.
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    sampler = getattr(batches, "sampler", None)
    found = {
        f"train_dataset of type {type(dataset).__name__}. Samples are drawn by their index. Give a "
        "dataset with __len__ and __getitem__": not is_drawn,
        "a train_dataset without samples. Give one that has some": is_drawn and not len(dataset),
        f"a training loader with {type(sampler).__name__}. Poisson sampling would replace it by "
        "one that draws all samples alike. Do not override _get_train_sampler": (
            not isinstance(sampler, RandomSampler) or sampler.replacement
        ),
    }
    _refuse(found)


def refuse_lightning(trainer: Any, model: nn.Module) -> None:
    """Raise ``ValueError`` for settings of Lightning's with which a step would not be private."""
    several, parts = trainer.world_size > 1, trainer.accumulate_grad_batches
    found = {
        f"{trainer.world_size} processes, and {type(model).__name__} whole in each of them. Call "
        "fully_shard in configure_model, on its blocks and on the module itself that is private, "
        "or parallelize_module, with Trainer(strategy=ModelParallelStrategy("
        "data_parallel_size=..., tensor_parallel_size=...)); or train on one device: "
        "Trainer(devices=1)": several and not has_shards(model),
        "use_distributed_sampler=True. Every process draws its own samples. Use "
        "Trainer(use_distributed_sampler=False)": (
            several and trainer._accelerator_connector.use_distributed_sampler
        ),
        f"precision={trainer.precision!r}. Samples would be clipped by scaled gradients. Use "
        "precision='bf16-mixed'": getattr(trainer.precision_plugin, "scaler", None) is not None,
        f"gradient_clip_val={trainer.gradient_clip_val}. Samples are clipped already, by "
        "PrivacyArguments.max_grad_norm. Leave it out": trainer.gradient_clip_val,
        f"accumulate_grad_batches={parts}. A Poisson batch is one step. Give the loader the batch "
        "size of a step, and PrivacyArguments(max_physical_batch_size=...) what fits in memory": (
            parts != 1
        ),
        "overfit_batches. Leave it out": trainer.overfit_batches,
        f"{len(trainer.optimizers)} optimizers. One optimizer takes the clipped sums. Use one, "
        "with a parameter group for whatever needs settings of its own": (
            len(trainer.optimizers) != 1
        ),
    }
    for text, is_found in found.items():
        if is_found:
            raise InvalidValue(f"FC820 PrivateTraining: found {text}.")
