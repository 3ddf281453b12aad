"""An operand's rows, and lists of the parts of segments, made on the device.

How long segments are is known to the device alone, and changes from step to step. So lists are as
long as they could become for so many rows and segments, and say of each entry whether it is used.

N rows, S segments, M entries of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


class Rows(NamedTuple):
    """An operand's sorted rows: row n is row ``places[n]`` of X, or row n where there are none.

    Tokens that k experts read lie there once, and not k times.
    """

    X: Tensor
    places_N: Tensor | None = None

    @property
    def size(self) -> int:
        """N."""
        return (self.X if self.places_N is None else self.places_N).shape[0]

    @property
    def features(self) -> int:
        return self.X.shape[1]

    @property
    def stride(self) -> int:
        """Elements from one row of X to the next."""
        return self.X.stride(0) if self.X.shape[0] > 1 else self.features

    def between(self, i: int, j: int) -> Tensor:
        """Sorted rows from i to j."""
        return self.X[i:j] if self.places_N is None else self.X[self.places_N[i:j]]

    def at(self, rows: Tensor) -> Tensor:
        """A copy of sorted rows ``[..., features]``."""
        return self.X[rows if self.places_N is None else self.places_N[rows]]

    def sorted(self) -> Tensor:
        """``[N, features]``."""
        return self.X if self.places_N is None else self.X[self.places_N]

    def reordered(self, order_N: Tensor) -> Rows:
        """The rows in another order: row n is what row ``order_N[n]`` was."""
        return Rows(self.X, order_N if self.places_N is None else self.places_N[order_N])


class Work(NamedTuple):
    """A list with some entries for every segment, one segment after the other; all int32."""

    #: The segment of every entry; S for entries behind the last that is used.
    of_M: Tensor
    #: ``[S + 1]``: the first entry of every segment. The last is how many are used.
    firsts: Tensor


def work_list(entries_S: Tensor, most: int) -> Work:
    """A list from how many entries each segment has; ``most``: at least how many that can be."""
    firsts = torch.zeros(entries_S.shape[0] + 1, dtype=torch.int32, device=entries_S.device)
    ends_S = firsts[1:]
    torch.cumsum(entries_S, 0, dtype=torch.int32, out=ends_S)
    entries = torch.arange(most, dtype=torch.int32, device=entries_S.device)
    return Work(torch.searchsorted(ends_S, entries, right=True, out_int32=True), firsts)


class Blocks(NamedTuple):
    """Segments cut into blocks of rows; int32."""

    #: The rows of every block; those that are not used begin no sooner than they end.
    begin_M: Tensor
    end_M: Tensor
    #: As of :class:`Work`.
    of_M: Tensor
    firsts: Tensor
    #: Its number among the blocks of its segment, and whether it is the last of these (a bool).
    place_M: Tensor
    last_M: Tensor


R = TypeVar("R")


def once(make: Callable[..., R]) -> Callable[..., R]:
    """A method of :class:`Lists` whose results are kept, by its arguments."""

    @functools.wraps(make)
    def kept(lists: Lists, *args: int) -> R:
        key = make.__name__, *args
        if key not in lists.made:
            lists.made[key] = make(lists, *args)
        found: R = lists.made[key]
        return found

    return kept


class Lists:
    """Segments of sorted rows, and the lists that are made of them: each once.

    Args:
        starts: ``[S + 1]``, int32: where every segment begins. The last is where all end.
        rows: how many rows there are, N; those behind the end belong to no segment.
    """

    def __init__(self, starts: Tensor, rows: int):
        self.starts, self.rows = starts.contiguous(), rows
        self.made: dict[Any, Any] = {}

    def __len__(self) -> int:
        return self.starts.shape[0] - 1

    @functools.cached_property
    def lengths_S(self) -> Tensor:
        return self.starts.diff()

    @functools.cached_property
    def longest_first_S(self) -> Tensor:
        return torch.argsort(self.lengths_S, descending=True)

    @property
    def ends(self) -> Tensor:
        """``[S]``: where every segment ends."""
        return self.starts[1:].contiguous()

    @functools.cached_property
    def segment_N(self) -> Tensor:
        """``[N]``, int32: every row's segment; for rows of none an empty one, or the last."""
        row_N = torch.arange(self.rows, dtype=torch.int32, device=self.starts.device)
        return torch.searchsorted(self.starts, row_N, right=True, out_int32=True) - 1

    @once
    def joined(self, each: int) -> Lists:
        """So many segments, one after the other, as one."""
        return Lists(self.starts[::each], self.rows)

    @once
    def blocks(self, size: int, above: int = -1) -> Blocks:
        """Blocks of at most ``size`` rows, of segments of more than ``above`` rows."""
        entries_S = (self.lengths_S + (size - 1)) // size
        if above >= 0:
            entries_S = entries_S * (self.lengths_S > above)
        # Every segment may have one block that is not full.
        of_M, firsts = work_list(entries_S, self.rows // size + min(len(self), self.rows))
        place_M = torch.arange(of_M.shape[0], dtype=torch.int32, device=of_M.device)
        place_M -= firsts[of_M]
        # Blocks that are not used are of one more segment, which begins and ends where all end.
        begin_M = torch.add(self.starts[of_M], place_M, alpha=size)
        stop_M = torch.cat([self.starts[1:], self.starts[-1:]])[of_M]
        end_M = torch.minimum(begin_M + size, stop_M)
        return Blocks(begin_M, end_M, of_M, firsts, place_M, end_M == stop_M)

    @once
    def pairs(self, size: int, longest: int) -> Work:
        """Pairs of blocks, of one segment each, of segments of at most ``longest`` rows."""
        blocks_S = (self.lengths_S + (size - 1)) // size
        pairs_S = blocks_S * (blocks_S + 1) // 2 * (self.lengths_S <= longest)
        # Of n blocks there are n (n + 1) / 2 pairs, and n - 1 of the blocks are full.
        blocks = -(-min(longest, self.rows) // size)
        most = min(len(self), self.rows) + self.rows * (blocks + 2) // (2 * size) + 1
        return work_list(pairs_S, most)
