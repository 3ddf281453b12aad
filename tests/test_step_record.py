"""One truth for bound, sum and noise: noise is for the bound that the step's sums were clipped by.

What is released is looked at where noise is drawn: the sums, and the noise's standard deviation.
Gradients are large, so that every sample is clipped and a batch of one moves the sum by exactly its
bound; ``Released.ratio`` is that, in units of what the noise is for.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import schedulers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping.integration.optimizer
from flash_clipping import (
    FlashClippingError,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    GraphedStep,
)

SLACK = 1 + 1e-4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Released:
    """What noise was added to: norm of the sums, and standard deviation, release by release."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.releases: list[tuple[float, float]] = []
        self.sums: list[list[Tensor]] = []
        real = flash_clipping.integration.optimizer.noisy_means

        def noisy_means(sums: list[Tensor], std: float, *args: Any, **kwargs: Any) -> Any:
            total = torch.cat([s.double().flatten() for s in sums]).norm().item()
            self.releases.append((total, std))
            self.sums.append([s.clone() for s in sums])
            return real(sums, std, *args, **kwargs)

        monkeypatch.setattr(flash_clipping.integration.optimizer, "noisy_means", noisy_means)

    def ratio(self, multiplier: float = 1.0) -> float:
        norm, std = self.releases[-1]
        return norm * multiplier / std


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Released:
    return Released(monkeypatch)


class Private:
    """A small model made private."""

    def __init__(self, model: nn.Module | None = None, **options: Any):
        torch.manual_seed(0)
        self.plain = Net() if model is None else model
        self.engine = options.pop("engine", None) or FlashPrivacyEngine(accountant="rdp")
        options = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.1,
            "poisson_sampling": False,
        } | options
        size = options.pop("batch_size", 16)
        parameters = options.pop("parameters", None) or self.plain.parameters()
        private = self.engine.make_private(
            module=self.plain,
            optimizer=torch.optim.SGD(parameters, lr=options.pop("lr", 0.1)),
            data_loader=DataLoader(data(), batch_size=size),
            criterion=nn.CrossEntropyLoss(),
            **options,
        )
        self.wrapper, self.optimizer, self.criterion, self.loader = private
        self.model = self.wrapper if options.get("wrap_model", True) else self.plain

    def backward(self, samples: int = 1, start: int = 0) -> None:
        x = data().tensors[0][start : start + samples]
        (100 * self.model(x).square().sum(1).mean()).backward()

    def step(self, samples: int = 1) -> None:
        self.optimizer.zero_grad()
        self.backward(samples)
        self.optimizer.step()


def data(size: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator) * 30
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.01, 0.02, 0.03, 0.04]}

# -- the bound ------------------------------------------------------------------------------------


def test_noise_is_for_the_bound_that_the_sum_was_clipped_by(released: Released) -> None:
    private = Private(max_grad_norm=10.0)
    private.backward()
    private.optimizer.max_grad_norm = 0.01
    private.optimizer.step()
    assert released.releases[-1][0] == pytest.approx(10.0, rel=1e-4)
    assert released.ratio() <= SLACK  # was 1000
    private.step()  # from the next step on
    assert released.releases[-1][0] == pytest.approx(0.01, rel=1e-3)
    assert released.releases[-1][1] == pytest.approx(0.01)


@pytest.mark.parametrize("options", [{}, PER_LAYER, {"clipping": "automatic"}])
@pytest.mark.parametrize("setter", ["model", "optimizer"])
def test_model_and_optimizer_have_one_bound(
    setter: str, options: dict[str, Any], released: Released
) -> None:
    private = Private(**options)
    if setter == "optimizer":
        private.optimizer.max_grad_norm = 1e-3
    else:
        private.wrapper.max_grad_norm = [5e-4] * 4 if options == PER_LAYER else 1e-3
    private.step()
    assert private.optimizer.max_grad_norm == pytest.approx(1e-3)
    found = private.wrapper.max_grad_norm
    total = torch.tensor(found).norm().item()
    assert total == pytest.approx(1e-3)
    assert released.releases[-1][1] == pytest.approx(1e-3)
    assert released.ratio() <= SLACK


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialGradClip(optimizer, gamma=0.1),
    "lambda": lambda optimizer: schedulers.LambdaGradClip(
        optimizer, scheduler_function=lambda epoch: 0.1**epoch
    ),
    "step": lambda optimizer: schedulers.StepGradClip(optimizer, step_size=1, gamma=0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_clip_schedulers_move_clipping_and_noise(
    options: dict[str, Any], name: str, released: Released
) -> None:
    """Per-layer bounds stayed as they were while the noise shrank with the schedule: 100 times."""
    private = Private(**options)
    scheduler = SCHEDULERS[name](private.optimizer)
    first = private.optimizer.max_grad_norm
    for epoch in range(3):
        private.step()
        assert released.releases[-1][1] == pytest.approx(first * 0.1**epoch)
        assert released.ratio() <= SLACK
        scheduler.step()
    if options:
        expected = [bound * 1e-3 for bound in PER_LAYER["max_grad_norm"]]  # type: ignore[attr-defined]
        assert private.optimizer.max_grad_norms == pytest.approx(expected)


NOISE_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialNoise(optimizer, gamma=2.0),
    "lambda": lambda optimizer: schedulers.LambdaNoise(
        optimizer, noise_lambda=lambda epoch: 2.0**epoch
    ),
    "step": lambda optimizer: schedulers.StepNoise(optimizer, step_size=1, gamma=2.0),
}


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_noise_schedulers_are_accounted_as_drawn(
    options: dict[str, Any], name: str, released: Released
) -> None:
    private = Private(**options)
    scheduler = NOISE_SCHEDULERS[name](private.optimizer)
    for _ in range(3):
        private.step()
        scheduler.step()
    drawn = [std / private.optimizer.max_grad_norm for _, std in released.releases]
    accounted = [multiplier for multiplier, *_ in private.engine.accountant.history]
    assert drawn == pytest.approx(accounted)
    assert drawn == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_clips_by_one_bound(skipped: bool) -> None:
    private = Private()
    private.optimizer.signal_skip_step(True)
    private.backward()
    if skipped:
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.wrapper.max_grad_norm = 0.05
    text = r"max_grad_norm=0\.05, but the step .* max_grad_norm=0\.1 so far"
    with pytest.raises(FlashClippingError, match=text):
        private.backward()
    private.wrapper.clipping, private.wrapper.max_grad_norm = "automatic", 0.1
    with pytest.raises(FlashClippingError, match="clipping='automatic'"):
        private.backward()
    private.wrapper.clipping = "flat"
    private.backward(start=1)  # the step goes on


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), [0.1, -0.1]])
def test_a_bound_that_bounds_nothing_is_refused(value: Any) -> None:
    private = Private()
    for holder in (private.wrapper, private.optimizer):
        with pytest.raises(ValueError, match="expected positive numbers"):
            holder.max_grad_norm = value
    assert private.wrapper.max_grad_norm == private.optimizer.max_grad_norm == 0.1


# -- the parameters -------------------------------------------------------------------------------


def test_parameters_that_the_wrapper_does_not_know(released: Released) -> None:
    """Were released as they were: 29 at a bound of 0.01."""
    private = Private(max_grad_norm=0.01)
    extra = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="add_param_group: found a parameter of shape .3, 6."):
        private.optimizer.add_param_group({"params": extra.parameters()})
    for group in (
        private.optimizer.original_optimizer.add_param_group,
        private.optimizer.param_groups.append,
    ):
        group({"params": [*nn.Linear(6, 3).parameters()], "lr": 0.1})
    x, y = (part[:1] for part in data().tensors)
    extra_layers = private.optimizer.param_groups[1]["params"]
    F.cross_entropy(private.model(x) + F.linear(x, *extra_layers), y).backward()
    with pytest.raises(ValueError, match="that the wrapped model has not"):
        private.optimizer.step()
    assert not released.releases


def test_parameters_that_are_unfrozen_later_may_be_added(released: Released) -> None:
    model = Net()
    model.head.requires_grad_(False)
    private = Private(model, parameters=[*model.body.parameters()])
    private.step()
    model.head.requires_grad_(True)
    private.optimizer.add_param_group({"params": [*model.head.parameters()]})
    before = model.head.weight.detach().clone()
    private.step()
    assert released.ratio() <= SLACK
    assert len(released.sums[-1]) == 4 and not torch.equal(before, model.head.weight)


def replace_head(private: Private) -> None:
    private.plain.head = nn.Linear(8, 3)


def replace_nested(private: Private) -> None:
    private.plain.body[0] = nn.Linear(6, 8)


def insert_nested(private: Private) -> None:
    private.plain.body.insert(1, nn.LayerNorm(8))


def put_on_the_wrapper(private: Private) -> None:
    private.wrapper.head = nn.Linear(8, 3)


def late_parameter(private: Private) -> None:
    private.plain.body[1].gain = nn.Parameter(torch.ones(8))


def parametrize(private: Private) -> None:
    nn.utils.parametrizations.weight_norm(private.plain.head)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replace_head, r"head \(Linear\): its parameter 'weight' came after"),
        (replace_nested, r"body\.0 \(Linear\): its parameter 'weight' came after"),
        (insert_nested, r"body\.1 \(LayerNorm\): its parameter 'weight' came after"),
        (put_on_the_wrapper, r"head \(Linear\): .*onto the wrapper"),
        (late_parameter, r"body\.1 \(Tanh\): its parameter 'gain' came after"),
        (parametrize, r"head\.parametrizations\.weight .*came after the model was wrapped"),
    ],
)
def test_layers_that_come_after_wrapping(
    change: Callable[[Private], None], text: str, mode: str
) -> None:
    private = Private(mode=mode)
    private.step()
    change(private)
    with pytest.raises(FlashClippingError, match=text):
        private.step()


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_parameter_that_the_first_forward_makes(wrap_model: bool) -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "gain"):
                self.gain = nn.Parameter(torch.ones(8))
            return x * self.gain

    model = Net()
    model.body.append(Late())
    private = Private(model, wrap_model=wrap_model)
    with pytest.raises(FlashClippingError, match=r"body\.2 \(Late\): its parameter 'gain' came"):
        private.backward()


def test_lazy_modules_are_refused_when_they_are_wrapped() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(NotImplementedError, match=r"0 \(LazyLinear\): .*has no shape before"):
        GradSampleModuleFlashClipping(model)


def test_what_has_no_trainable_parameter_may_come_and_go(released: Released) -> None:
    private = Private()
    private.plain.body[1] = nn.ReLU()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    private.plain.after = frozen
    private.wrapper.metric = nn.Identity()
    private.step()
    assert released.ratio() <= SLACK
    frozen.requires_grad_(True)
    with pytest.raises(FlashClippingError, match=r"after \(Linear\)"):
        private.plain.body.append(nn.Identity())
        private.step()


def test_a_parameter_of_a_known_layer_may_be_replaced(released: Released) -> None:
    """Its tap looks at what the layer has; the optimizer must have it as well."""
    private = Private()
    private.plain.head.weight = nn.Parameter(torch.randn(3, 8) * 1e3)
    private.backward()
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 8\) that the wrapped model has"):
        private.optimizer.step()
    private.optimizer.param_groups[0]["params"] = [*private.plain.parameters()]
    private.step()
    assert released.ratio() <= SLACK


# -- p.grad between backward and step -------------------------------------------------------------


def clip_again(private: Private) -> None:
    torch.nn.utils.clip_grad_norm_(private.plain.parameters(), 1.0)


def add_by_hand(private: Private) -> None:
    private.plain.head.weight.grad += 100.0


def replace_by_hand(private: Private) -> None:
    private.plain.head.weight.grad = private.plain.head.weight.grad * 100


def ordinary_backward(private: Private) -> None:
    x, y = (part[:1] for part in data().tensors)
    private.wrapper.disable_hooks()
    F.cross_entropy(private.model(x), y).backward()
    private.wrapper.enable_hooks()


def only_ordinary_backward(private: Private) -> None:
    private.optimizer.zero_grad()
    ordinary_backward(private)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    "change",
    [clip_again, add_by_hand, replace_by_hand, ordinary_backward, only_ordinary_backward],
)
def test_a_gradient_that_is_not_the_clipped_sum(
    change: Callable[[Private], None], mode: str, released: Released
) -> None:
    private = Private(mode=mode)
    private.backward()
    change(private)
    before = [p.detach().clone() for p in private.plain.parameters()]
    text = "is not the clipped sum that backward|No clipped backward"
    with pytest.raises(ValueError, match=text):
        private.optimizer.step()
    assert not released.releases
    for was, param in zip(before, private.plain.parameters(), strict=True):
        assert torch.equal(was, param)
    private.step()  # cleared, and all is well
    assert released.ratio() <= SLACK


def test_what_gradients_held_before_backward(released: Released) -> None:
    private = Private()
    for param in private.plain.parameters():
        param.grad = torch.ones_like(param)
    private.backward()
    with pytest.raises(ValueError, match="was not cleared before"):
        private.optimizer.step()
    assert not released.releases


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("clear", ["none", "zeros", "model", "model_none", "by_hand"])
def test_every_way_to_clear_gradients(clear: str, wrap_model: bool, released: Released) -> None:
    private = Private(wrap_model=wrap_model)
    ways: dict[str, Callable[[], Any]] = {
        "none": private.optimizer.zero_grad,
        "zeros": lambda: private.optimizer.zero_grad(set_to_none=False),
        "model": lambda: private.model.zero_grad(set_to_none=not wrap_model),
        "model_none": lambda: private.model.zero_grad(set_to_none=True),
        "by_hand": lambda: [setattr(p, "grad", None) for p in private.plain.parameters()],
    }
    for _ in range(2):
        private.backward(samples=2)  # is thrown away
        ways[clear]()
        private.backward()
        private.optimizer.step()
        assert released.ratio() <= SLACK
        assert private.optimizer.accumulated_iterations == 1
        private.optimizer.zero_grad(set_to_none=clear != "zeros")


def test_parameters_frozen_between_backward_and_step(released: Released) -> None:
    """The wrapped optimizer steps on whatever has a gradient: without noise, here."""
    private = Private()
    private.backward()
    private.plain.head.requires_grad_(False)
    before = private.plain.head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"head\.weight: this parameter is frozen but has a grad"):
        private.optimizer.step()
    assert torch.equal(before, private.plain.head.weight) and not released.releases
    private.step()
    assert len(released.sums[-1]) == 2


def test_parameters_frozen_between_parts_of_a_step(released: Released) -> None:
    private = Private()
    private.optimizer.signal_skip_step(True)
    private.step()
    private.plain.head.requires_grad_(False)
    private.optimizer.zero_grad()
    private.backward(start=1)
    with pytest.raises(FlashClippingError, match="different parameters: 4 until now, 2 in this"):
        private.optimizer.step()
    private.optimizer.discard_step()
    private.plain.head.requires_grad_(True)
    private.step()
    assert released.ratio() <= SLACK and len(released.releases) == 1


def test_parameters_unfrozen_between_backward_and_step() -> None:
    model = Net()
    model.head.requires_grad_(False)
    private = Private(model)
    private.backward()
    model.head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"head\.weight: this parameter has no clipped sum"):
        private.optimizer.step()


def test_steps_out_of_order(released: Released) -> None:
    private = Private()
    with pytest.raises(ValueError, match="No clipped backward pass"):
        private.optimizer.step()
    private.step()
    with pytest.raises(ValueError, match="haven't been cleared|No clipped backward"):
        private.optimizer.step()
    private.backward()
    with pytest.raises(ValueError, match="haven't been cleared"):
        private.optimizer.step()
    private.backward()
    private.optimizer.zero_grad()
    with pytest.raises(ValueError, match="No clipped backward pass"):
        private.optimizer.step()
    assert len(released.releases) == 1


def test_an_exception_between_backward_and_step(released: Released) -> None:
    private = Private()
    private.backward(samples=4)
    x, y = (part[:2] for part in data().tensors)
    loss = private.criterion(private.model(x), y)
    hook = private.plain.body[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    private.step()
    assert released.ratio() <= SLACK and len(released.releases) == 1


# -- two optimizers, copies -----------------------------------------------------------------------


@pytest.mark.parametrize("wrap_model", [True, False])
def test_two_optimizers_on_one_model(wrap_model: bool) -> None:
    model = Net()
    first = Private(model, parameters=[*model.body.parameters()], wrap_model=wrap_model)
    second = first.wrapper if wrap_model else model
    with pytest.raises(ValueError, match="has a private optimizer already|One model has one opt"):
        Private(second, parameters=[*model.head.parameters()], wrap_model=wrap_model)
    another = FlashDPOptimizer(
        torch.optim.SGD(model.head.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with pytest.raises(ValueError, match="has a private optimizer already"):
        another.follow(first.wrapper)
    assert first.wrapper.max_grad_norm == 0.1
    first.wrapper.cleanup()
    fresh = Private(model)
    fresh.step()


def test_private_again_with_the_same_optimizer(released: Released) -> None:
    private = Private()
    private.step()
    model, optimizer, criterion, _ = private.engine.make_private(
        module=private.wrapper,
        optimizer=private.optimizer,
        data_loader=DataLoader(data(), batch_size=16),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=0.02,
        poisson_sampling=False,
    )
    assert model is private.wrapper and model.max_grad_norm == optimizer.max_grad_norm == 0.02
    x, y = (part[:1] for part in data().tensors)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    with pytest.raises(ValueError, match="was replaced"):
        private.optimizer.step()
    optimizer.step()
    assert released.releases[-1][1] == pytest.approx(0.02) and released.ratio() <= SLACK


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_wrapped_model_have_no_optimizer(copied: Callable[[Any], Any]) -> None:
    private = Private()
    private.step()
    private.backward()
    twin = copied(private.wrapper)
    assert twin.backward_count == 0 and twin.follower is None
    x, y = (part[:4] for part in data().tensors)
    for module in (private.wrapper, twin):
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(x), y).backward()
    for p, q in zip(private.wrapper.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    twin._module.head = nn.Linear(8, 3)
    with pytest.raises(FlashClippingError, match="head"):
        twin(x)
    private.wrapper(x)


def test_checkpoints_in_the_middle_of_training(released: Released) -> None:
    private = Private(max_grad_norm=0.3)
    scheduler = schedulers.ExponentialGradClip(private.optimizer, gamma=0.5)
    private.step()
    scheduler.step()
    private.optimizer.zero_grad()
    file = io.BytesIO()
    private.engine.save_checkpoint(
        path=file,
        module=private.wrapper,
        optimizer=private.optimizer,
        grad_clip_scheduler=scheduler,
    )
    file.seek(0)
    private.backward()
    state = private.optimizer.state_dict()
    private.engine.load_checkpoint(
        path=file,
        module=private.wrapper,
        optimizer=private.optimizer,
        grad_clip_scheduler=scheduler,
    )
    private.optimizer.load_state_dict(state)
    private.optimizer.step()
    assert released.releases[-1][1] == pytest.approx(0.15) and released.ratio() <= SLACK


def test_steps_as_graphs_are_checked_alike(released: Released) -> None:
    """What a replay leaves is as much the step's sum as what backward leaves."""
    from tests.test_graphed_step import PlayedByHand

    private = Private()

    def step(x: Tensor, y: Tensor) -> None:
        (100 * private.model(x).square().sum(1).mean()).backward()

    graphed: GraphedStep = PlayedByHand(step, private.model)
    x, y = (part[:1] for part in data().tensors)
    for number in range(6):
        private.optimizer.zero_grad()
        graphed(x, y)
        if number == 4:
            private.optimizer.signal_skip_step(True)
        private.optimizer.step()
        assert released.ratio() <= (2 if number == 5 else 1) * SLACK  # two parts
    assert graphed.replays == 3 and len(released.releases) == 5
    assert released.releases[-1][0] == pytest.approx(0.2, rel=1e-3)
    private.optimizer.zero_grad()
    graphed(x, y)
    private.plain.head.weight.grad.mul_(100)
    with pytest.raises(ValueError, match="is not the clipped sum"):
        private.optimizer.step()
