"""Recurrent cells of PyTorch in a loop: each step has factors, and no sample runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proxies.parameter_proxy import ParameterProxy
from tests.support.autograd import squares, truth_by_autograd
from tests.support.uses import D, Holder, make_around, measured, seeded_batch

pytestmark = pytest.mark.without_gate

CELLS: dict[str, Callable[[], nn.RNNCellBase]] = {
    "lstm": lambda: nn.LSTMCell(D, D),
    "lstm_without_bias": lambda: nn.LSTMCell(D, D, bias=False),
    "gru": lambda: nn.GRUCell(D, D),
    "gru_without_bias": lambda: nn.GRUCell(D, D, bias=False),
    "tanh": lambda: nn.RNNCell(D, D),
    "relu": lambda: nn.RNNCell(D, D, bias=False, nonlinearity="relu"),
}

#: From the module and ``[B, T, D]`` to ``[B, D]``: what a loop begins with.
FIRST: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "none": lambda m, x: None,
    "zeros": lambda m, x: x.new_zeros(len(x), D),
    "learnt": lambda m, x: m.first.expand(len(x), -1),
    "of_samples": lambda m, x: x.mean(1),
}


def looped(m: Any, x: Tensor) -> Tensor:
    """``[B, T, D]``: what the cell returns at every step."""
    is_lstm = isinstance(m.cell, nn.LSTMCell)
    state: Any = FIRST[m.begin](m, x)
    if is_lstm and state is not None:
        state = state, state
    outputs = []
    for x_Bd in x.unbind(1):
        state = m.cell(x_Bd, state)
        outputs.append(sum(state) if is_lstm else state)
    return torch.stack(outputs, 1)


#: In one function with all its gates a cell would go back sample by sample.
WHOLE = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)


def run_by_gates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert func not in WHOLE
    return RUN(func, args, kwargs)


RUN = ParameterProxy.run


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("begin", FIRST)
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_in_a_loop_is_exact(
    name: str, begin: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def middle() -> nn.Module:
        first = {"first": torch.randn(D)} if begin == "learnt" else {}
        return Holder(looped, cell=CELLS[name](), begin=begin, **first)

    monkeypatch.setattr(ParameterProxy, "run", staticmethod(run_by_gates))
    truth = truth_by_autograd(make_around(middle), seeded_batch(), squares)
    measured(make_around(middle), truth, seeded_batch(), mode, "wrapped")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_returns_what_it_does_by_itself(
    name: str, dtype: torch.dtype | None, device: str
) -> None:
    """In the same dtypes, also under autocast."""
    torch.manual_seed(0)
    cell = CELLS[name]().to(device)
    x, h = torch.randn(2, 4, D, device=device)
    state = (h, h + 1) if isinstance(cell, nn.LSTMCell) else h
    with torch.autocast(device, dtype, enabled=dtype is not None):
        plain = cell(x, state)
        wrapped = GradSampleModuleFlashClipping(cell, loss_reduction="sum")(x, state)
    close = {"atol": 1e-6, "rtol": 1e-6} if dtype is None else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(wrapped, plain, **close)


class ByName(nn.Module):
    """Gives a cell's function its biases by name."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        w, cell = (self.cell.weight_ih, self.cell.weight_hh), self.cell
        return torch.gru_cell(x, x.tanh(), *w, b_ih=cell.bias_ih, b_hh=cell.bias_hh)


def test_a_cell_whose_biases_are_named() -> None:
    torch.manual_seed(0)
    model = ByName().double()
    x = torch.randn(3, D, dtype=torch.float64)
    expected, norms = model(x).detach(), []
    for one in x.unsqueeze(1):
        grads = torch.autograd.grad(model(one).square().sum(), [*model.parameters()])
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
    flash = GradSampleModuleFlashClipping(model, loss_reduction="sum")
    found = flash(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    torch.testing.assert_close(flash.get_norm_sample(), torch.stack(norms))
