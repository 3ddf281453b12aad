"""What happens to a model after it was wrapped, and in its forward: looked for every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import pytree
from flash_clipping.capture.batch_axis import rehearse
from flash_clipping.capture.borrowed import UsesOthers, find_borrowed, until_borrowed
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.capture.position_rehearsal import rehearse_positions
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.single_gradients import UnfitOutputs
from flash_clipping.capture.two_pass import TwoPassForward
from flash_clipping.capture.units import Units
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.installed_taps import InstalledTaps
from flash_clipping.engine.parallel import (
    PIPELINES,
    refuse_around,
    refuse_in_pipeline,
    refuse_since,
)
from flash_clipping.engine.parameter_guards import ParameterGuards
from flash_clipping.engine.structure import Structure
from flash_clipping.engine.unsupported import batch_norms_of, refuse_batch_norms

if TYPE_CHECKING:
    from flash_clipping.distributed.model import ShardedModel


class ModelWatch:
    """Looks at a wrapped model when its forward begins, when it is rehearsed, when it has ended.

    Args:
        wrapper: the wrapped model; the model itself where it is used as it is.
        root: the model.
        session, taps, guards: its own.
        strict: whether buffers that forward changes are refused.
    """

    #: Tests let another proof run beside this one, with the model, its forward, the session and the
    #: arguments of the call, and with the outputs that were found to be unfit.
    shadow: ClassVar[Callable[..., None] | None] = None

    def __init__(
        self,
        wrapper: nn.Module,
        root: nn.Module,
        session: ClippingSession,
        taps: InstalledTaps,
        guards: ParameterGuards,
        strict: bool,
    ):
        self.wrapper, self.root = wrapper, root
        self.session = session
        self.taps = taps
        self.guards = guards
        self._structure = Structure(wrapper)
        self._buffers = BufferWatch(root, self._structure, session) if strict else None
        self._embeddings = embeddings_of(root)
        self._batch_norms = batch_norms_of(root)
        #: Of a model with shards, whose processes rehearse together.
        self.sharded: ShardedModel | None = None
        #: Whether it was looked at all that may have been done to the parameters.
        self._looked_around = False
        #: The kind of the last call, if nothing else decides whether one like it is rehearsed.
        self.covered: list[Any] | None = None
        self._unfit = UnfitOutputs()
        #: Whether a pipeline's norms are those of all its stages.
        self.in_private_schedule = False
        guards.watch_new()

    def before_forward(self, module: nn.Module) -> None:
        """Watch new parameters, take over what was compiled, and refuse what cannot be clipped.

        ``module`` is the model, or the replica of it whose forward begins.

        Raises:
            FlashClippingError: the model runs inside PyTorch's data parallelism, or was sharded; or
                a hook waits for a gradient that will not come.
            NotImplementedError: an embedding was given a ``max_norm``, or a batch normalization
                is in train mode.
        """
        refuse_around(module, module is not self.root)
        if PIPELINES in sys.modules and not self.in_private_schedule:
            refuse_in_pipeline(module)
        if self._embeddings:
            refuse_max_norm(self._embeddings)
        if self._batch_norms:
            refuse_batch_norms(self._batch_norms)
        if self._buffers is not None:
            self._buffers.before_forward()
        if self.guards.watch_new():
            self._looked_around = False
        if self._looked_around:
            return
        self.session.recover()  # no stand-in of a failed step may be in the way
        refuse_since(self.wrapper, () if self.sharded is None else self.sharded.slots.gathering)
        if not is_dynamo_compiling():
            self.taps.find_compiled()
        self._looked_around = True

    def kind_of(
        self,
        module: nn.Module,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """What decides whether a call must be rehearsed: its arguments but for their values, and
        what may have changed since the last one. ``tensors`` are those in its arguments."""
        kind: list[Any] = [self.session.epoch, self.guards.count]
        kind += (module.training, torch.is_grad_enabled())
        for x in tensors:
            kind.append(x.shape)
        if kwargs or len(args) != 1 or args[0] is not tensors[0]:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            kind.append(structure)
            for leaf in leaves:
                plain = leaf is None or isinstance(leaf, bool | int | float | str)
                kind.append((type(leaf), leaf if plain else None))
        return kind

    def note_covered(self, kind: list[Any]) -> None:
        """Nothing has to be rehearsed for a call of this kind, nor for the next one."""
        session = self.session
        # Processes of shards must ask each other; and what is known may depend on the mode of every
        # module, or on values.
        depends_on_more = session.layouts or not session.folded <= session.folded_by_rule
        steady = self.sharded is None and not depends_on_more and not session.saw_no_two_samples()
        self.covered = kind if steady else None

    def rehearse_if(
        self,
        wanted: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: ForwardCall | None = None,
    ) -> bool:
        """:meth:`rehearse` where that is wanted, or where another process wants to; whether it was
        done."""
        if self.sharded is not None:
            run = partial(self.rehearse, module, args, kwargs, call)
            forward = partial(module.forward, *args, **kwargs)
            return self.sharded.rehearse(wanted, self.guards.count, run, forward)
        if wanted:
            self.rehearse(module, args, kwargs, call)
        return wanted

    def rehearse(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: ForwardCall | None = None,
        positions: Units | None = None,
    ) -> None:
        """See which rows are samples; after ``call``, whether it was right about that.

        Raises:
            FlashClippingError: what layers read is no samples, or it cannot be seen.
            NotImplementedError: the forward writes into a buffer.
        """
        self.session.epoch += 1
        forward: Callable[..., Any] = module.forward
        if isinstance(forward, TwoPassForward):
            forward = forward.original
        if call is None and positions is None and not self.taps.regions.any_compiled:
            serves = self.taps.serves
            try:
                self._rehearse(module, until_borrowed(module, forward, serves), args, kwargs)
            except UsesOthers:
                borrowed = find_borrowed(module, forward, self.session, args, kwargs, serves)
                self.taps.lend(module, borrowed)
            else:
                self._compare(module, forward, args, kwargs)
                return
        self._rehearse(module, forward, args, kwargs, call, positions)
        if call is None and positions is None:
            self._compare(module, forward, args, kwargs)

    def _compare(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """See whether single samples' gradients are what autograd gives."""
        if self.sharded is None:  # others would have to run the model as often
            with self.taps.regions.as_compiled():
                given = module, forward, self.session, args, kwargs
                self._unfit.compare(*given, self.guards.count)
                if (shadow := type(self).shadow) is not None:
                    shadow(*given, self._unfit)

    def _rehearse(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: ForwardCall | None = None,
        positions: Units | None = None,
    ) -> None:
        """The same with this forward of ``module``."""
        if self._buffers is not None:
            forward = self._buffers.rehearsed(forward)
        if self.sharded is not None:
            forward = self.sharded.together.one_run(forward)
        given = module, forward, self.session, args, kwargs
        with self.taps.regions.as_compiled():
            if positions is None:
                rehearse(*given, call)
            else:
                rehearse_positions(*given, positions, self.guards.count)
        if self._buffers is not None:
            self._buffers.refuse_rehearsed()

    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Refuse what this forward of ``module``, of these arguments, has made of it; in backward,
        gradients of outputs that are not each sample's own.

        Raises:
            NotImplementedError: it has changed a buffer.
            FlashClippingError: it records gradients, and a trainable parameter has no tap.
        """
        if self._buffers is not None:
            self._buffers.after_forward(args, kwargs)
        if torch.is_grad_enabled():
            self._structure.check()
            self._unfit.refuse(module, self.session, args, kwargs, output)
