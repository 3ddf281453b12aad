"""One backward pass of a sharded model: sums go to the shards of all processes.

B samples of this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flash_clipping._compat import at_end_of_backward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.two_pass import TwoWalks
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.reducer import Reducer, Reduction
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers


class ShardedBackwardPass(BackwardPass):
    """Factors belong to unsharded parameters; sums go to the shards that take their places."""

    session: ClippingSession

    def __init__(self, session: ClippingSession, slots: ParameterSlots, reducer: Reducer):
        super().__init__(session)
        self.slots, self.reducer = slots, reducer
        #: What of the sums is on its way.
        self._reduction: Reduction | None = None

    def stand_in(self) -> None:
        if self.session.calls.recomputed:
            raise FlashClippingError(
                f"FC611 {', '.join(self.session.calls.recomputed)}: found a module that uses its "
                "own parameters under activation checkpointing, in a sharded model. Checkpoint the "
                "layers inside of it, or use these parameters outside of the checkpoint."
            )

    def _reducing(self) -> Reduction:
        if self._reduction is None:
            self.slots.check()
            self._reduction = self.reducer.begin()
        return self._reduction

    def finish(self) -> None:
        """After what ``fully_shard`` does at the end of backward, whoever was queued first."""
        at_end_of_backward(super().finish)

    def _is_for_parameters(self) -> bool:
        if not super()._is_for_parameters():
            return False
        if not self.is_for_all:
            raise FlashClippingError(
                "FC612 backward(inputs=...) asked for gradients of some parameters of a sharded "
                "model. All processes reduce the sums of all parameters: call "
                "backward() without inputs, and freeze what is not to be trained."
            )
        return True

    def add_clipped_sums(self) -> None:
        """Reduce the sums of all trainable parameters, in an order that all processes share."""
        self._reducing().finish(self._sums_of)
        self.session.options.note_sums(self.slots.trainable())

    def _sums_of(self, part: tuple[int, ...]) -> dict[int, Tensor]:
        """This process's clipped sums of these parameters; without those that backward did not
        reach."""
        assert self.coef is not None and self.plan is not None
        found: dict[int, Tensor] = {}

        def add(keys: Sequence[int], sums: Sequence[Tensor]) -> None:
            found.update(zip(keys, sums, strict=True))

        self.groups.add_clipped_sums(self.plan, self.coef, add, part)
        return found

    def forget(self) -> None:
        super().forget()
        self._reduction = None


class ShardedTwoWalks(ShardedBackwardPass, TwoWalks):
    """Sends a bucket of clipped sums once the second walk has completed it."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        #: Clipped sums of this process, until they are sent.
        self._sums: dict[int, Tensor] = {}
        #: How often each parameter came in the first walk, and has yet to come in the second.
        self._awaited: Counter[int] = Counter()

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        super().record(path, params, factors, readers)
        self._handle_held()  # other processes wait for what is complete
        self._send_complete(params)

    def _send_complete(self, params: Sequence[nn.Parameter]) -> None:
        """Send what is complete once the second walk has come by these.

        Walks reach layers in one order in all processes, as ``fully_shard`` has it, too. What
        forward used counts for nothing: a process may hold calls that no backward goes through.
        """
        if self.coef is None:
            self._awaited.update(map(id, params))
        else:
            self._awaited.subtract(map(id, params))
            self._reducing().send_while(lambda key: self._awaited[key] <= 0, self._sums_of)

    def _walk(self, call: Any, *, last: bool) -> None:
        """Blocks gather their parameters when a walk reaches them; the root's own are sharded
        again at the end of the outer backward."""
        root = self.slots.root if isinstance(self.slots.root, FSDPModule) else None
        if root is not None:
            root.unshard()
        try:
            super()._walk(call, last=last)
        finally:
            if root is not None:
                root.reshard()

    def _put(self, param: nn.Parameter, grad: Tensor) -> None:
        """Keep a sum, to which further uses are added."""
        key = id(param)
        held = self._sums.get(key)
        self._sums[key] = grad if held is None else held + grad.view_as(held)

    def _sums_of(self, part: tuple[int, ...]) -> dict[int, Tensor]:
        own = {key: self._sums.pop(key) for key in part if key in self._sums}
        return own | super()._sums_of(part)

    def forget(self) -> None:
        super().forget()
        self._sums.clear()


#: Of sharded models, by mode.
BACKWARD_PASSES = {"one_pass": ShardedBackwardPass, "two_pass": ShardedTwoWalks}
