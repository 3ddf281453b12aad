"""A private model whose forward and backward are replayed as CUDA graphs, without being asked.

The loop stays as it is: the model's call is one launch, ``loss.backward()`` comes back to it
through one node of autograd's, and is another. The loss in between runs as it is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import (
    call_of,
    global_hooks,
    has_lasting_node,
    hooks_of_module,
    hooks_of_parameter,
    memory_id,
    pytree,
)
from flash_clipping.capture.batch_size_checks import check_against_loader
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.inputs import batched_inputs
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.graphs.conditions import PLAIN, are_odd, key, may_be_nobody, rehearse
from flash_clipping.engine.graphs.graphed_step import (
    Graph,
    GraphedStep,
    captures,
    take_over,
    without_gradients,
)
from flash_clipping.errors import FlashClippingError

#: Calls of one layout that run as they are before it is captured.
WARMUP = 3


def replay_calls(model: GradSampleHooksFlashClipping) -> None:
    """Replay calls of this private model as CUDA graphs: ``make_private(cuda_graphs="auto")``."""
    # It stands where nn.Module.compile() puts what replaces a module's call.
    root: Any = model._module
    if (call := call_of(root)) is not None:
        model._graphs = root._compiled_call_impl = GraphedModel(model, call)


@dataclass
class Use:
    """What the loop did with one call of the model: which of its results (by number, among all
    leaves) got a gradient, and the loss's reductions, as the criterion said in backward."""

    grads: set[int] = field(default_factory=set)
    reductions: set[str] = field(default_factory=set)


@dataclass
class GraphedCall(Graph):
    """One captured call of the model: a graph of its forward and one of its backward.

    Attributes:
        use: what it was captured for.
        differentiable: which of its results, by number, have a gradient.
        output_grads: by that number, what backward reads the gradient from.
    """

    use: Use = field(default_factory=Use)
    differentiable: set[int] = field(default_factory=set)
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    replay_backward: Callable[[], None] = lambda: None


class GraphedModel(GraphedStep):
    """The calls of ``model``, replayed wherever that gives what running them would give.

    A call runs as it is where :class:`GraphedStep` would run as it is, and while the results of a
    replayed call still wait for their backward. Graphs are given up for good, with one warning
    (``off`` is why), where no replay would be what the call is.
    """

    _kind = GraphedCall

    def __init__(self, model: Any, forward: Callable[..., Any]):
        super().__init__(forward, model, warmup=WARMUP)
        self.model: Any = model
        self.off: str | None = None
        #: How the loop used the last calls of each layout.
        self._uses: dict[Hashable, list[Use]] = {}
        self._hooks = self._hooks_now()
        #: Backward of the replayed call that waits for it, as long as anybody can ask for it.
        self._waiting: weakref.ref[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self.model._session
        if (
            self.off is not None
            or (self._waiting is not None and self._waiting() is not None)
            or not session.enabled
            or not torch.is_grad_enabled()
            or in_backward()
            or self.model._watch.gate.is_next  # replays prove nothing
        ):
            return self.step(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        plain = all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
        modules = list(self._module().modules())
        device = self._device(modules, leaves) if plain and not are_odd(leaves) else None
        if device is None or may_be_nobody(leaves, [self.model]):
            return self.step(*args, **kwargs)
        if (reason := self._reason(modules)) is not None:
            return self._give_up(reason, args, kwargs)
        name = key(leaves, structure, modules, [self.model], device)
        call: Any = self._graphs.get(name)
        if call is None:
            if self._hooks_now() != self._hooks:  # hooks are part of the key
                return self._give_up("it has hooks, which no replay would call", args, kwargs)
            uses = self._uses.setdefault(name, [])
            ready = len(uses) >= self.warmup and uses[-1] == uses[-2] and uses[-1].grads
            if not ready or not self._has_room(name[1]) or self._is_kept_waiting():
                return self._run_and_learn(uses, args, kwargs)
            try:
                call = self._capture_call(uses[-1], leaves, structure, name[1], modules, device)
            except FlashClippingError as error:
                return self._give_up(str(error).splitlines()[0], args, kwargs)
            self._graphs[name] = call
        if not self._taken_back():
            return self.step(*args, **kwargs)
        return self._replay_call(call, leaves, args, kwargs)

    def _module(self) -> nn.Module:
        return self.model._module  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and pickles of the model run without graphs

    def _meets_others(self) -> bool:
        session = self.model._session
        return (
            session.live_calls() > 0 or has_lasting_node(session.anchor) or super()._meets_others()
        )

    def _reason(self, modules: Sequence[nn.Module]) -> str | None:
        """Why no replay would be what the model's own call is; ``None`` if it would."""
        model = self.model
        if model.mode != "one_pass" or model._sharded is not None:
            return "it is sharded, or clipped in two passes"
        if model._session.units_of_calls.are_known:
            return "its privacy units are counted on the host"
        own = {memory_id(x.untyped_storage()) for x in model._session.state()}
        for module in modules:
            for name, value in vars(module).items():
                is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
                if is_tensor and memory_id(value.untyped_storage()) not in own:
                    return (
                        f"{type(module).__name__}.{name} is a tensor that is no buffer "
                        "(register_buffer), which may be another one in the next step"
                    )
        return None

    def _hooks_now(self) -> list[Any]:
        modules = list(self._module().modules())
        params = [p for m in modules for p in m._parameters.values() if p is not None]
        return [
            *map(tuple, global_hooks()),
            *[tuple(map(tuple, hooks_of_module(module))) for module in modules],
            *[tuple(hooks_of_parameter(param) or ()) for param in params],
        ]

    def _give_up(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.off = reason
        warnings.warn(
            f"cuda_graphs='auto': the model runs without graphs, because {reason}. "
            "cuda_graphs='off' says so without this warning.",
            stacklevel=4,
        )
        return self.step(*args, **kwargs)

    def _run_and_learn(self, uses: list[Use], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call as it is, and note what the loop does with its results."""
        output = self.step(*args, **kwargs)
        use, leaves = Use(), pytree.tree_leaves(output)
        differentiable = _differentiable(leaves)
        for number in differentiable:
            leaves[number].register_hook(partial(self._note, use, number))
        uses.append(use)
        del uses[: -self.warmup]
        if len(uses) < self.warmup - 1 or not differentiable:
            return output
        return _apart(output, differentiable, _backward_of(leaves))

    def _note(self, use: Use, number: int, grad: Tensor) -> None:
        session = self.model._session
        if session.live_calls() > 1:
            use.grads.clear()  # the backward is of several calls
            return
        use.grads.add(number)
        use.reductions.add(session.loss_reduction)

    def _capture_call(self, use: Use, *given: Any) -> GraphedCall:
        """Record both graphs, after a trial; ``given``: as of :meth:`_new_graph`."""
        call, args, kwargs = self._new_graph(*given)
        call.use = use
        session, device = self.model._session, call.device
        reduction = session.loss_reduction
        held: list[Any] = []

        def forward() -> Any:
            held[:] = [self.step(*args, **kwargs)]
            return held[0]

        def backward() -> None:
            results = pytree.tree_leaves(held[0])
            if not call.output_grads:
                for number in sorted(use.grads):
                    # Small, and not 0: what backward does may not depend on values.
                    grad = torch.full_like(results[number], 2.0**-10)
                    call.output_grads[number] = grad
            session.loss_reduction = next(iter(use.reductions))
            try:
                torch.autograd.backward(
                    [results[number] for number in call.output_grads],
                    list(call.output_grads.values()),
                )
            finally:
                session.loss_reduction = reduction

        def trial() -> None:
            forward()
            backward()

        with without_gradients(list(self._module().parameters())), captures(self.model):
            rehearse(trial, self._module(), [self.model], device)
        held.clear()  # with the nodes of parameters on this stream
        with self._capturing(call):
            self._record(call, forward, device)
            replay_forward = call.replay
            call.differentiable = _differentiable(pytree.tree_leaves(held[0]))
            call.output = pytree.tree_map_only(Tensor, Tensor.detach, held[0])
            self._record(call, backward, device)
            call.replay, call.replay_backward = replay_forward, call.replay
            held.clear()
        leaves_out = pytree.tree_leaves(call.output)
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves_out):
            raise FlashClippingError("it returns something else than tensors")
        return call

    def _replay_call(
        self,
        graphs: GraphedCall,
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        session = self.model._session
        self.model._watch.gate.calls += 1
        tensors = batched_inputs(args, kwargs)
        draw = session.draw_of(tensors)
        call = session.begin_forward(tensors)
        call.draw = draw
        call.counted_rows = session.padding.of_call(draw, False)
        check_against_loader(session, call)
        call.ended = True
        self.model.running_step.await_backward(tensors)
        with torch.no_grad():
            self._fill(graphs, leaves)
            session.padding.before_replay(draw, graphs.device)
            graphs.replay()
        backward = partial(self._replay_backward, graphs, call)
        self._waiting = weakref.ref(backward)
        return _apart(graphs.output, graphs.differentiable, backward)

    def _replay_backward(
        self, graphs: GraphedCall, call: ForwardCall, grads: Sequence[Tensor | None]
    ) -> None:
        model, session = self.model, self.model._session
        given = {number: grad for number, grad in enumerate(grads) if grad is not None}
        problem = None
        if call.spent:
            problem = "backward() came a second time"
        elif session.live_calls() > 1:
            problem = "backward() is of several calls of the model"
        elif not session.enabled:
            problem = "hooks were disabled between forward and backward"
        elif not set(given) <= set(graphs.output_grads):
            problem = "another result of the model got a gradient"
        elif session.loss_reduction not in graphs.use.reductions:
            problem = f"loss_reduction is {session.loss_reduction!r}"
        if problem is not None:
            raise FlashClippingError(
                f"cuda_graphs='auto': found that {problem}, unlike in the first steps, which were "
                "captured. Run the model without graphs:\n"
                "    make_private(..., cuda_graphs='off')"
            )
        with torch.no_grad():
            for number, mine in graphs.output_grads.items():
                if number in given:
                    mine.copy_(given[number])
                else:
                    mine.zero_()
            graphs.replay_backward()
            for _, captured in graphs.of_modules:
                take_over(model, captured, call.draw)
            self._hand_out(graphs)
        call.spent = True
        self._waiting = None


def _differentiable(leaves: Sequence[Any]) -> set[int]:
    return {i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}


def _backward_of(leaves: list[Any]) -> Callable[[Sequence[Tensor | None]], None]:
    """The model's own backward from its results, once. Autograd's nodes of parameters live as long
    as somebody holds the loss; a capture needs new ones, so the loss is held apart from them."""

    def backward(grads: Sequence[Tensor | None]) -> None:
        if not leaves:
            raise RuntimeError(
                "Trying to backward through the graph of a flash-clipped model a second time."
            )
        given = [(x, grad) for x, grad in zip(leaves, grads, strict=True) if grad is not None]
        leaves.clear()
        torch.autograd.backward([x for x, _ in given], [grad for _, grad in given])

    return backward


def _apart(
    output: Any, differentiable: set[int], backward: Callable[[Sequence[Tensor | None]], None]
) -> Any:
    """Copies of what the model returned; ``backward`` takes the gradients of all leaves."""
    leaves, structure = pytree.tree_flatten(output)
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    anchor = torch.empty(0, requires_grad=True)
    copies = _Apart.apply(anchor, backward, differentiable, *leaves)
    return pytree.tree_unflatten(list(copies), structure)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, backward: Any, differentiable: set[int], *leaves: Any
    ) -> tuple[Any, ...]:
        ctx.of_call = backward
        ctx.set_materialize_grads(False)
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in leaves)
        others = [x for i, x in enumerate(copies) if i not in differentiable]
        ctx.mark_non_differentiable(*[x for x in others if isinstance(x, Tensor)])
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.of_call(grads)
        return (None,) * (3 + len(grads))
