"""Mixing that no clipping bounds: what one sample does to where another one's tokens go.

Capacities that are full, experts that choose their tokens, and losses that balance the loads of a
batch leave every layer's rows in their places, so that no layer can be refused for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.diagnostics.batch import Samples
from flash_clipping.diagnostics.oracle import TOLERANCE
from flash_clipping.diagnostics.watch import Subject, narrowest

#: How many samples are replaced, one at a time.
REPLACED = 4

#: Relative change of another sample's output that is no rounding, in float64: parts of a model may
#: be in fp32 all the same.
CHANGED = 1e-5

ADVICE = (
    "No clipping bounds that. Let a sample's outputs depend on that sample alone: no capacity that "
    "tokens of all samples share, no experts that choose their tokens, no statistics of the batch."
)


def check_routes(subject: Subject) -> None:
    """Put another sample in the place of one, in the plain model's batch: the outputs of all others
    must stay. If they do not, and integers that modules read or return (chosen experts) change for
    them as well, these are named."""
    B = subject.samples.count
    if B < 2 or not subject.batch_first:
        return
    model, samples = subject.exact()
    tolerance = CHANGED
    if subject.oracle_dtype is None:
        tolerance = TOLERANCE[narrowest(param.dtype for param in model.parameters())]
    results, routes = _run(subject, model, samples, range(B))
    subject.has_routes = bool(routes)
    for sample in sorted({index * B // REPLACED for index in range(REPLACED)}):
        order = [(sample + 1) % B if b == sample else b for b in range(B)]
        others = [b for b in range(B) if b != sample]
        changed, sent = _run(subject, model, samples, order)
        if _changed(results, changed, others, tolerance):
            moved = _changed(routes, sent, others, tolerance)
            where = f", and where they are sent: {moved[0]}" if moved else ""
            subject.failures.append(
                f"Another sample in the place of sample {sample} changes the outputs of other "
                f"samples{where}. {ADVICE}"
            )
            return


def _run(
    subject: Subject, model: nn.Module, samples: Samples, order: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers that the model returned, and integers that modules read or returned and that are not
    the batch's own: rows of samples, ``[B, ...]``, by where they were found."""
    results: dict[str, Tensor] = {}
    routes: dict[str, Tensor] = {}
    batch = samples.take(order)
    given = {x.data_ptr() for x in tensors_in(batch)}

    def note(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for kind, tree in (("input", inputs), ("output", output)):
            for i, x in enumerate(tensors_in(tree)):
                # The first axis may be samples, or tokens of samples in turn.
                if not x.dim() or not len(x) or len(x) % len(order):
                    continue
                rows = x.detach().clone().unflatten(0, (len(order), -1))
                if x.is_floating_point():
                    if module is model and kind == "output":
                        results[f"{len(results)}"] = rows
                elif x.data_ptr() not in given and not x.is_complex():
                    routes[f"{kind} {i} of {path}"] = rows

    with _hooked(model, note):
        subject.task.value(model, batch)
    return results, routes


def _changed(
    before: dict[str, Tensor], after: dict[str, Tensor], kept: Sequence[int], tolerance: float
) -> list[str]:
    """Where rows of samples that were kept are not what they were."""
    found = []
    for place, x in after.items():
        if place in before and before[place].shape == x.shape:
            one, other = before[place][kept].double(), x[kept].double()
            scale = one.abs().max().nan_to_num(nan=1.0, posinf=1.0)
            if bool(((one - other).abs() > tolerance * scale).any()):
                found.append(place)
    return found


def check_balance(subject: Subject) -> None:
    """Whether the loss contains an ``aux_loss`` that a model returned: in ``transformers`` a
    balance of the loads of the whole batch."""
    model = copy.deepcopy(subject.plain)
    found: list[tuple[str, Tensor]] = []

    def note(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        aux_loss = getattr(output, "aux_loss", None)
        if isinstance(aux_loss, Tensor) and aux_loss.requires_grad:
            found.append((path, aux_loss))

    with torch.enable_grad(), _hooked(model, note):
        loss = subject.task(model, subject.samples.all)
    if not found or not loss.requires_grad:
        return
    weights = torch.autograd.grad(loss, [aux for _, aux in found], allow_unused=True)
    for (path, _), weight in zip(found, weights, strict=True):
        if weight is not None and weight.any():
            subject.failures.append(
                f"The loss contains the aux_loss of {path}, with weight {float(weight.sum()):.1g}: "
                "a balance of the loads of the whole batch, through which one sample changes the "
                "others' gradients. No clipping bounds that. Set config.output_router_logits=False "
                "or config.router_aux_loss_coef=0, or balance each sample by itself."
            )
            return


@contextmanager
def _hooked(model: nn.Module, note: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call ``note(path, module, inputs, output)`` after every forward of a module."""
    handles = []
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            note(name, module, [*args, *kwargs.values()], output)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
