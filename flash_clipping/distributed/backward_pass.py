"""One backward pass of a sharded model: sums go to the shards of all processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn

from flash_clipping._compat import at_end_of_backward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.experts import ExpertFactors
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.distributed.tensor.layouts import Share
from flash_clipping.distributed.tensor.norm_all_reduce import NormAllReduce
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import DenseGrad, PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers, stored_where_cheaper
from flash_clipping.finish.clipping import Doubts


class ShardedBackwardPass(BackwardPass):
    """Factors belong to unsharded parameters; sums go to the shards that take their places."""

    def __init__(self, session: ClippingSession, slots: ParameterSlots, reducer: Reducer):
        super().__init__(session)
        self.slots, self.reducer = slots, reducer
        self._session = session
        #: ``mode="two_pass"``: clipped sums of this process, until the walk has ended.
        self._sums: dict[int, Tensor] = {}
        self.experts = ExpertFactors(self.backend)

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
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        if id(params[0]) in self.slots.experts:
            self._record_experts(path, params, factors, readers)
            return
        if self._is_made_up:
            self.without_samples = [*self.without_samples, *params]
            return
        super().record(path, params, factors, readers)

    def _record_experts(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[Any],
        readers: Readers | None,
    ) -> None:
        """Experts in parallel: rows come from all processes, also where this one has no samples."""
        samples = factors[0].samples
        self.experts.note(path, samples)
        self.without_samples = [*self.without_samples, *params]
        if not self._is_made_up and samples.own != self.batch_size:
            self._check_batch_size(path, samples.own)
        whole: Sequence[PerSampleGrad] = [factor.whole for factor in factors]
        if readers is not None and self.coef is None and not self.norms_only:
            call, place = readers
            count = partial(call.count_readers, place, params)
            whole = stored_where_cheaper(whole, count, self.backend)
        for param, factor in zip(params, whole, strict=True):
            key = id(param)
            if self.coef is not None:
                total = self.experts.clipped_sum(key, factor)
                assert total is not None
                self._put(param, total)
            elif self.norms_only and self.uses[key] == 1:
                self.experts.measure(key, factor)
            else:
                self.experts.keep(key, factor)

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

    def take_norms(self) -> None:
        super().take_norms()
        assert self.coef is not None
        keys = [key for key in map(id, self.slots.recorded()) if key in self.slots.experts]
        self.experts.share(keys, self.coef)

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        keys = [id(param) for param in params]
        is_expert = [key in self.slots.experts for key in keys]
        return self.experts.whole_norms(keys, norms_PB, doubts, is_expert)

    def _put(self, param: nn.Parameter, grad: Tensor) -> None:
        """``mode="two_pass"``: keep a sum, to which further uses are added."""
        key = id(param)
        held = self._sums.get(key)
        self._sums[key] = grad if held is None else held + grad.view_as(held)

    def add_clipped_sums(self) -> None:
        """Reduce the sums of all trainable parameters, in an order that all processes share."""
        self.slots.check()
        self.reducer.reduce(self._sums_of, rounded=self.session.sum_dtype == "parameter")
        self.slots.note_sums()
        self.session.note_sums(self.slots.trainable())

    def _sums_of(self, part: tuple[int, ...]) -> dict[int, Tensor]:
        """This process's clipped sums of these parameters; without those that backward did not
        reach."""
        assert self.coef is not None and self.plan is not None
        found = {key: self._sums.pop(key) for key in part if key in self._sums}
        for key in part:
            if key in self.slots.experts and key not in found:
                total = self.experts.clipped_sum(key)
                if total is not None:
                    found[key] = total

        def add(keys: Sequence[int], sums: Sequence[Tensor]) -> None:
            found.update(zip(keys, sums, strict=True))

        self.groups.add_clipped_sums(self.plan, self.coef, add, part)
        return found

    def forget(self) -> None:
        super().forget()
        self._sums.clear()
        self.experts.forget()


class TensorParallelBackwardPass(ShardedBackwardPass):
    """Factors are of this process's shares of the gradients; norms are of whole gradients."""

    def __init__(
        self,
        session: ClippingSession,
        slots: ParameterSlots,
        reducer: Reducer,
        messages: NormAllReduce,
        marks: deque[Tensor],
    ):
        super().__init__(session, slots, reducer)
        self.messages, self._marks = messages, marks

    @cached_property
    def _keys(self) -> list[int]:
        """Of all trainable parameters, in an order that all processes share."""
        return [id(param) for param in self.slots.recorded()]

    def _is_term(self, key: int) -> bool:
        return self.messages.shares[key] is Share.TERM

    def _use_now(
        self, path: str, params: Sequence[nn.Parameter], factors: Sequence[PerSampleGrad]
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
            self.factors.append(DenseGrad(factor.dense()))

    def merged(self, keys: Sequence[int]) -> dict[int, PerSampleGrad]:
        """Terms of gradients become whole gradients: squares of sums, not sums of squares."""
        factors = super().merged(keys)
        terms = [key for key in self._keys if key in factors and self._is_term(key)]
        if terms:
            grads = self.messages.whole_gradients([factors[key].dense() for key in terms])
            factors.update(zip(terms, map(DenseGrad, grads), strict=True))
        return factors

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        units = self.units
        rows = norms_PB.shape[1] if units is None else len(units.map)
        marks = [marks_R for marks_R in self._marks if len(marks_R) == rows]
        self._marks.clear()
        marks_B = torch.stack(marks).sum(0) if marks else None
        if marks_B is not None and units is not None:
            bins_R = units.map.on(marks_B.device).bins_M
            marks_B = marks_B.new_zeros(units.count + 1).index_add_(0, bins_R, marks_B)[:-1]
        marks_B = None if marks_B is None else marks_B % (1 << 20)
        return self.messages.whole_norms([id(param) for param in params], norms_PB, doubts, marks_B)

    def add_clipped_sums(self) -> None:
        """As for any sharded model; ``mode="two_pass"`` has summed its own terms only."""
        if terms := [key for key in self._keys if key in self._sums and self._is_term(key)]:
            sums = [self._sums[key].contiguous() for key in terms]
            for key, total in zip(terms, sums, strict=True):
                dist.all_reduce(total, group=self.messages.mesh.get_group())
                self._sums[key] = total
        super().add_clipped_sums()
