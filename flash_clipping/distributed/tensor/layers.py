"""What a model with layers that are cut over processes has in the place of an ordinary model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_clipping.capture.inputs import batched_inputs, tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.distributed.tensor.backward_pass import TensorParallelBackwardPass
from flash_clipping.distributed.tensor.layouts import SERVED
from flash_clipping.distributed.tensor.local import arrived
from flash_clipping.distributed.tensor.local_boundary import LocalBoundary
from flash_clipping.distributed.tensor.norm_all_reduce import NormAllReduce, marks_of
from flash_clipping.distributed.tensor.shares import Shares
from flash_clipping.errors import FlashClippingError


class TensorParallelLayers:
    """Layers that ``parallelize_module`` was applied to.

    Args:
        session, slots, processes: of the model.
    """

    def __init__(self, session: ClippingSession, slots: ParameterSlots, processes: ProcessGroups):
        self.session, self.processes = session, processes
        self.shares = Shares()
        #: Of the samples that the model was called with since the last backward, the latest.
        self._marks: deque[Tensor] = deque(maxlen=16)
        session.backward_pass_class = partial(
            TensorParallelBackwardPass,
            slots=slots,
            processes=processes,
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
