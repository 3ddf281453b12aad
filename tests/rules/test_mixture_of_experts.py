"""``MixtureOfExperts``: every part by itself against a formula that knows nothing of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from flash_clipping.factors import Dense
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
from flash_clipping.layers.mixture_of_experts import balance_of_samples
from flash_clipping.rules import Needs, find_rule
from tests.support.autograd import check_by_autograd, squares
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES

F64 = torch.float64


def plain(params: dict[str, Tensor], scale: float, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Every expert on every token, and the weights of those that were not chosen 0."""
    f = params["down"].shape[2]

    def mapped(weight: str, rows: slice, A: Tensor, B: str, h: Tensor) -> Tensor:
        y = torch.einsum("epd,...ed->...ep", params[weight][:, rows], h)
        if not scale:
            return y
        return y + scale * torch.einsum("epr,erd,...ed->...ep", params[B], A, h)

    A = params.get("gate_up_A", torch.zeros(1, 2, 1))
    r = A.shape[1] // 2
    E = len(params["down"])
    h = x.unsqueeze(-2).expand(*x.shape[:-1], E, x.shape[-1])
    gate = mapped("gate_up", slice(0, f), A[:, :r], "gate_B", h)
    up = mapped("gate_up", slice(f, None), A[:, r:], "up_B", h)
    between = gate / (1 + (-gate).exp()) * up
    y = mapped("down", slice(None), params.get("down_A", A), "down_B", between)
    share = (ids.unsqueeze(-1) == torch.arange(E)) * w.masked_fill(ids < 0, 0).unsqueeze(-1)
    return (y * share.sum(-2).unsqueeze(-1)).sum(-2)


def layer_of(E: int, d: int, f: int, r: int, dtype: torch.dtype = F64) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(d, f, E, rank=r, lora_alpha=3.0 if r else None, dtype=dtype)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.5)  # B of LoRA as well
        param.requires_grad_()  # the frozen base too
    return layer


def routed(B: int, T: int, E: int, k: int) -> Tensor:
    return torch.stack([torch.randperm(E)[:k] for _ in range(B * T)]).view(B, T, k)


def all_to_one(B: int, T: int, E: int, k: int) -> Tensor:
    return torch.full((B, T, k), E - 1)


def a_row_of_each_sample(B: int, T: int, E: int, k: int) -> Tensor:
    """Expert 1 has exactly as many rows as there are samples, and expert 2 has none."""
    ids = torch.zeros(B, T, k, dtype=torch.int64)
    ids[:, 0, 0] = 1
    return ids


def as_many_rows_as_samples(B: int, T: int, E: int, k: int) -> Tensor:
    """Expert 1 has B rows, all of one sample."""
    ids = torch.zeros(B, T, k, dtype=torch.int64)
    ids[-1].view(-1)[:B] = 1
    return ids


def some_to_none(B: int, T: int, E: int, k: int) -> Tensor:
    ids = routed(B, T, E, k)
    return ids.masked_fill(torch.rand(B, T, k) < 0.3, -1)


def none(B: int, T: int, E: int, k: int) -> Tensor:
    return torch.full((B, T, k), -1)


ROUTES = [routed, all_to_one, a_row_of_each_sample, as_many_rows_as_samples, some_to_none, none]


def drawn(B: int, T: int, d: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights, and what reaches the output."""
    return torch.randn(B, T, d, dtype=F64), torch.rand(B, T, k), torch.randn(B, T, d, dtype=F64)


def sections(name: str, grads_BEpd: Tensor) -> list[tuple[str, Tensor]]:
    """Every expert's share, and gate's and up's where they are side by side."""
    cut = grads_BEpd.chunk(2, dim=2) if "gate_up" in name else [grads_BEpd]
    return [
        (f"{name} {i}, expert {e}", part[:, e])
        for i, part in enumerate(cut)
        for e in range(part.shape[1])
    ]


def truth_of_samples(
    layer: MixtureOfExperts, x: Tensor, ids: Tensor, w: Tensor, G: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Per-sample gradients of parameters, tokens and weights, by ``torch.func``."""
    params = {name: param.detach() for name, param in layer.named_parameters()}
    scale = layer.lora_alpha / layer.rank if layer.rank else 0.0

    def weighted(p: dict[str, Tensor], x: Tensor, w: Tensor, ids: Tensor, G: Tensor) -> Tensor:
        return (plain(p, scale, x, ids, w) * G).sum()

    per_sample = torch.func.grad(weighted, argnums=(0, 1, 2))
    found: Any = torch.func.vmap(per_sample, in_dims=(None, 0, 0, 0, 0))(params, x, w, ids, G)
    return found


SIZES = [  # B, T, E, k, d, f, r
    (3, 5, 4, 2, 6, 7, 0),
    (3, 5, 4, 2, 6, 7, 4),
    (1, 9, 8, 3, 5, 4, 1),
    (4, 1, 8, 8, 4, 3, 2),
    (2, 60, 3, 1, 4, 3, 4),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", SIZES)
def test_every_section(size: tuple[int, ...], route: Any) -> None:
    B, T, E, k, d, f, r = size
    layer = layer_of(E, d, f, r)
    x, w, G = drawn(B, T, d, k)
    w, ids = w.double(), route(B, T, E, k)
    expected, grad_x, grad_w = truth_of_samples(layer, x, ids, w, G)
    w = w.masked_fill(ids < 0, float("nan"))  # of no expert: anything
    rule = find_rule(layer)
    assert rule is not None
    with torch.no_grad():
        y, saved = rule.forward(layer, x, ids, w)
        scale = layer.lora_alpha / r if r else 0.0
        assert_close(y, plain(dict(layer.named_parameters()), scale, x, ids, w), 1e-12, "output")
        needs = Needs((True, False, True), frozenset(expected), "auto")
        grads, factors = rule.backward(layer, saved, G, needs)
    assert_close(grads[0], grad_x, 1e-9, "tokens")
    assert_close(grads[2], grad_w, 1e-9, "weights")
    coef_B = torch.rand(B, dtype=F64)
    for name, truth in expected.items():
        for factor in (factors[name], Dense(factors[name].dense())):
            found = sections(name, factor.dense())
            for (section, grads_B), (_, truth_B) in zip(found, sections(name, truth), strict=True):
                assert_close(grads_B, truth_B, 1e-9, section)
            sq_B = truth.flatten(1).square().sum(1)
            assert_close(factor.sqnorms("auto"), sq_B, 1e-9, f"norms of {name}")
            total = (coef_B.view(-1, 1, 1, 1) * truth).sum(0)
            assert_close(factor.clipped_sum(coef_B, "auto"), total, 1e-9, f"sum of {name}")


@pytest.mark.parametrize("route", [routed, some_to_none])
@pytest.mark.parametrize("r", [0, 4])
def test_an_ordinary_backward(r: int, route: Any) -> None:
    """Unwrapped, against autograd through the formula."""
    layer, ids = layer_of(8, 6, 5, r), route(3, 5, 8, 3)
    x, w, G = drawn(3, 5, 6, 3)
    found = [x.requires_grad_(), w.double().requires_grad_(), *layer.parameters()]
    grads = torch.autograd.grad((layer(x, ids.int(), found[1]) * G).sum(), found)
    params, scale = dict(layer.named_parameters()), layer.lora_alpha / r if r else 0.0
    truth = torch.autograd.grad((plain(params, scale, x, ids, found[1]) * G).sum(), found)
    names = ["tokens", "weights", *params]
    for name, grad, expected in zip(names, grads, truth, strict=True):
        assert_close(grad, expected, 1e-9, name)


@pytest.mark.parametrize(("E", "k", "r"), [(8, 2, 4), (64, 4, 4), (256, 8, 16), (256, 8, 0)])
def test_float32(E: int, k: int, r: int) -> None:
    layer = layer_of(E, 12, 10, r, torch.float32)
    x, w, G = drawn(3, 20, 12, k)
    ids = routed(3, 20, E, k)
    wide = layer_of(E, 12, 10, r)
    wide.load_state_dict(layer.state_dict())
    expected, grad_x, grad_w = truth_of_samples(wide, x.float().double(), ids, w.double(), G)
    rule: Any = find_rule(layer)
    with torch.no_grad():
        _, saved = rule.forward(layer, x.float(), ids, w)
        needs = Needs((True, False, True), frozenset(expected), "auto")
        grads, factors = rule.backward(layer, saved, G.float(), needs)
    assert_close(grads[0], grad_x, 1e-5, "tokens")
    assert_close(grads[2], grad_w, 1e-5, "weights")
    for name, truth in expected.items():
        sq_B = truth.flatten(1).square().sum(1)
        assert_close(factors[name].sqnorms("auto"), sq_B, 1e-5, name)
        assert_close(factors[name].dense(), truth, 1e-5, name)


# -- in a model ------------------------------------------------------------------------------------


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
def test_models(r: int, positions: tuple[int, ...], mode: str) -> None:
    check_by_autograd(Model(r), inputs(4, *positions), squares, mode=mode)


@pytest.mark.parametrize("r", [0, 2])
def test_one_sample_and_none(r: int) -> None:
    check_by_autograd(Model(r), inputs(1, 5), squares)
    model = Model(r)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash(*inputs(0, 5)).sum().backward()
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("r", [0, 2])
def test_used_twice_and_checkpointed(r: int) -> None:
    model = Model(r)
    model.uses = 2
    check_by_autograd(model, inputs(3, 40), squares)
    model = Model(r)
    model.checkpointing = True
    check_by_autograd(model, inputs(3, 40), squares)


@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize("trained", ["gate_up", "down", "_B", "_A", "router", "before", ""])
def test_some_parameters(trained: str, r: int) -> None:
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


def test_low_ranks_are_stored_and_experts_are_not() -> None:
    """Per-sample gradients of 90 tokens' ranks take less than the rows that they are made of."""
    torch.manual_seed(0)
    layer: Any = MixtureOfExperts(32, 32, 4, rank=2)
    layer.gate_up.requires_grad_()
    rule: Any = find_rule(layer)
    x, w, G = (x.float() for x in drawn(2, 16, 32, 2))
    with torch.no_grad():
        _, saved = rule.forward(layer, x, routed(2, 16, 4, 2), w)
        needs = Needs((False, False, False), frozenset(layer._names), "auto")
        _, factors = rule.backward(layer, saved, G, needs)
    for name, factor in factors.items():
        assert factor.is_worth_storing(lambda: 1) == name.endswith(("_A", "_B")), name
        assert not factor.is_worth_storing(lambda: 0)


def test_a_token_is_saved_once() -> None:
    """However many experts read it; of the rest, what gate and up gave."""
    layer, ids = layer_of(8, 6, 5, 2), routed(3, 50, 8, 4)
    x, w, _ = drawn(3, 50, 6, 4)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, id):
        layer(x.requires_grad_(), ids, w.double())
    params = sum(param.numel() for param in layer.parameters())
    assert sum(saved) == x.numel() + w.numel() + ids.numel() * 2 * 5 + params


@pytest.mark.parametrize("r", [0, 4])
def test_low_precision(r: int) -> None:
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


def test_autocast() -> None:
    model = Model(2).float()
    truth = copy.deepcopy(model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    (x,) = (x.float() for x in inputs(4, 30))
    for module in (flash, truth):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        squares(lambda _, y=y: y.float(), (x,)).backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert_close(param.grad, 4 * truth.get_parameter(name).grad, 1e-2, name)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e300])
def test_a_sample_that_is_not_finite(poison: float, r: int) -> None:
    (x,) = inputs(4, 5)
    kept = torch.tensor([0, 1, 3])
    sums = []
    for rows in (x[kept], x):
        flash = GradSampleModuleFlashClipping(Model(r), max_grad_norm=0.5, loss_reduction="sum")
        (squares(flash, (rows,)) * len(rows)).backward()
        sums.append([p.grad for p in flash.parameters() if p.requires_grad])
        x[2, 1, 3] = poison
    for without, beside in zip(*sums, strict=True):
        assert_close(beside, without, 1e-9)


def test_the_second_step_is_as_the_first() -> None:
    """A forward without a backward in between leaves nothing behind; results are bitwise equal."""
    model, batch = Model(2), inputs(4, 30)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    steps = []
    for _ in range(2):
        flash.zero_grad()
        squares(flash, batch).backward()
        steps.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        squares(flash, batch)
        with torch.no_grad():
            flash(*batch)
    assert all(map(torch.equal, *steps))


def test_a_change_before_backward_is_noticed() -> None:
    for model in (Model(2), Model(0)):
        loss = squares(model, inputs(3, 5))
        with torch.no_grad():
            model.mixture.experts.down.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_update_is_seen() -> None:
    layer = layer_of(4, 6, 5, 2)
    x, w, _ = drawn(3, 5, 6, 2)
    ids = routed(3, 5, 4, 2)
    first = layer(x, ids, w.double())
    with torch.no_grad():
        layer.gate_up_A.mul_(2)
    params = dict(layer.named_parameters())
    expected = plain(params, 1.5, x, ids, w.double())
    assert not torch.equal(first, layer(x, ids, w.double()))
    assert_close(layer(x, ids, w.double()), expected, 1e-12)


def test_a_split_over_ranks_adds_up() -> None:
    """Gate and up by rows of f with their B, down by columns of f with its A."""
    whole = layer_of(4, 6, 8, 2)
    x, w, G = drawn(3, 5, 6, 2)
    w, ids = w.double(), routed(3, 5, 4, 2)
    (whole(x, ids, w) * G).sum().backward()
    y, grads = 0, {name: [] for name in whole._names}
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        part = layer_of(4, 6, 4, 2)
        with torch.no_grad():
            part.gate.copy_(whole.gate[:, rows])
            part.up.copy_(whole.up[:, rows])
            part.down.copy_(whole.down[..., rows])
            part.gate_up_A.copy_(whole.gate_up_A)
            part.gate_B.copy_(whole.gate_B[:, rows])
            part.up_B.copy_(whole.up_B[:, rows])
            part.down_A.copy_(whole.down_A[..., rows])
            part.down_B.copy_(whole.down_B)
        out = part(x, ids, w)
        (out * G).sum().backward()
        y = y + out
        for name in grads:
            grads[name].append(part.get_parameter(name).grad)
    assert_close(y, whole(x, ids, w), 1e-12)
    for name, parts in grads.items():
        if name in ("gate_up_A", "down_B"):
            found = parts[0] + parts[1]
        elif name == "gate_up":
            halves = [half for g in zip(*(p.chunk(2, 1) for p in parts), strict=True) for half in g]
            found = torch.cat(halves, 1)
        else:
            found = torch.cat(parts, 2 if name.startswith("down") else 1)
        assert_close(found, whole.get_parameter(name).grad, 1e-12, name)


# -- the router ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_the_router_is_trained(normalize: bool) -> None:
    check_by_autograd(Model(normalize=normalize), inputs(4, 5), squares)


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


def test_balancing_of_samples() -> None:
    check_by_autograd(Balanced(balance="sample"), inputs(4, 9), balanced_loss)
    probabilities = torch.full((2, 6, 3), 1 / 3)
    ids = torch.arange(3).repeat(2).view(1, 6, 1).expand(2, 6, 1)
    assert_close(balance_of_samples(probabilities, ids), torch.ones(2), 1e-6)


def test_balancing_of_a_batch_is_not_offered() -> None:
    with pytest.raises(ValueError, match="mixes samples"):
        TopKRouter(6, 5, 2, balance="batch")


def test_another_router() -> None:
    """Scores and choices of whatever sees one token at a time."""

    class Hashed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            ids = (x[..., :2] * 10).long() % 5
            return ids.to(torch.int32), x[..., 2:4].sigmoid()

    model = Model(2)
    model.mixture.router = Hashed()
    check_by_autograd(model, inputs(4, 7), squares)


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
    with pytest.raises(ValueError, match=r"found x \(3, 5, 6\), expert_ids \(3, 5, 2\)"):
        model(*inputs(3, 5))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="lora_alpha"):
        MixtureOfExperts(6, 5, 4, lora_alpha=2.0)
    with pytest.raises(ValueError, match="experts=0"):
        MixtureOfExperts(6, 5, 0)
    with pytest.raises(ValueError, match="k=5"):
        TopKRouter(6, 4, 5)


def test_a_parameter_that_is_computed_is_refused() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = Model()
    nn.utils.parametrize.register_parametrization(model.mixture.experts, "down", Double())
    squares(model, inputs(3, 5)).backward()  # unwrapped it is trained
    assert model.mixture.experts.parametrizations.down.original.grad is not None
    flash = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError, match="ParametrizedMixtureOfExperts"):
        squares(flash, inputs(3, 5)).backward()


def test_tokens_end_to_end_are_refused() -> None:
    """``[B·T, d]``: more rows than samples."""

    class Flat(Model):
        def body(self, x: Tensor) -> Tensor:
            return self.mixture(self.before(x).flatten(0, 1)).view_as(x)

    flash = GradSampleModuleFlashClipping(Flat())
    with pytest.raises(FlashClippingError, match="mixture"):
        squares(flash, inputs(3, 5)).backward()
