"""Arguments of wrapped models and of ``make_private``: for type checkers, and checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict, get_args

import torch
from opacus.accountants import IAccountant
from torch import distributed as dist, nn
from torch.utils.data import DataLoader

from flash_clipping.engine import wings
from flash_clipping.engine.accounting import Mechanism, least_noise
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.engine.sampling.units import Documents, Users
from flash_clipping.errors import InvalidType, InvalidValue, check_one_of, checked_number, warn
from flash_clipping.finish.clipping import Clipping

Mode = Literal["one_pass", "two_pass", "one_by_one"]
Backend = Literal["auto", "triton", "torch"]
Reduction = Literal["mean", "sum"]
No = Literal[False]


@dataclass(frozen=True)
class Kernels:
    """Choose what computes. It changes the speed of steps, and no guarantee.

    Args:
        backend: ``"triton"``, ``"torch"``, or what is faster (``"auto"``), which the environment
            variable ``FLASH_CLIPPING_BACKEND`` overrides.
        cuda_graphs: ``"auto"``: on a GPU, the model's forward and backward are replayed as CUDA
            graphs wherever that gives the same and takes less time, after three steps with batches
            of one shape. One line of log says why not (:mod:`flash_clipping.graphs.graphed_model`).
            Memory of a step is kept. ``None``: ``"auto"`` in ``PrivateTrainer`` with one process.
    """

    backend: Backend = "auto"
    cuda_graphs: Literal["off", "auto"] | None = None

    def __post_init__(self) -> None:
        check_one_of("backend", self.backend, get_args(Backend))
        check_one_of("cuda_graphs", self.cuda_graphs or "off", ("off", "auto"))


@dataclass(frozen=True)
class Pipeline:
    """``distributed`` of a module that is one stage of a pipeline: the processes of all stages call
    ``make_private``, with the same dataset (:class:`~flash_clipping.PrivateSchedule` runs them).

    Args:
        group: the stages' processes; ``None``: all.
    """

    group: dist.ProcessGroup | None = None


class ModelOptions(TypedDict, total=False):
    """Arguments that a wrapped model and ``make_private`` both take."""

    batch_first: bool
    loss_reduction: Reduction
    strict: bool
    mode: Mode
    folded_modules: Sequence[str]


class WrapperOptions(ModelOptions, total=False):
    """Arguments of ``GradSampleModuleFlashClipping`` and ``GradSampleHooksFlashClipping``."""

    kernels: Kernels | None
    unit: Documents | None
    force_functorch: bool
    use_ghost_clipping: bool
    max_grad_norm: float | Sequence[float]
    clipping: Clipping


class PrivateOptions(ModelOptions, total=False):
    """Arguments of ``make_private`` and ``make_private_with_epsilon``, beside those on which the
    types of results depend (``criterion``, ``wrap_model``, ``grad_sample_mode``)."""

    module: Required[nn.Module]
    optimizer: Required[torch.optim.Optimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: Required[float | Sequence[float]]
    poisson_sampling: bool
    clipping: Clipping | AdaptiveBound
    distributed: No | Pipeline | None
    unit: Users | Documents | None
    mechanism: Mechanism | None
    kernels: Kernels | None


class NoiseOptions(PrivateOptions, total=False):
    """Arguments of ``make_private``."""

    noise_multiplier: Required[float]


class EpsilonOptions(PrivateOptions, total=False):
    """Arguments of ``make_private_with_epsilon``: the target, and those of the accountants."""

    target_epsilon: Required[float]
    target_delta: Required[float]
    epochs: Required[int]
    epsilon_tolerance: float
    eps_error: float
    delta_error: float
    alphas: Sequence[float]
    poisson: bool


#: What arguments may be beside ``None``, and a value to paste; those of a wrapper differ.
_KINDS: dict[str, tuple[Any, str]] = {
    "clipping": (str | AdaptiveBound, "AdaptiveBound()"),
    "mechanism": (Mechanism, "PoissonSampling()"),
    "unit": (Users | Documents, "Users(ids)"),
    "distributed": (bool | Pipeline, "Pipeline()"),
    "kernels": (Kernels, "Kernels()"),
}
_KINDS_OF_WRAPPER: dict[str, tuple[Any, str]] = {
    "clipping": (str, '"flat"'),
    "unit": (Documents, 'Documents("an argument of forward")'),
    "kernels": _KINDS["kernels"],
}


def check_options(given: dict[str, Any], wrapper: bool = False) -> None:
    """Raise for values of arguments of ``make_private``, or of a wrapper, that are none of those
    that they take, or that other arguments rule out."""
    mode_of_opacus = given.get("grad_sample_mode", "flash") != "flash"
    for name, (kind, line) in (_KINDS_OF_WRAPPER if wrapper else _KINDS).items():
        if not isinstance(value := given.get(name), kind | None):
            found = type(value).__name__
            raise InvalidType(f"FC319 {name}: found {found}; use:\n    {name}={line}")
        if mode_of_opacus and not isinstance(value, str | None):
            raise InvalidValue(f"FC313 {name}: found with another grad_sample_mode than 'flash'.")
    words = {"mode": Mode, "loss_reduction": Reduction}
    words |= {} if isinstance(given.get("clipping"), AdaptiveBound) else {"clipping": Clipping}
    for name in () if mode_of_opacus else words.keys() & given.keys():
        check_one_of(name, given[name], get_args(words[name]))
    if isinstance(given.get("unit"), Users) and not given.get("poisson_sampling", True):
        raise InvalidValue("FC281 unit: found Users with poisson_sampling=False, which draws rows.")


#: Arguments of Opacus that there are not; what to write instead.
_INSTEAD = {
    "noise_generator": "noise has a key of its own; for tests: FlashPrivacyEngine(seed=...)",
    "rand_on_empty": "leave it out: a made-up sample would move the sum by up to 2 C",
}


def check_keywords(given: dict[str, Any], mode: str = "flash") -> None:
    """Raise ``TypeError`` for an argument that nobody would read."""
    known = [*NoiseOptions.__annotations__, "criterion", "grad_sample_mode", "wrap_model"]
    for name in given if mode == "flash" else ():  # Opacus' modes are given all
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        advice = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(sorted(known))}."
        if instead := _INSTEAD.get(name):
            advice = f"In its place: {instead}."
        raise InvalidType(f"FC310 make_private: found {name}, which nothing would read. {advice}")


def check_target(epsilon: Any, delta: Any, epochs: Any, options: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a target that noise is not looked for, or would be for ever."""
    checked_number("target_epsilon", epsilon, "(0, inf)", example=3.0)
    checked_number("target_delta", delta, "(0, 0.5)", example=1e-5)
    checked_number("epochs", epochs, "(0, inf)", example=1)
    tolerance = options.get("epsilon_tolerance", 0.01)
    checked_number("epsilon_tolerance", tolerance, "(0, inf)", example=0.01)
    batches = len(options["data_loader"])
    if steps_of(epochs, batches) < 1:
        raise InvalidValue(
            f"FC302 epochs: found {epochs} of {batches} batches; expected one step at least:\n"
            "    epochs=1"
        )


def steps_of(epochs: float, batches: int) -> int:
    """Whole steps of so many epochs. Opacus divides by the rate, and finds 224 steps in 3 epochs of
    75 batches, and so too little noise: what a float is off by takes no step away."""
    return int(round(epochs * batches, 6))


def planned_noise(accountant: IAccountant, given: dict[str, Any], target: dict[str, Any]) -> float:
    """The noise multiplier for a target of ``make_private_with_epsilon``, by its names; takes what
    accountants read out of ``given``."""
    if len(accountant):
        warn(
            f"FC567 make_private_with_epsilon: {len(accountant)} steps are accounted for already; "
            "the noise is for the target without them.",
            stacklevel=3,
        )
    functions = least_noise, accountant.get_epsilon
    known = {name for function in functions for name in inspect.signature(function).parameters}
    known -= {"delta", "steps", "sample_rate", "accountant", "options"}
    options = {name: given.pop(name) for name in known & given.keys()}
    options |= {name: target[name] for name in ("target_epsilon", "target_delta")}
    check_options(given)
    wings.requested_process(accountant, given)
    batches = len(given["data_loader"])
    steps = steps_of(target["epochs"], batches)
    return least_noise(accountant, sample_rate=1 / batches, steps=steps, **options)
