"""Coefficients as clipped sums take them: for every parameter, on its device.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from flash_clipping.finish.plan import Plan


class Coefficients:
    """Every parameter's coefficients, ``[B]`` on its device. Parameters go by their ``id``.

    Args:
        coef: ``[B]`` for all, or ``[P, B]``.
        params: the trainable parameters, in order.
        plan: which also knows whether they are all on one device.
    """

    def __init__(self, coef: Tensor, params: Sequence[nn.Parameter], plan: Plan):
        self._of: dict[int, Tensor] = {}
        by_param = coef.dim() == 2
        is_one = not by_param and plan.one_device and coef.get_device() == params[0].get_device()
        #: The coefficients of all parameters, where one tensor holds them.
        self.one: Tensor | None = coef if is_one else None
        if is_one:
            self._of = dict.fromkeys(plan.trainable, coef)
            return
        rows = coef.unbind(0) if by_param else [coef] * len(params)
        on_device: dict[tuple[int, int], Tensor] = {}
        for key, param, row in zip(plan.trainable, params, rows, strict=True):
            place = (id(row), param.get_device())
            if place not in on_device:
                on_device[place] = row.to(param.device, non_blocking=True)
            self._of[key] = on_device[place]

    def __getitem__(self, key: int) -> Tensor:
        return self._of[key]

    def alike(self, keys: Iterable[int]) -> list[list[int]]:
        """Those of these parameters together that are clipped by the same coefficients."""
        if self.one is not None:
            found = [*keys]
            return [found] if found else []
        by_coef: dict[int, list[int]] = {}  # by id of the coefficients
        for key in keys:
            by_coef.setdefault(id(self._of[key]), []).append(key)
        return list(by_coef.values())
