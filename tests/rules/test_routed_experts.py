"""``MixtureOfExperts`` in models, with its router: whole steps against one sample at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
from flash_clipping.layers.mixture_of_experts import balance_of_samples
from tests.support.autograd import check_by_autograd, squares
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

F64 = torch.float64


class Model(nn.Module):
    """Something to reach through the mixture, and something that reads its weights' gradients."""

    def __init__(self, r: int = 0, E: int = 5, **of_router: Any):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(6, 6)
        experts = MixtureOfExperts(6, 7, E, rank=r, lora_alpha=3.0 if r else None)
        self.mixture = RoutedExperts(TopKRouter(6, E, 2, **of_router), experts)
        for param in self.parameters():
            nn.init.normal_(param, std=0.5)
        self.double()
        self.checkpointing, self.uses = False, 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            if self.checkpointing:
                x = checkpoint(self.body, x, use_reentrant=False)
            else:
                x = self.body(x)
        return x

    def body(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mixture(self.before(x)))


def inputs(B: int, *positions: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randn(B, *positions, 6, dtype=F64),)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("r", "positions"), [(0, (5,)), (4, (5,)), (2, (90,)), (4, ()), (1, (2, 3))]
)
def test_models_of_any_shape_match_autograd(r: int, positions: tuple[int, ...], mode: str) -> None:
    check_by_autograd(Model(r), inputs(4, *positions), squares, mode=mode)


class Flat(Model):
    """Tokens end to end, ``[B·T, d]``, as blocks of ``transformers`` have them."""

    def body(self, x: Tensor) -> Tensor:
        rows = self.before(x).flatten(0, -2)
        return x + torch.tanh(self.mixture(rows)).view_as(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("B, positions", [(4, (5,)), (4, (4,)), (4, (2, 3)), (4, (1,)), (1, (6,))])
def test_tokens_end_to_end(B: int, positions: tuple[int, ...], mode: str) -> None:
    check_by_autograd(Flat(2), inputs(B, *positions), squares, mode=mode)


@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize("trained", ["gate_up", "down", "_B", "_A", "router", "before", ""])
def test_parts_that_are_trained_alone_match_autograd(trained: str, r: int) -> None:
    """Base and LoRA together, and each of them alone."""
    model = Model(r)
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name)
    if any(param.requires_grad for param in model.parameters()):
        check_by_autograd(model, inputs(3, 5), squares)


def test_lora_freezes_its_base() -> None:
    model = Model(2)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"mixture.experts.gate_up", "mixture.experts.down"}
    layer = MixtureOfExperts(6, 7, 5, rank=2)
    assert not (layer.gate_B.any() or layer.up_B.any() or layer.down_B.any())
    assert torch.equal(torch.cat([layer.gate, layer.up], 1), layer.gate_up)
    assert torch.equal(torch.cat([layer.gate_A, layer.up_A], 1), layer.gate_up_A)


@pytest.mark.parametrize("r", [0, 4])
def test_parameters_in_16_bits_match_float64(r: int) -> None:
    """Output in the dtype of tokens, weights in fp32, LoRA in fp32 beside a base in bf16."""
    model = Model(r).bfloat16()
    for name, param in model.named_parameters():
        if name.endswith(("_A", "_B")):
            param.data = param.data.float()
    wide = copy.deepcopy(model).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    (x,) = inputs(4, 30)
    y = flash(x.bfloat16())
    assert y.dtype == torch.bfloat16
    squares(lambda _: y.double(), (x,)).backward()
    squares(wide, (x.bfloat16().double(),)).backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert_close(param.grad, 4 * wide.get_parameter(name).grad, 0.1, name)


# -- the router ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_the_router_is_a_softmax(normalize: bool) -> None:
    router = TopKRouter(6, 5, 2, normalize=normalize, dtype=F64)
    (x,) = inputs(3, 4)
    ids, weights = router(x)
    shares = (x @ router.linear.weight.T).exp()
    largest = shares.topk(2).indices
    chosen = shares.gather(-1, largest)
    expected = chosen / (chosen if normalize else shares).sum(-1, keepdim=True)
    assert torch.equal(ids, largest)
    assert_close(weights, expected, 1e-12)
    G, weight = torch.randn_like(weights), router.linear.weight
    found, truth = (torch.autograd.grad((w * G).sum(), weight)[0] for w in (weights, expected))
    assert_close(found, truth, 1e-9)


class Balanced(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, loss_B = self.mixture(self.before(x))
        return x + y, loss_B


def balanced_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    y, loss_B = model(*batch)
    return squares(lambda _: y, batch) + 5 * loss_B.mean()


def test_balancing_of_samples_matches_autograd() -> None:
    check_by_autograd(Balanced(balance="sample"), inputs(4, 9), balanced_loss)
    probabilities = torch.full((2, 6, 3), 1 / 3)
    ids = torch.arange(3).repeat(2).view(1, 6, 1).expand(2, 6, 1)
    assert_close(balance_of_samples(probabilities, ids), torch.ones(2), 1e-6)


def test_balancing_of_a_batch_is_not_offered() -> None:
    with raises("FC106", ValueError):
        TopKRouter(6, 5, 2, balance="batch")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_shapes_that_do_not_fit(kind: str) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = MixtureOfExperts(6, 5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x, x[..., :2].long(), x[..., :3])

    model: nn.Module = Wrong().double()
    if kind == "wrapped":
        model = GradSampleModuleFlashClipping(model)
    with raises("FC303", ValueError, match=r"found x \(3, 5, 6\), expert_ids \(3, 5, 2\)"):
        model(*inputs(3, 5))


def test_arguments_that_do_not_fit_are_refused() -> None:
    with raises("FC302", ValueError, match="lora_alpha"):
        MixtureOfExperts(6, 5, 4, lora_alpha=2.0)
    with raises("FC302", ValueError, match="experts: found 0"):
        MixtureOfExperts(6, 5, 0)
    with raises("FC302", ValueError, match="k: found 5"):
        TopKRouter(6, 4, 5)


class Rounded(nn.Module):
    """A matrix in fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        return (16 * x).round() / 16


def rounded(model: Model, *names: str) -> Model:
    for name in names:
        nn.utils.parametrize.register_parametrization(model.mixture.experts, name, Rounded())
    return model


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_base_may_be_computed(mode: str) -> None:
    model = Model(2)
    for name in ("gate_up", "down"):
        model.mixture.experts.get_parameter(name).requires_grad_(False)
    check_by_autograd(rounded(model, "gate_up", "down"), inputs(4, 5), squares, mode=mode)


def test_a_parameter_that_is_computed_is_refused() -> None:
    model = rounded(Model(), "down")
    squares(model, inputs(3, 5)).backward()  # unwrapped it is trained
    computed = model.mixture.experts.parametrizations.down
    assert computed.original.grad is not None
    flash = GradSampleModuleFlashClipping(model)
    words = r"ParametrizedMixtureOfExperts.*its down is"
    with raises("FC120", match=words):
        squares(flash, inputs(3, 5)).backward()
    model.zero_grad()
    computed.requires_grad_(False)
    squares(flash, inputs(3, 5)).backward()
    computed.requires_grad_(True)
    with raises("FC120", match=words):
        squares(flash, inputs(3, 5)).backward()


@pytest.mark.parametrize("order", ["transposed", "sorted"])
def test_tokens_of_samples_that_do_not_lie_together_are_refused(order: str) -> None:
    class Mixed(Model):
        def body(self, x: Tensor) -> Tensor:
            x = self.before(x)
            rows = x.transpose(0, 1).reshape(-1, 6) if order == "transposed" else x.flatten(0, 1)
            if order == "sorted":
                rows = rows[rows[:, 0].argsort()]
            ids = torch.zeros(len(rows), 1, dtype=torch.long)
            return self.mixture.experts(rows, ids, rows[:, :1]).view_as(x)

    flash = GradSampleModuleFlashClipping(Mixed())
    with raises("FC202", match="experts"):
        squares(flash, inputs(3, 5)).backward()
