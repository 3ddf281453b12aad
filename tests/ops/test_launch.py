from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_clipping.ops.outer import weighted_sum

launching = pytest.importorskip("flash_clipping.ops.runtime.tiles")


def allocator() -> Any:
    """Whom kernels of this context ask for memory."""
    return pytest.importorskip("triton.runtime._allocation")._allocator.get()


class Kernel:
    """What a function of ``triton.jit`` is to its callers; counts how often it is looked for."""

    arg_names = ("x_ptr", "y_ptr", "n", "EACH", "WIDE")

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.looked_for = 0
        self.launches: list[tuple[Any, ...]] = []
        self.allocators: list[Any] = []  # at each launch

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.allocators.append(allocator())

        def find(*args: Any, EACH: int, WIDE: bool, num_warps: int) -> Any:
            self.looked_for += 1
            self.launches.append((*grid, *args, EACH, WIDE))
            return None if self.interpreted else Compiled(self.launches, self.allocators)

        return find


class Compiled:
    def __init__(self, launches: list[tuple[Any, ...]], allocators: list[Any]) -> None:
        self.launches, self.allocators = launches, allocators

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid[1:] == (1, 1)
        self.allocators.append(allocator())
        return lambda *args: self.launches.append((grid[0], *args))


class OnAnotherDevice(torch.Tensor):
    def get_device(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def remembering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launching, "_CompiledKernel", Compiled)
    monkeypatch.setattr(launching, "_remembers", True)
    monkeypatch.setattr(launching, "_found", {})
    yield


def launch(kernel: Kernel, programs: int = 3, **changed: Any) -> None:
    usual: dict[str, Any] = dict(
        x=torch.zeros(8), y=None, n=8, WIDE=True, EACH=4, num_warps=4, workspace=False
    )
    given = usual | changed
    args = [given.pop(name) for name in ("x", "y", "n")]
    launching.launch(kernel, programs, *args, **given)


def test_a_kernel_is_compiled_once_for_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would compile it anew for every multiple of 16, and for 1."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(launching.triton, "jit", lambda function, **options: given.update(options))

    def kernel(x_ptr: Any, y_ptr: Any, n: int, width: int, BLOCK: tl.constexpr) -> None:  # noqa: F821
        raise AssertionError

    launching.jit(kernel)
    assert given == {"do_not_specialize": ["n", "width"]}


def test_a_kernel_is_looked_for_once() -> None:
    kernel = Kernel()
    first, second = torch.zeros(8), torch.ones(8)
    launch(kernel, x=first)
    launch(kernel, programs=5, x=second)
    assert kernel.looked_for == 1
    # Constants in the kernel's order, whatever the caller's.
    assert kernel.launches[0][2:] == kernel.launches[1][2:] == (None, 8, 4, True)
    assert kernel.launches[0][:2] == (3, first) and kernel.launches[1][:2] == (5, second.data_ptr())


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"x": torch.zeros(8, dtype=torch.float64)},
    "address": {"x": torch.zeros(9)[1:]},
    "device": {"x": torch.zeros(8).as_subclass(OnAnotherDevice)},
    "tensor": {"y": torch.zeros(8)},
    "its device": {"y": torch.zeros(8).as_subclass(OnAnotherDevice)},
    "number": {"n": 9},
    "constant": {"EACH": 2},
    "flag": {"WIDE": False},
    "warps": {"num_warps": 8},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_launches_of_another_kernel_are_kept_apart(changed: dict[str, Any]) -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(kernel)
        launch(kernel, **changed)
    assert kernel.looked_for == 2


def test_a_kernel_that_wants_a_workspace_leaves_the_allocator_alone() -> None:
    before, kernel = allocator(), Kernel()
    for _ in range(2):  # the second time one that was found
        launch(kernel, workspace=True)
        assert kernel.allocators[-1] is not before and allocator() is before
    launch(kernel)
    assert kernel.allocators[-1] is before and kernel.looked_for == 1


@pytest.mark.gpu
def test_operands_that_lie_elsewhere_than_those_before() -> None:
    """A kernel for addresses on 16 bytes must not be started on others."""
    for shift in (0, 1, 2, 8, 0):
        grads = torch.randn(3, 40, device="cuda").bfloat16()
        room = torch.rand(16, device="cuda")
        coef_B = room[shift : shift + 3]
        found = weighted_sum(grads, coef_B, backend="triton")
        expected = (coef_B.double()[:, None] * grads.double()).sum(0)
        assert (found.double() - expected).abs().max() <= 1e-2 * expected.abs().max()
