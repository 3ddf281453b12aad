"""Steps as CUDA graphs: what replays leave, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, GraphedStep
from flash_clipping.ops.runtime import tables
from flash_clipping.ops.runtime.tables import to_device
from tests.support.errors import raises, warns
from tests.support.graphs import (
    GraphedTraining,
    PlayedByHand,
    assert_same_tensors,
    batches,
    small_network,
    warmed,
)
from tests.support.models import squared_loss
from tests.support.oracle import assert_close, per_sample_truth
from tests.support.sums import norm_of


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
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 6


def test_norms_of_a_replay_are_the_oracles() -> None:
    graphed, _ = warmed()
    (x,) = batches(1, start=20)
    graphed.results(x)
    assert graphed.step.replays == 2
    truth = per_sample_truth(small_network(), (x,), squared_loss)
    assert_close(graphed.model.get_norm_sample(), truth.norms, 1e-5, "norms")


def test_a_row_of_nobody_is_not_replayed() -> None:
    graphed, eager = warmed()
    for x in batches(6, size=1):
        assert_same_tensors(graphed.results(x), eager.results(x))
    replays = graphed.step.replays
    assert replays > 1
    for training in (graphed, eager):
        training.model.expect_samples(0)
    (x,) = batches(1, size=1)
    assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.step.replays == replays
    assert not any(param.grad.any() for param in graphed.model.parameters())
    graphed.model.expect_samples(None)
    graphed.model._session.rows.draws.have_nobody = True  # a loader has given such a row
    with raises("FC251"):
        graphed.results(x)


def another_bound(training: GraphedTraining) -> None:
    training.model.max_grad_norm = 0.01


def another_clipping(training: GraphedTraining) -> None:
    training.model.clipping = "automatic"


def frozen(training: GraphedTraining) -> None:
    training.plain[0].weight.requires_grad = False


def in_evaluation(training: GraphedTraining) -> None:
    training.model.eval()


def without_hooks(training: GraphedTraining) -> None:
    training.model.disable_hooks()


def other_memory(training: GraphedTraining) -> None:
    training.plain[3].weight.data = training.plain[3].weight.data * 2


def other_setting(training: GraphedTraining) -> None:
    training.plain[1].eps = 0.5


def a_hook(training: GraphedTraining) -> None:
    training.plain[2].register_forward_hook(lambda layer, args, output: output * 2)


def another_forward(training: GraphedTraining) -> None:
    training.plain[2].forward = lambda x: x * 2


def other_layer(training: GraphedTraining) -> None:
    training.plain[2] = nn.ReLU()


def other_parameter(training: GraphedTraining) -> None:
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
        other_layer,
        other_parameter,
        other_setting,
        a_hook,
        another_forward,
    ],
)
def test_what_python_decides_is_looked_at_in_every_call(
    change: Callable[[GraphedTraining], None],
) -> None:
    graphed, eager = warmed()
    change(graphed)
    change(eager)
    for x in batches(5, start=30):
        results = gradients_of if change is without_hooks else GraphedTraining.results
        assert_same_tensors(results(graphed, x), results(eager, x))
    # The first, and after three calls under what holds now; a new parameter is first hooked to.
    assert graphed.step.replays == (2 if change is other_parameter else 3)


def gradients_of(training: GraphedTraining, x: Tensor) -> list[Tensor]:
    training.model.zero_grad(set_to_none=True)
    training.step(x)
    return [p.grad.clone() for p in training.plain.parameters()]


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
    assert_same_tensors(
        graphed.results(batches(1, start=60)[0]), eager.results(batches(1, start=60)[0])
    )
    assert_same_tensors([torch.as_tensor(x) for x in kept], before)
    assert graphed.step.replays == 2
    del kept
    graphed.results(batches(1)[0])
    assert graphed.step.replays == 3


def test_nothing_is_captured_while_another_loss_is_kept() -> None:
    """Its graph's last nodes would be the captured step's as well, on another stream."""
    graphed, eager = GraphedTraining(PlayedByHand), GraphedTraining(None)
    kept = squared_loss(graphed.model, (batches(1)[0],)).sum()
    for x in batches(6):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 0
    with warns("FC706", match="32") as said:
        for x in batches(40):
            graphed.results(x)
    assert len(said) == 1
    del kept
    for x in batches(2):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 2


def test_results_and_norms_are_the_callers_own() -> None:
    graphed, _ = warmed()
    graphed.model.zero_grad(set_to_none=True)
    first = graphed.step(batches(1)[0])["losses"]
    norms = graphed.model.per_sample_gradient_norms
    of_param = norm_of(graphed.model, graphed.plain[0].weight)
    before = [x.clone() for x in (first, norms, of_param)]
    graphed.results(batches(1, start=70)[0])
    assert_same_tensors([first, norms, of_param], before)
    assert not first.requires_grad


def test_a_sample_that_is_not_finite() -> None:
    graphed, eager = warmed()
    x = batches(1)[0].clone()
    x[2, 1] = torch.inf
    with warns("FC555"):
        found = graphed.results(x)
    with warns("FC555"):
        expected = eager.results(x)
    assert graphed.step.replays == 2
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def test_a_capture_that_fails_leaves_nothing() -> None:
    graphed, eager = GraphedTraining(PlayedByHand), GraphedTraining(None)
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
    assert graphed.model._session.calls.captured is None and not graphed.step._graphs
    handle.remove()
    for x in batches(2, start=80):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert graphed.step.replays == 2


def test_graphs_are_as_many_as_were_asked_for() -> None:
    training = GraphedTraining(None)
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
    training = GraphedTraining(PlayedByHand, wrap=False)
    for _ in range(5):
        x = batches(1)[0].requires_grad_()
        training.step(x)
        assert x.grad is not None
    assert training.step.replays == 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        training.step(batches(1)[0])


def test_arguments_and_results_of_other_types() -> None:
    training = GraphedTraining(PlayedByHand)

    class Batch:
        pass

    with raises(
        "FC702", TypeError, match=r"found Batch in the step's arguments.*Pass dict\(batch\)"
    ):
        training.step([Batch()])
    odd = GraphedStep(lambda x: Batch(), training.model)
    with raises("FC702", TypeError, match="found Batch in the step's results.*Return the loss"):
        odd(batches(1)[0])
    counting = GraphedStep(lambda x: 1.0, training.model)
    with raises("FC702", TypeError, match="found float in the step's results"):
        counting(batches(1)[0])


def test_without_a_gpu_the_step_is_called() -> None:
    graphed, eager = GraphedTraining(GraphedStep), GraphedTraining(None)
    for x in batches(6):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert (graphed.step.calls, graphed.step.replays) == (6, 0)


def test_replays_count_the_samples_within_the_bound() -> None:
    """What adaptive clipping moves its bound by, at the end of the step."""
    graphed, eager = warmed()
    for training in (graphed, eager):
        training.model.running_step.counts_unclipped = True
    for x in batches(3):
        assert_same_tensors(graphed.results(x), eager.results(x))
        found, expected = (t.model.running_step.record.unclipped for t in (graphed, eager))
        assert found == expected
    assert graphed.step.replays >= 3


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


def test_sparse_gradients_are_refused() -> None:
    plain = nn.Embedding(10, 3, sparse=True)
    step = PlayedByHand(lambda ids: plain(ids).sum().backward(), plain)
    ids = torch.tensor([[1, 2]])
    for _ in range(3):
        plain.zero_grad()
        step(ids)
    with raises("FC703", match="gives sparse gradients"):
        step(ids)


def clears(training: GraphedTraining, x: Tensor, seen: Tensor) -> None:
    training.model.zero_grad(set_to_none=True)
    training.step(x)


def zeroes(training: GraphedTraining, x: Tensor, seen: Tensor) -> None:
    training.model.zero_grad(set_to_none=False)
    training.step(x)


def descends(training: GraphedTraining, x: Tensor, seen: Tensor) -> None:
    training.step(x)
    torch.optim.SGD(training.plain.parameters(), lr=0.1).step()


def writes(training: GraphedTraining, x: Tensor, seen: Tensor) -> None:
    training.step(x)
    seen.add_(1)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": lambda: numpy.random.rand(),
    "torch": lambda: torch.rand([]),
}
#: Steps, and why no replay repeats them.
REFUSED: dict[str, tuple[Callable[[GraphedTraining, Tensor, Tensor], None], str]] = {
    "clears": (clears, r"clears gradients.*Call zero_grad\(\) outside"),
    "zeroes": (zeroes, r"clears gradients.*Call zero_grad\(\) outside"),
    "descends": (descends, "changes parameters"),
    "writes": (writes, "changes one of its arguments in place"),
    **{
        name: (
            lambda training, x, seen, draw=draw: training.step(x * float(draw())),
            "draws random numbers on the host",
        )
        for name, draw in DRAWS.items()
    },
}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [*((name, True) for name in REFUSED), ("clears", False), ("descends", False)],
)
def test_a_step_that_no_replay_repeats_is_refused(name: str, wrap: bool) -> None:
    take, why = REFUSED[name]
    training = GraphedTraining(None, wrap=wrap)
    graphed = PlayedByHand(partial(take, training), training.model)
    x, seen = batches(1)[0], torch.zeros(())
    numpy.random.seed(0)
    numpy.random.randn()
    graphed(x, seen)
    graphed(x, seen)
    with raises("FC703", match=why):
        for _ in range(2):
            graphed(x, seen)


@pytest.mark.parametrize(("name", "value"), [("warmup", 1), ("graphs", -1)])
def test_numbers_that_make_no_sense(name: str, value: int) -> None:
    with raises("FC302", ValueError, match=f"{name}: found {value}"):
        GraphedStep(lambda: None, small_network(), **{name: value})


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_rehearsed_as_it_will_be_captured(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that wait for the device in no capture (masks of transformers) can be captured."""
    training, asked = GraphedTraining(None), []

    def asks() -> bool:
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asks)

    def step(x: Tensor) -> None:
        asked.append(torch.cuda.is_current_stream_capturing())
        training.step(x)
        if fails and asked[-1]:
            raise ZeroDivisionError

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        graphed(x)
    assert asked == [False, False, True]
    assert torch.cuda.is_current_stream_capturing is asks


def test_an_upload_that_no_replay_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with raises("FC701"):
        to_device([1, 2], torch.device("meta"), torch.int64)
