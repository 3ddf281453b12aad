"""What routed rows leave for the gradients of experts.

E experts, N rows, p output features, d input features, B samples.
"""

from __future__ import annotations

from torch import Tensor

from flash_clipping.factors import DenseGrad, PerSampleGrad, SegmentedLinearGrad
from flash_clipping.layers.exchange import Samples
from flash_clipping.layers.routed_rows import Gradients
from flash_clipping.ops.segments import segment_sums


class OfSeveralProcesses(PerSampleGrad):
    """A gradient of this process's experts, of the samples of all processes that sent it rows.

    No process knows a sample's gradient by itself: the backward pass of a sharded model adds norms
    up over processes, and takes ``whole`` in the place of this.

    Attributes:
        whole: for the samples of all processes, one process after the other.
        samples: which of them are this process's.
    """

    def __init__(self, whole: PerSampleGrad, samples: Samples):
        self.whole, self.samples = whole, samples

    @property
    def batch_size(self) -> int:
        return self.samples.own

    def sqnorms(self, backend: str) -> Tensor:
        raise NotImplementedError

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        """Of all samples, with recording off: a ``DTensor``, as the parameter is one."""
        if coef_B is not None:
            raise NotImplementedError
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self.samples.mesh
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(
            self.whole.clipped_sum(None, backend), mesh, placements, run_check=False
        )

    def dense(self) -> Tensor:
        raise NotImplementedError


def factors_of(found: Gradients) -> dict[str, PerSampleGrad]:
    """Factors of matrices ``[E, p, d]`` and of biases ``[E, p]``; of the samples of several
    processes, if experts lie in several."""
    segments = found.segments
    factors: dict[str, PerSampleGrad] = {
        name: SegmentedLinearGrad(A, G, segments) for name, (A, G) in found.operands.items()
    }
    for name, G_Np in found.rows.items():
        sums_BEp = segment_sums(G_Np, segments).unflatten(0, (segments.groups, segments.samples))
        factors[name] = DenseGrad(sums_BEp.transpose(0, 1))
    if (exchange := found.exchange) is not None:
        samples = exchange.samples
        return {name: OfSeveralProcesses(whole, samples) for name, whole in factors.items()}
    return factors
