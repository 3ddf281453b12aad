"""Privacy units other than rows of the batch: who is told which unit each row belongs to.

Shape suffixes: ``R`` rows of the batch, ``T`` positions of a row, ``M`` rows, or positions of all
rows, ``U`` units.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.errors import FlashClippingError, InvalidType
from flash_clipping.factors import PerSampleGrad, UnitMap
from flash_clipping.ops.runtime.checks import check_on_device


@dataclass(frozen=True)
class Offsets:
    """The name of a forward argument that says where documents begin.

    Documents lie end to end in one row of ``T`` positions. The argument is ``[U + 1]``, integers:
    where each of U documents begins, and where the last ends, as ``flash-attention`` has it
    (``cu_seqlens``). Positions behind the last belong to none.
    """

    name: str


class Units:
    """Which unit each row of one call of the model belongs to.

    Args:
        index: ``[R]``, or ``[R, T]`` for positions; int64; -1 for none.
        count: how many units there are.
        given: the tensor that said so.
        in_order: whether rows are known to lie in the order of their units, those of none last.

    Attributes:
        shape: ``(R,)`` or ``(R, T)``.
        map: the same for rows as layers record them.
    """

    def __init__(self, index: Tensor, count: int, given: Tensor, in_order: bool = False):
        self.shape, self.count = tuple(index.shape), count
        self.map = UnitMap(index.flatten(), count, in_order)
        self._given, self._version = weakref.ref(given), given._version
        #: Where a position was seen not to be finite, device by device.
        self._lost: dict[torch.device, Tensor] = {}
        #: Other calls of the model with the same map, whose gradients are one with this one's.
        self._also: Sequence[Units] = ()

    @property
    def by_position(self) -> bool:
        """Whether units are parts of rows."""
        return len(self.shape) == 2

    def same_as(self, other: Units) -> bool:
        """Whether it is known, without waiting for the device, that the two maps are one."""
        if self.shape != other.shape or self.count != other.count:
            return False
        mine, others = self.map.index_M, other.map.index_M
        if mine.device.type == others.device.type == "cpu":
            return torch.equal(mine, others)
        given = self._given()
        same = given is not None and given is other._given()
        return same and self._version == other._version

    def scale_of_mean(self) -> float:
        """What a row's own gradient is, in terms of what arrives from a mean over rows; parts of
        rows share any mean, and are refused."""
        if not self.by_position:
            return float(self.shape[0])
        raise FlashClippingError(
            'FC276 the model: units are parts of rows, and loss_reduction="mean". A mean over '
            "tokens makes the gradient of one document depend on how many tokens the others have. "
            'Wrap the model with loss_reduction="sum" and add up the losses of positions; or use '
            "the engine's criterion, which does."
        )

    def lost_on(self, device: torch.device) -> Tensor:
        """``[N]`` of uint8: whoever finds that a position is not finite writes 1 there."""
        if device not in self._lost:
            self._lost[device] = torch.zeros(len(self.map), dtype=torch.uint8, device=device)
        return self._lost[device]

    def forget_lost(self) -> None:
        """What was found so far was found of other documents."""
        self._lost = {}

    def without_lost(self, norms_PB: Tensor) -> Tensor:
        """Norms ``[P, U]``, infinite for units with a position that is not finite."""
        for units in (self, *self._also):
            for device, lost_N in units._lost.items():
                found_U1 = self.map.on(device).sums(lost_N.float().unsqueeze(1))
                is_lost_U = (found_U1.squeeze(1) > 0).to(norms_PB.device, non_blocking=True)
                norms_PB = norms_PB.masked_fill(is_lost_U, torch.inf)
        return norms_PB

    def of_units(self, path: str, factor: PerSampleGrad, device: torch.device) -> PerSampleGrad:
        """What was recorded row by row, for units; there must be as many rows as in the map."""
        if factor.batch_size != len(self.map):
            rows = " x ".join(map(str, self.shape))
            raise FlashClippingError(
                f"FC270 {path}: found {factor.batch_size} rows along the batch axis, but the map "
                f"of rows to units is for {rows}. The batch must be the first axis of the input of "
                "every layer that has parameters: keep other axes (windows, positions) behind it, "
                "or declare modules whose rows are parts of rows (folded_modules=[...])."
            )
        index_M = self.map.index_M
        if index_M.device.type != "cpu" and device.type == "cpu":
            raise FlashClippingError(
                f"FC270 {path}: its parameters are on the CPU, and the map of rows to units is on "
                f"{index_M.device}. Give the map on the CPU, from where it goes to every device."
            )
        return factor.by_units(self.map.on(device))


class UnitsOfCalls:
    """Finds the units of a wrapped model's calls.

    Args:
        sample_of: the name of the argument of the model's forward that holds the map, or where
            documents begin; ``None``: rows are samples, or a loader announces the units.
        batch_first: whether rows are axis 0 of the model's inputs.

    Attributes:
        name: of the argument.
        from_loader: whether the map comes with the loader's batch.
        are_items: whether the units of a batch must be exactly what the loader drew.
    """

    def __init__(self, sample_of: str | Offsets | None, batch_first: bool):
        if sample_of is not None and not isinstance(sample_of, str | Offsets):
            raise InvalidType(
                f"FC280 Documents: found {type(sample_of).__name__}; expected the name of an "
                "argument of the model's forward, or flash_clipping.Offsets(name)."
            )
        self.sample_of = sample_of
        self.name = sample_of.name if isinstance(sample_of, Offsets) else sample_of
        self.batch_first = batch_first
        self.from_loader = False
        self.are_items = False
        #: Where units are parts of rows: layers that were rehearsed.
        self.proven: set[str] = set()

    @property
    def are_known(self) -> bool:
        """Whether units are something else than rows of the batch."""
        return self.sample_of is not None or self.from_loader

    def argument(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The argument that holds the map, and the keywords that are the model's own."""
        name = self.name
        if name is None:
            return None, kwargs
        signature, takes_any = _signature(root)
        while takes_any and name not in signature.parameters:
            inner = getattr(root, "module", None)  # of Opacus' data parallelism, say
            if not isinstance(inner, nn.Module):
                break
            root = inner
            signature, takes_any = _signature(root)
        if name in signature.parameters:
            try:
                bound = signature.bind_partial(*args, **kwargs).arguments
            except TypeError:
                return kwargs.get(name), kwargs  # the forward itself will raise it
            return bound.get(name), kwargs
        if isinstance(self.sample_of, Offsets) and takes_any:
            return kwargs.get(name), kwargs  # attention reads it
        return kwargs.get(name), {key: kwargs[key] for key in kwargs if key != name}

    def of_call(
        self, given: Any, tensors: list[Tensor], drawn: int | None, draw: DrawnBatch | None = None
    ) -> Units:
        """The units of a call with these tensor inputs; ``given`` is the argument that holds the
        map, ``drawn`` how many units the loader drew, if that is known, ``draw`` its batch, if it
        says which unit each row is of. A map that is missing, or does not fit, is refused."""
        axis = 0 if self.batch_first else 1
        rows = next((x.shape[axis] for x in tensors if x.dim() > axis), 0)
        if self.from_loader:
            assert draw is not None and draw.unit_R is not None
            index_R = draw.in_order(draw.unit_R)
            return Units(index_R, max(1, draw.samples), index_R)
        where = f"the model: unit=Documents({self.name!r})"
        if not isinstance(given, Tensor) or given.dtype not in INTEGERS:
            found = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise FlashClippingError(
                f"FC270 {where}: found {found}; expected an integer tensor with the unit of every "
                f"row, [{rows}], or of every position. Pass it as an argument by this name in "
                "every call that is trained on."
            )
        if given.device.type == "meta":
            raise FlashClippingError(f"FC270 {where}: found a tensor without values, on meta.")
        if isinstance(self.sample_of, Offsets):
            flat = bool(tensors) and tensors[0].dim() == 1
            if rows != 1 and not flat:  # [T], or one row
                raise FlashClippingError(
                    f"FC271 {where}: found a batch of {rows} rows; expected one, in which "
                    "documents lie end to end. For several rows give the unit of every position, "
                    "[R, T]."
                )
            positions = tensors[0].shape[0] if flat else _positions(tensors, 1)
            return self._of_offsets(where, given, positions, drawn)
        positions = _positions(tensors, rows) if given.dim() == 2 else None
        expected = (rows,) if given.dim() != 2 else (rows, positions)
        if tuple(given.shape) != expected:
            raise FlashClippingError(
                f"FC270 {where}: found a tensor of shape {tuple(given.shape)} for a batch of "
                f"{rows} rows; expected [{rows}], or [{rows}, positions] as the model's own inputs "
                "have."
            )
        return self._checked(where, given, drawn)

    def _checked(self, where: str, given: Tensor, drawn: int | None) -> Units:
        """The map, with its values in range."""
        if given.dim() == 2 and not self.batch_first:
            raise FlashClippingError(
                f"FC274 {where}: a map of positions, [R, T], and batch_first=False. Give the model "
                "its batch on the first axis."
            )
        # A copy: the map is read in backward, and the tensor is the user's.
        index = given.detach().to(torch.int64, copy=True)
        if drawn is not None:
            count = drawn
        elif index.device.type == "cpu":
            count = int(index.max()) + 1 if index.numel() else 0
        elif index.dim() == 1:
            count = len(index)  # at most; units without rows have a norm of 0
        else:
            raise FlashClippingError(
                f"FC270 {where}: found a map of positions on {index.device}, and nobody said how "
                "many units there are: looking would wait for the device. Call "
                "module.expect_samples(n) before the forward, or give the map on the CPU."
            )
        count = max(count, 0)
        told = f", as expect_samples or the loader said {drawn} units" if drawn is not None else ""
        check_on_device(
            (index >= -1).logical_and(index < count).all(),
            f"FC272 {where}: found units outside of -1 to {count - 1}{told}. Number the units of a "
            "batch from 0, and give rows of none -1.",
        )
        if self.are_items and drawn is not None:  # each is a unit, and the other way round
            bins = index.flatten().masked_fill(index.flatten() < 0, drawn)
            present = torch.zeros(drawn + 1, dtype=torch.bool, device=index.device)
            present.index_fill_(0, bins, True)
            check_on_device(
                present[:drawn].all(),
                f"FC273 {where}: the loader drew {drawn} items one by one, and the map has fewer "
                "units: items were joined, or left out, and epsilon would be too small. Make every "
                "item of the dataset a unit; or give make_private unit=Users(ids), the "
                "owner of every row of the dataset.",
            )
        return Units(index, count, given)

    def _of_offsets(
        self, where: str, given: Tensor, positions: int | None, drawn: int | None
    ) -> Units:
        """The unit of every position, from where units begin."""
        if given.dim() != 1 or not len(given):
            raise FlashClippingError(
                f"FC271 {where}: found a tensor of shape {tuple(given.shape)}; expected [U + 1]: "
                "where each of U documents begins, and where the last ends."
            )
        if positions is None:
            raise FlashClippingError(
                f"FC271 {where}: found no input of the model with an axis of positions; expected "
                "[1, T, ...] or [T]."
            )
        offsets = given.detach().to(torch.int64)
        count = len(offsets) - 1
        if self.are_items and drawn not in (None, count):
            raise FlashClippingError(
                f"FC273 {where}: found {count} documents, but the loader drew {drawn} items one by "
                "one. Make every item of the dataset one document."
            )
        check_on_device(
            (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= positions),
            f"FC271 {where}: found offsets that do not begin at 0, fall, or go beyond the "
            f"{positions} positions of the batch.",
        )
        places_T = torch.arange(positions, device=offsets.device)
        index_T = torch.searchsorted(offsets, places_T, right=True) - 1
        index_T = index_T.masked_fill(index_T >= count, -1)
        return Units(index_T.unsqueeze(0), count, given, in_order=True)


#: Dtypes of maps.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _signature(module: nn.Module) -> tuple[inspect.Signature, bool]:
    """That of a module's forward, and whether it takes any keyword."""
    found = inspect.signature(module.forward)
    kinds = [param.kind for param in found.parameters.values()]
    return found, inspect.Parameter.VAR_KEYWORD in kinds


def _positions(tensors: list[Tensor], rows: int) -> int | None:
    """How many positions the rows of the model's inputs have."""
    return next((x.shape[1] for x in tensors if x.dim() > 1 and x.shape[0] == rows), None)


def the_same(of_calls: Sequence[Units | None]) -> Units | None:
    """The units of calls of the model whose gradients are one; those calls must agree on them."""
    first = of_calls[0] if of_calls else None
    for second in of_calls[1:]:
        if first is not None and second is not None and second.same_as(first):
            continue
        found = " and ".join(
            "none" if units is None else f"one of {units.count} units for {units.shape}"
            for units in (first, second)
        )
        raise FlashClippingError(
            "FC275 the model: it was called several times before backward, with different maps of "
            f"rows to units ({found}), so that it is not known which rows are of one unit. Give "
            "all these calls the same map (on a GPU the very same tensor), or all rows in one call."
        )
    if first is not None:
        first._also = [units for units in of_calls[1:] if units is not None]
    return first
