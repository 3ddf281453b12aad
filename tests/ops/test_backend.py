from __future__ import annotations

import contextvars
import time
import warnings
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import torch

from flash_clipping.diagnostics import environment
from flash_clipping.ops.rows import row_scale
from flash_clipping.ops.runtime import backend
from flash_clipping.ops.runtime.backend import TritonFallbackWarning, resolve
from tests.support.errors import raises, warns


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_broken", set())
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    yield


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with raises("FC721", ValueError, match="cpu."):
        resolve("triton", torch.ones(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", torch.ones(1)) == "triton"


def test_environment_overrides_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    assert resolve("auto", torch.ones(1)) == "triton"
    assert resolve("torch", torch.ones(1)) == "torch"
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "cuda")
    with raises(
        "FC301", ValueError, match="FLASH_CLIPPING_BACKEND is 'cuda'; expected one of auto"
    ):
        resolve("auto", torch.ones(1))


def test_unknown_backend_is_refused() -> None:
    with raises("FC301", ValueError, match="backend is 'cuda'"):
        resolve("cuda", torch.ones(1))


def test_missing_triton_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_import_error", lambda: "ImportError: No module named 'triton'")
    assert not backend.is_triton_available()
    x, coef = torch.randn(2, 3), torch.tensor([0.5, 2.0])
    with warns("FC720", TritonFallbackWarning, match="row_scale.*No module named 'triton'"):
        scaled = row_scale(x, coef, backend="triton")
    assert torch.equal(scaled, x * coef.unsqueeze(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row_scale(x, coef, backend="triton")


def test_a_kernel_that_fails_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the variable is set: it decides how the module's kernels are made.
    kernels = pytest.importorskip("flash_clipping.ops.rows.triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def broken(*args: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(kernels, "row_scale", broken)
    with warns("FC720", TritonFallbackWarning, match="PassManager"):
        row_scale(torch.randn(2, 3), torch.ones(2), backend="triton")


def test_out_of_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the variable is set: it decides how the module's kernels are made.
    kernels = pytest.importorskip("flash_clipping.ops.rows.triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "row_scale", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        row_scale(torch.randn(2, 3), torch.ones(2), backend="triton")


def test_references_ignore_autocast_and_low_matmul_precision() -> None:
    x = torch.randn(64, 64)
    exact = x @ x
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = backend.run(_product, "torch", x, x)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(product, exact)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_references_ignore_the_newer_settings_of_precision(precision: str) -> None:
    """Once they are used, PyTorch refuses to tell the older ones."""
    _, on_cpu = backend.matmul_settings()
    x = torch.randn(64, 64)
    exact = x @ x
    before = on_cpu.fp32_precision
    on_cpu.fp32_precision = precision
    try:
        product = backend.run(_product, "torch", x, x)
        assert on_cpu.fp32_precision == precision
        assert environment()["settings"]["fp32_matmuls"]["cpu"] == precision
    finally:
        on_cpu.fp32_precision = before
    assert torch.equal(product, exact)


def _product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


class Mode:
    """What Triton's mode of compilation by an executor is to its callers."""

    def __init__(self, executor: futures.Executor, *, ignore_errors: bool) -> None:
        self.executor, self.raw_futures = executor, []  # type: ignore[var-annotated]


class Compiles:
    """A kernel that is never started."""

    arg_names = ("x_ptr", "coef_ptr", "out_ptr", "size", "BLOCK")

    def __init__(self, mode: contextvars.ContextVar[Any]) -> None:
        self.mode, self.done = mode, 0
        self.takes = 0.0

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> None:
        mode = self.mode.get()
        mode.raw_futures.append(mode.executor.submit(self.compile))

    def compile(self) -> None:
        time.sleep(self.takes)
        self.done += 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Compiles:
    """That of ``row_scale``, in a process where kernels are compiled."""
    kernels = pytest.importorskip("flash_clipping.ops.rows.triton")
    mode: contextvars.ContextVar[Any] = contextvars.ContextVar("mode", default=None)
    found = Compiles(mode)
    monkeypatch.setattr(kernels, "_row_scale_kernel", found)
    monkeypatch.setattr(backend, "_resolved", lambda *_: "triton")
    monkeypatch.setattr(backend, "is_interpreting", lambda: False)
    monkeypatch.setattr(backend, "is_triton_available", lambda: True)
    monkeypatch.setattr(backend, "compilation_by_executor", lambda: (Mode, mode))
    return found


def test_references_work_while_kernels_are_compiled(
    kernel: Compiles, caplog: pytest.LogCaptureFixture
) -> None:
    x, coef = torch.randn(2, 3), torch.tensor([0.5, 2.0])
    with backend.compiled_side_by_side():
        scaled = row_scale(x, coef)
        # Autograd has threads of its own.
        with futures.ThreadPoolExecutor(1) as thread:
            again = thread.submit(row_scale, x, coef).result()
    assert torch.equal(scaled, x * coef.unsqueeze(1)) and torch.equal(again, scaled)
    assert kernel.done == 2 and kernel.mode.get() is None and backend.compilation is None
    assert not caplog.records


def test_a_kernel_that_nobody_can_ask_for_falls_back(kernel: Compiles) -> None:
    del kernel.mode  # an error of Python's where the kernel is asked for
    x, coef = torch.randn(2, 3), torch.tensor([0.5, 2.0])
    with backend.compiled_side_by_side(), warns("FC720", TritonFallbackWarning, match="mode"):
        assert torch.equal(row_scale(x, coef), x * coef.unsqueeze(1))
    assert backend.compilation is None
