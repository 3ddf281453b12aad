"""``cuda_graphs=True``: a model whose steps are replayed, and training with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    GraphedStep,
    Kernels,
)
from flash_clipping.capture.proof.gate import Gate
from flash_clipping.graphs.graphed_model import GraphedModel
from tests.support.errors import raises
from tests.support.graphs import (
    PlayedByHand,
    assert_same_tensors,
    batches,
    replay_by_hand,
    small_network,
)
from tests.support.models import squared_loss
from tests.support.oracle import assert_close, per_sample_truth


class Training:
    def __init__(self, graphed: bool, plain: nn.Module | None = None, **options: Any):
        self.plain = small_network() if plain is None else plain
        options = {"max_grad_norm": 0.5} | options
        self.model: Any = GradSampleModuleFlashClipping(self.plain, **options)
        if graphed:
            replay_by_hand(self.model)

    @property
    def replays(self) -> int:
        return int(self.model._graphs.replays)

    def results(self, x: Tensor) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        losses = squared_loss(self.model, (x,))
        losses.mean().backward()
        found = [losses.detach(), self.model.get_norm_sample(), self.model.get_clipping_coef()]
        return found + [p.grad.clone() for p in self.plain.parameters() if p.grad is not None]


def warmed(**options: Any) -> tuple[Training, Training]:
    graphed, eager = Training(True, **options), Training(False, **options)
    for x in batches(5):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.replays == 2
    return graphed, eager


@pytest.mark.parametrize("options", [{}, {"clipping": "automatic"}, {"loss_reduction": "mean"}])
def test_replays_leave_what_calls_leave(options: dict[str, Any]) -> None:
    graphed, eager = warmed(**options)
    for x in batches(4, start=10):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.replays == 6


def test_norms_of_a_replay_are_the_oracles() -> None:
    graphed, _ = warmed()
    (x,) = batches(1, start=20)
    graphed.results(x)
    assert graphed.replays == 3
    truth = per_sample_truth(small_network(), (x,), squared_loss)
    assert_close(graphed.model.get_norm_sample(), truth.norms, 1e-5, "norms")


def test_gradients_of_several_backwards_add_up() -> None:
    graphed, eager = warmed()
    for training in (graphed, eager):
        training.model.grad_accumulation_allowed = True
        training.model.zero_grad(set_to_none=True)
    found: list[list[Tensor]] = []
    for training in (graphed, eager):
        for x in batches(2, start=30):
            squared_loss(training.model, (x,)).mean().backward()
        found.append([p.grad.clone() for p in training.plain.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 1e-6, "sums")
    assert graphed.replays == 4


def test_other_sizes_are_captured_when_they_are_met_and_evaluation_runs_as_it_is() -> None:
    graphed, eager = warmed()
    for x in batches(2, size=3):
        assert_same_tensors(graphed.results(x), eager.results(x))
    with torch.no_grad():
        graphed.model(batches(1)[0])
    assert graphed.replays == 4
    assert_same_tensors(graphed.results(batches(1)[0]), eager.results(batches(1)[0]))
    assert graphed.replays == 5


def test_another_bound_is_captured_anew() -> None:
    graphed, eager = warmed()
    for training in (graphed, eager):
        training.model.max_grad_norm = 0.01
    for x in batches(6, start=40):
        assert_same_tensors(graphed.results(x), eager.results(x))


def test_one_backward_of_two_calls_is_never_two_clipped_sums() -> None:
    graphed, _ = warmed()
    x, y = batches(2, start=50)
    graphed.model.zero_grad(set_to_none=True)
    first = squared_loss(graphed.model, (x,))  # a replay
    second = squared_loss(graphed.model, (y,))  # runs as it is, beside it
    with raises("FC704", match="several calls of"):
        (first + second).mean().backward()


def test_a_second_backward_is_refused() -> None:
    graphed, _ = warmed()
    loss = squared_loss(graphed.model, (batches(1)[0],)).mean()
    loss.backward(retain_graph=True)
    with raises("FC704", match="second time"):
        loss.backward()


def test_another_loss_reduction_in_backward_is_refused() -> None:
    graphed, _ = warmed()
    loss = squared_loss(graphed.model, (batches(1)[0],)).sum()
    with raises("FC704", match="loss_reduction"), graphed.model.summed_loss():
        loss.backward()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + torch.rand(()).item())


class Remembering(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach() * 2
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Noisy, "random numbers on the host"),
        (Remembering, "Remembering.last"),
    ],
)
def test_given_up_with_one_line(
    make: Callable[[], nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(True, make())
    with caplog.at_level("INFO", "flash_clipping"):
        for x in batches(6):
            training.results(x)
    assert training.replays == 0
    (line,) = [text for text in caplog.messages if text.startswith("cuda_graphs")]
    assert why in line


@pytest.mark.parametrize("of_the_model", [True, False])
def test_another_forward_is_never_replayed(of_the_model: bool) -> None:
    graphed, eager = warmed()
    for training in (graphed, eager):
        module = training.plain if of_the_model else training.plain[2]
        module.forward = lambda x, before=module.forward: before(x) * 2
    for x in batches(3):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.replays == 2  # as before; played by hand, others would run the new forward


@pytest.mark.parametrize("wrap", [True, False])
def test_make_private_takes_it(wrap: bool) -> None:
    data = TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
    options: dict[str, Any] = dict(noise_multiplier=1.0, max_grad_norm=1.0)
    plain = nn.Linear(6, 3)
    parts = dict(module=plain, optimizer=torch.optim.SGD(plain.parameters(), 0.1))
    parts["criterion"] = nn.CrossEntropyLoss()
    loader = DataLoader(data, batch_size=4)
    with raises("FC301", ValueError, match="cuda_graphs='on' is unknown"):
        FlashPrivacyEngine().make_private(
            **parts, data_loader=loader, **options, kernels=Kernels(cuda_graphs="on")
        )
    hooks, optimizer, criterion, batches_of = FlashPrivacyEngine().make_private(
        **parts, data_loader=loader, **options, kernels=Kernels(cuda_graphs="auto"), wrap_model=wrap
    )
    model = hooks if wrap else plain
    for x, y in batches_of:  # without a GPU calls run as they are
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    graphs = hooks._graphs
    assert graphs.calls and not graphs.replays
    hooks.cleanup()
    assert plain._compiled_call_impl is None


@pytest.mark.parametrize("calls", [28, 29])
def test_audits_come_between_replays(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first capture would be of the call that is due."""
    audited = []
    take_audit = Gate.take_audit

    def noted(gate: Gate) -> int:
        audited.append(gate.calls)
        return take_audit(gate)

    monkeypatch.setattr(Gate, "take_audit", noted)
    training = Training(True)
    training.model._watch.gate.calls = calls
    for x in batches(12):
        training.results(x)
    assert training.model._graphs.off is None
    # A capture is two more calls, and by hand so is a replay.
    assert len(audited) == 1 and 32 <= audited[0] <= 36
    assert training.replays >= 6


@pytest.mark.parametrize(("places", "given"), [((0, 1), 0), ((0,), None)])
def test_a_model_on_several_devices_runs_as_it_is(places: tuple[int, ...], given: Any) -> None:
    def on(device: str) -> Any:
        return SimpleNamespace(device=torch.device(device))

    def layer(device: str) -> Any:
        return SimpleNamespace(_parameters={"weight": on(device)}, _buffers={})

    class Spread(GraphedModel):
        def _device(self, modules: Any, tensors: Any) -> Any:
            x = on("cpu" if given is None else GPUS[given])
            return super()._device([layer(GPUS[n]) for n in places], [x])

    graphs = Spread(Training(False).model, print)
    with raises("FC702", ValueError):
        graphs._device([], [])
    assert graphs._call((torch.zeros(2),), {}) is None


GPUS = "cuda:0", "cuda:1"


def train(graphed: bool, physical: int, noise: float) -> tuple[list[Tensor], int]:
    """Some epochs under the engine, with batches that are cut into smaller ones.

    Returns:
        Parameters and losses; how many steps were replays.
    """
    plain = small_network()
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(48, 5, 6, generator=generator))
    model, optimizer, _, loader = FlashPrivacyEngine(seed=4).make_private(
        module=plain,
        optimizer=torch.optim.Adam(plain.parameters(), lr=0.05),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=noise,
        max_grad_norm=0.5,
    )

    def step(x: Tensor) -> Tensor:
        loss = squared_loss(model, (x,)).mean()
        loss.backward()
        return loss

    take = PlayedByHand(step, model) if graphed else step
    losses = []
    for _ in range(4):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as small:
            for (x,) in small:
                optimizer.zero_grad()
                losses.append(take(x).detach())
                optimizer.step()
    replays = take.replays if isinstance(take, GraphedStep) else 0
    return [*plain.state_dict().values(), *losses], replays


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("physical", [4, 64])
def test_training_with_poisson_batches(physical: int, noise: float) -> None:
    found, replays = train(True, physical, noise)
    assert_same_tensors(found, train(False, physical, noise)[0])
    # Whole batches are of other sizes almost every time.
    assert replays >= 30 if physical == 4 else replays <= 3


def test_a_step_without_zero_grad_is_refused_as_without_graphs() -> None:
    """What a step has left is known from a sum, in a copy of it too."""
    plain = small_network()
    model, optimizer, _, _ = FlashPrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 5, 6)), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    step = PlayedByHand(lambda x: squared_loss(model, (x,)).mean().backward(), model)
    for x in batches(6):
        optimizer.zero_grad()
        step(x)
        optimizer.step()
    step(x)
    assert step.replays == 4
    with raises("FC503", ValueError):
        optimizer.step()
