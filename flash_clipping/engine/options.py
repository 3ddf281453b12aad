"""What a wrapped model and ``make_private`` can be told: for type checkers, and checked."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, Required, TypedDict, get_args

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_clipping.capture.units import Offsets
from flash_clipping.engine.accounting import PldAccountant, Process
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.finish.clipping import check_clipping
from flash_clipping.ops.runtime.backend import BACKENDS
from flash_clipping.randomness.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism

Mode = Literal["one_pass", "two_pass"]
Backend = Literal["auto", "triton", "torch"]
Reduction = Literal["mean", "sum"]
#: What clipped sums are left in: fp32, or the parameter's own dtype.
SumDtype = Literal["float32", "parameter"]
#: Whether a wrapped model's calls are replayed as CUDA graphs wherever that is exact.
CudaGraphs = Literal["off", "auto"]
Sampling = Literal["poisson", "fixed_order", "cyclic_poisson"]


class ModelOptions(TypedDict, total=False):
    """What a wrapped model and ``make_private`` both take."""

    batch_first: bool
    loss_reduction: Reduction
    strict: bool
    backend: Backend
    mode: Mode
    folded_modules: Sequence[str]
    sum_dtype: SumDtype
    sample_of: str | Offsets | None


class WrapperOptions(ModelOptions, total=False):
    """Of ``GradSampleModuleFlashClipping`` and ``GradSampleHooksFlashClipping``."""

    force_functorch: bool
    max_grad_norm: float | Sequence[float]
    use_ghost_clipping: bool
    clipping: Literal["flat", "per_layer", "automatic"]


class PrivateOptions(ModelOptions, total=False):
    """Of ``make_private`` and ``make_private_with_epsilon``, in mode ``"flash"``."""

    module: Required[nn.Module]
    optimizer: Required[torch.optim.Optimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: Required[float | Sequence[float]]
    criterion: Callable[..., Any] | None
    poisson_sampling: bool
    clipping: Literal["flat", "per_layer", "automatic", "adaptive"]
    noise_generator: torch.Generator | None
    rand_on_empty: bool
    distributed: bool | None
    units: Sequence[int] | Tensor | None
    max_rows_per_unit: int | None
    sampling: Sampling
    max_batch_size: int | None
    noise: NoiseMechanism | None
    noise_grid: bool
    cuda_graphs: CudaGraphs
    pipeline: Any
    # Of clipping="adaptive".
    target_unclipped_quantile: float
    min_clipbound: float
    max_clipbound: float
    clipbound_learning_rate: float


class EpsilonOptions(PrivateOptions, total=False):
    """Of ``make_private_with_epsilon``: the target, and what the accountants read besides."""

    target_epsilon: Required[float]
    target_delta: Required[float]
    epochs: Required[int]
    epsilon_tolerance: float
    eps_error: float
    delta_error: float
    alphas: Sequence[float]
    poisson: bool


def check_options(
    loss_reduction: str, mode: str, backend: str, sum_dtype: str, clipping: str
) -> None:
    """Raise ``ValueError`` for a value that is unknown."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} is unknown; expected 'mean' or 'sum'.")
    check_one_of("mode", mode, get_args(Mode))
    check_one_of("backend", backend, BACKENDS)
    check_one_of("sum_dtype", sum_dtype, get_args(SumDtype))
    check_clipping(clipping)


def check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; expected one of {', '.join(known)}.")


#: What only ``clipping="adaptive"`` takes.
ADAPTIVE = [field.name for field in fields(AdaptiveBound)]


def check_keywords(given: dict[str, Any], clipping: str, of_epsilon: set[str]) -> None:
    """Raise ``TypeError`` for an argument that nobody would read."""
    known = {*inspect.signature(PrivacyEngine.make_private).parameters, *of_epsilon}
    known |= {*PrivateOptions.__annotations__} - {*ADAPTIVE}
    if clipping == "adaptive":
        known |= {*ADAPTIVE}
    if unknown := [name for name in given if name not in known]:
        listed = ", ".join(sorted(known - {"self", "args", "kwargs"}))
        only = [name for name in unknown if name in ADAPTIVE]
        raise TypeError(
            f"make_private: found {', '.join(unknown)}, which nothing would read. Known with "
            f"clipping={clipping!r} are {listed}."
            + (f" ({', '.join(only)}: with clipping='adaptive'.)" if only else "")
        )


def requested_process(
    accountant: Any,
    *,
    sampling: str,
    noise: NoiseMechanism | None,
    max_batch_size: int | None,
    flash: bool,
    with_units: bool,
    arguments: dict[str, Any],
) -> Process:
    """The process that was asked for, for which the accountant is told to account. ``ValueError``
    if arguments do not go together, or the accountant does not know the process."""
    noise = noise or IndependentNoise()
    if not isinstance(noise, NoiseMechanism):
        raise ValueError(
            f"noise: found {type(noise).__name__}; expected IndependentNoise(), BandedNoise(...) "
            "or OneStepNoise(...) of flash_clipping.randomness.mechanisms."
        )
    if sampling == "poisson" and max_batch_size is None and isinstance(noise, IndependentNoise):
        process = Process()
        if isinstance(accountant, PldAccountant):
            accountant.follow(process)
        return process
    loader = arguments.get("data_loader")
    batches = len(loader) if loader is not None else 0
    cycle = noise.count if isinstance(noise, BandedNoise) else batches
    process = Process(
        sampling=sampling,
        noise=noise,
        samples=len(loader.dataset) if loader is not None else 0,
        max_batch_size=max_batch_size,
        cycle=cycle if sampling == "cyclic_poisson" else batches,
    )
    asked = f"sampling={sampling!r}, noise={type(noise).__name__}, max_batch_size={max_batch_size}"
    module = arguments.get("module")
    refused = [
        (not flash, "another grad_sample_mode than 'flash'", "Only 'flash' serves it"),
        (with_units, "units or sample_of", "It is accounted for samples of the dataset only"),
        (
            arguments.get("clipping") == "adaptive",
            "clipping='adaptive'",
            "The bound, and with it the noise, would move",
        ),
        (
            arguments.get("noise_grid", False) and not isinstance(noise, IndependentNoise),
            "noise_grid=True",
            "What is rounded off would not be taken back",
        ),
        (
            not arguments.get("poisson_sampling", True),
            "poisson_sampling=False",
            "The engine must draw the batches. Leave it at its default",
        ),
        (
            any(hasattr(p, "placements") for p in module.parameters()) if module else False,
            "a model that fully_shard was applied to",
            "Train in one process",
        ),
        (
            not isinstance(accountant, PldAccountant),
            f"accountant={accountant.mechanism()!r}",
            "It knows ordinary Poisson sampling with independent noise only. Use "
            "FlashPrivacyEngine(accountant='pld') (the extra flash-clipping[accounting])",
        ),
    ]
    for found, name, advice in refused:
        if found:
            raise ValueError(f"make_private: found {asked} with {name}. {advice}.")
    accountant.follow(process)
    return process


def planned_noise(accountant: PldAccountant, arguments: dict[str, Any]) -> float:
    """The noise multiplier for the target that ``make_private_with_epsilon`` was given."""
    target = {name: arguments.pop(name) for name in ("target_epsilon", "target_delta")}
    epochs, tolerance = arguments.pop("epochs"), arguments.pop("epsilon_tolerance", 0.01)
    requested_process(
        accountant,
        sampling=arguments.get("sampling", "poisson"),
        noise=arguments.get("noise"),
        max_batch_size=arguments.get("max_batch_size"),
        flash=True,
        with_units=False,  # make_private looks
        arguments=arguments,
    )
    if len(accountant):
        warnings.warn(
            f"make_private_with_epsilon: {len(accountant)} steps are accounted for already; the "
            "noise is for the target without them.",
            stacklevel=4,
        )
    batches = len(arguments["data_loader"])
    return accountant.noise_multiplier(
        **target, sample_rate=1 / batches, steps=int(epochs * batches), epsilon_tolerance=tolerance
    )
