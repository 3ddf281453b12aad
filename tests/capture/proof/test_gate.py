"""Wrong models are refused in an ordinary first step, by their outputs or parameters; right ones
are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import FIRST_AUDIT, Gate
from tests.capture.proof.mixers import RIGHT, WRONG, WRONG_AFTER, Around, B, K, T
from tests.support.autograd import check_by_autograd, squares
from tests.support.errors import raises
from tests.support.plans import Plan, RandomModel, batch_of, plans
from tests.support.profiles import profile

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("same_numbers")]

#: A first step may miss these, the audits after it do not: a coin that fell alike.
LATER = {"a coin, torch", "a coin, python"}


def first_step(model: torch.nn.Module) -> GradSampleModuleFlashClipping:
    flash = GradSampleModuleFlashClipping(model, strict=False)
    flash(torch.randn(B, T, K)).square().sum().backward()
    return flash


@pytest.mark.parametrize("name", sorted(WRONG.keys() - LATER))
def test_what_mixes_samples_is_refused_by_name(name: str) -> None:
    """One sample of a batch of 16, with an honest bound of 2 C or 1 C, was measured to change what
    is released by 3.9 C where samples or features of them are mixed by the generators of PyTorch,
    NumPy or Python, by 3.3 C where a scale is taken over the batch (1.07 C of fp8 by tensor), and
    by 25 to 53 C where a hook or a function scales by the norm of the batch's gradient."""
    with raises("FC201|FC202|FC210"):
        first_step(Around(WRONG[name]))


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_chance_decides_is_refused_by_an_audit(name: str) -> None:
    flash = GradSampleModuleFlashClipping(Around(WRONG[name]), strict=False)
    with raises("FC210"):
        for _ in range(4 * FIRST_AUDIT):
            flash.zero_grad()
            flash(torch.randn(B, T, K)).square().sum().backward()


def test_evaluation_is_looked_at_by_itself() -> None:
    """Samples that are mixed there alone, and no layer reads other rows."""
    model = Around(RIGHT["plain"])
    model.after = lambda y: y if model.training else y - y.mean(0)
    flash = first_step(model)
    flash.eval()
    with raises("FC210", match="output 0: the outputs of a sample change"):
        flash(torch.randn(B, T, K)).square().sum().backward()
    flash.train()
    flash.zero_grad()
    flash(torch.randn(B, T, K)).square().sum().backward()
    assert flash.get_norm_sample().shape == (B,)


def test_audits_are_seldom() -> None:
    gate = Gate()
    audits = {
        step: number for step in range(1, 100) if gate.is_due() and (number := gate.take_audit())
    }
    assert audits == {32: 1, 64: 2}


def test_an_audit_waits_for_a_batch_with_samples() -> None:
    """A Poisson batch may have none."""
    flash = first_step(Around(RIGHT["plain"]))
    gate = flash._watch.gate
    gate.calls = gate.next_audit = before = 4 * FIRST_AUDIT
    for drawn, due in ((0, before), (B, 2 * (before + 1))):
        flash.zero_grad()
        flash.expect_samples(drawn)  # where none was drawn, the loader gives one row
        flash(torch.randn(drawn or 1, T, K)).square().sum().backward()
        assert gate.next_audit == due


@pytest.mark.parametrize("name", WRONG_AFTER)
def test_outputs_that_mix_samples_are_refused_by_name(name: str) -> None:
    model = Around(RIGHT["plain"], WRONG_AFTER[name])
    with raises("FC210", match="output 0: the outputs of a sample change"):
        first_step(model)


@pytest.mark.parametrize("layout", ["ids", "sequence", "image"])
def test_random_architectures(layout: str) -> None:
    @profile(6)
    @given(plan=plans(layout))
    def check(plan: Plan) -> None:
        model = RandomModel(plan).double()
        flash = GradSampleModuleFlashClipping(model, batch_first=not plan.time_first)
        flash(*batch_of(plan))
        kinds = flash._session.proof.kinds.values()
        why = [why for kind in kinds for why in kind.why.values()]
        assert why and not any(why)

    check()


class Padded(nn.Module):
    """Texts that end with zeros, ``how`` a layer reads them."""

    def __init__(self, how: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(20, 8, padding_idx=0)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        mask = given.get("mask", ids != 0)
        if "padding" in given:
            mask = ~given["padding"]
        elif "lengths" in given:
            mask = torch.arange(ids.shape[1]) < given["lengths"][:, None]
        h = self.how(self, self.embed(ids), mask) * mask[..., None]
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))


def sorted_by_length(sign: int) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def how(m: Any, h: Tensor, mask: Tensor) -> Tensor:
        order = (sign * mask.sum(1)).argsort(stable=True)
        return torch.tanh(m.layer(h[order]))[order.argsort()]

    return how


def unpadded(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(h).masked_scatter(mask[..., None], torch.tanh(m.layer(h[mask])))


def of_several(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Raises for texts of one word."""
    if mask.sum(1).min() < 2:
        raise ValueError("one word")
    return sorted_by_length(-1)(m, h, mask)


def full(count: int) -> Tensor:
    return torch.randint(1, 20, (count, 6))


def presorted(count: int) -> Tensor:
    return full(count) * (torch.arange(6) < torch.arange(6, 6 - count, -1)[:, None])


@pytest.mark.parametrize(
    ("known", "mode"),
    [("ids", "one_pass"), ("mask", "two_pass"), ("padding", "one_pass"), ("lengths", "two_pass")],
)
@pytest.mark.parametrize(
    ("how", "first", "counts"),
    [
        (sorted_by_length(-1), full, (2, 3, 4, 5)),
        (sorted_by_length(-1), presorted, (2, 3, 4, 5)),
        (sorted_by_length(1), full, (3, 4, 5)),
        (unpadded, full, (2, 4)),
        (of_several, full, (2, 4)),
    ],
)
def test_rows_that_move_with_the_lengths_are_refused_by_a_full_batch(
    how: Any, counts: tuple[int, ...], first: Callable[[int], Tensor], known: str, mode: Any
) -> None:
    """Or by one that is sorted already. Later steps booked rows to other samples, unseen until an
    audit: one sample was measured to add 2.1 C."""
    for count in counts:
        torch.manual_seed(count)
        flash, ids = GradSampleModuleFlashClipping(Padded(how).double(), mode=mode), first(count)
        mask = ids != 0
        masks = {"mask": mask, "padding": ~mask, "lengths": mask.sum(1)}
        with raises("FC201|FC210"):
            output = flash(ids, **({} if known == "ids" else {known: masks[known]}))
            output.square().sum().backward()


def of_two_words(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    """No number where one word is alone: its deviation."""
    counts = mask.sum(1)[:, None, None]
    mean = (h * mask[..., None]).sum(1, keepdim=True) / counts
    square = ((h - mean).square() * mask[..., None]).sum(1, keepdim=True) / (counts - 1)
    return torch.tanh(m.layer(h / square.sqrt()))


def first_come(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    if mask.sum(1).min() < 6:
        raise ValueError("padding")
    return torch.tanh(m.layer(h))


@pytest.mark.parametrize("how", [lambda m, h, mask: m.layer(h).tanh(), of_two_words, first_come])
def test_models_that_know_of_lengths_are_exact(how: Any) -> None:
    """Also those that no shorter text can be given."""
    torch.manual_seed(0)
    check_by_autograd(Padded(how).double(), (full(4),), squares)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", ["mean", "rolled inside", "hook, norm", "mixup, faint"])
def test_what_begins_after_the_first_step_is_refused_by_an_audit(name: str, drops: bool) -> None:
    """Two runs alone show it, those of norms what scales by the batch's gradient."""
    begun = False

    def inner(m: Any, h: Tensor) -> Tensor:
        h = nn.functional.dropout(h, 0.1) if drops else h
        return WRONG[name](m, h) if begun else m.layer(h)

    flash = GradSampleModuleFlashClipping(Around(inner), strict=False)
    for _ in range(2):
        flash(torch.randn(B, T, K)).square().sum().backward()
        flash.zero_grad()
    begun = True
    with raises("FC210"):
        for _ in range(4 * FIRST_AUDIT):
            flash.zero_grad()
            flash(torch.randn(B, T, K)).square().sum().backward()
