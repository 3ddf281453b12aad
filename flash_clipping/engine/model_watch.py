"""What happens to a model after it was wrapped, and in its forward: looked for every time.

A gradient that autograd brings to a parameter went past every tap; layers that come after wrapping
have none.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import replace
from functools import partial
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import awaits_gradient, hooks_of_parameter, never_compiled, pytree
from flash_clipping.capture.borrowed import UsesOthers, until_borrowed
from flash_clipping.capture.factor_source import Guard
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import refuse_graphs
from flash_clipping.capture.proof.gate import Gate
from flash_clipping.capture.proof.kinds import is_plain
from flash_clipping.capture.proof.positions import prove_positions
from flash_clipping.capture.proof.prove import prove
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.refused_forwards import embeddings_of, refuse_max_norm
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.two_pass import TwoPassForward
from flash_clipping.capture.units import Units
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.installed_taps import InstalledTaps
from flash_clipping.engine.unsupported import (
    PIPELINES,
    batch_norms_of,
    refuse_around,
    refuse_batch_norms,
    refuse_complex,
    refuse_hooks,
    refuse_in_pipeline,
    refuse_since,
)
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.ops.runtime.checks import device_checks

if TYPE_CHECKING:
    from flash_clipping.distributed.model import ShardedModel

_PAST_THE_TAP = (
    "added without being clipped. Use it in its own module's forward, which others call; or detach "
    "it where it is used elsewhere. For a penalty on weights, use the optimizer's weight_decay. A "
    "weight that a hook computes needs torch.nn.utils.parametrize instead; after pruning, "
    "torch.nn.utils.prune.remove(module, name)."
)

_MODE, _PLACE = operator.attrgetter("training"), operator.attrgetter("dtype", "device")
_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")


class ModelParameters:
    """The parameters of a wrapped model. Called, it gives those that are trainable now, each once,
    in their order: the same list again while nothing changes.

    From :meth:`watch` on they are watched, and ``p.grad`` may hold sums in fp32.

    Attributes:
        root: the model.
        modules: of the wrapper, or of the model where it is not wrapped: all that were there when
            :meth:`check` last looked.
        count: how many parameters are watched.
    """

    session: ClippingSession

    def __init__(self, root: nn.Module):
        self.root, self.count = root, 0
        self._owners = [module for module in root.modules() if module._parameters]
        self._seen: tuple[list[int], list[bool]] | None = None
        self._found: list[nn.Parameter] = []
        self._guarded: dict[int, nn.Parameter] = {}
        self._looked_at: list[nn.Parameter] | None = None
        self._places: list[tuple[torch.dtype, torch.device]] = []
        #: Parameters whose gradients had to have their dtype before.
        self._of_one_dtype: list[nn.Parameter] = []

    def __call__(self) -> list[nn.Parameter]:
        # Every step asks twice: walking the module tree takes milliseconds, and a loop a tenth.
        held = [*chain.from_iterable(map(dict.values, map(_PARAMETERS, self._owners)))]
        is_trainable = [*map(getattr, held, repeat("requires_grad"), repeat(False))]
        seen = [*map(id, held)], is_trainable
        if seen != self._seen:
            self._found = [*dict.fromkeys(compress(held, is_trainable))]
            self._seen = seen
        return self._found

    def watch(
        self,
        wrapper: nn.Module,
        session: ClippingSession,
        handles: list[Any],
        why: str = _PAST_THE_TAP,
    ) -> None:
        """Watch the parameters, by hooks that are added to ``handles``: to remove those, and
        :meth:`remove`, end the watch."""
        self.wrapper, self.session, self.handles, self._why = wrapper, session, handles, why
        self._look()
        #: Modules that had parameters, and so have a tap, or a parent that covers them.
        self._served = {
            m for m in self.modules if any(p is not None for p in m._parameters.values())
        }
        self.watch_new()

    def watch_new(self) -> bool:
        """Watch parameters that have become trainable since the last look; whether any has.
        ``FlashClippingError`` if one is complex, or a user's hook is on any."""
        found, guarded = self(), self._guarded
        # Each has one hook of ours; the loop over their names runs where there are more.
        hooks = filter(None, map(hooks_of_parameter, found))
        if sum(map(len, hooks)) > len(found) or any(map(awaits_gradient, found)):
            for name, param in self.root.named_parameters():
                refuse_hooks(name, param)
        places = [*map(_PLACE, found)]
        if found is self._looked_at and places == self._places:
            return False
        self.session.begin_epoch()
        new = {id(param): param for param in found if id(param) not in guarded}
        names = {id(param): name for name, param in self.root.named_parameters()} if new else {}
        for key, param in new.items():
            why = self._why
            if why is _PAST_THE_TAP:
                refuse_complex(names[key], param)
                why += ONE_BY_ONE
            guard = Guard(names[key], why, self.session)
            self.handles.append(param.register_hook(guard.__getitem__))
            guarded[key] = param  # the last: what was refused is checked again
            self.count += 1
        for param in found:
            if param.dtype in (torch.bfloat16, torch.float16) and param.grad_dtype == param.dtype:
                self._of_one_dtype.append(param)
                param.grad_dtype = None  # any
        self._looked_at, self._places = found, places
        return bool(new)

    def remove(self) -> None:
        """Gradients have to have the dtype again that they had to have before."""
        self._guarded, self._looked_at = {}, None
        while self._of_one_dtype:
            param = self._of_one_dtype.pop()
            if param.grad is None or param.grad.dtype == param.dtype:
                param.grad_dtype = param.dtype

    def _look(self) -> None:
        self.modules = [*self.wrapper.modules()]
        self._parts = self._parts_now()

    def _parts_now(self) -> list[nn.Module | nn.Parameter | None]:
        """Children and parameters of all modules that are known."""
        # Flat, without a loop in Python: walking the tree of modules takes milliseconds a step.
        held = chain(map(_CHILDREN, self.modules), map(_PARAMETERS, self.modules))
        return [*chain.from_iterable(map(dict.values, filter(None, held)))]

    def check(self) -> None:
        """Raise ``FlashClippingError`` for trainable parameters that have come since the model was
        wrapped, in a module that has no tap."""
        before, now = self._parts, self._parts_now()
        # Lists of tensors cannot be compared by ==, and modules need not be.
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return
        for path, module in self.wrapper.named_modules():
            if module in self._served:
                continue
            for name, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    where = path.removeprefix("_module.") or "the model"
                    raise FlashClippingError(
                        f"FC170 {where} ({type(module).__name__}): its parameter {name!r} came "
                        "after the model was wrapped, so its gradients would not be clipped. "
                        "Unwrap the model with to_standard_module() (or cleanup()), change it, and "
                        "wrap it again."
                    )
        self._look()


class ModelWatch:
    """Looks at a wrapped model when its forward begins, when it is proven, when it has ended.

    Args:
        parameters, taps: the model's; the parameters are watched.
        strict: whether buffers that forward changes are refused.
    """

    def __init__(self, parameters: ModelParameters, taps: InstalledTaps, strict: bool):
        root, session = parameters.root, parameters.session
        self.root, self.session = root, session
        self.taps, self.parameters = taps, parameters
        self._buffers = BufferWatch(root, session) if strict else None
        self._embeddings = embeddings_of(root)
        self._batch_norms = batch_norms_of(root)
        #: Of a model with shards, whose processes look together.
        self.sharded: ShardedModel | None = None
        #: Whether everything that may happen to parameters was checked.
        self._looked_around = False
        #: The kind of the last call, if nothing else decides whether one like it is checked.
        self.covered: list[Any] | None = None
        self._has_bags = False  # whether offsets among the arguments say where samples begin
        self.gate = Gate()
        #: Whether a pipeline's norms are those of all its stages.
        self.in_private_schedule = False

    def before_forward(self, module: nn.Module) -> bool:
        """Watch new parameters, take over what was compiled, and refuse what cannot be clipped.
        ``module`` is the model, or the replica of it whose forward begins. Returns whether that was
        the first forward, or parameters were new."""
        refuse_around(module, module is not self.root)
        if PIPELINES in sys.modules and not self.in_private_schedule:
            refuse_in_pipeline(module)
        if self._embeddings:
            refuse_max_norm(self._embeddings)
        if self._batch_norms:
            refuse_batch_norms(self._batch_norms)
        if self._buffers is not None:
            self._buffers.before_forward(self.parameters.modules)
        if self.parameters.watch_new():
            self._looked_around = False
        if self._looked_around:
            return False
        self.session.recover()  # no stand-in of a failed step may be in the way
        refuse_since(
            self.parameters.wrapper, () if self.sharded is None else self.sharded.slots.gathering
        )
        if not is_dynamo_compiling():
            self.taps.regions.find(self.taps.of_root)
        self._looked_around = True
        return True

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
        kind: list[Any] = [session.proof.epoch, self.parameters.count]
        kind += (module.training, torch.is_grad_enabled(), [*map(_MODE, self.parameters.modules)])
        for x in tensors:
            kind.append(x.shape)
        if not tensors and torch.is_grad_enabled():
            refuse_graphs(args, kwargs)
        if kwargs or len(args) != 1 or args[0] is not next(iter(tensors), None):
            leaves, structure = pytree.tree_flatten((args, kwargs))
            kind.append(structure)
            for leaf in leaves:
                kind.append((type(leaf), leaf if is_plain(leaf) else None))
        is_covered = kind == self.covered
        # Nothing may wait in a capture: the next call makes up for it.
        if (is_covered and not gate.is_due()) or not session.may_prove():
            return
        subject = self.subject(module, args, kwargs)
        if is_covered:
            self._audit(subject, gate.take_audit())
        elif self.prove_if(not self._is_proven(module, args, kwargs), subject):
            session.proof.proven_with = self.parameters.count
        else:
            # Processes of shards must ask each other; and what is known may depend on sizes.
            depends = self.sharded is not None or session.known.depends_on_sizes
            self.covered = None if depends else kind

    def subject(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
        """A call as proofs take it: of the forward that ``mode="two_pass"`` stands around."""
        forward = module.forward
        if isinstance(forward, TwoPassForward):
            forward = forward.original
        return Subject(module, forward, self.session, args, kwargs)

    def _is_proven(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it was shown which rows are samples in calls such as this one."""
        session = self.session
        if session.proof.proven_with != self.parameters.count:
            return False
        if self.sharded is not None:  # its processes look at the beginning only
            return True
        return session.proof.kinds.covers(module, args, kwargs, session.known.depends_on_sizes)

    @never_compiled  # which compares runs
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
        """
        with device_checks.at_once():
            if self.sharded is not None:
                run = partial(self._prove, subject, call, positions)
                forward = partial(subject.root.forward, *subject.args, **subject.kwargs)
                return self.sharded.together.rehearse(wanted, self.parameters.count, run, forward)
            if wanted:
                self._prove(subject, call, positions)
            elif call is None and positions is None and self.gate.is_due():
                self._audit(subject, self.gate.take_audit())
            return wanted

    def _prove(self, subject: Subject, call: ForwardCall | None, positions: Units | None) -> None:
        session = self.session
        session.begin_epoch()
        session.proof.has_oracle = self.sharded is None and positions is None
        if call is None and positions is None and not self.taps.regions.any_compiled:
            found = self._run_lending(subject)
        else:
            found = self._run(subject, call, positions)
        if positions is None:
            self._audit(replace(found, forward=subject.forward))

    def _run_lending(self, subject: Subject) -> Subject:
        """The same, until a module stands in for each parameter that is used past all taps."""
        session, lost = self.session, self.taps.lost
        while True:
            own = until_borrowed(subject.forward, session, lost)
            try:
                return self._run(replace(subject, forward=own))
            except UsesOthers as uses:
                self.taps.lend(subject.root, uses.params)
            finally:
                session.proof.lost = None

    def _run(
        self, subject: Subject, call: ForwardCall | None = None, positions: Units | None = None
    ) -> Subject:
        if self.sharded is not None:
            subject = replace(subject, forward=self.sharded.together.one_run(subject.forward))
        with self.taps.regions.as_compiled():
            if positions is None:
                subject = prove(subject, call)
                self._has_bags |= bool(subject.offsets or subject.bags)
            else:
                prove_positions(subject, positions, self.parameters.count)
        return subject

    def _audit(self, subject: Subject, audit: int = 0) -> None:
        """See whether samples' gradients are what autograd gives."""
        if self.sharded is None:  # others would have to run the model as often
            with self.taps.regions.as_compiled():
                if audit and self._has_bags:
                    subject = subject.of_bags(Runs(subject).look((subject.args, subject.kwargs)))
                self.gate.examine(subject, self.parameters.count, audit)

    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Refuse changed buffers, trainable parameters without a tap, and in backward gradients of
        outputs that are not each sample's own."""
        if self._buffers is not None:
            self._buffers.after_forward(self.parameters.modules)
        if torch.is_grad_enabled():
            self.parameters.check()
            self.gate.refuse(module, self.session, args, kwargs, output)
