"""Buffers that forward changes: what they take of samples gets no noise, so they are refused.

Frozen parameters are as good a place to remember samples in, and are looked at like buffers.

A buffer is refused because forward changes it, not because it is there:

* Writing in place is refused whatever is written. Every forward compares PyTorch's counters of
  changes, which waits for no device. Writing through ``x.data`` is not counted: for that, the first
  look at the model compares values: of frozen parameters, of which a copy may not fit, their sums.
* A buffer that is assigned anew may be a constant that is made when it is needed: a mask, a table
  of angles that grows with the sequence. It passes if it has the same bits as before; or if the
  model, run again from the state in which the forward began, makes the same bits of other samples,
  in inputs of the same shapes.
* Spectral normalization writes the vectors of its power iteration, which reads the weight alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping._compat import SPECTRAL_NORM
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_trace import MODELS_OWN, put_back, random_state, untouched
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.positions import other_tokens
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import NotServed, module_at

#: A module and the name of one of its buffers, or frozen parameters.
_Place = tuple[nn.Module, str]

_NONE: dict[str, Tensor | None] = {}

_BUFFERS, _PARAMETERS = operator.attrgetter("_buffers"), operator.attrgetter("_parameters")

_IN_PLACE = "writes into it in place"


@dataclass
class _Before:
    """A module as a forward found it."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    parameters: dict[str, nn.Parameter | None]
    versions: dict[str, int] | None  # None: what is written is of weights alone


class BufferWatch:
    """Looks at the buffers and frozen parameters of a wrapped model, ``root``, before and after its
    forward."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        self.root, self.session = root, session
        #: While a forward runs: every module that has buffers, or frozen parameters.
        self._before: list[_Before] | None = None
        #: All parameters, as that forward found them.
        self._parameters: list[Tensor | None] = []
        #: Found before the first step: a buffer that forward writes in place.
        self._written: _Place | None = None
        #: Which of these modules have frozen parameters, while these are trainable.
        self._has_frozen: list[bool] = []
        self._known: tuple[Any, Any] = (None, None)

    def before_forward(
        self, modules: Sequence[nn.Module], trainable: list[nn.Parameter] | None
    ) -> None:
        """Note what is there. ``trainable``: the same list again while no parameter changes."""
        self._written = None
        self._before = []
        if self._known[0] is not modules or self._known[1] is not trainable:
            self._has_frozen = [bool(_frozen(module)) for module in modules]
            self._known = modules, trainable
        self._parameters = _parameters(modules)
        of_all = map(operator.or_, map(bool, map(_BUFFERS, modules)), self._has_frozen)
        for module in compress(modules, of_all):  # most have none
            buffers, frozen = module._buffers, _frozen(module)
            spectral = type(module) is SPECTRAL_NORM
            versions = None if spectral else _versions(buffers) | _versions(frozen)
            before = _Before(module, vars(module).copy(), buffers.copy(), frozen, versions)
            self._before.append(before)

    def rehearsed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, which runs on copies of buffers and notes one, or a frozen parameter, that it
        writes in place."""
        places = [
            (before.module, name, buffer)
            for before in self._before or ()
            if before.versions is not None
            for name, buffer in before.buffers.items()
            if buffer is not None and buffer.layout == torch.strided
        ]
        frozen = [
            (before.module, name, param)
            for before in self._before or ()
            for name, param in before.parameters.items()
            if type(param) is nn.Parameter and param.layout == torch.strided and not param.is_meta
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            copies = [module._buffers[name] for module, name, _ in places]
            sums = [_sum_of_bits(param) for _, _, param in frozen]
            output = forward(*args, **kwargs)
            for copy, (module, name, original) in zip(copies, places, strict=True):
                if self._written is None and not _same_bits(copy, original):
                    self._written = module, name
            for total, (module, name, param) in zip(sums, frozen, strict=True):
                if self._written is None and not torch.equal(total, _sum_of_bits(param)):
                    self._written = module, name
            places.clear()  # one run shows it
            frozen.clear()
            return output

        return run

    def refuse_rehearsed(self) -> None:
        """Refuse what was seen to be written in place before the first step."""
        if self._written is not None:
            self._refuse(*self._written, _IN_PLACE)

    def after_forward(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise ``NotImplementedError`` for buffers and frozen parameters that this forward, of
        these arguments, has changed and that are no constants."""
        found, self._before = self._before, None
        if found is None:
            return
        olds: dict[nn.Module, dict[str, Tensor | None]] = {}
        for before in found:
            olds[before.module] = before.buffers
            versions = before.versions
            if versions is None:
                continue
            if (later := _versions(before.buffers) | _versions(before.parameters)) != versions:
                changed = [name for name in later if later[name] != versions[name]]
                self._refuse(before.module, changed[0], _IN_PLACE)
        doubtful: list[_Place] = []
        of_all = [*map(_BUFFERS, modules)]
        news = dict(compress(zip(modules, of_all, strict=True), of_all))
        for module in {**olds, **news}:
            new, old = news.get(module, _NONE), olds.get(module, _NONE)
            doubtful += self._assigned(module, new, old)
        was, there_now = self._parameters, _parameters(modules)
        if len(was) != len(there_now) or not all(map(operator.is_, was, there_now)):
            known = {id(param) for param in was}
            frozen = {before.module: before.parameters for before in found}
            for module in modules:
                before_it, there = frozen.get(module, {}), module._parameters
                now = {name: p for name, p in _frozen(module).items() if id(p) not in known}
                now |= {name: there.get(name) for name in before_it}
                doubtful += self._assigned(module, now, before_it)
        if doubtful:
            self._refuse_of_samples(doubtful, found, args, kwargs)

    def _assigned(
        self, module: nn.Module, new: Mapping[str, Tensor | None], old: Mapping[str, Tensor | None]
    ) -> Iterator[_Place]:
        """Where something else is than was there, with other bits."""
        for name in new.keys() | old.keys():
            if new.get(name) is old.get(name):
                continue
            if self.session.captured is not None:
                self._refuse(module, name, "assigns it anew while a CUDA graph is captured")
            if not _same_bits(new.get(name), old.get(name)):
                yield module, name

    # -- assigned anew: a constant, or of samples? ----------------------------------------------

    def _refuse_of_samples(
        self,
        places: list[_Place],
        found: list[_Before],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Run the model again on other samples: it must make the same in these places."""
        samples = Samples(args, kwargs, self.session.batch_axis)
        if not samples.count:
            return  # no samples in it
        made = [_at(place) for place in places]
        told = False
        for inputs in _others(samples):
            before, after = batched_inputs(args, kwargs), batched_inputs(*inputs)
            if all(_same_bits(x, y) for x, y in zip(before, after, strict=True)):
                continue
            told = True
            try:
                again = self._run_again(places, found, *inputs)
            except torch.OutOfMemoryError:
                raise
            except MODELS_OWN as error:
                words = f"could not be run on other samples ({type(error).__name__}: {error})"
                self._refuse(*places[0], f"assigns it anew, and {words}")
            for place, one, other in zip(places, made, again, strict=True):
                if not _same_bits(one, other):
                    self._refuse(*place, "assigns it anew, with other values for other samples")
        if not told:
            self._refuse(*places[0], "assigns it anew, and its inputs hold no rows to be changed")

    def _run_again(
        self,
        places: list[_Place],
        found: list[_Before],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Tensor | None]:
        """What the forward makes in these places where it begins as it did, with other inputs."""
        now = [(module._parameters, module._parameters.copy()) for module in self.root.modules()]
        try:
            return self._made_again(places, found, args, kwargs)
        finally:
            for parameters, before in now:
                parameters.clear()
                parameters.update(before)

    def _made_again(
        self,
        places: list[_Place],
        found: list[_Before],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Tensor | None]:
        devices = {x.device for x in self.session.state() if x.is_cuda}
        with (
            torch.no_grad(),
            self.session.bypass(),
            untouched(self.root),
            random_state(list(devices), seed=0),
        ):
            for module, name in places:
                module._buffers.pop(name, None)
                module._parameters.pop(name, None)
            for before in found:
                before.module._parameters.update(before.parameters)
                copies = {
                    name: None if buffer is None else buffer.detach().clone()
                    for name, buffer in before.buffers.items()
                }
                put_back(before.module, before.attributes, copies)
            self.root.forward(*args, **kwargs)
            return [_at(place) for place in places]

    def _refuse(self, module: nn.Module, name: str, what: str) -> NoReturn:
        path = next((path for path, m in self.root.named_modules() if m is module), "")
        kind = "buffer" if name in module._buffers else "frozen parameter"
        raise NotServed(
            f"{path or 'the model'} ({type(module).__name__}): its {kind} {name!r} is changed by "
            f"forward, which {what}. Forward may read {kind}s only: what it keeps of samples "
            "there (running statistics, loads of experts, codebooks) gets no noise, and is saved "
            f"with the model. Use a layer without such a {kind} (nn.GroupNorm has no statistics), "
            "put this module into eval mode if it changes nothing then, or make the value outside "
            f"of forward, of what is public. strict=False leaves {kind}s alone, and what they "
            f"keep of samples is not private.\n    {module_at(path)}.eval()"
        )


def _parameters(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """The parameters of all these modules, one after the other."""
    return [*chain.from_iterable(map(dict.values, filter(None, map(_PARAMETERS, modules))))]


def _frozen(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters that are frozen."""
    named = module._parameters.items()
    return {name: p for name, p in named if p is not None and not p.requires_grad}


def _at(place: _Place) -> Tensor | None:
    module, name = place
    return module._buffers.get(name, module._parameters.get(name))


def _sum_of_bits(x: Tensor) -> Tensor:
    """Of the tensor's bits, as integers of 64 of them: ``[2]``, with the bytes that are left over.
    Another sum, in all likelihood, wherever values were changed."""
    found = _plain(x).view(-1).view(torch.uint8)
    if found.storage_offset() % 8:
        found = found.clone()
    whole = len(found) - len(found) % 8  # bytes alone are hundreds of times as slow
    return torch.stack([found[:whole].view(torch.int64).sum(), found[whole:].sum()])


def _versions(buffers: Mapping[str, Tensor | None]) -> dict[str, int]:
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
    return torch.equal(*[_plain(each).view(-1).view(torch.uint8) for each in (x, y)])


def _plain(x: Tensor) -> Tensor:
    """The values as they lie in memory, without gaps."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _others(samples: Samples) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
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
