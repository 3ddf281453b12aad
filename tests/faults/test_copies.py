"""Copies, pickles, and the model after the wrapper is gone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from tests.support.errors import raises
from tests.support.faults import (
    NetOfEveryRule,
    Trainer,
    assert_same_state,
    batch,
    state_after_one_step,
)
from tests.support.wrapping import MODES


def plain_gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    ids, signal, target = batch()
    F.cross_entropy(model(ids, signal).mean(1), target).backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.every_pair
@pytest.mark.parametrize("restore", ["cleanup", "to_standard_module", "remove_hooks"])
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_model_is_restored(mode: str, wrap: bool, restore: str) -> None:
    torch.manual_seed(0)
    model = NetOfEveryRule()
    forward = lambda *args: type(model).forward(model, *args)  # noqa: E731
    model.forward = forward  # an instance's own forward must come back too
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    attributes = {name: set(vars(param)) for name, param in model.named_parameters()}
    cls = GradSampleModuleFlashClipping if wrap else GradSampleHooksFlashClipping
    wrapper = cls(model, mode=mode)
    ids, signal, target = batch()
    F.cross_entropy((wrapper if wrap else model)(ids, signal).mean(1), target).backward()
    if not wrap and restore == "to_standard_module":
        restore = "cleanup"  # hooks wrap nothing
    result = getattr(wrapper, restore)()
    if restore == "to_standard_module":
        assert result is model

    assert model.forward is forward
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for name, module in model.named_modules():
        assert not module._forward_hooks and not module._forward_pre_hooks, name
        assert not module._backward_hooks and not module._backward_pre_hooks, name
        kinds = {type(param) for param in module._parameters.values()}
        assert kinds <= {nn.Parameter, type(None)}, name
    if restore != "remove_hooks":  # which leaves attributes, as in Opacus
        assert {name: set(vars(param)) for name, param in model.named_parameters()} == attributes
    torch.manual_seed(0)
    for found, expected in zip(
        plain_gradients(model), plain_gradients(NetOfEveryRule()), strict=True
    ):
        assert torch.equal(found, expected)
    # It can be wrapped again, and no guard of the first wrapper speaks up.
    model.zero_grad(set_to_none=True)
    again = GradSampleModuleFlashClipping(model, mode=mode)
    F.cross_entropy(again(ids, signal).mean(1), target).backward()
    assert again.get_norm_sample().shape == (3,)


@pytest.mark.parametrize("mode", MODES)
def test_disabled_hooks_leave_an_ordinary_model(mode: str) -> None:
    trainer = Trainer(mode=mode)
    trainer.module.disable_hooks()
    torch.manual_seed(0)
    for found, expected in zip(
        plain_gradients(trainer.module), plain_gradients(NetOfEveryRule()), strict=True
    ):
        torch.testing.assert_close(found, expected)
    with raises("FC525", match="yet"):
        trainer.module.get_norm_sample()
    trainer.module.enable_hooks()
    trainer.step(batch())
    assert_same_state(trainer.state(), state_after_one_step(mode=mode), "enabled again")


def test_hooks_disabled_between_forward_and_backward() -> None:
    """What Opacus' criterion does: the graph of a recorded forward gives ordinary gradients."""
    trainer = Trainer()
    ids, signal, target = batch()
    loss = F.cross_entropy(trainer.module(ids, signal).mean(1), target)
    trainer.module.disable_hooks()
    loss.backward()
    torch.manual_seed(0)
    for found, expected in zip(
        [param.grad for param in trainer.plain.parameters()],
        plain_gradients(NetOfEveryRule()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
