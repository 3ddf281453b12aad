"""The named models are what their names say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import convolutional, huggingface, models
from benchmarks.methods import Setting
from benchmarks.session import Session
from benchmarks.workload import Workload


@pytest.mark.parametrize(
    ("name", "millions", "batch", "positions"),
    [
        ("decoder-1", 953.3, 8, 1024),
        ("decoder-2", 953.3, 32, 256),
        ("decoder-3", 505.1, 16, 512),
        ("decoder-4", 1071.7, 4, 2048),
        ("gpt2-small-shaped", 162.3, 8, 128),
        ("llama-3.2-1b", 1235.8, 4, 1024),
        ("llama-3.2-3b", 3212.7, 4, 1024),
        ("bert-base", 109.5, 64, 128),
        ("vit-large", 304.3, 64, 197),
        ("roberta-large", 355.4, 16, 256),
        ("gpt2-small-e2e", 124.4, 16, 100),
        ("gpt2-medium-e2e", 354.8, 16, 100),
        ("gpt2-large-e2e", 774.0, 16, 100),
        ("llama-3.2-1b-untied", 1498.5, 4, 1024),
        ("wrn-16-4", 2.749, 512, 1),
        ("resnet50-gn", 25.56, 128, 1),
        ("convnext-t", 28.58, 128, 1),
        ("unet", 8.875, 64, 1),
    ],
)
def test_sizes(name: str, millions: float, batch: int, positions: int) -> None:
    workload = models.workload(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in workload.build().parameters())
    assert parameters / 1e6 == pytest.approx(millions, rel=1e-3)
    assert (workload.batch, workload.positions) == (batch, positions)


def small(kind: str) -> Workload:
    """The named models' own factories, at sizes for a CPU."""
    if kind == "wide":
        return convolutional.wide_resnet(kind, depth=10, widen=1, batch=3, size=8)
    sizes: dict[str, Any] = dict(vocab_size=17, hidden_size=8, intermediate_size=8)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=2)
    experts = dict(num_local_experts=3, num_experts_per_tok=2, num_key_value_heads=1)
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    cls, config = {
        "mixtral": ("MixtralForCausalLM", sizes | experts),
        "roberta": ("RobertaForSequenceClassification", sizes | no_dropout),
        "resnet": ("ResNetForImageClassification", dict(depths=[1, 1], hidden_sizes=[8, 16])),
    }[kind]
    if kind == "resnet":
        config |= dict(num_labels=3, embedding_size=8)
        return huggingface.image_classifier(kind, cls=cls, config=config, batch=3, size=32)
    return huggingface.transformer(kind, cls=cls, config=config, batch=3, seq=5)


@pytest.mark.parametrize("kind", ["mixtral", "roberta", "resnet", "wide"])
def test_ours_agree_with_one_sample_at_a_time(kind: str) -> None:
    """``check`` raises where they do not."""
    setting = Setting(small(kind), torch.device("cpu"), torch.float32)
    session = Session(setting, ["flash"])
    session.check()
    row = session.rows["flash"]
    assert row.status == "ok", row.note
    assert row.norm_error is not None and row.gradient_error is not None
