"""Writes between ``backward()`` and ``step()``: into sums past autograd, and into parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from flash_clipping.ops.runtime import checks
from flash_clipping.ops.runtime.checks import device_checks
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released


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


def negate(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.data.neg_()


def through_numpy(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.numpy()[:] *= 0.5


def through_detach(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.detach().mul_(2)


def foreach(private: Private) -> None:
    torch._foreach_mul_([p.grad for p in private.plain.parameters()], 2.0)


def foreach_of_data(private: Private) -> None:
    torch._foreach_mul_([p.grad.data for p in private.plain.parameters()], 2.0)


def amp(private: Private) -> None:
    grads = [p.grad for p in private.plain.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(()), torch.tensor(0.5))


def not_finite(private: Private) -> None:
    for p in private.plain.parameters():
        p.grad.data.fill_(torch.nan)


WRITES = [
    unscale_plain, through_data, through_one, negate, through_numpy, through_detach, foreach,
    foreach_of_data, amp, not_finite,
]  # fmt: skip


@pytest.mark.parametrize("before", [0, 3, 15])
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
    if write in (through_detach, foreach):  # versions count these, on the host
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


def test_a_plain_step_compares_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps, and every 16th: what happens in a loop happens there."""
    private, compared = Private(), []
    ledger = private.wrapper.running_step
    for _ in range(33):
        private.optimizer.zero_grad()
        private.backward(4)
        compared.append(ledger._elements is not None)
        private.optimizer.step()
        assert ledger._elements is None
    assert [n + 1 for n, found in enumerate(compared) if found] == [*range(1, 8), 16, 32]


def test_one_of_many_parameters_is_found_in_turn() -> None:
    private = Private(nn.Sequential(nn.Linear(6, 3), *[nn.Linear(3, 3) for _ in range(19)]))
    found = []
    for _ in range(3):
        private.optimizer.zero_grad()
        private.backward(4)
        private.plain[7].weight.grad.data.mul_(2)
        try:
            private.optimizer.step()
        except ValueError:
            found.append(True)
    assert found


# -- parameters ------------------------------------------------------------------------------------


def ascend(private: Private) -> None:
    """As SAM does, by the gradients that are there."""
    with torch.no_grad():
        for p in private.plain.parameters():
            p.add_(p.grad, alpha=0.1)


def ascend_through_data(private: Private) -> None:
    for p in private.plain.parameters():
        p.data.add_(p.grad, alpha=0.1)


def ascend_by_vectors(private: Private) -> None:
    params = [*private.plain.parameters()]
    vector = nn.utils.parameters_to_vector(params) + nn.utils.parameters_to_vector(
        [p.grad for p in params]
    )
    nn.utils.vector_to_parameters(vector, params)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("write", [ascend_through_data, ascend_by_vectors])
def test_an_ascent_past_autograd_is_refused(write: Any, before: int) -> None:
    private = Private()
    for _ in range(before):
        private.step(4)

    def train() -> None:
        for _ in range(12):
            private.optimizer.zero_grad()
            private.backward(4)
            write(private)
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


def test_ordinary_accumulation_is_not_refused(released: Released) -> None:
    private = Private()
    for start in (0, 4, 8):
        private.optimizer.signal_skip_step(start < 8)
        private.optimizer.zero_grad()
        private.backward(4, start)
        private.optimizer.step()
    with BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=4, optimizer=private.optimizer
    ) as parts:
        for x, y in parts:
            private.optimizer.zero_grad()
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
    assert len(released.releases) == 5


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
