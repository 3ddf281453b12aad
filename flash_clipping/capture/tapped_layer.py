"""A layer with a rule as one function of autograd's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, is_grad_enabled, nn

from flash_clipping._compat import apply_of, is_alias_of
from flash_clipping.capture.declared_rows import DeclaredRows
from flash_clipping.capture.factor_source import Trainable, ordinary_gradients
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import stored_where_cheaper
from flash_clipping.rules.registry import GradRequest, own

#: Names and trainable parameters of a layer that takes the short way, and what its backward is
#: asked for without, and with, the gradient of its input.
Proven: TypeAlias = tuple[list[str], list[nn.Parameter], GradRequest, GradRequest]

_NO_SECOND = (
    "FC410 {}: backward(create_graph=True) asks for second derivatives, which flash clipping does "
    "not have. Call backward() without create_graph, or take such gradients on the unwrapped "
    f"model.{ONE_BY_ONE}"
)


class TappedLayer(torch.autograd.Function):
    """A layer with a rule. Its trainable parameters are inputs: its output requires grad, and any
    backward that autograd can be asked for records the layers that it should reach.

    What its backward has to know is kept on the context itself: the tap, its trainable parameters
    as of forward, the call of the root and the place of its input among that call's readers,
    whether this is checkpointing's second forward (``recomputed``), which samples its rows were
    declared to be of (``rows``), and saved values that are no tensors (``others``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        tap: Any,
        trainable: Trainable,
        call: ForwardCall | None,
        place: int,
        recomputed: bool,
        rows: DeclaredRows | None,
        anchor: Tensor,
        *inputs_and_params: Any,
    ) -> Any:
        assert tap.rule is not None
        inputs = inputs_and_params[: -len(trainable[1])]
        output, saved = tap.rule.forward(tap.layer, *inputs)
        if not isinstance(output, Tensor):
            output = tuple(_fresh(part, inputs) if part._is_view() else part for part in output)
        elif output._is_view():
            output = _fresh(output, inputs)
        # Tensors go through autograd's own saving (checkpointing, version checks); the rest not.
        others = {
            i: value
            for i, value in enumerate(saved)
            if value is not None and not isinstance(value, Tensor)
        }
        if others:
            saved = [None if i in others else value for i, value in enumerate(saved)]
        ctx.others = others
        tap.is_simple = not others and isinstance(output, Tensor)
        ctx.save_for_backward(*saved)
        ctx.tap, ctx.trainable, ctx.recomputed = tap, trainable, recomputed
        ctx.call, ctx.place, ctx.rows = call, place, rows
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return backward_of(ctx, grad_outputs)


def backward_of(
    ctx: Any,
    grad_outputs: tuple[Tensor, ...],
    hand_on: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> Any:
    """The backward of a tapped layer. ``hand_on`` makes of its inputs' gradients what is returned;
    it is told of saved values as well, which can be asked for once."""
    tap: Any = ctx.tap
    names, params = ctx.trainable
    rule = tap.rule
    assert rule is not None
    if is_grad_enabled():
        raise FlashClippingError(_NO_SECOND.format(tap.path))
    grad_output = grad_outputs[0] if len(grad_outputs) == 1 else grad_outputs
    saved = ctx.saved_tensors
    if ctx.others:
        saved = list(saved)
        for place, value in ctx.others.items():
            saved[place] = value
    session = tap.session
    wanted = ctx.needs_input_grad[len(_NONE) : -len(params)]
    needs = GradRequest(wanted, frozenset(names), session.options.backend)
    grads, by_name = rule.backward(tap.layer, saved, grad_output, needs)
    try:
        factors = [by_name[name] for name in names]
    except KeyError as missing:
        raise FlashClippingError(
            f"FC160 {tap.path}: its rule {type(rule).__name__} returned no factor for "
            f"{missing.args[0]}; return one for every name in needs.params."
        ) from None
    if not isinstance(grads, tuple):
        grads = (grads,)
    for i, wanted in enumerate(needs.inputs):
        if wanted and (i >= len(grads) or grads[i] is None):
            raise FlashClippingError(
                f"FC161 {tap.path}: its rule {type(rule).__name__} returned no gradient for input "
                f"{i}, which requires one; whatever computes that input would learn nothing. "
                "Return a tuple with a gradient for every input that needs.inputs asks for."
            )
    if hand_on is not None:
        grads = hand_on(grads, saved)
    rest = len(needs.inputs) - len(grads)
    if session.mode.enabled:
        readers = None if ctx.call is None else (ctx.call, ctx.place)
        if readers is not None:
            tap.note_recorded(ctx.trainable, ctx.call.count_readers(ctx.place, params))
        tap.record(params, factors, ctx.recomputed, readers, ctx.rows)
        return (*_NONE, *grads, *(None,) * (rest + len(params)))
    of_params = ordinary_gradients(session, params, zip(params, factors, strict=True))
    return (*_NONE, *grads, *(None,) * rest, *of_params)


class ProvenLayer(torch.autograd.Function):
    """A layer of one input and one output, with a rule, that has been through
    :class:`TappedLayer` and is called in the same way again."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: Any,
        proven: Proven,
        call: ForwardCall,
        anchor: Tensor,
        x: Tensor,
        *params: Tensor,
    ) -> Tensor:
        output: Tensor
        output, saved = tap.rule.forward(tap.layer, x)
        ctx.save_for_backward(*saved)
        # The call lives as long as this graph does: later backward passes ask it.
        ctx.tap, ctx.proven, ctx.call = tap, proven, call
        if output._is_view():  # to be changed in place, maybe
            return output.clone() if is_alias_of(x, output) else output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        tap: Any = ctx.tap
        session = tap.session
        if is_grad_enabled():
            raise FlashClippingError(_NO_SECOND.format(tap.path))
        names, params, needs_without, needs_with = ctx.proven
        needs = needs_with if ctx.needs_input_grad[4] else needs_without
        grad, by_name = tap.rule.backward(tap.layer, ctx.saved_tensors, grad_output, needs)
        factors: Sequence[PerSampleGrad] = [*map(by_name.__getitem__, names)]
        if not session.mode.enabled:
            of_params = ordinary_gradients(session, params, zip(params, factors, strict=True))
            return None, None, None, None, grad, *of_params
        running = session.calls.running_pass()
        if running is None:
            running = tap.running_backward_pass(recomputed=False)
        shape = grad_output.shape
        if tap.worth_storing.get(shape) is not False:
            # Per-sample gradients, formed now, where that is cheapest.
            found = stored_where_cheaper(factors, lambda: tap.shared, session.options.backend)
            tap.worth_storing.setdefault(shape, found is not factors)
            factors = found
        running.record(tap.path, params, factors)
        return None, None, None, None, grad, *(None,) * len(params)


#: Gradients of what a tapped layer is told besides its inputs and parameters.
_NONE = (None,) * 7


# torch.autograd.Function.apply without its look at functorch's transforms, which are refused above:
# it is a tenth of a tap's time.
apply_tapped_layer = apply_of(TappedLayer)
apply_proven_layer = apply_of(ProvenLayer)


def _fresh(output: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """An output that is a view, so that it may be changed in place, as an in-place ReLU does."""
    for x in inputs:
        if isinstance(x, Tensor) and is_alias_of(x, output):
            return output.clone()
    return own(output)
