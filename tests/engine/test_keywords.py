"""Arguments of ``make_private``: each is read, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_clipping import FlashPrivacyEngine
from tests.support.errors import raises
from tests.support.private import Private, TwoLayers, data


class Scaled(nn.Linear):
    """A trainable layer with a buffer, a constant or one that it changes."""

    def __init__(self, growth: float):
        super().__init__(6, 3)
        self.growth = growth
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.growth:  # nothing reads it: an output that it scaled would mix samples
            self.scale += self.growth * x.detach().mean()
        return super().forward(x)


@pytest.mark.parametrize("wrap_model", [True, False])
def test_strict_is_read(wrap_model: bool) -> None:
    with raises("FC130", NotImplementedError, match="buffer 'scale'"):
        Private(Scaled(0.1), wrap_model=wrap_model).step()
    Private(Scaled(0.1), wrap_model=wrap_model, strict=False).step()
    Private(Scaled(0.0), wrap_model=wrap_model).step()


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("strickt", r"Did you mean strict\?"),
        ("cliping", r"Did you mean clipping\?"),
        ("units", r"Did you mean unit\?"),
        ("max_physical_batch_size", "Known are .* max_grad_norm.* strict"),
        ("target_epsilon", "Known are .* max_grad_norm.* strict"),
    ],
)
def test_unknown_keywords_are_refused(keyword: str, advice: str) -> None:
    model = TwoLayers()
    with raises("FC310", TypeError, match=rf"found {keyword}, .*{advice}"):
        Private(model, **{keyword: 1.0})
    assert not hasattr(model, "autograd_grad_sample_hooks")


@pytest.mark.parametrize("with_epsilon", [False, True])
@pytest.mark.parametrize("name", ["clipping", "mechanism", "unit", "distributed", "kernels"])
def test_groups_are_objects(name: str, with_epsilon: bool) -> None:
    engine = FlashPrivacyEngine(accountant="rdp")
    make = engine.make_private_with_epsilon if with_epsilon else engine.make_private
    with raises("FC319", TypeError, match=rf"{name}: found complex.*\n    {name}="):
        make(**{**arguments(with_epsilon), name: 1j})


#: Arguments of Opacus that there are not, and what the error names.
GONE = {"noise_generator": r"FlashPrivacyEngine\(seed=", "rand_on_empty": "2 C"}


def arguments(with_epsilon: bool) -> dict[str, Any]:
    model = TwoLayers()
    values: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(data(), batch_size=16),
        "max_grad_norm": 1.0,
        "batch_first": True,
        "loss_reduction": "mean",
        "poisson_sampling": True,
        "clipping": "flat",
        "grad_sample_mode": "flash",
        "wrap_model": True,
    }
    of_method = {"noise_multiplier": 1.0}
    if with_epsilon:
        of_method = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": 1}
    return values | of_method


@pytest.mark.parametrize("with_epsilon", [False, True])
def test_whatever_else_opacus_knows_is_taken(with_epsilon: bool) -> None:
    name = "make_private_with_epsilon" if with_epsilon else "make_private"
    opacus = inspect.signature(getattr(PrivacyEngine, name)).parameters
    given = arguments(with_epsilon)
    assert set(opacus) - {"self", "kwargs", *GONE} <= set(given)  # as of the installed version
    private = getattr(FlashPrivacyEngine(accountant="rdp"), name)(**given)
    assert len(private) == 4
    for gone, instead in GONE.items():
        with raises("FC310", TypeError, match=f"found {gone}.*{instead}"):
            getattr(FlashPrivacyEngine(accountant="rdp"), name)(**given, **{gone: None})


def test_modes_of_opacus_take_all_that_it_knows() -> None:
    given = arguments(False) | {"noise_generator": torch.Generator(), "rand_on_empty": True}
    made = FlashPrivacyEngine().make_private(**given | {"grad_sample_mode": "hooks"})
    assert made[1].generator is given["noise_generator"]


@pytest.mark.parametrize(
    ("accountant", "keywords"),
    [
        ("prv", {"eps_error": 0.05, "delta_error": 1e-9}),
        ("rdp", {"alphas": [2.0, 4.0, 8.0, 16.0]}),
        ("gdp", {"poisson": False}),
        ("rdp", {"epsilon_tolerance": 0.5}),
    ],
)
def test_what_accountants_read(accountant: str, keywords: dict[str, Any]) -> None:
    engine = FlashPrivacyEngine(accountant=accountant)
    engine.make_private_with_epsilon(**arguments(True), **keywords)
    with raises("FC310", TypeError, match="epsilom"):
        engine.make_private_with_epsilon(**arguments(True), epsilom=1)
    name = next(iter(keywords))
    with raises("FC310", TypeError, match=name):
        FlashPrivacyEngine(accountant=accountant).make_private(**arguments(False), **keywords)


def test_a_wrapped_model_keeps_its_mode() -> None:
    private = Private()
    with raises("FC173", ValueError, match="one_pass.*two_pass"):
        private.engine.make_private(
            module=private.wrapper,
            optimizer=private.optimizer,
            data_loader=private.loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            mode="two_pass",
        )
