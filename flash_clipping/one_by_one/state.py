"""What a model holds, apart for each sample: no sample finds what another has left.

A sample runs on copies of all that modules hold, made by ``copy.deepcopy``. Modules are themselves
in every copy, so that hooks and closures that know them are right; tensors are shared.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from traceback import walk_tb
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import SPECTRAL_NORM, pytree
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.errors import FlashClippingError

#: What each holder held at one time, by names.
Content: TypeAlias = list[dict[str, Any]]

#: Values of these types never change; and containers of these are copied at once if they are empty.
_CONSTANT = frozenset((bool, int, float, complex, str, bytes, type(None), type, type(lambda: 0)))
_PLAIN = frozenset((dict, OrderedDict, list, set))

#: Packages whose objects are no state of a model: generators go on, and trainers hold the world.
_NO_STATE = (
    *("torch._", "torch.cuda.", "torch.distributed.", "torch.utils.data.", "random."),
    *("numpy.random.", "logging.", "threading.", "_thread.", "triton.", "tokenizers."),
    *("opacus.", "flash_clipping.", "lightning.", "pytorch_lightning."),
)


class _Shared(TorchFunctionMode):
    """Copies share tensors, which are noted with the counts of changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **kwargs or {})
        x: Any = args[0]
        self.seen.setdefault(id(x), (x, -1 if x.is_inference() else x._version))
        return x


class State:
    """What a forward may leave on a model: the attributes of its modules and parameters, what is
    reached from these, and containers of its classes.

    Args:
        root: the model.
        shared: objects that are themselves in all copies.
    """

    def __init__(self, root: nn.Module, shared: Iterable[Any]):
        found = dict.fromkeys(root.modules())
        itself = {id(x): x for x in shared}
        for value in chain.from_iterable([vars(module).values() for module in found]):
            for leaf in _leaves(value) if id(value) not in itself else ():
                if isinstance(leaf, nn.Module):  # in a list, so that they are no children
                    found = {**found, **dict.fromkeys(leaf.modules())}
                elif _is_constant(leaf):
                    itself[id(leaf)] = leaf
        params = dict.fromkeys(p for m in found for p in m._parameters.values() if p is not None)
        self.buffers = [x for m in found for x in m._buffers.values() if x is not None]
        # A power iteration is of the weight alone, and one step further with every run.
        self._vectors = [x for m in found if type(m) is SPECTRAL_NORM for x in m.buffers()]
        self._itself = itself | {id(x): x for x in chain(found, params, self.buffers)}
        self.holders: Content = [*map(vars, found), *[held for held in map(vars, params) if held]]
        of_class = {kind: _of_class(kind) for kind in {*map(type, found)}}
        self._of_classes = [of_class[type(module)] for module in found]
        self._tensors = _Shared()

    def now(self) -> Content:
        """What is there now."""
        return [holder.copy() for holder in self.holders]

    def swap(self, content: Content) -> Content:
        """Let this be there; what was there."""
        before = self.now()
        for holder, own in zip(self.holders, content, strict=True):
            holder.clear()
            holder.update(own)
        return before

    @contextmanager
    def holding(self, content: Content) -> Iterator[None]:
        """Let this be there for a while."""
        before = self.swap(content)
        try:
            yield
        finally:
            self.swap(before)

    def copied(
        self, instead: Mapping[int, Tensor], last: bool = False
    ) -> tuple[Content, Callable[[Any], Any]]:
        """Copies of what is there, with these in the place of tensors, by whose ``id`` they are
        given; and what copies arguments. ``last``: nobody comes after it, and nothing is copied but
        what holds such tensors."""
        content = self.now()
        if last:
            return self._replaced(content, instead)[0], lambda value: value
        memo = self._itself | {id(x): x.clone() for x in self._vectors} | dict(instead)
        for held, of_class in zip(content, self._of_classes, strict=False):
            held |= {name: x for name, x in of_class.items() if name not in held}
        for held in content:
            for name, value in held.items():
                if _is_empty(value):  # most hooks
                    held[name] = value.copy()
                elif not _is_constant(value):
                    held[name] = self.copy(value, memo, name)
        return content, partial(self.copy, memo=memo)

    def back(
        self, content: Content, params: Mapping[int, Tensor]
    ) -> tuple[Content, dict[tuple[int, str], Any]]:
        """What a run has left, with parameters in the place of their aliases, by whose ``id`` they
        are given; and what requires grad there, by the number of its holder and name.

        Raises:
            FlashClippingError: the run wrote into a tensor that all samples share.
        """
        for x, version in self._tensors.seen.values():
            if version not in (-1, x._version):
                raise FlashClippingError(
                    "FC185 the model: in mode='one_by_one' forward wrote in place into a tensor of "
                    f"shape {[*x.shape]} that an attribute holds, where the next sample would find "
                    "it. Assign another one:\n"
                    "    self.value = self.value + change"
                )
        return self._replaced(content, params)

    def _replaced(
        self, content: Content, instead: Mapping[int, Tensor]
    ) -> tuple[Content, dict[tuple[int, str], Any]]:
        """This with others in the place of tensors; what holds none of these is not copied. And
        what requires grad."""
        memo = self._itself | dict(instead)
        found, kept = [held.copy() for held in content], {}
        tensors: dict[int, list[Tensor]] = {}
        for place, held in enumerate(content):
            for name, value in held.items():
                if name == "_modules" or _is_empty(value) or _is_constant(value):
                    continue
                if id(value) not in tensors:
                    tensors[id(value)] = tensors_in(value)
                others = [x for x in tensors[id(value)] if id(x) not in instead]
                if len(others) < len(tensors[id(value)]):
                    found[place][name] = self.copy(value, memo, name)
                if any(x.requires_grad and not isinstance(x, nn.Parameter) for x in others):
                    kept[place, name] = found[place][name]
        return found, kept

    def copy(self, value: Any, memo: dict[int, Any], name: str = "") -> Any:
        """A copy of what an attribute holds, or an argument."""
        try:
            with self._tensors:
                return copy.deepcopy(value, memo)
        except Exception as error:
            frames = [frame for frame, _ in walk_tb(error.__traceback__)]
            within = [x.f_locals for x in frames if x.f_code is copy.deepcopy.__code__]
            kind = type(within[-1].get("x", value)).__name__
            raise FlashClippingError(
                f"FC185 the model: {name or 'an argument'!r} holds a {kind} that cannot be copied "
                f"({type(error).__name__}: {error}), so that the next sample would find what this "
                "one leaves there. Let the class that holds it say that samples may share it, if "
                "forward leaves nothing there:\n"
                "    def __deepcopy__(self, memo): return self"
            ) from error


def _of_class(kind: type) -> dict[str, Any]:
    """Containers and objects that a class of modules holds for all of them."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base is object or base.__module__.startswith("torch."):
            continue
        if vars(base).get("__slots__"):
            raise FlashClippingError(
                f"FC185 the model: found a {kind.__name__} with __slots__, where in "
                "mode='one_by_one' the next sample would find what this one leaves. Use attributes."
            )
        found |= {
            name: value
            for name, value in vars(base).items()
            if not (hasattr(type(value), "__get__") or name.startswith(("__", "_abc_")))
            if not _is_constant(value)
        }
    return found


def _is_empty(value: Any) -> bool:
    return type(value) in _PLAIN and not value


def _is_constant(value: Any) -> bool:
    if type(value) in _CONSTANT or isinstance(value, Tensor | nn.Module):
        return type(value) in _CONSTANT
    return f"{type(value).__module__}.".startswith(_NO_STATE)


def _leaves(value: Any) -> list[Any]:
    """What is in containers; of methods, whose they are."""
    if _is_constant(value) or _is_empty(value):
        return []
    return [getattr(x, "__self__", x) for x in pytree.tree_leaves(value)]
