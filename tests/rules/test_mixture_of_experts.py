"""``MixtureOfExperts``: every part by itself against a formula that knows nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping.factors import DenseGrad
from flash_clipping.layers import MixtureOfExperts
from flash_clipping.rules import GradRequest, find_rule
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

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
def test_section_of_every_parameter_matches_torch_func(size: tuple[int, ...], route: Any) -> None:
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
        needs = GradRequest((True, False, True), frozenset(expected), "auto")
        grads, factors = rule.backward(layer, saved, G, needs)
    assert_close(grads[0], grad_x, 1e-9, "tokens")
    assert_close(grads[2], grad_w, 1e-9, "weights")
    coef_B = torch.rand(B, dtype=F64)
    for name, truth in expected.items():
        for factor in (factors[name], DenseGrad(factors[name].dense())):
            found = sections(name, factor.dense())
            for (section, grads_B), (_, truth_B) in zip(found, sections(name, truth), strict=True):
                assert_close(grads_B, truth_B, 1e-9, section)
            sq_B = truth.flatten(1).square().sum(1)
            assert_close(factor.sqnorms("auto"), sq_B, 1e-9, f"norms of {name}")
            total = (coef_B.view(-1, 1, 1, 1) * truth).sum(0)
            assert_close(factor.clipped_sum(coef_B, "auto"), total, 1e-9, f"sum of {name}")


@pytest.mark.parametrize("route", [routed, some_to_none])
@pytest.mark.parametrize("r", [0, 4])
def test_ordinary_backward_matches_autograd(r: int, route: Any) -> None:
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


@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize("T", [6, 80])
def test_rows_that_cancel_are_in_the_bound(T: int, r: int) -> None:
    """Tokens of one sample whose gradients nearly cancel: a norm is never less than that of what is
    released, though the rows are a million times as long."""
    layer = layer_of(3, 6, 5, r, torch.float32)
    rule: Any = find_rule(layer)
    x, _, G = (t.float() for t in drawn(2, T // 2, 6, 1))
    x = torch.cat([x, x], 1)
    G = torch.cat([1e6 * G, -1e6 * G + 0.1 * torch.randn_like(G)], 1)
    ids, w = torch.zeros(2, T, 1, dtype=torch.int64), torch.ones(2, T, 1)
    with torch.no_grad():
        _, saved = rule.forward(layer, x, ids, w)
        needs = GradRequest((False, False, False), frozenset(layer._names), "auto")
        _, factors = rule.backward(layer, saved, G, needs)
    for name, factor in factors.items():
        doubt_B = factor.error_bound("auto")
        bound_B = factor.sqnorms("auto") + (0 if doubt_B is None else doubt_B)
        for b in range(2):
            released = factor.clipped_sum(torch.eye(2)[b], "auto").double().square().sum()
            assert released <= bound_B[b] * (1 + 1e-4), name
