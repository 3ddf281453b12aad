"""What the end of a backward pass asks of what it belongs to, and of taps and modules nothing else.

:class:`~flash_clipping.capture.session.ClippingSession`, its calls of the root and its units say
what each of these is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping.factors import Factor, UnitMap
from flash_clipping.finish.clipping import ClipFunction as ClipFunction
from flash_clipping.finish.plan import Plans


class Call(Protocol):
    """One call of the root module, which knows which layers read the same input."""

    @property
    def batch_size(self) -> int | None: ...

    def count_readers(self, place: int, params: Sequence[nn.Parameter]) -> int: ...


#: A call of the root, and the place among its readers of a tapped layer's input.
Readers: TypeAlias = tuple[Call, int]


class Units(Protocol):
    """Which privacy unit each row belongs to, that layers record."""

    count: int
    map: UnitMap

    def scale_of_mean(self) -> float: ...

    def without_lost(self, norms_PB: Tensor) -> Tensor: ...

    def of_units(self, path: str, factor: Factor, device: torch.device) -> Factor: ...


class Session(Protocol):
    """How to clip, what forward did, and who is told what a backward pass has left."""

    anchor: Tensor
    clip: ClipFunction
    note_sums: Callable[[Iterable[nn.Parameter]], None]
    trainable: Callable[[], list[nn.Parameter]]
    loss_reduction: str
    batch_first: bool
    backend: str
    sum_dtype: str
    fp32_precision: str
    recomputed: dict[str, Callable[[], AbstractContextManager[None]]]
    plans: Plans

    def uses(self) -> Counter[int]: ...

    def units(self) -> Units | None: ...

    def expected_batch_sizes(self) -> set[int]: ...

    def end_backward(self, norms_taken: bool = True) -> None: ...
