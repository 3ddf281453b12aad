"""Opacus' tests change global settings and leave them so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_clipping import FlashDPOptimizer
from flash_clipping.engine.grad_ledger import GradLedger


@pytest.fixture(autouse=True)
def global_settings() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def on_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave ``p._norm_sample`` and ``p.summed_grad`` where Opacus' own tests read them, for these
    alone. This library does not: whatever saves a model would save them without noise."""
    count_backward, accumulate = GradLedger.count_backward, FlashDPOptimizer.accumulate

    def with_norms(ledger: GradLedger, *args: Any) -> None:
        count_backward(ledger, *args)
        assert ledger.norms is not None
        for param, norm_B in zip(ledger.norms.params, ledger.norms.norms_PB, strict=True):
            param._norm_sample = norm_B.to(param.device)  # type: ignore[attr-defined]

    def with_sums(optimizer: FlashDPOptimizer) -> None:
        accumulate(optimizer)
        for param in optimizer.params:
            param.summed_grad = optimizer._ledger.sums[id(param)]  # type: ignore[attr-defined]

    monkeypatch.setattr(GradLedger, "count_backward", with_norms)
    monkeypatch.setattr(FlashDPOptimizer, "accumulate", with_sums)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Those that take gradients by hooks are slow ones: models of all kinds are compared in every
    way elsewhere (``tests/zoo/``)."""
    kind = getattr(getattr(item, "cls", None), "__name__", "")
    if kind.endswith("Hooks") and kind != "TestHooks":
        item.add_marker(pytest.mark.slow)
