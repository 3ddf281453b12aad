"""Taps around modules that are no layers and know what layers inside need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from torch import nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.rules.opacus_layers import packed_rows
from flash_clipping.rules.registry import full_name

#: From a model that is wrapped and its session to such taps. Each does in ``__call__`` what it is
#: there for.
FINDERS: list[Callable[[nn.Module, ClippingSession], Iterable[Tap]]] = []

_T = TypeVar("_T", bound=type[Tap])


def around(*kinds: type[nn.Module] | str) -> Callable[[_T], _T]:
    """Class decorator: such taps stand around modules of these types, or of types of these full
    names."""

    def decorate(tap: _T) -> _T:
        def find(root: nn.Module, session: ClippingSession) -> Iterator[Tap]:
            for path, module in root.named_modules():
                if any(kind in kinds or full_name(kind) in kinds for kind in type(module).__mro__):
                    yield tap(module, path, None, session)

        FINDERS.append(find)
        return tap

    return decorate


@around(DPRNN, DPGRU, DPLSTM)
class _Recurrent(Tap):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with packed_rows(*args, **kwargs):
            return self.original(*args, **kwargs)
