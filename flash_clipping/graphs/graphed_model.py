"""A private model whose forward and backward are replayed as CUDA graphs, without being asked.

The loop stays as it is: the model's call is one launch, ``loss.backward()`` comes back to it
through one node of autograd's, and is another. The loss in between runs as it is.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import call_of, has_lasting_node, memory_id, pytree
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.inputs import batched_inputs
from flash_clipping.capture.no_trace import without_gradients
from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.told_rows import Told, draw_of
from flash_clipping.errors import FlashClippingError, InvalidType, InvalidValue
from flash_clipping.graphs.choice import BLOCKS, Choice, excess_of_memory, memory_held
from flash_clipping.graphs.conditions import (
    PLAIN,
    are_alike,
    hooks_of,
    own_attributes,
    reason,
    refuse,
    rehearse,
    tensors_held,
)
from flash_clipping.graphs.graphed_step import (
    Call,
    Graph,
    GraphedStep,
    Use,
    captures,
    differentiable,
)

logger = logging.getLogger("flash_clipping")

#: How many layouts of arguments may have a graph.
GRAPHS = 24


def replay_calls(model: GradSampleHooksFlashClipping) -> None:
    """Replay calls of this private model as CUDA graphs: ``Kernels(cuda_graphs="auto")``."""
    if model.mode != "one_pass":
        logger.info("cuda_graphs='auto': the model runs without graphs in mode=%r", model.mode)
        return
    # It stands where nn.Module.compile() puts what replaces a module's call.
    root: Any = model._module
    if (call := call_of(root)) is not None:
        model._graphs = root._compiled_call_impl = GraphedModel(model, call)


class GraphedModel(GraphedStep):
    """The calls of ``model``, replayed wherever that gives what running them would give.

    A graph has two parts, forward and backward. A call runs as it is where
    :class:`~flash_clipping.GraphedStep` would run as it is, and while the results of a replayed
    call still wait for their backward. Calls that differ from one with a graph in sizes only are
    captured when they are first met, without a call before. Graphs are given up for good, with one
    line of log (``off`` is why), where no replay would be what the call is, calls take less time as
    they are, or a graph takes more memory than a step.
    """

    model: GradSampleHooksFlashClipping

    def __init__(self, model: GradSampleHooksFlashClipping, forward: Callable[..., Any]):
        super().__init__(forward, model, graphs=GRAPHS)
        self.model = model
        self.off: str | None = None
        self.choice = Choice()
        self._hooks = hooks_of(list(self._module().modules()))
        #: The most memory that was held when a call that ran as it is began.
        self._held = 0
        #: Backward of the replayed call that waits for it, as long as anybody can ask for it.
        self._waiting: weakref.ref[Any] | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and pickles of the model run without graphs

    def may_replay(self, device: torch.device) -> bool:
        """Whether calls with tensors of this device may come to be replayed."""
        return self.off is None and device.type == "cuda"

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.step(*args, **kwargs)

    def _module(self) -> nn.Module:
        return self.model._module

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        waits = self._waiting is not None and self._waiting() is not None
        if self.off is not None or waits or not self.model._session.mode.enabled or in_backward():
            return None
        with suppress(InvalidType, InvalidValue):  # other arguments, a model on several devices
            return super()._call(args, kwargs)
        return None

    def _is_audited(self, call: Call) -> bool:
        if super()._is_audited(call) and self._graphs:  # the call itself need not run as it is
            self.model.look_at_call(call.args, call.kwargs)
        return super()._is_audited(call)

    def _graph_for(self, call: Call) -> Graph | None:
        try:
            if not self.choice.keeps_replays():
                self._give_up(self.choice.why_not)
                return None
            is_first = not self._graphs
            most = torch.cuda.max_memory_reserved(call.device) if call.device.type == "cuda" else 0
            graph = super()._graph_for(call)
        except FlashClippingError as error:
            self._give_up(reason(error))
            return None
        if graph and is_first and (excess := excess_of_memory(most, call.device)):
            self._give_up(excess)
            return None
        return graph

    def _give_up(self, why: str) -> None:
        """Run all calls as they are from now on."""
        self.off = why
        self._take_back_gradients()
        self._keep({})
        logger.info("cuda_graphs='auto': the model runs without graphs, because %s", why)

    def _capture(self, call: Call) -> Graph:
        if any(are_alike(key, call.key) for key in self._graphs):
            self.model.look_at_call(call.args, call.kwargs)
        return super()._capture(call)

    def _check(self, call: Call) -> None:
        super()._check(call)
        own = {memory_id(x.untyped_storage()) for x in self.model._session.options.state()}
        for module in call.modules:
            for name, value in own_attributes(module):
                held = [x for x in tensors_held(value) if not isinstance(x, nn.Parameter)]
                if any(memory_id(x.untyped_storage()) not in own for x in held):
                    refuse(
                        f"keeps {type(module).__name__}.{name}, a tensor that is no buffer "
                        "(register_buffer), which may be another one in the next step"
                    )
        if call.key.hooks != self._hooks:
            refuse("has hooks, which no replay would call")

    def _autograd_is_held(self) -> bool:
        session = self.model._session
        return (
            session.live_calls() > 0
            or has_lasting_node(session.options.anchor)
            or super()._autograd_is_held()
        )

    # -- the first calls: what the loop does with their results ------------------------------------

    def _is_warm(self, call: Call) -> bool:
        for key, graph in self._graphs.items():
            if are_alike(key, call.key):
                call.uses[:] = [graph.use]
                return True
        uses = call.uses
        is_used_alike = super()._is_warm(call) and uses[-1] == uses[-2] and bool(uses[-1].grads)
        # What came to be held since, as sums or an optimizer's state, would count as the graph's.
        return is_used_alike and memory_held(call.device) <= self._held + BLOCKS

    def _warm_up(self, call: Call) -> Any:
        # Several calls in one backward come back together, to one norm of each sample.
        is_alone = self.off is None and bool(call.uses) and bool(call.uses[-1].grads)
        end = self.choice.begin(call.key, False, call.device) if is_alone else None
        self._held = max(self._held, memory_held(call.device))
        output = self._run(call.args, call.kwargs)
        use, leaves = Use(), pytree.tree_leaves(output)
        numbers = differentiable(leaves)
        for number in numbers:
            leaves[number].register_hook(partial(self._note, use, number))
        call.uses.append(use)
        del call.uses[: -self.warmup]
        if end is None or not numbers:
            return output
        return _apart(output, numbers, _backward_of(self.model._session, leaves, end))

    def _note(self, use: Use, number: int, grad: Tensor) -> None:
        session = self.model._session
        if session.live_calls() > 1:
            use.grads.clear()  # the backward is of several calls
            return
        use.grads.add(number)
        use.reductions.add(session.options.loss_reduction)

    # -- a capture ---------------------------------------------------------------------------------

    def _parts(self, graph: Graph, run: Callable[[], Any]) -> list[Callable[[], Any]]:
        session = self.model._session
        results: list[Any] = []

        def forward() -> Any:
            output = run()
            results[:] = pytree.tree_leaves(output)
            return output

        def backward() -> None:
            for number in sorted(graph.use.grads - graph.output_grads.keys()):
                # A replay writes nothing there: the graph would write that again.
                graph.output_grads[number] = torch.empty_like(results[number])
            reduction = session.options.loss_reduction
            session.options.loss_reduction = next(iter(graph.use.reductions))
            try:
                torch.autograd.backward(
                    [results[number] for number in graph.output_grads],
                    list(graph.output_grads.values()),
                )
            finally:
                session.options.loss_reduction = reduction
                results.clear()  # with the nodes of parameters on this stream

        def trial() -> None:
            # Small, and not 0: what backward does may not depend on values.
            forward()
            graph.output_grads = {n: torch.full_like(results[n], 2.0**-10) for n in graph.use.grads}
            backward()
            graph.output_grads = {}

        like = [other for other in self._graphs.values() if other.use is graph.use]
        graph.told = like[0].told if like else self._rehearsed(trial, graph.device)
        return [forward, backward]

    def _rehearsed(self, trial: Callable[[], None], device: torch.device) -> bool:
        """Whether the model has to hear that it is captured, or takes the way of other calls."""
        for told in (False, True):
            try:
                with without_gradients(list(self._module().parameters())), captures(self.model):
                    rehearse(trial, self._module(), [self.model], device, told=told)
                break
            except FlashClippingError:
                if told:
                    raise
            gc.collect()  # the error's frames hold autograd's nodes, in cycles
        torch.cuda.empty_cache()  # steps from now on are in the graphs' memory
        return told

    def _results(self, output: Any) -> Any:
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in pytree.tree_leaves(output)):
            refuse("returns something else than tensors")
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    # -- a replay ----------------------------------------------------------------------------------

    def _replay(self, graph: Graph, call: Call) -> Any:
        session, end = self.model._session, self.choice.begin(call.key, True, call.device)
        tensors = batched_inputs(call.args, call.kwargs)
        draw = draw_of(session, tensors)
        forward = session.begin_forward(tensors)
        self.model.follow_rows().note(Told(draw), forward)
        forward.ended = True
        self.model.running_step.await_backward(tensors)
        with torch.no_grad():
            self._fill(graph, call, [draw])
            graph.replays[0]()
        backward = partial(self._replay_backward, graph, forward, end)
        self._waiting = weakref.ref(backward)
        return _apart(graph.output, graph.differentiable, backward)

    def _replay_backward(
        self,
        graph: Graph,
        forward: ForwardCall,
        end: Callable[[], None],
        grads: Sequence[Tensor | None],
    ) -> None:
        session = self.model._session
        given = {number: grad for number, grad in enumerate(grads) if grad is not None}
        problem = ""
        if not session.mode.enabled:
            problem = "hooks were disabled between forward and backward"
        elif not set(given) <= set(graph.output_grads):
            problem = "another result of the model got a gradient"
        elif session.options.loss_reduction not in graph.use.reductions:
            problem = f"loss_reduction is {session.options.loss_reduction!r}"
        _check_backward(session, forward.spent, problem)
        with torch.no_grad():
            for number, mine in graph.output_grads.items():
                if number in given:
                    mine.copy_(given[number])
                else:
                    mine.zero_()
            graph.replays[1]()
            self._leave(graph, [forward.draw])
        end()
        forward.spent = True
        self._waiting = None


def _check_backward(session: ClippingSession, is_second: bool, problem: str = "") -> None:
    """Raise ``FlashClippingError`` where a call may not go backward apart from its loss."""
    if is_second:
        problem = "backward() came a second time"
    elif session.live_calls() > 1:  # samples have one norm over all of them
        problem = "backward() is of several calls of the model"
    if problem:
        raise FlashClippingError(
            f"FC704 cuda_graphs='auto': found that {problem}, unlike in the first steps, which "
            "were captured. Run the model without graphs:\n"
            "    make_private(..., kernels=Kernels(cuda_graphs='off'))"
        )


def _backward_of(
    session: ClippingSession, leaves: list[Any], end: Callable[[], None]
) -> Callable[[Sequence[Tensor | None]], None]:
    """The model's own backward from its results, once. Autograd's nodes of parameters live as long
    as somebody holds the loss; a capture needs new ones, so the loss is held apart from them."""

    def backward(grads: Sequence[Tensor | None]) -> None:
        _check_backward(session, is_second=not leaves)
        given = [(x, grad) for x, grad in zip(leaves, grads, strict=True) if grad is not None]
        leaves.clear()
        torch.autograd.backward([x for x, _ in given], [grad for _, grad in given])
        end()

    return backward


def _apart(
    output: Any, numbers: set[int], backward: Callable[[Sequence[Tensor | None]], None]
) -> Any:
    """Copies of what the model returned; ``backward`` takes the gradients of all leaves."""
    leaves, structure = pytree.tree_flatten(output)
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    anchor = torch.empty(0, requires_grad=True)
    copies = _Apart.apply(anchor, backward, numbers, *leaves)
    return pytree.tree_unflatten(list(copies), structure)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, backward: Any, numbers: set[int], *leaves: Any
    ) -> tuple[Any, ...]:
        ctx.of_call = backward
        ctx.set_materialize_grads(False)
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in leaves)
        others = [x for i, x in enumerate(copies) if i not in numbers]
        ctx.mark_non_differentiable(*[x for x in others if isinstance(x, Tensor)])
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.of_call(grads)
        return (None,) * (3 + len(grads))
