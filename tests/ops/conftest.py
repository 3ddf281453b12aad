"""What every test of an operation refuses: a kernel that falls back to its reference, and a false
hint to the compiler, which the interpreter would pass over."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_clipping.ops.runtime import backend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    strict = pytest.mark.filterwarnings(
        f"error::{backend.__name__}.{backend.TritonFallbackWarning.__name__}"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(strict)


@pytest.fixture(autouse=True)
def variables_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests change them; the library reads them once."""
    monkeypatch.setattr(backend, "_resolved", backend._resolved.__wrapped__)


@pytest.fixture(autouse=True, scope="package")
def hints_are_true() -> Iterator[None]:
    """On a GPU, a number that is no multiple of what ``tl.multiple_of`` says makes masks wrong."""
    if not (backend.is_interpreting() and backend.is_triton_available()):
        yield
        return
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    set_attr = handle.set_attr

    def checked(self: Any, key: str, value: Any) -> None:
        if key == "tt.divisibility" and self.data.size == 1:
            number, (divisor,) = int(self.data.item()), value
            assert number % divisor == 0, f"{number} passes for a multiple of {divisor}"
        set_attr(self, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "set_attr", checked)
        yield


@pytest.fixture(autouse=True, scope="package")
def functions_are_just_called() -> Iterator[None]:
    """The interpreter puts its own operations in the language's place when a kernel starts, and
    again at every call of a function within it: for a cipher's rounds that is nearly all the time.
    """
    if not (backend.is_interpreting() and backend.is_triton_available()):
        yield
        return
    function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    as_it_is = function.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("triton."):  # the language's own: has other names for it
            return as_it_is(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "__call__", called)
        yield


@pytest.fixture
def ranks_in_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for operators and little for their size: ids are ranked in wide tiles.

    The order is the same, bit for bit; of the tiles that a GPU gets, it is tested in
    ``test_embedding.py::test_ranks_are_a_stable_sort``.
    """
    if backend.is_interpreting():
        kernels = importlib.import_module("flash_clipping.ops.embedding.triton")
        monkeypatch.setattr(kernels, "RANKED", (32, 256, 1))
