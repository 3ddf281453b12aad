"""Hugging Face's ``Trainer`` in several processes, each with samples of its own: with whole models,
or with shards of FSDP2; and Lightning's with shards."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh

from flash_clipping.capture.padding import NO_ROW
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.distributed.processes import BACKEND, C, Parts, all_of, as_torchrun, message
from tests.support.trainers import Texts, arguments, bert, privacy
from tests.trainers import test_lightning

#: Samples; steps of an epoch of expected batches of 4.
SIZE, STEPS, RATE = 24, 6, 0.5
TRAINING = {"lr_scheduler_type": "constant", "remove_unused_columns": False}


class Noting(PrivateTrainer):
    """Remembers which samples it has drawn, step by step."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        if not hasattr(self, "drawn"):
            self.drawn: list[list[int]] = []
            self.most = 0
        pairs = zip(inputs.parts, inputs.sizes, strict=True)
        self.drawn.append([int(i) for part, size in pairs for i in part["index"][:size]])
        self.most = max(self.most, *inputs.sizes)
        return super().training_step(model, inputs, *args)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return super().compute_sample_losses(
            model, {name: x for name, x in inputs.items() if name != "index"}
        )


class OfCpus(ParallelismConfig):
    """Accelerate takes no mesh of CPUs before it shards."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        pass


class Sharding(Noting):
    """Accelerate takes FSDP for GPUs alone, so that it is told here that there are some."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.accelerator.state.fsdp_plugin = plugin
        self.accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


#: Accelerate shards input embeddings by themselves, and fails where those around are sharded.
_LAYERS = {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
_SHARDS = {"fsdp": True, "fsdp_config": _LAYERS}
#: Samples of a part, and parts, in each process with samples of its own.
_PARTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_TWO, _FOUR, _ALL = (dict(zip(_PARTS, sizes, strict=True)) for sizes in ((2, 1), (1, 1), (2, 2)))
#: How models are spread over so many processes, for ``TrainingArguments``.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (2, _TWO),
    "tensor": (2, _ALL | {"parallelism_config": OfCpus(tp_size=2)}),
    "fsdp": (2, _TWO | _SHARDS),  # the last of two, as Accelerate remembers that a process shards
    "hsdp": (
        4,
        _FOUR | _SHARDS | {"parallelism_config": OfCpus(dp_replicate_size=2, dp_shard_size=2)},
    ),
}
#: Layers of BERT that are cut over processes, by rows or columns.
_PLAN = {
    f"bert.encoder.layer.*.{layer}": "rowwise" if "output" in layer else "colwise"
    for layer in (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
}


def model_of(folder: str, kind: str) -> nn.Module:
    model = bert(torch.float64)
    if kind == "whole":  # another model in each process, until it is shared
        with torch.no_grad():
            model.classifier.weight.add_(dist.get_rank())
    if kind != "tensor":
        return model
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/plain")
    dist.barrier()
    cut: nn.Module = type(model).from_pretrained(
        f"{folder}/plain",
        distributed_config={"tp_plan": _PLAN, "tp_size": 2},
        dtype=torch.float64,
    )
    return cut


def momentum_of(kind: str) -> float:
    """A state of the optimizer; on CPUs ``transformers`` loads none for whole models."""
    return 0.0 if kind == "whole" else 0.5


def trainer(folder: str, kind: str = "whole", noise: float = 0.0, **settings: Any) -> Noting:
    settings = KINDS[kind][1] | TRAINING | settings
    cls = Sharding if "fsdp" in KINDS[kind][1] else Noting
    # On GPUs PyTorch's optimizers take parameters that are cut and others one by one only.
    of_optimizer = {"lr": RATE, "momentum": momentum_of(kind), "foreach": False}
    return cls(
        model=model_of(folder, kind),
        args=arguments(folder, ddp_backend=BACKEND, use_cpu=BACKEND == "gloo", **settings),
        train_dataset=Texts(SIZE),
        eval_dataset=Texts(3),
        optimizer_cls_and_kwargs=(torch.optim.SGD, of_optimizer),
        privacy=privacy(noise_multiplier=noise, max_grad_norm=C, seed=None),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: all_of(param).detach().clone() for name, param in model.named_parameters()}


def main(rank: int) -> Parts:
    return {
        **{
            kind: partial(trained, kind)
            for kind, (world, _) in KINDS.items()
            if world == dist.get_world_size()
        },
        **{
            f"lightning {kind}": lambda kind=kind: [fitted(kind, part) for part in (None, 1)]
            for kind, (world, _) in FITTED.items()
            if world == dist.get_world_size()
        },
    }


def trained(kind: str) -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    trainer_of = partial(trainer, str(folder[0]), kind)
    with as_torchrun(29512):
        saving = {"save_strategy": "steps", "save_steps": STEPS} if kind != "tensor" else {}
        plain = trainer_of(num_train_epochs=1, eval_strategy="steps", eval_steps=2, **saving)
        plain.train()
        found = {
            "drawn": plain.drawn,
            "most": plain.most,
            "history": plain.run.engine.accountant.state_dict()["history"],
            "expected": plain.run.optimizer.expected_batch_size,
            "end": weights(plain.model),
        }
        if saving:
            again = trainer_of(noise=1.0)
            checkpoint = f"{folder[0]}/checkpoint-{STEPS}"
            found["refused"] = message(lambda: again.train(resume_from_checkpoint=checkpoint))
            resumed = trainer_of(max_steps=STEPS + 1)
            resumed.train(resume_from_checkpoint=checkpoint)
            found["resumed"] = weights(resumed.model), resumed.run.steps, resumed.drawn
        else:
            found["refused"] = message(lambda: trainer_of(save_strategy="steps"))
            plain.model.save_pretrained(f"{folder[0]}/end")
            dist.barrier()
            found["saved"] = weights(type(plain.model).from_pretrained(f"{folder[0]}/end"))
        noisy = trainer_of(noise=1.0, max_steps=2)
        noisy.train()
        found |= {"noisy": weights(noisy.model), "epsilon": noisy.epsilon}
        found["halved"] = message(lambda: trainer_of(auto_find_batch_size=True))
        # The last: Accelerate then has all trainers of the process shard, where there are GPUs
        # (ACCELERATE_USE_FSDP).
        found["fsdp"] = message(lambda: trainer(str(folder[0]), fsdp=True))
        AcceleratorState._reset_state(True)
    return found


def replayed(drawn: list[list[int]], kind: str) -> dict[str, Tensor]:
    """What one process would end with, sample by sample, of these batches."""
    model, data = bert(torch.float64), Texts(SIZE)

    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=RATE, momentum=momentum_of(kind))
    for index in drawn:
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        for row in (data[i] for i in index):
            logits = model(row["input_ids"][None], row["attention_mask"][None]).logits
            grads = torch.autograd.grad(F.cross_entropy(logits[0], row["labels"]), params.values())
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            coef = (C / (norm + 1e-6)).clamp(max=1)
            for name, grad in zip(params, grads, strict=True):
                total[name] += coef * grad
        for name, param in params.items():
            param.grad = total[name] / (SIZE / STEPS)
        optimizer.step()
    return weights(model)


#: How Lightning's models lie over so many processes: (data, tensor), or replicas of shards.
FITTED: dict[str, tuple[int, tuple[int, int]]] = {
    "fsdp": (2, (2, 1)),
    "tensor": (2, (1, 2)),
    "hsdp": (4, (4, 1)),
    "fsdp, tensor": (4, (2, 2)),
}


class Sharded(test_lightning.Classifier):
    """Lightning's ``ModelParallelStrategy`` calls :meth:`configure_model`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        #: The step of each batch, or part of one.
        self.at: list[int] = []

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = self.device_mesh["data_parallel"]
        if self.kind == "hsdp":
            names = ("replicate", "shard")
            mesh = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=names)
        if "tensor" in self.kind:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
        if self.kind != "tensor":
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=test_lightning.RATE, momentum=0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        self.at.append(self.global_step)
        loss = super().training_step(batch, index)
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        (run,) = [callback.run for callback in callbacks if hasattr(callback, "run")]
        if run.hooks._session.current_forward.counted_rows is NO_ROW:
            self.drawn[-1] = (batch[0][:0], batch[1][:0])
        return loss


def fitted(kind: str, physical: int | None) -> dict[str, Any]:
    """An epoch, and another one from its checkpoint; ``physical``: samples of a part."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint = Path(str(folder[0])) / "checkpoint"

    _, (data, tensor) = FITTED[kind]

    def fit(module: Any, **settings: Any) -> lightning.Trainer:
        defaults: dict[str, Any] = {
            "strategy": ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor),
            "use_distributed_sampler": False,
        }
        trainer, callback = test_lightning.fit(
            module,
            checkpoint.parent,
            of_privacy={"noise_multiplier": 0.0, "seed": None},
            physical=physical,
            devices=dist.get_world_size(),
            **defaults | settings,
        )
        assert trainer.global_step == callback.run.steps
        return trainer

    def of(module: Sharded) -> dict[str, Any]:
        steps = [[n for n, at in enumerate(module.at) if at == step] for step in {*module.at}]
        drawn = [
            tuple(torch.cat([module.drawn[n][i] for n in parts]) for i in (0, 1)) for parts in steps
        ]
        return {"drawn": drawn, "parts": [*map(len, steps)], "end": [*weights(module).values()]}

    first, resumed = Sharded(kind), Sharded(kind)
    with as_torchrun(29514):
        fit(first).save_checkpoint(checkpoint)
        fit(resumed, checkpoint=checkpoint, max_epochs=2)
        refused = [
            message(lambda: fit(test_lightning.Classifier(), strategy="ddp")),
            message(lambda: fit(Sharded(kind), use_distributed_sampler=True)),
        ]
    return {"first": of(first), "resumed": of(resumed), "refused": refused}
