"""Batches of nobody: Poisson sampling draws no sample about once in ``e^batch`` steps.

The loader then gives one row of the data, which was not drawn, so that collate functions, loops and
models need not know. The model runs on it as it is, outside of every recording, and the backward of
what it returns leaves empty norms and clipped sums of 0, whatever the row's gradient is: the step
is noise. In shards all processes run forward and backward alike; there what layers record of the
row is dropped (:class:`~flash_clipping.distributed.backward_pass.ShardedBackwardPass`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.inputs import map_tensors
from flash_clipping.capture.no_trace import untouched
from flash_clipping.capture.refused_forwards import NoRenormalisation
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import TO_EXPORT, FlashClippingError, NoAttribute


class RootForward(Tap):
    """Stands in for the root module's ``forward``, around its tap if it has one."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, "", None, session)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, which trainers choose arguments by."""
        forward = self.instance_forward
        while isinstance(forward, Tap):
            forward = forward.instance_forward
        if forward is None:
            forward = MethodType(type(self.layer).forward, self.layer)
        return inspect.signature(forward)

    def __getattr__(self, name: str) -> Any:
        raise NoAttribute(
            f"FC430 the forward of a private model has no {name!r}, which exports of PyTorch read. "
            f"{TO_EXPORT}"
        )


class WatchedForward(RootForward):
    """Stands in for the root module's ``forward``: rows of nobody run past all taps, and the first
    forward is refused if it writes into weights."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, session)
        self.watched = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        call = session.calls.returning
        if (
            call is not None
            and call.of_nobody
            and session.recording
            and not session.options.is_sharded
        ):
            return of_nobody(self.layer, session, self.original, args, kwargs)
        if self.watched or not session.recording or is_dynamo_compiling():
            return self.original(*args, **kwargs)
        with NoRenormalisation():
            output = self.original(*args, **kwargs)
        self.watched = True
        return output


def of_nobody(
    root: nn.Module, session: ClippingSession, forward: Any, args: Any, kwargs: Any
) -> Any:
    """What ``forward`` of the root returns for rows of nobody, which leave no trace in it."""
    with untouched(root), session.bypass(), torch.enable_grad():  # which outputs require grad?
        output = forward(*args, **kwargs)
    anchor = [torch.empty(0, requires_grad=True)]
    return map_tensors(
        lambda x: without_gradients(x, session, anchor) if x.requires_grad else x,
        output,
        packed=True,
    )


def without_gradients(x: Tensor, session: ClippingSession, anchor: Sequence[Tensor]) -> Tensor:
    """The same values; a backward pass from them is one of a batch without samples."""
    params = session.options.trainable()
    found: Tensor = NoSamples.apply(session, params, x.detach(), *anchor, *params)
    return found


class NoSamples(torch.autograd.Function):
    """Values whose backward records no sample of any parameter.

    The parameters are inputs, so that autograd knows which of them a backward was asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        session: ClippingSession,
        params: list[nn.Parameter],
        values: Tensor,
        *anchor_and_params: Tensor,
    ) -> Tensor:
        ctx.session, ctx.params = session, params
        ctx.set_materialize_grads(False)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if ctx.session.mode.enabled:
            # Its end leaves zeros wherever nothing was recorded.
            ctx.session.begin_backward().without_samples = ctx.params
        return (None,) * len(ctx.needs_input_grad)


def step_without_samples(module: Any) -> None:
    """Leave what a backward of a batch without samples leaves, where the loader drew such a batch
    for this wrapped model and nothing ran on it."""
    session: ClippingSession = module._session
    draw, params = session.rows.draws.without_samples(), session.options.trainable()
    if draw is None or not params or not session.mode.enabled or module._sharded is not None:
        return
    call = session.begin_forward([])
    call.draw = draw
    without_gradients(torch.zeros(()), session, [torch.empty(0, requires_grad=True)]).backward()


def refuse_no_rows(root: nn.Module, session: ClippingSession, tensors: Sequence[Tensor]) -> None:
    """Raise ``FlashClippingError`` for a call of the root with these, of which the first has no
    element, if that is one without rows. Bags make samples of what they read."""
    sizes = [
        x.shape[session.options.batch_axis] for x in tensors if x.dim() > session.options.batch_axis
    ]
    has_bags = any(isinstance(module, nn.EmbeddingBag) for module in root.modules())
    is_empty = sizes[:1] == [0] or session.rows.units_of_calls.sample_of is not None
    if is_empty and not (has_bags and any(sizes)):
        raise FlashClippingError(
            "FC250 the model: called with a batch without rows. Leave out the call for an empty "
            "batch, or part of one, that was made by hand:\n"
            "    if len(x):\n"
            "        criterion(model(x), y).backward()"
        )
