"""``Documents`` in ``PrivateTrainer``: packed documents, and preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flash_clipping import Documents, Offsets
from flash_clipping.trainers.lightning import PrivateTraining
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import arguments, privacy, weights

VOCABULARY, BOUND, RATE = 13, 0.3, 0.1


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def texts(size: int = 12) -> list[dict[str, Tensor]]:
    """Of 2 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + index % 5 for index in range(size)]
    tokens = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": x, "labels": x} for x in tokens]


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """End to end in one row; labels are the tokens, also the first of each text."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    tokens = torch.cat([row["input_ids"] for row in rows])[None]
    return {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None],
        "document": torch.arange(len(rows)).repeat_interleave(lengths)[None],
    }


def with_offsets(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = packed(rows)
    lengths = batch.pop("document")[0].bincount(minlength=len(rows))
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return batch | {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def clipped(model: nn.Module, losses: list[Any]) -> None:
    """A step of plain SGD with the sum of clipped gradients, one sample at a time."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for loss in losses:
        grads = torch.autograd.grad(loss(), list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for total, grad in zip(sums, grads, strict=True):
            total += grad * (BOUND / (norm + 1e-6)).clamp(max=1)
    with torch.no_grad():
        for param, total in zip(model.parameters(), sums, strict=True):
            param -= RATE * total / len(losses)


def trainer(folder: Path, model: nn.Module, cls: Any = PrivateTrainer, **more: Any) -> Any:
    sample_of = more.pop("sample_of")
    rate = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    args = arguments(
        folder,
        max_steps=more.pop("max_steps", 2),
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=BOUND,
        remove_unused_columns=False,
        **(rate | more.pop("rate", {})),
    )
    of_privacy = privacy(noise_multiplier=more.pop("noise", 0.0), unit=Documents(sample_of))
    return cls(model=model, args=args, privacy=of_privacy, **more)


@pytest.mark.parametrize(
    ("sample_of", "collate"),
    [("document", packed), (Offsets("cu_seq_lens_q"), with_offsets)],
    ids=["map", "offsets"],
)
def test_packed_documents(tmp_path: Path, sample_of: Any, collate: Any) -> None:
    """All twelve documents take part in every step; no label is predicted from another's token."""
    model, expected, data = llama(), llama(), texts()
    private = trainer(
        tmp_path, model, sample_of=sample_of, train_dataset=data, data_collator=collate
    )
    private.train()
    assert private.run.steps == 2
    start = weights(expected)

    def loss(row: dict[str, Tensor]) -> Any:
        return lambda: expected(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss

    for _ in range(2):
        clipped(expected, [loss(row) for row in data])
    for name, tensor in weights(expected).items():
        moved = (tensor - start[name]).norm()
        assert (model.state_dict()[name] - tensor).norm() <= 1e-6 * moved, name


def test_a_collator_that_does_not_say_whose_rows_are(tmp_path: Path) -> None:
    private = trainer(tmp_path, llama(), sample_of="author", train_dataset=texts())
    private.data_collator = packed
    with raises("FC808", ValueError, match="argument='author'.*NoneType"):
        private.train()


def test_documents_that_are_joined(tmp_path: Path) -> None:
    """A unit must be an item: items are drawn, and accounted, one by one."""

    def joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = packed(rows)
        return batch | {"document": batch["document"] // 2}

    private = trainer(
        tmp_path, llama(), sample_of="document", train_dataset=texts(), data_collator=joined
    )
    with raises("FC273"):
        private.train()
    assert private.run.steps == 0


def test_lightning_takes_rows_only() -> None:
    with raises("FC820", ValueError, match="Documents"):
        PrivateTraining(privacy(max_grad_norm=1.0, unit=Documents("user")))
