"""Output gradients whose rows no descriptor can address: one copy serves all that read them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.compiled import wires
from flash_clipping.ops.runtime import backend, tables
from flash_clipping.rules import linear
from tests.support.cases import bound_between, check_case, step_case
from tests.support.models import Case, ids
from tests.support.oracle import per_sample_truth

tiles = pytest.importorskip("flash_clipping.ops.runtime.tiles")

pytestmark = [
    pytest.mark.skipif(
        not (backend.is_interpreting() and tiles.has_tma(torch.device("cpu"))),
        reason="needs descriptors in the interpreter",
    ),
    pytest.mark.filterwarnings(
        f"error::{backend.__name__}.{backend.TritonFallbackWarning.__name__}"
    ),
    pytest.mark.without_gate,
]


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Kernels on the CPU, and copies of small operands, which are noted: with NaN where nothing may
    read."""
    made: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        rows = tables.on_16_bytes(x)
        if rows is not x:
            assert rows._base is not None
            rows._base[..., rows.shape[2] :] = float("nan")
            made.append(rows)
        return rows

    for place in (linear, wires):
        monkeypatch.setattr(place, "on_16_bytes", noted)
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(backend, "_resolved", backend._resolved.__wrapped__)  # read once
    monkeypatch.setattr(tables, "WORTH_A_COPY", 1)
    return made


class Language(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.tokens = nn.Embedding(257, 24)
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 257, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.tokens(ids))))


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits[:, :-1].mT, batch[0][:, 1:], reduction="none").sum(1)


@pytest.mark.parametrize(
    ("tied", "compiled"),
    [(False, False), (True, True)],
    ids=["untied", "tied-compiled"],
)
def test_steps_with_and_without_copies(
    tied: bool, compiled: bool, copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept for operands of one layout is not taken for those of the other."""
    torch.manual_seed(0)
    case = Case(lambda: Language(tied), ids(4, 6, vocab=257), loss)
    model, batch = case.make(), case.batch()
    truth = per_sample_truth(model, batch, loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True)
    step_case(module, case, batch, "mean")  # rehearsed, and compared with autograd
    for worth, number in ((1, 1), (1 << 22, 0), (1, 1)):
        monkeypatch.setattr(tables, "WORTH_A_COPY", worth)
        copies.clear()
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, bound, 1e-5)
        assert len(copies) == number
