"""Whether replays are worth it: by the device's clock, and by the memory that they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from statistics import median

import torch

logger = logging.getLogger("flash_clipping")

#: So many replays are timed before replays are compared with calls that run as they are.
TIMED = 6

#: Replays are kept unless they take more than so many times as long as the fastest call as it is:
#: most calls take longer than that, as they wait for the host.
SLOWER = 1.1

#: A first graph may take so many times the memory of before, and an allocator's blocks besides.
LARGER, BLOCKS = 1.1, 2**27


class _Timed:
    """What lies between two events, and which part of its rows and positions the batch has."""

    def __init__(self, fill: float):
        self.fill = fill
        self.start = torch.cuda.Event(enable_timing=True)
        self.stop = torch.cuda.Event(enable_timing=True)
        self.start.record()
        self.ended = False

    def end(self) -> None:
        self.stop.record()
        self.ended = True

    def milliseconds(self) -> float:
        return float(self.start.elapsed_time(self.stop))


class Choice:
    """Times calls, from the beginning of forward to the end of backward, by the device's events.
    Once enough were timed, says whether replays are faster.

    Attributes:
        fill: which part of the next call's rows and positions a call that is not replayed would
            have: the rest was added to meet a shape that has a graph.
        why_not: why replays are not kept, or "".
    """

    def __init__(self) -> None:
        self.fill, self.why_not = 1.0, ""
        #: By whether they are replays, and by layout; empty once the choice is made.
        self._timed: dict[bool, dict[Hashable, list[_Timed]]] = {False: {}, True: {}}

    @property
    def is_made(self) -> bool:
        """Whether enough calls were timed."""
        return not self._timed

    def begin(self, key: Hashable, replayed: bool, device: torch.device) -> Callable[[], None]:
        """Time a call that begins; call what comes back when its backward has ended."""
        if not self._timed or device.type != "cuda":
            return lambda: None
        timed = _Timed(self.fill)
        self._timed[replayed].setdefault(key, []).append(timed)
        return timed.end

    def keeps_replays(self) -> bool:
        """False once it was seen that calls as they are take less time."""
        if not self._timed:
            return not self.why_not
        replays, calls = self._timed[True], self._timed[False]
        both = [key for key in replays if key in calls]
        pairs = {key: ([*map(_ended, (calls[key], replays[key]))]) for key in both}
        pairs = {key: pair for key, pair in pairs.items() if all(pair)}
        if sum(len(replayed) for _, replayed in pairs.values()) < TIMED:
            return True
        as_it_is = replayed = 0.0
        for eager, graphed in pairs.values():
            fill = median(x.fill for x in graphed)
            as_it_is += len(graphed) * fill * min(x.milliseconds() for x in eager)
            replayed += len(graphed) * median(x.milliseconds() for x in graphed)
        times = f"replays take {replayed:.0f} ms, and as many calls {as_it_is:.0f} ms"
        self._timed.clear()
        if replayed > SLOWER * as_it_is:
            self.why_not = times
            return False
        logger.info("cuda_graphs='auto': %s: calls are replayed", times)
        return True


def _ended(timed: list[_Timed]) -> list[_Timed]:
    return [x for x in timed if x.ended and x.stop.query()]


def memory_held(device: torch.device) -> int:
    """Bytes of the tensors that are on a GPU now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def excess_of_memory(most: int, device: torch.device) -> str:
    """Why a first graph takes too much, or "": the process has held ``most`` bytes before."""
    now = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    more = f"a graph takes {(now - most) / 2**30:.1f} GiB more than a step does"
    return more if now > LARGER * most + BLOCKS else ""
