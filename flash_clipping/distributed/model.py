"""What a sharded model has in the place of an ordinary model's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.fsdp import FSDPModule

from flash_clipping.capture.borrowed import UsesOthers
from flash_clipping.capture.factor_source import Guard
from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed import tensor_parallel
from flash_clipping.distributed.backward_pass import BACKWARD_PASSES
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.process_groups import ProcessGroups, device_of
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.distributed.tensor_parallel import TensorParallelLayers
from flash_clipping.errors import FlashClippingError, NotServed
from flash_clipping.finish.clipping import ClipFunction, Doubts

#: What a process says before a run, from the least to the most urgent.
_SETTLED, _UNSETTLED, _RUNS, _FAILED = range(4)


class SynchronizedProbe:
    """Rehearsals of processes that share a model: all run it as often, whoever wants to.

    Which rows are samples may be plain in one process's batch and doubtful in another's (a batch of
    5 with 5 positions). A rehearsal runs the model, and a run gathers parameters from all
    processes, so that one which ran it alone would wait for ever. So processes agree before every
    run: who has nothing to rehearse runs the model on its own batch, and forgets what came of it.
    Once every layer is known in every process, none will want to rehearse again, and they stop
    asking each other.
    """

    def __init__(
        self, root: Any, session: ClippingSession, slots: ParameterSlots, processes: ProcessGroups
    ):
        self.root, self.session, self.slots, self.processes = root, session, slots, processes
        self.taps: Sequence[Tap] = ()
        #: How many parameters were watched when all layers were known, in all processes.
        self._settled_with = -1
        self._failure: BaseException | None = None

    def rehearse(
        self, wanted: bool, watched: int, run: Callable[[], None], forward: Callable[[], Any]
    ) -> bool:
        """Rehearse with the others, if anyone wants to; whether this process has.

        ``wanted``: whether this process wants to; ``watched``: how many parameters are watched, the
        same in all processes; ``run``: its rehearsal, which calls :meth:`one_run` of the model's
        forward; ``forward``: that on this process's batch.

        Raises:
            FlashClippingError: what the rehearsal has shown; the model does not run on other
                numbers of samples; another process has failed; or a layer was reached that no
                rehearsal has seen, when the others had stopped asking.
        """
        if watched == self._settled_with:
            if wanted:
                raise FlashClippingError(
                    "FC609 the model: a layer read what no rehearsal has seen, after the processes "
                    "had agreed that all layers are known. A sharded model must use its layers in "
                    "every step as in the first ones."
                )
            return False
        says = _RUNS if wanted else _UNSETTLED if self._is_unsettled() else _SETTLED
        found = self._most_urgent(says)
        if found == _SETTLED:
            self._settled_with = watched
        if found != _RUNS:
            return False
        if was_sharded := self.slots.is_sharded(self.root):
            self.root.unshard()
        if wanted:
            self._rehearse(run)
        while self._most_urgent(_SETTLED) == _RUNS:
            with (
                torch.no_grad(),
                untouched(self.root),
                random_state([], seed=0),
                self.session.bypass(),
            ):
                forward()
        if was_sharded:
            self.root.reshard()
        return wanted

    def one_run(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, announced to the other processes."""

        def announced(*args: Any, **kwargs: Any) -> Any:
            if self._failure is not None:
                raise self._failure
            self._most_urgent(_RUNS)
            try:
                return forward(*args, **kwargs)
            except UsesOthers:  # it is run again
                raise
            except BaseException as error:
                self._failure = error
                raise

        return announced

    def _rehearse(self, run: Callable[[], None]) -> None:
        self._failure = None
        try:
            run()
        except BaseException:
            if self._failure is None:  # between runs, where the others listen
                self._most_urgent(_FAILED)
            raise
        if (failure := self._failure) is not None:
            self._failure = None
            raise FlashClippingError(
                f"FC608 the model: a rehearsal ended with {type(failure).__name__}: {failure} A "
                "sharded model must run on any number of samples. Rehearsals have one less or "
                "more, and a process that stops in the midst leaves the others waiting."
            ) from failure

    def _is_unsettled(self) -> bool:
        """Whether this process might want to rehearse again."""
        shown = self.session.known
        if any(kind.apart >= 0 for kind in self.session.proof.kinds.values()):
            return False  # every position is a row that layers read
        return any(tap.path not in shown.reads for tap in self.taps if tap.trainable()[1])

    def _most_urgent(self, says: int) -> int:
        """The most urgent of what all processes say; an error where another one has failed."""
        word = torch.tensor([says], device=device_of(self.processes.mesh))
        found = int(self.processes.reduce(word, dist.ReduceOp.MAX))
        if found == _FAILED != says:
            raise FlashClippingError(
                "FC608 the model: a rehearsal failed in another process, whose error says why."
            )
        return found


class ShardedModel:
    """A model that ``fully_shard`` or ``parallelize_module`` was applied to, for its session."""

    def __init__(self, root: Any, session: ClippingSession, mode: str):
        self.root = root
        self.session = session
        self.slots = ParameterSlots(root, self._watch)
        if not self.slots.trainable():
            raise FlashClippingError(
                f"FC305 {type(root).__name__}: found no trainable parameter in a sharded model."
            )
        self.processes = ProcessGroups([*root.parameters()], isinstance(root, FSDPModule))
        self.reducer = Reducer(self.slots, bool(self.processes.data))
        self.together = SynchronizedProbe(root, session, self.slots, self.processes)
        session.options.trainable = self.slots.recorded
        session.options.state = lambda: chain(self.slots.tensors(), root.buffers())
        session.options.clip = partial(self._clip, session.options.clip)
        passes = self.slots.backward_passes or BACKWARD_PASSES
        options: dict[str, Any] = {"slots": self.slots, "reducer": self.reducer}
        self.layers: TensorParallelLayers | None = None
        if self.processes.tensor is not None:
            self.layers = TensorParallelLayers(session, self.processes)
            passes, options["layers"] = tensor_parallel.BACKWARD_PASSES, self.layers
        if mode not in passes:
            raise NotServed(
                f"FC634 {type(root).__name__}: found mode={mode!r} and experts in parallel; "
                'expected one backward pass, with fewer samples a process:\n    mode="one_pass"'
            )
        session.calls.backward_pass_class = partial(passes[mode], **options)

    def add_first_hooks(self, handles: list[Any], lay_out: Callable[..., None]) -> None:
        """Hooks that come before taps, and before all others of the wrapped model; ``lay_out`` puts
        those around layers that others have cut."""
        if self.layers is not None:
            lay_out(self.root, handles)
            handles.append(
                self.root.register_forward_pre_hook(self.layers.before, with_kwargs=True)
            )

    def add_last_hooks(self, handles: list[Any], taps: Iterable[Tap]) -> None:
        """Hooks that come after all others."""
        self._handles = handles
        self.together.taps = [tap for tap in taps if type(tap) is Tap]
        if self.layers is not None:
            self.layers.surround(self.together.taps, handles)
        for module in self.slots.gathering:
            # After the module's own, which gathers parameters.
            handles.append(module.register_forward_pre_hook(self.slots.look))

    def _watch(self, name: str, unsharded: nn.Parameter) -> None:
        """Refuse gradients that autograd brings to an unsharded parameter."""
        why = "reduced without being clipped. Use it in its own module's forward, or detach it."
        guard = Guard(name, why, self.session)
        self._handles.append(unsharded.register_hook(guard.__getitem__))

    def _clip(
        self, clip: ClipFunction, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> Tensor:
        """Norms are published, and records kept, under the parameters that users know."""
        to = self.slots.to
        blocks = [
            ([id(to(key)) for key in keys], error_bound) for keys, error_bound in doubts.blocks
        ]
        destinations = [to(id(param)) for param in params]
        return clip(destinations, norms_PB, Doubts(blocks, doubts.scale))
