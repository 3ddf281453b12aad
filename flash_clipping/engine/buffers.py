"""Buffers that forward changes: what they take of samples gets no noise, so they are refused.

A buffer is refused because forward changes it, not because it is there:

* Writing in place is refused whatever is written. Every forward compares PyTorch's counters of
  changes, which waits for no device. Writing through ``x.data`` is not counted: for that, the first
  forward in these modes (training or not) compares values.
* A buffer that is assigned again must have the bits that it had.
* Spectral normalization writes the vectors of its power iteration, which reads the weight alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import NoReturn

import torch
from torch import Tensor, nn

from flash_clipping._compat import SPECTRAL_NORM
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import NotServed, module_at

_Buffers = dict[str, Tensor | None]

_BUFFERS, _MODE = operator.attrgetter("_buffers"), operator.attrgetter("training")


#: The buffers of a module as a forward found them; their versions, but where what is written is of
#: weights alone; and copies where values are compared.
_Before = tuple[_Buffers, dict[str, int], dict[str, Tensor]]


class BufferWatch:
    """Looks at the buffers of a wrapped model, ``root``, or of a criterion, before and after its
    forward. ``name`` is code for it."""

    def __init__(self, root: nn.Module, session: ClippingSession, name: str = "model"):
        self.root, self.session, self.name = root, session, name
        #: While a forward runs, by module.
        self._before: dict[nn.Module, _Before] | None = None
        #: Modes of modules in which values were compared, and those in which they are.
        self._compared: set[tuple[bool, ...] | None] = set()
        self._modes: tuple[bool, ...] | None = None

    def before_forward(self, modules: Sequence[nn.Module]) -> None:
        """Note what is there."""
        of_all = [*map(_BUFFERS, modules)]  # most have none
        modes = (*map(_MODE, compress(modules, of_all)),)
        is_new = modes not in self._compared and self.session.calls.captured is None
        self._modes = modes if is_new else None
        self._before = {}
        for module, buffers in compress(zip(modules, of_all, strict=True), of_all):
            versions = {} if type(module) is SPECTRAL_NORM else _versions(buffers)
            copies = {
                name: x.detach().clone()
                for name, x in (buffers.items() if is_new and versions else ())
                if x is not None and x.layout == torch.strided
            }
            self._before[module] = buffers.copy(), versions, copies

    def after_forward(self, modules: Sequence[nn.Module]) -> None:
        """Raise ``NotImplementedError`` for buffers that this forward has changed."""
        found, self._before = self._before, None
        if found is None:
            return
        of_all = [*map(_BUFFERS, modules)]
        held = dict(compress(zip(modules, of_all, strict=True), of_all))
        for module in {**found, **held}:
            old, versions, copies = found.get(module, ({}, {}, {}))
            new, now = held.get(module, {}), _versions(old)
            written = [name for name, version in versions.items() if now[name] != version]
            written += [name for name, x in copies.items() if not _same_bits(x, old[name])]
            if written:
                self._refuse(module, written[0], "writes into it in place")
            for name in new.keys() | old.keys():
                if new.get(name) is old.get(name):
                    continue
                if self.session.calls.captured is not None:
                    self._refuse(module, name, "assigns it while a CUDA graph is captured")
                if not _same_bits(new.get(name), old.get(name)):
                    line = "with torch.no_grad(): model(x)" if old.get(name) is None else ""
                    self._refuse(module, name, "assigns it, with other values", line)
        self._compared.add(self._modes)

    def _refuse(self, module: nn.Module, name: str, what: str, line: str = "") -> NoReturn:
        path = next((path for path, m in self.root.named_modules() if m is module), "")
        root, eval_mode = self.name.partition(".")[0], f"{module_at(path)}.training = False"
        raise NotServed(
            f"FC130 {path or f'the {root}'} ({type(module).__name__}): its buffer {name!r} is "
            f"changed by forward, which {what}. Forward may read buffers only: what it keeps of "
            "samples there gets no noise, and is saved with the model. strict=False leaves buffers "
            "alone, and what they keep is not private. Use a layer without such a buffer, put this "
            "module into eval mode, or make the value before, by one plain forward of the longest "
            "input:\n"
            f"    {line or eval_mode.replace('model', self.name, 1)}"
        )


def _versions(buffers: _Buffers) -> dict[str, int]:
    """How often each was changed in place, as far as PyTorch counts."""
    return {name: 0 if x is None or x.is_inference() else x._version for name, x in buffers.items()}


def _same_bits(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether these are the same; NaN is NaN. Waits for the device."""
    if x is None or y is None or x is y:
        return x is y
    if (x.shape, x.dtype, x.device, x.layout) != (y.shape, y.dtype, y.device, y.layout):
        return False
    if x.layout != torch.strided:
        return False
    if x.is_meta:  # of a module that is loaded for every forward; it holds nothing
        return True
    plain = [each.detach().resolve_conj().resolve_neg().contiguous() for each in (x, y)]
    return torch.equal(*[each.reshape(-1).view(torch.uint8) for each in plain])
