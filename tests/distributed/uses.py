"""Sharded training by what others bring: transformers, PEFT, Accelerate; and what it sends."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from tests.distributed.processes import (
    C,
    Parts,
    as_torchrun,
    batch,
    device,
    error,
    errors_of_sums,
    local,
    make,
    sharded,
    truth_of,
)
from tests.distributed.steps import Rows
from tests.support.autograd import truth_by_autograd
from tests.support.hugging_face import llama

CUTS = (0, 5, 8)


def adapted(model: Any) -> Any:
    """With PEFT's LoRA, on attention and feed-forward."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets)).double()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros at first
            nn.init.normal_(param, std=0.1)
    return model


def token_losses(model: Any, given: tuple[Tensor, ...]) -> Tensor:
    ids = given[0]
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def steps_beside_single_samples(model: Any, plain: Any, rows: slice = slice(None)) -> float:
    """Norms and sums of a model of transformers, ``rows`` of the batch being this process's."""
    ids, _ = batch()
    whole = truth_by_autograd(plain, (ids,), lambda m, given: token_losses(m, given).mean())
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    errors = []
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        token_losses(flash, (ids[rows],)).mean().backward()
        errors.append(error(flash.get_norm_sample(), whole.norms[rows]))
        errors += errors_of_sums(model, whole.clipped(C))
    flash.to_standard_module()
    return max(errors)


def transformers_step(rank: int, lora: bool) -> float:
    """A Llama whose layers are sharded."""
    from torch.distributed.fsdp import fully_shard

    prepare = adapted if lora else lambda model: model
    model, plain = (prepare(llama().to(device())) for _ in range(2))
    for layer in (model.get_base_model() if lora else model).model.layers:
        fully_shard(layer)
    fully_shard(model)
    return steps_beside_single_samples(model, plain, slice(CUTS[rank], CUTS[rank + 1]))


def cut_by_transformers(how: str) -> float:
    """A Llama that transformers itself cuts over processes: while it loads, or afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plain = llama(num_key_value_heads=2).to(device())
    if how == "applied":
        mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = apply_tensor_parallelism(llama(num_key_value_heads=2).to(device()), mesh)
    else:
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder[0])
        dist.barrier()
        size = {"tp_plan": "auto", "tp_size": dist.get_world_size()}
        options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
        with as_torchrun(29513):
            model = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=size, **options)
    forward = model.lm_head.forward
    found = steps_beside_single_samples(model, plain)
    assert model.lm_head.forward is forward  # as it was
    return found


def accelerated(rank: int, wrapped: bool) -> dict[str, Any]:
    """Accelerate's own preparation for FSDP2, of a model and an optimizer; then ``make_private``.

    Accelerate takes FSDP for GPUs alone, so that it is told here that there are some.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    with as_torchrun(29511):
        accelerator = Accelerator(cpu=device().type == "cpu")
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["FeedForward"],
        )
        accelerator.state.distributed_type = DistributedType.FSDP
        model: Any = make()
        model, plain = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        engine = FlashPrivacyEngine()
        flash, optimizer, _, _ = engine.make_private(
            module=model,
            optimizer=plain if wrapped else plain.optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(Rows(), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=C,
        )
        ids, y = local(rank, CUTS)
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(flash(ids), y))
            optimizer.step()
        AcceleratorState._reset_state(True)
    return {
        "end": {n: p.full_tensor().detach() for n, p in model.named_parameters()},
        "history": engine.accountant.history,
    }


def as_accelerated() -> dict[str, Tensor]:
    """The same two steps by single samples."""
    model = make()
    for _ in range(2):
        clipped = truth_of(model, *batch()).clipped(C)
        for name, param in model.named_parameters():
            param.data -= 0.5 * clipped[name] / 4
    return {name: param.detach() for name, param in model.named_parameters()}


def operations(rank: int, private: bool = True, each: int = 4, bucket: int = 0) -> dict[str, int]:
    """What one step of so many samples in each process sends, as PyTorch's profiler counts it."""
    from torch.profiler import ProfilerActivity, profile

    model: Any = sharded(make())
    if private:
        model = GradSampleModuleFlashClipping(model, max_grad_norm=C)
        model._sharded.reducer.bucket_bytes = bucket or model._sharded.reducer.bucket_bytes
    ids, y = local(rank, (0, each, 2 * each))
    for _ in range(2):  # until processes have stopped asking each other
        F.cross_entropy(model(ids), y).backward()
        model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        F.cross_entropy(model(ids), y).backward()
    return {e.key: e.count for e in found.key_averages() if e.key.startswith("c10d::")}


#: Steps whose operations are counted.
SENT: dict[str, dict[str, Any]] = {
    "plain": {"private": False},
    "private": {},
    "one sample each": {"each": 1},
    "small buckets": {"bucket": 1},
}


def main(rank: int) -> Parts:
    return {
        "llama": lambda: transformers_step(rank, lora=False),
        "LoRA": lambda: transformers_step(rank, lora=True),
        "accelerate": lambda: [accelerated(rank, wrapped) for wrapped in (False, True)],
        "sent": lambda: {name: operations(rank, **how) for name, how in SENT.items()},
    }
