"""The loader, the model's batch and the criterion's losses must count the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flash_clipping.capture.draws import ONE_DRAW
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError


def check_against_loader(
    session: ClippingSession, forward: ForwardCall, advice: str = ONE_BY_ONE
) -> None:
    """Refuse a batch that is not what the loader drew; ``advice`` ends the message."""
    drawn = session.rows.drawn
    drawn = drawn if drawn != 0 else 1  # one row, which counts nothing
    if drawn is None and forward.draw is not None and not session.rows.draws.strict:
        drawn = forward.draw.rows
    if (
        drawn is None
        or not forward.recorded
        or drawn in forward.batch_sizes
        or forward.units is not None  # these were drawn, and the map was compared with their number
    ):
        return
    if max(forward.batch_sizes, default=drawn) < drawn and advice:
        advice = " Leave samples out of the dataset:\n    dataset = Subset(dataset, indices)"
    elif forward.draw is not None:
        advice = f"{ONE_DRAW}{advice}"
    sizes = " or ".join(map(str, forward.batch_sizes)) or "unknown size"
    axis, is_first = session.options.batch_axis, session.options.batch_first
    raise FlashClippingError(
        f"FC240 the model: the loader drew {drawn} samples, but the model is called with a batch "
        f"of {sizes} (the size of axis {axis} of its inputs). Give the model one row per sample, "
        f"padded to one length; or use batch_first={not is_first}.{advice}"
    )


def check_losses(session: ClippingSession, losses: Tensor) -> None:
    """Refuse per-sample losses that are not as many as the samples of the last forward."""
    call = session.current_forward
    samples = None if call is None else call.batch_size
    if not session.mode.enabled or samples is None or not losses.dim():
        return
    counts = losses.shape[:1] if session.options.batch_first else losses.shape[:2]
    if call is not None and call.units is not None:
        # All are added up, whoever they belong to. Of a row with several units there is no loss:
        # a mean over its positions would be shared by all of these.
        counts_known = call.units.count, len(call.units.map)
        if counts[0] in counts_known:
            return
        if call.units.by_position:
            raise FlashClippingError(
                f"FC241 the criterion: found {counts[0]} losses; expected one for each of the "
                f"{counts_known[1]} positions, or of the {counts_known[0]} units, which are parts "
                "of rows: call it on logits.flatten(0, 1) and labels.flatten(), without shape=."
            )
    if samples not in counts:
        axis, is_first = session.options.batch_axis, session.options.batch_first
        raise FlashClippingError(
            f"FC241 the criterion: found {counts[0]} losses, but the model was called with a batch "
            f"of {samples} samples (the size of axis {axis} of its input). Give both one row per "
            f"sample; axis {axis} is the batch (batch_first={is_first})."
        )


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
