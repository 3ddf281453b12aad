"""Buffers that forward changes: what they take of samples gets no noise, so they are refused.

A buffer is refused because forward changes it, not because it is there:

* Writing in place is refused whatever is written. Every forward compares PyTorch's counters of
  changes, which waits for no device. Writing through ``x.data`` is not counted: for that, the first
  forward in these modes (training or not) compares values.
* A buffer that is assigned anew may be a constant that is made when it is needed: a mask, a table
  of angles that grows with the sequence. It passes if it has the same bits as before; or if the
  model, run again from the state in which the forward began, makes the same bits of other samples,
  in inputs of the same shapes.
* Spectral normalization writes the vectors of its power iteration, which reads the weight alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping._compat import SPECTRAL_NORM
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_trace import (
    ModelsOwnError,
    own_errors,
    put_back,
    random_state,
    untouched,
)
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.positions import other_tokens
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import NotServed, module_at

#: A module and the name of one of its buffers.
_Place = tuple[nn.Module, str]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_NONE: dict[str, Tensor | None] = {}

_BUFFERS, _MODE = operator.attrgetter("_buffers"), operator.attrgetter("training")

_IN_PLACE = "writes into it in place"


@dataclass
class _Before:
    """A module as a forward found it."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    versions: dict[str, int] | None  # None: what is written is of weights alone
    copies: dict[str, Tensor]  # where values are compared


class BufferWatch:
    """Looks at the buffers of a wrapped model, ``root``, before and after its forward."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        self.root, self.session = root, session
        #: While a forward runs: every module that has buffers.
        self._before: list[_Before] | None = None
        #: Modes of modules in which values were compared, and those in which they are.
        self._compared: set[tuple[bool, ...] | None] = set()
        self._modes: tuple[bool, ...] | None = None

    def before_forward(self, modules: Sequence[nn.Module]) -> None:
        """Note what is there."""
        of_all = [*map(_BUFFERS, modules)]  # most have none
        held = [*compress(zip(modules, of_all, strict=True), of_all)]
        modes = (*map(_MODE, compress(modules, of_all)),)
        is_new = modes not in self._compared and self.session.captured is None
        self._modes = modes if is_new else None
        self._before = []
        for module, buffers in held:
            versions = None if type(module) is SPECTRAL_NORM else _versions(buffers)
            copies = {
                name: x.detach().clone()
                for name, x in (buffers.items() if is_new and versions is not None else ())
                if x is not None and x.layout == torch.strided
            }
            attributes = vars(module).copy()
            self._before.append(_Before(module, attributes, buffers.copy(), versions, copies))

    def after_forward(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise ``NotImplementedError`` for buffers that this forward, of these arguments, has
        changed and that are no constants."""
        found, self._before = self._before, None
        if found is None:
            return
        olds: dict[nn.Module, dict[str, Tensor | None]] = {}
        for before in found:
            olds[before.module] = before.buffers
            versions = before.versions
            if versions is not None and (now := _versions(before.buffers)) != versions:
                changed = [name for name in now if now[name] != versions[name]]
                self._refuse(before.module, changed[0], _IN_PLACE)
            for name, copy in before.copies.items():
                if not _same_bits(copy, before.buffers[name]):
                    self._refuse(before.module, name, _IN_PLACE)
        self._compared.add(self._modes)
        doubtful: list[_Place] = []
        of_all = [*map(_BUFFERS, modules)]
        news = dict(compress(zip(modules, of_all, strict=True), of_all))
        for module in {**olds, **news}:
            new, old = news.get(module, _NONE), olds.get(module, _NONE)
            for name in new.keys() | old.keys():
                if new.get(name) is old.get(name):
                    continue
                if self.session.captured is not None:
                    self._refuse(module, name, "assigns it anew while a CUDA graph is captured")
                if not _same_bits(new.get(name), old.get(name)):
                    doubtful.append((module, name))
        if doubtful:
            self._refuse_of_samples(doubtful, found, (args, kwargs))

    # -- assigned anew: a constant, or of samples? ----------------------------------------------

    def _refuse_of_samples(
        self, places: list[_Place], found: list[_Before], given: _Arguments
    ) -> None:
        """Run the model again on other samples: it must make the same buffers."""
        samples = Samples(*given, self.session.batch_axis)
        if not samples.count:
            return  # no samples in it
        made = [module._buffers.get(name) for module, name in places]
        told = False
        for inputs in _others(samples):
            before, after = batched_inputs(*given), batched_inputs(*inputs)
            if all(_same_bits(x, y) for x, y in zip(before, after, strict=True)):
                continue
            told = True
            try:
                again = self._run_again(places, found, inputs)
            except ModelsOwnError as error:
                words = f"could not be run on other samples ({error})"
                self._refuse(*places[0], f"assigns it anew, and {words}")
            for place, one, other in zip(places, made, again, strict=True):
                if not _same_bits(one, other):
                    self._refuse(*place, "assigns it anew, with other values for other samples")
        if not told:
            self._refuse(*places[0], "assigns it anew, and its inputs hold no rows to be changed")

    def _run_again(
        self, places: list[_Place], found: list[_Before], given: _Arguments
    ) -> list[Tensor | None]:
        """The buffers that the forward makes in these places of other inputs, begun as it did."""
        devices = {x.device for x in self.session.state() if x.is_cuda}
        with (
            torch.no_grad(),
            self.session.bypass(),
            untouched(self.root),
            random_state(list(devices), seed=0),
        ):
            for module, name in places:
                module._buffers.pop(name, None)
            for before in found:
                copies = {
                    name: None if buffer is None else buffer.detach().clone()
                    for name, buffer in before.buffers.items()
                }
                put_back(before.module, before.attributes, copies)
            with own_errors():
                self.root.forward(*given[0], **given[1])
            return [module._buffers.get(name) for module, name in places]

    def _refuse(self, module: nn.Module, name: str, what: str) -> NoReturn:
        path = next((path for path, m in self.root.named_modules() if m is module), "")
        raise NotServed(
            f"{path or 'the model'} ({type(module).__name__}): its buffer {name!r} is changed by "
            f"forward, which {what}. Forward may read buffers only: what it keeps of samples "
            "there (running statistics, loads of experts, codebooks) gets no noise, and is saved "
            "with the model. Use a layer without such a buffer (nn.GroupNorm has no statistics), "
            "put this module into eval mode if it changes nothing then, or make the value outside "
            "of forward, of what is public. A table that is filled once, of angles of rotary "
            "embeddings, stays as it is after one plain forward of the longest input, before the "
            "model is wrapped. strict=False leaves buffers alone, and what they "
            f"keep of samples is not private.\n    {module_at(path)}.eval()"
        )


def _versions(buffers: dict[str, Tensor | None]) -> dict[str, int]:
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


def _others(samples: Samples) -> Iterator[_Arguments]:
    """Arguments with other samples: nothing but the first, nothing but the last, and samples that
    are not in the batch."""
    for b in dict.fromkeys((0, samples.count - 1)):
        yield samples.batch([b] * samples.count)

    def other(x: Tensor) -> Tensor:
        return _other_values(x) if samples.holds(x) else x

    yield map_tensors(other, (samples.args, samples.kwargs))


def _other_values(x: Tensor) -> Tensor:
    """Others for features and tokens; masks, places of bags and labels stay."""
    if x.is_complex() or x.dim() < 1 or x.dtype == torch.bool:
        return x
    if not x.is_floating_point() and (x.dim() < 2 or len(x.unique()) < 3):
        return x
    return other_tokens(torch.zeros(len(x), dtype=torch.bool), x)
