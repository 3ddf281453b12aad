"""``mode="two_pass"``: norms in one backward pass, clipped gradients in a second.

What the root module returns is cut off from the model's own graph. When the gradient of the root's
outputs arrives, that graph is walked twice: the first time factors are reduced to norms and
dropped, those of a few layers at a time, the second time to clipped sums. The loss may be anything,
as both walks start from the same output gradients.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing

from flash_clipping._compat import backward_runs_again
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_trace import generators_put_back
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.capture.root_forward import RootForward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad, merge
from flash_clipping.finish.backward_pass import BackwardPass, Readers
from flash_clipping.finish.grouped_factors import Blocks, GroupedFactors
from flash_clipping.finish.plan import Plan, layout_of_step, plan_of
from flash_clipping.ops.clipped_sum import AT_ONCE
from flash_clipping.ops.runtime.checks import check_on_device

#: Factors of fewer elements than this, or than this part of all parameters, are handled together:
#: each alone takes the host longer than the device, and all of a block's are there at once anyway.
HELD, PART_HELD = AT_ONCE, 4

#: By how much squared norms of two walks may differ, of wide and of narrow parameters: kernels
#: that add up in any order round otherwise each time.
AGAIN, AGAIN_LOW = 1e-3, 1e-2

_ANOTHER_WALK = (
    "FC417 the model: mode='two_pass' runs backward twice, and gradients of the second run are "
    "larger than those that were measured in the first. A recomputation draws from a generator of "
    "its own, or counts its calls, or a hook has a state. Keep what is recomputed:\n"
    '    mode="one_pass"'
)


class TwoPassForward(RootForward):
    """The root module's ``forward``, with the model's graph kept to itself.

    Raises:
        FlashClippingError: an input requires grad; the model returns a parameter, or no tensor that
            requires grad.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.session.recording:
            return self.original(*args, **kwargs)
        if any(x.requires_grad for x in tensors_in((args, kwargs))):
            raise FlashClippingError(
                f"FC416 {self.path}: mode='two_pass' gives the model's inputs no gradient, and one "
                "of them requires it. Detach it; let activation checkpoints be made with "
                "use_reentrant=False; or use mode='one_pass'."
            )
        with backward_runs_again():
            output = self.original(*args, **kwargs)
        if any(isinstance(x, ParameterProxy) for x in tensors_in(output)):
            raise FlashClippingError(
                f"FC418 {self.path}: the model returns a parameter, or what it computed from "
                "parameters alone, whose gradient mode='two_pass' cannot follow. Let it follow:\n"
                '    mode="one_pass"'
            )
        # By id: what is returned twice is one tensor outside as well.
        own = {id(x): x for x in tensors_in(output) if x.requires_grad}
        if not own:
            raise FlashClippingError(
                f"FC415 {self.path}: mode='two_pass' found no tensor that requires grad among the "
                f"model's outputs ({type(output).__name__}). Return tensors, or tuples, lists, "
                "dicts or dataclasses of tensors, or use mode='one_pass'."
            )
        # On the model's device: autograd's engine runs its callbacks on the caller's streams only
        # if a leaf of the graph is there.
        device = next((param.device for param in self.layer.parameters()), None)
        anchor = torch.empty(0, device=device, requires_grad=True)
        values = [x.detach() for x in own.values()]
        outputs = _CutOff.apply(_Call(self, [*own.values()]), anchor, *values)
        outer = dict(zip(own, outputs, strict=True))
        return map_tensors(lambda x: outer.get(id(x), x), output, packed=True)


class _Call:
    """One call of the root, whose graph leads to these outputs."""

    def __init__(self, root: TwoPassForward, outputs: Sequence[Tensor]):
        self.root = root
        #: What a recomputation in backward asks for the batch; tapped layers need not hold it.
        self.forward = root.session.current_forward
        #: Gradients of the outputs, until the last walk takes them.
        self.grads: list[Tensor | None] = []
        self.is_last = False
        #: The graph's root; ``None`` once it was walked for good.
        self.seed: Tensor | None = _Seed.apply(self, *outputs)

    def walk(self, *, last: bool) -> None:
        """Run the graph's backward; the last time, free it on the way."""
        assert self.seed is not None
        self.is_last = last
        with backward_runs_again():
            torch.autograd.backward(self.seed, retain_graph=not last)

    def forget(self) -> None:
        """Let go of the graph."""
        self.seed, self.grads = None, []


class TwoWalks(BackwardPass):
    """The first walk reduces factors to norms and drops them, a few at a time; the second, once
    coefficients are known, to clipped sums. Factors of parameters that are used several times are
    kept until all of a walk's are there: a sample's uses are one gradient.

    What is recomputed in backward may come out otherwise in the second walk. Generators begin both
    walks alike, and norms are taken in both: nothing is released with a larger norm than was
    measured.

    Attributes:
        walked: the calls of the root that the outer backward has reached.
    """

    def __init__(self, session: ClippingSession, **options: Any):
        super().__init__(session, **options)
        self._session = session
        self.walked: list[_Call] = []
        self._walks = False
        #: How often each parameter was used in forward, by its ``id``.
        self.uses: Counter[int] = Counter()
        #: Squared norms of factors that were dropped, and what rounding may hide of them.
        self._blocks: Blocks = []
        self._doubts: Blocks = []
        #: How many uses of a parameter were measured as one gradient; and those that came in the
        #: second walk, until all have.
        self.together: Counter[int] = Counter()
        self._awaiting: dict[int, list[PerSampleGrad]] = {}
        #: By parameters' ``id``: these, and factors that are handled next; and of how many elements
        #: they may be, less those that are there.
        self._held: dict[int, tuple[nn.Parameter, PerSampleGrad]] = {}
        elements = sum(param.numel() for param in session.options.trainable())
        self._most = self._room = max(HELD, elements // PART_HELD)
        #: Squared norms ``[B]`` of what the coefficients leave of each sample, as they were
        #: measured, and as they came in the second walk.
        self.measured_B: Tensor | None = None
        self.released_B: Tensor | None = None

    # -- the walks ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Walk the calls of the root that the outer backward has reached."""
        if self.walked:
            self.walk()
        else:
            super().finish()

    def walk(self) -> None:
        """Norms over all calls of the root, then clipped gradients."""
        walked, self.walked = self.walked, []
        self.uses = self._session.uses()
        devices = [*{param.device for param in self.session.options.trainable() if param.is_cuda}]
        if devices and is_current_stream_capturing():
            devices = []  # whose generators nobody may read then
        done, self._walks = False, True
        try:
            with torch.no_grad():
                # What is drawn in backward (recomputation) is to be drawn again.
                with generators_put_back(devices):
                    for call in walked:
                        self._walk(call, last=False)
                    self._handle_held()
                self.put_back()
                self.take_norms()
                self.measured_B = self._add_left(None, self._blocks)
                self.forget()
                self.stand_in()
                for call in walked:
                    self._walk(call, last=True)
                self._handle_held()
                self.put_back()
                self.check_release()
                self.add_clipped_sums()
            done = True
        finally:
            self._walks = False
            if not done:  # its frames may be kept
                self.forget()
            for call in walked:
                call.forget()
            self.session.end_backward()

    def _walk(self, call: _Call, *, last: bool) -> None:
        call.walk(last=last)

    # -- recording ----------------------------------------------------------------------------

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        """Take the norms of what comes, or its clipped sum."""
        self._check_walks(path)
        if self.units is not None:
            factors = self._of_units(self.units, path, params, factors)
        for param, factor in zip(params, factors, strict=True):
            if factor.batch_size != self.batch_size:
                self._check_batch_size(path, factor.batch_size)
            if self.coef is not None:
                self._release(param, factor)
            else:
                self._measure(path, param, factor)

    def _check_walks(self, path: str) -> None:
        """Refuse gradients that came past the model's outputs."""
        if self._walks:
            return
        self.session.end_backward(norms_taken=False)  # somebody may keep these frames
        raise FlashClippingError(
            f"FC414 {path}: mode='two_pass' got a gradient past the model's outputs: the loss uses "
            "a tensor that the model kept on a module or returned inside a function or a set, or "
            "this layer was called alone. Return the tensor, in a tuple, list, dict or dataclass; "
            "or use mode='one_pass'."
        )

    def _measure(self, path: str, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """The first walk: take the norms of a factor, or keep it until all of its kind are there.

        Raises:
            FlashClippingError: a second gradient of a parameter that was used once.
        """
        key = id(param)
        if key in self.paths:
            raise FlashClippingError(
                f"FC413 {path}: a parameter that was used once in forward received a second "
                "gradient. Call backward() once over everything that was computed from the "
                "model, before the next forward()."
            )
        if self.uses[key] != 1:
            self._keep(path, param, factor)
            return
        self.paths[key] = path
        self._hold(param, factor)

    def _keep(self, path: str, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """The first walk: measure this as a part of one gradient."""
        self.together[id(param)] += 1
        self.call_paths.append(path)
        self.used.append([param])
        self.factors.append(factor)

    def _release(self, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """The second walk: release what was measured. Several uses were measured as one gradient,
        whose roundings are not those of each use alone."""
        key = id(param)
        uses = self._awaiting.setdefault(key, [])
        uses.append(factor)
        if len(uses) >= self.together[key]:
            del self._awaiting[key]
            self._hold(param, merge(uses))

    def _hold(self, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """Let a factor wait for others."""
        if id(param) in self._held:
            self._handle_held()
        self._held[id(param)] = param, factor
        sizes = [x.numel() for x in factor.operands() if isinstance(x, Tensor)]
        self._room -= sum(sizes) if sizes else self._most + 1  # it does not say what it holds
        if self._room < 0:
            self._handle_held()

    def _handle_held(self) -> None:
        """Take norms of the factors that wait, and in the second walk their clipped sums."""
        params, plans = [param for param, _ in self._held.values()], self.session.calls.plans
        factors = {key: factor for key, (_, factor) in self._held.items()}
        self._held, self._room = {}, self._most
        if not factors:
            return
        layout = layout_of_step([*factors], [*factors.values()], params, self.backend)
        if (plan := plans.find(layout)) is None:
            plan = plan_of(factors, params, {key: self.paths.get(key, "") for key in factors})
            plans.keep(layout, plan)
        del layout
        groups = GroupedFactors(self.backend, factors, plan)
        factors.clear()
        blocks, doubts = groups.sqnorms(plan)
        if self.coef is None:
            self._blocks += blocks
            self._doubts += doubts
            return
        self.released_B = self._add_left(self.released_B, blocks)
        groups.add_clipped_sums(plan, self.coef, self._put_all)

    def _put_all(self, keys: Sequence[int], grads: Sequence[Tensor]) -> None:
        for key, grad in zip(keys, grads, strict=True):
            self._put(self.params[key], grad)

    def _add_left(self, total_B: Tensor | None, blocks: Blocks) -> Tensor | None:
        """Add squared norms ``[B]`` of what the coefficients leave of these gradients."""
        assert self.coef is not None
        for keys, sq_nB in blocks:
            if (coef_nB := self.coef.one) is None:
                coef_nB = torch.stack([self.coef[key] for key in keys])
            # What cancels may come out below zero.
            left_B = torch.where(coef_nB == 0, 0, coef_nB.square() * sq_nB).clamp(min=0).sum(0)
            total_B = left_B if total_B is None else total_B.to(left_B.device) + left_B
        return total_B

    def check_release(self) -> None:
        """Refuse a second walk whose gradients are larger than the first's.

        Raises:
            FlashClippingError: they are. On a device this comes later.
        """
        if self.released_B is None or self.measured_B is None:
            return
        released_B = self.released_B
        narrow = any(param.dtype.itemsize < 4 for param in self.params.values())
        most_B = (1 + (AGAIN_LOW if narrow else AGAIN)) * self.measured_B.to(released_B)
        try:
            check_on_device((released_B <= most_B).all(), _ANOTHER_WALK)
        except FlashClippingError:
            for param in self.params.values():
                param.grad = None
            raise

    # -- finishing ----------------------------------------------------------------------------

    def forget(self) -> None:
        super().forget()
        self._held.clear()
        self._awaiting.clear()
        self._blocks.clear()
        self._doubts.clear()

    def _sqnorms(self, plan: Plan) -> tuple[Blocks, Blocks]:
        """And those that were taken in the first walk."""
        blocks, doubts = super()._sqnorms(plan)
        self._blocks += blocks
        return self._blocks, self._doubts + doubts


class _Seed(torch.autograd.Function):
    """The inner graph's root: a scalar whose backward hands the outputs their gradients.

    Gradients given to ``torch.autograd.backward`` are held by its caller until it returns; those
    of a language model's logits would be the largest tensor of the step.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *outputs: Tensor) -> Tensor:
        # Not owned: the call owns this graph, and what a failed step leaves must go at once.
        ctx.call = weakref.ref(call)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        call: _Call = ctx.call()
        grads = call.grads
        if call.is_last:
            call.grads = []
        return None, *grads


class _CutOff(torch.autograd.Function):
    """The outputs of a call, without its graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        call: _Call = ctx.call
        session = call.root.session
        if call.seed is None:
            raise FlashClippingError(
                f"FC413 {call.root.path}: mode='two_pass' has freed this forward's graph; it "
                "has one backward. Run forward again, or use mode='one_pass' with "
                "retain_graph=True."
            )
        call.grads = list(grad_outputs)
        if session.mode.enabled:
            # Walked after the outer backward: all calls are known, and neither the loss nor its
            # caller hold memory any more.
            backward_pass = session.begin_backward(call.forward)
            assert isinstance(backward_pass, TwoWalks)
            backward_pass.walked.append(call)
        else:  # ordinary gradients
            call.walk(last=True)
            call.forget()
        return (None,) * len(ctx.needs_input_grad)
