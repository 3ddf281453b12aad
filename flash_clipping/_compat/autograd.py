"""Autograd: the running backward pass, its functions and hooks, autocast and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from flash_clipping._compat.lookup import find, needed

#: Number of the backward that runs in this thread, or -1. Without: an error.
graph_task: Callable[[], int] = needed("_C._current_graph_task_id")

#: Calls a function when the running backward is through. Without: an error.
at_end_of_backward: Callable[[Callable[[], None]], None] = needed(
    "autograd.Variable._execution_engine.queue_callback"
)

#: Whether the running backward was asked to come by a node. Without: an error.
will_run: Callable[[Any], bool] = needed("_C._will_engine_execute_node")

#: Whether a transform of torch.func runs. Without: PyTorch refuses our functions there by itself.
transforms_are_active: Callable[[], bool] = find(torch, "_C._are_functorch_transforms_active") or (
    lambda: False
)


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without its look at transforms, for who has looked. Without: with it."""
    if find(torch, "_C._are_functorch_transforms_active") is None:
        return function.apply
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


#: The hooks for saved tensors that are in force. Without: an error.
saved_tensors_hooks_now: Callable[[], Any] = partial(
    needed("_C._autograd._top_saved_tensors_default_hooks"), True
)


def has_lasting_node(param: Tensor) -> bool:
    """Whether somebody holds autograd's node of a parameter, on which marks last as long as it
    does. Without: yes, which keeps steps from being captured."""

    def marks() -> Any:
        node: Any = torch.autograd.graph.get_gradient_edge(param).node
        return getattr(node, "metadata", None)

    if (first := marks()) is None:
        return True
    first[has_lasting_node] = True
    del first
    return has_lasting_node in marks()


#: Whether autocast is on, on any device. Without: an error.
is_autocasting: Callable[[], bool] = needed("_C._is_any_autocast_enabled")


@contextmanager
def checkpoints_replaced(by: Any) -> Iterator[None]:
    """Another function in the place of re-entrant checkpoints. Without: none, so layers in such
    checkpoints are refused where it matters what they read."""
    before = getattr(checkpoint, "CheckpointFunction", None)
    if before is None:
        yield
        return
    setattr(checkpoint, "CheckpointFunction", by)  # noqa: B010 (mypy sees a type)
    try:
        yield
    finally:
        setattr(checkpoint, "CheckpointFunction", before)  # noqa: B010
