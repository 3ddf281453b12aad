"""One call of the root module: its batch, its uses of parameters, and which of what its layers read
are samples.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import graph_task
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.padding import CountedRows
from flash_clipping.capture.proof.reads import Read, Reads
from flash_clipping.capture.units import Units


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return graph_task() != -1


@dataclass(eq=False)
class ForwardCall:
    """One call of the root module: what a later backward has to know about it."""

    #: Sizes of the batch axis of the root's tensor inputs; empty when it has none.
    batch_sizes: tuple[int, ...] = ()
    #: Parameters that tapped layers used, call by call (checkpointed: once), not yet counted.
    used: list[Sequence[nn.Parameter]] = field(default_factory=list)
    counted: Counter[int] = field(default_factory=Counter)
    #: How many tapped layers in a row read one input, input by input, and the last of these.
    readers: list[int] = field(default_factory=list)
    last_input: weakref.ref[Tensor] | None = None
    #: Stand-ins for parameters, expanded over samples (``proxy_ops.of_samples``), until the root
    #: returns: one that held its own would be freed by garbage collection alone, with its graph.
    expansions: dict[Any, Tensor] = field(default_factory=dict)
    #: Whether the root has returned.
    ended: bool = False
    #: Whether the norms of this call have been taken.
    spent: bool = False
    #: Whether gradients were cleared since: it counts only where a backward reaches it.
    forgotten: bool = False
    #: Whether the loss of it was checked.
    is_looked_at: bool = False
    #: Which privacy unit each row belongs to; ``None``: rows are samples.
    units: Units | None = None
    #: Which of its rows count, and which are padding (:mod:`flash_clipping.capture.padding`).
    counted_rows: CountedRows | None = None
    #: The loader's batch that it is called with, if that is known.
    draw: DrawnBatch | None = None
    #: Memory of the root's tensor inputs.
    input_storages: frozenset[int] = frozenset()
    #: Whether autograd is on: what then runs without it in this call is checkpointed.
    recorded: bool = False
    #: In which it was made. Autograd may run its backward in another.
    thread: int = field(default_factory=threading.get_ident)
    #: What layers have read, where that is noted.
    reads: Reads | None = None
    #: How often each layer that is not proven was called, and has read something in its last call.
    turns: dict[str, list[int]] = field(default_factory=dict)
    #: Whether what layers that are not proven read are samples, by the layer and by the shape and
    #: dtype of what is read; ``None``: of some it is. A checkpoint reads it in another order.
    answers: dict[tuple[str, torch.Size, torch.dtype], bool | None] = field(default_factory=dict)
    #: Reads of which it was not shown whether they are samples, and what was assumed.
    guesses: dict[Read, bool] = field(default_factory=dict)

    def begin_call(self, path: str) -> None:
        """Note that a layer that is not proven is called."""
        turn = self.turns.get(path)
        if turn is None:
            self.turns[path] = [0, 0]
        else:
            turn[0] += 1
            turn[1] = 0

    def next_read(self, path: str) -> Read:
        """The place of what a layer reads now: its calls, and its reads in one call, in order."""
        turn = self.turns.setdefault(path, [0, 0])
        turn[1] += 1
        return path, turn[0], turn[1] - 1

    def note_reader(self, x: Tensor) -> int:
        """Count one more reader of this input; layers that share one are called in a row. Returns
        its place in ``readers``."""
        if self.last_input is None or self.last_input() is not x:
            self.last_input = weakref.ref(x)
            self.readers.append(0)
        self.readers[-1] += 1
        return len(self.readers) - 1

    def end(self) -> None:
        """The root has returned."""
        self.ended = True
        self.expansions.clear()

    def count_readers(self, place: int, params: Sequence[nn.Parameter]) -> int:
        """How many layers read the input at this place; 0 where one of these parameters, of a
        layer that reads it, has, or may have, other uses."""
        uses = self.uses
        for param in params:
            if uses.get(id(param)) != 1:
                return 0
        return self.readers[place]

    @property
    def uses(self) -> Counter[int]:
        """How often each parameter, by ``id``, was used by a tapped layer."""
        if self.used:
            self.counted.update([id(param) for params in self.used for param in params])
            self.used.clear()
        return self.counted

    @property
    def batch_size(self) -> int | None:
        """Size of the batch axis of the root's first tensor input."""
        return self.batch_sizes[0] if self.batch_sizes else None
