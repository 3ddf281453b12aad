"""The product-key router by itself: scores, derivatives, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import ProductKeyRouter
from flash_clipping.layers.product_key_experts import TokenGroupNorm
from tests.rules.test_product_key_router import SIDE, D, Model, inputs
from tests.support.autograd import squares
from tests.support.errors import raises
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate


def test_scores_are_those_of_the_axes() -> None:
    router = ProductKeyRouter(D, SIDE**2, 5, heads=2, norm="group", groups=7).double()
    (x,) = torch.randn(3, 4, D, dtype=torch.float64).split(3)
    scores, indices = router(x)
    assert scores.shape == indices.shape == (3, 4, 10) and indices.dtype == torch.int32
    for head in range(2):
        rows = slice(head * SIDE, (head + 1) * SIDE)
        axes = [
            norm(to(x)[..., rows]).log_softmax(-1)
            for norm, to in ((router.norm_x, router.to_x), (router.norm_y, router.to_y))
        ]
        every = (axes[0].unsqueeze(-1) + axes[1].unsqueeze(-2)).flatten(-2)
        expected, chosen = every.sort(dim=-1, descending=True, stable=True)
        one = slice(5 * head, 5 * head + 5)
        assert torch.equal(indices[..., one].long(), chosen[..., :5])
        assert_close(scores[..., one], expected[..., :5], 1e-12)


class Both(nn.Module):
    def __init__(self, side: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(side, side), nn.BatchNorm1d(side))


@pytest.mark.parametrize("norm", ["batch", nn.BatchNorm1d, nn.SyncBatchNorm, Both])
def test_batch_normalization_is_refused(norm: Any) -> None:
    with raises("FC106", ValueError):
        ProductKeyRouter(D, 49, 5, norm=norm)


class Rounded(nn.Module):
    """Logits as a GPU's matmul may round them for an odd number of samples."""

    def __init__(self, side: int):
        super().__init__()

    def forward(self, logits: Tensor) -> Tensor:
        return (logits.float() * (1 + 3e-3 * (len(logits) % 2))).to(logits.dtype)


def test_routes_that_rounding_changes_are_accepted() -> None:
    """In 16 bits logits tie, and one that rounds otherwise for another batch size changes a route.
    The rehearsal takes that for rounding, which it is; what differs more is refused below."""
    batch = inputs(4, 64, dtype=torch.bfloat16)
    model = Model(norm=Rounded, heads=2).to(torch.bfloat16)
    routes = [model.experts.router(model.before(x))[1] for x in (batch[0], batch[0][:3])]
    assert not torch.equal(routes[0][:3], routes[1])
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    squares(flash, batch).backward()
    assert flash.get_norm_sample().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routes_of_other_samples_are_refused(dtype: torch.dtype) -> None:
    """Each token takes the experts of a neighbour's sample."""

    class Swapped(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            scores, indices = self.experts.router(h)
            return self.after(self.experts.tables(h, indices.roll(1, 0), scores.exp()))

    flash = GradSampleModuleFlashClipping(Swapped().to(dtype))
    with raises("FC202", match="tables.*other values for the same samples"):
        flash(*inputs(4, 64, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 50}, "experts=50; expected a square, as 49 or 64"),
        ({"k": 50}, r"k: found 50; .*\[1, 49\]"),
        ({"k": 0}, "k: found 0"),
        ({"norm": "group", "groups": 3}, "7 channels for 3 groups"),
        ({"activation": "sine"}, "activation='sine' is unknown; expected one of gelu, relu, silu"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with raises("FC301|FC302", ValueError, match=words):
        Model(**options)


def test_group_normalization_is_of_each_token() -> None:
    x = torch.randn(2, 5, 12)
    norm = TokenGroupNorm(3, 12)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    plain = nn.GroupNorm(3, 12)
    plain.load_state_dict(norm.state_dict())
    assert_close(norm(x), plain(x.flatten(0, 1)).view_as(x), 1e-6)
