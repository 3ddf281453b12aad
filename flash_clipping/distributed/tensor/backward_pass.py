"""One backward pass of layers that are cut over processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, distributed as dist, nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.backward_pass import ShardedBackwardPass
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.distributed.reducer import LocalSums, Reducer
from flash_clipping.distributed.tensor.layouts import Share
from flash_clipping.distributed.tensor.norm_all_reduce import NormAllReduce
from flash_clipping.factors import Dense, Factor
from flash_clipping.finish.clipping import Doubts


class TensorParallelBackwardPass(ShardedBackwardPass):
    """Factors are of this process's shares of the gradients; norms are of whole gradients."""

    def __init__(
        self,
        session: ClippingSession,
        slots: ParameterSlots,
        processes: ProcessGroups,
        messages: NormAllReduce,
        marks: deque[Tensor],
    ):
        super().__init__(session, slots)
        self.processes, self.messages, self._marks = processes, messages, marks

    @cached_property
    def _keys(self) -> list[int]:
        """Of all trainable parameters, in an order that all processes share."""
        return [id(param) for param in self.slots.recorded()]

    def _is_term(self, key: int) -> bool:
        return self.messages.shares[key] is Share.TERM

    def _use_now(
        self, path: str, params: Sequence[nn.Parameter], factors: Sequence[Factor]
    ) -> None:
        """``mode="two_pass"``: terms are kept until all of a gradient's are there."""
        for param, factor in zip(params, factors, strict=True):
            if self.coef is not None or not self._is_term(id(param)):
                super()._use_now(path, [param], [factor])
                continue
            if factor.batch_size != self.batch_size:
                self._check_batch_size(path, factor.batch_size)
            self.calls.append(path)
            self.used.append([param])
            self.factors.append(Dense(factor.dense()))

    def merged(self, keys: Sequence[int]) -> dict[int, Factor]:
        """Terms of gradients become whole gradients: squares of sums, not sums of squares."""
        factors = super().merged(keys)
        terms = [key for key in self._keys if key in factors and self._is_term(key)]
        if terms:
            grads = self.messages.whole_gradients([factors[key].dense() for key in terms])
            factors.update(zip(terms, map(Dense, grads), strict=True))
        return factors

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        marks = [marks_B for marks_B in self._marks if len(marks_B) == norms_PB.shape[1]]
        self._marks.clear()
        marks_B = torch.stack(marks).sum(0) % (1 << 20) if marks else None
        return self.messages.whole_norms([id(param) for param in params], norms_PB, doubts, marks_B)

    def add_clipped_sums(self) -> None:
        """As for any sharded model; ``mode="two_pass"`` has summed its own terms only."""
        if terms := [key for key in self._keys if key in self._sums and self._is_term(key)]:
            sums = [self._sums[key].contiguous() for key in terms]
            for key, total in zip(terms, sums, strict=True):
                dist.all_reduce(total, group=self.messages.mesh.get_group())
                self._sums[key] = total
        super().add_clipped_sums()

    def _reducer(self) -> Reducer | LocalSums:
        return super()._reducer() if self.processes.data else LocalSums()
