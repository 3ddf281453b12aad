"""Clocks and peak memory: the same calls on CUDA and on a CPU.

Time. On CUDA, events around the steps of one turn; on a CPU, the host's monotonic clock, or, where
asked for, this process's own CPU time: with one thread that is what a machine shared with other
work leaves comparable.

Memory. The peak is counted from the bytes that PyTorch's allocator has handed out and not got
back, from the moment a method begins to exist: its parameters, optimizer state, activations,
gradients and temporaries, and nothing of the methods beside it.

* CUDA: ``torch.cuda.max_memory_allocated`` less what was allocated before the method was built.
* CPU: ``torch.profiler``'s memory events, which report every allocation and release of PyTorch's
  CPU allocator, including temporaries inside operators that a dispatch mode cannot see. Summed in
  order from the method's construction on, their maximum during the measured step is the peak.
  What oneDNN and the BLAS library take from the system themselves is not seen. The profiler slows
  a step down, so a step is never timed while its memory is measured.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "benchmarks: the measured step"

# Without this the CPU profiler announces each start and stop on stderr (PyTorch 2.13).
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


Clock = Literal["wall", "cpu"]


def milliseconds(device: torch.device, run: Callable[[], None], clock: Clock = "wall") -> float:
    """Time of one call of ``run``, work queued on the device included."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    now = time.perf_counter if clock == "wall" else time.process_time
    begin = now()
    run()
    return (now() - begin) * 1e3


def host_milliseconds(device: torch.device, run: Callable[[], None]) -> float | None:
    """Time until ``run`` has launched all its work on a device that had nothing to do: the median
    of three calls, or of one that takes longer than a second. None on a CPU, where the host does
    the work itself."""
    if device.type != "cuda":
        return None
    found = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        found.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize(device)
        if time.perf_counter() - begin > 1:
            return found[-1]
    return sorted(found)[1]


def settle(device: torch.device) -> None:
    """Release what nothing refers to, and wait for the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class PeakMemory:
    """Peak bytes of what is built and run inside ``with``.

    Example:
        with PeakMemory(device) as memory:
            model = build()
            with memory.measured():
                step(model)
        print(memory.peak)

    Attributes:
        peak: most bytes held at once while ``measured()`` was open, counted from the start of the
            ``with`` block. Set when that block ends.
    """

    peak: int

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def __enter__(self) -> PeakMemory:
        settle(self._device)
        if self._cuda:
            # cuBLAS takes its workspaces, one for each of autograd's threads, at its first call;
            # here, so that they are not counted against whichever method comes first.
            square = torch.ones(8, 8, device=self._device, requires_grad=True)
            (square @ square).sum().backward()
            del square
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    @contextmanager
    def measured(self) -> Iterator[None]:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            with record_function(_MARK):
                yield

    def __exit__(self, *exception: object) -> None:
        if self._cuda:
            return
        self._profile.__exit__(*exception)
        if exception[0] is None:
            self.peak = _peak_of_events(self._profile)


def _peak_of_events(profiled: profile) -> int:
    """Maximum of the running sum of allocations, from the mark on."""
    profiler = profiled.profiler
    assert profiler is not None and profiler.kineto_results is not None
    begin = 0
    changes: list[tuple[int, int]] = []
    events: list[Any] = profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name() == _MARK:
            begin = event.start_ns()
    held = peak = 0
    for when, nbytes in sorted(changes, key=lambda change: change[0]):
        if when >= begin:
            peak = max(peak, held)  # what was held when the step began
        held += nbytes
        if when >= begin:
            peak = max(peak, held)
    return peak
