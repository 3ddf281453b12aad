"""Bare parameters: exact for every way a forward may use them, and without a second forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping._compat import has_lasting_node
from tests.support.autograd import truth_by_autograd
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.errors import raises, warns
from tests.support.models import CASES, Case, Scale, Wrapped, floats
from tests.support.oracle import Truth, per_sample_truth
from tests.support.uses import Data, Scaling

pytestmark = pytest.mark.without_gate

Forward = Callable[["Uses", Tensor], Tensor]
B, T, D = 4, 5, 6


class Positions(nn.Module):
    """Returns parameters only: nothing that it is called with carries samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, D) * 0.3)

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Uses(nn.Module):
    """A linear layer, then one use of some bare parameters, then a head."""

    def __init__(self, use: Forward):
        super().__init__()
        self.use = use
        self.calls = 0
        self.first = nn.Linear(3, D)
        self.head = nn.Linear(D, 2)
        self.positions = Positions()
        self.vector = nn.Parameter(torch.randn(D))
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.matrix = nn.Parameter(torch.randn(D, D) * 0.5)
        self.low = nn.Parameter(torch.randn(D, 2) * 0.5)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.kernel = nn.Parameter(torch.randn(D, D, 3) * 0.3)
        self.gains = nn.ParameterList([nn.Parameter(torch.rand(D)) for _ in range(2)])
        self.register_buffer("table", torch.linspace(-1, 1, D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.tanh(self.use(self, torch.tanh(self.first(x)))))


def inplace_rebinding(m: Uses, x: Tensor) -> Tensor:
    x = x * 1.0
    x += m.vector
    x += m.gains[0] - m.token
    return x


def in_place_of_rows(m: Uses, x: Tensor) -> Tensor:
    """Positions as axial embeddings make them: nothing tells that their rows are all the same."""
    x = x * 1.0
    x += m.token[None].expand(len(x), 1, T, D).reshape(len(x), T, D)
    return x


def made_in_place(m: Uses, x: Tensor) -> Tensor:
    """Changed where it is: what a function returns is dropped."""
    made = m.vector * 2.0
    made.add_(m.gains[0])
    made.mul_(1 - m.temperature)
    return x + made


def attention_pool(m: Uses, x: Tensor) -> Tensor:
    query = m.token.expand(x.shape[0], -1, -1) @ m.matrix
    weights = torch.softmax(query @ x.mT / m.temperature.exp(), -1)
    return weights @ x


USES: dict[str, Forward] = {
    "added": lambda m, x: x + m.vector,
    "added_left": lambda m, x: m.token + x,
    "subtracted": lambda m, x: m.vector - x,
    "multiplied": lambda m, x: x * m.vector,
    "divided": lambda m, x: x / (m.vector.exp() + m.table),
    "class_token": lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1),
    "class_token_repeat": lambda m, x: torch.cat([m.token.repeat(x.shape[0], 2, 1), x], dim=1),
    "expanded_like": lambda m, x: torch.cat([x, m.token.expand_as(x)], dim=1),
    "positions": lambda m, x: x + m.positions(x.shape[1]),
    "positions_unsqueezed": lambda m, x: x + m.positions(x.shape[1])[None],
    "layer_scale": lambda m, x: x + m.gains[1] * torch.relu(x),
    "temperature": lambda m, x: torch.softmax(x * m.temperature.exp(), dim=-1),
    "temperature_divided": lambda m, x: x / m.temperature.clamp(min=0.01),
    "matrix": lambda m, x: x @ m.matrix,
    "linear": lambda m, x: F.linear(x, m.matrix, m.vector),
    "lora": lambda m, x: x + (x @ m.low) @ m.low.T,
    "einsum": lambda m, x: torch.einsum("btd,de->bte", x, m.matrix * m.vector),
    "convolution": lambda m, x: F.conv1d(x.mT, m.kernel, m.vector, padding=1).mT,
    "rms_norm_by_hand": lambda m, x: m.vector * (x * x.square().mean(-1, keepdim=True).rsqrt()),
    "layer_norm_function": lambda m, x: F.layer_norm(x, (D,), m.vector, m.gains[0]),
    "where": lambda m, x: torch.where(x > 0, x, m.vector),
    "twice": lambda m, x: (x + m.vector) * m.vector,
    "several": lambda m, x: torch.addcmul(m.gains[0].expand_as(x), x, m.vector),
    "prompt": lambda m, x: torch.cat(
        [torch.tanh(m.token @ m.matrix).expand(x.shape[0], 3, -1), x], 1
    ),
    "numbers_added": lambda m, x: x * (m.temperature.exp() + m.temperature + 1.0),
    "rebinding": inplace_rebinding,
    "in_place_of_rows": in_place_of_rows,
    "made_in_place": made_in_place,
    "attention_pool": attention_pool,
}


def case_of(use: Forward) -> Case:
    return Case(lambda: Uses(use), floats(B, T, 3))


def check_once(case: Case, model: Uses, batch: tuple[Tensor, ...], truth: Truth, mode: Any) -> None:
    """A step is exact, and the model's forward runs once in it."""
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode, strict=False)
    model.calls = 0
    step_case(module, case, batch, "mean")
    assert model.calls == 1
    check_case(module, truth, bound, 1e-10)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", USES)
def test_use_is_exact_and_forward_runs_once(name: str, mode: str) -> None:
    case = case_of(USES[name])
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    check_once(case, model, batch, truth, mode)
    assert all(type(p) is nn.Parameter for p in model.parameters())


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_what_is_expanded_over_the_batch_goes_back_in_memory_of_one_batch() -> None:
    """Not through the expansion, whose gradient has a row for each sample, of each sample."""
    samples = 8 * D
    case = case_of(USES["prompt"])
    model, batch = make_case(Case(case.make, floats(samples, T, 3)), torch.float64)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    step_case(module, case, batch, "mean")
    loss = case.loss(module, batch).mean()
    with _Largest() as seen:
        loss.backward()
    assert 0 < seen.elements < samples * samples * D


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", ["matrix", "rows_of_all_samples"])
def test_nothing_of_a_step_is_held_after_it(name: str, mode: str) -> None:
    """Proofs are steps as well: a graph of autograd's that stays keeps its memory, and keeps steps
    from being captured as CUDA graphs."""

    def rows_of_all_samples(m: Uses, x: Tensor) -> Tensor:  # as routers read them
        return F.linear(x.flatten(0, 1), m.matrix).view_as(x)

    case = case_of(USES.get(name, rows_of_all_samples))
    model, batch = make_case(case, torch.float64)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    step_case(module, case, batch, "mean")
    assert not [name for name, param in model.named_parameters() if has_lasting_node(param)]


@pytest.mark.parametrize("name", ["class_token", "matrix", "positions", "twice", "temperature"])
def test_ordinary_backward_with_hooks_disabled(name: str) -> None:
    """A graph made with taps still gives ordinary gradients once recording is off."""
    case = case_of(USES[name])
    model, batch = make_case(case, torch.float64)
    case.loss(model, batch).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    module = GradSampleModuleFlashClipping(model, strict=False)
    losses = case.loss(module, batch)
    module.disable_hooks()
    losses.sum().backward()
    for n, p in model.named_parameters():
        if n in expected:
            torch.testing.assert_close(p.grad, expected[n])


def in_place_result_dropped(m: Uses, x: Tensor) -> Tensor:
    x = x * 1.0
    x.mul_(m.vector)
    return x


def written_into(m: Uses, x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0] = m.vector
    return x


def written_through_a_view(m: Uses, x: Tensor) -> Tensor:
    made = m.vector * 2.0
    made[None].add_(m.gains[0])
    return x + made


@pytest.mark.parametrize("use", [in_place_result_dropped, written_into, written_through_a_view])
def test_writing_in_place_runs_sample_by_sample(use: Forward) -> None:
    case = case_of(use)
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, strict=False)
    with warns("FC150", match=r"Uses\):"):
        module(*batch)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, 1.0, 1e-10)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_rows_under_a_mask_are_written(axes: int, mode: str) -> None:
    """Frames of Wav2Vec2: ``x[mask] = parameter``, of positions or of whole samples."""

    def masked(m: Uses, x: Tensor) -> Tensor:
        x = x * 1.0
        mask = x.detach()[..., 0] > 0 if axes == 2 else x.detach()[:, 0, 0] > 0
        x[mask] = m.vector.to(x.dtype)
        return x

    case = case_of(masked)
    model, batch = make_case(case, torch.float64)
    assert 0 < int((torch.tanh(model.first(*batch))[:, 0, 0] > 0).sum()) < B
    truth = truth_by_autograd(model, batch, lambda m, b: case.loss(m, b).mean())
    model.zero_grad(set_to_none=True)
    check_once(case, model, batch, truth, mode)


def test_dropout_is_the_one_that_was_applied() -> None:
    """The stand-in never runs the forward again, so random numbers are drawn once."""
    case = case_of(lambda m, x: F.dropout(x * m.vector, 0.5) + F.dropout(m.vector, 0.5))
    model, batch = make_case(case, torch.float64)
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=1e6, strict=False, loss_reduction="sum"
    )
    torch.manual_seed(7)
    step_case(module, case, batch, "sum")
    clipped = {n: p.grad.clone() for n, p in model.named_parameters()}
    module.to_standard_module().zero_grad(set_to_none=True)
    torch.manual_seed(7)
    case.loss(model, batch).sum().backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(clipped[n], p.grad)


class Checkpointed(nn.Module):
    """Checkpoints functions that read parameters of the module that calls them."""

    def __init__(self, kind: str, reentrant: bool):
        super().__init__()
        self.kind, self.reentrant = kind, reentrant
        self.first, self.head = nn.Linear(3, D), nn.Linear(D, 2)
        self.gain, self.table = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1, T, D))

    def work(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x * self.gain.exp() + self.table) @ torch.diag(self.gain))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        gain, table = self.gain, self.table

        def with_arguments(x: Tensor, gain: Tensor, table: Tensor) -> Tensor:
            return torch.tanh(x * gain + table)

        functions: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "method": (self.work, ()),
            "local": (lambda x: torch.tanh(x * gain + table), ()),
            "arguments": (with_arguments, (gain, table)),
        }
        function, arguments = functions[self.kind]
        return self.head(checkpoint(function, x, *arguments, use_reentrant=self.reentrant))


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["method", "local", "arguments"])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint_inside_the_forward(inside: bool, kind: str, reentrant: bool, mode: str) -> None:
    """Exact; with arguments of a re-entrant checkpoint, which detaches them, sample by sample."""

    def build() -> nn.Module:
        model = Checkpointed(kind, reentrant)
        return Wrapped(nn.Linear(3, 3), model) if inside else model

    case = Case(build, floats(B, T, 3))
    model, batch = make_case(case, torch.float64)
    plain, _ = make_case(Case(build, floats(B, T, 3)), torch.float64)
    plain.load_state_dict(model.state_dict())
    truth = truth_by_autograd(plain, batch, lambda m, b: case.loss(m, b).mean())
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, bound, 1e-10)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_failed_backward_puts_parameters_back() -> None:
    model = Checkpointed("method", reentrant=False)
    before = list(model.parameters())
    seen: list[type] = []

    def fail(_: Tensor) -> None:
        seen.append(type(model.gain))
        raise KeyboardInterrupt

    module = GradSampleModuleFlashClipping(model)
    module(torch.randn(B, T, 3))  # rehearsed, and its gradients compared
    model.first.register_forward_hook(lambda _, __, y: y.register_hook(fail) and None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            module(torch.randn(B, T, 3)).square().sum().backward()
        assert seen.pop() is not nn.Parameter  # stood in for, while checkpoints may recompute
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("derived", [False, True])
def test_autograd_function_runs_sample_by_sample(derived: bool) -> None:
    """It gets past the stand-in, whose gradient would be lost without a word: this is found in the
    first forward."""
    case = case_of(lambda m, x: Scaling.apply(x, m.vector.exp() if derived else m.vector))
    model, batch = make_case(case, torch.float64)
    truth = truth_by_autograd(model, batch, lambda m, b: case.loss(m, b).mean())
    model.zero_grad(set_to_none=True)
    module = GradSampleModuleFlashClipping(model, strict=False)
    step_case(module, case, batch, "mean")
    check_case(module, truth, 1.0, 1e-10)


class Taking(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.gain, self.returns = nn.Parameter(torch.randn(3)), returns

    def forward(self, x: Tensor, data: Any = None) -> Any:
        y = torch.zeros_like(x)
        y[..., :] = self.gain
        y = x * y if data is None else x * y + data.a
        return Data(y) if self.returns else y


class AroundTaking(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), Taking(returns)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.inner(x).a if self.inner.returns else self.inner(x, Data(x))


@pytest.mark.parametrize(("returns", "words"), [(True, "returns a Data"), (False, "with a Data")])
def test_objects_that_cannot_be_divided_are_refused(returns: bool, words: str) -> None:
    """One sample would get, or give, the tensors of all."""
    module = GradSampleModuleFlashClipping(AroundTaking(returns))
    with raises("FC151", match=rf"inner \(Taking\): .*{words}"):
        module(torch.randn(B, T, 3))


def test_autograd_function_in_a_later_step_is_refused() -> None:
    """The graph is looked at in the first forward; afterwards backward notices."""
    case = case_of(lambda m, x: (Scaling.apply if m.calls > 1 else torch.mul)(x, m.vector))
    model, batch = make_case(case, torch.float64)
    module = GradSampleModuleFlashClipping(model, strict=False)
    step_case(module, case, batch, "mean")
    module.zero_grad(set_to_none=True)
    with raises("FC140", match=r"Uses\).*autograd.Function"):
        step_case(module, case, batch, "mean")


def test_layer_on_parameters_alone() -> None:
    case = case_of(lambda m, x: x + m.head.weight.new_zeros(()) + m.first(m.matrix[:3, :3])[0])
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, strict=False)
    step_case(module, case, batch, "mean")
    check_case(module, truth, 1.0, 1e-10)


@pytest.mark.parametrize(
    "name", ["mixed", "parameter_proxies", "conv1d", "embedding", "layer_norm"]
)
def test_every_function_by_its_own_backward(name: str) -> None:
    """``force_functorch`` serves every layer without its rule."""
    case = CASES[name]
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, force_functorch=True)
    step_case(module, case, batch, "mean")
    check_case(module, truth, 1.0, 1e-10)


def test_generic_leaf_without_children() -> None:
    case = Case(lambda: Wrapped(nn.Linear(4, 6), Scale(6)), floats(5, 7, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.7)
    step_case(module, case, batch, "mean")
    check_case(module, truth, 0.7, 1e-5)
