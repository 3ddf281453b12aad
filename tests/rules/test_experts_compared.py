"""Experts that compute something else than their rule: the first step's check sees it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.errors import raises

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers.integrations.moe import use_experts_implementation

from flash_clipping import GradSampleModuleFlashClipping
from tests.rules.test_experts import Plain, block, inputs
from tests.rules.test_peft_experts import with_lora
from tests.support.autograd import squares


def test_experts_that_compute_something_else_are_refused() -> None:
    """Its attributes say that transformers could run it, but it is not what that would compute."""

    class Scaled(Plain):
        def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return 1.1 * super().forward(hidden, chosen, weights)

    flash = GradSampleModuleFlashClipping(block(use_experts_implementation(Scaled)))
    with raises("FC210"):
        squares(flash, inputs(3, 5)).backward()


@pytest.mark.parametrize("change", ["experts", "ranks", "scale"])
def test_another_layout_is_refused(change: str) -> None:
    """As another version of PEFT may have it: B is 0, so that no output of the first step tells."""
    model = with_lora(block())
    wrapper = model.base_model.model.experts
    nn.init.zeros_(wrapper.lora_B["default"].weight)
    own = type(wrapper).get_delta_factors

    def changed(self: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
        left, right, scale = own(self, adapter)
        if change == "experts":
            return left.flip(0), right.flip(0), scale
        return (left.roll(1, -1), right, scale) if change == "ranks" else (left, right, 2 * scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(wrapper), "get_delta_factors", changed)
        flash = GradSampleModuleFlashClipping(model)
        with raises("FC210"):
            squares(flash, inputs(3, 5)).backward()
