"""Experts of which each process has its own: rows of tokens go to them, and results come back.

Processes of one group have samples of their own, and a part of the experts. Every choice of a token
is a row, which goes to the process that has the chosen expert. There its sample is one of those of
all processes, laid end to end in their order.

M tokens, k choices of each, N = M·k rows of this process, of which S leave; R rows arrive; E
experts, n processes with E/n of them each; B samples of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist

from flash_clipping.ops.segments import Segments, sums_of_tokens
from flash_clipping.rules.registry import UnsupportedLayer


@dataclass(frozen=True)
class Samples:
    """The samples of all processes of a group.

    Attributes:
        counts: how many each process has, in the order of their ranks.
        mesh: the processes along its last dimension.
    """

    counts: tuple[int, ...]
    mesh: dist.DeviceMesh

    @property
    def _group(self) -> Any:
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def _rank(self) -> int:
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def first(self) -> int:
        """The first of this process's samples."""
        return sum(self.counts[: self._rank])

    @property
    def own(self) -> int:
        """How many of them are this process's."""
        return self.counts[self._rank]

    def added_up(self, of_all: Tensor) -> Tensor:
        """Values ``[..., all samples]``, added up over processes: of this process's samples,
        ``[..., own]``. All processes of the group call it; ``of_all`` is overwritten."""
        dist.all_reduce(of_all, group=self._group)
        return of_all.narrow(-1, self.first, self.own)

    def gathered(self, of_own: Tensor) -> Tensor:
        """Values ``[..., own]`` of every process's samples, in all processes of the group; 0 for
        the samples of a process that knows none."""
        of_all = of_own.new_zeros(*of_own.shape[:-1], sum(self.counts))
        of_all.narrow(-1, self.first, of_own.shape[-1]).copy_(of_own)
        dist.all_reduce(of_all, group=self._group)
        return of_all


class Exchange:
    """Where the rows of one call go, and come from. All processes of the group call it together.

    How many rows there are is read by the host once, as PyTorch's all-to-all of unequal parts asks
    for it.

    Args:
        expert_ids: ``[B, ..., k]``; a choice outside ``0 .. experts - 1`` goes nowhere.
        experts: E.
        mesh: processes along its last dimension have other experts, the first of them the first.
    """

    def __init__(self, expert_ids: Tensor, experts: int, mesh: dist.DeviceMesh):
        self._group, n = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._each, self._choices = experts // n, expert_ids.shape[-1]
        self._ids_N, B = expert_ids.reshape(-1).long(), len(expert_ids)
        process_N = self._ids_N.div(self._each, rounding_mode="floor")
        #: This process's rows, by where they go.
        self._leaving = Segments(torch.zeros_like(process_N), 1, process_N, n)
        leaving_n = self._leaving.starts.diff().long()
        there_n2 = torch.stack([leaving_n, torch.full_like(leaving_n, B)], 1)
        here_n2 = torch.empty_like(there_n2)
        dist.all_to_all_single(here_n2, there_n2, group=self._group)
        self._arriving_n, self._samples_n = here_n2.unbind(1)
        self._leaves, self._arrives, counts = torch.cat([there_n2[:, :1], here_n2], 1).T.tolist()
        self.samples = Samples(tuple(counts), mesh)
        order_S = self._leaving.order_N[: sum(self._leaves)]
        self._order_S, self._token_S = order_S, order_S // self._choices

    def arrive(self, x_Md: Tensor, weight_Mk: Tensor) -> tuple[Tensor, Tensor, Segments]:
        """Tokens of all processes that chose experts of this one.

        Returns:
            ``[R, d]``; their weights ``[R, 1]``; and which sample and which of this process's
            experts they are of.
        """
        x_Rd = self.to_experts(x_Md)
        each, n = self._each, len(self._leaves)
        positions = max(1, len(x_Md) // max(1, self.samples.own))
        key_S = self._token_S // positions * each + self._ids_N[self._order_S] % each
        # As bits: one message, and no weight is rounded.
        bits_S = weight_Mk.reshape(-1)[self._order_S].double().view(torch.int64)
        key_R, bits_R = self._there(torch.stack([key_S, bits_S], 1)).unbind(1)
        process_n = torch.arange(n, device=key_R.device)
        process_R = process_n.repeat_interleave(self._arriving_n, output_size=len(key_R))
        first_n = self._samples_n.cumsum(0) - self._samples_n
        sample_R = key_R // each + first_n[process_R]
        segments = Segments(sample_R, sum(self.samples.counts), key_R % each, each)
        weight_R = bits_R.contiguous().view(torch.float64).to(weight_Mk.dtype)
        return x_Rd, weight_R.unsqueeze(1), segments

    def to_experts(self, of_tokens_Mf: Tensor) -> Tensor:
        """What tokens have, for each of their rows: ``[R, f]``."""
        return self._there(of_tokens_Mf[self._token_S])

    def to_tokens(self, rows_Rf: Tensor) -> Tensor:
        """Rows that come back, added up for each token: ``[M, f]``."""
        return sums_of_tokens(self._back(rows_Rf), self._leaving, self._choices)

    def to_choices(self, rows_R: Tensor) -> Tensor:
        """Numbers that come back, ``[M, k]``; 0 for a choice of no expert."""
        back_N = self._leaving.unsorted(self._back(rows_R))
        return back_N.view(-1, self._choices)

    def _there(self, rows: Tensor) -> Tensor:
        found = rows.new_empty(sum(self._arrives), *rows.shape[1:])
        sizes = self._arrives, self._leaves
        dist.all_to_all_single(found, rows.contiguous(), *sizes, group=self._group)
        return found

    def _back(self, rows: Tensor) -> Tensor:
        """In the order in which they left, and zeros in the place of those that did not."""
        found = rows.new_zeros(len(self._ids_N), *rows.shape[1:])
        back = found[: len(self._order_S)]
        sizes = self._leaves, self._arrives
        dist.all_to_all_single(back, rows.contiguous(), *sizes, group=self._group)
        return found


def are_parts(params: Sequence[Any]) -> bool:
    """Whether these parameters of experts lie in parts over a mesh.

    Raises:
        UnsupportedLayer: some of them do, and others do not.
    """
    cut = [hasattr(param, "device_mesh") for param in params]
    if any(cut) and not all(cut):
        raise UnsupportedLayer(
            "FC631 found parameters of experts of which some lie in parts over a mesh, and others "
            "are whole. Adapters around experts in parallel are not built: use "
            "flash_clipping.layers.MixtureOfExperts(..., rank=r)."
        )
    return all(cut)
