"""Parameters that a module uses which another module owns: found before the first step.

``self.dt_proj.bias.float()`` in the mixer of a state-space model, ``weight @ x`` with the weight of
a layer that is never called, a head that takes the table of an embedding by itself. The module that
uses such a parameter stands in for it as for its own (:mod:`flash_clipping.capture.proxies`).

Nothing is believed that is not seen: a use that this run did not come by is refused in backward,
by the guard of the parameter. The first look tells whether there is any such use
(:func:`until_borrowed`), so that other models are not run once more for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import around_modules, pytree
from flash_clipping.capture.factor_source import owners
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_trace import ModelsOwnError, own_errors, without_activations
from flash_clipping.capture.proof.repeatable import repeatable
from flash_clipping.capture.proxies.parameter_proxy import name_of
from flash_clipping.capture.refused_forwards import NoRenormalisation
from flash_clipping.capture.session import ClippingSession

#: Properties of a parameter that a gradient comes through.
_DERIVED = {"__get__T", "__get__mT", "__get__H", "__get__mH", "__get__real", "__get__imag"}
#: Functions that tell of a parameter only what it is like.
_DESCRIBING = {"size", "dim", "ndimension", "stride", "numel", "nelement", "is_floating_point"}
_DESCRIBING |= {"is_complex", "is_contiguous", "data_ptr", "element_size", "detach", "get_device"}
_DESCRIBING |= {"_has_compatible_shallow_copy_type", "__set__data"}  # of module.to(dtype)
_DESCRIBING |= {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}

#: Module -> modules that own parameters which it uses.
Borrowed = dict[nn.Module, list[nn.Module]]


class UsesOthers(Exception):
    """A module uses a trainable parameter of another one: this run tells nothing."""


def until_borrowed(
    root: nn.Module, forward: Callable[..., Any], serves: Callable[[nn.Module], bool]
) -> Callable[..., Any]:
    """``forward``, which runs ``root``; its first run ends (``UsesOthers``) where a module uses a
    trainable parameter of another one, before anything was computed from that parameter.
    ``serves``: whether a module's rule takes care of what is below the module."""
    is_known = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_known
        if is_known:
            return forward(*args, **kwargs)
        uses = _Uses(root, serves, stops=True)
        with uses.watched(), uses:
            output = forward(*args, **kwargs)
        is_known = True  # a run that was refused in its midst has not shown it
        return output

    return run


def find_borrowed(
    root: nn.Module,
    forward: Callable[..., Any],
    session: ClippingSession,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    serves: Callable[[nn.Module], bool],
) -> Borrowed:
    """Run the model once, as it is, and see which modules use trainable parameters of others;
    arguments as of :func:`until_borrowed`."""
    uses = _Uses(root, serves)
    tensors = [*batched_inputs(args, dict(kwargs)), *session.state()]
    devices = {x.device for x in tensors if x.is_cuda}
    try:
        with (
            repeatable(root, list(devices), seed=0, calm=True),  # layers may be skipped at random
            without_activations(),
            session.bypass(),
            NoRenormalisation(),  # the taps, which refuse it, are passed by
            uses.watched(),
            uses,
        ):
            args, kwargs = map_tensors(torch.clone, (args, kwargs), packed=True)  # it may write
            with own_errors():
                forward(*args, **kwargs)
    except ModelsOwnError:
        pass  # the forward itself will raise it
    return {user: list(found) for user, found in uses.found.items()}


class _Fetches(dict[str, Any]):
    """A module's parameters, by name, that tell when one is fetched."""

    def __init__(self, params: Mapping[str, Any], note: Callable[[Any], None]):
        super().__init__(params)
        self.note = note

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        self.note(param)
        return param


class _Uses(TorchFunctionMode):
    """Notes which running modules use parameters of others, or ``stops`` at the first one.

    A module that fetches a parameter may hand it to modules below it. It is the one that uses it:
    only there can a stand-in be fetched in its place.
    """

    def __init__(
        self, root: nn.Module, serves: Callable[[nn.Module], bool], *, stops: bool = False
    ):
        super().__init__()
        self.serves, self.stops = serves, stops
        self.modules = set(root.modules())
        self.running = [root]  # its forward is called, not the root itself
        self.found: dict[nn.Module, dict[nn.Module, None]] = {}
        #: Who has a parameter; one that is tied, several.
        self.owners: dict[int, list[nn.Module]] = {}
        #: Which modules ran when it was fetched, the last one last.
        self.fetched: dict[int, list[nn.Module]] = {}
        for module in root.modules():
            for param in module._parameters.values():
                if param is not None and param.requires_grad:
                    self.owners.setdefault(id(param), []).append(module)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Know which module runs, and which one ran when a parameter was fetched."""
        thread = threading.get_ident()

        def fetch(param: Any) -> None:
            if id(param) in self.owners and threading.get_ident() == thread:
                fetched = self.fetched.setdefault(id(param), [])
                fetched[:] = [module for module in fetched if module is not self.running[-1]]
                fetched.append(self.running[-1])

        def enter(module: nn.Module) -> None:
            if module in self.modules:
                self.running.append(module)

        def leave(module: nn.Module) -> None:
            if self.running[-1] is module and len(self.running) > 1:
                self.running.pop()

        before = {module: module._parameters for module in self.modules}
        try:
            for module, params in before.items():
                module._parameters = _Fetches(params, fetch)
            with around_modules(enter, leave):
                yield
        finally:
            for module, params in before.items():
                # fully_shard puts whole parameters in the place of shards, which may stay there.
                content = dict(module._parameters)
                params.clear()
                params.update(content)
                module._parameters = params

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            name = name_of(func)
            uses = name not in _DESCRIBING and (not name.startswith("__get__") or name in _DERIVED)
            given = [*args, *kwargs.values()]
            if any(isinstance(each, list | tuple | dict) for each in given):
                given = pytree.tree_leaves(given)
            for leaf in given:
                if id(leaf) not in self.owners:
                    continue
                # A layer with a rule computes with what it reads unseen.
                running, owning = self.running[-1], self.owners[id(leaf)]
                if uses or (running not in owning and self.serves(running)):
                    self._note(leaf)
        return func(*args, **kwargs)

    def _note(self, param: Tensor) -> None:
        owning = self.owners[id(param)]
        fetched = self.fetched.get(id(param), ())
        user = next((m for m in reversed(fetched) if m in self.running), self.running[-1])
        own = owners(user)
        if any(module in own for module in owning) or self.serves(user):
            return
        if self.stops:
            raise UsesOthers
        self.found.setdefault(user, {}).update(dict.fromkeys(owning))
