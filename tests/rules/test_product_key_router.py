"""Models with a product-key router and its experts: norms and clipped sums against autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import ProductKeyExperts, ProductKeyRouter, factors, product_key_experts
from flash_clipping.layers.product_key_experts import ExpertTables
from flash_clipping.ops.runtime.backend import is_interpreting
from tests.support.autograd import check_by_autograd, squares
from tests.support.models import squared_loss
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = pytest.mark.without_gate

D, SIDE = 8, 7
NAN = float("nan")


class Model(nn.Module):
    """Experts between two linear maps; tokens whose first feature is large are padding."""

    def __init__(self, experts: int = SIDE**2, k: int = 5, padding: bool = False, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(6, D)
        self.experts = ProductKeyExperts(D, experts, k, **options)
        self.after = nn.Linear(D, 3)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        valid = x[..., 0] < 0.5 if self.padding else None
        h = self.before(x)
        return self.after(torch.tanh(h + self.experts(h, valid)))


def inputs(*axes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randn(*axes, 6, dtype=dtype),)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "group", "groups": 7, "shared": 5},
        {"norm": None, "bias": True, "activation": "silu"},
        {"norm": nn.LayerNorm, "heads": 3, "activation": "relu"},
        {"padding": True, "heads": 2, "shared": 5},
        {"experts": 9, "k": 9},
        {"experts": 4, "k": 3, "heads": 4, "padding": True},
        {"experts": 1, "k": 1},
    ],
    ids=str,
)
def test_models_with_any_options_match_autograd(options: dict[str, Any]) -> None:
    """One sample at a time through an ordinary backward, router and experts alike."""
    check_by_autograd(Model(**options).double(), inputs(4, 9), squares, steps=1)


@pytest.mark.parametrize("axes", [(3,), (1, 1), (1, 9), (5, 1), (2, 3, 4)], ids=str)
def test_inputs_with_any_axes_match_autograd(axes: tuple[int, ...]) -> None:
    check_by_autograd(Model(padding=True, shared=4).double(), inputs(*axes), squares, steps=1)


@pytest.mark.parametrize("options", [{"heads": 2, "norm": "group", "groups": 7}, {"padding": True}])
def test_norms_match_torch_func(options: dict[str, Any]) -> None:
    """``vmap(grad)`` of the same model: the router is a function of every row by itself."""
    model, batch = Model(**options).double(), inputs(4, 9)
    truth = per_sample_truth(model, batch, squared_loss)
    bound = float(truth.norms.median())
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, loss_reduction="sum")
    squared_loss(flash, batch).sum().backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9, "norms")
    for name, grad in truth.clipped(bound).items():
        # Where a gradient cancels to nothing, at the scale of the whole gradient.
        slack = float(truth.norms.max() / truth.param_norms[name].max().clamp(min=1e-30))
        assert_close(model.get_parameter(name).grad, grad, 1e-9 * max(1.0, 1e-5 * slack), name)


@pytest.mark.parametrize("second", [2, 3])
def test_tables_that_are_used_twice(second: int) -> None:
    """By routers that choose as many experts, or not as many."""

    class Twice(Model):
        def __init__(self) -> None:
            super().__init__(k=3)
            self.other = ProductKeyRouter(D, SIDE**2, second)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.experts(self.before(x)))
            scores, indices = self.other(h)
            return self.after(h + self.experts.tables(h, indices, scores.exp()))

    check_by_autograd(Twice().double(), inputs(3, 5), squares, steps=1)


@pytest.mark.parametrize("module", [product_key_experts, factors])
def test_pieces_of_any_size_match_autograd(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some positions, of a sample, of one feature: the same, whatever is formed at a time."""
    for size in (1, 100, 1000):
        monkeypatch.setattr(module, "BUFFER", size)
        check_by_autograd(Model(heads=2).double(), inputs(3, 5), squares, steps=1)


@pytest.mark.skipif(not is_interpreting(), reason="kernels run on a GPU in this run")
@pytest.mark.filterwarnings("error::flash_clipping.ops.TritonFallbackWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_the_kernel_inside_a_model() -> None:
    """What it writes is not seen by what follows tensors; the rehearsal accepts it all the same."""
    model, batch = Model(k=4, heads=2, padding=True, backend="triton"), inputs(4, 5)
    truth = per_sample_truth(Model(k=4, heads=2, padding=True), batch, squared_loss)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    squared_loss(flash, tuple(x.float() for x in batch)).sum().backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-5, "norms")
    for name, grad in truth.clipped(1.0).items():
        assert_close(model.get_parameter(name).grad, grad, 1e-4, name)


# -- no expert -------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Experts that the caller chooses."""

    def __init__(self, indices: Tensor, weights: Tensor, unread: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.tables = nn.Linear(6, D), ExpertTables(D, 10)
        self.indices, self.weights, self.unread = indices, weights, unread

    def forward(self, x: Tensor, sample: Tensor) -> Tensor:
        h = torch.tanh(self.before(x))
        indices, weights = self.indices[sample], self.weights[sample]
        none = (indices < 0) | (indices > 9)
        # Of no expert, a weight may be anything; and so may a token without any.
        weights = (weights * h[..., :1].exp()).masked_fill(none, NAN)
        h = h.masked_fill(none.all(-1, keepdim=True), self.unread)
        y: Tensor = self.tables(h, indices, weights)
        return y


def routed(indices: Tensor, weights: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Routed(indices, weights).double(), (*inputs(*indices.shape[:2]), torch.arange(3))


def test_no_expert_adds_nothing_and_has_no_gradient() -> None:
    """-1 beside experts is as if these were all; not even the last row is touched, which -1 is in
    Python, nor the first."""
    torch.manual_seed(0)
    indices, weights = torch.randint(2, 8, (3, 4, 3)), torch.rand(3, 4, 3, dtype=torch.float64)
    with_none = torch.full((3, 4, 6), -1)
    with_none[..., [1, 3, 4]] = indices
    with_none[..., 5] = 10
    any_weights = torch.ones(3, 4, 6, dtype=torch.float64)
    any_weights[..., [1, 3, 4]] = weights
    model, batch = routed(indices, weights)
    truth = per_sample_truth(model, batch, squared_loss)
    for wanted, found in ((indices, weights), (with_none, any_weights)):
        model, batch = routed(wanted.to(torch.int32), found)
        with torch.no_grad():  # experts that nobody chose may hold anything
            for table in (model.tables.down, model.tables.up):
                table[[0, 9]] = NAN
        plain = copy.deepcopy(model)
        flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, loss_reduction="sum")
        squared_loss(flash, batch).sum().backward()
        squared_loss(plain, batch).sum().backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9, "norms")
        for name, grad in truth.clipped(1.0).items():
            assert_close(model.get_parameter(name).grad, grad, 1e-9, name)
            whole = truth.grads[name].sum(0)
            assert_close(plain.get_parameter(name).grad, whole, 1e-9, name)
        for tables in (model.tables, plain.tables):
            for table in (tables.down, tables.up):
                assert not table.grad[[0, 1, 8, 9]].any()
