"""What stands around a private model in the graph of a loss: checked in the first backward pass.

Parameters that are not the model's are trained without clipping and noise. An output ``[B, 1]``
that meets a target ``[B]`` makes ``[B, B]`` differences, each of two samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from flash_clipping._compat import roots_of_backward, shape_of_result
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.errors import FlashClippingError, warn

#: Operations that broadcast.
_BROADCASTING = frozenset(
    f"{name}Backward0"
    for name in ("Expand", "Sub", "Rsub", "Add", "Mul", "Div", "Maximum", "Minimum", "Where")
)

#: Sizes of batches in which an axis is the batch's by chance no more.
_SIZES = 3

#: Backward passes that are checked before a size of batch comes twice.
_LOOKS = 16


class LossLook:
    """Looks at losses of a model until one batch is known, or more where the first gives cause.

    Attributes:
        ended: whether there is nothing more to look at.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self.ended = False
        # Modules that are sharded compute with other parameters than those that they list.
        self._mark = self if any(hasattr(p, "placements") for p in root.parameters()) else None
        self._looks = 0
        self._crossed_with: set[int] = set()  # sizes of batches that outputs were broadcast over

    def follow(self, outputs: list[Tensor], call: ForwardCall) -> None:
        """Look at the graph of a backward that comes to one of these outputs of a call of the
        model.

        Raises:
            FlashClippingError: in backward: outputs are broadcast over the batch axis, in batches
                of three sizes.

        Warns:
            UserWarning: so they are in one batch, where it may be chance; a parameter that is not
                the model's is reached.
        """
        for leaf in outputs:
            if leaf.grad_fn is not None:
                marks: Any = leaf.grad_fn.metadata  # a hook that held the node would hold itself
                marks[self] = True
                leaf.register_hook(lambda _: self._look(call))

    def _look(self, call: ForwardCall) -> None:
        samples = call.batch_size
        if self.ended or call.is_looked_at or samples is None or samples < 2:
            return
        call.is_looked_at = True
        roots = [x for x in roots_of_backward(call.thread) if isinstance(x, Tensor)]
        nodes = [x.grad_fn for x in roots if x.grad_fn is not None]
        if not nodes:
            return
        if not self._looks:
            self._warn_of_leaves(nodes)
        self._looks += 1
        crossed = _crossed(nodes, self, samples)
        self.ended = not crossed or self._looks >= _LOOKS
        if not crossed or samples in self._crossed_with:
            return
        self._crossed_with.add(samples)
        text = (
            f"FC460 the loss: found outputs of shape {crossed[0]}, for {samples} samples, that "
            f"become {crossed[1]} where they meet something else: they are broadcast over the "
            "batch axis. Give outputs and targets the same shape:\n"
            "    loss = criterion(output, target.view_as(output))"
        )
        if len(self._crossed_with) == _SIZES:
            self.ended = False
            self._crossed_with.remove(samples)  # who goes on is refused again
            raise FlashClippingError(text)
        if len(self._crossed_with) == 1:
            warn(
                text + "\n"
                f"It is right only where the other {samples} are no samples, but as many by "
                "chance; batches of other sizes will show it.",
                stacklevel=2,
            )

    def _warn_of_leaves(self, nodes: list[Any]) -> None:
        """Warn of parameters that the loss reaches and that are not the model's."""
        of_model = {id(param) for param in self.root.parameters()}
        found = [
            leaf
            for node, _ in walk(nodes, self._mark)
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter)
            and id(leaf) not in of_model
        ]
        if found:
            warn(
                f"FC451 the loss: found {len(found)} parameters, the first of shape "
                f"{[*found[0].shape]}, that it reaches and that are not the private model's: "
                "their gradients are neither clipped nor get noise. Make what has them a part of "
                "the model, before make_private, or freeze what reads public data alone:\n"
                "    model.head = head  # called in the model's forward",
                stacklevel=2,
            )


def walk(
    nodes: list[Any], mark: object, ends: Iterable[Any] = ()
) -> Iterator[tuple[Any, list[tuple[Any, int]]]]:
    """Every node from these on, each once and with its edges, but for those that are marked, or at
    which it ends, and what is below them."""
    seen = {*nodes, *ends}
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if mark is not None and mark in node.metadata:
            continue
        edges = [(below, place) for below, place in node.next_functions if below is not None]
        yield node, edges
        for below, _ in edges:
            if below not in seen:
                seen.add(below)
                waiting.append(below)


def _crossed(nodes: list[Any], mark: object, samples: int) -> tuple[list[int], list[int]] | None:
    """Shapes before and after an operation between the model's outputs and the loss that makes a
    second axis of the batch's size; ``None`` if there is none."""
    for node, edges in walk(nodes, mark):
        if node.name() not in _BROADCASTING:
            continue
        after = shape_of_result(node, 0)
        for below, place in edges:
            before = shape_of_result(below, place)
            if not before or not after or before.count(samples) != 1:
                continue
            grown = [1] * (len(after) - len(before)) + before
            pairs = zip(grown, after, strict=False)
            is_wider = any(old == 1 and new == samples for old, new in pairs)
            if is_wider and after.count(samples) == 2:
                return before, after
    return None
