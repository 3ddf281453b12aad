"""What a wrapped model and ``make_private`` can be told: for type checkers, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_clipping.capture.units import Offsets
from flash_clipping.finish.clipping import check_clipping
from flash_clipping.ops.runtime.backend import BACKENDS
from flash_clipping.randomness.mechanisms import NoiseMechanism

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
    """Of ``make_private_with_epsilon``: what the accountants read besides."""

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
