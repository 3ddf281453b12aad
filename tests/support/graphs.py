"""Steps replayed as CUDA graphs, on any machine.

Without a GPU a replay is played by hand: the step runs again on the memory it was captured with,
unseen by everything that counts or publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flash_clipping import GradSampleModuleFlashClipping, GraphedStep
from flash_clipping.graphs.graphed_model import GraphedModel
from flash_clipping.graphs.graphed_step import Graph
from tests.support.models import squared_loss
from tests.support.sums import norm_of


class PlayedByHand(GraphedStep):
    """Captures and replays without a device."""

    def _device(self, modules: list[nn.Module], tensors: list[Tensor]) -> torch.device:
        return torch.device("cpu")

    def _record(self, graph: Graph, work: Callable[[], Any]) -> Any:
        def replay() -> None:
            params = list(self._module().parameters())
            before = [p.grad for p in params]
            with ExitStack() as stack, torch.enable_grad():
                again = [stack.enter_context(m._session.captures()) for m, _ in graph.of_models]
                for p in params:
                    p.grad = None
                output = work()
            for _, grad in graph.grads:
                grad.fill_(torch.nan)
            for (_, captured), new in zip(graph.of_models, again, strict=True):
                pairs = zip(captured.norms, new.norms, strict=True)
                for held, now in pairs:  # norms and what they were clipped by
                    held.norms_PB.copy_(now.norms_PB)
                    held.upper.copy_(now.upper)
                for fixed, coef in zip(captured.coefs, new.coefs, strict=True):
                    fixed.copy_(coef)
            for param, fixed in graph.grads:
                fixed.copy_(param.grad)
            leaves = zip(pytree.tree_leaves(graph.output), pytree.tree_leaves(output), strict=True)
            for fixed, new_leaf in leaves:
                if isinstance(fixed, Tensor):
                    fixed.copy_(new_leaf)
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

        graph.replays.append(replay)
        return work()


class CallsByHand(GraphedModel):
    """Captures and replays without a device: the forward runs again, unseen."""

    def _device(self, modules: list[nn.Module], tensors: list[Tensor]) -> torch.device:
        return torch.device("cpu")

    def may_replay(self, device: torch.device) -> bool:
        return self.off is None

    def _room_for(self, result: Tensor) -> Tensor:
        return torch.full_like(result, 2.0**-10)

    def _record(self, call: Any, work: Callable[[], Any]) -> Any:
        first = not call.replays
        if first:
            call.forward = work
        output = work()

        def replay() -> None:
            session = self.model._session
            current = session.calls.current
            params = list(self._module().parameters())
            before = [p.grad for p in params]
            known = list(session.calls.forwards)
            counted = [forward.counted_rows for forward in known]
            for forward in known:  # those of the capture are asked for
                forward.counted_rows = None
            with session.captures() as again, torch.enable_grad():
                for p in params:
                    p.grad = None
                output = call.forward()
                if first:
                    leaves = pytree.tree_leaves(call.output), pytree.tree_leaves(output)
                    with torch.no_grad():
                        for fixed, found in zip(*leaves, strict=True):
                            fixed.copy_(found)
                else:
                    work()
            with torch.no_grad():
                for _, grad in call.grads:
                    grad.fill_(torch.nan)
                pairs = zip(call.of_models[0][1].norms, again.norms, strict=not first)
                for held, now in () if first else pairs:
                    held.norms_PB.copy_(now.norms_PB)
                    held.upper.copy_(now.upper)
                for param, fixed in () if first else call.grads:
                    fixed.copy_(param.grad)
            for p, grad in zip(params, before, strict=True):
                p.grad = grad
            for forward in session.calls.forwards:
                forward.spent |= forward not in known
            for forward, rows in zip(known, counted, strict=True):
                forward.counted_rows = rows
            session.calls.current = current

        call.replays.append(replay)
        return output


def replay_by_hand(model: Any) -> None:
    """``cuda_graphs="auto"``, by hand."""
    root = model._module
    model._graphs = root._compiled_call_impl = CallsByHand(model, root._call_impl)


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


class GraphedTraining:
    """The same training with and without graphs."""

    def __init__(self, graphed: type[GraphedStep] | None, *, wrap: bool = True, **options: Any):
        self.plain = small_network()
        self.model: Any = self.plain
        if wrap:
            options = {"max_grad_norm": 0.5} | options
            self.model = GradSampleModuleFlashClipping(self.plain, **options)

        def step(x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            losses = squared_loss(self.model, (x,)) * scale
            losses.mean().backward()
            return {"losses": losses}

        self.calls = 0
        self.step: Any = step
        if graphed is not None:
            self.step = graphed(step, self.model)

    def results(self, *args: Any) -> list[Tensor]:
        """What a call leaves."""
        self.model.zero_grad(set_to_none=True)
        output = self.step(*args)
        found = [output["losses"].detach()]
        if self.model is not self.plain:
            found += [self.model.get_norm_sample(), self.model.get_clipping_coef()]
            found += [norm_of(self.model, p) for p in self.plain.parameters() if p.requires_grad]
        return found + [p.grad.clone() for p in self.plain.parameters() if p.grad is not None]


def batches(count: int, size: int = 4, start: int = 0) -> list[Tensor]:
    draws = [torch.Generator().manual_seed(start + i) for i in range(count)]
    return [
        torch.randn(size, 5, 6, generator=generator) * (i + 1) for i, generator in enumerate(draws)
    ]


def assert_same_tensors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def warmed(**options: Any) -> tuple[GraphedTraining, GraphedTraining]:
    """Two of the same, the first past its capture."""
    graphed, eager = GraphedTraining(PlayedByHand, **options), GraphedTraining(None, **options)
    for x in batches(4):
        assert_same_tensors(graphed.results(x), eager.results(x))
    assert (graphed.step.calls, graphed.step.replays) == (4, 1)
    return graphed, eager
