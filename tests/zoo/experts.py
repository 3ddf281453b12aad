"""Experts by routers and by product keys, adapters of theirs, and streams of residuals."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.rules import test_hyper_connections, test_product_key_router, test_routed_experts
from tests.zoo.case import ModelCase

ALWAYS = ("two_pass", "checkpointed", "not_finite")


def of_transformers(adapted: bool = False) -> nn.Module:
    from tests.rules import test_experts, test_peft_experts

    model = test_experts.block()
    return test_peft_experts.with_lora(model, use_rslora=True) if adapted else model


def routed(rank: int, uses: int = 1) -> nn.Module:
    model = test_routed_experts.Model(rank)
    model.uses = uses
    return model


def tokens() -> tuple[Tensor, ...]:
    return test_routed_experts.inputs(4, 5)


def by_keys(**options: Any) -> nn.Module:
    return test_product_key_router.Model(heads=2, shared=5, **options)


BUILT = {
    "of transformers": of_transformers,
    "of transformers, LoRA": lambda: of_transformers(True),
    "routed": lambda: routed(0),
    "routed, LoRA": lambda: routed(2),
    "routed, used twice": lambda: routed(2, uses=2),
    "streams": test_hyper_connections.Decoder,
}
CASES: dict[str, ModelCase] = {
    # The only function of these has a backward of its own.
    **{n: ModelCase(b, tokens, always=ALWAYS, without=("functorch",)) for n, b in BUILT.items()},
    "product keys": ModelCase(by_keys, tokens, always=(*ALWAYS, "autocast")),
    "product keys, padding": ModelCase(lambda: by_keys(padding=True), tokens),
}
