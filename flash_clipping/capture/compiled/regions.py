"""All compiled parts of a wrapped model: found where PyTorch has them, and put back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flash_clipping._compat import (
    applied_to,
    as_if_compiling,
    call_of,
    compiles,
    is_compiled,
)
from flash_clipping.capture.session import ClippingSession

if TYPE_CHECKING:
    from flash_clipping.capture.no_samples import EmptyBatchForward
    from flash_clipping.capture.tap import Tap

from flash_clipping.capture.compiled.region import Region


class Regions:
    """What is compiled in a wrapped model: found where PyTorch has it, and put back.

    Args:
        root: the model.
        session, taps: its own.
    """

    def __init__(self, root: nn.Module, session: ClippingSession, taps: Sequence[Tap]):
        self.root, self.session = root, session
        self.taps = list(taps)
        self._codes: dict[type, Any] = {}
        #: Modules and attributes, with what they were before and are now.
        self._of_blocks: list[tuple[nn.Module, str, Any, Any]] = []
        #: The stand-in for the root's forward that runs the region, and what it ran before.
        self._of_root: tuple[EmptyBatchForward, Any] | None = None
        self._compiled_call: Any = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_codes={}, _compiled_call=None, _of_blocks=[])
        return state

    def as_compiled(self) -> contextlib.AbstractContextManager[None]:
        """For rehearsals, which run uncompiled: the way through the model that compiled code takes,
        where it asks whether it is compiled."""
        return as_if_compiling() if self.any_compiled else contextlib.nullcontext()

    @property
    def any_compiled(self) -> bool:
        """Whether anything of the model is compiled."""
        return self._of_root is not None or bool(self._of_blocks)

    def find(self, forward: EmptyBatchForward) -> None:
        """Take over what was compiled before, or since: the root and blocks of it.

        ``forward`` stands in for the root's forward.
        """
        root = self.root
        compiled = vars(root).get("_compiled_call_impl")
        if compiled is not None and (context := _context_of(compiled)) is not None:
            # The hooks of the root, which must not be compiled, are called by its call.
            self._compiled_call, root._compiled_call_impl = compiled, None  # type: ignore
            self._install(forward, context)
        elif is_compiled(root) and self._of_root is None:
            self._install(forward, root.dynamo_ctx)
        for path, module in root.named_modules():
            if module is root:
                continue
            self._take_over(path, module)

    def _take_over(self, path: str, module: nn.Module) -> None:
        if is_compiled(module):
            name, context = "forward", module.dynamo_ctx
        else:
            name = "_compiled_call_impl"
            context = _context_of(vars(module).get(name))
        inner = call_of(module)
        itself = getattr(inner, "__self__", module)  # without its compiled wrapper
        present = vars(module).get(name), vars(itself).get("forward")
        if context is None or inner is None or any(isinstance(x, Region) for x in present):
            return
        for tap in self._taps_in(module):
            if tap.wiring is not None or tap.rule is None:
                tap.install(as_method=True)
        if "fully_shard" in applied_to(itself):
            # Its hooks gather parameters, and break the graph. They stay outside of the region.
            self._put(module, name, None if itself is module else inner)
            module, name, inner = itself, "forward", _forward_of(itself)
        self._put(module, name, self._region(module, path, inner, context))

    def _put(self, module: nn.Module, name: str, instead: Any) -> None:
        self._of_blocks.append((module, name, vars(module).get(name), instead))
        setattr(module, name, instead)

    def compile(self, forward: EmptyBatchForward, context: Any) -> None:
        """Compile the root's forward."""
        self._install(forward, context)

    def _install(self, forward: EmptyBatchForward, context: Any) -> None:
        if self._of_root is None:
            self._of_root = forward, forward.instance_forward
        before, root = self._of_root[1], self.root
        inner = (
            call_of(root) if is_compiled(root) else before or MethodType(type(root).forward, root)
        )
        forward.instance_forward = self._region(root, "", inner, context)

    def _region(
        self, module: nn.Module, path: str, inner: Callable[..., Any], context: Any
    ) -> Region:
        fullgraph = bool(getattr(context, "fullgraph", False))
        taps = self._taps_in(module)
        for tap in taps:
            tap.compiled = True
        return Region(module, path, inner, self.session, taps, context, fullgraph, self._codes)

    def _taps_in(self, module: nn.Module) -> list[Tap]:
        inside = set(module.modules())
        return [tap for tap in self.taps if tap.layer in inside]

    def remove(self) -> None:
        """Put everything back."""
        while self._of_blocks:
            module, name, before, instead = self._of_blocks.pop()
            if vars(module).get(name) is not instead:
                continue
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)
        if self._of_root is not None:
            forward, before = self._of_root
            forward.instance_forward = before
            self._of_root = None
        if self._compiled_call is not None:
            self.root._compiled_call_impl = self._compiled_call  # type: ignore
            self._compiled_call = None


def _forward_of(module: nn.Module) -> Any:
    """A module's forward, whatever stands in for it."""
    return vars(module).get("forward") or MethodType(type(module).forward, module)


def _context_of(compiled: Any) -> Any:
    """What ``torch.compile`` made a function with: calling it compiles another one alike."""
    if compiled is None or isinstance(compiled, Region):
        return None
    with contextlib.suppress(TypeError):
        found = inspect.getclosurevars(compiled).nonlocals.get("self")
        if compiles(found):
            return found
    return None


def compiler_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compiles functions as ``torch.compile`` does with these arguments."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, *args, **kwargs)
        return compiled

    # Where nn.Module.compile has it: torch.compile(model, fullgraph=False, ...)
    compiler.fullgraph = kwargs.get("fullgraph", False)  # type: ignore[attr-defined]
    return compiler
