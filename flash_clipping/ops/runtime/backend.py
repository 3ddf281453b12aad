"""Which implementation of an operation runs: the Triton kernel or the PyTorch reference.

This is the only place that starts a Triton implementation, and so the only place that has to know
what to do when there is none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from flash_clipping._compat import compilation_by_executor, constant_in_traces, is_autocasting
from flash_clipping.errors import Coded, InvalidValue

P = ParamSpec("P")
R = TypeVar("R")
Operands = TypeVarTuple("Operands")

BACKENDS = ("auto", "triton", "torch")
ENVIRONMENT_VARIABLE = "FLASH_CLIPPING_BACKEND"
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OLDEST_TRITON = (3, 6)
"""In the interpreters of some before, sums of rows come out as 0, without an error."""

_BACKENDS: Any = torch.backends
_SETTINGS = (  # of fp32 matmuls, convolutions and recurrent layers
    _BACKENDS.cuda.matmul,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.cudnn.conv,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.rnn,
)
_NOT_OURS = torch.OutOfMemoryError, torch.AcceleratorError
"""Errors that the PyTorch path would meet as well, or that leave the device unusable."""


class _Thread(threading.local):
    """What this thread's launches and products are for.

    Attributes:
        precise_on: at the end of a backward pass, the device type on which products are precise
            already.
        only_compiles: whether this thread's launches compile and start nothing. (Another thread's
            start, of an operation that was under way before.)
    """

    def __init__(self) -> None:
        self.precise_on = ""
        self.only_compiles = False


_thread = _Thread()
compilation: Any = None
"""Inside of :func:`compiled_side_by_side`, Triton's mode that compiles by an executor."""

_broken: set[tuple[str, torch.dtype]] = set()
_warned: set[str] = set()
logger = logging.getLogger("flash_clipping")

QUIET = 1.0
"""Seconds of compilation of which nothing is said."""


class TritonFallbackWarning(Coded, UserWarning):
    """A PyTorch implementation ran where a Triton kernel was wanted: right, but slower."""


@functools.cache
def _import_error() -> str | None:
    """Why Triton cannot be imported, or is not used, or None when it can."""
    try:
        version = importlib.import_module("triton").__version__
    except Exception as error:  # a broken installation raises more than ImportError
        return f"{type(error).__name__}: {error}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {version} is older than {oldest}: its results were seen to be wrong"
    return None


def is_interpreting() -> bool:
    """Whether Triton kernels run on the CPU, one operation at a time (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def is_triton_available() -> bool:
    """Whether Triton kernels can run: Triton imports, and a GPU or its interpreter is there."""
    return _import_error() is None and (torch.cuda.is_available() or is_interpreting())


def compiles_kernels() -> bool:
    """Whether kernels are compiled before they run, as they are on a GPU."""
    return is_triton_available() and not is_interpreting()


def resolve(backend: str, tensor: Tensor) -> str:
    """Turn ``backend`` into ``"triton"`` or ``"torch"`` for an operation on ``tensor``.

    ``"auto"`` (which the environment variable ``FLASH_CLIPPING_BACKEND`` overrides, as it is at the
    first operation) means Triton for fp32, bf16 and fp16 on a GPU, and PyTorch elsewhere. float64
    always runs in PyTorch.

    Raises:
        ValueError: an unknown name, or ``"triton"`` for a tensor that no kernel can read.
    """
    return _resolved(backend, tensor.dtype, tensor.device.type)


@functools.cache  # to read the environment takes the host a while
def _resolved(backend: str, dtype: torch.dtype, device: str) -> str:
    source = "backend"
    if backend == "auto":
        source, backend = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise InvalidValue(f"FC301 {source} is {backend!r}; expected one of {', '.join(BACKENDS)}.")
    if backend == "torch" or dtype not in _TRITON_DTYPES:
        return "torch"
    if backend == "triton":
        if device != "cuda" and not is_interpreting():
            raise InvalidValue(
                f"FC721 {source} is 'triton' but the tensor is on {device}. Use 'auto' or "
                "'torch', or set TRITON_INTERPRET=1 before Triton is imported to debug kernels "
                "on the CPU."
            )
        return "triton"
    return "triton" if device == "cuda" else "torch"


def run(
    reference: Callable[P, R], backend: str, tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run ``reference``, or the function of the same name and signature in ``triton.py`` beside it.

    ``tensor`` decides the device and the dtype. When Triton is missing or a kernel fails to
    compile or launch, the reference takes over and one warning per operation says why. Running
    out of memory, and errors of the device itself, are never hidden.
    """
    name = reference.__name__
    device = tensor.device.type
    if _resolved(backend, tensor.dtype, device) == "torch" or tensor.numel() == 0:
        if device == _thread.precise_on:
            return reference(*args, **kwargs)
        return _run_reference(reference, tensor, args, kwargs)
    if _broken and (name, tensor.dtype) in _broken:
        return _run_reference(reference, tensor, args, kwargs)
    reason, failure = _import_error(), None
    if reason is None:
        try:
            kernel: Callable[P, R] = getattr(_kernels_beside(reference.__module__), name)
            if compilation is not None:
                before, _thread.only_compiles = _thread.only_compiles, True
                try:
                    with torch.no_grad(), torch.cuda.device_of(tensor):
                        kernel(*args, **kwargs)  # what it returns was never written
                finally:
                    _thread.only_compiles = before
                return _run_reference(reference, tensor, args, kwargs)
            # Triton launches on the current device; that need not be where the tensor is.
            elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
            if torch.is_grad_enabled() or elsewhere:
                with torch.no_grad(), torch.cuda.device_of(tensor):
                    return kernel(*args, **kwargs)
            return kernel(*args, **kwargs)  # as in every step: context managers take a while
        except _NOT_OURS:
            raise
        except Exception as error:
            reason, failure = f"{type(error).__name__}: {error}", error
    _warn_once(name, reason, failure)
    _broken.add((name, tensor.dtype))
    return _run_reference(reference, tensor, args, kwargs)


def runs_kernels(backend: str, tensor: Tensor, *names: str) -> bool:
    """Whether :func:`run` takes the kernels of these names for such a tensor."""
    if resolve(backend, tensor) == "torch" or _import_error() is not None:
        return False
    return not any((name, tensor.dtype) in _broken for name in names)


@contextlib.contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Inside, the kernels that operations want are compiled side by side, in threads, while
    references do the operations' work. At the end all are there: a model that meets its kernels in
    launches waits for one after the other. A kernel that does not compile is met again where it is
    launched. Without Triton, in its interpreter, and in versions of Triton that cannot do it,
    nothing is other than outside.
    """
    global compilation
    way = compilation_by_executor() if compiles_kernels() else None
    if way is None or compilation is not None:
        yield
        return
    with futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        mode = compilation = way[0](threads, ignore_errors=True)
        try:
            yield
        finally:
            compilation = None
            jobs = [*mode.raw_futures]
            if futures.wait(jobs, QUIET).not_done:
                logger.warning(
                    "flash_clipping: compiling %d kernels for this model, which takes some "
                    "seconds; Triton keeps them for the next time.",
                    len(jobs),
                )


def only_compiles() -> bool:
    """Whether a launch of this thread is for :func:`hand_over`."""
    return _thread.only_compiles


def compile_ahead(work: Callable[[], object]) -> None:
    """Let a thread compile each kernel that this would launch; launch none, and fail no step."""
    if not compiles_kernels():
        return
    before, _thread.only_compiles = _thread.only_compiles, True
    try:
        with contextlib.suppress(Exception):
            work()
    finally:
        _thread.only_compiles = before


def hand_over(compile: Callable[[], object]) -> None:
    """Let threads compile the kernel that this asks Triton for."""
    way = compilation_by_executor()
    if way is None or compilation is None:
        device = torch.cuda.current_device()

        def beside() -> None:
            with contextlib.suppress(Exception), torch.cuda.device(device):
                compile()

        threading.Thread(target=beside, daemon=True).start()
        return
    before = way[1].set(compilation)  # of this thread: autograd has its own
    try:
        compile()
    finally:
        way[1].reset(before)


@functools.cache
def _kernels_beside(module: str) -> ModuleType:
    package, _, _ = module.rpartition(".")
    return importlib.import_module(f"{package}.triton")


def _run_reference(
    reference: Callable[..., R], tensor: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> R:
    with torch.no_grad(), full_precision(tensor.device):
        return reference(*args, **kwargs)


def _warn_once(name: str, reason: str, error: Exception | None) -> None:
    if name in _warned:
        return
    summary = reason if len(reason) <= 500 else reason[:500] + " ..."
    message = (
        f"FC720 flash_clipping: {name} falls back to PyTorch (right, but slower), because its "
        f"Triton kernel cannot run here: {summary}"
    )
    try:
        warnings.warn(message, TritonFallbackWarning, stacklevel=4)
    except TritonFallbackWarning as raised:  # warnings turned into errors: keep the cause
        raise raised from error
    _warned.add(name)


def is_always_precise(tensor: Tensor) -> bool:
    """Whether products of operands of this dtype, there, need no :func:`full_precision` now: no
    setting of fp32 is for those of 16 bits, and no autocast is on that would cast them."""
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    return is_half and (tensor.is_cuda or tensor.is_cpu) and not is_autocasting()


def convolves_in_tf32(tensor: Tensor) -> bool:
    """Whether PyTorch may convolve it in TF32 now: by default numbers of fp32 on GPUs by NVIDIA."""
    is_single = tensor.is_cuda and tensor.dtype == torch.float32 and torch.version.hip is None
    return is_single and _cudnn_takes_tf32()


@constant_in_traces
def _cudnn_takes_tf32() -> bool:
    return bool(_BACKENDS.cudnn.conv.fp32_precision == "tf32")


@contextlib.contextmanager
def full_precision(device: torch.device, ends_step: bool = False) -> Iterator[None]:
    """Products and convolutions of fp32 operands in fp32, whatever the caller allows for its own.

    Autocast would round the operands to bf16, and ``torch.set_float32_matmul_precision("high")``
    to TF32: norms would be off by 1e-3, and with them the guarantee.

    ``ends_step``: around the end of a backward pass, which runs without autograd. Its operations on
    devices of this type do not enter it again.
    """
    with contextlib.ExitStack() as stack:
        if ends_step:
            outside, _thread.precise_on = _thread.precise_on, device.type
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(without_tf32())
        try:
            yield
        finally:
            if ends_step:
                _thread.precise_on = outside


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Products and convolutions of fp32 operands in fp32, but for autocast.

    By ``torch.backends.cuda.matmul.fp32_precision`` and the like: the older settings say what these
    say, but not the other way round.
    """
    rounded: list[Any] = []
    with contextlib.ExitStack() as stack:  # which restores all of them, wherever it is interrupted
        for setting in _SETTINGS:  # read before any is set: some of them follow others
            wanted = setting.fp32_precision
            if wanted not in ("none", "ieee"):
                rounded.append(setting)
                stack.callback(setattr, setting, "fp32_precision", wanted)
        for setting in rounded:
            setting.fp32_precision = "ieee"
        yield


def matmul_settings() -> tuple[Any, Any]:
    """How PyTorch computes fp32 matmuls on a GPU and on a CPU: what has an ``fp32_precision``."""
    return _SETTINGS[0], _SETTINGS[1]


def autocast_operands(x: Tensor, *others: *Operands) -> tuple[Tensor, *Operands]:
    """Cast as autocast would cast the operands of a matmul or convolution, for whoever multiplies
    and saves them: the norm is then that of what the backward pass really computes."""
    operands: tuple[Any, ...] = (x, *others)
    if not is_autocasting() or not torch.is_autocast_enabled(x.device.type):
        return operands
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        tensor
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64
        else tensor.to(dtype)
        for tensor in operands
    )
