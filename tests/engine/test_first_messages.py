"""What ``make_private`` refuses, in a message that names the module and whose lines help."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.utils import register_module_validator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import AdaptiveBound, FlashPrivacyEngine, codes
from tests.support.errors import raises

#: Code in a message.
LINES = re.compile("(?m)((?:^    .*\\n?)+)")


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.inner = nn.ModuleDict({"layer": layer})
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner["layer"](x[:, None])[0][:, -1])


class Norms(nn.Module):
    def __init__(self, *norms: nn.Module):
        super().__init__()
        self.first, self.norms = nn.Linear(4, 6), nn.Sequential(*norms)

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(self.first(x))


class OfItsOwn(nn.BatchNorm1d):
    """A kind that ``ModuleValidator.fix`` does not know."""


class Odd(nn.Linear):
    pass


def private(model: nn.Module, **options: Any) -> Any:
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return FlashPrivacyEngine().make_private(**(given | options))


def recurrent(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Sequence(kind(4, 3, batch_first=True, **options))


tracking = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "norm": (lambda: Norms(nn.BatchNorm1d(6)), r"norms\.0 \(BatchNorm1d\) mixes", ".fix("),
    "frozen norm": (
        lambda: Norms(nn.BatchNorm1d(6), nn.BatchNorm1d(6).requires_grad_(False)),
        r"norms\.0 \(BatchNorm1d\) mixes",
        "set_submodule",
    ),
    "norm without weights": (
        lambda: Norms(nn.BatchNorm1d(6, affine=False)),
        r"norms\.0 \(BatchNorm1d\)",
        "set_submodule",
    ),
    "norm of its own kind": (
        lambda: Norms(OfItsOwn(6)),
        r"norms\.0 \(OfItsOwn\)",
        "set_submodule",
    ),
    "LSTM": (recurrent(nn.LSTM), r"inner\.layer \(LSTM\) has no per-sample", ".fix("),
    "GRU": (recurrent(nn.GRU), r"inner\.layer \(GRU\) has no per-sample", ".fix("),
    "RNN": (recurrent(nn.RNN), r"inner\.layer \(RNN\) has no per-sample", "DPRNN"),
    "RNN with relu": (recurrent(nn.RNN, nonlinearity="relu"), r"inner\.layer \(RNN\)", "DPRNN"),
    "eval": (
        lambda: nn.Linear(4, 2).eval(),
        r"the model \(Linear\): found evaluation mode",
        "train()",
    ),
    "statistics": (
        lambda: Norms(nn.Unflatten(1, (2, 3)), tracking, nn.Flatten()),
        r"norms\.1 \(InstanceNorm1d\): .*running stats",
        ".fix(",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_module_and_its_lines_help(name: str) -> None:
    make, text, line = REFUSED[name]
    model = make()
    with raises("FC101|FC110|FC111|FC112", UnsupportedModuleError, match=text) as error:
        private(model)
    assert isinstance(error.value, NotImplementedError)
    assert "flash-clipping errors FC1" in error.value.__notes__[0]
    lines, *_ = LINES.findall(str(error.value))
    assert line in lines
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names: dict[str, Any] = {"model": model}
    exec(textwrap.dedent(lines), names)
    if "RNN" in name or name in ("LSTM", "GRU"):  # it computes the same
        torch.manual_seed(0)
        x = torch.randn(5, 4)
        torch.testing.assert_close(names["model"](x), model(x))
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    wrapped, optimizer, criterion, loader = private(names["model"], criterion=nn.CrossEntropyLoss())
    for x, y in loader:
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()


def test_a_norm_of_timm_is_built_anew() -> None:
    kind = type("BatchNormAct2d", (nn.BatchNorm2d,), {"__module__": "timm.layers.norm_act"})
    with raises("FC101", UnsupportedModuleError, match=r"norm_layer=timm\.layers\.GroupNormAct"):
        private(nn.Sequential(nn.Conv2d(1, 4, 1), kind(4)))


def test_a_projected_lstm_is_named() -> None:
    with raises("FC110", UnsupportedModuleError, match=r'(?s)proj_size.*mode="one_by_one"'):
        private(Sequence(nn.LSTM(4, 6, proj_size=3, batch_first=True)))


def test_a_frozen_recurrent_layer_is_supported() -> None:
    torch.manual_seed(0)
    model = Sequence(nn.LSTM(4, 3, batch_first=True).requires_grad_(False))
    wrapped, *_ = private(model, poisson_sampling=False)
    x = torch.randn(4, 4)
    wrapped(x).square().sum(1).mean().backward()
    norms = wrapped.get_norm_sample()
    plain = wrapped.to_standard_module().double()
    for row in range(4):
        params = [p for p in plain.parameters() if p.requires_grad]
        grads = torch.autograd.grad(plain(x[row : row + 1].double()).square().sum(), params)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        torch.testing.assert_close(norms[row].double(), norm, rtol=1e-5, atol=0)


def test_the_page_of_errors_says_how_many_things_make_private_returns() -> None:
    """Python's own message, of the line that takes them, cannot be ours."""
    page = codes.PAGE.read_text()
    lines = re.findall(r"`(model, .*) = engine\.make_private\(", page)
    assert len(lines) == 2
    for line, given in zip(lines, ({}, {"criterion": nn.CrossEntropyLoss()}), strict=True):
        assert len(private(nn.Linear(4, 2), **given)) == len(line.split(", "))
    with pytest.raises(ValueError, match="not enough values to unpack") as error:
        model, optimizer, criterion, loader = private(nn.Linear(4, 2))
    assert str(error.value).split(" (")[0] in page


def test_a_norm_with_running_statistics_stays_in_eval_mode() -> None:
    """What the message says; Opacus' own validation refuses it."""
    model = Norms(nn.BatchNorm1d(6))
    with raises("FC101", UnsupportedModuleError) as error:
        private(model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model})
    private(model)


def test_a_validator_of_the_user_s_is_named_and_asked() -> None:
    from opacus.validators import ModuleValidator

    register_module_validator(Odd)(lambda layer: [NotImplementedError("odd indeed")])
    try:
        with raises("FC111", UnsupportedModuleError, match=r"1 \(Odd\): .* odd indeed"):
            private(nn.Sequential(nn.Linear(4, 4), Odd(4, 2)))
    finally:
        del ModuleValidator.VALIDATORS[Odd]


@pytest.mark.parametrize("clipping", ["flat", "automatic", AdaptiveBound()])
def test_bounds_of_parameters_need_clipping_by_layer(clipping: Any) -> None:
    options: dict[str, Any] = {"clipping": clipping, "max_grad_norm": [1.0, 1.0]}
    with raises("FC320", ValueError, match='found 2 bounds with .*\n    clipping="per_layer"'):
        private(nn.Linear(4, 2), **options)
    private(nn.Linear(4, 2), **options | {"clipping": "per_layer"})


@pytest.mark.parametrize("bound", [2.0, [1.0], [1.0] * 3])
def test_clipping_by_layer_needs_as_many_bounds(bound: Any) -> None:
    model = nn.Linear(4, 2)
    with raises("FC320", ValueError, match="expected 2, one for each trainable parameter") as error:
        private(model, clipping="per_layer", max_grad_norm=bound)
    names: dict[str, Any] = {"C": 2.0}
    exec(str(error.value).splitlines()[-1].strip(), names)
    bounds = names["max_grad_norm"]
    wrapped, optimizer, *_ = private(model, clipping="per_layer", max_grad_norm=bounds)
    with raises("FC320", ValueError, match="expected 2, one for each trainable parameter"):
        private(wrapped, optimizer=optimizer, clipping="per_layer", max_grad_norm=bound)
    with raises("FC320", ValueError, match="found 2 bounds with clipping='flat'"):
        private(wrapped, optimizer=optimizer, max_grad_norm=[1.0, 1.0])


def test_a_frozen_model_is_refused_where_it_is_given() -> None:
    model = Norms(nn.Linear(6, 2)).requires_grad_(False)
    with raises("FC305", ValueError, match="4") as error:
        private(model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model})
    private(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "norms.0.weight",
        "norms.0.bias",
    ]


@pytest.mark.parametrize("clipping", ["flat", AdaptiveBound(0.5, 0.01, 10.0)])
@pytest.mark.parametrize("twice", [1, 2])
def test_the_cell_may_be_run_again(twice: int, clipping: str) -> None:
    """All that the call returned is given to it again: the step is that of one call."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion: Any = nn.CrossEntropyLoss(label_smoothing=0.1)
    loader: Any = DataLoader(data, batch_size=4)
    wrapped: Any = model
    engine = FlashPrivacyEngine(accountant="rdp")
    for _ in range(1 + twice):
        wrapped, optimizer, criterion, loader = engine.make_private(
            module=wrapped,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=0.1,
            max_grad_norm=1e-3,
            clipping=clipping,
        )
    assert isinstance(criterion.criterion, nn.CrossEntropyLoss)
    x, y = data.tensors
    optimizer.zero_grad()
    criterion(wrapped(x), y).backward()
    expected = wrapped.get_norm_sample()
    plain = copy.deepcopy(wrapped).to_standard_module()
    for row in range(3):
        losses = nn.functional.cross_entropy(plain(x), y, reduction="none", label_smoothing=0.1)
        grads = torch.autograd.grad(losses[row], [*plain.parameters()])
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        torch.testing.assert_close(expected[row], norm, rtol=1e-5, atol=0)
    wrapped.zero_grad()
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
        steps += 1
    ((multiplier, rate, counted),) = engine.accountant.history
    assert counted == steps == 4 and rate == 1 / 4
    assert clipping != "flat" or multiplier == 0.1
