"""Sharded training by what others bring: transformers, PEFT, Accelerate; and what it sends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from tests.sharded.processes import C, batch, error, local, make, sharded, truth_of
from tests.sharded.steps import Rows
from tests.support.oracle import per_sample_truth

CUTS = (0, 5, 8)


def llama(adapted: bool) -> Any:
    """A small Llama in float64; with PEFT's LoRA on its attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=11,
        max_position_embeddings=16,
        use_cache=False,
        attn_implementation="eager",
    )
    model: Any = LlamaForCausalLM(config)
    if adapted:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
        for name, param in model.named_parameters():
            if "lora_B" in name:  # zeros at first
                nn.init.normal_(param, std=0.1)
    return model.double()


def token_losses(model: Any, given: tuple[Tensor, ...]) -> Tensor:
    ids = given[0]
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def transformers_step(rank: int, adapted: bool) -> float:
    """A Llama whose layers are sharded: norms and sums beside those of single samples."""
    from torch.distributed.fsdp import fully_shard

    model = llama(adapted)
    ids, _ = batch()
    plain = llama(adapted)
    whole = per_sample_truth(plain, (ids,), token_losses)
    layers = (model.get_base_model() if adapted else model).model.layers
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    mine, _ = local(rank, CUTS)
    errors = []
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        token_losses(flash, (mine,)).mean().backward()
        errors.append(error(flash.get_norm_sample(), whole.norms[CUTS[rank] : CUTS[rank + 1]]))
        clipped = whole.clipped(C)
        for name, param in model.named_parameters():
            assert (param.grad is not None) == param.requires_grad
            if param.grad is not None:
                errors.append(error(param.grad.full_tensor(), clipped[name]))
    return max(errors)


def accelerated(rank: int, wrapped: bool) -> dict[str, Any]:
    """Accelerate's own preparation for FSDP2, of a model and an optimizer; then ``make_private``.

    Accelerate takes FSDP for GPUs alone, so that it is told here that there are some.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | address).items():
            patch.setitem(os.environ, name, value)
        accelerator = Accelerator(cpu=True)
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
        from tests.sharded import processes

        processes._TRUTHS.clear()
        clipped = truth_of(model, *batch()).clipped(C)
        for name, param in model.named_parameters():
            param.data -= 0.5 * clipped[name] / 4
    return {name: param.detach() for name, param in model.named_parameters()}


def operations(rank: int, private: bool) -> dict[str, int]:
    """What one step sends, as PyTorch's profiler counts it."""
    from torch.profiler import ProfilerActivity, profile

    model: Any = sharded(make())
    if private:
        model = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    ids, y = local(rank, (0, 4, 8))
    for _ in range(3):  # until processes have stopped asking each other
        F.cross_entropy(model(ids), y).backward()
        model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        F.cross_entropy(model(ids), y).backward()
    return {e.key: e.count for e in found.key_averages() if e.key.startswith("c10d::")}


def main(rank: int) -> dict[str, Any]:
    return {
        "llama": transformers_step(rank, adapted=False),
        "LoRA": transformers_step(rank, adapted=True),
        "accelerate": [accelerated(rank, wrapped) for wrapped in (False, True)],
        "sent": {private: operations(rank, private) for private in (False, True)},
    }
