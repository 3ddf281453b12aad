"""Steps replayed as CUDA graphs: what they decide by on any machine, the graphs on a GPU.

Without a GPU a replay is played by hand: the step runs again on the memory it was captured with,
unseen by everything that counts or publishes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    FlashClippingError,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
    GraphedStep,
)
from flash_clipping.integration.graphed_step import Graph
from flash_clipping.ops.runtime.upload import to_device
from tests.models import CASES, Case, squared_loss
from tests.oracle import assert_close, per_sample_truth

ROOT = Path(__file__).parents[1]

on_gpu = pytest.mark.gpu


class PlayedByHand(GraphedStep):
    """Captures and replays without a device."""

    def _device(self, modules: Sequence[nn.Module], leaves: Sequence[Any]) -> torch.device:
        return torch.device("cpu")

    def _record(self, graph: Graph, work: Callable[[], Any], device: torch.device) -> Any:
        def replay() -> None:
            params = list(self._module().parameters())
            before = [p.grad for p in params]
            with ExitStack() as stack, torch.enable_grad():
                again = [stack.enter_context(m._session.captures()) for m, _ in graph.of_modules]
                for p in params:
                    p.grad = None
                output = work()
            for _, grad in graph.grads:
                grad.fill_(torch.nan)
            for (_, captured), new in zip(graph.of_modules, again, strict=True):
                pairs = zip(captured.norms, new.norms, strict=True)
                for (_, *fixed), (_, *found) in pairs:  # norms and what they were clipped by
                    for held, now in zip(fixed, found, strict=True):
                        held.copy_(now)
                for fixed, coef in zip(captured.coefs, new.coefs, strict=True):
                    fixed.copy_(coef)
            for param, fixed in graph.grads:
                fixed.copy_(param.grad)
            leaves = zip(pytree.tree_leaves(graph.output), pytree.tree_leaves(output), strict=True)
            for fixed, new_leaf in leaves:
                if isinstance(fixed, Tensor):
                    fixed.copy_(new_leaf)
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

        graph.replay = replay
        return work()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


class Training:
    """The same training with and without graphs."""

    def __init__(self, graphed: type[GraphedStep] | None, *, wrap: bool = True, **options: Any):
        self.plain = network()
        self.model: Any = self.plain
        if wrap:
            options = {"max_grad_norm": 0.5} | options
            self.model = GradSampleModuleFlashClipping(self.plain, **options)

        def step(x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            losses = squared_loss(self.model, (x,)) * scale
            losses.mean().backward()
            return {"losses": losses}

        self.calls = 0
        self.step: Any = step
        if graphed is not None:
            self.step = graphed(step, self.model)

    def results(self, *args: Any) -> list[Tensor]:
        """What a call leaves."""
        self.model.zero_grad(set_to_none=True)
        output = self.step(*args)
        found = [output["losses"].detach()]
        if self.model is not self.plain:
            found += [self.model.get_norm_sample(), self.model.get_clipping_coef()]
            found += [p._norm_sample for p in self.plain.parameters()]
        return found + [p.grad.clone() for p in self.plain.parameters() if p.grad is not None]


def batches(count: int, size: int = 4, start: int = 0) -> list[Tensor]:
    draws = [torch.Generator().manual_seed(start + i) for i in range(count)]
    return [
        torch.randn(size, 5, 6, generator=generator) * (i + 1) for i, generator in enumerate(draws)
    ]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def warmed(**options: Any) -> tuple[Training, Training]:
    """Two of the same, the first past its capture."""
    graphed, eager = Training(PlayedByHand, **options), Training(None, **options)
    for x in batches(4):
        assert_same(graphed.results(x), eager.results(x))
    assert (graphed.step.calls, graphed.step.replays) == (4, 1)
    return graphed, eager


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": False},
        {},
        {"mode": "two_pass"},
        {"clipping": "automatic"},
        {"clipping": "per_layer", "max_grad_norm": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]},
    ],
    ids=str,
)
def test_replays_leave_what_the_step_leaves(options: dict[str, Any]) -> None:
    graphed, eager = warmed(**options)
    for x in batches(5, start=10):
        assert_same(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 6


def test_norms_of_a_replay_are_the_oracles() -> None:
    graphed, _ = warmed()
    (x,) = batches(1, start=20)
    graphed.results(x)
    assert graphed.step.replays == 2
    truth = per_sample_truth(network(), (x,), squared_loss)
    assert_close(graphed.model.get_norm_sample(), truth.norms, 1e-5, "norms")


def test_other_layouts_run_as_they_are() -> None:
    graphed, eager = warmed()
    for x in (*batches(2, size=3), *batches(2, size=0), batches(1)[0].transpose(0, 1)):
        assert_same(graphed.results(x), eager.results(x))
    x = batches(1)[0].transpose(0, 1).contiguous().transpose(0, 1)  # other strides
    assert_same(graphed.results(x), eager.results(x))
    assert_same(graphed.results(batches(1)[0], 0.5), eager.results(batches(1)[0], 0.5))
    assert graphed.step.replays == 1
    assert_same(graphed.results(batches(1)[0]), eager.results(batches(1)[0]))
    assert graphed.step.replays == 2


def another_bound(training: Training) -> None:
    training.model.max_grad_norm = 0.01


def another_clipping(training: Training) -> None:
    training.model.clipping = "automatic"


def frozen(training: Training) -> None:
    training.plain[0].weight.requires_grad = False


def in_evaluation(training: Training) -> None:
    training.model.eval()


def without_hooks(training: Training) -> None:
    training.model.disable_hooks()


def other_memory(training: Training) -> None:
    training.plain[3].weight.data = training.plain[3].weight.data * 2


def other_setting(training: Training) -> None:
    training.plain[1].eps = 0.5


def a_hook(training: Training) -> None:
    training.plain[2].register_forward_hook(lambda layer, args, output: output * 2)


def transposed_memory(training: Training) -> None:
    weight = training.plain[3].weight
    weight.data = weight.data.flip(0).t().contiguous().t()


def other_layer(training: Training) -> None:
    training.plain[2] = nn.ReLU()


def other_parameter(training: Training) -> None:
    training.plain[3].bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "change",
    [
        another_bound,
        another_clipping,
        frozen,
        in_evaluation,
        without_hooks,
        other_memory,
        transposed_memory,
        other_layer,
        other_parameter,
        other_setting,
        a_hook,
    ],
)
def test_what_python_decides_is_looked_at_in_every_call(
    change: Callable[[Training], None],
) -> None:
    graphed, eager = warmed()
    change(graphed)
    change(eager)
    for x in batches(5, start=30):
        results = gradients_of if change is without_hooks else Training.results
        assert_same(results(graphed, x), results(eager, x))
    # The first, and after three calls under what holds now; a new parameter is first hooked to.
    assert graphed.step.replays == (2 if change is other_parameter else 3)


def gradients_of(training: Training, x: Tensor) -> list[Tensor]:
    training.model.zero_grad(set_to_none=True)
    training.step(x)
    return [p.grad.clone() for p in training.plain.parameters()]


def test_a_layer_in_the_place_of_another_is_not_taken_for_it() -> None:
    """Not even where Python gives it the same id."""
    for _ in range(10):
        graphed, eager = warmed()
        for training in (graphed, eager):
            training.plain[2] = None
            training.plain[2] = nn.Sigmoid()
        x = batches(1)[0]
        assert_same(graphed.results(x), eager.results(x))
        assert graphed.step.replays == 1  # played by hand, a replay would run the new layer


def test_norms_that_the_step_itself_reads() -> None:
    training = Training(None)
    model = training.model

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        squared_loss(model, (x,)).mean().backward()
        of_param = training.plain[3].bias._norm_sample
        return model.get_norm_sample(), model.per_sample_gradient_norms * 2, of_param + 1

    graphed = PlayedByHand(step, model)
    for x in batches(7):
        found = graphed(x)
        expected = model.get_norm_sample()
        assert_same(found, [expected, expected * 2, training.plain[3].bias._norm_sample + 1])
        model.zero_grad(set_to_none=True)
    assert graphed.replays == 4


@pytest.mark.parametrize(("wrap", "set_to_none"), [(False, True), (True, True), (True, False)])
def test_a_step_that_clears_gradients_is_refused(wrap: bool, set_to_none: bool) -> None:
    training = Training(None, wrap=wrap)

    def step(x: Tensor) -> None:
        training.model.zero_grad(set_to_none=set_to_none)
        training.step(x)

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with pytest.raises(FlashClippingError, match=r"clears gradients.*Call zero_grad\(\) outside"):
        graphed(x)


def test_a_step_that_clears_some_gradients_is_refused() -> None:
    parts = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def step(x: Tensor) -> None:
        parts[1].zero_grad()
        for part in parts:
            part(x).square().sum().backward()

    graphed = PlayedByHand(step, parts)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with pytest.raises(FlashClippingError, match="clears gradients"):
        graphed(x)


def test_a_step_that_steps_is_refused() -> None:
    training = Training(None, wrap=False)
    optimizer = torch.optim.SGD(training.plain.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        training.step(x)
        optimizer.step()

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    for _ in range(2):
        graphed(x)
        optimizer.zero_grad()
    with pytest.raises(FlashClippingError, match="changes parameters"):
        graphed(x)


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("kind", ["two losses", "hooks off", "several models", "unused first"])
def test_steps_that_only_add_are_not_refused(kind: str, accumulates: bool) -> None:
    results = []
    for graphed in (True, False):
        torch.manual_seed(0)
        first, second = nn.Linear(6, 5), nn.Linear(6, 5)
        one = GradSampleModuleFlashClipping(first, max_grad_norm=0.5)
        two = GradSampleModuleFlashClipping(second, max_grad_norm=0.5)
        if kind == "hooks off":
            two.disable_hooks()
        whole = nn.ModuleList([one, two])

        def step(x: Tensor, one: Any = one, two: Any = two) -> None:
            if kind != "unused first":
                one(x).square().mean().backward()
            for factor in (1, 2) if kind != "several models" else (1,):
                (two(x) * factor).sin().mean().backward()

        take: Any = PlayedByHand(step, whole) if graphed else step
        for x in batches(6):
            if not accumulates:
                whole.zero_grad(set_to_none=True)
            take(x)
        results.append([p.grad for p in whole.parameters() if p.grad is not None])
        assert not graphed or take.replays == 3
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-6)  # of two losses, the sum is what is added


def test_a_first_parameter_that_backward_does_not_reach() -> None:
    """It gets noise all the same."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"unused": nn.Linear(2, 2), "used": nn.Linear(6, 3)})
    plain.forward = lambda x: plain["used"](x)  # type: ignore[method-assign]
    model = GradSampleModuleFlashClipping(plain, max_grad_norm=0.5)
    step = PlayedByHand(lambda x: squared_loss(model, (x,)).mean().backward(), model)
    for x in batches(6):
        model.zero_grad(set_to_none=True)
        step(x)
        assert not plain["unused"].weight.grad.any()
    assert step.replays == 3


def test_sparse_gradients_are_refused() -> None:
    plain = nn.Embedding(10, 3, sparse=True)
    step = PlayedByHand(lambda ids: plain(ids).sum().backward(), plain)
    ids = torch.tensor([[1, 2]])
    for _ in range(3):
        plain.zero_grad()
        step(ids)
    with pytest.raises(FlashClippingError, match="gives sparse gradients"):
        step(ids)


def half_a_pair() -> float:
    """NumPy draws normal numbers two at a time and keeps one, which it gives here."""
    return float(numpy.random.randn())


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: numpy.random.rand(), half_a_pair, lambda: torch.rand([])],
    ids=["random", "numpy", "half of a numpy pair", "torch"],
)
def test_a_step_that_draws_on_the_host_is_refused(draw: Callable[[], Any]) -> None:
    training = Training(None)

    def step(x: Tensor) -> None:
        training.step(x * float(draw()))

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    numpy.random.seed(0)
    numpy.random.randn()
    graphed(x)
    graphed(x)
    with pytest.raises(FlashClippingError, match="draws random numbers on the host"):
        graphed(x)


def test_a_step_that_changes_an_argument_is_refused() -> None:
    training = Training(None)
    graphed = PlayedByHand(lambda x, seen: (training.step(x), seen.add_(1))[1], training.model)
    x, seen = batches(1)[0], torch.zeros(())
    for _ in range(3):
        graphed(x, seen)
    with pytest.raises(FlashClippingError, match="changes one of its arguments in place"):
        graphed(x, seen)


def test_settings_of_precision_old_and_new() -> None:
    """PyTorch refuses to tell the older ones once the newer have been used."""
    script = """
import torch
from tests.test_graphed_step import PlayedByHand, Training, batches
training = Training(PlayedByHand)
settings = [None]
if hasattr(torch.backends.cudnn, "conv") and hasattr(torch.backends.cudnn.conv, "fp32_precision"):
    settings += [("cudnn.conv", "ieee"), ("cuda.matmul", "tf32")]
for i, setting in enumerate(settings):
    if setting is not None:
        place, value = setting
        owner, name = place.split(".")
        getattr(getattr(torch.backends, owner), name).fp32_precision = value
    for x in batches(5):
        training.results(x)
    assert training.step.replays == 2 * (i + 1), training.step.replays
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_weights_that_change_in_place_need_no_other_graph() -> None:
    graphed, eager = warmed()
    for x in batches(3, start=40):
        for training in (graphed, eager):
            with torch.no_grad():
                for p in training.plain.parameters():
                    p.mul_(0.9)
        assert_same(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 4


def test_gradients_are_added_to_those_that_are_there() -> None:
    graphed, eager = warmed()
    for training in (graphed, eager):
        training.model.zero_grad(set_to_none=True)
    for x in batches(4, start=50):
        graphed.step(x)
        eager.step(x)
        for p, q in zip(graphed.plain.parameters(), eager.plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert graphed.step.replays == 5


@pytest.mark.parametrize(
    "keep", [lambda g: g, Tensor.detach, lambda g: g.view(-1)[:1], Tensor.numpy]
)
def test_gradients_that_somebody_keeps_stay_as_they_are(keep: Callable[[Tensor], Any]) -> None:
    graphed, eager = warmed()
    graphed.results(batches(1)[0])
    assert graphed.step.replays == 2
    kept = [keep(p.grad) for p in graphed.plain.parameters()]
    before = [torch.as_tensor(x).clone() for x in kept]
    assert_same(graphed.results(batches(1, start=60)[0]), eager.results(batches(1, start=60)[0]))
    assert_same([torch.as_tensor(x) for x in kept], before)
    assert graphed.step.replays == 2
    del kept
    graphed.results(batches(1)[0])
    assert graphed.step.replays == 3


def test_nothing_is_captured_while_another_loss_is_kept() -> None:
    """Its graph's last nodes would be the captured step's as well, on another stream."""
    graphed, eager = Training(PlayedByHand), Training(None)
    kept = squared_loss(graphed.model, (batches(1)[0],)).sum()
    for x in batches(6):
        assert_same(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 0
    del kept
    for x in batches(2):
        assert_same(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 2


def test_results_and_norms_are_the_callers_own() -> None:
    graphed, _ = warmed()
    graphed.model.zero_grad(set_to_none=True)
    first = graphed.step(batches(1)[0])["losses"]
    norms = graphed.model.per_sample_gradient_norms
    of_param = graphed.plain[0].weight._norm_sample
    before = [x.clone() for x in (first, norms, of_param)]
    graphed.results(batches(1, start=70)[0])
    assert_same([first, norms, of_param], before)
    assert not first.requires_grad


def test_a_sample_that_is_not_finite() -> None:
    graphed, eager = warmed()
    x = batches(1)[0].clone()
    x[2, 1] = torch.inf
    with pytest.warns(UserWarning, match="not finite"):
        found = graphed.results(x)
    with pytest.warns(UserWarning, match="not finite"):
        expected = eager.results(x)
    assert graphed.step.replays == 2
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def train(graphed: bool, physical: int, noise: float) -> tuple[list[Tensor], int]:
    """Some epochs under the engine, with batches that are cut into smaller ones.

    Returns:
        Parameters and losses; how many steps were replays.
    """
    plain = network()
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(48, 5, 6, generator=generator))
    model, optimizer, _, loader = FlashPrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.Adam(plain.parameters(), lr=0.05),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=noise,
        noise_generator=torch.Generator().manual_seed(4),
        max_grad_norm=0.5,
    )

    def step(x: Tensor) -> Tensor:
        loss = squared_loss(model, (x,)).mean()
        loss.backward()
        return loss

    take = PlayedByHand(step, model) if graphed else step
    torch.manual_seed(5)
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


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("physical", [4, 64])
def test_training_with_poisson_batches(physical: int, noise: float) -> None:
    found, replays = train(True, physical, noise)
    assert_same(found, train(False, physical, noise)[0])
    # Whole batches are of other sizes almost every time.
    assert replays >= 30 if physical == 4 else replays <= 3


def test_a_step_without_zero_grad_is_refused_as_without_graphs() -> None:
    """The optimizer's mark on a sum that it has used is not lost with a copy of it."""
    plain = network()
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
    with pytest.raises(ValueError, match="Gradients haven't been cleared since the last optimizer"):
        optimizer.step()


def test_a_second_backward_per_poisson_batch_is_refused() -> None:
    graphed, _ = warmed()
    graphed.model.forbid_grad_accumulation()
    graphed.results(batches(1)[0])
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        graphed.step(batches(1)[0])


def test_a_capture_that_fails_leaves_nothing() -> None:
    graphed, eager = Training(PlayedByHand), Training(None)
    for x in batches(3):
        graphed.results(x)

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    handle = graphed.plain[2].register_forward_hook(fail)
    kept = [torch.ones_like(p) for p in graphed.plain.parameters()]
    for p, grad in zip(graphed.plain.parameters(), kept, strict=True):
        p.grad = grad
    with pytest.raises(RuntimeError, match="injected"):
        graphed.step(batches(1)[0])
    assert all(p.grad is g for p, g in zip(graphed.plain.parameters(), kept, strict=True))
    assert graphed.model._session.captured is None and not graphed.step._graphs
    handle.remove()
    for x in batches(2, start=80):
        assert_same(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 2


def test_graphs_are_as_many_as_were_asked_for() -> None:
    training = Training(None)
    step = PlayedByHand(training.step, training.model, warmup=2, graphs=2)
    for size in (4, 3, 2, 4, 3, 2, 4, 3, 2, 4, 3, 2):
        training.model.zero_grad(set_to_none=True)
        step(batches(1, size=size)[0])
    assert len(step._graphs) == 2 and step.replays == 4
    another_bound(training)  # what was captured before will not be found again
    for x in batches(4):
        training.model.zero_grad(set_to_none=True)
        step(x)
    assert len(step._graphs) == 1 and step.replays == 6
    none = PlayedByHand(training.step, training.model, graphs=0)
    for x in batches(6):
        none(x)
    assert none.replays == 0


def test_tensors_that_no_copy_can_stand_in_for() -> None:
    training = Training(PlayedByHand, wrap=False)
    for _ in range(5):
        x = batches(1)[0].requires_grad_()
        training.step(x)
        assert x.grad is not None
    assert training.step.replays == 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        training.step(batches(1)[0])


def test_arguments_and_results_of_other_types() -> None:
    training = Training(PlayedByHand)

    class Batch:
        pass

    with pytest.raises(TypeError, match=r"found Batch in the step's arguments.*Pass dict\(batch\)"):
        training.step([Batch()])
    odd = GraphedStep(lambda x: Batch(), training.model)
    with pytest.raises(TypeError, match="found Batch in the step's results.*Return the loss"):
        odd(batches(1)[0])
    counting = GraphedStep(lambda x: 1.0, training.model)
    with pytest.raises(TypeError, match="found float in the step's results"):
        counting(batches(1)[0])


@pytest.mark.parametrize(("warmup", "graphs"), [(1, 4), (3, -1)])
def test_numbers_that_make_no_sense(warmup: int, graphs: int) -> None:
    with pytest.raises(ValueError, match=f"found warmup={warmup} and graphs={graphs}"):
        GraphedStep(lambda: None, network(), warmup=warmup, graphs=graphs)


def test_without_a_gpu_the_step_is_called() -> None:
    graphed, eager = Training(GraphedStep), Training(None)
    for x in batches(6):
        assert_same(graphed.results(x), eager.results(x))
    assert (graphed.step.calls, graphed.step.replays) == (6, 0)


def test_a_model_that_is_not_wrapped_but_hooked() -> None:
    plain, twin = network(), network()
    hooks = GradSampleHooksFlashClipping(plain, max_grad_norm=0.5)
    expected = GradSampleModuleFlashClipping(twin, max_grad_norm=0.5)
    step = PlayedByHand(lambda x: squared_loss(plain, (x,)).mean().backward(), hooks)
    for x in batches(6):
        for p in [*plain.parameters(), *twin.parameters()]:
            p.grad = None
        step(x)
        squared_loss(expected, (x,)).mean().backward()
        assert torch.equal(hooks.get_norm_sample(), expected.get_norm_sample())
        assert_same([p.grad for p in plain.parameters()], [p.grad for p in twin.parameters()])
    assert step.replays == 3


def test_replays_count_the_samples_within_the_bound() -> None:
    """What adaptive clipping moves its bound by, at the end of the step."""
    graphed, eager = warmed()
    for training in (graphed, eager):
        training.model.counts_unclipped = True
    for x in batches(3):
        assert_same(graphed.results(x), eager.results(x))
        found, expected = (t.model._record.unclipped for t in (graphed, eager))
        assert found == expected
    assert graphed.step.replays >= 3


def test_an_upload_that_no_replay_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with pytest.raises(FlashClippingError, match="Capture a step with flash_clipping.GraphedStep"):
        to_device([1, 2], torch.device("meta"), torch.int64)


# -- on a GPU -----------------------------------------------------------------------------------


def case_on_gpu(
    case: Case, dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, GradSampleModuleFlashClipping, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    plain = case.make().to("cuda", dtype)
    drawn = [case.batch() for _ in range(2)]
    moved = [
        tuple(x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in batch)
        for batch in drawn
    ]
    return plain, GradSampleModuleFlashClipping(plain, max_grad_norm=0.5, **options), moved


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", CASES)
def test_every_rule_as_a_graph(name: str, mode: str, dtype: torch.dtype) -> None:
    """Replays on another batch than the captured one give that batch's bits."""
    case = CASES[name]
    plain, model, (first, second) = case_on_gpu(case, dtype, mode=mode)

    def run(*batch: Tensor) -> None:
        case.loss(model, batch).mean().backward()

    step = GraphedStep(run, model)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(*first)
    assert step.replays == 1
    model.zero_grad(set_to_none=True)
    step(*second)
    assert step.replays == 2
    found = [p.grad.clone() for p in plain.parameters()] + [model.get_norm_sample()]
    model.zero_grad(set_to_none=True)
    run(*second)
    expected = [*(p.grad for p in plain.parameters()), model.get_norm_sample()]
    if name == "conv2d_reflect":  # PyTorch's own backward adds in any order
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, 1e-5 if dtype == torch.float32 else 1e-2, name)
    else:
        assert_same(found, expected)


@on_gpu
@pytest.mark.parametrize("positions", [8, 96, 600])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_large_layers_as_a_graph(clipping: str, positions: int) -> None:
    """Stored gradients, products that are repaired, tables of every kind; a replay never waits."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(64, 512),
        nn.LayerNorm(512),
        nn.Dropout(0.1),
        nn.Linear(512, 512),
        nn.Linear(512, 8),
    ).to("cuda", torch.bfloat16)
    bound = [0.5] * len(list(plain.parameters())) if clipping == "per_layer" else 0.5
    model = GradSampleModuleFlashClipping(plain, max_grad_norm=bound, clipping=clipping)

    def run(x: Tensor) -> Tensor:
        loss = squared_loss(model, (x,)).mean()
        loss.backward()
        return loss

    step = GraphedStep(run, model)
    xs = [torch.randn(4, positions, 64, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    xs[5][2, 3] = torch.inf
    for i, x in enumerate(xs):
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(i)
        torch.cuda.synchronize()
        if i > 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [loss, *(p.grad.clone() for p in plain.parameters()), model.get_norm_sample()]
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(i)
        loss = run(x).detach()
        expected = [loss, *(p.grad for p in plain.parameters()), model.get_norm_sample()]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    assert step.replays == 3


@on_gpu
def test_graphs_of_several_sizes_share_memory() -> None:
    plain, model, _ = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]

    def run(*batch: Tensor) -> Tensor:
        losses = case.loss(model, batch)
        losses.mean().backward()
        return losses

    step = GraphedStep(run, model, warmup=2)
    torch.manual_seed(1)
    (full,) = [tuple(x.to("cuda") for x in case.batch())]
    sizes = [len(full[0]), len(full[0]) - 1, 1]
    for turn in range(8):
        for size in sizes:
            batch = tuple(x[:size].roll(turn, 0) for x in full)
            model.zero_grad(set_to_none=True)
            found = [step(*batch), *(p.grad.clone() for p in plain.parameters())]
            model.zero_grad(set_to_none=True)
            assert_same(found, [run(*batch).detach(), *(p.grad for p in plain.parameters())])
    assert step.replays == 3 * 6


@on_gpu
def test_a_graph_after_all_others_have_gone() -> None:
    case = CASES["mixed"]
    plain, model, (batch, _) = case_on_gpu(case, torch.float32)

    def run(*batch: Tensor) -> None:
        case.loss(model, batch).mean().backward()

    step = GraphedStep(run, model, graphs=1)
    for bound in (0.5, 0.25, 0.125):
        model.max_grad_norm = bound
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            step(*batch)
        found = [p.grad.clone() for p in plain.parameters()]
        model.zero_grad(set_to_none=True)
        run(*batch)
        assert_same(found, [p.grad for p in plain.parameters()])
    assert step.replays == 9


@on_gpu
def test_hundreds_of_replays_do_not_grow() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]
    step = GraphedStep(lambda *batch: case.loss(model, batch).mean().backward(), model)
    for i in range(300):
        model.zero_grad(set_to_none=True)
        step(*batch)
        if i == 20:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert step.replays == 297


@on_gpu
def test_a_step_that_waits_is_refused_before_it_is_captured() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]

    def run(*batch: Tensor) -> None:
        loss = case.loss(model, batch).mean()
        loss.backward()
        loss.item()

    step = GraphedStep(run, model)
    step(*batch)
    step(*batch)
    with pytest.raises(FlashClippingError, match="the step waits for the device"):
        step(*batch)
    assert torch.cuda.get_sync_debug_mode() == 0


@on_gpu
def test_a_batch_that_is_elsewhere() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    step = GraphedStep(lambda *batch: None, model)
    with pytest.raises(ValueError, match="found parameters and arguments on cpu and cuda:0"):
        step(*(x.cpu() for x in batch))


@on_gpu
def test_weights_that_autocast_has_cast_before() -> None:
    """Under an autocast around the call, casts of weights outlive a step in PyTorch's cache."""
    plain, model, (first, second) = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]

    def run(*batch: Tensor) -> None:
        case.loss(model, batch).mean().backward()

    step = GraphedStep(run, model)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            step(*first)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    with torch.autocast("cuda", torch.bfloat16):
        model.zero_grad(set_to_none=True)
        step(*second)
        found = [p.grad.clone() for p in plain.parameters()]
    assert step.replays == 3
    with torch.autocast("cuda", torch.bfloat16):
        model.zero_grad(set_to_none=True)
        run(*second)
    assert_same(found, [p.grad for p in plain.parameters()])
