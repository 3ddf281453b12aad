"""What a backward pass asks of the session that it belongs to.

One is :class:`~flash_clipping.capture.session.ClippingSession`. What finishes a backward pass knows
no taps and no modules: only what is stated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping.factors import Factor
from flash_clipping.finish.clipping import Doubts
from flash_clipping.finish.plan import Plans

#: Norms ``[P, B]`` of the parameters, in their order, what rounding may hide of them, and whether
#: the parameters are all on one device -> coefficients ``[B]`` or ``[P, B]``.
ClipFunction: TypeAlias = Callable[[list[nn.Parameter], Tensor, Doubts, bool], Tensor]


class Call(Protocol):
    """One call of the root module, which knows which layers read the same input."""

    @property
    def batch_size(self) -> int | None:
        """Samples in its batch, if it has one."""
        ...

    def count_readers(self, place: int, params: Sequence[nn.Parameter]) -> int:
        """How many layers read the input at this place; 0 where one of these parameters, of a
        layer that reads it, has, or may have, other uses."""
        ...


#: A call of the root, and the place among its readers of a tapped layer's input.
Readers: TypeAlias = tuple[Call, int]


class Units(Protocol):
    """Which privacy unit each row belongs to, that layers record."""

    #: How many units there are.
    count: int

    def scale_of_mean(self) -> float:
        """What a row's own gradient is, in terms of what arrives from a mean over rows."""
        ...

    def without_lost(self, norms_PB: Tensor) -> Tensor:
        """Norms, infinite for units that were found not to be finite on the way."""
        ...

    def of_units(self, path: str, factor: Factor, device: torch.device) -> Factor:
        """What was recorded row by row, for units."""
        ...


class Session(Protocol):
    """How to clip, what forward did, and who is told what a backward pass has left."""

    #: An input of every tapped layer, which users cannot name.
    anchor: Tensor
    #: From per-parameter norms to coefficients; also where norms are published.
    clip: ClipFunction
    #: Told of the parameters whose clipped sums are in ``p.grad``.
    note_sums: Callable[[Iterable[nn.Parameter]], None]
    #: The trainable parameters, in order.
    trainable: Callable[[], list[nn.Parameter]]
    #: ``"mean"`` or ``"sum"``.
    loss_reduction: str
    #: Whether samples are axis 0 of every tapped layer's input, or axis 1.
    batch_first: bool
    #: ``"auto"``, ``"triton"`` or ``"torch"``.
    backend: str
    #: ``"float32"`` or ``"parameter"``: of clipped sums in ``p.grad``.
    sum_dtype: str
    #: Modules, by path, that must have stand-ins while their checkpoints recompute in backward.
    recomputed: dict[str, Callable[[], AbstractContextManager[None]]]
    #: How factors of the layouts that were met are handled.
    plans: Plans

    def uses(self) -> Counter[int]:
        """Uses of every parameter that a backward may still ask about, by ``id``."""
        ...

    def units(self) -> Units | None:
        """Which privacy unit each row belongs to; ``None``: rows are samples."""
        ...

    def expected_batch_sizes(self) -> set[int]:
        """Sizes that the batch may have."""
        ...

    def end_backward(self, norms_taken: bool = True) -> None:
        """The backward pass has ended."""
        ...
