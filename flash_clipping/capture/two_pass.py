"""``mode="two_pass"``: norms in one backward pass, clipped gradients in a second.

The root module runs inside one autograd function that keeps the model's own graph to itself. When
the gradient of the root's outputs arrives, that graph is walked twice: the first time every
factor is reduced to norms and dropped, the second time to clipped sums. Nothing is kept between
layers, and the loss may be anything, as both walks start from the same output gradients.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing

from flash_clipping._compat import (
    backward_runs_again,
    graph_task,
    is_autograd_compiled,
    pytree,
    will_run,
)
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_trace import generators_put_back
from flash_clipping.capture.proxies import ParameterProxy, repeated
from flash_clipping.capture.refused_forwards import refuse_compiled_autograd
from flash_clipping.capture.root_forward import RootForward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad, merge
from flash_clipping.finish.backward_pass import BackwardPass, Readers
from flash_clipping.finish.grouped_factors import Blocks
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.runtime.checks import check_on_device

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
    """The root module's ``forward``, with the model's graph kept to itself."""

    #: The last backward in whose midst a call was walked.
    walked_in: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.session.recording:
            return self.original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = _Call(self, leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # An input that requires grad, so that the outputs do, whatever the inputs are. On the
        # model's device: autograd's engine runs its callbacks on the caller's streams only if a
        # leaf of the graph is there.
        device = next((param.device for param in self.layer.parameters()), None)
        anchor = torch.empty(0, device=device, requires_grad=True)
        outputs = _TwoPass.apply(call, anchor, *tensors)
        return call.rebuild(outputs)


class _Call:
    """One call of the root: its arguments, its inner graph, and how to put outputs together."""

    def __init__(self, root: TwoPassForward, leaves: list[Any], spec: Any):
        self.root = root
        self.leaves = leaves
        self.spec = spec
        self.inner_inputs: list[Tensor] = []
        #: What the model returned, and the tensors in it that require grad, until it is rebuilt.
        self.output: Any = None
        self.inner_outputs: list[Tensor] = []
        #: What a recomputation in backward asks for the batch; tapped layers need not hold it.
        self.forward = root.session.current_forward
        #: Gradients of the outputs, until the last walk takes them.
        self.grads: list[Tensor | None] = []
        self.is_last = False
        #: The inner graph's root; ``None`` once it was walked for good.
        self.seed: Tensor | None = None

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the model on detached inputs; return its outputs, cut off from the inner graph."""
        self.inner_inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        inner = iter(self.inner_inputs)
        leaves = [next(inner) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.leaves = []
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.enable_grad(), backward_runs_again():
            output = self.root.original(*args, **kwargs)
            if any(isinstance(x, ParameterProxy) for x in tensors_in(output)):
                output = map_tensors(self._by_sample, output, packed=True)
            self.output = output
            if any(isinstance(x, ParameterProxy) for x in tensors_in(output)):
                raise FlashClippingError(
                    f"FC418 {self.root.path}: the model returns a parameter, or what it computed "
                    "from parameters alone, whose gradient mode='two_pass' cannot follow. Use "
                    "mode='one_pass', or return a row of it for each sample:\n"
                    "    parameter.expand(len(x), *parameter.shape)"
                )
            # By id: what is returned twice is one tensor outside as well.
            outputs = list({id(x): x for x in tensors_in(output) if x.requires_grad}.values())
            if not outputs:
                raise FlashClippingError(
                    f"FC415 {self.root.path}: mode='two_pass' found no tensor that requires grad "
                    f"among the model's outputs ({type(output).__name__}). Return tensors, or "
                    "tuples, lists, dicts or dataclasses of tensors, or use mode='one_pass'."
                )
            self.inner_outputs = outputs
            # Where tensors may be hidden, for messages.
            hidden = [x for x in pytree.tree_leaves(output) if not isinstance(x, str | int | float)]
            types = dict.fromkeys(type(x).__name__ for x in hidden if not tensors_in(x))
            if self.forward is not None:
                self.forward.returned = ", ".join(types) or "nothing that could hold it"
            self.seed = _Seed.apply(self, *outputs)
        return tuple(tensor.detach() for tensor in outputs)

    def _by_sample(self, x: Tensor) -> Tensor:
        """An output; if it is a parameter that was expanded over the samples, a row for each."""
        count = self.forward.batch_size if self.forward is not None else None
        if isinstance(x, ParameterProxy) and x.shape[:1] == (count,) and x.is_repeated(0):
            return repeated(x, 0, 1)
        return x

    def rebuild(self, outputs: tuple[Tensor, ...]) -> Any:
        """What the model returned, with these in the place of its own tensors; objects that held
        some are copies."""
        inner, output = self.inner_outputs, self.output
        self.inner_outputs, self.output = [], None
        outer = {id(own): other for own, other in zip(inner, outputs, strict=True)}
        return map_tensors(lambda x: outer.get(id(x), x), output, packed=True)

    def walk(self, *, last: bool) -> None:
        """Run the inner graph's backward; the last time, free it on the way."""
        assert self.seed is not None
        self.is_last = last
        for tensor in self.inner_inputs:
            tensor.grad = None
        with backward_runs_again():
            torch.autograd.backward(self.seed, retain_graph=not last)

    def forget(self) -> None:
        """Let go of the inner graph."""
        self.seed, self.grads = None, []


class TwoWalks(BackwardPass):
    """The first walk reduces every factor to norms and drops it; the second, once coefficients are
    known, to clipped sums. Factors of parameters that are used several times are kept until all of
    a walk's are there: a sample's uses are one gradient.

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
        #: Squared norms ``[B]`` of what the coefficients leave of each sample, as they were
        #: measured, and as they came in the second walk.
        self.measured_B: Tensor | None = None
        self.released_B: Tensor | None = None

    # -- the walks ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Walk the calls of the root that have not been walked in the midst of outer backward."""
        if self.walked:
            self.walk()

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
                self.put_back()
                self.take_norms()
                assert self.coef is not None
                left = [self.coef[key].square() * sq_B for key, sq_B in self._measured()]
                if left:  # what cancels may come out below zero
                    left = [x.nan_to_num(0, 0).clamp(min=0).to(left[0]) for x in left]
                    self.measured_B = torch.stack(left).sum(0)
                self.forget()
                self.stand_in()
                for call in walked:
                    self._walk(call, last=True)
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
                self._release(param, factor, self.coef[id(param)])
            else:
                self._measure(path, param, factor)

    def _check_walks(self, path: str) -> None:
        """Refuse gradients that came past the model's outputs."""
        if self._walks:
            return
        call = self._session.current_forward
        found = "no output" if call is None else call.returned
        self.session.end_backward(norms_taken=False)  # somebody may keep these frames
        raise FlashClippingError(
            f"FC414 {path}: mode='two_pass' got a gradient past the model's outputs: the loss uses "
            "a tensor that the model kept on a module or returned inside a closed object (found: "
            f"{found}), or this layer was called alone. Return the tensor, in a tuple, list, dict "
            "or dataclass; or use mode='one_pass'."
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
        self._blocks.append(([key], factor.sqnorms(self.backend).unsqueeze(0)))
        if (doubt_B := factor.error_bound(self.backend)) is not None:
            self._doubts.append(([key], doubt_B.unsqueeze(0)))
        self.paths[key] = path

    def _keep(self, path: str, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """The first walk: measure this as a part of one gradient."""
        self.together[id(param)] += 1
        self.call_paths.append(path)
        self.used.append([param])
        self.factors.append(factor)

    def _release(self, param: nn.Parameter, factor: PerSampleGrad, coef_B: Tensor) -> None:
        """The second walk: release what was measured. Several uses were measured as one gradient,
        whose roundings are not those of each use alone."""
        key = id(param)
        uses = self._awaiting.setdefault(key, [])
        uses.append(factor)
        if len(uses) >= self.together[key]:
            del self._awaiting[key]
            whole = merge(uses)
            sq_B = coef_B.square() * whole.sqnorms(self.backend).to(coef_B)
            self._note_release(key, torch.where(coef_B == 0, 0, sq_B).clamp(min=0))
            self._put(param, whole.clipped_sum(coef_B, self.backend))

    def _note_release(self, key: int, sq_B: Tensor) -> None:
        """Count what the clipped gradients of a parameter have of each sample, squared."""
        if self.released_B is not None:
            sq_B = self.released_B.to(sq_B.device) + sq_B
        self.released_B = sq_B

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
        self._awaiting.clear()
        self._blocks.clear()
        self._doubts.clear()

    def _sqnorms(self, plan: Plan) -> tuple[Blocks, Blocks]:
        """And those that were taken in the first walk."""
        blocks, doubts = super()._sqnorms(plan)
        self._blocks += blocks
        return self._blocks, self._doubts + doubts

    def _measured(self) -> list[tuple[int, Tensor]]:
        """Squared norms ``[B]`` by parameter, of what this process has of gradients."""
        return [*chain.from_iterable(zip(*block, strict=True) for block in self._blocks)]


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


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.run(tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        if is_autograd_compiled():
            refuse_compiled_autograd()
        call: _Call = ctx.call
        if call.seed is None:
            raise FlashClippingError(
                f"FC413 {call.root.path}: mode='two_pass' has freed this forward's graph; it "
                "has one backward. Run forward again, or use mode='one_pass' with "
                "retain_graph=True."
            )
        call.grads = list(grad_outputs)
        session, forward = call.root.session, call.forward
        if not session.mode.enabled:  # ordinary gradients
            call.walk(last=True)
            call.forget()
            return None, None, *(tensor.grad for tensor in call.inner_inputs)
        if not will_run(ctx.next_functions[0][0]):
            raise FlashClippingError(
                f"FC416 {call.root.path}: mode='two_pass' was asked for the gradient of the "
                "model's input alone (torch.autograd.grad, backward(inputs=...)), and would leave "
                "clipped sums in p.grad on the way. Use mode='one_pass', or call the model and "
                "backward between module.disable_hooks() and module.enable_hooks()."
            )
        # Somebody may wait for the gradient of the model's input, so that it cannot be put off.
        in_the_midst = any(tensor.requires_grad for tensor in call.inner_inputs)
        is_first = session.calls.running_pass() is None and call.root.walked_in != graph_task()
        backward_pass = session.begin_backward(forward)
        if in_the_midst and (not is_first or session.live_calls() > 1):
            session.end_backward(norms_taken=False)
            raise FlashClippingError(
                f"FC416 {call.root.path}: mode='two_pass' cannot serve several calls of the model "
                "in one backward whose inputs require grad. Detach the inputs, or use "
                "mode='one_pass'."
            )
        assert isinstance(backward_pass, TwoWalks)
        backward_pass.walked.append(call)
        if in_the_midst:
            call.root.walked_in = graph_task()
            backward_pass.walk()
        # Otherwise after the outer backward: all calls are known, and neither the loss nor its
        # caller hold memory any more.
        return None, None, *(tensor.grad for tensor in call.inner_inputs)
