"""When a forward is rehearsed, and what a rehearsal must not miss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.repeatable import without_dropout
from tests.support.autograd import (
    squares,
)
from tests.support.errors import raises
from tests.support.recorded import recorded_factors
from tests.zoo.constants import CASES

TABLES = ["looked up", "looked up flat", "looked up first", "looked up for each"]


@pytest.mark.parametrize("name", [*TABLES, "positions, embedding"])
def test_rows_of_a_table_cost_no_table_per_sample(name: str) -> None:
    """A position embedding is read as ``[1, T]`` and added: its factor is a lookup."""
    model, batch = CASES[name].make()
    flash = GradSampleModuleFlashClipping(model)
    found = recorded_factors(flash, lambda: squares(flash, batch).backward())
    assert "EmbeddingGrad" in set().union(*found.values())


class OtherKernels(nn.Module):
    """In 16 bits: values differ by a tenth between batches of different sizes."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.also, self.last = also, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.arange(x[0].numel()).view(x.shape[1:])
            x = x * (1 + 0.06 * torch.cos(places * len(x)).to(x.dtype))
            if self.also == "mean":
                x = x + 0.1 * x.mean(0)
            if self.also == "order":
                x = x.roll(1, 0)
        return self.last(x)


@pytest.mark.parametrize("samples", [2, 3, 16])
def test_other_kernels_for_other_batch_sizes_are_accepted(samples: int) -> None:
    flash = GradSampleModuleFlashClipping(OtherKernels().bfloat16())
    flash(torch.randn(samples, 5, 64).bfloat16()).float().square().sum().backward()
    assert len(flash.get_norm_sample()) == samples


@pytest.mark.parametrize("also", ["mean", "order"])
@pytest.mark.parametrize("samples", [2, 3, 16])
def test_model_that_mixes_behind_other_kernels_is_refused(samples: int, also: str) -> None:
    flash = GradSampleModuleFlashClipping(OtherKernels(also).bfloat16())
    with raises("FC202", match=r"last \(Linear\).* other values"):
        flash(torch.randn(samples, 5, 64).bfloat16())


# -- what a rehearsal does besides running the model -----------------------------------------------


def test_dropout_inside_of_attention_in_a_rehearsal_is_off() -> None:
    """Kernels that draw it themselves take its probability, by place or by name."""
    attend, x = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ones(1)
    assert without_dropout(attend, (x, x, x, 0.3, True), {})[0][3:] == (0.0, True)
    assert without_dropout(attend, (x, x, x), {"dropout_p": 0.3})[1] == {"dropout_p": 0.0}
    assert without_dropout(attend, (x, x, x), {}) == ((x, x, x), {})
    assert without_dropout(torch.ops.aten.mul.Tensor, (x, 0.3), {}) == ((x, 0.3), {})
