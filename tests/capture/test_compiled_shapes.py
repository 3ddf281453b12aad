"""Compiled models: batches of other sizes, and what is learned of their shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping.capture.compiled.regions import Region
from tests.support.cases import check_case, make_case, step_case
from tests.support.compiled import (
    LM,
    Backend,
    Language,
    compare,
    lm_loss,
    slow,
    wrap,
)
from tests.support.models import CASES, Case, floats, squared_loss
from tests.support.oracle import per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


def test_batches_of_many_sizes_share_graphs() -> None:
    backend = Backend()
    model, _ = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    for size in (4, 7, 3):
        batch = (torch.randint(0, 13, (size, 6)),)
        truth = per_sample_truth(plain, batch, lm_loss)
        module.zero_grad(set_to_none=True)
        step_case(module, LM, batch, "mean")
        check_case(module, truth, 0.5, 1e-5)
    assert backend.graphs <= 3


def test_shapes_are_learned_once_for_each_length() -> None:
    runs = 0

    class Counted(Language):
        def forward(self, ids: Tensor) -> Tensor:
            nonlocal runs
            if not torch.compiler.is_dynamo_compiling():
                runs += 1
            return super().forward(ids)

    torch.manual_seed(0)
    module = wrap(Counted(), max_grad_norm=0.5)
    module.compile(backend="eager", fullgraph=True)
    lm_loss(module, (torch.randint(0, 13, (4, 6)),)).mean().backward()
    rehearsed = runs
    for shape in [(7, 6), (5, 9), (3, 5), (9, 9), (1, 6)]:
        module.zero_grad(set_to_none=True)
        lm_loss(module, (torch.randint(0, 13, shape),)).mean().backward()
        assert module.get_norm_sample().shape == shape[:1]
    assert runs - rehearsed == 3  # two lengths, and a single sample


@pytest.mark.parametrize("fullgraph", [slow(False), True])
def test_lengths_inside_that_do_not_follow_evenly(fullgraph: bool) -> None:
    class Halved(nn.Module):
        """Rounds down: an odd length has what an even one has."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.second(x[:, : x.shape[1] // 2])

    model, _ = make_case(Case(Halved, floats(5, 4, 4)), torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    for length in (4, 8, 7, 7, 12, 9):
        batch = (torch.randn(5, length, 4),)
        truth = per_sample_truth(plain, batch, squared_loss)
        compare(module, truth, Case(Halved, lambda: (), squared_loss), batch, 0.5, steps=1)


def test_wires_of_a_wrong_shape_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd would add up what arrives for a wire with fewer rows."""
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    learn = Region._learn

    def wrong(self: Region, *args: Any) -> Any:
        layout = learn(self, *args)
        layout.metas = [(((1, *shape[1:]), dtype), at) for (shape, dtype), at in layout.metas]
        return layout

    monkeypatch.setattr(Region, "_learn", wrong)
    with pytest.raises(Exception, match="does not fit what it is to get"):
        case.loss(module, batch)
