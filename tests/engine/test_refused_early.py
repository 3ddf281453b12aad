"""What is refused or said before a first step."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.utils import register_module_validator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    AdaptiveBound as AdaptiveBound_of_first_messages,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PlanExceededWarning,
    RandomAllocation,
    Users,
    auditing,
    codes,
    planning,
)
from flash_clipping.capture.proxies import UnsupportedUse
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.engine.sampling.loaders import PoissonLoader
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
from flash_clipping.noise.process import FixedShapeSampler
from flash_clipping.noise.report import statistics_report
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


def test_plans_are_by_the_accountant_that_counts() -> None:
    """By Opacus' PRV accountant ε is 705 at the first noise, and no noise has an ε of 1000."""
    assert planning.plan(100, 1, steps=1, noise_multiplier=0.01, delta=1e-5).epsilon > 5000
    assert 990 < planning.plan(100, 1, steps=1, epsilon=1000.0, delta=1e-5).epsilon <= 1000


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
    "norm without weights": (
        lambda: Norms(nn.BatchNorm1d(6, affine=False)),
        r"norms\.0 \(BatchNorm1d\)",
        "set_submodule",
    ),
    "LSTM": (recurrent(nn.LSTM), r"inner\.layer \(LSTM\) has no per-sample", "DP"),
    "GRU": (recurrent(nn.GRU), r"inner\.layer \(GRU\) has no per-sample", "DP"),
    "RNN": (recurrent(nn.RNN), r"inner\.layer \(RNN\) has no per-sample", "DPRNN"),
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


@pytest.mark.parametrize("clipping", ["flat", "automatic", AdaptiveBound_of_first_messages()])
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


@pytest.mark.parametrize("clipping", ["flat", AdaptiveBound_of_first_messages(0.5, 0.01, 10.0)])
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


D = 6


class Around(nn.Module):
    """What is refused, between a layer and a head that are not."""

    def __init__(self, middle: nn.Module, ids: bool = False):
        super().__init__()
        self.ids = ids
        self.first, self.middle, self.head = nn.Linear(D, D), middle, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(x.long()) if self.ids else self.middle(self.first(x))
        if isinstance(h, tuple):
            h = h[0]
        if h.is_complex():
            h = h.real
        return self.head(h.flatten(1)[:, :D])


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (16 * x).round() / 16


class Scales(nn.Module):
    """A parameter of its own, used in a way that ``use`` says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self.use, self.gain = use, nn.Parameter(torch.ones(D, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.gain)


class Chosen(nn.Module):
    """Experts that get the rows of any samples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.self_attn = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn(x)
        first = (999 * x.flatten(0, 1)[:, 0]).sin() > 0
        out = torch.zeros_like(x).flatten(0, 1)
        out[first] = self.experts[0](x.flatten(0, 1)[first])
        out[~first] = self.experts[1](x.flatten(0, 1)[~first])
        return out.view_as(x)


class Keeps(nn.Module):
    """A buffer that holds something of the samples, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return x


def rounded_mixture() -> nn.Module:
    mixture = RoutedExperts(TopKRouter(D, 4, 2), MixtureOfExperts(D, 5, 4))
    nn.utils.parametrize.register_parametrization(mixture.experts, "down", Rounds())
    return mixture


def by_frequencies(x: Tensor, gain: Tensor) -> Tensor:
    ids = torch.zeros(x.shape[:2], dtype=torch.long)
    return x + F.embedding(ids, gain[None], scale_grad_by_freq=True)


REFUSED_OF_PASTED_LINES: dict[str, Callable[[], nn.Module]] = {
    "scale_grad_by_freq": lambda: Around(nn.Embedding(9, D, scale_grad_by_freq=True), ids=True),
    "bag": lambda: Around(nn.EmbeddingBag(9, D, mode="max"), ids=True),
    "max_norm": lambda: Around(nn.Embedding(9, D, max_norm=1.0), ids=True),
    "instance norm": lambda: Around(nn.InstanceNorm1d(5, affine=True, track_running_stats=True)),
    "batch norm": lambda: Around(nn.BatchNorm1d(5)),
    "spectral norm": lambda: Around(nn.utils.spectral_norm(nn.Linear(D, D))),
    "complex": lambda: Around(Scales(torch.mul, torch.complex64)),
    "lazy": lambda: Around(nn.LazyLinear(D)),
    "recurrent": lambda: Around(nn.LSTM(D, D, batch_first=True)),
    "frequencies": lambda: Around(Scales(by_frequencies)),
    "experts": lambda: Around(Chosen()),
    "buffer": lambda: Around(Keeps()),
    "computed base": lambda: Around(rounded_mixture()),
}


def code_in(message: str) -> list[str]:
    """The code in a message, part by part: lines that stand together."""
    parts = re.findall(r"(?:^    .*(?:\n|$))+", message, re.MULTILINE)
    return [textwrap.dedent(part) for part in parts]


def step(model: nn.Module, x: Tensor, **options: Any) -> Any:
    flash = GradSampleModuleFlashClipping(model, **options)
    flash(x).square().sum(1).mean().backward()
    return flash.get_norm_sample()


#: Refusals that nothing serves but a mode: the last line keeps what is trained.
KEPT = {"frequencies", "experts", "complex", "bag", "computed base"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED_OF_PASTED_LINES)
def test_with_the_line_it_says_the_model_trains(name: str) -> None:
    torch.manual_seed(0)
    model = REFUSED_OF_PASTED_LINES[name]()
    x = torch.rand(4, 5, D)
    if "ids" in vars(model) and model.ids:
        x = torch.randint(0, 9, (4, 5)).float()
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as error:
        step(model, x)
    *said, line = str(error.value).splitlines()
    assert line.startswith("    ") and said, str(error.value)
    if name == "experts":
        assert "folded_modules" not in str(error.value)
    assert (line.strip() == 'mode="one_by_one"') == (name in KEPT), line
    is_wrapped = hasattr(model, "autograd_grad_sample_hooks")
    for code in code_in(str(error.value)):
        if is_wrapped:
            model = REFUSED_OF_PASTED_LINES[name]()
        names: dict[str, Any] = {"model": copy.deepcopy(model), "torch": torch, "x": x}
        exec(code, names)
        options = {"mode": names["mode"]} if "mode" in names else {}
        norms = step(names["model"], x, **options)
        assert norms.shape == (4,) and norms.isfinite().all()


def test_an_unsupported_use_offers_the_exact_mode() -> None:
    tap: Any = SimpleNamespace(path="middle (Scales)")
    assert code_in(str(UnsupportedUse(tap, "by hand"))) == ['mode="one_by_one"']
