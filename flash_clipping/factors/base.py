"""Factors of per-sample gradients, which norms and clipped sums follow from.

A per-sample gradient ``[B, *parameter]`` is almost never worth forming: the norm of every sample
and the clipped sum over samples follow from its factors. Rules return factors where autograd's own
backward would return the gradient summed over the batch. When the pass ends, those of one parameter
are merged, asked for norms, and then for clipped sums.

Shape suffixes: ``B`` samples; ``M`` rows, where each is one of several of its unit, ``U`` units.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_clipping.errors import InvalidType
from flash_clipping.factors.units import UnitMap
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
                    f"FC165 {cls.__name__} is derived from {base.__name__}, which is final. Derive "
                    "it from flash_clipping.factors.PerSampleGrad, and give it sqnorms, "
                    "error_bound, clipped_sum and dense of its own."
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
        """Bound the rounding of squared norms, ``[B]``: with it they are at least those of
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

    def operands(self) -> tuple[Any, ...]:
        """Return what decides, besides its type, how it is handled with others: tensors by
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

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        """The factor of the units that its samples, here called rows, belong to."""
        return DenseGrad(self.sums_of_units(units))

    def sums_of_units(self, units: UnitMap) -> Tensor:
        """The gradients of units, ``[U, *parameter]`` in fp32 (float64 for float64)."""
        return units.sums(self.dense())

    def tied_to(self, other: PerSampleGrad) -> PerSampleGrad | None:
        """One factor for this and for another use of the parameter, of another kind; None where
        their gradients have to be formed."""
        return None


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


class Factored(MeasuredOnce):
    """A gradient that is kept as its operands, of which units are measured as well."""

    #: Names of two operands ``[M, T, ...]`` of which positions of several rows may be laid end to
    #: end, if there are such.
    positions: tuple[str, str] | None = None

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        return UnitGrad(self, units)

    @abstractmethod
    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        """Squared norms of units, ``[U]``, and what rounding may hide of them, ``[U]``."""

    def clipped_sum_of_units(self, units: UnitMap, coef_U: Tensor, backend: str) -> Tensor:
        """``sum_u coef_u g_u``, as :meth:`clipped_sum` of coefficients."""
        return self.clipped_sum(units.of_rows(coef_U), backend)

    def are_units_worth_storing(self, count: int, readers: Callable[[], int]) -> bool:
        """:meth:`is_worth_storing`, of the gradients of so many units."""
        return False

    def stored_units(self, units: UnitMap, backend: str) -> DenseGrad:
        """The gradients of units, formed now; asked for where they are worth it."""
        raise NotImplementedError


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


@dataclass(eq=False)
class UnitGrad(MeasuredOnce):
    """``g_u = Σ g_m`` over the rows m of unit u.

    Args:
        rows: the gradients of rows.
        units: which unit each row belongs to.
    """

    rows: Factored
    units: UnitMap

    @property
    def batch_size(self) -> int:
        return self.units.count

    def operands(self) -> tuple[()]:
        return ()  # it is handled alone, whatever it holds

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        return UnitGrad(self.rows, self.units.then(units))

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        sq_U, doubt_U = self.rows.measure_units(self.units, backend)
        return sq_U.unsqueeze(1), doubt_U

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            coef_B = torch.ones(self.units.count, device=self.units.index_M.device)
        return self.rows.clipped_sum_of_units(self.units, coef_B, backend)

    def dense(self) -> Tensor:
        return self.rows.sums_of_units(self.units)

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        return self.rows.are_units_worth_storing(self.units.count, readers)

    def stored(self, backend: str) -> DenseGrad:
        return self.rows.stored_units(self.units, backend)

    @classmethod
    def concatenate(cls, factors: Sequence[UnitGrad]) -> PerSampleGrad:
        maps = {id(factor.units): factor.units for factor in factors}
        if len(maps) == 1:
            return merge([factor.rows for factor in factors]).by_units(factors[0].units)
        # Rows of other maps, as of an expert that is called twice: every position becomes a row.
        parts: list[Any] = [factor.rows for factor in factors]
        names = parts[0].positions
        if names is None or len({*map(type, parts)}) > 1:
            return DenseGrad.sum_of(factors)
        index_N = [
            factor.units.index_M.repeat_interleave(getattr(part, names[0]).shape[1])
            for factor, part in zip(factors, parts, strict=True)
        ]
        operands = {
            name: torch.cat([getattr(part, name).flatten(0, 1) for part in parts]).unsqueeze(1)
            for name in names
        }
        units = UnitMap(torch.cat(index_N), factors[0].units.count)
        return cls(replace(parts[0], **operands), units)


def merge(factors: Sequence[PerSampleGrad]) -> PerSampleGrad:
    """One factor for all uses of one parameter: uses of one kind are laid end to end along T."""
    kinds: dict[type[PerSampleGrad], list[PerSampleGrad]] = {}
    for factor in factors:
        kinds.setdefault(type(factor), []).append(factor)
    merged = [
        kind.concatenate(group) if len(group) > 1 else group[0] for kind, group in kinds.items()
    ]
    if len(merged) == 1:
        return merged[0]
    if len(merged) == 2:
        for one, other in (merged, merged[::-1]):
            if (tied := one.tied_to(other)) is not None:
                return tied
    return DenseGrad.sum_of(merged)
