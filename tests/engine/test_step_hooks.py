"""Hooks of a step: the engine's accounts, whatever else is attached."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn

from flash_clipping import (
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
)
from tests.support.engine import EngineTraining
from tests.support.errors import raises


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


def test_another_accountant_counts_beside() -> None:
    run = training()
    other = RDPAccountant()
    run.optimizer.attach_step_hook(other.get_optimizer_hook_fn(0.1))
    run.steps(3)
    assert counted(run) == 3 and sum(steps for *_, steps in other.history) == 3


def test_the_accountant_is_not_replaced_once_steps_are_counted() -> None:
    run = training()
    run.steps(2)
    with raises("FC561", ValueError):
        run.engine.accountant = RDPAccountant()
    assert counted(run) == 2
    FlashPrivacyEngine().accountant = RDPAccountant()


def test_an_optimizer_without_an_engine() -> None:
    layer, accountant = nn.Linear(3, 2), RDPAccountant()
    optimizer = FlashDPOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    assert optimizer.step_hook is None
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(0.1))
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert len(accountant.history) == 1


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


def test_hooks_of_pytorch_run_around_the_step_that_moves_parameters() -> None:
    run, calls = training(), []
    hooked: Any = run.optimizer
    hooked.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = hooked.register_step_post_hook(lambda *_: calls.append("after"))
    run.steps(2)
    handle.remove()
    run.steps(1)
    assert calls == ["before", "after", "before", "after", "before"]
    assert counted(run) == 3
