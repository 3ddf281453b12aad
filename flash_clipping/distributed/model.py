"""What a sharded model has in the place of an ordinary model's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flash_clipping.capture.factor_source import Guard
from flash_clipping.capture.inputs import batched_inputs, map_tensors
from flash_clipping.capture.no_samples import made_up
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed.backward_pass import ShardedBackwardPass
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.distributed.synchronized_probe import SynchronizedProbe
from flash_clipping.distributed.tensor.layers import TensorParallelLayers
from flash_clipping.distributed.tensor.transformers_plan import lay_out_by_hooks
from flash_clipping.errors import FlashClippingError
from flash_clipping.finish.clipping import Doubts

#: How many samples are made up.
_COUNT = 2

#: Bytes of unsharded sums that one operation reduces.
BUCKET_BYTES = 256 << 20


class EmptyBatches:
    """Hooks of a sharded model's root, around all others: a process without samples runs the model
    as the others do, on samples that are made up."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        self.session = session
        self.running = False
        #: Along which the model was given samples: positions of one row, where units are parts.
        self._axis = session.batch_axis
        self._has_bags = any(isinstance(module, nn.EmbeddingBag) for module in root.modules())

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with samples, where there are none."""
        session = self.session
        self.running = False
        if not session.recording:
            return None
        axis = session.batch_axis
        inputs = [x for x in batched_inputs(args, kwargs) if x.dim() > axis]
        sizes = [x.shape[axis] for x in inputs]
        is_empty = sizes[:1] == [0] and not (self._has_bags and any(sizes))
        self._axis = axis
        if not is_empty and session.units_of_calls.sample_of is not None and inputs:
            is_empty = not inputs[0].numel()  # a row without positions, [1, 0]
            self._axis = inputs[0].shape.index(0) if is_empty else axis
        if not is_empty:
            return None
        self.running = True
        # Of ones: lengths, and masks of what is to be seen, must not be 0.
        return made_up(args, kwargs, axis, _COUNT, fill=1)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """What the model returned, without rows."""
        if not self.running:
            return None
        self.running = False
        return map_tensors(self._without_rows, output, packed=True)

    def _without_rows(self, x: Tensor) -> Tensor:
        """Zeros without rows, whose backward goes on with gradients of 0."""
        axis = self._axis
        if x.dim() <= axis:
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
        if x.shape[axis] % _COUNT:
            raise FlashClippingError(
                f"the model: called with an empty batch, it was run on {_COUNT} samples, and "
                f"returned a tensor of shape {tuple(x.shape)}. Expected samples along axis "
                f"{axis} of all that it returns."
            )
        return x.narrow(axis, 0, 0)


class ShardedModel:
    """A model that ``fully_shard`` or ``parallelize_module`` was applied to, for its session."""

    def __init__(self, root: Any, session: ClippingSession):
        self.root = root
        self.session = session
        self.slots = ParameterSlots(root, self._watch)
        trainable: list[Any] = self.slots.trainable()
        if not trainable:
            raise FlashClippingError(
                f"{type(root).__name__}: found no trainable parameter in a sharded model."
            )
        self.processes = ProcessGroups(self.slots.destinations, isinstance(root, FSDPModule))
        self.reducer = Reducer(self.slots, bool(self.processes.data), BUCKET_BYTES)
        self.together = SynchronizedProbe(root, session, self.slots, self.processes)
        self._empty = EmptyBatches(root, session)
        session.trainable = self.slots.recorded
        session.state = lambda: chain(self.slots.tensors(), root.buffers())
        session.clip = partial(self._clip, session.clip)
        session.backward_pass_class = partial(
            ShardedBackwardPass, slots=self.slots, reducer=self.reducer
        )
        self.layers: TensorParallelLayers | None = None
        if self.processes.tensor is not None:
            self.layers = TensorParallelLayers(session, self.processes, self.reducer)
        if isinstance(root, FSDPModule):
            session.around_walk = self._unsharded_root

    def before_taps(self, handles: list[Any]) -> None:
        """What has to be done to layers before they are tapped."""
        if self.layers is not None:
            lay_out_by_hooks(self.root, handles)

    def add_first_hooks(self, handles: list[Any]) -> None:
        """Hooks that come before all others of the wrapped model."""
        for hook in (self._empty.before, self.layers and self.layers.before):
            if hook is not None:
                handles.append(self.root.register_forward_pre_hook(hook, with_kwargs=True))

    def add_last_hooks(self, handles: list[Any], taps: Iterable[Tap]) -> None:
        """Hooks that come after all others."""
        self._handles = handles
        self.together.taps = [tap for tap in taps if type(tap) is Tap]
        if self.layers is not None:
            self.layers.surround(self.together.taps, handles)
        handles.append(self.root.register_forward_hook(self._empty.after, with_kwargs=True))
        for module in self.slots.gathering:
            # After the module's own, which gathers parameters.
            handles.append(module.register_forward_pre_hook(self._look))

    def check_compiled(self, any_compiled: bool) -> None:
        """Refuse compiled parts beside layers that are cut over processes."""
        if any_compiled and self.layers is not None:
            raise NotImplementedError(
                "the model: found compiled parts (compile(), torch.compile) and layers that are "
                "cut over processes (parallelize_module). Wires of a compiled graph are ordinary "
                "tensors, and what it computes with are DTensors. Leave all of the model "
                "uncompiled; after fully_shard alone compiled blocks are served:\n"
                "    for block in model.blocks:\n"
                "        block.compile()"
            )

    @property
    def is_empty(self) -> bool:
        """Whether the call of the model that runs is one without samples."""
        return self._empty.running

    def rehearse(
        self, wanted: bool, watched: int, rehearse: Callable[[], None], forward: Callable[[], Any]
    ) -> bool:
        """As :meth:`SynchronizedProbe.rehearse`; samples that were made up show nothing."""
        return self.together.rehearse(wanted and not self.is_empty, watched, rehearse, forward)

    def _look(self, module: nn.Module, _: Any) -> None:
        self.slots.look(module)

    def _watch(self, name: str, destination: nn.Parameter, unsharded: nn.Parameter) -> None:
        """Refuse gradients that autograd brings to an unsharded parameter."""
        why = (
            "reduced without being clipped. Use it in its own module's forward, detach it where it "
            "is used elsewhere, or freeze it."
        )
        guard = Guard(name, why, self.session)
        self._handles.append(unsharded.register_hook(guard.__getitem__))

    def _clip(
        self,
        clip: Callable[..., Tensor],
        params: list[nn.Parameter],
        norms_PB: Tensor,
        doubts: Doubts,
        one_device: bool,
    ) -> Tensor:
        """Norms are published, and records kept, under the parameters that users know."""
        to = self.slots.to
        blocks = [
            ([id(to(key)) for key in keys], error_bound) for keys, error_bound in doubts.blocks
        ]
        destinations = [to(id(param)) for param in params]
        return clip(destinations, norms_PB, Doubts(blocks, doubts.scale), one_device)

    @contextmanager
    def _unsharded_root(self) -> Iterator[None]:
        """``mode="two_pass"``: blocks gather their parameters when a walk reaches them; the root's
        own are sharded again at the end of the outer backward."""
        self.root.unshard()
        try:
            yield
        finally:
            self.root.reshard()
