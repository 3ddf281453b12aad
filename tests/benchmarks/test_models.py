"""The named models are what their names say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import convolutional, huggingface
from benchmarks.methods import Setting
from benchmarks.session import Session
from benchmarks.workload import Workload


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
