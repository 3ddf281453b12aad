"""Buffers that forward changes, and batch norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, diagnostics
from flash_clipping.engine.unsupported import validate
from tests.support.autograd import check_by_autograd, float64s, squares
from tests.support.errors import raises
from tests.support.wrapping import MODES, WRAPPERS

B, T, D = 4, 5, 3


Forward = Callable[["Between", Tensor], Any]


class Between(nn.Module):
    """Does something to its buffers, in a model whose other layers are trained."""

    average: Tensor
    mask: Tensor | None

    def __init__(self, use: Forward):
        super().__init__()
        self.use = use
        self.calls = 0
        #: In which call of the wrapped model it begins.
        self.begins = 0
        self.register_buffer("average", torch.zeros(D, dtype=torch.float64))
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self.begins or not self.training:
            return x
        scaled = self.use(self, x)
        return scaled if isinstance(scaled, Tensor) else x


class CountingTanh(nn.Tanh):
    """Has no buffers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def model_of(use: Forward, begins: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), CountingTanh(), Between(use), nn.Linear(D, 2)).double()
    model[2].begins = begins
    return model


def batch(positions: int = T, samples: int = B) -> tuple[Tensor, ...]:
    return (torch.randn(samples, positions, D, dtype=torch.float64),)


def mean_of(x: Tensor) -> Tensor:
    return x.detach().mean((0, 1))


def in_place(m: Between, x: Tensor) -> None:
    m.average.mul_(0.9).add_(0.1 * mean_of(x))


def without_gradients(m: Between, x: Tensor) -> None:
    with torch.no_grad():
        m.average += mean_of(x)


def through_a_view(m: Between, x: Tensor) -> None:
    m.average[1:].copy_(mean_of(x)[1:])


def counter(m: Between, x: Tensor) -> None:
    m.average += 1


def assigned(m: Between, x: Tensor) -> None:
    m.average = 0.9 * m.average + 0.1 * mean_of(x)


def registered(m: Between, x: Tensor) -> None:
    m.register_buffer("average", mean_of(x))


def later_a_sample(m: Between, x: Tensor) -> None:
    m.mask = x[:1].detach()


WRITES = [in_place, without_gradients, through_a_view, counter]


def mask_of_shape(m: Between, x: Tensor) -> Tensor:
    """Made when it is first needed, and when it has become too small."""
    length = x.shape[1]
    if m.mask is None or len(m.mask) < length:
        m.mask = torch.ones(length, length, dtype=x.dtype).tril()
    return m.mask[:length, :length] @ x


def made_every_time(m: Between, x: Tensor) -> Tensor:
    m.mask = torch.ones(x.shape[1], 1, dtype=x.dtype).cumsum(0)
    return x * m.mask


#: Constants as well: whether a value is of samples is not asked.
ASSIGNMENTS = [assigned, registered, later_a_sample, mask_of_shape, made_every_time]


def through_data(m: Between, x: Tensor) -> None:
    m.average.data.add_(mean_of(x))


REFUSED = r"2 \(Between\): its buffer '(average|mask)' is changed by forward, which .*strict=False"


@pytest.mark.parametrize("use", [*WRITES, through_data, *ASSIGNMENTS])
def test_a_buffer_that_forward_changes_is_refused(use: Forward) -> None:
    model = model_of(use)
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC130", NotImplementedError, match=REFUSED):
        squares(flash, batch())
    assert all(param.grad is None for param in model.parameters())


def test_the_line_of_a_mask_that_is_made_once() -> None:
    model, (x,) = model_of(mask_of_shape), batch()
    with raises("FC130", NotImplementedError) as found:
        GradSampleModuleFlashClipping(copy.deepcopy(model))(x)
    line = str(found.value).splitlines()[-1].strip()
    exec(line, {"torch": torch, "model": model, "x": x})  # noqa: S102
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, (x[:, :-1],)).backward()
    assert flash.get_norm_sample().min() > 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", [in_place, assigned])
def test_a_change_that_begins_later(use: Forward, mode: str, wrapper: str) -> None:
    model = model_of(use, begins=3)
    flash = WRAPPERS[wrapper](model, mode=mode)
    called = flash if wrapper == "wrapped" else model
    for _ in range(3):
        squares(called, batch()).backward()
        model.zero_grad(set_to_none=True)
    with raises("FC130", NotImplementedError, match=REFUSED):
        squares(called, batch())


@pytest.mark.parametrize("use", [*WRITES, *ASSIGNMENTS])
def test_a_forward_that_records_nothing_counts(use: Forward) -> None:
    flash = GradSampleModuleFlashClipping(model_of(use))
    with torch.no_grad(), raises("FC130", NotImplementedError, match=REFUSED):
        flash(*batch())


def test_nothing_is_compared_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(made_every_time)
    model(*batch())
    flash = GradSampleModuleFlashClipping(model)
    flash(*batch())
    monkeypatch.setattr(flash._session.calls, "captured", object())
    with torch.no_grad(), raises("FC130", NotImplementedError, match="CUDA graph is captured"):
        flash(*batch())


def test_not_strict_leaves_buffers_alone() -> None:
    model = model_of(in_place)
    squares(GradSampleModuleFlashClipping(model, strict=False), batch()).backward()
    assert model[2].average.any()


# -- what passes ----------------------------------------------------------------------------------


def only_read(m: Between, x: Tensor) -> Tensor:
    return x + m.average.cos()


@pytest.mark.parametrize("use", [mask_of_shape, made_every_time, only_read])
def test_what_has_the_bits_it_had_passes(use: Forward) -> None:
    model, x = model_of(use), batch()
    flash = GradSampleModuleFlashClipping(copy.deepcopy(model))
    if use is not only_read:
        with raises("FC130", NotImplementedError):
            flash(*x)
        model(*x)  # which makes it
    calls = model[1].calls
    check_by_autograd(copy.deepcopy(model), x, squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.3)
    for _ in range(2):
        squares(flash, x).backward()
        model.zero_grad(set_to_none=True)
    assert model[1].calls == calls + 2  # other runs leave no trace


# -- models of transformers -----------------------------------------------------------------------


def in_eval_mode(trainable: bool = False, **options: Any) -> nn.Module:
    """A model in train mode, but for its normalization."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, **options).requires_grad_(trainable)
    for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        if values is not None:
            nn.init.uniform_(values, 0.5, 2.0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    norm.eval()
    return model.double()


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"trainable": True}], ids=str)
def test_in_eval_mode_it_is_exact(options: dict[str, Any], mode: str, wrapper: str) -> None:
    model = in_eval_mode(**options)
    assert model.training
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    check_by_autograd(model, float64s(5, 2, 4, 4), squares, mode=mode, wrapper=wrapper)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_frozen_one_passes_the_engine_s_validation_and_the_check() -> None:
    validate(in_eval_mode())
    assert diagnostics.check(in_eval_mode(), *float64s(4, 2, 4, 4)).passed


def test_without_running_statistics_it_is_refused() -> None:
    with raises("FC101", NotImplementedError, match=r"1 \(BatchNorm2d"):
        GradSampleModuleFlashClipping(in_eval_mode(track_running_stats=False))


@pytest.mark.parametrize("strict", [True, False])
def test_train_mode_after_wrapping_is_refused(strict: bool) -> None:
    model = in_eval_mode()
    flash = GradSampleModuleFlashClipping(model, strict=strict)
    batch = float64s(5, 2, 4, 4)
    squares(flash, batch).backward()
    model.zero_grad(set_to_none=True)
    for wrapped in (flash, model):
        wrapped.train()
        with raises("FC101", NotImplementedError, match=r"1 \(BatchNorm2d") as error:
            squares(flash, batch)
        exec(str(error.value).splitlines()[-1].strip(), {"model": wrapped})  # what it says to do
        squares(flash, batch).backward()
        model.zero_grad(set_to_none=True)
