"""Layers that compute what one with a rule does, where rows are no samples, and compiled.

Wherever such a layer is not served it is refused by its name, never measured by another rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.regions import Region
from tests.capture.test_declared_rows import Experts
from tests.capture.test_packed import check
from tests.capture.test_wrapped_parents import (
    LAYERS,
    Convolution,
    D,
    Norm,
    SpeltEmbedding,
    SpeltLinear,
    around,
    gated,
    hat,
)
from tests.support.autograd import check_by_autograd, check_truth, squares, truth_by_autograd
from tests.support.compiled import Backend, slow
from tests.support.errors import raises
from tests.support.packed import Reader, documents

pytestmark = pytest.mark.without_gate

Make = Callable[[], nn.Module]


def llama() -> nn.Module:
    return Norm(lambda m, x: m.weight * hat(m, x) + m.bias)


def mixing_places(m: SpeltLinear, x: Tensor) -> Tensor:
    """A linear map of what stands before, too: one document's gradient has another's values."""
    return F.linear(x + x.roll(1, -2), m.weight, m.bias)


# -- documents in one row --------------------------------------------------------------------------

BETWEEN: dict[str, Make] = {
    "linear": lambda: SpeltLinear(lambda m, x: F.linear(x, m.weight, m.bias) * m.gain),
    "falcon": lambda: SpeltLinear(lambda m, x: x @ m.weight.T + m.bias),
    "scaled_by_itself": lambda: SpeltLinear(
        lambda m, x: F.linear(x, m.weight, m.bias) * m.weight.sum()
    ),
    "llama": llama,
    "layer_norm": lambda: Norm(lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, m.eps)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_documents_in_one_row(name: str) -> None:
    check(Reader(BETWEEN[name]()).double(), [list(enumerate(documents()))])


def test_documents_of_several_rows() -> None:
    a, b, c = documents((3, 4, 2))
    check(Reader(llama()).double(), [[(0, a), (1, b)], [(1, c)]])


REFUSED: dict[str, tuple[Make, str]] = {
    "mixing_places": (lambda: SpeltLinear(mixing_places), r"between \(SpeltLinear\).*position by"),
    "gated": (
        lambda: Norm(lambda m, x: gated(m, x) + m.bias),
        r"between \(Norm\).*position by position",
    ),
    "convolution": (
        lambda: Convolution(False),
        r"between \(Convolution\).*position by position",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_row_of_documents(name: str) -> None:
    make, found = REFUSED[name]
    with raises("FC278", match=found):
        check(Reader(make()).double(), [list(enumerate(documents()))])


def test_an_embedding_of_documents_in_one_row() -> None:
    """Its output has an axis more than its ids. A transform of its weight is refused by name."""

    def run(how: str) -> None:
        model = Reader()
        model.table = SpeltEmbedding(how)
        check(model.double(), [[(n, 2 + ids % 9) for n, ids in enumerate(documents())]])

    run("scaled")
    run("normalized_rows")
    with raises("FC278", match=r"table \(SpeltEmbedding\).*once for each sample"):
        run("by_vmap")


# -- rows of any samples ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [BETWEEN["linear"], BETWEEN["falcon"], llama])
def test_refused_inside_of_samples(make: Make) -> None:
    flash = GradSampleModuleFlashClipping(Experts(make))
    with raises("FC264", match=r"experts\.0 \(.*."):
        squares(flash, (torch.randn(3, 5, 6),)).backward()


def test_frozen_inside_of_samples() -> None:
    model = Experts(llama).double()
    model.experts.requires_grad_(False)
    check_by_autograd(model, (torch.randn(3, 5, 6, dtype=torch.float64),), squares)


# -- compiled --------------------------------------------------------------------------------------

COMPILED = ["embedding_scaled", slow("linear_twice"), "norm_gemma", slow("norm_enlarged")]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, nothing_compiled_yet: None) -> None:
    """The layer stands inside of what is compiled, and its neighbours too."""
    model, batch = around(LAYERS[name][0]())
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    bound, backend = truth.norms.median().item(), Backend()
    model.compile(backend=backend)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
        check_truth(flash, model, truth, bound, 1e-9)
    assert isinstance(flash._taps.of_root.instance_forward, Region)
    assert backend.graphs
