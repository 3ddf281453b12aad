"""``mode="two_pass"``: norms in one backward pass, clipped gradients in a second.

The root module runs inside one autograd function that keeps the model's own graph to itself. When
the gradient of the root's outputs arrives, that graph is walked twice: the first time every
factor is reduced to norms and dropped, the second time to clipped sums. Nothing is kept between
layers, and the loss may be anything, as both walks start from the same output gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from flash_clipping.tap import Tap
from flash_clipping.tape import FlashClippingError, Recorder


class TwoPassForward(Tap):
    """Stands in for the root module's ``forward``."""

    def __init__(self, root: nn.Module, recorder: Recorder):
        super().__init__(root, "", None, recorder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.recording:
            return self.original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = _Call(self, leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # An input that requires grad, so that the outputs do, whatever the inputs are.
        anchor = torch.empty(0, requires_grad=True)
        outputs = _TwoPass.apply(call, anchor, *tensors)
        return call.rebuild(outputs)


class _Call:
    """One call of the root: its arguments, its inner graph, and how to put outputs together."""

    def __init__(self, root: TwoPassForward, leaves: list[Any], spec: Any):
        self.root = root
        self.leaves = leaves
        self.spec = spec
        self.inner_inputs: list[Tensor] = []
        self.inner_outputs: list[Tensor] = []
        self.forward = root.recorder.current_forward

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the model on detached inputs; return its outputs, cut off from the inner graph."""
        self.inner_inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(
                tensors,
                [leaf.requires_grad for leaf in self.leaves if isinstance(leaf, Tensor)],
                strict=True,
            )
        ]
        inner = iter(self.inner_inputs)
        leaves = [next(inner) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.leaves = []
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.enable_grad():
            output = self.root.original(*args, **kwargs)
        self.output_leaves, self.output_spec = pytree.tree_flatten(output)
        self.inner_outputs = [
            leaf for leaf in self.output_leaves if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not self.inner_outputs:
            raise FlashClippingError(
                f"{self.root.path}: mode='two_pass' found no tensor that requires grad among the "
                f"model's outputs ({type(output).__name__}). Return tensors, or tuples, lists or "
                "dicts of tensors, or use mode='one_pass'."
            )
        return tuple(tensor.detach() for tensor in self.inner_outputs)

    def rebuild(self, outputs: tuple[Tensor, ...]) -> Any:
        outer = iter(outputs)
        leaves = [
            next(outer) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
            for leaf in self.output_leaves
        ]
        self.output_leaves = []
        return pytree.tree_unflatten(leaves, self.output_spec)

    def walk(self, grads: list[Tensor], retain_graph: bool) -> None:
        for tensor in self.inner_inputs:
            tensor.grad = None
        torch.autograd.backward(self.inner_outputs, grads, retain_graph=retain_graph)


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.run(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        call: _Call = ctx.call
        recorder = call.root.recorder
        if not call.inner_outputs:
            raise FlashClippingError(
                f"{call.root.path}: mode='two_pass' has freed this forward's graph; it serves one "
                "backward. Run forward again, or use mode='one_pass' with retain_graph=True."
            )
        call.inner_outputs, grads = map(
            list,
            zip(
                *[
                    (output, grad)
                    for output, grad in zip(call.inner_outputs, grad_outputs, strict=True)
                    if grad is not None
                ],
                strict=True,
            ),
        )
        if recorder.enabled:
            tape = recorder.new_tape()
            tape.norms_only = True
            try:
                call.walk(grads, retain_graph=True)
                tape.take_norms()
                tape.forget()
                tape.norms_only = False
                call.walk(grads, retain_graph=False)
                tape.add_clipped_sums()
            finally:
                recorder.end_backward()
        else:
            call.walk(grads, retain_graph=False)
        call.inner_outputs = []
        return None, None, *(tensor.grad for tensor in call.inner_inputs)
