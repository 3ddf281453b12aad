"""Whether replays are worth it: by the device's clock, and by the memory that they take."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any, TypeAlias

import torch

logger = logging.getLogger("flash_clipping")

#: So many replays are timed before replays are compared with calls that run as they are.
TIMED = 6

#: Replays are kept unless they take more than so many times as long as the fastest call as it is:
#: most calls take longer than that, as they wait for the host.
SLOWER = 1.1

#: A first graph may take so many times the memory of before, and an allocator's blocks besides.
LARGER, BLOCKS = 1.1, 2**27


#: Of calls as they are, and of replays: see :class:`Choice`.
_Pair: TypeAlias = tuple[list[Any], list[Any]]


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
        #: By layout: calls, and replays, with what they were filled to, and their events; ``None``
        #: once the choice is made.
        self._timed: defaultdict[Hashable, _Pair] | None = defaultdict(lambda: ([], []))

    @property
    def is_made(self) -> bool:
        """Whether enough calls were timed."""
        return self._timed is None

    def begin(self, key: Hashable, replayed: bool, device: torch.device) -> Callable[[], None]:
        """Time a call that begins; call what comes back when its backward has ended."""
        if self._timed is None or device.type != "cuda":
            return lambda: None
        fill, start, stop = self.fill, *[torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()

        def end() -> None:
            stop.record()
            if self._timed is not None:
                self._timed[key][replayed].append((fill, start, stop))

        return end

    def keeps_replays(self) -> bool:
        """False once it was seen that calls as they are take less time."""
        if self._timed is None:
            return not self.why_not
        as_it_is = replayed = count = 0.0
        for pair in self._timed.values():
            ended = [[timed for timed in of_one if timed[2].query()] for of_one in pair]
            if not all(ended):
                continue
            calls, replays = ([x.elapsed_time(y) for _, x, y in of_one] for of_one in ended)
            as_it_is += len(replays) * median(fill for fill, _, _ in ended[True]) * min(calls)
            replayed += len(replays) * median(replays)
            count += len(replays)
        if count < TIMED:
            return True
        self._timed = None
        times = f"replays take {replayed:.0f} ms, and as many calls {as_it_is:.0f} ms"
        if replayed > SLOWER * as_it_is:
            self.why_not = times
            return False
        logger.info("cuda_graphs='auto': %s: calls are replayed", times)
        return True


def memory_held(device: torch.device) -> int:
    """Bytes of the tensors that are on a GPU now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def excess_of_memory(most: int, device: torch.device) -> str:
    """Why a first graph takes too much, or "": the process has held ``most`` bytes before."""
    now = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    more = f"a graph takes {(now - most) / 2**30:.1f} GiB more than a step does"
    return more if now > LARGER * most + BLOCKS else ""
