"""What a model with layers that are cut over processes has in the place of an ordinary model's."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_clipping.capture.generic import ReadsNoSamples
from flash_clipping.capture.inputs import batched_inputs, tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed.backward_pass import TensorParallelBackwardPass
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.distributed.tensor.layouts import SERVED, Shares, layout_of
from flash_clipping.distributed.tensor.local import arrived, local_of
from flash_clipping.distributed.tensor.norm_all_reduce import NormAllReduce, marks_of
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.rules.registry import GradRequest, Rule, UnsupportedLayer


class LocalBoundary(Rule):
    """A rule around a layer's own."""

    def __init__(self, inner: Rule, path: str, session: ClippingSession, shares: Shares):
        self.inner, self.path, self.session, self.shares = inner, path, session, shares

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight = layer._parameters["weight"]
        if weight is None or not isinstance(x, DTensor):
            found = ", ".join(type(one).__name__ for one in (*args, *kwargs.values()))
            raise UnsupportedLayer(
                f"it has parameters that are DTensors, and was called with {found}; expected one "
                "DTensor. Parallelize it by parallelize_module, with input_layouts."
            )
        if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
            raise UnsupportedLayer(
                "some of its parameters are DTensors over a tensor mesh, and its weight is none. "
                "Parallelize all of the layer."
            )
        layout = layout_of(self.inner, weight, x, self.session.batch_axis)
        for name, param in layer._parameters.items():
            if param is not None:
                share = layout.bias if name == "bias" else layout.share
                self.shares.note(f"{self.path}: {name}", id(param), share)
        if tuple(x.placements) != (layout.input,):
            x = x.redistribute(placements=[layout.input])
        floats = x.is_floating_point()
        inside = arrived(x.to_local(grad_placements=[layout.grad]) if floats else x.to_local())
        mine = None
        if layout.ids:
            start, rows = _own_words(weight)
            mine = (inside >= start) & (inside < start + rows)
            inside = torch.where(mine, inside - start, 0)
        try:
            output = tapped(inside)
        except ReadsNoSamples:
            raise UnsupportedLayer(
                "what it reads is the same for all samples (positions, say), which is not built "
                "for a layer with DTensors. Leave it out of parallelize_module, or freeze it."
            ) from None
        if mine is not None:  # other words are other processes'; no gradient comes back to row 0
            output = torch.where(mine.unsqueeze(-1), output, 0)
        return DTensor.from_local(
            output,
            weight.device_mesh,
            [layout.output],
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=torch.empty(layout.shape, device="meta").stride(),
        )

    def forward(self, layer: Any, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        local = _local_layer(layer)
        output, saved = self.inner.forward(local, *inputs)
        local._parameters = {}  # whatever backward reads is among what was saved
        return output, (local, *saved)

    def backward(
        self, layer: nn.Module, saved: tuple[Any, ...], grad_output: Any, needs: GradRequest
    ) -> tuple[Any, Mapping[str, PerSampleGrad]]:
        if not self.session.enabled:
            raise FlashClippingError(
                f"{self.path}: hooks were enabled in forward and are disabled in backward, which "
                "leaves ordinary gradients. That is not built for layers that are cut over "
                "processes: disable hooks before forward."
            )
        local, *rest = saved
        return self.inner.backward(local, tuple(rest), arrived(grad_output), needs)


def _local_layer(layer: Any) -> Any:
    """The layer with this process's part of its parameters, as a rule reads it."""
    local = copy.copy(layer)
    local.__dict__.pop("forward", None)
    local._parameters = {name: local_of(param) for name, param in layer._parameters.items()}
    weight = layer._parameters["weight"]
    (cut,) = weight.placements
    if isinstance(layer, nn.Linear):
        # Outputs are added up over processes, and a bias once.
        if cut.is_shard(1) and weight.device_mesh.get_local_rank() != 0:
            local._parameters["bias"] = None
    elif isinstance(layer, nn.Embedding) and cut.is_shard(0):
        start, rows = _own_words(weight)
        local.num_embeddings = rows
        if (padding := layer.padding_idx) is not None:
            local.padding_idx = padding - start if start <= padding < start + rows else None
    return local


def _own_words(weight: Any) -> tuple[int, int]:
    """Where this process's rows of a table begin, and how many they are."""
    mesh = weight.device_mesh
    each = -(-weight.shape[0] // mesh.size())
    return each * mesh.get_local_rank(), local_of(weight).shape[0]


class TensorParallelLayers:
    """Layers that ``parallelize_module`` was applied to."""

    def __init__(self, session: ClippingSession, processes: ProcessGroups, reducer: Reducer):
        self.session, self.processes = session, processes
        self.shares = Shares()
        #: Of the samples that the model was called with since the last backward, the latest.
        self._marks: deque[Tensor] = deque(maxlen=16)
        session.backward_pass_class = partial(
            TensorParallelBackwardPass,
            slots=reducer.slots,
            reducer=reducer,
            messages=NormAllReduce(processes.tensor, self.shares),
            marks=self._marks,
        )

    def surround(self, taps: Iterable[Tap], handles: list[Any]) -> None:
        """Stand at the edge of every tapped layer.

        Raises:
            NotImplementedError: a layer with a ``DTensor`` has no rule that knows what to do.
        """
        for tap in taps:
            own = [param for owner in tap.owners for param in owner._parameters.values()]
            if not any(map(self.processes.cut, own)):
                take = partial(self._take_local, tap)
                handles.append(tap.layer.register_forward_pre_hook(take, with_kwargs=True))
            elif (rule := tap.rule) is not None and type(rule) in SERVED:
                tap.surround(LocalBoundary(rule, tap.path, self.session, self.shares))
            elif any(param is not None and param.requires_grad for param in own):
                raise NotImplementedError(
                    f"{tap.path}: found a DTensor among its trainable parameters. Tensor "
                    "parallelism is built for nn.Linear, nn.Embedding, nn.LayerNorm and "
                    "nn.RMSNorm; leave this module out of parallelize_module, or freeze it."
                )

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model: who are the samples?"""
        if not self.session.recording:
            return
        tensors = batched_inputs(args, kwargs)
        if any(isinstance(x, DTensor) for x in tensors):
            raise FlashClippingError(
                "the model: called with a DTensor. Samples are looked for in plain tensors, which "
                "all processes of a tensor mesh have alike: give it those, and lay them out inside "
                "(PrepareModuleInput on a module below the model)."
            )
        marks_B = marks_of(tensors, self.session.batch_axis)
        if marks_B is not None:
            self._marks.append(marks_B)

    def _take_local(
        self, tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The inputs of a layer that every process has as a whole."""
        if not self.session.recording or not tap.trainable()[1]:
            return None
        if any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            raise FlashClippingError(
                f"{tap.path}: called with a DTensor, and its parameters are none. Parallelize this "
                "layer as well (SequenceParallel for norm layers), or let the layer before it "
                "return a local tensor that all processes have alike (output_layouts=Replicate())."
            )
        return tuple(map(arrived, args)), {name: arrived(x) for name, x in kwargs.items()}
