"""Sums of a step: when they are made, what may change them, and hooks around a step."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from flash_clipping import (
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    GraphedStep,
)
from flash_clipping.ops.runtime import checks
from flash_clipping.ops.runtime.checks import device_checks
from tests.support.engine import EngineTraining
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released, TwoLayers, data, made

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
    with raises("FC501|FC503", ValueError):
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
    with raises("FC503", ValueError, match="was not cleared"):
        private.optimizer.step()
    assert not released.releases


@pytest.mark.parametrize("again", [False, True])
def test_two_backward_passes_on_a_batch_of_the_engine_s_loader(again: bool) -> None:
    """Also where that loader is given to make_private once more, as it is."""
    private = Private(poisson_sampling=True)
    model, optimizer, criterion, loader = (
        private.model, private.optimizer, private.criterion, private.loader
    )  # fmt: skip
    if again:
        plain = TwoLayers()
        model, optimizer, criterion, loader = made(
            plain, loader, max_grad_norm=0.1, poisson_sampling=False
        )
    x, y = next(batch for batch in loader if len(batch[0]))
    criterion(model(x), y).backward()
    with raises("FC510", ValueError):
        criterion(model(x), y).backward()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


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
    with raises("FC505", ValueError, match=r"head\.weight"):
        private.optimizer.step()
    assert torch.equal(before, private.plain.head.weight) and not released.releases
    private.step()
    assert len(released.sums[-1]) == 2


def test_parameters_unfrozen_between_backward_and_step() -> None:
    model = TwoLayers()
    model.head.requires_grad_(False)
    private = Private(model)
    private.backward()
    model.head.requires_grad_(True)
    with raises("FC502", ValueError, match=r"head\.weight"):
        private.optimizer.step()


def test_steps_out_of_order(released: Released) -> None:
    private = Private()
    with raises("FC501", ValueError):
        private.optimizer.step()
    private.step()
    with raises("FC501", ValueError):
        private.optimizer.step()
    private.backward()
    with raises("FC503", ValueError, match="was not cleared"):
        private.optimizer.step()
    private.backward()
    private.optimizer.zero_grad()
    with raises("FC501", ValueError):
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


def step_in(parts: int, private: Private) -> None:
    """Without ``zero_grad()``."""
    for part in range(parts):
        private.optimizer.signal_skip_step(part + 1 < parts)
        private.backward(start=part)
        private.optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_whose_noise_fails(
    parts: int, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out, say. The same samples again, without ``zero_grad()``, count once."""
    private = Private()
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        error = torch.OutOfMemoryError()
        patched.setattr(private.optimizer.stream, "draw", Mock(side_effect=error))
        step_in(parts, private)
    assert not released.releases and len(private.engine.accountant) == 0
    step_in(parts, private)
    assert released.releases[-1][0] <= 0.1 * parts * SLACK


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_accounted_for_leaves_nothing(
    parts: int, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Private()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(private.engine.accountant, "step", lambda **_: 1 / 0)
        step_in(parts, private)
    assert all(param.grad is None for param in private.plain.parameters())
    step_in(parts, private)
    assert len(private.engine.accountant) == 1
    assert released.releases[-1][0] <= 0.1 * parts * SLACK


# -- two optimizers, copies -----------------------------------------------------------------------


def test_steps_as_graphs_are_checked_alike(released: Released) -> None:
    """What a replay leaves is as much the step's sum as what backward leaves."""
    from tests.support.graphs import PlayedByHand

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
    with raises("FC503", ValueError, match="is not the clipped sum"):
        private.optimizer.step()


def scaler_in_use() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(()))
    return scaler


def unscale_plain(private: Private) -> None:
    scaler_in_use().unscale_(private.optimizer.original_optimizer)


def through_data(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.data.mul_(3)


def through_one(private: Private) -> None:
    private.plain.head.weight.grad.data.mul_(2)


def through_numpy(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.numpy()[:] *= 0.5


def foreach(private: Private) -> None:
    torch._foreach_mul_([p.grad for p in private.plain.parameters()], 2.0)


def not_finite(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.data.fill_(torch.nan)


WRITES = [unscale_plain, through_data, through_one, through_numpy, foreach, not_finite]


@pytest.mark.parametrize("before", [0, 15])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_versions_do_not_count(
    write: Callable[[Private], None], before: int, released: Released
) -> None:
    private = Private()
    for _ in range(before):
        private.step(4)
    private.optimizer.zero_grad()
    private.backward(4)
    write(private)
    state = {name: x.clone() for name, x in private.plain.state_dict().items()}
    with raises("FC503", ValueError, match="is not the clipped sum that backward"):
        private.optimizer.step()
    assert len(released.releases) == before
    assert all(torch.equal(x, state[name]) for name, x in private.plain.state_dict().items())
    private.step(4)
    assert released.ratio() <= 4 * SLACK


@pytest.mark.parametrize("write", WRITES)
def test_a_gpu_releases_noise_alone(
    write: Callable[[Private], None], released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the comparison is read later, as of a GPU."""
    private = Private(noise_multiplier=0.0, lr=1.0)
    private.step(4)
    private.optimizer.zero_grad()
    private.backward(4)
    state = {name: x.clone() for name, x in private.plain.state_dict().items()}
    if write is foreach:  # versions count it, on the host
        return
    write(private)
    monkeypatch.setattr(checks, "is_awaited", lambda holds: True)
    private.optimizer.step()
    assert all(torch.equal(x, state[name]) for name, x in private.plain.state_dict().items())
    private.optimizer.zero_grad()
    with raises("FC503", ValueError, match=r"is not the clipped sum that backward.*noise alone"):
        private.backward(4)
    private.step(4)
    device_checks.raise_found(wait=True)
    assert not torch.equal(private.plain.head.bias, state["head.bias"])


@pytest.mark.parametrize("before", [0, 11])
def test_a_scaler_cannot_unscale_a_private_optimizer(before: int) -> None:
    private = Private()
    for _ in range(before):
        private.step(4)
    scaler = scaler_in_use()
    private.optimizer.zero_grad()
    private.backward(4)
    with raises("FC470", ValueError):
        scaler.unscale_(private.optimizer)
    private.optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).unscale_(private.optimizer)


# -- parameters ------------------------------------------------------------------------------------


def ascend(private: Private) -> None:
    """As SAM does, by the gradients that are there."""
    with torch.no_grad():
        for p in private.plain.parameters():
            p.add_(p.grad, alpha=0.1)


@pytest.mark.parametrize("before", [0, 1])
def test_an_ascent_past_autograd_is_refused(before: int) -> None:
    private = Private()
    for _ in range(before):
        private.step(4)

    def train() -> None:
        for _ in range(12):
            private.optimizer.zero_grad()
            private.backward(4)
            for p in private.plain.parameters():
                p.data.add_(p.grad, alpha=0.1)  # which no version counts
            private.optimizer.zero_grad()
            private.backward(4)
            private.optimizer.step()

    with raises("FC504"):
        train()
    private.optimizer.zero_grad()
    private.optimizer.discard_step()
    private.step(4)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_an_ascent_step_is_refused(clears: bool, wrap_model: bool, released: Released) -> None:
    private = Private(wrap_model=wrap_model)
    private.step(4)
    private.optimizer.zero_grad()
    private.backward(4)
    ascend(private)
    if clears:
        private.optimizer.zero_grad()
    with raises("FC504"):
        private.backward(4)
    private.optimizer.zero_grad()
    private.optimizer.discard_step()
    private.step(4)
    assert len(released.releases) == 2


def test_parameters_may_be_written_between_steps(released: Released) -> None:
    """Weights that are clamped, averaged or loaded."""
    private = Private()
    for _ in range(2):
        private.step(4)
        with torch.no_grad():
            for p in private.plain.parameters():
                p.clamp_(-1, 1)
        private.plain.load_state_dict(private.plain.state_dict())
    private.optimizer.zero_grad()
    private.backward(4)
    private.plain.load_state_dict(private.plain.state_dict())
    private.optimizer.step()
    assert len(released.releases) == 3


def training(**options: Any) -> EngineTraining:
    return EngineTraining(FlashPrivacyEngine(), noise_multiplier=1.0, **options)


def counted(run: EngineTraining) -> int:
    return sum(steps for *_, steps in run.engine.accountant.history)


def test_users_hooks_add_up_and_steps_are_accounted() -> None:
    run, calls = training(), []
    run.optimizer.attach_step_hook(lambda optimizer: calls.append("first"))
    run.optimizer.attach_step_hook(lambda optimizer: calls.append("second"))
    run.optimizer.step_hook = lambda optimizer: calls.append("third")
    run.steps(8)
    assert calls == ["first", "second", "third"] * 8
    assert counted(run) == 8 and run.engine.get_epsilon(1e-5) > 0


def test_a_hook_sees_the_noisy_mean_of_an_accounted_step() -> None:
    """A public proximal term is added to it, and moves the parameters."""
    run = training(lr=1.0)
    seen = []

    def proximal(optimizer: FlashDPOptimizer) -> None:
        seen.append((counted(run), [p.grad.clone() for p in optimizer.params]))
        for p in optimizer.params:
            p.grad.add_(p.detach(), alpha=0.5)

    run.optimizer.attach_step_hook(proximal)
    before = [p.detach().clone() for p in run.plain.parameters()]
    run.steps(1)
    assert seen[0][0] == 1
    for p, old, noisy in zip(run.plain.parameters(), before, seen[0][1], strict=True):
        torch.testing.assert_close(p.detach(), old - noisy - 0.5 * old)


def test_an_error_in_a_hook_releases_nothing() -> None:
    run = training()

    def fails(optimizer: Any) -> None:
        raise RuntimeError("mine")

    run.optimizer.attach_step_hook(fails)
    before = run.state()
    with pytest.raises(RuntimeError, match="mine"):
        run.steps(1)
    assert all(torch.equal(run.state()[name], x) for name, x in before.items())
    assert all(p.grad is None for p in run.plain.parameters())
    assert not run.wrapper.running_step.sums


def test_the_accountant_is_not_replaced_once_steps_are_counted() -> None:
    run = training()
    run.steps(2)
    with raises("FC561", ValueError):
        run.engine.accountant = RDPAccountant()
    assert counted(run) == 2
    FlashPrivacyEngine().accountant = RDPAccountant()


def hooked(kind: str, param: nn.Parameter) -> Any:
    return getattr(param, kind)(lambda grad: grad.mul(0))


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("steps_before", [None, 0, 1])
@pytest.mark.filterwarnings("ignore:mode=:UserWarning")
def test_a_hook_on_a_parameter_is_refused_by_name(
    steps_before: int | None, kind: str, mode: str
) -> None:
    """Before wrapping, after it, and after a step."""
    plain, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    words = r"1\.weight"
    if steps_before is None:
        handle = hooked(kind, plain[1].weight)
        with raises("FC506", match=words):
            GradSampleModuleFlashClipping(plain, max_grad_norm=1.0, mode=mode)
        handle.remove()
    model = GradSampleModuleFlashClipping(plain, max_grad_norm=1.0, mode=mode)
    for _ in range(steps_before or 0):
        model(x).sum().backward()
    handle = hooked(kind, plain[1].weight)
    with raises("FC506", match=words):
        model(x)
    handle.remove()
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
    assert model.get_norm_sample().shape == (5,)
    again = copy.deepcopy(model)
    again.zero_grad(set_to_none=True)
    again(x).sum().backward()
    hooked(kind, again._module[1].weight)
    with raises("FC506", match=words):
        again(x)


def test_the_mask_that_is_offered_for_a_hook_freezes_what_it_hides() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run, mask = training(model=plain), torch.arange(64).remainder(2).float()
    handle = hooked("register_hook", plain[1].weight)
    with raises("FC506") as refused:
        run.steps(1)
    handle.remove()
    lines = re.findall(r"^    (.*)", str(refused.value), re.MULTILINE)
    before = plain[1].weight.detach().clone()
    exec("\n".join(lines[:2]), {"model": run.wrapper, "optimizer": run.optimizer, "mask": mask})
    run.steps(2)
    moved = (plain[1].weight.detach() != before).any(0)
    assert torch.equal(moved, mask.bool()) and counted(run) == 2


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_norms_of_an_earlier_batch(mode: str) -> None:
    """Between a forward and its backward there are none; those without gradients do not count."""
    model = GradSampleModuleFlashClipping(nn.Linear(3, 2), mode=mode)
    model(torch.randn(4, 3)).sum().backward()
    first = model.get_norm_sample()
    with torch.no_grad():
        model(torch.randn(5, 3))
    assert torch.equal(model.get_norm_sample(), first)
    loss = model(torch.randn(6, 3)).sum()
    for ask in (model.get_norm_sample, model.get_clipping_coef):
        with raises("FC525", match="last forward yet"):
            ask()
    loss.backward()
    assert len(model.get_norm_sample()) == len(model.get_clipping_coef()) == 6
