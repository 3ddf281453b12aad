"""Where the samples are in what each layer returns: seen from gradients, not from sizes or values.

The outputs of each sample go backward alone; the rows of a layer's output gradient that are not 0
are that sample's. A row that got a gradient of two has several samples; one that got none is
padding, and nobody's. Layers whose samples may lie along another axis work position by position:
samples lie in what they read as they do in what they return. Of parameters that modules use by
themselves, the operand and the result of every operation with samples are checked.

Shape suffixes: ``B`` samples, ``R`` rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.reads import Read
from flash_clipping.capture.proof.repeatable import perturbed
from flash_clipping.capture.proof.runs import Forward, Runs, Subject
from flash_clipping.capture.row_layouts import Layout

#: Relative difference of two outputs that are the same but for rounding; of 16 bits.
SAME, SAME_LOW = 1e-4, 0.1

#: A row that no sample reaches (padding), and one that several reach.
NOBODY, MANY = -1, -2

#: A layer's path, and which of its calls.
_Call = tuple[str, int]


@dataclass(frozen=True)
class SampleLayout:
    """How the rows of a layer's output map to samples.

    Attributes:
        kind: in words; one of the constants below where there is no layout.
        layout: the axis of the samples; ``None`` where a sample's entries do not lie together.
        parts: entries of each sample along that axis.
    """

    kind: str
    layout: Layout | None = None
    parts: int = 0


#: No gradient reached the layer.
UNREACHED = SampleLayout("not reached by a gradient")
#: Only outputs from which nothing may come back reach it, as samples reach each other in them.
UNFIT = SampleLayout("reached by no output whose samples stay apart")
#: Each row has one sample, whose rows lie apart: tokens that a router sent to an expert.
ROUTED = SampleLayout("routed")
#: Some row has several samples.
SEVERAL = SampleLayout("several samples in a row")

#: Of operations with bare parameters, by what their layouts go by: the layer's name, and what met
#: the parameters and what came of it, call by call.
Operations = dict[str, tuple[str, list[SampleLayout], list[SampleLayout]]]


@dataclass(frozen=True)
class Probed:
    """The result of a probe.

    Attributes:
        layouts: of every call of every layer with trainable parameters, by its path.
        unfit: numbers of the outputs in which samples reach each other.
        operations: between bare parameters and samples.
        reached: by gradients of some outputs: layers, by their paths and calls, and reads of what
            met bare parameters.
    """

    layouts: dict[str, list[SampleLayout]] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    operations: Operations = field(default_factory=dict)
    reached: AbstractSet[_Call | Read] = frozenset()


def probe(subject: Subject) -> Probed:
    """Where the samples are in what layers with trainable parameters return.

    Raises:
        ModelsOwnError: the model raises on this batch.
    """
    params, chosen = subject.session.options.trainable(), subject.chosen_samples()
    if not params or not chosen:
        return Probed()
    with perturbed(params):
        return _probe(Runs(subject), subject.samples(), chosen)


def _probe(runs: Runs, samples: Samples, chosen: Sequence[int]) -> Probed:
    """A second batch, in which the first sample stands among others, tells which outputs are its
    own."""
    B = max(len(chosen), 2)
    places = range(B)
    own = [chosen[b % len(chosen)] for b in places]  # of one sample there are two copies
    rest = [b for b in range(samples.count) if b not in chosen]
    others = [chosen[0], *[rest[0] if rest else chosen[-1 if B > 2 else 0]] * (B - 1)]

    def outputs_of(forward: Forward) -> dict[int, Tensor]:
        return {n: x.detach() for n, x in forward.outputs.items()}

    outputs = [runs.run(samples.batch(order), places, outputs_of) for order in (own, others)]
    unfit = frozenset(
        n for n, x in outputs[0].items() if n not in outputs[1] or not _same(x[0], outputs[1][n][0])
    )
    fit = outputs[0].keys() - unfit
    seen, given = _Seen(), samples.batch(own)

    def take(forward: Forward) -> None:
        # At last, outputs from which nothing may come back.
        for on, only in (*(([b], fit) for b in places), (places, unfit)):
            seen.passes.append({})
            forward.backward(dict.fromkeys(on, 1.0), only, sums=False, also=seen.watched)

    handles = [
        module.register_forward_hook(partial(seen.note, path), with_kwargs=True)
        for path, module in runs.root.named_modules()
        if module is not runs.root and any(p.requires_grad for p in module.parameters(False))
    ]
    try:
        runs.run(given, places, take, probing=seen)
    finally:
        for handle in handles:
            handle.remove()
        # Their hooks hold ``seen``, in a cycle that Python's collector does not see.
        seen.watched.clear()
    layouts: defaultdict[str, list[SampleLayout]] = defaultdict(list)
    operations: Operations = {}
    for key, shape in seen.shapes.items() if seen.passes else ():
        nothing = torch.zeros(shape, dtype=torch.bool)
        masks = [of.get(key, nothing) for of in seen.passes]
        first_axis = 0 if key in seen.operations else runs.session.options.batch_axis
        layout = layout_of_owners(owners_of(masks[:B]), B, first_axis)
        if layout is UNREACHED and masks[-1].any():
            layout = UNFIT
        if key in seen.operations:
            use, _, is_after = key
            path, _ = seen.operations[key]
            _, before, after = operations.setdefault(use, (path, [], []))
            (after if is_after else before).append(layout)
            continue
        layouts[key[0]].append(layout)
    reached: set[_Call | Read] = set()
    for key in {key for of in seen.passes for key, mask in of.items() if mask.any()}:
        reached.update(seen.operations[key][1] if key in seen.operations else [key])
    return Probed(layouts, unfit, operations, reached)


def owners_of(masks: Sequence[Tensor]) -> Tensor:
    """The sample of each row, from the rows that got a gradient of each sample."""
    reached = torch.stack([mask.cpu() for mask in masks])
    owners = reached.int().argmax(0)
    owners[~reached.any(0)] = NOBODY
    owners[reached.sum(0) > 1] = MANY
    return owners


def layout_of_owners(owners: Tensor, B: int, first_axis: int = 0) -> SampleLayout:
    """The first axis along which each sample's entries lie together.

    Args:
        owners: the sample of each row, :data:`NOBODY` or :data:`MANY`; on the CPU, with the axes
            of the output but its last.
        B: samples.
        first_axis: the axis that is tried first.
    """
    if (owners == MANY).any():
        return SEVERAL
    if (owners == NOBODY).all():
        return UNREACHED
    axes = sorted(range(owners.dim()), key=lambda axis: (axis != first_axis, axis))
    own = torch.arange(B)[:, None]
    for axis in axes:
        layout = Layout(axis)
        if (parts := layout.parts(owners, B)) is None:
            continue
        rows = layout.front(owners, B).reshape(B, -1)
        if ((rows == own) | (rows == NOBODY)).all():
            return SampleLayout("regular", layout, parts)
    return ROUTED


class _Seen:
    """Layers' outputs, and which rows of their gradients are not 0, as hooks see them. Calls of
    layers have keys ``(path, number)``, what met bare parameters (0) and what came of it (1) have
    ``(use, number, 0 or 1)``."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, int] = defaultdict(int)
        #: All keys, and the rows of each.
        self.shapes: dict[Any, torch.Size] = {}
        #: In each backward pass, the rows that got a gradient.
        self.passes: list[dict[Any, Tensor]] = []
        #: The layer's name, and its reads.
        self.operations: dict[tuple[str, int, int], tuple[str, Sequence[Read]]] = {}
        #: Tensors that a backward pass must reach.
        self.watched: list[Tensor] = []

    def note(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A layer has returned this."""
        tensors = [x for x in tensors_in(output) if x.is_floating_point() and x.dim()]
        x = next((x for x in tensors if x.requires_grad), tensors[0] if tensors else None)
        if x is None or in_backward():  # recomputed by a checkpoint
            return
        call = path, self._number(path)
        if x.requires_grad:
            self._watch(call, x, x.shape[:-1] if x.dim() > 1 else x.shape)

    def _number(self, name: str) -> int:
        self._calls[name] += 1
        return self._calls[name] - 1

    def _watch(self, key: Any, x: Tensor, shape: torch.Size) -> None:
        self.shapes[key] = shape

        def reached(grad: Tensor) -> None:
            if self.passes:
                mask = grad.detach() != 0
                self.passes[-1][key] = mask if mask.shape == shape else mask.any(-1)

        x.register_hook(reached)

    def operation(
        self,
        path: str,
        use: str,
        reads: Sequence[Read],
        x: Tensor,
        compute: Callable[[Tensor], Any],
    ) -> Any:
        """The result of an operation between bare parameters and ``x``, as it is.

        Args:
            path: the layer's name.
            use: what the layout of such operations goes by.
            reads: which reads of the layer these are.
            compute: the operation, of what stands for ``x``.
        """
        if in_backward():
            return compute(x)
        if x.is_floating_point():  # a tensor of its own: others read x as well
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        result = compute(x)
        number = self._number(use)
        for is_after, tensor in enumerate((x, result)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self.operations[use, number, is_after] = path, reads
                self.watched.append(tensor)
                self._watch((use, number, is_after), tensor, tensor.shape)
        return result


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    low = a.dtype in (torch.bfloat16, torch.float16)
    gap, size = (a - b).double().nan_to_num(0, 0, 0).norm(), b.double().nan_to_num(0, 0, 0).norm()
    return bool(gap <= (SAME_LOW if low else SAME) * size)
