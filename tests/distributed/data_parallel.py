"""Hugging Face's ``Trainer`` in several processes, each with samples of its own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn

from flash_clipping.trainers.transformers import PrivateTrainer
from tests.distributed.processes import BACKEND, C, as_torchrun, message
from tests.support.trainers import Texts, arguments, bert, privacy

#: Samples; steps of an epoch of expected batches of 2 (samples) x 1 (part) x 2 (processes).
SIZE, STEPS, RATE = 24, 6, 0.5
TRAINING = {"gradient_accumulation_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant"}


class Noting(PrivateTrainer):
    """Remembers which samples it has drawn, step by step."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        if not hasattr(self, "drawn"):
            self.drawn: list[list[int]] = []
            self.most = 0
        self.drawn.append([int(i) for part in inputs.parts for i in part["index"]])
        self.most = max(self.most, *inputs.sizes)
        return super().training_step(model, inputs, *args)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return super().compute_sample_losses(
            model, {name: x for name, x in inputs.items() if name != "index"}
        )


def trainer(folder: str, noise: float = 0.0, **settings: Any) -> Noting:
    torch.manual_seed(dist.get_rank())  # another model in each process, until it is shared
    model = bert(torch.float64)
    with torch.no_grad():
        model.classifier.weight.add_(dist.get_rank())
    settings = TRAINING | {"learning_rate": RATE, "remove_unused_columns": False} | settings
    return Noting(
        model=model,
        args=arguments(folder, ddp_backend=BACKEND, use_cpu=BACKEND == "gloo", **settings),
        train_dataset=Texts(SIZE),
        privacy=privacy(noise_multiplier=noise, max_grad_norm=C, seed=None),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def main(rank: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    with as_torchrun(29512):
        plain = trainer(str(folder[0]), num_train_epochs=1, save_strategy="steps", save_steps=STEPS)
        plain.train()
        again = trainer(str(folder[0]), noise=1.0)
        refused = message(
            lambda: again.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-{STEPS}")
        )
        resumed = trainer(str(folder[0]), max_steps=STEPS + 1)
        resumed.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-{STEPS}")
        noisy = trainer(str(folder[0]), noise=1.0, max_steps=2)
        noisy.train()
        fsdp = message(lambda: trainer(str(folder[0]), fsdp="full_shard"))
        AcceleratorState._reset_state(True)
    assert plain.run is not None and noisy.run is not None and resumed.run is not None
    return {
        "drawn": plain.drawn,
        "most": plain.most,
        "history": plain.run.engine.accountant.state_dict()["history"],
        "expected": plain.run.optimizer.expected_batch_size,
        "end": weights(plain.model),
        "resumed": (weights(resumed.model), resumed.run.steps, len(resumed.drawn)),
        "noisy": weights(noisy.model),
        "epsilon": noisy.epsilon,
        "refused": refused,
        "fsdp": fsdp,
    }


def replayed(drawn: list[list[int]]) -> dict[str, Tensor]:
    """What one process would end with, sample by sample, of these batches."""
    model, data = bert(torch.float64), Texts(SIZE)

    params = dict(model.named_parameters())
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
            param.data -= RATE * total[name] / (SIZE / STEPS)
    return weights(model)
