"""Mixing that no clipping bounds: what one sample does to where another one's tokens go.

Capacities that are full, experts that choose their tokens, and losses that balance the loads of a
batch leave every layer's rows in their places, so that no layer can be refused for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.diagnostics.batch import cast
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, largest_norm_error
from flash_clipping.diagnostics.other_batches import LARGEST_SIZE, Norms
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks, floats, narrowest

#: How many samples are replaced, one at a time.
REPLACED = 4

#: Relative change of another sample's output that is no rounding, in float64: parts of a model may
#: be in fp32 all the same.
CHANGED = 1e-5

ADVICE = (
    "No clipping bounds that. Let a sample's outputs depend on that sample alone: no capacity that "
    "tokens of all samples share, no experts that choose their tokens, no statistics of the batch."
)

#: Module, and which of its inputs or outputs -> tensors, in the order in which modules ran.
Seen: TypeAlias = dict[tuple[str, str], Tensor]


def check_routes(subject: Subject) -> None:
    """Put another sample in the place of one, in the plain model's batch: the outputs of all others
    must stay. If they do not, and integers that modules read or return (chosen experts) change for
    them as well, these are named."""
    B = subject.samples.size
    if B < 2 or not subject.options["batch_first"]:
        return
    model, dtype, tolerance = _wide(subject)
    before = _run(subject, model, dtype, [*range(B)])
    for sample in sorted({index * B // REPLACED for index in range(REPLACED)}):
        others = [b for b in range(B) if b != sample]
        order = [(sample + 1) % B if b == sample else b for b in range(B)]
        after = _run(subject, model, dtype, order)
        changed = [
            place
            for place, x in after.items()
            if _differs(_rows(before.get(place), B), _rows(x, B), others, tolerance)
        ]
        if not any(place[1] == "result" for place in changed):
            continue
        routes = [f"{what} of {path}" for path, what in changed if what != "result"]
        where = f", and where they are sent: {routes[0]}" if routes else ""
        subject.failures.append(
            f"Another sample in the place of sample {sample} changes the outputs of other samples"
            f"{where}. {ADVICE}"
        )
        return


def check_crowd(subject: Subject, flash: Flash, norms: Norms, tolerance: float) -> None:
    """Many copies of one sample, which want the same experts: each must have the norm that it has
    in the batch. Only for models whose modules hand integers of samples to each other.

    Args:
        flash: does the step.
        norms: of the whole batch.
    """
    B = subject.samples.size
    if B < 2 or not subject.options["batch_first"] or not _has_routes(subject):
        return
    size = min(LARGEST_SIZE, 4 * B)
    expected = (norms[0],) * size
    try:
        with fallbacks([]):  # noted already
            flash.step(subject.samples.take([0] * size), flash.bound)
        error = largest_norm_error(floats(flash.norms), expected, expected, FLOOR[flash.dtype])
        reason = "" if error <= tolerance else f"norms change by {error:.1e}"
    except torch.OutOfMemoryError:
        subject.notes.append(
            f"A batch of {size} copies of one sample, which fills the capacities of experts, did "
            "not fit."
        )
        return
    except Exception as failure:
        reason = described(failure)
    if reason:
        subject.failures.append(
            f"In a batch of {size} copies of sample 0: {reason}. Copies are in each other's way. "
            f"{ADVICE}"
        )


def check_balance(subject: Subject) -> None:
    """Whether the loss contains an ``aux_loss`` that a model returned: in ``transformers`` a
    balance of the loads of the whole batch."""
    model = copy.deepcopy(subject.plain)
    found: list[tuple[str, Tensor]] = []

    def note(path: str, inputs: Any, output: Any) -> None:
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


def _wide(subject: Subject) -> tuple[nn.Module, torch.dtype | None, float]:
    """The model in float64, or in its own dtype where it runs in no other; and what it rounds."""
    model = copy.deepcopy(subject.plain).to(torch.float64)
    try:
        _run(subject, model, torch.float64, [0])
    except Exception:
        own = narrowest(param.dtype for param in subject.plain.parameters())
        return copy.deepcopy(subject.plain), None, TOLERANCE[own]
    return model, torch.float64, CHANGED


def _run(subject: Subject, model: nn.Module, dtype: torch.dtype | None, order: list[int]) -> Seen:
    """Integers that modules read or returned, and the numbers that the model itself returned."""
    seen: Seen = {}

    def note(path: str, inputs: Any, output: Any) -> None:
        for kind, tree in (("input", inputs), ("output", output)):
            for i, x in enumerate(_tensors(tree)):
                if not x.is_floating_point():
                    seen[path, f"{kind} {i}"] = x.detach().clone()

    def result(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            if x.is_floating_point():
                seen[f"result {len(seen)}", "result"] = x.detach().clone()

    batch = subject.samples.take(order)
    handle = model.register_forward_hook(result)
    try:
        with _hooked(model, note):
            subject.task.value(model, batch if dtype is None else cast(batch, dtype))
    finally:
        handle.remove()
    return seen


def _has_routes(subject: Subject) -> bool:
    """Whether modules hand integers of samples to each other, besides those of the batch."""
    model, samples = copy.deepcopy(subject.plain), subject.samples
    given = {x.data_ptr() for x in _tensors(samples.all)}
    found: list[Tensor] = []
    with _hooked(model, lambda path, inputs, output: found.extend(_tensors((inputs, output)))):
        subject.task.value(model, samples.all)
    return any(
        not x.is_floating_point()
        and x.data_ptr() not in given
        and _rows(x, samples.size) is not None
        for x in found
    )


def _tensors(tree: Any) -> list[Tensor]:
    tree = dict(tree) if hasattr(tree, "items") else tree  # outputs of transformers
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _rows(x: Tensor | None, samples: int) -> Tensor | None:
    """``[samples, ...]`` where the first axis may be samples, or tokens of samples in turn."""
    if x is None or not x.dim() or not len(x) or len(x) % samples:
        return None
    return x.unflatten(0, (samples, -1))


def _differs(one: Tensor | None, other: Tensor | None, kept: list[int], tolerance: float) -> bool:
    """Whether rows of samples that were kept are not what they were."""
    if one is None or other is None or one.shape != other.shape:
        return False
    one, other = one[kept], other[kept]
    if not one.is_floating_point():
        return not torch.equal(one, other)
    scale = one.abs().max().nan_to_num(nan=1.0, posinf=1.0)
    return bool(((one - other).abs() > tolerance * scale).any())


@contextmanager
def _hooked(model: nn.Module, note: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call ``note(path, inputs, output)`` after every forward of a module."""
    handles = []
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            note(name, [*args, *kwargs.values()], output)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
