"""A training step replayed as a CUDA graph: one launch where the host made thousands.

A graph reads and writes the memory it was captured with, and runs none of the Python around its
kernels. What that Python decided is part of what a graph is found by, and what it left behind
(norms on the module, a count of backward passes) is left again after every replay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import (
    add_all,
    borrowed,
    copy_all,
    end_failed_capture,
    has_lasting_node,
    memory_id,
    pytree,
    references_to,
)
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.no_trace import without_gradients
from flash_clipping.capture.session import GraphedResults
from flash_clipping.engine.grad_ledger import Norms
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.unsupported import refuse_replay
from flash_clipping.errors import InvalidType, InvalidValue, checked_number, warn
from flash_clipping.finish.clipping import total_norm
from flash_clipping.graphs.conditions import (
    PLAIN,
    Key,
    answers,
    are_odd,
    key_of,
    may_be_nobody,
    own_tensors,
    refuse,
    rehearse,
)
from flash_clipping.ops.runtime.checks import device_checks
from flash_clipping.ops.runtime.tables import sources_kept

#: Layouts of which the calls are remembered.
REMEMBERED = 256

#: Calls in a row that wait, as somebody keeps autograd's graph of another, until a warning says so.
PATIENCE = 32


@contextmanager
def captures(model: GradSampleHooksFlashClipping) -> Iterator[GraphedResults]:
    """Let backward passes be captured; afterwards the published norms are those from before."""
    params = model.trainable_parameters
    norms = model.running_step.norms
    if params:
        model._session.rows.padding.prepare(params[0].device)
    try:
        with model._session.captures() as captured, device_checks.captured() as captured.checks:
            yield captured
    finally:
        model.running_step.norms = norms


@dataclass
class Use:
    """What a loop did with one call: which of its results (by number, among all leaves) got a
    gradient, and the loss's reductions, as the criterion said in backward."""

    grads: set[int] = field(default_factory=set)
    reductions: set[str] = field(default_factory=set)


@dataclass
class Call:
    """A call that a graph may be for.

    Attributes:
        args, kwargs, tensors: its arguments, and the tensors among them.
        modules, models: of the model, and those of them that are private.
        key: what a graph for it is found by.
        uses: of the last calls with this key, while they run as they are.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    modules: list[nn.Module]
    models: list[GradSampleHooksFlashClipping]
    device: torch.device
    key: Key
    uses: list[Use]


@dataclass
class Graph:
    """One captured call: the memory it reads and writes.

    Attributes:
        owners: the modules that it was captured with, so that nothing else gets their ids.
        inputs, output: the tensors among its arguments, and what it returned.
        use: what it was captured for.
        differentiable: which results, by number among all leaves, have a gradient.
        output_grads: by that number, what its backward reads the gradient from.
        grads: every parameter that it gives a gradient, and that gradient.
        told: whether the step hears that it is captured, if it asks.
        of_models: what it leaves on private models.
        sources: what its copies from the host read.
        replays: what replays its parts, in the order that they were captured in.
    """

    device: torch.device
    owners: list[nn.Module]
    inputs: list[Tensor]
    use: Use
    output: Any = None
    differentiable: set[int] = field(default_factory=set)
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    grads: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    told: bool = True
    of_models: list[tuple[GradSampleHooksFlashClipping, GraphedResults]] = field(
        default_factory=list
    )
    sources: list[Tensor] = field(default_factory=list)
    replays: list[Callable[[], None]] = field(default_factory=list)


class GraphedStep:
    """``step``, replayed as a CUDA graph wherever that gives what calling it would give.

    ::

        def step(x, y):
            loss = criterion(model(x), y).mean()
            loss.backward()
            return loss

        step = GraphedStep(step, model)
        for x, y in loader:
            loss = step(x, y)
            optimizer.step()
            optimizer.zero_grad()

    The first calls with arguments of one layout (shapes, strides, dtypes; other values themselves)
    run as they are; then the step is captured, and from there on replayed. A call runs as it is

    * on a CPU, and in a layout without a graph;
    * while anybody but ``p.grad`` and the running step holds gradients of an earlier replay;
    * before there is a graph, while somebody keeps a loss of another backward.

    Bound, clipping, who is trainable, modules' plain attributes (``training``, ``p``), autocast and
    the parameters' memory may change at any time: every call looks at them.

    Args:
        step: forward, loss and ``backward()``, without the optimizer's step. Its arguments are
            tensors, which it does not change, and plain values (numbers, strings, ``None``) in
            lists, tuples, dicts; its results tensors or ``None``. Tensors of its own that it
            reads must keep their memory. Everything else in Python (printing, hooks, counting)
            happens while it is captured and never in a replay. It must not wait for the device,
            draw random numbers on the host or clear gradients.
        model: the module whose parameters it gives gradients to, wrapped or not, or what wraps it.
        warmup: calls with arguments of one layout before it is captured. In the last one the step
            is told, as in the capture, that a graph is captured
            (``torch.cuda.is_current_stream_capturing``), so that both take the same way.
        graphs: how many layouts may have a graph at a time. They share their memory, gradients
            too: it is that of the largest step, beside what steps that run as they are take.

    Attributes:
        replays, calls: how many calls were replays, and how many there were.

    Guarantees:
        Norms, coefficients and gradients are bitwise what the captured kernels give on this call's
        arguments. Gradients are then added to those that ``p.grad`` holds (those of several
        backward passes in one step as their sum). No replay waits for the device. A capture does.

    Raises:
        TypeError: something in the arguments is neither a tensor nor a plain value, or something in
            the results is no tensor.
        ValueError: parameters or arguments are on several devices.
        FlashClippingError: the step cannot be captured, or a replay would be something else.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module | GradSampleHooksFlashClipping,
        *,
        warmup: int = 3,
        graphs: int = 4,
    ):
        # The first call compiles kernels, the last shows whether the step waits for the device.
        checked_number("warmup", warmup, "[2, inf)", 3, whole=True)
        checked_number("graphs", graphs, "[0, inf)", 4, whole=True)
        self.step, self.model = step, model
        self.warmup, self.size = warmup, graphs
        self.replays: int = 0
        self.calls: int = 0
        self._graphs: dict[Key, Graph] = {}
        #: Memory of the graphs' gradients, and how many references to it are their own.
        self._memories: list[tuple[torch.UntypedStorage, int]] = []
        self._uses: OrderedDict[Key, list[Use]] = OrderedDict()
        #: Calls that waited for others, one after the other.
        self._waited = 0
        #: Gradients of the last replay as they were handed out.
        self._handed_out: list[tuple[nn.Parameter, Tensor]] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run or replay the step.

        Returns:
            What the step returns, tensors detached from autograd's graph, in memory of their own.
        """
        self.calls += 1
        call = self._call(args, kwargs)
        if call is None or self._is_audited(call):  # replays prove nothing
            return self._run(args, kwargs)
        graph = self._graph_for(call)
        if graph is None:
            return self._warm_up(call)
        return self._replay(graph, call) if self._take_back_gradients() else self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Detached, so that nobody keeps nodes of autograd's graph: see _autograd_is_held.
        return self._results(self.step(*args, **kwargs))

    # -- a call, and the graph for it --------------------------------------------------------------

    def _module(self) -> nn.Module:
        """The module with the parameters: Opacus' hooks (``wrap_model=False``) are none."""
        model = self.model
        return model if isinstance(model, nn.Module) else model._module

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call as graphs are found for it; ``None``: it runs as it is."""
        if not self.size or not torch.is_grad_enabled():
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                raise InvalidType(
                    f"FC702 GraphedStep: found {type(leaf).__name__} in the step's arguments; "
                    "expected tensors and plain values (numbers, strings, None) in lists, tuples "
                    "and dicts, as it knows nothing else by its contents. Pass dict(batch) where a "
                    "tokenizer made the batch."
                )
        modules = list(self._module().modules())  # once: walking the tree is most of a call's time
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = self._device(modules, tensors)
        if device is None or are_odd(tensors):
            return None
        private = [m for m in (self.model, *modules) if isinstance(m, GradSampleHooksFlashClipping)]
        models = list({id(m): m for m in private}.values())
        if may_be_nobody(tensors, models):
            return None
        key = key_of(leaves, structure, modules, models, device)
        return Call(args, kwargs, tensors, modules, models, device, key, [])

    def _is_audited(self, call: Call) -> bool:
        """Whether an audit of the call is due."""
        return any(wrapped._watch.gate.is_next for wrapped in call.models)

    def _device(self, modules: list[nn.Module], tensors: list[Tensor]) -> torch.device | None:
        """The GPU that everything is on, or ``None`` without one."""
        of_model = {
            x.device for kind in ("_parameters", "_buffers") for x in own_tensors(modules, kind)
        }
        if not any(device.type == "cuda" for device in of_model):
            return None
        devices = of_model | {x.device for x in tensors}
        if len(devices) > 1:
            listed = " and ".join(sorted(map(str, devices)))
            raise InvalidValue(
                f"FC702 GraphedStep: found parameters and arguments on {listed}; expected one "
                "device. Move the batch before the call; a model on several devices runs without "
                "GraphedStep."
            )
        return devices.pop()

    def _graph_for(self, call: Call) -> Graph | None:
        """The graph of this call, captured if it is time; ``None``: not yet."""
        self._check(call)
        if (graph := self._graphs.get(call.key)) is not None:
            return graph
        call.uses = self._uses.setdefault(call.key, call.uses)
        self._uses.move_to_end(call.key)
        if len(self._uses) > REMEMBERED:
            self._uses.popitem(last=False)
        ready = self._is_warm(call) and self._has_room(call.key)
        if not ready or self._is_kept_waiting():
            return None
        graph = self._capture(call)
        self._keep(self._graphs | {call.key: graph})
        return graph

    def _check(self, call: Call) -> None:
        """Raise ``FlashClippingError`` where no replay would be what the call is."""
        for wrapped in call.models:
            refuse_replay(wrapped.mode, "GraphedStep")
        if any(m._session.rows.units_of_calls.are_known for m in call.models):
            refuse(
                "clips privacy units (unit=...), whose number is read "
                "on the host: every replay would have that of the capture. Give one row for each "
                "sample"
            )
        if any(m._sharded is not None for m in call.models):
            refuse(
                "is of a model with shards (fully_shard, parallelize_module). Its graph would hold "
                "collectives, which all processes must capture and replay together, and Poisson "
                "batches have other shapes in each of them. Compile blocks (block.compile())"
            )

    def _is_warm(self, call: Call) -> bool:
        """Whether a call may be captured, after those before."""
        return len(call.uses) >= self.warmup

    def _warm_up(self, call: Call) -> Any:
        """Run a call as it is, and note its use."""
        run = partial(self._run, call.args, call.kwargs)
        left = self.warmup - len(call.uses)
        if left == 1 and self._has_room(call.key):
            # A failed capture would leave the device's allocator confused.
            output = rehearse(run, self._module(), call.models, call.device)
        else:
            output = run()
            if left <= 1:
                return output
        call.uses.append(Use())
        return output

    def _has_room(self, key: Key) -> bool:
        """Whether one more graph may be held, those that would never be found again aside."""
        if len(self._graphs) >= self.size and self._take_back_gradients():
            self._keep({k: graph for k, graph in self._graphs.items() if k[1:] == key[1:]})
        return len(self._graphs) < self.size

    def _keep(self, graphs: dict[Key, Graph]) -> None:
        """Hold these graphs, and no others."""
        self._graphs = graphs
        grads = {id(grad): grad for graph in graphs.values() for _, grad in graph.grads}
        memories = {id(grad): grad.untyped_storage() for grad in grads.values()}
        of_grads = Counter(map(memory_id, memories.values()))
        distinct = {memory_id(memory): memory for memory in memories.values()}
        # One reference for every gradient in it, and one for what asks.
        self._memories = [(memory, of_grads[name] + 1) for name, memory in distinct.items()]

    def _is_kept_waiting(self) -> bool:
        """Whether it meets others, with one warning where that lasts."""
        self._waited = self._waited + 1 if self._autograd_is_held() else 0
        if self._waited == PATIENCE:
            warn(
                f"FC706 GraphedStep, or cuda_graphs='auto': {PATIENCE} steps ran as they are that "
                "could have been replayed, because something still holds autograd's graph of an "
                "earlier one: a loss or an output in a list, say. Keep loss.detach().",
                stacklevel=6,
            )
        return self._waited > 0

    def _autograd_is_held(self) -> bool:
        """Whether somebody keeps a graph of autograd's that ends in a parameter. Its last node
        belongs to the stream that it was made on; a capture, on a stream of its own, would fail,
        and leave the device's generator and allocator as if it still went on."""
        params = self._module().parameters()
        return any([has_lasting_node(param) for param in params if param.requires_grad])

    # -- a capture ---------------------------------------------------------------------------------

    def _capture(self, call: Call) -> Graph:
        """Record a graph, which gets the gradients; nothing else changes."""
        given = call.args, call.kwargs
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given)
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        graph = Graph(call.device, call.modules, inputs, call.uses[-1])
        parts = self._parts(graph, partial(self.step, *args, **kwargs))
        if self._autograd_is_held():
            refuse("keeps autograd's graph of a call. Keep loss.detach()")
        params = list(self._module().parameters())
        with ExitStack() as stack, without_gradients(params):
            for wrapped in call.models:
                graph.of_models.append((wrapped, stack.enter_context(captures(wrapped))))
            graph.sources = stack.enter_context(sources_kept())
            output = [self._record(graph, part) for part in parts][0]
            graph.differentiable = differentiable(pytree.tree_leaves(output))
            graph.output = self._results(output)
            shared = {id(x): x for other in self._graphs.values() for _, x in other.grads}
            graph.grads = [
                (p, p.grad if id(p.grad) in shared else p.grad.detach())
                for p in params
                if p.grad is not None
            ]
        if any([x._version for x in inputs]):  # copies begin at 0
            refuse(
                "changes one of its arguments in place, and a replay works on copies of them. "
                "Return the new value"
            )
        if any([grad.layout != torch.strided for _, grad in graph.grads]):
            refuse("gives sparse gradients, whose size no graph can change")
        # Who replays a graph copies its results before another one is replayed.
        graph.output = pytree.tree_map_only(Tensor, borrowed, graph.output)
        graph.output_grads = {number: borrowed(x) for number, x in graph.output_grads.items()}
        return graph

    def _parts(self, graph: Graph, run: Callable[[], Any]) -> list[Callable[[], Any]]:
        """What is captured one after the other: ``run``, the step with the graph's arguments, gives
        the results of the first."""
        return [run]

    def _record(self, graph: Graph, work: Callable[[], Any]) -> Any:
        """Capture what ``work`` launches, as the next part of a graph; returns what it returns."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(graph.device)
        if not self._graphs and not graph.replays:
            # A pool whose last graph has gone cannot be taken up again.
            self._pool = torch.cuda.graph_pool_handle()
        recorded = torch.cuda.CUDAGraph()
        outside = torch.cuda.current_stream(graph.device)
        # Weights that autocast has cast already would be read as they are today.
        torch.clear_autocast_cache()
        try:
            torch.cuda.synchronize(graph.device)
            with torch.cuda.device(graph.device), torch.cuda.stream(self._stream):
                # Tables for kernels are put into pinned memory, and that may have to be asked for.
                recorded.capture_begin(self._pool, capture_error_mode="relaxed")
                try:
                    with answers(graph.told):
                        output = work()
                    self._share_gradients()
                finally:
                    recorded.capture_end()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.set_stream(outside)  # PyTorch leaves the capturing one where capture fails
            end_failed_capture(graph.device, self._pool)
            refuse(
                f"could not be captured as a CUDA graph ({error}). Take what waits for the device "
                "or changes from call to call out of it (activation checkpointing: "
                "preserve_rng_state=False)",
                error,
            )
        finally:
            torch.clear_autocast_cache()  # what was cast meanwhile is the graph's own
        graph.replays.append(recorded.replay)
        return output

    def _share_gradients(self) -> None:
        """Let gradients be where those of the graphs before are; a part of the capture."""
        held = {id(p): grad for graph in self._graphs.values() for p, grad in graph.grads}
        pairs = []
        for p in self._module().parameters():
            grad, shared = p.grad, held.get(id(p))
            if grad is None or shared is None or grad is shared:
                continue
            if (grad.layout, grad.dtype) == (shared.layout, shared.dtype) and (
                grad.stride() == shared.stride()
            ):
                pairs.append((shared, grad))
                p.grad = shared
        if pairs:
            copy_all([shared for shared, _ in pairs], [grad for _, grad in pairs])

    def _results(self, output: Any) -> Any:
        """Results without their history; ``TypeError`` unless they are tensors or ``None``, as a
        replay renews nothing else."""
        for leaf in pytree.tree_leaves(output):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise InvalidType(
                    f"FC702 GraphedStep: found {type(leaf).__name__} in the step's results; "
                    "expected tensors or None, in lists, tuples and dicts: anything else would be "
                    "the captured step's in every replay. Return the loss as a tensor, or nothing."
                )
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    # -- a replay ----------------------------------------------------------------------------------

    def _replay(self, graph: Graph, call: Call) -> Any:
        with torch.no_grad():
            sessions = [wrapped._session for wrapped in call.models]
            given = call.tensors
            draws = [x.rows.draws.of_forward(given, x.options.batch_axis) for x in sessions]
            self._fill(graph, call, draws)
            graph.replays[0]()
            self._leave(graph, draws)
            return pytree.tree_map_only(Tensor, Tensor.clone, graph.output)

    def _fill(self, graph: Graph, call: Call, draws: Sequence[DrawnBatch | None]) -> None:
        """Give a replay what it reads: this call's tensors, and which rows count.

        Args:
            draws: the batch of each private model.
        """
        self.replays += 1
        for fixed, given in zip(graph.inputs, call.tensors, strict=True):
            fixed.copy_(given, non_blocking=True)
        for (wrapped, _), draw in zip(graph.of_models, draws, strict=True):
            wrapped._watch.gate.calls += 1
            wrapped._session.rows.padding.before_replay(draw, graph.device)

    def _leave(self, graph: Graph, draws: Sequence[DrawnBatch | None]) -> None:
        """Leave what the replayed backward passes would have left: norms, checks, gradients."""
        for (wrapped, captured), draw in zip(graph.of_models, draws, strict=True):
            step = wrapped.running_step
            for number, found in enumerate(captured.norms):
                if not number:
                    accumulates = wrapped.grad_accumulation_allowed
                    step.begin_backward(found.params, wrapped.clipping, accumulates)
                norms_PB = found.norms_PB.clone()
                total_B = total_norm(norms_PB)
                step.norms = Norms(found.params, norms_PB, total_B, found.upper.clone())
                step.count_backward(total_B, draw)
            for holds, message, error in captured.checks:
                device_checks.add((holds.clone(), message, error))
            for coef in captured.coefs:
                wrapped._session.calls.non_finite.note(coef)
        held = [(param.grad, grad) for param, grad in graph.grads if param.grad is not None]
        if held:  # one by one they take the host as long as the replay
            add_all([before for before, _ in held], [grad for _, grad in held])
        for param, grad in graph.grads:
            if param.grad is None:
                # A tensor of its own: optimizers leave marks on what they are given.
                lent = grad.detach()
                param.grad = lent
                self._handed_out.append((param, lent))
        for wrapped, captured in graph.of_models:
            wrapped.running_step.note_sums(
                [param for found in captured.norms[:1] for param in found.params]
            )

    def _take_back_gradients(self) -> bool:
        """Whether a replay may write gradients: what ``p.grad`` and the optimizer still hold of
        those of the last one is copied for them."""
        self._copy_lent()
        return not any([references_to(memory_id(memory)) > own for memory, own in self._memories])

    def _copy_lent(self) -> None:
        """Copy the gradients that were handed out, for whoever holds them."""
        of_graphs = chain(*[graph.of_models for graph in self._graphs.values()])
        steps = {id(wrapped): wrapped.running_step for wrapped, _ in of_graphs}.values()
        handed_out, self._handed_out = self._handed_out, []
        held = [(param, lent) for param, lent in handed_out if param.grad is lent]
        copies = [torch.empty_like(lent) for _, lent in held]
        if held:
            copy_all(copies, [lent for _, lent in held])
        for (param, lent), copy in zip(held, copies, strict=True):
            param.grad = copy
            for step in steps:
                step.note_moved(param, lent)
        for step in steps:
            for param, lent in handed_out:
                if step.sums.get(id(param)) is lent:
                    step.sums[id(param)] = lent.clone()


def differentiable(leaves: Sequence[Any]) -> set[int]:
    """The numbers of results that have a gradient."""
    return {i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
