"""Constants stay constants until they meet the samples, however many rows they have.

Norms and sums against one plain backward per sample, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, float64s, squares, truth_by_autograd
from tests.support.constants import AtPositions, OnConstants
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate


def change_of_sum(model: nn.Module, batches: list[tuple[Tensor, ...]], bound: float = 0.01) -> Any:
    """The most that one sample of the last batch adds to the released sum, in units of ``C``.

    The batches before it are steps of the same wrapped model. Each sample adds what the sum over
    all samples has less without it (measured by coefficients: the sum is linear in them).
    """
    truth = truth_by_autograd(copy.deepcopy(model), batches[-1], squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    for batch in batches:
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
    norms = flash.get_norm_sample()
    assert len(norms) == len(truth.norms)
    return float((truth.norms * flash.get_clipping_coef()).max() / bound)


HOW = [
    "row",
    "mean",
    "vector",
    "looked_up",
    "looked_up_T",
    "looked_up_first",
    "looked_up_scaled",
    "looked_up_BT",
    "sum_of_tables",
    "through_mlp",
    "buffer",
    "mean_of_buffer",
    "convolution",
    "attention",
]


SHAPES = [(3, 5), (5, 5), (1, 5), (6, 3), (1, 1), (4, 1)]


#: What is a constant is shown before a mode is chosen: the other one has some of the shapes.
@pytest.mark.parametrize(
    ("shape", "mode"),
    [*((shape, MODES[0]) for shape in SHAPES), *((shape, MODES[1]) for shape in SHAPES[:2])],
)
@pytest.mark.parametrize("how", HOW)
def test_computed_from_constants_is_exact(how: str, shape: tuple[int, int], mode: str) -> None:
    model = OnConstants(how).double()
    if mode == "one_pass":
        check_by_autograd(model, float64s(*shape, 4), squares)
    else:
        check_by_autograd(model, float64s(*shape, 4), squares, mode=mode, steps=1)


@pytest.mark.parametrize("how", HOW)
def test_a_later_batch_has_the_size_of_a_constant(how: str) -> None:
    """Rehearsed on 3 samples of 5 positions; then every size is that of something else."""
    model = OnConstants(how).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for shape in [(3, 5), (5, 5), (1, 5), (7, 7), (7, 3), (1, 1), (2, 2)]:
        batch = float64s(*shape, 4)
        truth = truth_by_autograd(OnConstants(how).double(), batch, squares)
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9, str(shape))


@pytest.mark.parametrize("kind", ["embedding", "indexed"])
def test_positions_are_never_samples(kind: str) -> None:
    """Proven at ``B != T``; then as many positions as samples. It was 11.15 C."""
    batches = [float64s(3, 5, 4), float64s(5, 5, 4)]
    found = change_of_sum(AtPositions(kind).double(), batches)
    assert found <= 1 + 1e-6
    flash = GradSampleModuleFlashClipping(AtPositions(kind).double())
    for (x,) in [*batches, float64s(1, 5, 4), float64s(2, 2, 4)]:
        truth = truth_by_autograd(AtPositions(kind).double(), (x,), squares)
        flash.zero_grad()
        squares(flash, (x,)).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9)


def test_rows_of_a_table_cost_no_table_per_sample() -> None:
    """A position embedding is read as ``[1, T]`` and added: its factor is a lookup."""
    from flash_clipping.factors import EmbeddingGrad
    from flash_clipping.finish.backward_pass import BackwardPass

    seen: list[Any] = []

    class Watched(BackwardPass):
        def record(self, path: str, params: Any, factors: Any, readers: Any = None) -> None:
            seen.extend(factors)
            super().record(path, params, factors, readers)

    for kind in ("embedding", "looked_up", "looked_up_T", "looked_up_first", "looked_up_BT"):
        model = AtPositions(kind) if kind == "embedding" else OnConstants(kind)
        flash = GradSampleModuleFlashClipping(model)
        flash._session.calls.backward_pass_class = Watched
        squares(flash, (torch.randn(3, 5, 4),)).backward()
        assert sum(isinstance(factor, EmbeddingGrad) for factor in seen) == 1, kind
        seen.clear()


class Queries(nn.Module):
    """Learned vectors, expanded over the batch, attend to the samples or are attended to."""

    def __init__(self, as_query: bool):
        super().__init__()
        torch.manual_seed(0)
        self.learned = nn.Parameter(torch.randn(3, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.as_query = as_query

    def forward(self, x: Tensor) -> Tensor:
        x, learned = torch.tanh(self.first(x)), self.learned.expand(len(x), 3, 4)
        q, k = (learned, x) if self.as_query else (x, learned)
        return self.last(self.attention(q, k, k, need_weights=False)[0])


@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (4, 2)])
@pytest.mark.parametrize("as_query", [False, True])
def test_learned_vectors_expanded_over_the_batch(as_query: bool, shape: tuple[int, int]) -> None:
    check_by_autograd(Queries(as_query).double(), float64s(*shape, 4), squares)
