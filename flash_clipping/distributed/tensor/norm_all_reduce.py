"""What processes of a tensor mesh tell each other once in a backward pass.

One all-reduce of ``[2 P + 4, B]`` in float64: squared norms and doubts of every parameter, and what
shows that all of them have run the same samples. All processes get the same bits, and so the same
coefficients.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed as dist

from flash_clipping.capture.draws import row_hashes
from flash_clipping.distributed.tensor.layouts import Share, Shares
from flash_clipping.finish.clipping import Doubts
from flash_clipping.ops.runtime.checks import check_on_device
from flash_clipping.ops.runtime.upload import to_device

#: Relative difference of squared norms that are computed by all processes alike.
ALIKE = 1e-3

_OTHER_SAMPLES = (
    "the model: processes of one tensor mesh were called with different samples. Give all of them "
    "the same batch, in the same order: from the loader that make_private returns, or seed "
    "samplers and augmentations alike."
)
_OTHER_GRADIENTS = (
    "the model: found parameters that are whole in every process of a tensor mesh, and whose "
    "gradients differ between them. Parallelize each layer that reads only its process's heads or "
    "positions (SequenceParallel), or seed labels and dropout alike."
)


class NormAllReduce:
    """Adds up what processes know of the samples."""

    def __init__(self, mesh: torch.distributed.DeviceMesh, shares: Shares):
        self.mesh, self.shares = mesh, shares
        self.is_first = mesh.get_local_rank() == 0

    def whole_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Per-sample gradients ``[B, ...]`` whose terms processes have, added up.

        In float64 for float64, in fp32 otherwise; in one all-reduce.
        """
        flat = [grad.reshape(len(grad), grad.shape[1:].numel()) for grad in grads]
        wide = torch.float64 if any(x.dtype == torch.float64 for x in flat) else torch.float32
        message = torch.cat([x.to(wide) for x in flat], dim=1)
        if message.numel():
            dist.all_reduce(message, group=self.mesh.get_group())
        pieces = message.split([x.shape[1] for x in flat], dim=1)
        return [
            piece.reshape(grad.shape).contiguous()
            for piece, grad in zip(pieces, grads, strict=True)
        ]

    def whole_norms(
        self, keys: Sequence[int], norms_PB: Tensor, doubts: Doubts, marks_B: Tensor | None
    ) -> tuple[Tensor, Doubts]:
        """Norms and doubts of whole gradients, from those of this process's shares.

        Args:
            keys: ids of the parameters, in an order that all processes share.
            norms_PB: of this process's shares.
            doubts: of the same.
            marks_B: whole numbers below 2^20 that tell samples apart, where they are known.

        Raises:
            FlashClippingError: processes have run different samples, or differ in what should be
                the same for all. On a GPU: an assertion on the device, later.
        """
        P, B = norms_PB.shape
        sq_PB = norms_PB.double().square()
        doubt_PB = doubts.rows(keys, sq_PB)
        shard_P = [self.shares[key] is Share.SHARD for key in keys]
        is_shard_P1 = to_device(shard_P, sq_PB.device, torch.int64).bool().unsqueeze(1)
        whole_B = torch.where(is_shard_P1, 0.0, sq_PB).sum(0)
        whole_B = torch.where(whole_B.isfinite(), whole_B, -1.0)  # to be compared as well
        marks_B = torch.zeros_like(whole_B) if marks_B is None else marks_B.to(whole_B)
        counted_P1 = is_shard_P1 | self.is_first
        message = torch.cat(
            [
                torch.where(counted_P1, sq_PB, 0.0),  # not a product: 0 * inf is NaN
                torch.where(counted_P1, doubt_PB, 0.0),
                torch.stack([marks_B, marks_B.square(), whole_B, whole_B.square()]),
            ]
        )
        if B:
            dist.all_reduce(message, group=self.mesh.get_group())
        sq_PB, doubt_PB, alike_4B = message.split([P, P, 4])
        self._check(alike_4B)
        return sq_PB.sqrt().to(norms_PB), Doubts([(keys, doubt_PB.to(norms_PB))], doubts.scale)

    def _check(self, alike_4B: Tensor) -> None:
        """All processes find the same, of the same numbers."""
        marks_B, marks_sq_B, whole_B, whole_sq_B = alike_4B
        ranks = self.mesh.size()
        # n Σ x² = (Σ x)² where all x are the same; of whole numbers exactly.
        same = (ranks * marks_sq_B == marks_B.square()).all()
        spread_B = ranks * whole_sq_B - whole_B.square()
        alike = (spread_B <= ALIKE**2 * whole_B.square()).all()
        check_on_device(same, _OTHER_SAMPLES)
        check_on_device(alike, _OTHER_GRADIENTS)


def marks_of(tensors: Sequence[Tensor], axis: int) -> Tensor | None:
    """A whole number below 2^20 for every sample, of the bits of its inputs: ``[B]``, int64.

    Different inputs have different numbers but for one pair in a million. ``None`` without inputs.
    """
    found: Tensor | None = None
    for x in tensors:
        if x.dim() <= axis or x.is_meta or x.layout is not torch.strided:
            continue
        hashes = row_hashes(x, axis)
        if found is None:
            found = hashes
        elif len(hashes) == len(found):
            found = found.to(hashes.device) * 31 + hashes
    if found is None:
        return None
    mixed = (found ^ (found >> 31)) * 0x4F1BBCDCBFA53E0B
    return (mixed >> 40) & 0xFFFFF
