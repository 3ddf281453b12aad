"""Operations between stand-ins and tensors in which samples lie along another axis than the first.

XLNet's ``einsum("ibh,hnd->ibnd", h, self.q)`` has positions first. Where samples lie in ``h``, the
rehearsals show; where they lie in what comes of it, the operation shows itself: one sample is made
NaN, and what becomes NaN is that sample's. That is seen in rehearsals and looked up afterwards.
Gradients of one sample are those with the output gradients of all others at 0.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from flash_clipping.capture.proxies.operation import ProxyOp, name_of
from flash_clipping.capture.proxies.parameter_proxy import UnsupportedUse
from flash_clipping.capture.row_layouts import Layout, layout_of, layouts_of


def layout_after(operation: ProxyOp, plain: list[Tensor], use: str) -> Layout:
    """Where samples lie in the output of an operation on one tensor that carries them.

    Raises:
        UnsupportedUse: they reach each other there, or lie in no regular order.
        FlashClippingError: no rehearsal has shown it for a tensor of this shape.
    """
    assert operation.before is not None
    if name_of(operation.func) == "embedding":
        return operation.before  # a row for every id
    session = operation.tap.session
    call = session.current_forward
    seen = session.layouts_after.setdefault(use, {})
    if call is not None and call.witness is not None and operation.count > 1:
        found = _seen(operation, plain[0])
        parts = found.parts(operation.call(plain, _values(operation)), operation.count)
        assert parts is not None
        if seen.setdefault(parts, found) != found:
            _refuse(operation)
        return found
    with torch.no_grad():
        output = operation.call(plain, _values(operation))
    if not seen and operation.count == 1:
        return operation.before  # one sample: all of it is its own
    return layout_of(f"{operation.tap.path}: {use}", output, operation.count, seen)


def _values(operation: ProxyOp) -> list[Tensor]:
    return [bare.value.detach() for bare in operation.bares]


@torch.no_grad()
def _seen(operation: ProxyOp, x: Tensor) -> Layout:
    before, B = operation.before, operation.count
    assert before is not None
    if not x.is_floating_point():
        _refuse(operation)
    masks = []
    clean = torch.ones_like(x)
    for b in range(B):
        with_nan = clean.contiguous().clone()
        before.front(with_nan, B)[b] = math.nan
        output = operation.call([with_nan], [torch.ones_like(v) for v in _values(operation)])
        if not isinstance(output, Tensor) or not output.is_floating_point():
            _refuse(operation)
        masks.append(output.isnan())
    for layout in layouts_of(masks[0].shape, B, masks[0].dim()):
        expected = torch.zeros_like(masks[0])
        if all(bool((_only(layout, expected, b, B) == mask).all()) for b, mask in enumerate(masks)):
            return layout
    _refuse(operation)


def _only(layout: Layout, zeros: Tensor, b: int, B: int) -> Tensor:
    found = zeros.clone(memory_format=torch.contiguous_format)
    layout.front(found, B)[b] = True
    return found


def _refuse(operation: ProxyOp) -> NoReturn:
    raise UnsupportedUse(
        operation.tap,
        f"{name_of(operation.func)} reads samples along another axis than the first, and it cannot "
        "be seen which of its results are of which sample",
    )
