"""Operations in which samples reach each other: they run, and no gradient may come back.

``logit_scale * texts @ images.T`` compares all pairs of a batch. Models return that beside what is
each sample's own. A loss of the latter gives ``logit_scale`` the gradient 0; one of the former has
no per-sample gradients at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.proxies.parameter_proxy import ParameterProxy
from flash_clipping.errors import FlashClippingError


class ComparesSamples(FlashClippingError):
    """A gradient comes back through an operation whose result for one sample needs the others."""


def names_of(tap: FactorSource, bares: Iterable[ParameterProxy]) -> list[str]:
    """The parameters that these are computed from, by their modules' paths and their names."""
    wanted = {id(param) for bare in bares for param in bare.leaves.values()}
    # Of a parameter that is tied, under one name: the outermost module's.
    found = {
        id(param): f"{tap.path}: {name}"
        for _, name, param in reversed(tap.session.stood_in)
        if id(param) in wanted
    }
    return sorted(found.values())


def reason_against(tap: FactorSource, bares: Sequence[ParameterProxy]) -> str | None:
    """Why no gradient may come back to one of these, if rehearsals have shown that."""
    mixing = tap.session.evidence.mixing
    if not mixing:
        return None
    for name in names_of(tap, bares):
        if name in mixing:
            parameter = name.rpartition(": ")[2]
            return (
                f"{mixing[name]}. Its parameter {parameter!r} takes part in what compares samples, "
                "and the loss reads it: no clipping can bound what a sample adds. Compute the loss "
                "of each sample from its own outputs (embeddings, hidden states)"
                ", or freeze the parameter and see to it that the loss is a sum over samples "
                f"(requires_grad_(False) of {parameter!r})."
            )
    return None


def run_refusing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    """``func``, whose results no gradient may come back through."""
    with torch.no_grad():
        result = func(*args, **kwargs)
    anchor = torch.zeros((), requires_grad=True)
    return _Refuses.apply(reason, result, anchor) if isinstance(result, Tensor) else None


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reason: str, result: Tensor, anchor: Tensor) -> Tensor:
        ctx.reason = reason
        ctx.set_materialize_grads(False)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:  # two passes go through all outputs, also where nothing comes back
            raise ComparesSamples(ctx.reason)
        return None, None, None
