"""One backward pass of a sharded model: sums go to the shards of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor, nn

from flash_clipping._compat import at_end_of_backward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.reducer import LocalSums, OrderedSums, Reducer
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor, accumulation_dtype
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.session import Readers


class ShardedBackwardPass(BackwardPass):
    """Factors belong to unsharded parameters; sums go to the shards that take their places."""

    def __init__(self, session: ClippingSession, slots: ParameterSlots):
        super().__init__(session)
        self.slots = slots
        self._session = session
        #: ``mode="two_pass"``: clipped sums of this process, until the walk has ended.
        self._sums: dict[int, Tensor] = {}

    def stand_in(self) -> None:
        if self.session.recomputed:
            raise FlashClippingError(
                f"{', '.join(self.session.recomputed)}: found a module that uses its own "
                "parameters under activation checkpointing, in a sharded model. Checkpoint the "
                "layers inside of it, or use these parameters outside of the checkpoint."
            )

    @cached_property
    def _is_made_up(self) -> bool:
        """Whether this process's batch is empty, and what it runs on was made up."""
        return self._session.made_up()

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[Factor],
        readers: Readers | None = None,
    ) -> None:
        if self._is_made_up:
            self.without_samples = [*self.without_samples, *params]
            return
        super().record(path, params, factors, readers)

    def finish(self) -> None:
        """After what ``fully_shard`` does at the end of backward, whoever was queued first."""
        at_end_of_backward(super().finish)

    def _is_for_parameters(self) -> bool:
        if not super()._is_for_parameters():
            return False
        if not self.is_for_all:
            raise FlashClippingError(
                "backward(inputs=...) asked for gradients of some parameters of a sharded "
                "model. All processes reduce the sums of all parameters: call "
                "backward() without inputs, and freeze what is not to be trained."
            )
        return True

    def _put(self, param: nn.Parameter, grad: Tensor) -> None:
        """``mode="two_pass"``: keep a sum, to which further uses are added."""
        key = id(param)
        held = self._sums.get(key)
        self._sums[key] = grad if held is None else held + grad.view_as(held)

    def add_clipped_sums(self) -> None:
        """Reduce the sums of all trainable parameters, in an order that all processes share: the
        model's, backwards, as factors came."""
        assert self.coef is not None and self.plan is not None
        self.slots.check()
        ordered = OrderedSums(self.groups, self.plan, self.coef)
        reducer = self._reducer()
        for param in reversed(self.slots.recorded()):
            key = id(param)
            destination = self.slots.to(key)
            rounded = self.session.sum_dtype == "parameter"
            dtype = destination.dtype if rounded else accumulation_dtype(destination.dtype)
            total = ordered.take(key) if key not in self._sums else self._sums.pop(key)
            reducer.add(destination, total, dtype)
        reducer.finish()
        self.slots.note_sums()
        self.session.note_sums(self.slots.trainable())

    def _reducer(self) -> Reducer | LocalSums:
        """What adds sums up over processes that have other samples."""
        return Reducer()

    def forget(self) -> None:
        super().forget()
        self._sums.clear()
