"""Maps of rows to units that do not fit, and calls that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping import Documents, GradSampleModuleFlashClipping, GraphedStep, Offsets
from tests.support.errors import raises
from tests.support.graphs import PlayedByHand
from tests.support.units import MIXED, network
from tests.support.wrapping import WRAPPERS

# -- what is refused -------------------------------------------------------------------------------


def called_with(index: Any, **options: Any) -> None:
    flash = GradSampleModuleFlashClipping(network(), unit=Documents("user"), **options)
    flash(torch.randn(7, 5, 4, dtype=torch.float64), user=index).square().mean().backward()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (torch.zeros(6, dtype=torch.long), r"unit=Documents\('user'\).*shape \(6,\).*7 rows"),
        (torch.zeros(7, 4, dtype=torch.long), r"shape \(7, 4\).*7 rows"),
        (torch.zeros(7, 1, 1, dtype=torch.long), r"shape \(7, 1, 1\)"),
        (torch.zeros(7), r"found torch.float32; expected an integer tensor"),
        (torch.zeros(7, dtype=torch.bool), r"found torch.bool"),
        ([0] * 7, r"found list"),
        (None, r"found NoneType.*Pass it as an argument"),
        (torch.tensor([0, 1, 2, -2, 0, 1, 2]), r"units outside of -1 to 2"),
        (torch.zeros(7, dtype=torch.long, device="meta"), r"on meta"),
    ],
)
def test_wrong_maps(index: Any, words: str) -> None:
    with raises("FC270|FC272", match=words):
        called_with(index)


def test_more_units_than_were_told() -> None:
    flash = GradSampleModuleFlashClipping(network(), unit=Documents("user"))
    flash.expect_samples(2)
    with raises("FC272", match="1, as expect_samples"):
        flash(torch.randn(7, 5, 4, dtype=torch.float64), user=torch.tensor(MIXED))


def test_the_name_is_a_name() -> None:
    with raises("FC280", TypeError, match="int"):
        GradSampleModuleFlashClipping(network(), unit=Documents(3))  # type: ignore[arg-type]
    assert Offsets("starts").name == "starts"


def test_calls_of_two_maps() -> None:
    flash = GradSampleModuleFlashClipping(network(), unit=Documents("user"))
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    first = flash(x, user=torch.tensor(MIXED))
    second = flash(x, user=torch.tensor(MIXED).roll(1))
    with raises("FC275"):
        (first + second).square().mean().backward()
    assert all(p.grad is None for p in flash.parameters())


def test_a_step_that_is_captured() -> None:
    """Without a graph (on a CPU) it runs as it is."""
    flash = GradSampleModuleFlashClipping(network(), unit=Documents("user"))

    def step(x: Tensor, user: Tensor) -> None:
        flash(x, user=user).square().mean().backward()

    x = torch.randn(7, 5, 4, dtype=torch.float64)
    GraphedStep(step, flash)(x, torch.tensor(MIXED))
    assert len(flash.get_norm_sample()) == 3
    with raises("FC703", match="clips privacy units"):
        PlayedByHand(step, flash)(x, torch.tensor(MIXED))


def test_without_gradients_no_map_is_needed() -> None:
    flash = GradSampleModuleFlashClipping(network(), unit=Documents("user"))
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(flash(x), flash(x, user=torch.tensor(MIXED)))
    flash.disable_hooks()
    flash(x, user=torch.tensor(MIXED)).square().mean().backward()
    assert all(p.grad is not None for p in flash.parameters())
    flash.enable_hooks()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_rows_at_all(wrapper: str) -> None:
    model = network()
    flash = WRAPPERS[wrapper](model, unit=Documents("user"))
    called = flash if wrapper == "wrapped" else model
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    for told in (None, 0):
        model.zero_grad(set_to_none=True)
        flash.expect_samples(told)
        rows = 7 if told is None else 1  # of nobody
        user = torch.tensor(MIXED if told is None else [0])
        called(x[:rows], user=user).square().mean().backward()
        if told == 0:
            assert not len(flash.get_norm_sample())
            assert all(not p.grad.any() for p in model.parameters())  # type: ignore[union-attr]
    flash.expect_samples(None)
    with raises("FC250"):
        called(x[:0], user=torch.tensor(MIXED)[:0])
