"""``mode="two_pass"``: norms in one backward pass, clipped gradients in a second.

The root module runs inside one autograd function that keeps the model's own graph to itself. When
the gradient of the root's outputs arrives, that graph is walked twice: the first time every
factor is reduced to norms and dropped, the second time to clipped sums. Nothing is kept between
layers, and the loss may be anything, as both walks start from the same output gradients.

What is recomputed in backward may come out otherwise in the second walk. Generators begin both
walks alike, and norms are taken in both: nothing is released with a larger norm than was measured.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping._compat import (
    at_end_of_backward,
    backward_runs_again,
    graph_task,
    is_autograd_compiled,
    pytree,
    will_run,
)
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_samples import RootForward
from flash_clipping.capture.no_trace import generators_put_back
from flash_clipping.capture.proxies import ParameterProxy, repeated
from flash_clipping.capture.refused_forwards import refuse_compiled_autograd
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError


class TwoPassForward(RootForward):
    """The root module's ``forward``, with the model's graph kept to itself."""

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
        #: Gradients of the outputs, until the second walk takes them.
        self.grads: list[Tensor | None] = []
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
                    f"{self.root.path}: the model returns a parameter, or what it computed from "
                    "parameters alone. mode='two_pass' cuts outputs off from the model, so whose "
                    "gradient comes back to it would not be known. Use mode='one_pass', or return "
                    "a row of it for each sample:\n    parameter.expand(len(x), *parameter.shape)"
                )
            # By id: what is returned twice is one tensor outside as well.
            outputs = list({id(x): x for x in tensors_in(output) if x.requires_grad}.values())
            if not outputs:
                raise FlashClippingError(
                    f"{self.root.path}: mode='two_pass' found no tensor that requires grad among "
                    f"the model's outputs ({type(output).__name__}). Return tensors, or tuples, "
                    "lists, dicts or dataclasses of tensors, or use mode='one_pass'."
                )
            self.inner_outputs = outputs
            # Where tensors may be hidden, for messages.
            hidden = [x for x in pytree.tree_leaves(output) if not isinstance(x, str | int | float)]
            types = dict.fromkeys(type(x).__name__ for x in hidden if not tensors_in(x))
            self.root.session.returned = ", ".join(types) or "nothing that could hold it"
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
        for tensor in self.inner_inputs:
            tensor.grad = None
        with self.root.session.around_walk(), backward_runs_again():
            torch.autograd.backward(self.seed, retain_graph=not last)


class _TwoPasses:
    """The calls of the root that one outer backward reached: a sample's uses are one gradient."""

    def __init__(self, session: ClippingSession):
        self.session = session
        self.task = graph_task()  # the outer backward
        self.calls: list[_Call] = []

    def run(self) -> None:
        """Norms over all calls, then clipped gradients (or one pass while recording is off)."""
        session = self.session
        call_of_root = self.calls[0].forward
        if session.enabled and call_of_root is not None:
            session.check_thread(call_of_root)  # before anything that would end another's backward
        try:
            if session.enabled:
                backward_pass = session.new_backward_pass()
                backward_pass.thread = None if call_of_root is None else call_of_root.thread
                backward_pass.norms_only = True
                devices = [*{p.device for p in session.trainable() if p.is_cuda}]
                if devices and is_current_stream_capturing():
                    devices = []  # whose generators nobody may read then
                with torch.no_grad():
                    # What is drawn in backward (recomputation) is to be drawn again.
                    with generators_put_back(devices):
                        for call in self.calls:
                            call.walk(last=False)
                    backward_pass.put_back()
                    backward_pass.take_norms()
                    backward_pass.forget()
                    backward_pass.norms_only = False
                    backward_pass.stand_in()
                    for call in self.calls:
                        call.walk(last=True)
                    backward_pass.put_back()
                    backward_pass.check_release()
                    backward_pass.add_clipped_sums()
            else:
                for call in self.calls:
                    call.walk(last=True)
        finally:
            for call in self.calls:
                call.seed = None
                call.grads = []
            session.end_backward()


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
        backward_pass = call.root.session.running_pass()
        if backward_pass is None or not backward_pass.norms_only:
            call.grads = []  # nobody needs them again
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
                f"{call.root.path}: mode='two_pass' has freed this forward's graph; it serves one "
                "backward. Run forward again, or use mode='one_pass' with retain_graph=True."
            )
        call.grads = list(grad_outputs)
        if call.forward is not None:
            call.forward.forgotten = False
        session = call.root.session
        if session.enabled and not will_run(ctx.next_functions[0][0]):
            raise FlashClippingError(
                f"{call.root.path}: mode='two_pass' was asked for the gradient of the model's "
                "input alone (torch.autograd.grad, backward(inputs=...)), and would leave clipped "
                "sums in p.grad on the way. Use mode='one_pass', or call the model and backward "
                "between module.disable_hooks() and module.enable_hooks()."
            )
        if any(tensor.requires_grad for tensor in call.inner_inputs):
            # Somebody waits for the gradient of the model's input, so it cannot be put off.
            if session.enabled and (
                session.live_calls() > 1 or session.two_pass_in == graph_task()
            ):
                raise FlashClippingError(
                    f"{call.root.path}: mode='two_pass' cannot serve several calls of the model in "
                    "one backward whose inputs require grad. Detach the inputs, or use "
                    "mode='one_pass'."
                )
            walks = _TwoPasses(session)
            walks.calls.append(call)
            session.two_pass_in = graph_task()
            walks.run()
            return None, None, *(tensor.grad for tensor in call.inner_inputs)
        # After the outer backward: all calls are known, and neither the loss nor its caller hold
        # memory any more. The engine's callback is the only owner.
        owner = session.two_passes() if session.two_passes is not None else None
        if owner is None or owner.task != graph_task():
            owner = _TwoPasses(session)
            session.two_passes = weakref.ref(owner)
            at_end_of_backward(owner.run)
        owner.calls.append(call)
        return None, None, *[None] * len(call.inner_inputs)
