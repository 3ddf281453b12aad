"""The returned criterion: the numbers of ``loss.backward()`` on the user's own scalar, or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from tests.support.errors import raises

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
    "L1Loss": nn.L1Loss(),
    "SmoothL1Loss": nn.SmoothL1Loss(),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "weighted": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "function": F.mse_loss,
    "own function": l1,
    "module": WithoutReduction(),
    "unread": Unread(),
    "positional lambda": lambda *args: F.mse_loss(*args),
}
KINDS = [("classes", name) for name in CLASSES] + [("values", name) for name in VALUES]


def batch(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 5, generator=generator)
    if kind == "classes":
        return x, torch.randint(OUTPUTS, (BATCH,), generator=generator)
    return x, torch.rand(BATCH, OUTPUTS, generator=generator)


def private(criterion: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = Model()
    wrapped, optimizer, *returned, _ = FlashPrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*batch("classes")), batch_size=BATCH),
        noise_multiplier=0.0,
        poisson_sampling=False,
        criterion=criterion,
        **{"max_grad_norm": 0.05, **options},
    )
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


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_sample_moves_the_sum_by_the_bound(kind: str, name: str) -> None:
    """Norms are those of one sample at a time, in float64."""
    criterion = (CLASSES if kind == "classes" else VALUES)[name]
    x, target = batch(kind)
    wrapped, _, returned = private(criterion)
    norms, _ = left_by(wrapped, returned(wrapped(x), target))
    alone = Model().double()
    same = [t.double() if t.is_floating_point() else t for t in (x, target)]
    if name == "weighted":
        criterion = nn.BCEWithLogitsLoss(pos_weight=criterion.pos_weight.double())
    for row in range(BATCH):
        alone.zero_grad()
        criterion(alone(same[0][row : row + 1]), same[1][row : row + 1]).backward()
        norm = torch.cat([p.grad.flatten() for p in alone.parameters()]).norm()
        assert norms[row].item() == pytest.approx(norm.item(), rel=1e-4)


def test_functions_are_left_as_they_are() -> None:
    private(F.cross_entropy)
    assert not hasattr(F.cross_entropy, "reduction")
    module = WithoutReduction()
    private(module)
    assert not hasattr(module, "reduction")


def test_a_reduction_survives_an_error() -> None:
    criterion = nn.MSELoss()
    wrapped, _, returned = private(criterion)
    x, target = batch("values")
    with pytest.raises(RuntimeError), pytest.warns(UserWarning):
        returned(wrapped(x), target[:, :3])
    assert criterion.reduction == "mean"


def test_sums_too() -> None:
    for criterion in (None, nn.CrossEntropyLoss(reduction="sum")):
        x, target = batch("classes")
        wrapped, _, returned = private(nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
        norms, sums = left_by(wrapped, returned(wrapped(x), target))
        plain, _, _ = private(criterion, loss_reduction="sum")
        loss = F.cross_entropy(plain(x), target, reduction="sum")
        expected_norms, expected = left_by(plain, loss)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-8)


def test_a_function_s_own_reduction_must_agree() -> None:
    with raises("FC461", ValueError, match=r"criterion\.reduction='mean'"):
        private(F.cross_entropy, loss_reduction="sum")
    with raises("FC461", ValueError, match=r"criterion\.reduction='sum'"):
        private(partial(F.cross_entropy, reduction="sum"))


def test_a_mean_of_another_kind_is_refused() -> None:
    wrapped, _, returned = private(OfItsOwnKind())
    x, target = batch("values")
    for _ in range(2):  # not the first time only
        with raises("FC441", ValueError, match="OfItsOwnKind"):
            returned(wrapped(x), target)
    criterion = OfItsOwnKind()
    wrapped, _, returned = private(lambda *args: criterion(*args))
    left_by(wrapped, returned(wrapped(x), target))


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
    _, expected = left_by(wrapped, loss)
    wrapped.zero_grad()
    returned(wrapped(x), target).backward(retain_graph=True)
    sums = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    torch.testing.assert_close(sums, expected)


def huber(output: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    losses = (output - target).abs().clamp(max=1)
    return losses if reduction == "none" else losses.mean()


#: Criteria that broadcast a target; PyTorch warns of the first two and checks none of them.
BROADCASTING: dict[str, Any] = {
    "MSELoss": nn.MSELoss(),
    "SmoothL1Loss": nn.SmoothL1Loss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "HingeEmbeddingLoss": nn.HingeEmbeddingLoss(),
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


def test_the_gradient_of_an_input_is_that_of_the_mean() -> None:
    """A generator, whose samples a private discriminator reads, is trained by it."""
    x, target = batch("values")
    generator = nn.Linear(5, 5)
    gradients = []
    for criterion in (None, nn.MSELoss()):
        wrapped, _, returned = private(criterion)
        loss = returned if criterion is not None else F.mse_loss
        generator.zero_grad()
        a, b = generator(x), x.flip(0)
        (loss(wrapped(a), target) + loss(wrapped(b), target)).backward()
        gradients.append(generator.weight.grad.clone())
        sums = [p.grad.clone() for p in wrapped.parameters()]
        gradients.append(torch.cat([s.flatten() for s in sums]))
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[3])
