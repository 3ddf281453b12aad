"""What was shown for one model holds for the next that is made in the same way, and no other."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof import remembered
from flash_clipping.engine import model_watch
from flash_clipping.layers.ops.hyper_connections.reference import Settings
from tests.support.errors import raises
from tests.support.hugging_face import gpt2
from tests.support.one_sample import assert_clipped, one_at_a_time

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """A model whose attributes decide what it computes."""

    def __init__(self, mixes: Any = False, buffer: float = 0.0):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.mixes = mixes
        self.register_buffer("number", torch.tensor(buffer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.mixes or self.number > 0:
            y = y - y.mean(0)
        return self.last(y.tanh())


Made = Callable[[], nn.Module]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for every proof that is made."""
    found: list[str] = []
    prove = model_watch.prove

    def noted(subject: Any, *args: Any) -> Any:
        found.append(type(subject.root).__name__)
        return prove(subject, *args)

    monkeypatch.setattr(model_watch, "prove", noted)
    return found


def wrapped(make: Made = Net, x: Tensor = X, **options: Any) -> GradSampleModuleFlashClipping:
    """A model that has run forward and backward."""
    model = make().double() if x.is_floating_point() else make()
    hooks = GradSampleModuleFlashClipping(model, **options)
    output = hooks(x)
    getattr(output, "logits", output).square().flatten(1).sum(1).mean().backward()
    return hooks


def test_the_third_model_is_not_proven(proofs: list[str]) -> None:
    for _ in range(3):
        torch.manual_seed(1)
        last = wrapped()
    assert proofs == ["Net"] * 2

    def fresh() -> nn.Module:
        torch.manual_seed(1)
        return Net().double()

    groups = [[row] for row in range(len(X))]
    norms, sums = one_at_a_time(fresh, lambda net, rows: net(X[rows]).square().sum(), groups)
    assert_clipped(last, norms, sums, 1e-12)


def test_a_model_of_transformers_is_remembered(proofs: list[str]) -> None:
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        wrapped(gpt2, ids)
    assert len(proofs) == 2


def test_one_is_proven_whenever_models_have_doubled(proofs: list[str]) -> None:
    made = []
    for _ in range(16):
        before = len(proofs)
        wrapped()
        made.append(len(proofs) - before)
    assert [n + 1 for n, new in enumerate(made) if new] == [1, 2, 4, 8, 16]


def test_another_number_of_samples_is_the_same_call(proofs: list[str]) -> None:
    for rows in (5, 5, 4):
        wrapped(x=X[:rows])
    assert len(proofs) == 2
    wrapped()  # the fourth
    wrapped(x=X[:3])  # as many as the features, which a look at four tells apart
    assert len(proofs) == 3


def own_forward() -> nn.Module:
    model = Net()

    def forward(self: Net, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last((y - y.mean(0)).tanh())

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return model


def of_a_layer() -> nn.Module:
    model = Net()
    forward = model.first.forward
    model.first.forward = lambda x: forward(x - x.mean(0))  # type: ignore[method-assign]
    return model


def of_the_same_name() -> nn.Module:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last((y - y.mean(0)).tanh())

    Other.__qualname__, Other.__name__, Other.__module__ = "Net", "Net", Net.__module__
    return Other()


def hooked() -> nn.Module:
    model = Net()
    model.first.register_forward_hook(lambda layer, args, y: y - y.mean(0))
    return model


class Called(nn.Module):
    """Reads what it calls from a table, and how from an object of this library."""

    def __init__(self, names: str = "ab", epsilon: float = 1e-6) -> None:
        super().__init__()
        self.first, self.settings = nn.Linear(3, 4), Settings(epsilon, 1e-6, 3)
        self.own_hooks = dict(zip(names, (torch.tanh, centred), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.own_hooks["b" if self.settings.norm_eps > 1 else "a"](y)


def centred(y: Tensor) -> Tensor:
    return y - y.mean(0)


MIXERS: dict[str, Made] = {
    "an attribute": lambda: Net(mixes=True),
    "another type of one": lambda: Net(mixes=1),
    "an object": lambda: Net(mixes=types.SimpleNamespace(by=1)),
    "a buffer": lambda: Net(buffer=1.0),
    "a forward of its own": own_forward,
    "a layer's forward": of_a_layer,
    "a class of one name": of_the_same_name,
    "a hook": hooked,
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_mixes_samples_is_refused(name: str, proofs: list[str]) -> None:
    for _ in range(2):  # the next would take it over
        wrapped()
    with raises("FC202"):
        wrapped(MIXERS[name])
    assert len(proofs) == 3


@pytest.mark.parametrize("other", [{"names": "ba"}, {"epsilon": 2.0}])
def test_tables_and_settings_are_told_apart(other: dict[str, Any]) -> None:
    for _ in range(2):  # the next would take it over
        wrapped(Called)
    with raises("FC210"):
        wrapped(lambda: Called(**other))


def test_a_class_that_was_changed_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # the next would take it over
        wrapped()

    def forward(self: Net, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last((y - y.mean(0)).tanh())

    monkeypatch.setattr(Net, "forward", forward)
    with raises("FC202"):
        wrapped()


def frozen() -> nn.Module:
    model = Net()
    model.first.weight.requires_grad_(False)
    return model


def in_evaluation() -> nn.Module:
    model = Net()
    model.last.eval()
    return model


def tied() -> nn.Module:
    model = Net()
    model.last = nn.Linear(4, 4)
    model.again = nn.Linear(4, 4)
    model.again.weight = model.last.weight
    return model


@pytest.mark.parametrize("make", [frozen, in_evaluation, tied])
def test_other_models_are_proven(make: Made, proofs: list[str]) -> None:
    for _ in range(2):  # the next would take it over
        wrapped()
    wrapped(make)
    assert len(proofs) == 3


@pytest.mark.parametrize("options", [{"loss_reduction": "sum"}, {"folded_modules": ["first"]}])
def test_other_options_are_proven(options: dict[str, Any], proofs: list[str]) -> None:
    for _ in range(2):  # the next would take it over
        wrapped()
    hooks = GradSampleModuleFlashClipping(Net().double(), **options)
    hooks(X)
    assert len(proofs) == 3


def test_under_autocast_it_is_another_call(proofs: list[str]) -> None:
    x = X.float()
    for _ in range(2):  # the next would take it over
        GradSampleModuleFlashClipping(Net())(x)
    with torch.autocast("cpu", torch.bfloat16):
        GradSampleModuleFlashClipping(Net())(x)
    assert len(proofs) == 3


def test_arguments_are_told_apart(proofs: list[str]) -> None:
    """By what a model that was shown tells its calls apart with."""

    class Switched(Net):
        def forward(self, x: Tensor, mixes: bool = False) -> Tensor:  # type: ignore[override]
            self.mixes = mixes
            y = super().forward(x)
            self.mixes = False
            return y

    for _ in range(2):  # the next would take it over
        wrapped(Switched)
    hooks = GradSampleModuleFlashClipping(Switched().double())
    with raises("FC202"):
        hooks(X, mixes=True).sum().backward()


class Unpickled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Large(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(remembered.LARGEST)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Identity()]


@pytest.mark.parametrize("make", [Unpickled, Large, Listed])
def test_what_cannot_be_told_is_proven_each_time(make: Made, proofs: list[str]) -> None:
    for _ in range(3):
        wrapped(make)
    assert len(proofs) == 3


def test_no_model_is_held() -> None:
    hooks = wrapped()
    alive = [weakref.ref(hooks._module), weakref.ref(hooks._module.first.weight)]
    assert remembered._known
    del hooks
    gc.collect()
    assert [found() for found in alive] == [None, None]


def test_few_kinds_are_kept() -> None:
    for width in range(remembered.KINDS + 3):
        wrapped(lambda width=width: nn.Linear(3, width + 1))  # type: ignore[misc]
    assert 0 < len(remembered._known) <= len(remembered._models) <= remembered.KINDS


def test_what_is_learnt_later_is_of_one_model_alone() -> None:
    """The next model gets what was shown before the first step."""
    for _ in range(3):
        first = wrapped()
    first._session.known.proven.clear()
    first._watch.gate._why.clear()
    again = wrapped()
    assert again._session.known is not first._session.known
    del first
    last = wrapped()
    assert last._session.known.proven == {"first (Linear)", "last (Linear)"}
    assert last._watch.gate._why
