"""Factors of per-sample gradients, which norms and clipped sums follow from.

A per-sample gradient ``[B, *parameter]`` is almost never worth forming: the norm of every sample
and the clipped sum over samples follow from its factors. Rules return factors where autograd's own
backward would return the gradient summed over the batch. When the pass ends, those of one parameter
are merged, asked for norms, and then for clipped sums.

Shape suffix: ``B`` samples.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping.errors import InvalidType
from flash_clipping.ops.error_bounds import squared_norms
from flash_clipping.ops.outer import weighted_sum


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 and complex dtypes stay; everything narrower is accumulated in float32."""
    return dtype if dtype == torch.float64 or dtype.is_complex else torch.float32


def parts_of_sample(rows: int, samples: int) -> int:
    """Rows that make up one sample; 1 in an empty batch."""
    return rows // samples if samples else 1


class PerSampleGrad(ABC):
    """A per-sample gradient of one parameter, in whatever form is cheapest to keep.

    Rules may return factors of classes of their own, derived from this one. The classes here are
    final: they are handled many at a time, without asking each for its norms.
    """

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            own = base.__module__.partition(".")[0] == __name__.partition(".")[0]
            if own and issubclass(base, PerSampleGrad) and not inspect.isabstract(base):
                raise InvalidType(
                    f"{cls.__name__} is derived from {base.__name__}, which is final. Derive it "
                    "from flash_clipping.factors.PerSampleGrad, and give it sqnorms, error_bound, "
                    "clipped_sum and dense of its own."
                )

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of samples ``B``."""

    @abstractmethod
    def sqnorms(self, backend: str) -> Tensor:
        """Squared norm of every sample's gradient: fp32 (or fp64) ``[B]``."""

    def sqnorm_parts(self, backend: str) -> Tensor:
        """Squared norms in parts ``[B, n]`` that are still to be added up."""
        return self.sqnorms(backend).unsqueeze(1)

    def error_bound(self, backend: str) -> Tensor | None:
        """What rounding may hide of the squared norms, ``[B]``: with it they are at least those of
        what :meth:`clipped_sum` releases (:mod:`flash_clipping.ops.error_bounds`).

        None where the very numbers that are released were measured. A class that measures anything
        else overrides this as well.
        """
        return None

    @abstractmethod
    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        """``sum_b coef_b g_b`` in fp32 (float64 for float64), shaped like the parameter; ``None``
        means all ones, in whatever dtype autograd would have.

        A sample whose coefficient is 0 adds exactly nothing, whatever its gradient holds.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """The per-sample gradients themselves, ``[B, *parameter]``."""

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        """Whether forming the per-sample gradients now is cheapest and takes no more memory.

        ``readers`` counts the layers that read the same input; 0 where the gradients must not be
        formed, as there will be others for the same parameter. Counting takes the host a while, so
        it comes last.
        """
        return False

    def stored(self, backend: str) -> DenseGrad:
        """The per-sample gradients, formed now, in place of what they are made of."""
        return DenseGrad(self.dense())

    def in_tf32(self) -> PerSampleGrad:
        """The same for a step that may cut fp32 operands to TF32; as it is where nothing is gained.
        Norms and sums must be of the same operands."""
        return self

    def operands(self) -> tuple[Any, ...]:
        """What decides, besides its type, how it is handled together with others: tensors by
        their layout, anything else by its value (:mod:`flash_clipping.finish.plan`)."""
        return (self.batch_size,)

    @classmethod
    def concatenate(cls, factors: Sequence[Any]) -> PerSampleGrad:
        """One factor for several uses of a parameter within a sample."""
        return DenseGrad.sum_of(factors)

    def fold(self, samples: int) -> PerSampleGrad:
        """The factor of ``samples`` samples, each of ``B / samples`` consecutive rows."""
        grads = self.dense()
        parts = parts_of_sample(len(grads), samples)
        return DenseGrad(grads.reshape(samples, parts, *grads.shape[1:]).sum(1))


class MeasuredOnce(PerSampleGrad):
    """A gradient whose norms, and what rounding may hide of them, come from one computation."""

    _measured: tuple[Tensor, Tensor | None] | None = None

    @abstractmethod
    def measure(self, backend: str) -> tuple[Tensor, Tensor | None]:
        """Squared norms in parts, ``[B, n]``, and what rounding may hide of them, ``[B]``."""

    def sqnorm_parts(self, backend: str) -> Tensor:
        if self._measured is None:
            self._measured = self.measure(backend)
        return self._measured[0]

    def sqnorms(self, backend: str) -> Tensor:
        return self.sqnorm_parts(backend).sum(1)

    def error_bound(self, backend: str) -> Tensor | None:
        if self._measured is None:
            self._measured = self.measure(backend)
        return self._measured[1]


@dataclass(eq=False)
class DenseGrad(PerSampleGrad):
    """Per-sample gradients that are small enough to keep as they are: ``[B, *parameter]``."""

    grads: Tensor
    #: Squared norms in parts that are still to be added up, where they are known already.
    sq_parts_Bn: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.grads.shape[0]

    def operands(self) -> tuple[Any, ...]:
        return self.grads, self.sq_parts_Bn

    #: Gradients of up to this many elements for each sample are handled many at a time.
    SMALL = 1 << 17

    def sqnorms(self, backend: str) -> Tensor:
        return self.sqnorm_parts(backend).sum(1)

    def sqnorm_parts(self, backend: str) -> Tensor:
        if self.sq_parts_Bn is None:
            dtype = accumulation_dtype(self.grads.dtype)
            self.sq_parts_Bn = squared_norms(self.grads, dtype).unsqueeze(1)
        return self.sq_parts_Bn

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.grads.sum(0)
        return weighted_sum(self.grads, coef_B, backend=backend)

    def dense(self) -> Tensor:
        return self.grads

    @classmethod
    def sum_of(cls, factors: Sequence[PerSampleGrad]) -> DenseGrad:
        """Any factors of one parameter, formed and added."""
        return cls(torch.stack([factor.dense() for factor in factors]).sum(0))
