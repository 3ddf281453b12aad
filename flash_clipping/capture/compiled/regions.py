"""The compiled regions of a model: found, put in the place of what was compiled, run with the wires
of their layers, and put back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    applied_to,
    as_if_compiling,
    call_of,
    checkpoints_replaced,
    compiled_module,
    compiles,
    is_compiled,
    is_compilers_error,
)
from flash_clipping.capture.compiled.layout import Handed, Layout, Wired, kind_of_call
from flash_clipping.capture.compiled.tracing import ACTIVE, begin_trace, kind_of, traces
from flash_clipping.capture.compiled.unbatched import UnsupportedConstant, refuse_escaped
from flash_clipping.capture.compiled.wires import rule_of
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.inputs import arrived, map_tensors, tensors_in
from flash_clipping.capture.no_trace import (
    PlainCheckpoint,
    random_state,
    untouched,
    without_activations,
)
from flash_clipping.capture.proxies.parameter_proxy import circumstances
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError, warn

if TYPE_CHECKING:
    from flash_clipping.capture.root_forward import WatchedForward
    from flash_clipping.capture.tap import Tap


#: Layouts of wires that one region remembers.
REMEMBERED = 256


class Region:
    """A part of the model that is compiled as one, in place of what would run it.

    Args:
        regions: all of the model.
        module: that part.
        path: its name in the model, for messages.
        inner: runs it uncompiled.
        compiler: compiles a function, as ``torch.compile`` was told for this part.
    """

    def __init__(
        self,
        regions: Regions,
        module: nn.Module,
        path: str,
        inner: Callable[..., Any],
        compiler: Any,
    ):
        self.path = f"{path or 'the model'} ({type(module).__name__})"
        self.module, self.inner = module, inner
        forward = MethodType(type(compiled_module(module)).forward, module)
        self.__signature__ = inspect.signature(forward)  # which trainers choose arguments by
        self.session, self.taps = regions.session, regions.taps_in(module)
        for tap in self.taps:
            tap.compiled = True
        self.fullgraph = bool(getattr(compiler, "fullgraph", False))
        #: Layers that ran uncompiled once, to be proven.
        self._tried: set[str] = set()
        self._warned = False
        #: By the kind of a call and the number of samples, or by the kind alone.
        self._layouts: dict[Hashable, Layout] = {}

        def region(*args: Any, **kwargs: Any) -> Any:
            begin_trace()
            return inner(*args, **kwargs)

        # Dynamo counts recompilations by code object: other models are none of this one's.
        own = region.__code__.replace(co_name=f"region_of_{type(module).__name__}")
        region.__code__ = regions.codes.setdefault(type(module), own)
        self.compiled: Callable[..., Any] | None = compiler(region)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a compiled module is not compiled, as PyTorch has it.
        state = self.__dict__.copy()
        state.update(compiled=None, _layouts={})
        return state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, call = self.session, self.session.current_forward
        if is_dynamo_compiling() or self.compiled is None:  # a part of another region, or a copy
            return self.inner(*args, **kwargs)
        mode = session.mode
        if mode.bypassed or mode.comparing or (call is not None and call.reads is not None):
            return self.inner(*args, **kwargs)  # a look at what is read
        if session.rows.positions is not None:
            raise FlashClippingError(
                f"FC285 {self.path}: it is compiled, and units are parts of rows (Documents with a "
                "map of positions), which compiled layers do not know. Leave the model uncompiled; "
                "or give every document a row of its own, with a map of rows."
            )
        if not session.recording:
            if mode.enabled and call is not None and call.recorded and not in_backward():
                # The first forward of re-entrant checkpointing, without autograd. How often a layer
                # is used is not known then: none may pass for used once.
                for tap in self.taps:
                    session.count_use(tap.trainable()[1] * 2)
            return self._run(None, args, kwargs)
        if (call is None or call.ended) and not in_backward():
            return self.inner(*args, **kwargs)  # where taps refuse it
        if session.options.layers_are_cut:
            # AOTAutograd gives what is awaited no gradient of its kind.
            args, kwargs = map_tensors(arrived, (args, kwargs))
        # What is the same for all samples gets a row for each, as many as the model has now.
        batch_size = 0 if call is None else call.batch_size or 0
        trainables = [tap.trainable()[0] for tap in self.taps]
        shown = tuple([*map(kind_of, self.taps)])
        of_call, has_rows = kind_of_call(args, kwargs, batch_size, session.options.batch_axis)
        kind = of_call, tuple(map(id, trainables)), shown
        key = batch_size, kind
        found = self._layouts.get(key)
        if found is None and has_rows and kind in self._layouts:
            found = self._layouts[kind].for_batch(batch_size)
        layout = self._learn(batch_size, args, kwargs) if found is None else found
        if key not in self._layouts:
            layout.kept = trainables
            self._layouts |= dict.fromkeys((key, kind) if has_rows else (key,), layout)
            while len(self._layouts) > REMEMBERED:
                del self._layouts[next(iter(self._layouts))]
        if not self._tried.issuperset(layout.unproven):
            # As eager taps do, take what they read for samples, to be proven after this.
            self._tried |= layout.unproven
            return self.inner(*args, **kwargs)
        if layout.uncompiled and not self.fullgraph:
            if not self._warned:
                why = layout.uncompiled
                warn(f"FC711 {self.path} runs uncompiled, as {why}", stacklevel=2)
            self._warned = True
            return self.inner(*args, **kwargs)
        traces.misfits, traces.inside = False, []
        try:
            return self._run(layout, args, kwargs)
        except Exception as error:
            if traces.inside and not isinstance(error, FlashClippingError):
                raise FlashClippingError(
                    f"FC403 {', '.join(dict.fromkeys(traces.inside))}: called inside an operator "
                    "with a body of its own (torch.cond, while_loop, scan, a nested compile "
                    "region). Call the layer outside of it, or leave this part uncompiled."
                ) from error
            # With one graph for all, nothing has run while it is traced. Otherwise a part may have.
            if not (
                traces.misfits
                and found is not None
                and self.fullgraph
                and is_compilers_error(error)
            ):
                raise
            self._forget(key, kind)
            return self(*args, **kwargs)
        finally:
            if traces.misfits:  # some layers ran alone; it is learned again
                self._forget(key, kind)

    def _forget(self, *places: Hashable) -> None:
        for place in places:
            self._layouts.pop(place, None)

    def _run(self, layout: Layout | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled region, with wires if there is a layout of them."""
        assert self.compiled is not None
        key = self.session.options.key
        if layout is not None and layout.refused and self.fullgraph:
            # Layers without wires, where they may not break the graph.
            lines = "\n".join(f"{path}: {why}" for path, why in layout.refused.items())
            raise FlashClippingError(
                f"FC710 {self.path}: it is compiled with fullgraph=True, but these layers in it "
                "cannot be recorded inside a compiled graph:\n"
                f"{lines}\n"
                "Compile without fullgraph, or blocks without such layers "
                f"(model.block.compile(fullgraph=True)).{ONE_BY_ONE}"
            )
        session = self.session
        before, call = ACTIVE.pop(key, None), session.calls.proven_call
        # What the compiler gives up records itself by its own wires.
        session.calls.proven_call = None
        try:
            if layout is not None:
                ACTIVE[key] = layout.calls, self._make(layout)
            output = self.compiled(*args, **kwargs)
            if layout is not None and layout.has_same_for_all:
                refuse_escaped(output)
            return output
        finally:
            session.calls.proven_call = call
            ACTIVE.pop(key, None)
            if before is not None:
                ACTIVE[key] = before

    def _make(self, layout: Layout) -> Sequence[Tensor]:
        """The wires of one call."""
        session = self.session
        session.count_use(*[slot.params for slot in layout.slots])
        self._number_taps()
        if not layout.wires:
            return ()
        call = session.current_forward
        handed = Handed(self.path, layout, session, call, in_backward())
        wires: Sequence[Tensor] = Wired.apply(handed, session.options.anchor, *layout.params)
        return wires

    def _number_taps(self) -> None:
        """Taps go by their numbers in the region that runs, which may call what is not in it."""
        mode = self.session.mode
        if mode.numbered is not self.taps:
            for tap in mode.numbered:
                tap.number = -1
            for number, tap in enumerate(self.taps):
                tap.number = number
            mode.numbered = self.taps

    def _learn(
        self, batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], misuse: str = ""
    ) -> Layout:
        """Run the region once, uncompiled, to see what its layers leave; once more where it uses
        what is the same for all samples as no region can (``misuse``)."""
        session = self.session
        args, kwargs = map_tensors(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad), (args, kwargs)
        )
        tensors = [*tensors_in((args, kwargs)), *session.options.state()]
        devices = {x.device for x in tensors if x.is_cuda}
        self._number_taps()
        layout = Layout(batch_size, [[] for _ in self.taps], misuse=misuse)
        before, session.mode.learning = session.mode.learning, layout
        try:
            with (
                untouched(self.module),
                random_state(list(devices), 0),
                without_activations(),
                checkpoints_replaced(PlainCheckpoint),
                session.bypass(),
                as_if_compiling(),
            ):
                layout.outside = circumstances()
                refuse_escaped(self.inner(*args, **kwargs))
        except UnsupportedConstant as error:
            why = f"it computes what is the same for all samples, and {error.use}"
            return self._learn(batch_size, args, kwargs, why)
        finally:
            session.mode.learning = before
        for tap, calls in zip(self.taps, layout.calls, strict=True):
            if calls == [] and (tap.trainable()[1] or (tap.rule and tap.rule.allows_children)):
                layout.calls[tap.number] = None  # if it is called after all, then alone
            if session.options.layers_are_cut and tap.path in layout.refused:
                layout.uncompiled = (
                    f"{tap.path}: {layout.refused[tap.path]}. Gradients that are DTensors cannot "
                    "go from one graph to the next: leave this part uncompiled."
                )
        return layout


class Regions:
    """What is compiled in a wrapped model: found where PyTorch has it, and put back.

    Args:
        root: the model.
        session, taps: its own.
    """

    def __init__(self, root: nn.Module, session: ClippingSession, taps: Sequence[Tap]):
        self.root, self.session = root, session
        self.taps = list(taps)
        #: Code objects of compiled parts, by their type: parts of one type share what was compiled.
        self.codes: dict[type, Any] = {}
        #: Modules and attributes, with what they were before and are now.
        self._of_blocks: list[tuple[nn.Module, str, Any, Any]] = []
        #: The stand-in for the root's forward that runs the region, and what it ran before.
        self._of_root: tuple[WatchedForward, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(codes={}, _of_blocks=[])
        return state

    def as_compiled(self) -> contextlib.AbstractContextManager[None]:
        """For the proof, which runs uncompiled: the way through the model that compiled code takes,
        where it asks whether it is compiled."""
        return as_if_compiling() if self.any_compiled else contextlib.nullcontext()

    @property
    def any_compiled(self) -> bool:
        """Whether anything of the model is compiled."""
        return self._of_root is not None or bool(self._of_blocks)

    def find(self, forward: WatchedForward) -> None:
        """Take over what was compiled before, or since: the root and blocks of it.

        ``forward`` stands in for the root's forward.
        """
        root = self.root
        compiled = vars(root).get("_compiled_call_impl")
        if compiled is not None and (context := _context_of(compiled)) is not None:
            # The hooks of the root, which must not be compiled, are called by its call.
            self._put(root, "_compiled_call_impl", None)
            self.compile(forward, context)
        elif is_compiled(root) and self._of_root is None:
            self.compile(forward, root.dynamo_ctx)
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
        for tap in self.taps_in(module):
            if tap.rule is None or rule_of(tap).can_be_traced(tap.layer):
                tap.install(as_method=True)
        if "fully_shard" in applied_to(itself):
            # Its hooks gather parameters, and break the graph. They stay outside of the region.
            self._put(module, name, None if itself is module else inner)
            inner = vars(itself).get("forward") or MethodType(type(itself).forward, itself)
            module, name = itself, "forward"
        self._put(module, name, Region(self, module, path, inner, context))

    def _put(self, module: nn.Module, name: str, instead: Any) -> None:
        self._of_blocks.append((module, name, vars(module).get(name), instead))
        setattr(module, name, instead)

    def compile(self, forward: WatchedForward, context: Any) -> None:
        """Compile the root's forward."""
        if self._of_root is None:
            self._of_root = forward, forward.instance_forward
        before, root = self._of_root[1], self.root
        inner = (
            call_of(root) if is_compiled(root) else before or MethodType(type(root).forward, root)
        )
        forward.instance_forward = Region(self, root, "", inner, context)

    def taps_in(self, module: nn.Module) -> list[Tap]:
        """Those of a part of the model."""
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
        return torch.compile(function, *args, **kwargs)

    # Where nn.Module.compile has it: torch.compile(model, fullgraph=False, ...)
    compiler.fullgraph = kwargs.get("fullgraph", False)  # type: ignore[attr-defined]
    return compiler
