"""What happens to a model after it was wrapped, and in its forward: looked for every time."""

from __future__ import annotations

import operator
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import pytree
from flash_clipping.capture.borrowed import UsesOthers, find_borrowed, until_borrowed
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.capture.proof.coverage import is_plain
from flash_clipping.capture.proof.gate import Gate
from flash_clipping.capture.proof.positions import prove_positions
from flash_clipping.capture.proof.prove import prove
from flash_clipping.capture.proof.reached import check_reached
from flash_clipping.capture.proof.runs import Subject
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.two_pass import TwoPassForward
from flash_clipping.capture.units import Units
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.installed_taps import InstalledTaps
from flash_clipping.engine.parameter_guards import ParameterGuards, Structure
from flash_clipping.engine.unsupported import (
    PIPELINES,
    batch_norms_of,
    refuse_around,
    refuse_batch_norms,
    refuse_in_pipeline,
    refuse_since,
)

if TYPE_CHECKING:
    from flash_clipping.distributed.model import ShardedModel

_MODE = operator.attrgetter("training")


class ModelWatch:
    """Looks at a wrapped model when its forward begins, when it is proven, when it has ended.

    Args:
        wrapper: the wrapped model; the model itself where it is used as it is.
        root: the model.
        session, taps, guards: its own.
        strict: whether buffers that forward changes are refused.
    """

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
        #: Of a model with shards, whose processes look together.
        self.sharded: ShardedModel | None = None
        #: Whether it was looked at all that may have been done to the parameters.
        self._looked_around = False
        #: The kind of the last call, if nothing else decides whether one like it is looked at.
        self.covered: list[Any] | None = None
        self.gate = Gate()
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
            self.taps.regions.find(self.taps.of_root)
            if self.sharded is not None:
                self.sharded.check_compiled(self.taps.regions.any_compiled)
        self._looked_around = True

    def look_at(
        self,
        module: nn.Module,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """See which rows are samples in a call that begins, unless that is known of its kind: its
        arguments but for their values, and what may have changed since the last one. ``tensors``
        are those in its arguments."""
        session, gate = self.session, self.gate
        kind: list[Any] = [session.epoch, self.guards.count]
        kind += (module.training, torch.is_grad_enabled(), [*map(_MODE, self._structure.modules)])
        for x in tensors:
            kind.append(x.shape)
        if kwargs or len(args) != 1 or args[0] is not tensors[0]:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            kind.append(structure)
            for leaf in leaves:
                kind.append((type(leaf), leaf if is_plain(leaf) else None))
        if kind == self.covered:
            gate.calls += 1
            # Not in a capture, which nothing may wait in: the next call makes up for it.
            if gate.calls < gate.next_audit or session.captured is not None:
                return
            if session.may_prove():
                self._audit(self.subject(module, args, kwargs), gate.take_audit())
            else:
                gate.next_audit += 1
        elif session.may_prove():
            is_proven = self._is_proven(module, args, kwargs)
            if self.prove_if(not is_proven, self.subject(module, args, kwargs)):
                session.proven_with = self.guards.count
            else:
                # Processes of shards must ask each other; and what is known may depend on sizes.
                depends = self.sharded is not None or self._depends_on_sizes()
                self.covered = None if depends else kind

    def subject(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
        """A call as proofs take it: of the forward that ``mode="two_pass"`` stands around."""
        forward = module.forward
        if isinstance(forward, TwoPassForward):
            forward = forward.original
        return Subject(module, forward, self.session, args, kwargs)

    def _depends_on_sizes(self) -> bool:
        """Whether some layer reads rows that are not the samples."""
        session = self.session
        return bool(session.layouts) or not session.folded <= session.folded_by_rule

    def _is_proven(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it was shown which rows are samples in calls such as this one."""
        session = self.session
        if session.proven_with != self.guards.count:
            return False
        if self.sharded is not None:  # its processes look at the beginning only
            return True
        seen = session.layouts.values()
        apart = any(layout.outer > 1 for known in seen for layout in known.values())
        by_sizes = self._depends_on_sizes()
        return session.coverage.covers(module, args, kwargs, by_sizes, exactly=apart)

    def prove_if(
        self,
        wanted: bool,
        subject: Subject,
        call: ForwardCall | None = None,
        positions: Units | None = None,
    ) -> bool:
        """See which rows are samples, where that is wanted, or where another process wants to;
        after ``call``, whether it was right about that. Returns whether it was done.

        Raises:
            FlashClippingError: what layers read is no samples, or it cannot be seen.
            NotImplementedError: the forward writes into a buffer.
        """
        if self.sharded is not None:
            run = partial(self._prove, subject, call, positions)
            forward = partial(subject.root.forward, *subject.args, **subject.kwargs)
            return self.sharded.rehearse(wanted, self.guards.count, run, forward)
        if wanted:
            self._prove(subject, call, positions)
        elif call is None and positions is None and (audit := self.gate.due()):
            self._audit(subject, audit)
        return wanted

    def check_reached(self, subject: Subject, call: ForwardCall, output: Any) -> None:
        """Look at a call that has reached layers that no proof did."""
        if self.sharded is None and call.units is None and not self.taps.regions.any_compiled:
            check_reached(subject, call, output, self.gate.is_fit)

    def _prove(self, subject: Subject, call: ForwardCall | None, positions: Units | None) -> None:
        session, module = self.session, subject.root
        session.epoch += 1
        session.has_oracle = self.sharded is None and positions is None
        if call is None and positions is None and not self.taps.regions.any_compiled:
            forward, serves = subject.forward, self.taps.serves
            try:
                own = until_borrowed(module, forward, serves)
                found = self._run(replace(subject, forward=own))
            except UsesOthers:
                given = subject.args, subject.kwargs
                borrowed = find_borrowed(module, forward, session, *given, serves)
                self.taps.lend(module, borrowed)
                found = self._run(subject)
        else:
            found = self._run(subject, call, positions)
        if positions is None:
            self._audit(replace(found, forward=subject.forward))

    def _run(
        self, subject: Subject, call: ForwardCall | None = None, positions: Units | None = None
    ) -> Subject:
        forward = subject.forward
        if self._buffers is not None:
            forward = self._buffers.rehearsed(forward)
        if self.sharded is not None:
            forward = self.sharded.together.one_run(forward)
        subject = replace(subject, forward=forward)
        with self.taps.regions.as_compiled():
            if positions is None:
                subject = prove(subject, call)
            else:
                prove_positions(subject, positions, self.guards.count)
        if self._buffers is not None:
            self._buffers.refuse_rehearsed()
        return subject

    def _audit(self, subject: Subject, audit: int = 0) -> None:
        """See whether samples' gradients are what autograd gives."""
        if self.sharded is None:  # others would have to run the model as often
            with self.taps.regions.as_compiled():
                self.gate.examine(subject, self.guards.count, audit)

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
            self.gate.refuse(module, self.session, args, kwargs, output)
