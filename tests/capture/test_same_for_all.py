"""What is the same for all samples, in compiled models: exact, or refused with a name.

Without a compiler first, function by function; then compiled, against one sample at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.unbatched import Unbatched, same_for_all
from tests.support.autograd import (
    Loss,
    float64s,
    id_batch,
    mean_squares,
    squares,
    truth_by_autograd,
)
from tests.support.errors import raises, warns
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

Function = Callable[[Any, Tensor], Any]

#: Functions of a value ``z [1, T, 3]`` that is the same for all samples, and samples ``[B, T, 3]``.
SERVED: dict[str, Function] = {
    "added": lambda z, x: x + z,
    "added on the left": lambda z, x: z + x,
    "subtracted": lambda z, x: z - x * 2,
    "multiplied": lambda z, x: x * z * 0.5,
    "divided": lambda z, x: x / (z.exp() + 1),
    "divided by": lambda z, x: (2 / (z.square() + 1)) * x,
    "in place": lambda z, x: (x * 1.0).add_(z),
    "its first row": lambda z, x: x + z[0],
    "a slice": lambda z, x: x[:, :2] + z[:, :2],
    "one position": lambda z, x: x + z[:, -1:] + z[0, 0],
    "more axes": lambda z, x: x[:, None] * z.unsqueeze(0) + z[..., None, :, :],
    "transposed": lambda z, x: x.mT + z.transpose(1, 2) + z.permute(0, 2, 1),
    "flat": lambda z, x: x.flatten(1) + z.view(1, -1) + z.reshape(-1),
    "cast": lambda z, x: x + z.to(x.device).to(torch.float64).type_as(x),
    "expanded": lambda z, x: x + z.expand(len(x), -1, -1),
    "expanded like": lambda z, x: x * z.expand_as(x),
    "expanded rows, again": lambda z, x: (
        x + z.expand(len(x), -1, -1)[:, :, :1].expand(len(x), -1, 3)
    ),
    "a vector expanded": lambda z, x: x + z[0, 0].expand(x.shape[0], x.shape[1], 3),
    "a token for each": lambda z, x: torch.cat([z[:, :1].expand(len(x), -1, -1), x], dim=1),
    "a token repeated": lambda z, x: torch.cat((x, z[0, :1].repeat(len(x), 2, 1)), 1),
    "tokens for each": lambda z, x: torch.cat([z.expand(len(x), -1, -1)[:, 1:].tanh(), x], dim=-2),
    "concatenated before": lambda z, x: x + torch.cat([z[:, :1], z[:, 1:]], dim=1),
    "chosen": lambda z, x: torch.where(x > 0, x, z),
    "beside itself": lambda z, x: x + (z + z[0, 0]) * z,
    "rows beside itself": lambda z, x: x + z.expand_as(x) * z + z.expand_as(x) * z.expand_as(x),
    "no dropout": lambda z, x: x + F.dropout(z, 0.3, training=False),
    "detached": lambda z, x: x + z * z.detach(),
    "the first of its rows": lambda z, x: x + z.expand_as(x)[:1],
    "rows of another number": lambda z, x: x + z * z.expand(7, -1, -1).shape[0],
    "told by its shape": lambda z, x: x + z * (len(z.shape) + z.size(-1) + z.dim() + z.ndim),
    "mean": lambda z, x: x + z.mean(1, keepdim=True),
    "mean of rows": lambda z, x: x + z.expand_as(x).mean(0),
    "rows in another order": lambda z, x: x + z.expand_as(x).flip(0),
    "sum": lambda z, x: x * z.sum(),
    "product": lambda z, x: x + torch.einsum("atd,std->ad", z, z)[:, None],
    "normalized": lambda z, x: x + F.layer_norm(z, (3,)) * torch.softmax(z, -1),
    "a constant": lambda z, x: x + z * x.new_ones(1, x.shape[1], 3),
    "a frozen parameter": lambda z, x: x + z * nn.Parameter(torch.arange(3.0), requires_grad=False),
    "by name": lambda z, x: x.add(other=z),
    "limits of samples": lambda z, x: x + z.clamp(x.detach()),
    "limits": lambda z, x: x + torch.clamp(torch.zeros(1, 3).double(), max=z),
    "iterated over": lambda z, x: x + sum(row for row in z),
    "in parts": lambda z, x: (
        x + torch.cat(torch.split(z, [1, 2], -1)[::-1], -1) * z.chunk(3, -1)[1]
    ),
    "rows and columns": lambda z, x: x + z.expand_as(x).reshape(len(x), -1).view(x.shape),
}

#: Functions that mix samples, that draw random numbers or write into tensors, or that meet
#: parameters of other modules.
MISUSED: dict[str, Function] = {
    "sum of rows": lambda z, x: x + z.expand_as(x).sum(0),
    "chosen by number": lambda z, x: x + z[:, torch.arange(x.shape[1])],
    "looked up": lambda z, x: x + F.embedding(x[..., 0].long() * 0, z[0]),
    "linear": lambda z, x: x + F.linear(z, torch.eye(3).double()),
    "product of rows": lambda z, x: x + (z.flatten(1).expand(len(x), -1).mT @ x.flatten(1))[:3, :3],
    "rows laid flat": lambda z, x: x + z.expand_as(x).flatten(0, 1).view(x.shape),
    "dropout": lambda z, x: x + F.dropout(z, 0.3),
    "a parameter": lambda z, x: x + z * nn.Parameter(torch.ones(3, dtype=x.dtype)),
    "rows of a parameter": lambda z, x: x + z * nn.Parameter(x.new_ones(len(x), 1, 3)),
    "written into": lambda z, x: (x * 1.0).index_put_((torch.tensor([0]),), z[0]),
    "assigned": lambda z, x: x.new_zeros(x.shape).copy_(z) + x,
    "its number": lambda z, x: x * z[0, 0, 0].item(),
    "after the samples": lambda z, x: torch.cat([x, z.expand_as(x)], dim=0),
    "before the samples": lambda z, x: torch.cat([z, x], dim=0),
}


@pytest.mark.parametrize("shape", [(4, 5), (5, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_rows_of_gradients_are_those_of_samples(name: str, shape: tuple[int, int]) -> None:
    function, (B, T) = SERVED[name], shape
    torch.manual_seed(0)
    z, x = torch.randn(1, T, 3).double().requires_grad_(), torch.randn(B, T, 3).double()
    if T == 1 and name == "tokens for each":
        return
    z_B = z.detach().expand(B, 1, T, 3).clone().requires_grad_()
    found = function(same_for_all(z_B, "z"), x)
    assert type(found) is Tensor and found.shape[0] == B
    (rows,) = torch.autograd.grad(mean_squares(found) * B, z_B)
    for b in range(B):
        output = function(z, x[b : b + 1])
        assert_close(found[b : b + 1], output, 1e-12)
        (expected,) = torch.autograd.grad(mean_squares(output), z)
        assert_close(rows[b], expected, 1e-12)


@pytest.mark.parametrize("shape", [(4, 5), (5, 5)], ids=str)
@pytest.mark.parametrize("name", MISUSED)
def test_what_may_mix_samples_is_refused(name: str, shape: tuple[int, int]) -> None:
    B, T = shape
    z_B = torch.randn(1, 1, T, 3).expand(B, 1, T, 3).double().requires_grad_()
    with raises("FC714"):
        MISUSED[name](same_for_all(z_B, "z"), torch.randn(B, T, 3).double())


def test_its_axis_is_no_position() -> None:
    """``[T, 3]`` beside ``[B, 3]``, of one size: row ``b`` is that of sample ``b``."""
    z_B = same_for_all(torch.randn(5, 5, 3).double().requires_grad_(), "z")
    assert z_B.shape == (5, 3)
    with raises("FC714", match="add"):
        z_B + torch.randn(5, 3).double()


# -- compiled --------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[Callable[..., GradSampleModuleFlashClipping]]:
    def compiled(model: nn.Module, fullgraph: bool = True) -> GradSampleModuleFlashClipping:
        module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5, strict=False)
        module.compile(backend="eager", fullgraph=fullgraph)
        return module

    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


def check(
    module: GradSampleModuleFlashClipping,
    plain: nn.Module,
    batch: tuple[Tensor, ...],
    loss: Loss = squares,
    tolerance: float = 1e-9,
    steps: int = 1,
) -> None:
    truth = truth_by_autograd(copy.deepcopy(plain), batch, loss)
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        loss(module, batch).backward()
        assert_close(module.get_norm_sample(), truth.norms, tolerance, "norms")
        scale = truth.norms.max() * tolerance
        for name, grad in truth.clipped(0.5).items():
            found = module._module.get_parameter(name).grad
            found = torch.zeros_like(grad) if found is None else found
            assert (found - grad).abs().max() <= scale, name
    assert not any(isinstance(p, Unbatched) for p in module._module.parameters())


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)


class Constants(nn.Module):
    """Positions as Hugging Face's models have them, a token, a gain, and a layer between."""

    def __init__(self, checkpointing: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.embed, self.norm, self.mix = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.token, self.gain = Token(), nn.ParameterList([nn.Parameter(torch.rand(4))])
        self.positions = nn.Parameter(torch.randn(1, 9, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpointing:
            x = checkpoint(self.body, x, use_reentrant=False)
        else:
            x = self.body(x)
        x = self.token(x) * self.gain[0]
        return self.last(torch.tanh(x + self.positions[:, : x.shape[1]]))

    def body(self, x: Tensor) -> Tensor:
        looked_up = self.embed(torch.arange(x.shape[1])[None])
        return torch.tanh(x + self.mix(self.norm(looked_up)).to(x.device))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_constants_of_many_kinds(checkpointing: bool, compiler: Any) -> None:
    """Also batches as long as they are large, and of one sample."""
    plain = Constants().double()
    module = compiler(Constants(checkpointing).double())
    shapes = [(3, 5), (5, 5), (1, 5)] if not checkpointing else [(3, 5)]
    for shape in shapes:
        check(module, plain, float64s(*shape, 4))


class Using(nn.Module):
    def __init__(self, use: Function):
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.first, self.last, self.embed = nn.Linear(4, 3), nn.Linear(3, 2), nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.use(self.embed(torch.arange(x.shape[1])[None]), x))


@pytest.mark.parametrize("name", ["rows laid flat", "dropout"])
def test_misuse_is_refused_with_a_name_before_it_is_compiled(name: str, compiler: Any) -> None:
    module = compiler(Using(MISUSED[name]).double())
    with raises("FC710", match=r"embed \(Embedding\): it computes what is the sa"):
        squares(module, float64s(4, 5, 4))


def test_a_constant_with_as_many_rows_as_samples_is_none(compiler: Any) -> None:
    """By its shape alone, it could be the samples."""
    use: Function = lambda z, x: x + z[0, 0] * x.new_ones(x.shape[1], 3)  # noqa: E731
    module = compiler(Using(use).double())
    with raises("FC710", match=r"embed \(Embedding\): it was not shown"):
        for _ in range(2):
            squares(module, float64s(5, 5, 4)).backward()


def test_misuse_between_two_graphs(compiler: Any) -> None:
    plain = Using(MISUSED["rows laid flat"]).double()
    with warns("FC711", match=r"embed \(Embedding\)"):
        check(compiler(copy.deepcopy(plain), fullgraph=False), plain, float64s(4, 5, 4), steps=2)


def test_misuse_that_only_some_lengths_have(compiler: Any) -> None:
    """What follows from two lengths holds for the third: it is compiled without being learned."""

    def use(z: Any, x: Tensor) -> Tensor:
        return x + (z.expand_as(x).sum(0) if x.shape[1] > 6 else z)

    plain = Using(use).double()
    module = compiler(copy.deepcopy(plain))
    for shape in [(4, 5), (3, 4)]:
        check(module, plain, float64s(*shape, 4))
    with raises("FC710", (FlashClippingError, RuntimeError), match="the same for all samples"):
        squares(module, float64s(3, 7, 4)).backward()


# -- models of Hugging Face ------------------------------------------------------------------------


def logits_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_squares(model(*batch).logits)


SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=17,
        intermediate_size=16,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        **SMALL,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def test_a_model_of_hugging_face(compiler: Any) -> None:
    torch.manual_seed(0)
    plain = llama().double().train()
    module = compiler(copy.deepcopy(plain))
    # Its norms are computed in float32, whatever the model is.
    check(module, plain, id_batch(4, 6, vocabulary=17), logits_loss, 1e-6)
