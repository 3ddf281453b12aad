"""Rehearsals of processes that share a model: all run it as often, whoever wants to.

Which rows are samples may be plain in one process's batch and doubtful in another's (a batch of 5
with 5 positions). A rehearsal runs the model, and a run gathers parameters from all processes, so
that one which ran it alone would wait for ever. So processes agree before every run: who has
nothing to rehearse runs the model on its own batch, and forgets what came of it. Once every layer
is known in every process, none will want to rehearse again, and they stop asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from flash_clipping.capture.borrowed import UsesOthers
from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.process_groups import ProcessGroups, device_of
from flash_clipping.errors import FlashClippingError

#: What a process says before a run, from the least to the most urgent.
_SETTLED, _UNSETTLED, _RUNS, _FAILED = range(4)


class SynchronizedProbe:
    """Agrees on rehearsals with the other processes."""

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
        """Rehearse with the others, if anyone wants to.

        Args:
            wanted: whether this process wants to.
            watched: how many parameters are watched, the same in all processes.
            run: its rehearsal, which calls :meth:`one_run` of the model's forward.
            forward: the model's forward on this process's batch.

        Returns:
            Whether this process has rehearsed.

        Raises:
            FlashClippingError: what the rehearsal has shown; the model does not run on other
                numbers of samples; another process has failed; or a layer was reached that no
                rehearsal has seen, when the others had stopped asking.
        """
        if watched == self._settled_with:
            if wanted:
                raise FlashClippingError(
                    "the model: a layer read what no rehearsal has seen, after the processes had "
                    "agreed that all layers are known. A sharded model must use its layers in "
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
            except UsesOthers:
                self._failure = FlashClippingError(
                    "the model: a module uses a trainable parameter that another module owns "
                    "(F.linear(x, self.embed.weight)). That is not built for sharded models: call "
                    "the layer that owns it, or give both modules the parameter (tied weights)."
                )
                raise self._failure from None
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
                self._tell(_FAILED)
            raise
        if (failure := self._failure) is not None:
            self._failure = None
            raise FlashClippingError(
                f"the model: a rehearsal ended with {type(failure).__name__}: {failure} Rehearsals "
                "run the model on its batch, and on one sample less or more. A sharded "
                "model must run on any number of samples: a process that stops in the midst of a "
                "run leaves the others waiting."
            ) from failure

    def _is_unsettled(self) -> bool:
        """Whether this process might want to rehearse again."""
        batch_axes = self.session.batch_axes
        if self.session.units_of_calls.apart:  # every position is a row, in all that layers read
            return False
        return any(tap.path not in batch_axes.reads for tap in self.taps if tap.trainable()[1])

    def _most_urgent(self, says: int) -> int:
        found = self._tell(says)
        if found == _FAILED:
            raise FlashClippingError(
                "the model: a rehearsal failed in another process, whose error says why."
            )
        return found

    def _tell(self, says: int) -> int:
        word = torch.tensor([says], device=device_of(self.processes.mesh))
        return int(self.processes.reduce(word, dist.ReduceOp.MAX))
