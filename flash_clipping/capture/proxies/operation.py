"""What is known of one operation between stand-ins and tensors that carry samples.

Samples may lie along another axis than the first: XLNet's ``einsum("ibh,hnd->ibnd", h, self.q)``
has positions first. Where they lie in ``h`` and in the result, a probe shows
(:mod:`flash_clipping.capture.proof.probe`). Gradients of one sample are those with the output
gradients of all others at 0.

Shape suffixes: ``B`` samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.proxies.parameter_proxy import (
    AffineView,
    ParameterProxy,
    TableRows,
    unflattened,
)
from flash_clipping.capture.row_layouts import Layout, layout_of
from flash_clipping.finish.backward_pass import Readers

ADDITION = {"add", "add_"}
MULTIPLICATION = {"mul", "multiply"}
#: ``x += p`` arrives under this name; what it changes in place is an ordinary tensor.
IN_PLACE = {"add_"}
#: They may draw dropout, and an operand that is the same for all samples is broadcast over these.
ATTENTION = {"scaled_dot_product_attention"}
#: Linear maps: layers that read one input are measured together.
READS_ROWS = {"linear", "matmul"}


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, of a property with the property's own name."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # a property; its own name is on the descriptor
        name += str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


@dataclass
class ProxyOp:
    """One operation between bare parameters and tensors that carry samples."""

    func: Callable[..., Any]
    name: str
    leaves: list[Any]
    spec: Any
    bares: list[ParameterProxy]
    batched: list[bool]
    autocast: tuple[str, bool, torch.dtype]
    recomputed: bool
    #: What each of ``bares`` is of a parameter, where it is little more than that.
    origins: list[AffineView | None]
    #: Which rows of a table the first of ``bares`` is, if it is.
    rows: TableRows | None = None
    #: Axis of what carries samples, and of the output, that holds them.
    axis: int = 0
    #: Where samples lie in what carries them, and in the output, if not along the first axis; and
    #: how many there are.
    before: Layout | None = None
    after: Layout | None = None
    count: int = 0
    #: It is yet to be seen where samples lie.
    is_searched: bool = False
    #: Which layers read the same rows, where that is of use.
    readers: Readers | None = None
    #: Samples in the call of the root that it belongs to, if there is one.
    samples: int | None = None

    @property
    def tap(self) -> FactorSource:
        return self.bares[0].tap

    def call(self, plain: list[Tensor], bare: list[Tensor]) -> Tensor:
        """The operation with these tensors in the place of its own."""
        plain_, bare_ = iter(plain), iter(bare)
        leaves = [
            next(bare_)
            if isinstance(leaf, ParameterProxy)
            else (next(plain_) if isinstance(leaf, Tensor) else leaf)
            for leaf in self.leaves
        ]
        args, kwargs = unflattened(leaves, self.spec)
        device_type, enabled, dtype = self.autocast
        if not enabled and not torch.is_autocast_enabled(device_type):
            return self.func(*args, **kwargs)  # type: ignore[no-any-return]
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            result: Tensor = self.func(*args, **kwargs)
        return result

    @property
    def params(self) -> list[nn.Parameter]:
        found = [param for bare in self.bares for param in bare.leaves.values()]
        return found if len(found) == 1 else list(dict.fromkeys(found))

    def by_row(self, bare: ParameterProxy, rank: int) -> bool:
        """Whether the first axis of this operand is the batch, each row the same."""
        return bare.row is not None and bare.dim() == rank and bare.shape[0] != 1

    def row_by_row(self, bare: ParameterProxy, plain: list[Tensor], G: Tensor) -> bool:
        """Whether every sample meets a row of its own of this operand.

        So it is where a parameter and a constant with a row per sample made it: an attention mask
        that was added to a table of biases before both are added to the scores.
        """
        if bare.row is not None or bare.dim() != G.dim() or bare.shape[0] != G.shape[0] != 1:
            return False
        first = [x[:1] if batched else x for x, batched in zip(plain, self.batched, strict=True)]
        try:
            output = self.call(first, [other.value.detach() for other in self.bares])
        except RuntimeError:
            return True  # one row and all of the operand do not fit
        return output.shape[0] != 1


def looked_up(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TableRows | None:
    """The rows that ``torch.nn.functional.embedding`` with these arguments reads of a parameter."""
    if scale_grad_by_freq or max_norm is not None or not isinstance(weight, ParameterProxy):
        return None
    if weight.value not in weight.leaves or isinstance(ids, ParameterProxy):
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return TableRows(ids, weight.value, padding_idx)


def layout_after(operation: ProxyOp, plain: list[Tensor], use: str) -> Layout:
    """Where samples lie in the output of an operation on one tensor that carries them.

    Raises:
        FlashClippingError: that was not shown for a tensor of this shape.
    """
    assert operation.before is not None
    if operation.name == "embedding":
        return operation.before  # a row for every id
    seen = operation.tap.session.layouts_after.get(use, {})
    with torch.no_grad():
        output = operation.call(plain, [bare.value.detach() for bare in operation.bares])
    if not seen and operation.count == 1:
        return operation.before  # one sample: all of it is its own
    return layout_of(f"{operation.tap.path}: {use}", output, operation.count, seen)
