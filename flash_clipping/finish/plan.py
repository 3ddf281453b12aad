"""The execution plan of a step, computed once per layout: which layers share a launch.

Launches and their arguments follow from shapes, dtypes and strides. Only addresses differ from step
to step, and small models wait for the host, so a session remembers its plans. A plan holds no
tensor of a step.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

from torch import Tensor, nn

from flash_clipping._compat import laid_out_like
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad, SumGrad
from flash_clipping.ops.rows import WIDE
from flash_clipping.ops.runtime.shapes import ALIGNMENT, LaunchCache


@dataclass(slots=True)
class Plan:
    """Parameters, by their ``id``, in the groups in which they are handled.

    Attributes:
        trainable: all that are trainable, in the model's order.
        one_device: whether they are all on one device.
        linear: linear maps that read one input.
        sums: sums over positions that one launch adds up.
        vectors: small gradients of one shape that are stacked.
        stored: other gradients that are kept as they are.
        others: everything else, one by one.
        unreached: trainable parameters that backward did not reach; known once norms are.
        rows_of: whose norms were taken, in their order; likewise.
        order: row of each trainable parameter's norms among these.
        products: linear maps whose clipped sums are taken together, of the parameters that were
            asked for; likewise.
        memos: what operations keep, by the name of the operation.
    """

    trainable: list[int]
    one_device: bool
    linear: list[list[int]] = field(default_factory=list)
    sums: list[list[int]] = field(default_factory=list)
    vectors: list[list[int]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    rows_of: list[int] = field(default_factory=list)
    order: Tensor | None = None
    products: dict[tuple[int, ...] | None, list[list[int]]] = field(default_factory=dict)
    memos: defaultdict[Hashable, LaunchCache] = field(default_factory=lambda: defaultdict(dict))


class Layout(NamedTuple):
    """What a plan depends on.

    Attributes:
        named: what goes by its value: parameters by their ``id``, types of factors, which of their
            operands are one tensor or lie at one address, and whether addresses are aligned.
        tensors: operands and parameters, each once: of two steps with one plan these agree in
            dtype, shape, strides and device.
    """

    named: Hashable
    tensors: list[Tensor]


class Plans:
    """The plans that were used last, by layout."""

    #: Poisson batches come in some 64 sizes; ``two_pass`` has a plan for each few layers.
    SIZE = 256

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, tuple[Callable[..., bool], Plan]] = OrderedDict()

    def find(self, layout: Layout) -> Plan | None:
        """The plan for a layout."""
        found = self._plans.get(layout.named)
        if found is None or not found[0](*layout.tensors):
            return None
        self._plans.move_to_end(layout.named)
        return found[1]

    def keep(self, layout: Layout, plan: Plan) -> None:
        """Remember a plan, in the place of one that differs in strides or later sizes."""
        self._plans[layout.named] = laid_out_like(layout.tensors), plan
        self._plans.move_to_end(layout.named)
        if len(self._plans) > self.SIZE:
            self._plans.popitem(last=False)


def layout_of_step(
    keys: Sequence[int],
    factors: Sequence[PerSampleGrad],
    params: Sequence[nn.Parameter],
    *others: Hashable,
) -> Layout:
    """What a plan depends on.

    Args:
        keys, factors: every use of a parameter: its ``id`` and what came of it.
        params: the trainable parameters.
        others: whatever else it depends on.
    """
    of_factors: list[tuple[Any, ...]] = []
    for factor in factors:
        of_factors += (factor.operands(),)
    operands = [*chain.from_iterable(of_factors)]
    # `map` costs half of a comprehension, and there are hundreds of tensors.
    are_tensors = [*map(isinstance, operands, repeat(Tensor))]
    tensors = [*compress(operands, are_tensors)]
    ids = [*map(id, tensors)]
    once = dict(zip(ids, tensors, strict=True))
    place = dict(zip(once, range(len(once)), strict=True))
    addresses = [*map(Tensor.data_ptr, once.values())]
    # Which of them lie at one address: the last of these stands for all.
    last = dict(zip(addresses, range(len(addresses)), strict=True))
    named = (
        tuple(keys),
        tuple(map(type, factors)),
        tuple(map(len, of_factors)),
        tuple(are_tensors),
        tuple(compress(operands, map(operator.not_, are_tensors))),
        tuple(map(place.__getitem__, ids)),
        tuple(map(last.__getitem__, addresses)),
        tuple(map(operator.mod, addresses, repeat(ALIGNMENT))),
        tensors[0].shape if tensors else None,
        tuple(map(id, params)),
        *others,
    )
    once.update(zip(map(id, params), params, strict=True))
    return Layout(named, [*once.values()])


def plan_of(
    factors: Mapping[int, PerSampleGrad], params: Sequence[nn.Parameter], paths: Mapping[int, str]
) -> Plan:
    """Put factors that can be handled in one go together.

    Raises:
        FlashClippingError: a factor is of a frozen parameter, or does not fit together.
    """
    trainable = {id(param): param for param in params}
    if frozen := paths.keys() - trainable.keys():
        names = ", ".join(sorted({paths[key] for key in frozen}))
        raise FlashClippingError(
            f"FC505 {names}: found a parameter that was trainable in forward and is frozen in "
            "backward; its part of the norms would be missing. Change requires_grad between "
            "steps, before forward()."
        )
    devices = {param.device for param in params}
    plan = Plan(trainable=list(trainable), one_device=len(devices) == 1)
    kind: Any  # what members of one group have in common
    linear: dict[Any, list[int]] = {}
    sums: dict[Any, list[int]] = {}
    vectors: dict[Any, list[int]] = {}
    for key, factor in factors.items():
        if isinstance(factor, LinearGrad):
            _check_operands(factor, paths[key])
            linear.setdefault(factor.shares_input_with(), []).append(key)
        elif isinstance(factor, SumGrad):
            rows, x_hat = factor.rows_BTn, factor.normalized
            # Sums that have none go with those whose x̂ is of the rows' dtype, as it mostly is.
            x_dtype = rows.dtype if x_hat is None else x_hat.x_BTn.dtype
            wide = rows.shape[2] > WIDE
            kind = (rows.shape[:2], rows.dtype, rows.device, trainable[key].dtype, x_dtype, wide)
            sums.setdefault(kind, []).append(key)
        elif not isinstance(factor, DenseGrad):
            plan.others.append(key)
        elif factor.sq_parts_Bn is None and factor.grads.shape[1:].numel() <= DenseGrad.SMALL:
            grads = factor.grads
            kind = (grads.dtype, grads.device, trainable[key].dtype, grads.shape)
            vectors.setdefault(kind, []).append(key)
        else:
            plan.stored.append(key)
    plan.linear, plan.sums = list(linear.values()), list(sums.values())
    for alike in vectors.values():
        if len(alike) > 1:
            plan.vectors.append(alike)
        else:
            plan.stored += alike
    return plan


def _check_operands(factor: LinearGrad, path: str) -> None:
    A, G = factor.A_BTd, factor.G_BTp
    if A.dim() != 3 or G.dim() != 3 or G.shape[:2] != A.shape[:2] or A.device != G.device:
        raise FlashClippingError(
            f"FC162 {path}: its rule returned a LinearGrad of A_BTd {tuple(A.shape)} on {A.device} "
            f"and G_BTp {tuple(G.shape)} on {G.device}; expected [B, T, d] and [B, T, p] of the "
            "same B and T on one device. Flatten the axes between batch and features of both alike."
        )
