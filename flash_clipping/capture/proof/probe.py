"""Where the samples are in what each layer returns: seen from gradients, not from sizes or values.

The outputs of one sample go backward alone; the rows of a layer's output gradient that are not 0
are that sample's. Two batches of gradients are enough for many samples: a pass for each bit of a
sample's number, in which the samples with that bit take part, and one for those without it. A row
that got a gradient in both has two samples. Rows of padding get none, and are nobody's.

Layers whose samples may lie otherwise work row by row: samples lie in what they read as they do in
what they return.

Of parameters that modules use by themselves, operations with samples are looked at: where these lie
in what meets a parameter, and in what comes of it.

Shape suffixes: ``B`` samples, ``R`` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.no_trace import MODELS_OWN
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.draws import perturbed
from flash_clipping.capture.proof.layout import (
    CONSTANT,
    MANY,
    NOBODY,
    SEVERAL,
    SampleLayout,
    layout_of_owners,
)
from flash_clipping.capture.proof.reads import Read
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.errors import FlashClippingError

#: Samples that are looked at: a small batch tells where they are as well as a large one.
SAMPLES = 3

#: Relative difference of two outputs that are the same but for rounding; of 16 bits.
SAME, SAME_LOW = 1e-4, 0.1

#: A layer's path, and which of its calls.
_Call = tuple[str, int]


@dataclass(frozen=True)
class Probed:
    """The result of a probe.

    Attributes:
        layouts: of every layer with trainable parameters that was called, by its path; one for
            each call, or one alone where they are the same.
        unfit: numbers of the outputs in which samples reach each other.
        calls: layers that gradients of some outputs reach, by their paths and calls.
        reads: the same of what met bare parameters.
        operations: of what met bare parameters, and of what came of it, by what layouts of such
            operations go by; and the layer's name.
    """

    layouts: dict[str, tuple[SampleLayout, ...]]
    unfit: frozenset[int] = frozenset()
    operations: dict[str, tuple[str, list[SampleLayout], list[SampleLayout]]] = field(
        default_factory=dict
    )
    calls: frozenset[tuple[str, int]] = frozenset()
    reads: frozenset[Read] = frozenset()


def probe(subject: Subject) -> Probed:
    """Where the samples are in what layers with trainable parameters return.

    Raises:
        whatever the model raises on this batch.
    """
    params = subject.session.trainable()
    samples = subject.samples()
    if not params or not samples.count:
        return Probed({})
    runs = Runs(subject, samples.tensors)
    few = max(min(samples.count, SAMPLES), 2)
    with perturbed(params):
        for count in dict.fromkeys((few, samples.count)):
            try:
                return _probe(runs, samples, count)
            except FlashClippingError:
                raise
            except MODELS_OWN:  # it may run on batches of this size only
                if count == samples.count:
                    raise
    return Probed({})


def _probe(runs: Runs, samples: Samples, B: int) -> Probed:
    """A probe with ``B`` samples. A second batch, in which the first of them stands among others,
    tells which outputs are its own and which layers are the same for all batches. Runs are calm:
    rows that are dropped would have no gradient."""
    places = range(B)
    own = [b % samples.count for b in places]  # of one sample there are two copies
    last = [*range(samples.count)][-1:0:-1] or [0]
    others = [0, *last, *own][:B]
    outputs, values = [], []
    for order in (own, others):
        with _watched(runs.root) as of_run:
            outputs.append(runs.run(samples.batch(order), places, calm=True).outputs)
        values.append(of_run.values)
    unfit = frozenset(
        n for n, x in outputs[0].items() if n not in outputs[1] or not _same(x[0], outputs[1][n][0])
    )
    runs.only = outputs[0].keys() - unfit
    marks = marks_of(B)
    scales = [dict.fromkeys(on, 1.0) for on in marks]
    scales.append(dict.fromkeys(places, 1.0))

    def next_pass() -> None:
        seen.next()
        if seen.passes == len(scales):  # the last is of outputs from which nothing may come back
            runs.only = set(unfit)

    with _watched(runs.root) as seen:
        given = samples.batch(own)
        runs.run(given, places, scales, calm=True, sums=0, before=next_pass, probing=seen)
    found: dict[_Call, SampleLayout] = {}
    for call, masks in seen.masks(len(marks)).items():
        if len(call) > 2:
            continue  # an operation
        owners = owners_of(masks, marks, B)
        found[call] = layout_of_owners(owners, B, runs.session.batch_axis)
        if found[call] is SEVERAL and _same(*(of_run.get(call) for of_run in values)):
            found[call] = CONSTANT
    by_path: dict[str, list[SampleLayout]] = {}
    for (path, _), layout in sorted(found.items()):
        by_path.setdefault(path, []).append(layout)
    return Probed(
        {
            path: tuple(calls) if len(set(calls)) > 1 else (calls[0],)
            for path, calls in by_path.items()
        },
        unfit,
        _operations(seen, marks, B),
        *seen.reached(),
    )


def _operations(
    seen: _Seen, marks: list[list[int]], B: int
) -> dict[str, tuple[str, list[SampleLayout], list[SampleLayout]]]:
    found: dict[str, tuple[str, list[SampleLayout], list[SampleLayout]]] = {}
    masks = seen.masks(len(marks))
    for (use, number, is_after), path in seen.operations.items():
        owners = owners_of(masks[use, number, is_after], marks, B)
        _, before, after = found.setdefault(use, (path, [], []))
        (after if is_after else before).append(layout_of_owners(owners, B))
    return found


def marks_of(B: int) -> list[list[int]]:
    """Which samples take part in each backward pass: each alone, or by the bits of their numbers
    and by the inverted bits."""
    bits = max((B - 1).bit_length(), 1)
    if 2 * bits >= B:
        return [[b] for b in range(B)]
    with_bit = [[b for b in range(B) if b >> bit & 1] for bit in range(bits)]
    return [*with_bit, *([b for b in range(B) if b not in on] for on in with_bit)]


def owners_of(masks: Sequence[Tensor], marks: Sequence[Sequence[int]], B: int) -> Tensor:
    """The sample of each row, from the rows that got a gradient in each pass."""
    reached = torch.stack([mask.cpu() for mask in masks])
    codes = torch.zeros(len(marks), B, dtype=torch.bool)
    for number, on in enumerate(marks):
        codes[number, list(on)] = True
    owners = torch.full(reached.shape[1:], MANY)
    owners[~reached.any(0)] = NOBODY
    for b in range(B):
        code = codes[:, b].view(-1, *[1] * owners.dim())
        owners[(reached == code).all(0)] = b
    return owners


class _Seen:
    """Layers' outputs, and which rows of their gradients are not 0, as hooks see them."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._passes: list[dict[Any, Tensor]] = []
        #: Outputs.
        self.values: dict[_Call, Tensor] = {}
        self._shapes: dict[Any, torch.Size] = {}
        #: What met bare parameters (0) and what came of it (1), by its name and number.
        self.operations: dict[tuple[str, int, int], str] = {}
        #: What these read that met parameters, by the same.
        self._reads: dict[tuple[str, int, int], Sequence[Read]] = {}
        #: Tensors that a backward pass must reach.
        self.watched: list[Tensor] = []

    def next(self) -> None:
        """Another backward pass begins."""
        self._passes.append({})

    @property
    def passes(self) -> int:
        """Backward passes so far."""
        return len(self._passes)

    def reached(self) -> tuple[frozenset[tuple[str, int]], frozenset[Read]]:
        """Calls of layers, and reads of operations, that got a gradient in any pass."""
        keys = [key for one in self._passes for key, mask in one.items() if bool(mask.any())]
        reads = [read for key in keys for read in self._reads.get(key, ())]
        return frozenset(key for key in keys if key not in self._reads), frozenset(reads)

    def note(self, path: str, output: Any) -> None:
        tensors = [x for x in tensors_in(output) if x.is_floating_point() and x.dim()]
        x = next((x for x in tensors if x.requires_grad), tensors[0] if tensors else None)
        if x is None or in_backward():  # recomputed by a checkpoint
            return
        call = path, self._calls.get(path, 0)
        self._calls[path] = call[1] + 1
        self.values[call] = x.detach()
        if x.requires_grad:
            self._watch(call, x, x.shape[:-1] if x.dim() > 1 else x.shape)

    def _watch(self, key: Any, x: Tensor, shape: torch.Size) -> None:
        self._shapes[key] = shape

        def reached(grad: Tensor) -> None:
            if self._passes:
                mask = grad.detach() != 0
                self._passes[-1][key] = mask if mask.shape == shape else mask.any(-1)

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
        number = self._calls.get(use, 0)
        self._calls[use] = number + 1
        for is_after, tensor in enumerate((x, result)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self.operations[use, number, is_after] = path
                self._reads[use, number, is_after] = reads
                self.watched.append(tensor)
                self._watch((use, number, is_after), tensor, tensor.shape)
        return result

    def masks(self, passes: int) -> Mapping[Any, list[Tensor]]:
        """The rows of every call that got a gradient in each pass."""
        return {
            call: [
                self._passes[n].get(call, torch.zeros(shape, dtype=torch.bool))
                for n in range(min(passes, len(self._passes)))
            ]
            for call, shape in self._shapes.items()
            if self._passes
        }


@contextmanager
def _watched(root: nn.Module) -> Iterator[_Seen]:
    """Hooks on every module that has trainable parameters of its own."""
    seen = _Seen()
    handles = []
    try:
        for path, module in root.named_modules():
            params = [p for p in module._parameters.values() if p is not None and p.requires_grad]
            if params and module is not root:

                def hook(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                    seen.note(path, output)

                handles.append(module.register_forward_hook(hook))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    low = a.dtype in (torch.bfloat16, torch.float16)
    gap, size = (a - b).double().nan_to_num(0, 0, 0).norm(), b.double().nan_to_num(0, 0, 0).norm()
    return bool(gap <= (SAME_LOW if low else SAME) * size)
