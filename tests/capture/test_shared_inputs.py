"""Layers that read one input: query, key and value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = pytest.mark.without_gate


class Attention(nn.Module):
    """Three layers and more that read one input, between two of others."""

    def __init__(self, width: int = 6, readers: int = 3, layer: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.before = nn.Linear(4, width)
        self.readers = nn.ModuleList(layer(width, 5) for _ in range(readers))
        self.after = nn.Linear(5, 3)
        self.use: Callable[[Tensor, nn.ModuleList], Tensor] = all_of_them

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.use(torch.tanh(self.before(x)), self.readers))


def all_of_them(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return torch.stack([torch.sin(reader(x)) for reader in readers]).prod(0)


def in_heads(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return torch.stack([reader(x).view(*x.shape[:-1], 5, 1).mT for reader in readers]).prod(0)[
        ..., 0, :
    ]


def beside_others(x: Tensor, readers: nn.ModuleList) -> Tensor:
    """Something that is no tapped layer reads the input too, before and between."""
    first = readers[0](x) * x.sum(-1, keepdim=True)
    return first + readers[1](x) * readers[2](x).sigmoid() + x.square().mean(-1, keepdim=True)


def another_between(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return readers[0](x) * readers[1](x * 2) * readers[2](x)


def changed_between(x: Tensor, readers: nn.ModuleList) -> Tensor:
    x = x * 1.5
    first = readers[0](x * 1)
    x.mul_(2)
    second = readers[1](x * 1)
    return first * second * readers[2](x)


def first_unused(x: Tensor, readers: nn.ModuleList) -> Tensor:
    unused = readers[0](x)
    product = readers[1](x) * readers[2](x)
    del unused
    return product


def middle_detached(x: Tensor, readers: nn.ModuleList) -> Tensor:
    first, middle = readers[0](x), readers[1](x)
    return first * middle.detach() * readers[2](x)


def last_unused(x: Tensor, readers: nn.ModuleList) -> Tensor:
    first, second, unused = [reader(x) for reader in readers]
    del unused
    return first * second


def one_twice(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return readers[0](x) * readers[1](x) * readers[0](x) + readers[2](x)


def outputs_dropped(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return sum((reader(x) * 2 for reader in readers), torch.zeros(()))


def in_no_grad_between(x: Tensor, readers: nn.ModuleList) -> Tensor:
    first = readers[0](x)
    with torch.no_grad():
        readers[1](x)
    return first * readers[2](x)


USES = [
    all_of_them,
    in_heads,
    beside_others,
    another_between,
    changed_between,
    first_unused,
    middle_detached,
    last_unused,
    one_twice,
    outputs_dropped,
    in_no_grad_between,
]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).square().flatten(1).sum(1)


def make(use: Callable[..., Tensor] = all_of_them, **options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    model = Attention(**options).double()
    model.use = use
    return model, torch.randn(4, 7, 4, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("use", USES)
def test_norms_and_sums_match_the_oracle(use: Callable[..., Tensor], mode: str) -> None:
    model, x = make(use)
    truth = per_sample_truth(model, (x,), loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        loss(module, (x,)).mean().backward()
        assert_close(module.get_norm_sample(), truth.norms, 1e-9, "norms")
        for name, clipped in truth.clipped(bound).items():
            found = model.get_parameter(name).grad
            assert found is not None
            assert_close(found, clipped, 1e-9, name)


@pytest.mark.parametrize("use", [*USES[:2], first_unused, one_twice])
@pytest.mark.parametrize("hooks", [True, False])
def test_the_gradient_of_the_input_itself(use: Callable[..., Tensor], hooks: bool) -> None:
    """What hooks on it see, and what its producer gets, with clipping and without."""
    model, x = make(use)
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    if not hooks:
        module.disable_hooks()
    module(x)  # the first forward is rehearsed, with backward passes of its own
    seen: dict[str, list[Tensor]] = {"plain": [], "wrapped": []}
    for name, owner in (("plain", plain), ("wrapped", model)):

        def look(layer: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            output.register_hook(seen[name].append)

        owner.before.register_forward_hook(look)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(loss(plain, (x,)).mean(), x)
    loss(module, (x,)).mean().backward()
    assert x.grad is not None
    assert_close(x.grad, expected, 1e-12)
    assert_close(seen["wrapped"][0], seen["plain"][0], 1e-12)
    assert len(seen["wrapped"]) == len(seen["plain"]) == 1


def test_gradients_of_one_reader_alone() -> None:
    """A backward through one of them passes the others by."""
    model, x = make()
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    module(x)  # the first forward is rehearsed
    kept: dict[str, list[Tensor]] = {"plain": [], "wrapped": []}
    for name, owner in (("plain", plain), ("wrapped", model)):
        for reader in owner.readers:
            reader.register_forward_hook(lambda m, a, y, name=name: kept[name].append(y))
    x.requires_grad_()
    plain(x)
    module(x)
    module.disable_hooks()  # between forward and backward: ordinary gradients of what was recorded
    for mine, theirs in zip(kept["wrapped"], kept["plain"], strict=True):
        (found,) = torch.autograd.grad(mine.square().sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad(theirs.square().sum(), x, retain_graph=True)
        assert_close(found, expected, 1e-12)


def test_an_input_changed_in_place_behind_its_reader_is_an_error() -> None:
    """As it is without taps, where the reader saved it for backward."""

    def changed(x: Tensor, readers: nn.ModuleList) -> Tensor:
        x = x * 1.5
        first = readers[0](x)
        x.mul_(2)
        return first * readers[1](x) * readers[2](x)

    model, x = make(changed)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    total = loss(module, (x,)).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model, x = make()
    model, x = model.float(), x.float()
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    for which in (plain, module):
        with torch.autocast("cpu", dtype):
            losses = loss(which, (x,))
        losses.mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        # "mean": ours is the sum over samples' own gradients, not their mean
        assert_close(q.grad / len(x), p.grad, 3e-2)


def test_an_input_changed_in_place_behind_a_reader_that_saved_a_cast_of_it() -> None:
    """Then PyTorch allows it: what comes after reads another input."""

    def changed(x: Tensor, readers: nn.ModuleList) -> Tensor:
        x = x.float() * 1.5
        first = readers[0](x)
        x.mul_(2)
        return first * readers[1](x) * readers[2](x)

    model, x = make(changed)
    model, x = model.float(), x.float()
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    for which in (plain, module):
        with torch.autocast("cpu", torch.bfloat16):
            losses = loss(which, (x,))
        losses.mean().backward()
    found, expected = model.before.weight.grad, plain.before.weight.grad
    assert found is not None and expected is not None
    assert_close(found / len(x), expected, 3e-2)


def test_an_input_whose_memory_is_another_behind_its_reader() -> None:
    def moved(x: Tensor, readers: nn.ModuleList) -> Tensor:
        first = readers[0](x)
        x.data = x.data * 2
        return first + readers[1](x) + readers[2](x)

    model, x = make(moved)
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    assert torch.equal(module(x), plain(x))


def test_a_backward_for_one_reader_records_no_other() -> None:
    """``inputs=``: only what was asked for, and the layers behind it."""
    model, x = make()
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for layer in (plain.before, *plain.readers[1:]):
        layer.requires_grad_(False)
    truth = per_sample_truth(plain, (x,), loss)
    loss(module, (x,)).mean().backward(inputs=[*model.readers[0].parameters()])
    assert_close(module.get_norm_sample(), truth.norms, 1e-9, "norms")


def test_a_backward_for_what_is_before_them_records_all_it_passes() -> None:
    model, x = make()
    truth = per_sample_truth(model, (x,), loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    loss(module, (x,)).mean().backward(inputs=[model.before.weight])
    assert_close(module.get_norm_sample(), truth.norms, 1e-9, "norms")


def test_outputs_of_readers_as_inputs_of_a_backward() -> None:
    model, x = make()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    module(x)  # the first forward is rehearsed
    outputs: list[Tensor] = []
    for reader in model.readers:
        reader.register_forward_hook(lambda m, a, y: outputs.append(y))
    total = loss(module, (x,)).mean()
    module.disable_hooks()
    grads = torch.autograd.grad(total, outputs, retain_graph=True)
    expected = torch.autograd.grad(total, outputs[::-1])
    for found, other in zip(grads, expected[::-1], strict=True):
        assert torch.equal(found, other)


def test_an_input_that_is_a_leaf_is_walked_to_from_each_reader_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 5) for _ in range(2)).double()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.readers = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = (reader(x) for reader in self.readers)
            return first, second

    module = GradSampleModuleFlashClipping(Two(), max_grad_norm=1.0)
    x = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    first, second = module(x)
    second.sum().backward()
    first.sum().backward()
    assert x.grad is not None
    assert_close(x.grad, (model[0].weight + model[1].weight).sum(0).expand(4, 7, 6), 1e-12)


@pytest.mark.parametrize("features", [(0, 5), (6, 0)])
def test_layers_without_features(features: tuple[int, int]) -> None:
    model, x = make()
    model.before = nn.Linear(4, features[0]).double()
    model.readers = nn.ModuleList(nn.Linear(*features) for _ in range(3)).double()
    model.after = nn.Linear(features[1], 3).double()
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    for which in (plain, module):
        loss(which, (x,)).mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(q.grad / len(x), p.grad, 1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_torch_compile(backend: str) -> None:
    model, x = make(in_heads)
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    module.compile(backend=backend)
    for which in (plain, module):
        loss(which, (x,)).mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(q.grad / len(x), p.grad, 1e-9)
