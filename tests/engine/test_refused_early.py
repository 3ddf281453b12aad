"""Ordinary calls that crashed: an answer now, or an error that says what to write."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import nn
from torch.utils.data import DataLoader

from flash_clipping import (
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PlanExceededWarning,
    RandomAllocation,
    Users,
    auditing,
    planning,
)
from flash_clipping.engine.accounting import least_noise
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.engine.sampling.loaders import PoissonLoader
from flash_clipping.noise.report import statistics_report
from flash_clipping.noise.samplers import FixedShapeSampler
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.dashboard import PrivacyDashboard
from tests.support.errors import raises
from tests.support.private import Private, TwoLayers, data


def arguments(**options: Any) -> dict[str, Any]:
    model = TwoLayers()
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data(), batch_size=16),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    } | options


@pytest.mark.parametrize("multiplier", [1e-6, 0.01, 0.0])
def test_next_to_no_noise_has_a_huge_epsilon(multiplier: float) -> None:
    engine = FlashPrivacyEngine()
    private = Private(engine=engine, noise_multiplier=multiplier)
    for _ in range(3):
        private.step()
    assert engine.accountant.mechanism() == "prv"
    epsilon = engine.get_epsilon(1e-5)
    assert type(epsilon) is float and epsilon > 1e3
    assert math.isinf(epsilon) == (multiplier == 0)


@pytest.mark.filterwarnings("ignore:GDP accounting")
@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld", "discrete_gaussian"])
def test_nothing_is_spent_before_the_first_step_and_all_without_noise(accountant: str) -> None:
    engine = FlashPrivacyEngine(accountant=accountant)
    assert engine.get_epsilon(1e-5) == 0.0
    assert engine.summary(1e-5).startswith("ε = 0 at")
    engine.accountant.history = [(0.0, 0.1, 3)]
    assert math.isinf(engine.get_epsilon(1e-5))


def test_little_noise_has_no_epsilon_that_is_too_small() -> None:
    """One step on a batch that has the sample with probability 1/100: beside noise of 0.01 bounds
    its privacy loss is 5000 at least whenever it is there, which is more often than delta."""
    accountant = FlashPrivacyEngine().accountant
    accountant.history = [(0.01, 0.01, 1)]
    assert accountant.get_epsilon(1e-5) > 5000


def test_plans_are_by_the_accountant_that_counts() -> None:
    """By Opacus' PRV accountant ε is 705 at the first noise, and no noise has an ε of 1000."""
    assert planning.plan(100, 1, steps=1, noise_multiplier=0.01, delta=1e-5).epsilon > 5000
    assert 990 < planning.plan(100, 1, steps=1, epsilon=1000.0, delta=1e-5).epsilon <= 1000


def test_a_search_for_noise_ends_where_epsilon_jumps_over_the_target() -> None:
    class Jumps(RDPAccountant):
        def get_epsilon(self, delta: float, **_: Any) -> float:
            return 1.0 if self.history[0][0] > 3 else 100.0

    target = {"target_epsilon": 50.0, "target_delta": 1e-5}
    noise = least_noise(Jumps(), **target, sample_rate=0.1, steps=1)
    assert noise == pytest.approx(3, rel=1e-6) and noise > 3


def test_epsilon_is_opacus_where_that_can_be_computed() -> None:
    ours, theirs, rdp = FlashPrivacyEngine().accountant, PRVAccountant(), RDPAccountant()
    for accountant in (ours, theirs, rdp):
        accountant.history = [(1.1, 0.01, 500), (0.9, 0.02, 10)]
    assert ours.get_epsilon(1e-5) == theirs.get_epsilon(1e-5) < rdp.get_epsilon(1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused_and_breaks_nothing(duplicate: Any) -> None:
    private = Private()
    private.step()
    with raises("FC537"):
        duplicate(private.optimizer)
    private.step()
    Private().step()


def test_an_optimizer_with_many_evaluations_is_refused() -> None:
    given = arguments()
    given["optimizer"] = torch.optim.LBFGS(given["module"].parameters())
    with raises("FC533", ValueError, match="LBFGS,"):
        FlashPrivacyEngine().make_private(**given)


@pytest.mark.parametrize("clipping", ["flat", AdaptiveBound()])
@pytest.mark.parametrize("with_epsilon", [False, True])
def test_a_criterion_is_returned_where_one_is_given(clipping: Any, with_epsilon: bool) -> None:
    """As in Opacus: three values without a criterion, four with it."""
    for criterion in ({}, {"criterion": None}, {"criterion": nn.CrossEntropyLoss(reduction="sum")}):
        given = arguments(loss_reduction="sum", clipping=clipping, noise_multiplier=0.5)
        engine = FlashPrivacyEngine(accountant="rdp")
        make = engine.make_private
        if with_epsilon:
            del given["noise_multiplier"]
            given |= {"target_epsilon": 50.0, "target_delta": 1e-5, "epochs": 1}
            make = engine.make_private_with_epsilon
        module, optimizer, *loss, loader = make(**given, **criterion)
        assert isinstance(module, GradSampleModuleFlashClipping)
        assert isinstance(optimizer, FlashDPOptimizer) and isinstance(loader, DataLoader)
        assert (optimizer.adaptive is not None) == (clipping != "flat")
        assert [one.criterion for one in loss] == [*filter(None, criterion.values())]


def test_a_missing_accountant_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with raises("FC940", ImportError, match=r"accounting\]'"):
        FlashPrivacyEngine(accountant="pld")


def made(grad_sample_mode: str = "flash", **options: Any) -> None:
    model = nn.Linear(6, 4)
    given = arguments(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    given |= {"grad_sample_mode": grad_sample_mode} | options
    engine = FlashPrivacyEngine(accountant="rdp")
    try:
        if "epochs" in given:
            del given["noise_multiplier"]
            engine.make_private_with_epsilon(**given)
        else:
            engine.make_private(**given)
    except ValueError:
        assert type(model) is nn.Linear and not model._forward_hooks, "the model was wrapped"
        assert "forward" not in vars(model)
        raise


def with_epsilon(**options: Any) -> None:
    given = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": 2, "epsilon_tolerance": 1.0}
    made(**given | options)


def optimizer(**options: Any) -> None:
    params = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
    FlashDPOptimizer(params, **given | options)


def statistics(**options: Any) -> None:
    given = {"sensitivity": 1.0, "standard_deviation": 2.0, "delta": 1e-3, "times": 1}
    statistics_report("a", **given | options)


def planned(**options: Any) -> planning.Plan:
    given = {"samples": 40, "batch_size": 10, "epochs": 2, "accountant": "rdp"}
    given |= {"epochs": None} if "steps" in options else {}
    given |= {} if "epsilon" in options else {"noise_multiplier": 1.0}
    return planning.plan(**given | options)


def p_value(**options: Any) -> None:
    auditing.p_value(**{"canaries": 9, "guesses": 5, "correct": 4, "epsilon": 1.0} | options)


def lower_bound(**options: Any) -> None:
    auditing.epsilon_lower_bound(**{"canaries": 9, "guesses": 5, "correct": 4} | options)


def audited(**options: Any) -> None:
    score_M = torch.arange(9.0)
    auditing.audit(score_M, score_M > 3, **{"guesses": 4, "epsilon": 1.0, "delta": 1e-3} | options)


def of_units(max_rows: Any) -> None:
    Users([0, 1], max_rows)


def of_trainer(**options: Any) -> None:
    given = {"target_delta": 1e-5}
    given |= {} if "noise_multiplier" in options else {"target_epsilon": 1.0}
    PrivacyArguments(**given | options)


#: Where a number is asked for, by its name: what takes it, and numbers that are none there.
NUMBERS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("noise_multiplier", made, (-1, math.inf)),
    ("noise_multiplier", partial(made, "hooks"), (-1, math.inf)),
    ("max_grad_norm", made, (-1, 0, math.inf)),
    ("target_epsilon", with_epsilon, (-1, 0, math.inf)),
    ("target_epsilon", partial(with_epsilon, grad_sample_mode="hooks"), (-1, 0, math.inf)),
    ("target_delta", with_epsilon, (-1, 0, 0.5, 0.9, 1)),
    ("epochs", with_epsilon, (-1, 0, math.inf)),
    ("epsilon_tolerance", with_epsilon, (-1, 0, math.inf)),
    ("noise_multiplier", optimizer, (-1, math.inf)),
    ("max_grad_norm", optimizer, (-1, 0, math.inf)),
    ("expected_batch_size", optimizer, (-1, 0, math.inf)),
    ("target_unclipped_quantile", AdaptiveBound, (-1, 2)),
    ("min_clipbound", AdaptiveBound, (-1, 0, math.inf)),
    ("max_clipbound", AdaptiveBound, (-1, 0)),
    ("clipbound_learning_rate", AdaptiveBound, (-1, math.inf)),
    ("sample_rate", partial(PoissonLoader, data()), (-1, 0, 1.5)),
    ("participations", RandomAllocation, (-1, 0, 1.5)),
    ("max_rows", of_units, (-1, 0, 1.5)),
    (
        "max_batch_size",
        partial(FixedShapeSampler, num_samples=9, sample_rate=0.5, steps=2),
        (0, 10),
    ),
    ("every", partial(PrivacyDashboard, FlashPrivacyEngine(), None, delta=1e-5), (-1, 0, 1.5)),
    ("delta", FlashPrivacyEngine().get_epsilon, (-1, 0, 0.5, 0.9, 1)),
    ("delta", FlashPrivacyEngine().summary, (-1, 0, 0.5, 0.9, 1)),
    ("delta", FlashPrivacyEngine().report, (-1, 0, 0.5, 0.9, 1)),
    ("sensitivity", statistics, (-1, 0, math.inf)),
    ("standard_deviation", statistics, (-1, math.inf)),
    ("delta", statistics, (-1, 0, 0.5, 0.9, 1)),
    ("times", statistics, (-1, 0, 2.5)),
    ("samples", planned, (-1, 0, 40.5)),
    ("batch_size", planned, (-1, 0, 2.5, 41)),
    ("epochs", planned, (-1, 0, math.inf)),
    ("steps", planned, (-1, 0, 2.5)),
    ("epsilon", planned, (-1, 0, math.inf)),
    ("noise_multiplier", planned, (-1, 0, math.inf)),
    ("delta", planned, (-1, 0, 0.5, 0.9, 1)),
    ("max_physical_batch_size", planned().micro_batches, (-1, 0, 2.5)),
    ("parameters", planned().noise_over_signal, (-1, 0, 2.5)),
    ("epsilon", p_value, (-1, math.inf)),
    ("delta", p_value, (-1, 1)),
    ("guesses", p_value, (4.5,)),
    ("confidence", lower_bound, (-1, 0, 1, 95)),
    ("epsilon", audited, (-1,)),
    ("guesses", audited, (-1, 4.5, 10)),
    ("target_delta", of_trainer, (-1, 0, 0.5, 0.9, 1)),
    ("target_epsilon", of_trainer, (-1, 0, math.inf)),
    ("noise_multiplier", of_trainer, (-1, math.inf)),
    ("max_grad_norm", of_trainer, (-1, 0, math.inf)),
]


@pytest.mark.parametrize(("name", "call", "outside"), NUMBERS)
def test_what_is_no_number_there_is_refused_with_one_that_is(
    name: str, call: Callable[..., Any], outside: tuple[Any, ...]
) -> None:
    tensors = [torch.tensor(value) for value in outside if isinstance(value, float)]
    for value in (*outside, *tensors, math.nan, "1.0", True, torch.ones(2), 10**400):
        with raises("FC302", ValueError, match=f"{name}: found ") as error:
            call(**{name: value})
        said, *_, line = str(error.value).splitlines()
        assert f"found {value!r}; expected a" in said
        assert line.startswith(f"    {name}=")
    call(**eval(f"dict({line.strip()})"))


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_functional_call_of_a_private_model_is_named(wrap_model: bool, steps: int) -> None:
    private = Private(wrap_model=wrap_model)
    for _ in range(steps):
        private.step()
    given = {name: p.detach().clone() for name, p in private.model.named_parameters()}
    for tensor in given.values():
        tensor.requires_grad_()
    x = data().tensors[0][:4]
    with raises("FC141") as refused:
        torch.func.functional_call(private.model, given, (x,))
    message = str(refused.value)
    assert message.startswith(f"FC141 {next(iter(given))}: found a Tensor in its place")
    assert "torch.func.functional_call" in message and "FullyShardedDataParallel" not in message
    private.step()
    plain = private.plain if not wrap_model else private.wrapper.to_standard_module()
    if not wrap_model:
        private.wrapper.cleanup()
    given = {name.removeprefix("_module."): tensor for name, tensor in given.items()}
    torch.func.functional_call(plain, given, (x,)).sum().backward()
    assert all(tensor.grad is not None for tensor in given.values())


@pytest.mark.parametrize("options", [{}, {"unit": None}, {"poisson_sampling": False}], ids=str)
@pytest.mark.parametrize("call", [made, with_epsilon, partial(made, "hooks")])
def test_a_dataset_without_samples_is_refused(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    for drop_last in (True, False):
        loader = DataLoader(data(0), batch_size=4, drop_last=drop_last)
        with raises("FC330", ValueError, match="a dataset without samples"):
            call(data_loader=loader, **options)
    loader = DataLoader(data(3), batch_size=4, drop_last=True)
    options |= {"unit": Users([0, 1, 1])} if "unit" in options else {}
    with raises("FC330", ValueError, match="no batch: 3 samples"):
        call(data_loader=loader, **options)


@pytest.mark.parametrize("before", [0, 3])
def test_steps_beyond_the_plan_are_said_once(before: int) -> None:
    """Two epochs were planned; steps before the plan, or of a checkpoint, count as well."""
    engine, given = FlashPrivacyEngine(accountant="rdp"), arguments()
    del given["noise_multiplier"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that steps are accounted for already
        engine.accountant.history = [(1.0, 0.25, before)][: bool(before)]
        module, optimizer, criterion, loader = engine.make_private_with_epsilon(
            criterion=nn.CrossEntropyLoss(),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=2,
            epsilon_tolerance=0.5,
            **given,
        )

    def epoch() -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for x, y in loader:
                optimizer.zero_grad()
                criterion(module(x), y).backward()
                optimizer.step()
        return [f"{w.message}" for w in found if w.category is PlanExceededWarning]

    assert epoch() == epoch() == []
    if not before:
        assert engine.get_epsilon(1e-3) <= 3
    (message,) = epoch()
    planned = 2 * len(loader) + before
    assert f"found step {planned + 1}; " in message and "target_epsilon=3.0" in message
    assert f"after epochs=2, which end with step {planned}." in message
    assert epoch() == []


@pytest.mark.parametrize("call", [made, with_epsilon])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("module", None),
        ("module", torch.relu),
        ("optimizer", torch.optim.SGD),
        ("data_loader", data()),
        ("data_loader", [1, 2]),
    ],
)
def test_arguments_of_another_kind_are_named(call: Any, name: str, value: Any) -> None:
    with raises("FC319|FC330", ValueError, match=rf"^FC... {name}: found "):
        call(**{name: value})


def test_a_scripted_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 3)))
    for mode in ("one_pass", "one_by_one"):
        with raises("FC116", NotImplementedError, match=r"1 \(Linear"):
            GradSampleModuleFlashClipping(model, mode=mode)


def test_a_criterion_that_is_a_text_is_refused_where_it_is_given() -> None:
    with raises("FC319", ValueError, match=r"criterion: found 'mse'; expected nn\.MSELoss\(\)"):
        FlashPrivacyEngine().make_private(**arguments(criterion="mse"))


def test_members_of_an_optimizer_are_listed() -> None:
    """As debuggers and notebooks do."""
    names = {name for name, _ in inspect.getmembers(Private().optimizer)}
    assert {"step", "param_groups", "noise_multiplier"} <= names


class Padded(nn.Module):
    """Takes a batch that is sparse, or nested, beside one that is neither or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_nested:
            x = torch.nested.to_padded_tensor(x, 0.0).sum(1)
        elif x.layout is not torch.strided:
            x = x.to_dense()
        return self.layer(x if beside is None else x + beside)


ROWS = torch.rand(3, 4)
ODD: dict[str, Callable[[], torch.Tensor]] = {
    "coo": ROWS.to_sparse,
    "csr": ROWS.to_sparse_csr,
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2 + b, 4) for b in range(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.rand(2 + b, 4) for b in range(3)], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
@pytest.mark.parametrize("name", ODD)
def test_inputs_that_are_sparse_or_nested_are_refused(name: str, mode: str, beside: bool) -> None:
    wrapped = GradSampleModuleFlashClipping(Padded(), mode=mode)
    x = ODD[name]()
    line = "to_padded_tensor" if x.is_nested else r"x\.to_dense\(\)"
    with raises("FC206", match=rf"(?s)Padded\): found a .* tensor .*{line}"):
        wrapped(**{"beside": ROWS} if beside else {}, x=x)
