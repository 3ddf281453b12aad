"""A training step replayed as a CUDA graph: one launch where the host made thousands.

A graph reads and writes the memory it was captured with, and runs none of the Python around its
kernels. What that Python decided is part of what a graph is found by, and what it left behind
(norms on the module, a count of backward passes) is left again after every replay.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import has_lasting_node, memory_id, pytree, references_to
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.session import GraphedResults
from flash_clipping.engine.grad_ledger import Norms
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.graphs.conditions import (
    are_odd,
    check_arguments,
    detached,
    key,
    may_be_nobody,
    refuse,
    rehearse,
)
from flash_clipping.engine.one_by_one import refuse_replay
from flash_clipping.errors import InvalidValue
from flash_clipping.finish.clipping import total_norm
from flash_clipping.ops.runtime.checks import device_checks
from flash_clipping.ops.runtime.upload import sources_kept


@contextmanager
def captures(model: GradSampleHooksFlashClipping) -> Iterator[GraphedResults]:
    """Let backward passes be captured; afterwards the published norms are those from before."""
    params = model.trainable_parameters
    norms = model.running_step.norms
    if params:
        model._session.padding.prepare(params[0].device)
    try:
        with model._session.captures() as captured, device_checks.captured() as captured.checks:
            yield captured
    finally:
        model.running_step.norms = norms


def take_over(
    model: GradSampleHooksFlashClipping, captured: GraphedResults, draw: DrawnBatch | None
) -> None:
    """Leave what the backward passes of a replayed CUDA graph would have left, of this batch."""
    step = model.running_step
    for number, found in enumerate(captured.norms):
        if not number:
            step.begin_backward(found.params, model.clipping, model.grad_accumulation_allowed)
        norms_PB = found.norms_PB.clone()
        total_B = total_norm(norms_PB)
        step.norms = Norms(found.params, norms_PB, total_B, found.upper.clone())
        step.count_backward(total_B, draw)
    for holds, message, error in captured.checks:
        device_checks.add((holds.clone(), message, error))
    for coef in captured.coefs:
        model._session.non_finite.note(coef)


@contextmanager
def without_gradients(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Nothing in ``p.grad`` at first; afterwards what was there before."""
    before = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


#: Layouts of which the number of calls is remembered.
REMEMBERED = 256

#: Steps in a row that run as they are because of another's graph, until a warning says so.
PATIENCE = 32


@dataclass
class Graph:
    """One captured step: the memory it reads and writes.

    Attributes:
        circumstances: what it was captured under, besides the layout of its arguments.
        inputs, output: the tensors among its arguments, and what the step returned.
        grads: every parameter that it gives a gradient, and that gradient.
        of_modules: what it leaves on wrapped models.
        storages: memory of the gradients, and how many references to it are its own.
        sources: what its copies from the host read.
        owners: the modules that it was captured with, so that nothing else gets their ids.
        pool: of the memory that it is captured in.
    """

    circumstances: Hashable
    device: torch.device
    inputs: list[Tensor]
    output: Any = None
    grads: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    of_modules: list[tuple[GradSampleHooksFlashClipping, GraphedResults]] = field(
        default_factory=list
    )
    storages: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    pool: Any = None
    replay: Callable[[], None] = lambda: None

    def is_held(self) -> bool:
        """Whether somebody else refers to the gradients' memory, in whatever way."""
        return any([references_to(memory_id(memory)) > own for memory, own in self.storages])


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
    where no graph is for it: on a CPU, for batches of other sizes (Poisson batches:
    ``BatchMemoryManager`` cuts them into equal ones and a rest), where anybody but ``p.grad``
    and the running step still holds gradients that an earlier replay left, and, before there is a
    graph, while a loss of another backward is kept. Bound, clipping, who is trainable, modules'
    plain attributes (``training``, ``p``), autocast and the parameters' memory may change at any
    time: they are looked at in every call.

    Args:
        step: forward, loss and ``backward()``, without the optimizer's step. Its arguments are
            tensors, which it does not change, and plain values (numbers, strings, ``None``) in
            lists, tuples, dicts; its results tensors or ``None``. Tensors of its own that it
            reads must keep their memory. What else it does in Python (printing, hooks, counting)
            happens while it is captured and never in a replay; it must not wait for the device,
            draw random numbers on the host or clear gradients.
        model: the module whose parameters it gives gradients to, wrapped or not, or what wraps it.
        warmup: calls with arguments of one layout before it is captured. In the last one the step
            is told, as in the capture, that a graph is captured
            (``torch.cuda.is_current_stream_capturing``), so that both take the same way.
        graphs: how many layouts may have a graph at a time. They share their memory, which is that
            of the largest step, beside what steps that run as they are take.

    Attributes:
        replays, calls: how many calls were replays, and how many there were.

    Guarantees:
        Norms, coefficients and gradients are bitwise what the captured kernels give on this call's
        arguments; gradients are then added to those that ``p.grad`` holds (those of several
        backward passes in one step as their sum). No replay waits for the device. A capture does.

    Raises:
        TypeError: something in the arguments is neither a tensor nor a plain value, or something in
            the results is no tensor.
        ValueError: parameters or arguments are on several devices.
        FlashClippingError: the step cannot be captured, or a replay would be something else.
    """

    _kind = Graph

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module | GradSampleHooksFlashClipping,
        *,
        warmup: int = 3,
        graphs: int = 4,
    ):
        if warmup < 2 or graphs < 0:
            raise InvalidValue(
                f"GraphedStep: found warmup={warmup} and graphs={graphs}; expected at least 2 "
                "(the first call compiles kernels, the last shows whether the step waits for the "
                "device) and 0."
            )
        self.step, self.model = step, model
        self.warmup, self.size = warmup, graphs
        self.replays = self.calls = 0
        self._graphs: dict[Hashable, Graph] = {}
        self._met: OrderedDict[Hashable, int] = OrderedDict()
        #: Steps that waited for others, one after the other.
        self._waited = 0
        #: Gradients of the last replay as they were handed out.
        self._lent: list[tuple[nn.Parameter, Tensor]] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run or replay the step.

        Returns:
            What the step returns, tensors detached from autograd's graph, in memory of their own.
        """
        self.calls += 1
        leaves, structure = pytree.tree_flatten((args, kwargs))
        check_arguments(leaves)
        modules = list(self._module().modules())  # once: walking the tree is most of a call's time
        device = self._device(modules, leaves)
        if device is None or not self.size or not torch.is_grad_enabled() or are_odd(leaves):
            return self._run(args, kwargs)
        models = self._wrapped(modules)
        if any(wrapped.mode == "one_by_one" for wrapped in models):
            refuse_replay("GraphedStep")
        if any(wrapped._watch.gate.is_next for wrapped in models):  # replays prove nothing
            return self._run(args, kwargs)
        if may_be_nobody(leaves, models):
            return self._run(args, kwargs)
        if any(m._session.units_of_calls.are_known for m in models):
            refuse(
                "clips privacy units (sample_of, or make_private(units=...)), whose number is read "
                "on the host: every replay would have that of the capture. Give one row for each "
                "sample"
            )
        if any(m._sharded is not None for m in models):
            refuse(
                "is of a model with shards (fully_shard, parallelize_module). Its graph would hold "
                "collectives, which all processes must capture and replay together, and Poisson "
                "batches have other shapes in each of them. Compile blocks (block.compile())"
            )
        name = key(leaves, structure, modules, models, device)
        circumstances = name[1]
        graph = self._graphs.get(name)
        if graph is None:
            if (met := self._met.pop(name, 0)) < self.warmup:
                if met < self.warmup - 1 or not self._has_room(circumstances):
                    output = self._run(args, kwargs)
                    self._met[name] = min(met + 1, self.warmup - 1)
                else:  # a failed capture would leave the device's allocator confused
                    run = partial(self._run, args, kwargs)
                    output = rehearse(run, self._module(), models, device)
                    self._met[name] = self.warmup
                if len(self._met) > REMEMBERED:
                    self._met.popitem(last=False)
                return output
            self._met[name] = met
            if not self._has_room(circumstances) or self._is_kept_waiting():
                return self._run(args, kwargs)
            call = leaves, structure, circumstances, modules, device
            graph, copies, named = self._new_graph(*call)
            with self._capturing(graph):
                work = partial(self.step, *copies, **named)
                graph.output = detached(self._record(graph, work, device))
            self._graphs[name] = graph
        if not self._taken_back():
            return self._run(args, kwargs)
        return self._replay(graph, leaves)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Detached, so that nobody keeps nodes of autograd's graph: see _meets_others.
        return detached(self.step(*args, **kwargs))

    def _device(self, modules: Sequence[nn.Module], leaves: Sequence[Any]) -> torch.device | None:
        """The GPU that everything is on, or ``None`` without one."""
        of_model = {
            tensor.device
            for module in modules
            for tensor in chain(module._parameters.values(), module._buffers.values())
            if tensor is not None
        }
        if not any(device.type == "cuda" for device in of_model):
            return None
        devices = of_model | {x.device for x in leaves if isinstance(x, Tensor)}
        if len(devices) > 1:
            listed = " and ".join(sorted(map(str, devices)))
            raise InvalidValue(
                f"GraphedStep: found parameters and arguments on {listed}; expected one "
                "device. Move the batch before the call; a model on several devices runs without "
                "GraphedStep."
            )
        return devices.pop()

    def _module(self) -> nn.Module:
        """The module with the parameters: Opacus' hooks (``wrap_model=False``) are none."""
        model = self.model
        return model if isinstance(model, nn.Module) else model._module

    def _wrapped(self, modules: Sequence[nn.Module]) -> list[GradSampleHooksFlashClipping]:
        candidates = [self.model, *modules]
        found = [m for m in candidates if isinstance(m, GradSampleHooksFlashClipping)]
        return list({id(m): m for m in found}.values())

    def _has_room(self, circumstances: Hashable) -> bool:
        """Whether one more graph may be held, those that would never be found again aside."""
        if len(self._graphs) >= self.size and self._taken_back():
            for name, graph in list(self._graphs.items()):
                if graph.circumstances != circumstances:
                    del self._graphs[name]
        return len(self._graphs) < self.size

    def _is_kept_waiting(self) -> bool:
        """Whether it meets others, with one warning where that lasts."""
        self._waited = self._waited + 1 if self._meets_others() else 0
        if self._waited == PATIENCE:
            warnings.warn(
                f"GraphedStep, or cuda_graphs='auto': {PATIENCE} steps ran as they are that could "
                "have been replayed, because something still holds autograd's graph of an earlier "
                "one: a loss or an output in a list, say. Keep loss.detach().",
                stacklevel=5,
            )
        return self._waited > 0

    def _meets_others(self) -> bool:
        """Whether somebody keeps a graph of autograd's that ends in a parameter. Its last node
        belongs to the stream that it was made on; a capture, on a stream of its own, would fail,
        and leave the device's generator and allocator as if it still went on."""
        params = self._module().parameters()
        return any([has_lasting_node(param) for param in params if param.requires_grad])

    def _new_graph(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        circumstances: Hashable,
        modules: list[nn.Module],
        device: torch.device,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A graph that nothing is recorded in, and copies of the arguments to record it with."""
        fixed = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        inputs = [x for x in fixed if isinstance(x, Tensor)]
        args, kwargs = pytree.tree_unflatten(fixed, structure)
        return self._kind(circumstances, device, inputs, owners=modules), args, kwargs

    @contextmanager
    def _capturing(self, graph: Graph) -> Iterator[None]:
        """Record ``graph`` inside, which gets the gradients; nothing outside of it changes."""
        params = list(self._module().parameters())
        with ExitStack() as stack, without_gradients(params):
            for wrapped in self._wrapped(graph.owners):
                graph.of_modules.append((wrapped, stack.enter_context(captures(wrapped))))
            graph.sources = stack.enter_context(sources_kept())
            yield
            graph.grads = [(p, p.grad.detach()) for p in params if p.grad is not None]
        if any([x._version for x in graph.inputs]):  # copies begin at 0
            refuse(
                "changes one of its arguments in place, and a replay works on copies of them. "
                "Return the new value"
            )
        if any([grad.layout != torch.strided for _, grad in graph.grads]):
            refuse("gives sparse gradients, whose size no graph can change")
        memories: dict[int, list[torch.UntypedStorage]] = {}
        for _, grad in graph.grads:
            memory = grad.untyped_storage()
            memories.setdefault(memory_id(memory), []).append(memory)
        # One reference for every gradient in it, and one for what asks.
        graph.storages = [(same[0], len(same) + 1) for same in memories.values()]

    def _record(self, graph: Graph, work: Callable[[], Any], device: torch.device) -> Any:
        """Capture what ``work`` launches."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if graph.pool is None:
            if not self._graphs:  # a pool whose last graph has gone cannot be taken up again
                self._pool = torch.cuda.graph_pool_handle()
            graph.pool = self._pool
        recorded = torch.cuda.CUDAGraph()
        outside = torch.cuda.current_stream(device)
        # Weights that autocast has cast already would be read as they are today.
        torch.clear_autocast_cache()
        try:
            with (
                torch.cuda.device(device),
                # Tables for kernels are put into pinned memory, and that may have to be asked for.
                torch.cuda.graph(
                    recorded, pool=graph.pool, stream=self._stream, capture_error_mode="relaxed"
                ),
            ):
                output = work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.set_stream(outside)  # PyTorch leaves the capturing one where capture fails
            refuse(
                f"could not be captured as a CUDA graph ({error}). Take what waits for the device "
                "or changes from call to call out of it (activation checkpointing: "
                "preserve_rng_state=False)",
                error,
            )
        finally:
            torch.clear_autocast_cache()  # what was cast meanwhile is the graph's own
        graph.replay = recorded.replay
        return output

    def _replay(self, graph: Graph, leaves: Sequence[Any]) -> Any:
        with torch.no_grad():
            inputs = self._fill(graph, leaves)
            draws = []
            for wrapped, _ in graph.of_modules:
                session = wrapped._session
                draws.append(session.draws.of_forward(inputs, session.batch_axis))
                session.padding.before_replay(draws[-1], graph.device)
            graph.replay()
            for (wrapped, captured), draw in zip(graph.of_modules, draws, strict=True):
                wrapped._watch.gate.calls += 1
                take_over(wrapped, captured, draw)
            self._hand_out(graph)
            return pytree.tree_map_only(Tensor, Tensor.clone, graph.output)

    def _fill(self, graph: Graph, leaves: Sequence[Any]) -> list[Tensor]:
        """Copy the tensors of a call into those that its replay reads."""
        self.replays += 1
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        for fixed, given in zip(graph.inputs, inputs, strict=True):
            fixed.copy_(given, non_blocking=True)
        return inputs

    def _hand_out(self, graph: Graph) -> None:
        """Add a replay's gradients to ``p.grad``."""
        for param, grad in graph.grads:
            if param.grad is not None:
                param.grad.add_(grad)
                continue
            # A tensor of its own: optimizers leave marks on what they are given.
            lent = grad.detach()
            param.grad = lent
            self._lent.append((param, lent))
        for wrapped, captured in graph.of_modules:
            wrapped.running_step.note_sums(
                [param for found in captured.norms[:1] for param in found.params]
            )

    def _taken_back(self) -> bool:
        """Whether a replay may write gradients: what ``p.grad`` and the optimizer still hold of
        those of the last one is copied for them."""
        of_graphs = chain(*[graph.of_modules for graph in self._graphs.values()])
        steps = {id(wrapped): wrapped.running_step for wrapped, _ in of_graphs}.values()
        while self._lent:
            param, lent = self._lent.pop()
            if param.grad is lent:
                param.grad = lent.clone()
                for step in steps:
                    step.note_moved(param, lent)
            for step in steps:
                if step.sums.get(id(param)) is lent:
                    step.sums[id(param)] = lent.clone()
            del lent  # counts as a holder
        return not any(graph.is_held() for graph in self._graphs.values())
