"""Criteria and losses: reductions, counts of samples, and losses of one's own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import mean_squares
from tests.support.errors import raises, warns
from tests.support.private import made
from tests.support.wrapping import MODES
from tests.zoo.constants import CASES

BATCH, OUTPUTS = 6, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class WithoutReduction(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


class Unread(nn.Module):
    """Has a reduction, and does not look at it."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


class OfItsOwnKind(nn.Module):
    """Divides by something else than the number of losses: the mean is not that of its losses."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = (output - target).square().sum(1)
        return losses if self.reduction == "none" else losses.sum() / 10


def l1(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.l1_loss(output, target, reduction=reduction)


CLASSES: dict[str, Callable[..., Any]] = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.1),
    "lambda": lambda output, target: F.cross_entropy(output, target),
}


VALUES: dict[str, Callable[..., Any]] = {
    "MSELoss": nn.MSELoss(),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "weighted": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "function": F.mse_loss,
    "own function": l1,
    "module": WithoutReduction(),
    "unread": Unread(),
}


KINDS = [("classes", name) for name in CLASSES] + [("values", name) for name in VALUES]


def batch(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 5, generator=generator)
    if kind == "classes":
        return x, torch.randint(OUTPUTS, (BATCH,), generator=generator)
    return x, torch.rand(BATCH, OUTPUTS, generator=generator)


def private(criterion: Any, **options: Any) -> tuple[Any, Any, Any]:
    loader = DataLoader(TensorDataset(*batch("classes")), batch_size=BATCH)
    options = {"criterion": criterion, "noise_multiplier": 0.0, "max_grad_norm": 0.05} | options
    wrapped, optimizer, *returned, _ = made(Model(), loader, poisson_sampling=False, **options)
    return wrapped, optimizer, returned[0] if returned else None


def left_by(model: Any, loss: Any) -> tuple[Tensor, Tensor]:
    """Norms of samples, and the clipped sums in ``p.grad``."""
    model.zero_grad()
    loss.backward()
    sums = torch.cat([p.grad.flatten() for p in model.parameters()])
    return model.get_norm_sample().clone(), sums.clone()


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_same_numbers_as_the_plain_loop(kind: str, name: str, mode: str) -> None:
    criterion = (CLASSES if kind == "classes" else VALUES)[name]
    x, target = batch(kind)
    plain, _, _ = private(None, mode=mode)
    wrapped, _, returned = private(criterion, mode=mode)
    expected_norms, expected = left_by(plain, criterion(plain(x), target))
    loss = returned(wrapped(x), target)
    assert loss.item() == pytest.approx(criterion(wrapped(x), target).item(), rel=1e-5)
    loss = returned(wrapped(x), target)
    norms, sums = left_by(wrapped, loss)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-8)
    assert (norms > 0.05).any()  # something was clipped


def test_a_function_s_own_reduction_must_agree() -> None:
    with raises("FC461", ValueError, match=r"criterion\.reduction='mean'"):
        private(F.cross_entropy, loss_reduction="sum")
    with raises("FC461", ValueError, match=r"criterion\.reduction='sum'"):
        private(partial(F.cross_entropy, reduction="sum"))


def test_a_mean_of_another_kind_is_refused() -> None:
    """Its gradients would grow with the number of samples. As a sum it is exact."""
    x, target = batch("values")
    for code, criterion in (
        ("FC441", OfItsOwnKind()),
        ("FC461", lambda *args: OfItsOwnKind()(*args)),
    ):
        wrapped, _, returned = private(criterion)
        for _ in range(2):  # not the first time only
            with raises(code, ValueError, match="OfItsOwnKind|lambda") as error:
                returned(wrapped(x), target)
        assert "loss_reduction='sum'" in str(error.value)
    wrapped, _, returned = private(lambda *args: OfItsOwnKind()(*args), loss_reduction="sum")
    norms, _ = left_by(wrapped, returned(wrapped(x), target))
    for b, norm in enumerate(norms):
        plain = Model()
        OfItsOwnKind()(plain(x[b : b + 1]), target[b : b + 1]).backward()
        alone = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        torch.testing.assert_close(norm, alone, rtol=1e-4, atol=0)
    with raises("FC461", ValueError, match="no sum over samples"):
        wrapped, _, returned = private(lambda *args: F.mse_loss(*args), loss_reduction="sum")
        returned(wrapped(x), target)


def test_a_function_whose_reduction_is_no_mean_gives_losses() -> None:
    """By default, or as there is none: it is asked for one of each sample."""
    x, target = batch("values")

    def by_default(output: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
        return F.mse_loss(output, target, reduction=reduction)

    def told(output: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.mse_loss(output, target, reduction=reduction)

    found = []
    for criterion in (nn.MSELoss(), by_default, told):
        wrapped, _, returned = private(criterion)
        found.append(left_by(wrapped, returned(wrapped(x), target)))
    for mine in found[1:]:
        torch.testing.assert_close(mine, found[0])


@pytest.mark.parametrize(
    "criterion", [nn.CTCLoss(), partial(F.ctc_loss, blank=0)], ids=["module", "function"]
)
def test_a_mean_over_lengths_too_is_the_criterion_s_own(criterion: Any) -> None:
    x, lengths = batch("values")[0], torch.tensor([1, 2, 1, 2, 1, 2])
    target, steps = torch.tensor([[1, 2]]).expand(BATCH, 2), torch.full((BATCH,), 3)

    def loss_of(model: Any, loss: Any, rows: slice = slice(None)) -> Any:
        words_TBC = model(x[rows]).log_softmax(1).expand(3, -1, -1)
        return loss(words_TBC, target[rows], steps[rows], lengths[rows])

    wrapped, _, returned = private(criterion)
    norms, _ = left_by(wrapped, loss_of(wrapped, returned))
    for b, norm in enumerate(norms):
        plain = Model()
        loss_of(plain, criterion, slice(b, b + 1)).backward()
        alone = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        torch.testing.assert_close(norm, alone, rtol=1e-4, atol=0)


def test_losses_of_different_shapes_are_not_added() -> None:
    """A scalar beside losses of samples would count once for each of them."""
    x, target = batch("values")
    wrapped, optimizer, returned = private(nn.MSELoss(), loss_reduction="mean")
    other = type(returned)(wrapped, optimizer, lambda *args: F.mse_loss(*args))
    output = wrapped(x)
    for a, b in ((returned, other), (other, returned)):
        with raises("FC462", ValueError, match=r"losses of shape \[6\] and \[\]|\[\] and \[6\]"):
            a(output, target) + b(output, target)
    with raises("FC462", ValueError, match=r"shape \[6\].*\[6, 6\]"):
        returned(output, target) * torch.ones(6, 1)
    with pytest.raises(TypeError, match="unsupported operand"):
        returned(output, target) + None
    left_by(wrapped, 2 * returned(output, target) + returned(output, target) / 3)


def test_what_a_loss_is_looked_at_by() -> None:
    x, target = batch("values")
    wrapped, _, returned = private(nn.MSELoss())
    loss = returned(wrapped(x), target)
    assert f"{loss:.4f}" == f"{loss.item():.4f}"
    with raises("FC463", AttributeError, match=r"loss\.mean") as error:
        loss.mean().backward()
    line, found = str(error.value).splitlines()[-1].strip(), {"loss": loss}
    exec(line, found)
    torch.testing.assert_close(found["number"], found["losses"].mean().item())


def test_labels_that_are_ignored_do_not_count_where_samples_have_several_axes() -> None:
    """Of logits ``[B T, C, K]``, and labels ``[B T, K]``."""
    wrapped, _, returned = private(nn.CrossEntropyLoss())
    output = wrapped(batch("values")[0])
    logits = output.view(BATCH, 1, OUTPUTS, 1).expand(-1, 2, -1, 2).flatten(0, 1)
    labels = torch.arange(4 * BATCH).view(2 * BATCH, 2) % OUTPUTS
    labels[:3, 0] = -100
    losses = returned(logits, labels, shape=(BATCH, 2)).loss_per_sample
    pairs = zip(logits.split(2), labels.split(2), strict=True)
    torch.testing.assert_close(losses, torch.stack([F.cross_entropy(*pair) for pair in pairs]))


def huber(output: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    losses = (output - target).abs().clamp(max=1)
    return losses if reduction == "none" else losses.mean()


#: Criteria that broadcast a target; PyTorch warns of the first two and checks none of them.
BROADCASTING: dict[str, Any] = {
    "MSELoss": nn.MSELoss(),
    "KLDivLoss": nn.KLDivLoss(),
    "own function": huber,
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", BROADCASTING)
@pytest.mark.parametrize(
    ("output", "target", "line"),
    [
        ([6, 1], [6], "target.unsqueeze(1)"),
        ([6, 1, 3], [6, 3], "target.unsqueeze(1)"),
        ([6], [6, 1], "target.view_as(output)"),
        ([6, 1], [1, 6], "target.view_as(output)"),
    ],
)
def test_a_target_that_is_broadcast_over_samples_is_refused(
    name: str, output: list[int], target: list[int], line: str
) -> None:
    """A sample's loss would hold the targets of all others."""
    _, _, returned = private(BROADCASTING[name])
    found, others = torch.rand(output, requires_grad=True), torch.rand(target)
    shapes = (
        rf"(?s)of shapes {re.escape(str(output))} and {re.escape(str(target))}.*{re.escape(line)}"
    )
    for args, kwargs in (((found, others), {}), ((found,), {"target": others})):
        with raises("FC460", ValueError, match=shapes):
            returned(*args, **kwargs)
    fixed = eval(line.replace("target", "t").replace("output", "o"), {"t": others, "o": found})
    assert returned(found, fixed).loss_per_sample.shape == (6,)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (nn.CrossEntropyLoss(), [6, 4], torch.arange(6) % 4),
        (nn.CrossEntropyLoss(), [6, 1], torch.zeros(6, dtype=torch.long)),
        (nn.CrossEntropyLoss(), [6, 4, 3], torch.ones(6, 3, dtype=torch.long)),
        (nn.MSELoss(), [6, 5, 3], torch.rand(6, 1, 3)),
        (nn.MSELoss(), [6, 5, 3], torch.rand(3)),
        (nn.MSELoss(), [6, 5], torch.rand(6, 1)),
        (nn.MSELoss(), [6, 1], torch.rand(6, 4)),  # each sample with targets of its own
        (nn.MSELoss(), [6, 1], torch.rand(())),
        (nn.MSELoss(), [1, 1], torch.rand(1)),
        (nn.PoissonNLLLoss(), [6, 1], torch.rand(6, 1)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), [6, 4], torch.rand(6, 4)),
        (nn.TripletMarginLoss(), [6, 4], torch.rand(6, 4)),
        (lambda output, target: F.mse_loss(output.squeeze(1), target), [6, 1], torch.rand(6)),
    ],
)
def test_targets_that_are_broadcast_within_samples_stay(
    criterion: Any, output: list[int], target: Tensor
) -> None:
    _, _, returned = private(criterion)
    found = torch.rand(output, requires_grad=True)
    others = (target,) * (2 if isinstance(criterion, nn.TripletMarginLoss) else 1)
    loss = returned(found, *others)
    assert loss.item() == pytest.approx(criterion(found, *others).item(), rel=1e-5)


CLASSES_OF_CRITERIA_OF_BATCHES = 4


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 5.0])


def pairs(output: Tensor, target: Tensor) -> Tensor:
    z = F.normalize(output, dim=1)
    alike = z @ z.T / 0.5
    alike = alike.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(1))


def barlow(output: Tensor, target: Tensor) -> Tensor:
    z = (output - output.mean(0)) / output.std(0)
    return ((z.T @ z / len(z)) - torch.eye(z.shape[1])).square().sum()


def dice(output: Tensor, target: Tensor) -> Tensor:
    p, y = output.sigmoid(), F.one_hot(target, CLASSES_OF_CRITERIA_OF_BATCHES)
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def triplets_in_rows(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    losses = (output - output.mean(0)).square().sum(1)
    return losses if reduction == "none" else losses.mean()


def crosswise(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1] - target).square().mean()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.append(1)
        return F.cross_entropy(output, target) * (1 + 0.5 * len(self.calls))


class Draws(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(output, 0.5), target)


def by_sample_dice(output: Tensor, target: Tensor) -> Tensor:
    p, y = output.sigmoid(), F.one_hot(target, CLASSES_OF_CRITERIA_OF_BATCHES)
    return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()


COMPARE: dict[str, Callable[..., Tensor]] = {
    "pairs": pairs,
    "a little": lambda output, target: F.cross_entropy(output, target) + 1e-3 * output.var(0).sum(),
    "barlow": barlow,
    "dice": dice,
    "rows": triplets_in_rows,
    "crosswise": crosswise,
    "crosswise, with a reduction": lambda output, target, reduction="mean": huber(
        output[:, :1], target.float(), reduction=reduction
    ),
    "weights": lambda output, target: F.cross_entropy(output, target, weight=WEIGHT),
    "ignored": lambda output, target: F.cross_entropy(output, target, ignore_index=0),
}


ALONE: dict[str, Callable[..., Tensor]] = {
    "PyTorch's": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    "function": F.cross_entropy,
    "smoothed": lambda output, target: F.cross_entropy(output, target, label_smoothing=0.2),
    "dice": by_sample_dice,
    "with a constant": lambda output, target: F.cross_entropy(output, target) + 3.0,
    "counts": Counts(),
    "draws": Draws(),
    "centers": lambda output, target: (
        (output[:, :1] - torch.linspace(-1, 1, 16)[None]).square().mean()
    ),
}


def private_of_criteria_of_batches(criterion: Any, batch: int = 16, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES_OF_CRITERIA_OF_BATCHES))
    data = TensorDataset(torch.randn(64, 5), torch.randint(CLASSES_OF_CRITERIA_OF_BATCHES, (64,)))
    options = {"criterion": criterion, "poisson_sampling": False} | options
    return *made(model, DataLoader(data, batch_size=batch), **options), data.tensors


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", COMPARE)
def test_a_criterion_that_compares_samples_is_refused(name: str, mode: str) -> None:
    model, _, criterion, _, (x, y) = private_of_criteria_of_batches(COMPARE[name], mode=mode)
    for _ in range(2):  # who goes on is refused again
        with raises("FC440"):
            criterion(model(x[:16]), y[:16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_one_that_does_not_trains(name: str, dtype: torch.dtype) -> None:
    model, optimizer, criterion, _, (x, y) = private_of_criteria_of_batches(ALONE[name])
    for size in (2, 16, 7, 16):  # of a batch that cannot be halved nothing is known
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = criterion(model(x[:size]), y[:size])
        loss.backward()
        assert model.get_norm_sample().shape == (size,)
        optimizer.step()


class Center(nn.Module):
    """A center loss: its centers are trained, or follow the samples."""

    def __init__(self, learns: bool):
        super().__init__()
        self.learns = learns
        if learns:
            self.centers = nn.Parameter(
                torch.randn(CLASSES_OF_CRITERIA_OF_BATCHES, CLASSES_OF_CRITERIA_OF_BATCHES)
            )
        else:
            self.register_buffer(
                "centers",
                torch.randn(CLASSES_OF_CRITERIA_OF_BATCHES, CLASSES_OF_CRITERIA_OF_BATCHES),
            )

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centers[target].clone()).square().sum(1).mean()
        if not self.learns and self.training:
            with torch.no_grad():
                self.centers[target] += 0.1 * (output - self.centers[target])
        return loss


def test_a_criterion_that_learns_is_warned_of() -> None:
    criterion = Center(learns=True)
    for learns in (True, False):
        model, _, loss, _, (x, y) = private_of_criteria_of_batches(criterion.requires_grad_(learns))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UserWarning)
            loss(model(x[:16]), y[:16]).backward()
        said = ["FC451" in str(one.message) for one in found]
        assert said.count(True) == learns


def test_a_criterion_that_remembers_is_refused() -> None:
    model, _, criterion, _, (x, y) = private_of_criteria_of_batches(Center(learns=False))
    for size in (1, 16):
        with raises("FC130", NotImplementedError, match="the criterion .*'centers'") as error:
            criterion(model(x[:size]), y[:size])
    exec(str(error.value).splitlines()[-1].strip(), {"criterion": criterion})
    criterion(model(x[:16]), y[:16]).backward()
    assert model.get_norm_sample().shape == (16,)


CROSSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "mse_loss": (lambda o, y: F.mse_loss(o, y), 1),
    "by hand": (lambda o, y: ((o - y) ** 2).mean(), 1),
    "scaled before": (lambda o, y: (2 * o.tanh() - y).square().mean(), 1),
    "a product": (lambda o, y: -(o * y).mean(), 1),
    "targets with an axis more": (lambda o, y: (o[:, 0] - y[:, None]).square().mean(), 1),
    "of several outputs": (lambda o, y: (o[:, :1] - y).square().mean() + o.square().mean(), 3),
    "pairs": (lambda o, y: (o[:, None, 0] - o[None, :, 0]).square().mean(), 1),
}


RIGHT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "same shape": (lambda o, y: F.mse_loss(o, y[:, None]), 1),
    "squeezed": (lambda o, y: F.mse_loss(o[:, 0], y), 1),
    "classes": (lambda o, y: F.cross_entropy(o, y.long().abs() % 3), 3),
    "centers, eight by chance": (lambda o, y: (o - torch.arange(8.0)).square().mean(), 1),
    "pairs of a sample": (
        lambda o, y: (o[:, :, None] - o[:, None, :]).square().sum((1, 2)).mean(),
        8,
    ),
    "a head": (lambda o, y: (o @ torch.ones(1, 8)).square().mean(), 1),
    "a mean of one": (lambda o, y: (o - o.detach() * y[:, None]).square().mean(), 1),
}


def wrapped(width: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))
    return GradSampleModuleFlashClipping(model, **options)


def backward(model: Any, loss: Callable[[Tensor, Tensor], Tensor], size: int) -> Any:
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(size, 4, generator=generator), torch.randn(size, generator=generator)
    model.zero_grad()
    loss(model(x), y).backward()
    return model.get_norm_sample()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", CROSSED)
def test_outputs_broadcast_over_the_batch_are_refused(name: str, mode: str) -> None:
    loss, width = CROSSED[name]
    model = wrapped(width, mode=mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss: found outputs")
        backward(model, loss, 1)  # of which nothing can be said
    with warns("FC460"):
        backward(model, loss, 8)
    backward(model, loss, 8)
    backward(model, loss, 3)
    for size in (5, 6):
        with raises("FC460"):
            backward(model, loss, size)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_never_refused(name: str, mode: str) -> None:
    loss, width = RIGHT[name]
    model = wrapped(width, mode=mode)
    with warnings.catch_warnings():
        if "chance" not in name:
            warnings.simplefilter("error")
        for size in (8, 8, 5, 8, 3):
            assert backward(model, loss, size).shape == (size,)
    assert model._loss_look.ended


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_head_outside_of_the_model_is_named(mode: str) -> None:
    model, head = wrapped(3, mode=mode), nn.Bilinear(3, 3, 2)
    with warns("FC451", match=r"found 2 parameters, the first of shape \[2(, 3, 3)?\]"):
        backward(model, lambda o, y: head(o, o).square().mean(), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, lambda o, y: head(o, o).square().mean(), 5)  # once


# -- what the loader drew -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16), (16,)])
def test_packed_inputs_are_refused(shape: tuple[int, ...]) -> None:
    """4 sequences of 4 tokens in one row (one sample), or all tokens (16 samples)."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    flash = GradSampleModuleFlashClipping(model)
    ids = torch.randint(9, shape)
    flash.expect_samples(4)
    with raises("FC240", match="drew 4 samples,"):
        flash(ids)
    with torch.no_grad():
        flash(ids)
    mean_squares(flash(ids.view(4, 4))).backward()
    assert len(flash.get_norm_sample()) == 4
    flash.expect_samples(None)
    flash(ids)


# -- the criterion and check know how many losses there are ---------------------------------------


class Recurrent(nn.Module):
    """Reads ``[T, B]`` and gives ``[B, classes]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids_TB: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids_TB))).mean(0)


@pytest.mark.parametrize("mode", MODES)
def test_time_first_input_is_refused_by_the_criterion(mode: str) -> None:
    """``[T, B]`` with ``batch_first=True``: ``T`` samples. The targets know better."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    from flash_clipping.engine.criterion import FlashLoss

    ids, target = torch.randint(9, (6, 4)), torch.randint(3, (4,))
    for batch_first in (True, False):
        model = Recurrent()
        flash = GradSampleModuleFlashClipping(model, mode=mode, batch_first=batch_first)
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        )
        criterion = FlashLoss(flash, optimizer, nn.CrossEntropyLoss(), "mean")
        if batch_first:
            with raises("FC241", match="4 losses, .*6 samples"):
                criterion(flash(ids), target)
        else:
            criterion(flash(ids), target)


def test_check_counts_losses() -> None:
    from flash_clipping.diagnostics import check as compare

    batch = (torch.randint(9, (6, 4)), torch.randint(3, (4,)))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    report = compare(Recurrent(), batch, loss)
    assert not report.passed and "found 4 losses" in report.failures[0]
    assert "called with a batch of 6 samples" in report.failures[0]
    assert compare(Recurrent(), batch, loss, batch_first=False).passed


def test_check_tries_other_sizes() -> None:
    from flash_clipping.diagnostics import check as compare

    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CASES["positions, embedding"].make(torch.float32)[0]

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.inner(x)

    assert compare(Watched(), torch.randn(3, 5, 3)).passed
    assert {2, 3, 4, 5} <= set(seen)

    class Wrong(Watched):
        """Goes wrong when there are as many samples as positions."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return 2 * y if len(x) == x.shape[1] else y

    report = compare(Wrong(), torch.randn(3, 5, 3))
    assert not report.passed and "With 5 samples, as many as another" in report.failures[0]
