"""Models compiled before they are wrapped, in whole or block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping.capture.compiled.regions import Region
from tests.support.cases import bound_between, make_case
from tests.support.compiled import (
    LM,
    Backend,
    Block,
    Borrowing,
    Language,
    compare,
    lm_loss,
    slow,
    wrap,
)
from tests.support.models import Case, floats
from tests.support.oracle import per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_in_whole_before_wrapping(how: str) -> None:
    model, batch = make_case(LM, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound, backend = bound_between(truth), Backend()
    if how == "torch.compile":
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        names = {f"_orig_mod.{name}" for name in truth.grads}
        truth.grads = {f"_orig_mod.{name}": g for name, g in truth.grads.items()}
        truth.param_norms = {f"_orig_mod.{name}": n for name, n in truth.param_norms.items()}
        assert names == {name for name, _ in compiled.named_parameters()}
    else:
        model.compile(backend=backend, fullgraph=True)
        compiled = model
    before = vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")
    module = wrap(compiled, max_grad_norm=bound)
    compare(module, truth, LM, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert (vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")) == before
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("checkpointing", "wrapped_first"), [(False, False), slow(False, True), (True, True)]
)
def test_blocks(checkpointing: bool, wrapped_first: bool) -> None:
    """Blocks of one type share what was compiled."""
    backend = Backend()
    case = Case(lambda: Language(checkpointing, blocks=3), LM.batch, lm_loss)
    plain = Case(lambda: Language(blocks=3), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(make_case(plain, torch.float32)[0], batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound) if wrapped_first else None
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    module = module or wrap(model, max_grad_norm=bound)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert not any(isinstance(b._compiled_call_impl, Region) for b in model.blocks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_compiled_blocks(reentrant: bool) -> None:
    class Checkpointed(Language):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    case = Case(lambda: Checkpointed(blocks=2), LM.batch, lm_loss)
    plain = Case(lambda: Language(blocks=2), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(make_case(plain, torch.float32)[0], batch, lm_loss)
    bound = bound_between(truth)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    module = wrap(model, max_grad_norm=bound)
    compare(module, truth, case, batch, bound)


def test_compiled_blocks_in_a_compiled_model() -> None:
    backend = Backend()
    case = Case(lambda: Language(blocks=2), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, 0.5)
    assert backend.graphs == 1


def test_a_block_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 8), Block(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.first(x)))

    case, backend = Case(Twice, floats(5, 3, 4)), Backend()
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    model.block.compile(backend=backend, fullgraph=True)
    compare(wrap(model, max_grad_norm=bound), truth, case, batch, bound)
    assert backend.graphs == 1


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_layer_inside_and_outside_of_a_block(mode: Any) -> None:
    """Uses inside a compiled block count as those outside do."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.block[0](self.block(x))

    case = Case(Both, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    model.block.compile(backend="aot_eager", fullgraph=True)
    compare(wrap(model, max_grad_norm=0.5, mode=mode), truth, case, batch, 0.5)


def test_a_layer_that_a_block_borrows() -> None:
    """Numbers of taps are those of the region that runs: of a layer outside there is none."""

    class Lending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.block = Borrowing([self.layer])

        def forward(self, x: Tensor) -> Tensor:
            return self.block(torch.tanh(self.layer(x)))

    case = Case(Lending, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    model.layer.compile(backend="aot_eager")
    model.block.compile(backend="aot_eager")
    compare(wrap(model, max_grad_norm=0.5), truth, case, batch, 0.5)
