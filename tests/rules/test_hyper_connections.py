"""Hyper-connections: private, ordinary, and as other libraries have them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import HyperConnections
from flash_clipping.ops.runtime.backend import is_interpreting
from flash_clipping.rules import GradRequest, find_rule
from tests.support.autograd import float64s, squares, truth_by_autograd
from tests.support.errors import raises
from tests.support.hyper_connections import NAMES, connect, mix, params_of, sections
from tests.support.oracle import assert_close
from tests.support.pages import block
from tests.support.sums import norm_of
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


class Plain(HyperConnections):
    """The same module as tests write it out, for autograd."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own: Any = self
        flat = x.reshape(-1, self.streams, self.dim)
        results = torch.func.vmap(lambda x_nD: connect(x_nD, own, *own.settings))(flat)
        h, post, comb = (r.reshape(*x.shape[:-2], *r.shape[1:]) for r in results)
        return h, post, comb

    def combine(self, x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        inputs = [t.flatten(0, x.dim() - 3) for t in (x, y, post, comb)]  # a row for each position
        mixed = torch.func.vmap(lambda *one: mix(*one, self.transposed))(*inputs)
        return mixed.view(x.shape)


def scramble(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every module's parameters far from where they begin, gamma among them."""
    for i, part in enumerate(module.modules()):
        if isinstance(part, HyperConnections):
            values = params_of(part.streams, part.dim, seed + i)
            for name, value in zip(NAMES, values, strict=True):
                getattr(part, name).data.copy_(value)
    return module


class Block(nn.Module):
    def __init__(self, dim: int, streams: int, kind: type[HyperConnections], **options: Any):
        super().__init__()
        self.hc = kind(dim, streams, **options)
        self.layer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h, post, comb = self.hc(x)
        return self.hc.combine(x, torch.tanh(self.layer(h)), post, comb)


class Decoder(nn.Module):
    """Its first block reads streams that need no gradient where ``embed`` is False."""

    def __init__(
        self,
        streams: int = 4,
        dim: int = 6,
        kind: type[HyperConnections] = HyperConnections,
        embed: bool = True,
        **options: Any,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.streams, self.dim = streams, dim
        self.embed = nn.Linear(dim, dim) if embed else nn.Identity()
        self.blocks = nn.Sequential(*(Block(dim, streams, kind, **options) for _ in range(2)))
        scramble(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        streams = torch.stack([hidden.roll(i, -1) for i in range(self.streams)], -2)
        weights = torch.linspace(-1, 2, self.streams, dtype=x.dtype, device=x.device)
        # Not their plain sum, which no doubly stochastic matrix changes.
        out: Tensor = (self.blocks(streams) * weights.unsqueeze(-1)).sum(-2)
        return out


def plain_copy(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is HyperConnections:
            module.__class__ = Plain
    return model


def check(
    model: Decoder,
    batch: tuple[Tensor, ...],
    tolerance: float = 1e-9,
    wrapper: str = "wrapped",
    mode: str = "one_pass",
) -> None:
    """Norms and clipped sums of every parameter, and of every section, in two steps."""
    wide = tuple(x.double() for x in batch)
    truth = truth_by_autograd(plain_copy(model).double(), wide, squares)
    bound = truth.norms.median().item()
    flash = WRAPPERS[wrapper](model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        squares(flash if wrapper == "wrapped" else model, batch).backward()
        assert_close(flash.get_norm_sample(), truth.norms, tolerance, "norms")
        for name, expected in truth.clipped(bound).items():
            param: Any = model.get_parameter(name)
            assert_close(norm_of(flash, param), truth.param_norms[name], tolerance, name)
            assert_close(param.grad, expected, 10 * tolerance, name)
            if ".hc." in name:
                kind = name.rpartition(".")[2]
                wanted = sections(kind, expected[None], model.streams)
                for part, grad in sections(kind, param.grad[None], model.streams).items():
                    assert_close(grad, wanted[part], 10 * tolerance, f"{part} of {name}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_norms_and_clipped_sums(wrapper: str, mode: str) -> None:
    check(Decoder().double(), float64s(3, 5, 6), wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("positions", [(), (1,), (5,), (30,), (3, 4)], ids=str)
@pytest.mark.parametrize("streams", [2, 4, 8])
def test_streams_and_positions_match_autograd(streams: int, positions: tuple[int, ...]) -> None:
    """Fewer positions than logits, more of them, one, and on several axes."""
    check(Decoder(streams).double(), float64s(3, *positions, 6))


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("trained", [*NAMES, "layer", "hc"])
def test_parts_that_are_trained_alone_match_autograd(trained: str, embed: bool) -> None:
    model = Decoder(2, embed=embed).double()
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name.split("."))
    check(model, float64s(3, 9, 6))


def test_comb_without_transpose_matches_autograd() -> None:
    check(Decoder(transposed=False).double(), float64s(3, 5, 6))
    assert "transposed=False" in repr(HyperConnections(4, transposed=False))


@pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled for the GPU in this run")
@pytest.mark.filterwarnings("error::flash_clipping.ops.TritonFallbackWarning")
def test_kernels_in_a_rule() -> None:
    found = []
    for backend in ("triton", "torch"):
        layer = scramble(HyperConnections(6, 2, iterations=3, backend=backend))
        rule, needs = find_rule(layer), GradRequest((True,), frozenset(NAMES), backend)
        assert rule is not None
        outputs, saved = rule.forward(layer, torch.linspace(-1, 1, 2 * 9 * 12).view(2, 9, 2, 6))
        dx, factors = rule.backward(layer, saved, tuple(map(torch.sin, outputs)), needs)
        found.append([*outputs, dx, *(factors[name].dense() for name in NAMES)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::flash_clipping.ops.TritonFallbackWarning")
@pytest.mark.parametrize("positions", [5, 200])
def test_kernels_in_a_step_on_the_gpu(positions: int) -> None:
    model, x = Decoder(dim=96), torch.randn(3, positions, 96)
    truth = truth_by_autograd(plain_copy(model).double(), (x.double(),), squares)
    flash = GradSampleModuleFlashClipping(model.cuda(), max_grad_norm=1.0)
    squares(lambda x: flash(x.cuda()).cpu(), (x,)).backward()
    assert_close(flash.get_norm_sample().cpu(), truth.norms, 1e-4, "norms")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("tested: hyper-connections", "docs/hyper-connections.md"), {})  # noqa: S102
    assert "tensor([" in capsys.readouterr().out


# -- not wrapped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(), (5,), (2, 5)])
def test_streams_may_be_changed_in_place(positions: tuple[int, ...]) -> None:
    """As decoders add to hidden states. A hook that was there before still runs: ``fully_shard``
    gathers a block's parameters by one on what the block returns."""
    block, seen = scramble(Block(6, 4, HyperConnections)), []
    streams = torch.randn(3, *positions, 4, 6)
    x = block(streams)
    x.register_hook(seen.append)
    x += 1
    x.square().sum().backward()
    assert len(seen) == 1
    found = [param.grad for param in block.parameters()]
    expected = torch.autograd.grad((block(streams) + 1).square().sum(), [*block.parameters()])
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert_close(one, other, 1e-6)


def test_inside_a_compiled_private_model() -> None:
    """By itself, between two graphs, as any layer with a rule of its own."""
    model = scramble(Block(6, 2, HyperConnections, iterations=2)).double()
    (x,) = float64s(3, 5, 2, 6)
    truth = truth_by_autograd(plain_copy(model), (x,), squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash.compile(backend="aot_eager")
    squares(flash, (x,)).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9, "norms")


def test_autocast_changes_nothing() -> None:
    hc = scramble(HyperConnections(40))
    x = torch.randn(2, 5, 4, 40)
    expected = hc(x)
    with torch.autocast("cpu", torch.bfloat16):
        for found, one in zip(hc(x), expected, strict=True):
            assert torch.equal(found, one)


def test_new_connections_are_one_residual_stream() -> None:
    hc = HyperConnections(40).double()
    hc.alpha.data.zero_()
    x = torch.randn(2, 5, 1, 40, dtype=torch.float64).expand(2, 5, 4, 40)
    h, post, comb = hc(x)
    assert_close(h, x[:, :, 0], 1e-4)
    y = torch.randn_like(h)
    assert_close(hc.combine(x, y, post, comb), x + y.unsqueeze(2), 1e-4)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with raises("FC302", ValueError, match=r"streams: found 1; .*\[2, 8\]"):
        HyperConnections(8, 1)
    with raises("FC302", ValueError, match="hc_eps=0"):
        HyperConnections(8, hc_eps=0)
    with raises("FC301", ValueError, match="backend='cuda' is unknown"):
        HyperConnections(8, backend="cuda")
    hc = HyperConnections(8)
    with raises("FC303", ValueError, match=r"x has shape \(2, 5, 8\).*expand\(-1, -1, 4, -1\)"):
        hc(torch.randn(2, 5, 8))
    x = torch.randn(2, 5, 4, 8)
    _, post, comb = hc(x)
    with raises("FC303", ValueError, match=r"y has shape \(2, 4, 8\); expected \(2, 5, 8\)"):
        hc.combine(x, torch.randn(2, 4, 8), post, comb)


# -- other libraries ------------------------------------------------------------------------------


def test_connections_match_those_of_transformers() -> None:
    """A whole decoder layer of DeepSeek-V4, with simple functions for its sublayers."""
    theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = SimpleNamespace(
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=24
    )
    ours = [scramble(HyperConnections(24), seed) for seed in (1, 2)]
    their_own = [theirs.DeepseekV4HyperConnection(config) for _ in ours]
    for one, other in zip(ours, their_own, strict=True):
        one.gamma.data.fill_(1)  # they have none
        for name, their_name in (("phi", "fn"), ("alpha", "scale"), ("bias", "base")):
            getattr(other, their_name).data.copy_(getattr(one, name))
    layer = SimpleNamespace(
        attn_hc=their_own[0],
        ffn_hc=their_own[1],
        input_layernorm=torch.sin,
        post_attention_layernorm=torch.cos,
        self_attn=lambda h: (2 * h, None),
        mlp=lambda h, input_ids: 3 * h,
    )
    x = torch.randn(2, 5, 4, 24)
    expected = theirs.DeepseekV4DecoderLayer.forward(layer, x)
    found = x
    for hc, sublayer in zip(ours, (lambda h: 2 * h.sin(), lambda h: 3 * h.cos()), strict=True):
        h, post, comb = hc(found)
        found = hc.combine(found, sublayer(h), post, comb)
    assert_close(found, expected, 1e-5)
    weights = torch.randn_like(x)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for one, other in zip(ours, their_own, strict=True):
        for name, their_name in (("phi", "fn"), ("alpha", "scale"), ("bias", "base")):
            assert_close(getattr(one, name).grad, getattr(other, their_name).grad, 1e-5, name)
