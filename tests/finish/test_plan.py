"""What is remembered between steps must never answer for a step of another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, Kernels
from flash_clipping.factors import SumGrad
from flash_clipping.finish.plan import plan_of
from flash_clipping.ops.rows import WIDE
from flash_clipping.ops.runtime import backend
from flash_clipping.ops.runtime.backend import is_interpreting
from tests.support.errors import warns
from tests.support.oracle import Truth, assert_close, per_sample_truth
from tests.support.sums import norm_of

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not is_interpreting(), reason="no kernels")),
]


class Small(nn.Module):
    """Linear maps, two of one input, norm layers and an embedding, all handled many at a time.

    ``how`` says how the second linear map is read: shapes are the same every time.
    """

    def __init__(self, how: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        # Wide beside the number of positions, so that their gradients are not stored.
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 40)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        # An axis more, so that the two see different views of what they may share.
        one, two = self.one(x.unsqueeze(2)), self.two(self.how(x).unsqueeze(2))
        return self.head(self.last(torch.tanh(one) * two).squeeze(2))


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits, labels = model(batch[0]), batch[1]
    # Classes stay next to each other: operands that must be copied are not remembered.
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape).sum(1)


def draw(samples: int, positions: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (samples, positions), generator=generator)
    return ids, torch.randint(40, (samples, positions), generator=generator)


def doubled(x: Tensor) -> Tensor:
    """Other numbers, laid out as before."""
    return 2 * x


def truth_of(wrapped: GradSampleModuleFlashClipping, batch: tuple[Tensor, Tensor]) -> Truth:
    """Of an unwrapped model with the same parameters."""
    model = Small(doubled if wrapped._module.how is doubled else torch.clone)
    model.load_state_dict(wrapped._module.state_dict())
    for name, param in wrapped._module.named_parameters():
        model.get_parameter(name).requires_grad_(param.requires_grad)
    return per_sample_truth(model, batch, losses)


def check_step(wrapped: GradSampleModuleFlashClipping, batch: tuple[Tensor, Tensor]) -> None:
    wrapped.zero_grad()
    losses(wrapped, batch).mean().backward()
    truth = truth_of(wrapped, batch)
    assert_close(wrapped.get_norm_sample(), truth.norms, 1e-5, "norms")
    for name, param in wrapped._module.named_parameters():
        assert_close(norm_of(wrapped, param), truth.param_norms[name], 1e-5, name)
    clipped = truth.clipped(wrapped.max_grad_norm)
    for name, param in wrapped._module.named_parameters():
        assert param.grad is not None
        assert_close(param.grad, clipped[name], 1e-5, name)


@pytest.fixture
def wrapped(request: pytest.FixtureRequest) -> Iterator[GradSampleModuleFlashClipping]:
    torch.manual_seed(0)
    yield GradSampleModuleFlashClipping(Small(), max_grad_norm=0.5, kernels=Kernels(request.param))


@pytest.mark.parametrize("wrapped", BACKENDS[:1], indirect=True)
def test_batches_of_changing_sizes(wrapped: GradSampleModuleFlashClipping) -> None:
    sizes = [(3, 4), (5, 4), (3, 4), (3, 7)]
    for seed, (samples, positions) in enumerate(sizes):
        check_step(wrapped, draw(samples, positions, seed))
    assert len(wrapped._session.calls.plans._plans) == 3


def transposed(x: Tensor) -> Tensor:
    """The same numbers, positions next to each other."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def time_first(x: Tensor) -> Tensor:
    """The same numbers, positions outermost."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def shifted(x: Tensor) -> Tensor:
    """The same numbers, one element off the boundary that allocations begin at."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view_as(x).copy_(x)


@pytest.mark.parametrize("wrapped", BACKENDS, indirect=True)
def test_same_shapes_laid_out_otherwise(wrapped: GradSampleModuleFlashClipping) -> None:
    """Read together or apart, by rows or by columns: the plan of one may not serve the other."""
    model = wrapped._module
    same = model.how
    for seed, how in enumerate([same, doubled, same, transposed, time_first, shifted, same]):
        model.how = how
        check_step(wrapped, draw(3, 6, seed))


@pytest.mark.parametrize("wrapped", BACKENDS[:1], indirect=True)
@pytest.mark.parametrize("part", ["two", "two.bias"])
def test_parameters_frozen_and_thawed(wrapped: GradSampleModuleFlashClipping, part: str) -> None:
    """A layer, and a bias beside its weight."""
    named = wrapped._module.named_parameters()
    params = [param for name, param in named if name.startswith(part)]
    batch = draw(3, 4, 0)
    for trainable in (True, False, True, False):
        for param in params:
            param.requires_grad_(trainable)
        wrapped.zero_grad(set_to_none=True)
        losses(wrapped, batch).mean().backward()
        truth = truth_of(wrapped, batch)
        assert_close(wrapped.get_norm_sample(), truth.norms, 1e-5, "norms")
        assert all((param.grad is not None) == trainable for param in params)
        assert not trainable or all(param.grad.any() for param in params)


def test_who_is_trainable_counts_even_where_backward_does_not_come() -> None:
    """One parameter in place of another of its shape: the one that takes part gets its zeros."""
    model = nn.Sequential(nn.Linear(4, 3))
    model.spare, model.other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    wrapped = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for taking_part, left_out in ((model.spare, model.other), (model.other, model.spare)):
        taking_part.requires_grad_(True)
        left_out.requires_grad_(False)
        wrapped.zero_grad(set_to_none=True)
        wrapped(torch.randn(3, 4)).sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in taking_part.parameters())
        assert all(p.grad is None for p in left_out.parameters())


@pytest.mark.parametrize("wrapped", BACKENDS, indirect=True)
def test_per_layer_bounds_after_a_flat_one(wrapped: GradSampleModuleFlashClipping) -> None:
    batch = draw(3, 4, 0)
    check_step(wrapped, batch)
    params = list(wrapped._module.named_parameters())
    wrapped.clipping = "per_layer"
    wrapped.max_grad_norm = [0.01 * (n + 1) for n in range(len(params))]
    wrapped.zero_grad()
    losses(wrapped, batch).mean().backward()
    truth = truth_of(wrapped, batch)
    for (name, param), bound in zip(params, wrapped.max_grad_norm, strict=True):
        coef_B = (bound / (truth.param_norms[name] + 1e-6)).clamp(max=1)
        expected = torch.einsum("b,b...->...", coef_B, truth.grads[name])
        assert param.grad is not None
        assert_close(param.grad, expected, 1e-5, name)


def test_very_wide_vectors_are_summed_apart() -> None:
    """Each vector of a launch has room for as many parts of its norm as the widest."""
    sizes = (8, WIDE + 1, 16, WIDE, 2 * WIDE)
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    factors = {
        id(param): SumGrad(torch.zeros(2, 3, n)) for param, n in zip(params, sizes, strict=True)
    }
    plan = plan_of(factors, params, dict.fromkeys(factors, "a layer"))
    assert plan.sums == [[id(params[i]) for i in members] for members in ((0, 2, 3), (1, 4))]


@pytest.mark.parametrize("wrapped", BACKENDS[1:], indirect=True)
def test_a_kernel_that_fails_between_steps_leaves_norms_in_order(
    wrapped: GradSampleModuleFlashClipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take the norms of wide layers first, the reference those of one group at a time."""
    kernels = pytest.importorskip("flash_clipping.ops.gram.triton")
    monkeypatch.setattr(backend, "_broken", set())
    monkeypatch.setattr(backend, "_warned", set())
    for seed in range(2):
        check_step(wrapped, draw(3, 4, seed))

    def fails(*_: object) -> None:
        raise RuntimeError("no more kernels today")

    monkeypatch.setattr(kernels, "gram_blocks", fails)
    with warns("FC720", backend.TritonFallbackWarning, match="no more kernels today"):
        check_step(wrapped, draw(3, 4, 2))
    check_step(wrapped, draw(3, 4, 3))
