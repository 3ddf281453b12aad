"""Steps of compiled models, and what they cannot do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping._compat import has_lasting_node
from tests.support.autograd import squares, truth_by_autograd
from tests.support.cases import make_case
from tests.support.compiled import LM, compare, lm_loss, slow, wrap
from tests.support.errors import raises
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
@pytest.mark.parametrize("wrap_model", [True, slow(False)])
def test_engine_with_poisson_batches(wrap_model: bool) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5, 4), torch.randint(0, 3, (24,)))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(torch.relu(self.first(x))).mean(1))

    def train(compiled: bool) -> tuple[list[Tensor], list[tuple[int, int]]]:
        torch.manual_seed(1)
        model: Any = Classifier()
        hooks: Any = None
        loader: Any
        sizes: list[tuple[int, int]] = []
        engine = FlashPrivacyEngine(seed=1)  # the same batches in both
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=2)
        params = [*model.parameters()]
        found = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            **({} if wrap_model else {"wrap_model": False}),
        )
        hooks, optimizer, criterion, loader = found
        if compiled:
            hooks.compile(backend="aot_eager", fullgraph=True)
        run = hooks if wrap_model else model
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(run(x), y).backward()
                sizes.append((len(x), len(hooks.get_norm_sample())))
                optimizer.step()
        return [p.detach() for p in params], sizes

    torch.manual_seed(0)
    eager, sizes = train(False)
    torch.manual_seed(0)
    compiled, same = train(True)
    assert sizes == same and (1, 0) in sizes and len(set(sizes)) > 3  # a draw without samples
    for p, q in zip(eager, compiled, strict=True):
        assert_close(q, p, 1e-5)


def test_without_gradients_and_in_eval_mode() -> None:
    model, batch = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    expected = plain(*batch)
    with torch.no_grad():
        assert_close(module(*batch), expected, 1e-5)
        module.eval()
        assert_close(module(*batch), expected, 1e-5)
    assert_close(module(*batch), expected, 1e-5)
    module.train()
    truth = per_sample_truth(plain, batch, lm_loss)
    compare(module, truth, LM, batch, 1.0)


@pytest.mark.parametrize(
    ("clipping", "blocks"), [("flat", False), ("flat", True), slow("per_layer", False)]
)
def test_two_passes(clipping: str, blocks: bool) -> None:
    model, batch = make_case(LM, torch.float32)
    bound: Any = 0.5 if clipping == "flat" else [0.1] * len([*model.parameters()])
    eager = wrap(copy.deepcopy(model), max_grad_norm=bound, clipping=clipping)
    if blocks:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        module = wrap(model, max_grad_norm=bound, clipping=clipping, mode="two_pass")
    else:
        module = wrap(model, max_grad_norm=bound, clipping=clipping, mode="two_pass")
        module.compile(backend="aot_eager", fullgraph=True)
    sizes = (batch[0], batch[0][:3])  # another size is compiled again, with sizes as symbols
    for ids in sizes[: 1 if blocks else 2]:
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            lm_loss(which, (ids,)).mean().backward()
        assert_close(module.get_norm_sample(), eager.get_norm_sample(), 1e-5)
        for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)


def test_nothing_holds_the_graph_of_a_step() -> None:
    """A capture as a CUDA graph would fail, as long as nodes of parameters last."""
    model, batch = make_case(LM, torch.float32)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        lm_loss(module, batch).mean().backward()
        assert not any(has_lasting_node(param) for param in model.parameters())


def wrapped(
    model: nn.Module, fullgraph: bool | None = True, mode: Any = "one_pass"
) -> GradSampleModuleFlashClipping:
    # Not strict: one of the models counts its runs in a buffer.
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5, mode=mode, strict=False)
    if fullgraph is not None:
        module.compile(backend="eager", fullgraph=fullgraph)
    return module


@pytest.mark.parametrize(
    ("compiled", "mode"), [(True, "one_pass"), (None, "one_pass"), (None, "two_pass")]
)
def test_compiled_autograd_is_refused(compiled: bool | None, mode: str) -> None:
    """It would leave the norms of the step before."""
    from torch._dynamo import compiled_autograd

    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), compiled, mode)
    squares(module, (torch.randn(3, 4),)).backward()
    module.zero_grad(set_to_none=True)
    loss = squares(module, (torch.randn(5, 4),))
    with (
        raises("FC436"),
        compiled_autograd._enable(lambda graph: graph),
    ):
        loss.backward()
    assert all(p.grad is None for p in module.parameters())


class Again(nn.Module):
    """Calls its first layer as often as it is told, which a region does not see beforehand."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.times = nn.Linear(4, 4), nn.Linear(4, 3), 1
        self.before: Callable[[], None] = nothing
        self.after: Callable[[], None] = nothing
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        self.before()
        for _ in range(self.times):
            x = torch.tanh(self.first(x))
        x = self.second(x)
        self.after()
        return x


def nothing() -> None:
    pass


def after_a_step(fullgraph: bool) -> tuple[Again, Any]:
    """The model, and itself compiled."""
    torch.manual_seed(0)
    model = Again()
    module = wrapped(model, fullgraph=fullgraph)
    squares(module, (torch.randn(5, 6, 4),)).backward()
    module.zero_grad(set_to_none=True)
    return model, module


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_layer_that_is_called_more_often_is_learned_anew(fullgraph: bool) -> None:
    model, module = after_a_step(fullgraph)
    for model.times in (2, 1, 3):
        plain, batch = Again(), (torch.randn(5, 6, 4),)
        plain.load_state_dict(model.state_dict())
        plain.times = model.times
        truth = truth_by_autograd(plain, batch, squares)
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            squares(module, batch).backward()
            assert_close(module.get_norm_sample(), truth.norms, 1e-5, "norms")


@pytest.mark.parametrize("error", [ValueError, TorchDynamoException])
def test_a_models_own_exception_is_not_tried_again(error: type[Exception]) -> None:
    """A layer is called once more, so it runs by itself; what ran before it has run. That is so,
    too, where the exception is the compiler's, of something that the model compiles itself."""
    failures: list[Exception] = []

    @torch.compiler.disable
    def fail() -> None:
        if failures:
            raise failures.pop()

    model, module = after_a_step(fullgraph=False)
    model.after = fail
    squares(module, (torch.randn(5, 6, 4),)).backward()
    model.times = 2
    failures.append(error("the model's own"))
    before = float(model.runs)
    with pytest.raises(error, match="the model's own"):
        module(torch.randn(5, 6, 4))
    assert float(model.runs) == before + 1


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, mid = torch.tanh(self.first(x)), self.mid
        found: Tensor = torch.cond(x.sum() > 0, lambda x: mid(x), lambda x: mid(x) * 2, (x,))
        return found


@pytest.mark.parametrize("fullgraph", [True, None])
def test_an_operator_with_a_body_names_the_layer(fullgraph: bool | None) -> None:
    module = wrapped(Uses(), fullgraph)
    with raises("FC402|FC403", match=r"mid \(Linear\): called inside"):
        squares(module, (torch.randn(3, 5, 4),)).backward()
