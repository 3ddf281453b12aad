"""Norms and clipped sums of every rule against ``vmap(grad)``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping, Kernels
from flash_clipping.ops.runtime.backend import is_interpreting
from flash_clipping.rules import normalization
from flash_clipping.rules.normalization import LayerNormRule
from flash_clipping.rules.registry import GradRequest
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.errors import raises
from tests.support.models import CASES, Case, Mixed, Tokens, mixed_batch
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = pytest.mark.without_gate

#: Relative error allowed on norms and clipped sums, per dtype of the model (design, section 5).
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


#: The mean in float64, in either mode: ``tests/zoo``.
WAYS = [
    pytest.param(torch.float64, "sum", "two_pass", id="fp64-sum-two_pass"),
    pytest.param(torch.float32, "mean", "one_pass", id="fp32-mean-one_pass"),
]


@pytest.mark.parametrize(("dtype", "reduction", "mode"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_rule_matches_oracle(name: str, dtype: torch.dtype, reduction: str, mode: str) -> None:
    case = CASES[name]
    model, batch = make_case(case, dtype)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=bound, loss_reduction=reduction, mode=mode
    )
    step_case(module, case, batch, reduction)
    check_case(module, truth, bound, TOLERANCE[dtype])


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_checkpointed_model_matches_oracle(checkpointing: str, mode: str) -> None:
    case = Case(lambda: Mixed(checkpointing=checkpointing), mixed_batch)
    plain = Case(Mixed, mixed_batch)
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(make_case(plain, torch.float64)[0], batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, bound, 1e-10)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_frozen_between_forward_and_backward_is_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module = GradSampleModuleFlashClipping(model, mode=mode)
    loss = module(torch.randn(5, 4)).square().mean()
    model[1].bias.requires_grad_(False)
    with raises("FC505", match=r"1 \(Linear\):"):
        loss.backward()
    assert all(param.grad is None for param in model.parameters())
    assert module.backward_count == 0


class Inside(nn.Module):
    def __init__(self, transform: str) -> None:
        super().__init__()
        self.layer, self.transform = nn.Linear(3, 3), transform

    def forward(self, x: Tensor) -> Tensor:
        if self.transform == "vmap":
            return torch.func.vmap(self.layer)(x)
        return torch.func.vjp(self.layer, x)[0]


def test_a_layer_inside_a_transform_is_refused() -> None:
    for transform in ("vmap", "vjp"):
        module = GradSampleModuleFlashClipping(Inside(transform))
        with raises("FC402|FC140", match=r"layer \(Linear\): .*|the model \(Inside\): .*"):
            module(torch.randn(4, 2, 3))


def test_a_parameter_renamed_between_steps_is_refused() -> None:
    """Pruning trains ``weight_orig`` and computes ``weight`` from it: no linear map of a weight."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    module = GradSampleModuleFlashClipping(model)
    module(torch.randn(5, 6)).square().mean().backward()
    prune.random_unstructured(model[0], "weight", 0.5)
    loss = module(torch.randn(5, 6)).square().mean()
    with raises("FC142", match=r"0\.weight: .*prune\.remove"):
        loss.backward()


def test_parameters_unfrozen_after_wrapping_match_oracle() -> None:
    case = CASES["parameter_proxies"]
    model, batch = make_case(case, torch.float64)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for trainable in (["head"], ["head", "embed"], ["head", "class_token"], ["norm"]):
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(tuple(trainable)))
            param.grad = None
        truth = per_sample_truth(Tokens().double(), batch, case.loss)
        plain = Tokens().double()
        plain.load_state_dict(model.state_dict())
        for name, param in plain.named_parameters():
            param.requires_grad_(name.startswith(tuple(trainable)))
        truth = per_sample_truth(plain, batch, case.loss)
        step_case(module, case, batch, "mean")
        check_case(module, truth, 1.0, 1e-10)


def test_batch_of_one_and_empty_batch() -> None:
    case = CASES["mixed"]
    model, _ = make_case(case, torch.float64)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for size in (1, 0, 1):
        module.zero_grad(set_to_none=True)
        batch = mixed_batch(1)  # of nobody, where no sample was drawn
        batch = (batch[0], batch[1].double())
        module.expect_samples(size)
        step_case(module, case, batch, "sum" if size == 0 else "mean")
        assert module.get_norm_sample().shape == (size,)
        assert module.get_clipping_coef().shape == (size,)
        for param in model.parameters():
            assert param.grad is not None and torch.isfinite(param.grad).all()
            if size == 0:
                assert not param.grad.any()


def test_gradients_add_up_over_backwards() -> None:
    """Like autograd, and what Opacus' virtual steps build on."""
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float64)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    step_case(module, case, batch, "mean")
    once = {n: p.grad.clone() for n, p in module.named_parameters()}
    step_case(module, case, batch, "mean")
    for n, p in module.named_parameters():
        assert_close(p.grad, 2 * once[n], 1e-12, n)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)], ids=str)
def test_small_layer_norms_are_as_large_ones(
    shape: tuple[int, ...], affine: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are bound by launches go another way."""
    layer = nn.LayerNorm(shape, elementwise_affine=affine[0], bias=affine[1], dtype=torch.float64)
    x = torch.randn(3, 4, *shape, dtype=torch.float64)
    G = torch.randn_like(x)
    output, saved = LayerNormRule().forward(layer, x)
    names = frozenset(name for name, _ in layer.named_parameters())
    needs = GradRequest((True,), names, "torch")
    small_dx, small = LayerNormRule().backward(layer, saved, G, needs)
    monkeypatch.setattr(normalization, "BOUND_BY_LAUNCHES", 0)
    dx, factors = LayerNormRule().backward(layer, saved, G, needs)
    if affine[0]:
        assert small["weight"].normalized is not None  # the other way was taken
    assert_close(small_dx, dx, 1e-12)
    assert small.keys() == factors.keys() == names
    for name, factor in small.items():
        assert_close(factor.dense(), factors[name].dense(), 1e-12, name)
        assert_close(factor.fold(1).dense(), factors[name].fold(1).dense(), 1e-12, name)
    for name in names:
        twice = type(small[name]).concatenate([small[name], small[name]])
        assert_close(twice.dense(), 2 * factors[name].dense(), 1e-12, name)


def test_small_layer_norms_of_16_bits_may_have_weights_in_fp32() -> None:
    layer, x = nn.LayerNorm(6), torch.randn(3, 4, 6).bfloat16().requires_grad_()
    G = torch.randn(3, 4, 6).bfloat16()
    output, saved = LayerNormRule().forward(layer, x.detach())
    needs = GradRequest((True,), frozenset(("weight", "bias")), "torch")
    dx, factors = LayerNormRule().backward(layer, saved, G, needs)
    layer(x).backward(G)
    assert torch.equal(dx, x.grad)
    for name, param in layer.named_parameters():
        assert_close(factors[name].dense().sum(0), param.grad, 1e-2, name)


@pytest.mark.parametrize("how", ["plain", "frozen", "re-entrant"])
def test_what_a_rule_refuses_is_named(how: str) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            if how == "re-entrant":
                return checkpoint(self.attend, x, use_reentrant=True)
            return self.attend(x)

        def attend(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, is_causal=True)[0]

    module = GradSampleModuleFlashClipping(Attending())
    if how == "frozen":
        module._module.attention.in_proj_weight.requires_grad_(False)
        module._module.attention.in_proj_bias.requires_grad_(False)
    with raises("FC118", match=r"attention \(.*\):"):
        module(torch.randn(3, 5, 4))


class Texts(nn.Module):
    """Tables of one width, whose norms come in parts of one shape, one of another, token types."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList([nn.Embedding(40, 260) for _ in range(2)])
        self.wide = nn.Embedding(40, 600)
        self.types = nn.Embedding(2, 260)
        self.head = nn.Linear(860, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words[0](ids) * torch.tanh(self.words[1](ids)) + self.types(ids % 2)
        return self.head(torch.cat([x, self.wide(ids)], -1)).square().mean((1, 2))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_norms_that_come_in_parts(backend: str) -> None:
    if backend == "triton" and not (is_interpreting() or torch.cuda.is_available()):
        pytest.skip("no kernels here")
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    torch.manual_seed(0)
    model = Texts().to(device)
    ids = torch.randint(40, (3, 150), device=device)
    ids[1, 60:] = 7
    truth = per_sample_truth(model, (ids,), lambda model, batch: model(*batch))
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, kernels=Kernels(backend))
    module(ids).mean().backward()
    check_case(module, truth, bound, 1e-5)
