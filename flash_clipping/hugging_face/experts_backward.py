"""One backward pass of a sharded model with experts in parallel.

B samples of this process, M those of all processes of an expert mesh, E parameters of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.backward_pass import ShardedBackwardPass
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad, merge
from flash_clipping.finish.backward_pass import Readers, stored_where_cheaper
from flash_clipping.finish.clipping import Doubts
from flash_clipping.layers.exchange import Samples


class ExpertsBackwardPass(ShardedBackwardPass):
    """Of a model with experts in parallel: rows of a sample reach several processes, and so does
    its gradient. Squared norms are added up over the expert mesh, and each process gets the
    coefficients of all samples that sent it rows: one all-reduce each."""

    def __init__(self, session: ClippingSession, slots: ParameterSlots, reducer: Reducer):
        super().__init__(session, slots, reducer)
        self._samples: Samples | None = None
        #: Of experts, by ``id``: the factors of all uses; squared norms ``[M]`` and what rounding
        #: may hide of them; coefficients ``[M]``.
        self._held: dict[int, list[PerSampleGrad]] = {}
        self._of_all: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._coefs: dict[int, Tensor] = {}

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[Any],
        readers: Readers | None = None,
    ) -> None:
        """Rows of experts come from all processes, also where this one has no samples."""
        if id(params[0]) not in self.slots.experts:
            super().record(path, params, factors, readers)
            return
        self._note_samples(path, factors[0].samples)
        self.elsewhere += params
        whole: Sequence[PerSampleGrad] = [factor.whole for factor in factors]
        if readers is not None:
            call, place = readers
            count = partial(call.count_readers, place, params)
            whole = stored_where_cheaper(whole, count, self.backend)
        for param, factor in zip(params, whole, strict=True):
            self._held.setdefault(id(param), []).append(factor)

    def _note_samples(self, path: str, samples: Samples) -> None:
        if self._samples is not None and self._samples.counts != samples.counts:
            raise FlashClippingError(
                f"FC633 {path}: found experts with rows of {samples.counts} samples in the "
                f"processes of their mesh, and of {self._samples.counts} in the same backward. "
                "Call backward() for each batch separately."
            )
        self._samples = samples
        if samples.own != self.batch_size:
            self._check_batch_size(path, samples.own)

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        """Norms and doubts of all parameters; rows of experts hold nothing yet."""
        samples = self._samples
        if samples is None:
            return norms_PB, doubts
        for key in self._held:
            factor = merge(self._held[key])
            self._held[key] = [factor]
            self._of_all[key] = factor.sqnorms(self.backend), factor.error_bound(self.backend)
        sq_M, _ = next(iter(self._of_all.values()))
        nothing_M = sq_M.new_zeros(sum(samples.counts), dtype=torch.float64)
        experts = [id(param) for param in params if id(param) in self.slots.experts]
        found = [self._of_all.pop(key, (nothing_M, None)) for key in experts]
        rows = [sq_M.double() for sq_M, _ in found]
        rows += [nothing_M if doubt_M is None else doubt_M.double() for _, doubt_M in found]
        of_own = samples.added_up(torch.stack(rows))[:, : norms_PB.shape[1]]
        sq_EB, doubt_EB = of_own.chunk(2)
        dtype = torch.promote_types(norms_PB.dtype, sq_M.dtype)
        # A sum that cancels may come out below zero. An overflow is no such sum, and must not be 0.
        sq_EB = sq_EB.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.nan).clamp(min=0)
        norms_EB = (sq_EB.sqrt() * doubts.scale).to(dtype)
        norms = dict(zip(map(id, params), norms_PB.to(dtype), strict=True))
        norms.update(zip(experts, norms_EB, strict=True))
        blocks = [*doubts.blocks, (experts, doubt_EB.to(dtype))]
        return torch.stack([*norms.values()]), Doubts(blocks, doubts.scale)

    def take_norms(self) -> None:
        """And tell all processes of the mesh the coefficients of this one's samples."""
        super().take_norms()
        assert self.coef is not None
        if self._samples is None:
            return
        experts = [key for key in map(id, self.slots.recorded()) if key in self.slots.experts]
        rows = [self.coef.one] if self.coef.one is not None else [self.coef[k] for k in experts]
        of_all = self._samples.gathered(torch.stack(rows))
        self._coefs = dict(zip(experts, of_all.expand(len(experts), -1), strict=True))

    def _sums_of(self, part: tuple[int, ...]) -> dict[int, Tensor]:
        found = super()._sums_of(part)
        for key in part:
            if key in self._held:
                (factor,) = self._held.pop(key)
                found[key] = factor.clipped_sum(self._coefs[key], self.backend)
        return found

    def forget(self) -> None:
        super().forget()
        self._held.clear()
        self._of_all.clear()
