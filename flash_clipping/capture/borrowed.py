"""Parameters that a module uses which another module owns: found before the first step.

``self.dt_proj.bias.float()`` in the mixer of a state-space model, ``weight @ x`` with the weight of
a layer that is never called, a head that takes the table of an embedding alone. In the graph of
the first look's outputs such a parameter is reached past every tap. A module above its owner then
stands in for it as for its own (:mod:`flash_clipping.capture.proxies`): the owner's parent, or one
further up where it is not the parent that uses it.

Nothing is believed that is not seen: a use that this run did not come by is refused in backward,
by the guard of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from flash_clipping._compat import function_of
from flash_clipping.capture.inputs import tensors_in

_OURS = __name__.partition(".")[0]


class UsesOthers(Exception):
    """Modules use trainable parameters of others: the run tells nothing.

    Attributes:
        params: these parameters.
    """

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        self.params = params


def until_borrowed(forward: Callable[..., Any], session: Any, lost: set[int]) -> Callable[..., Any]:
    """``forward`` of a model with taps; its first run raises ``UsesOthers`` where parameters are
    used past every tap. ``lost``: ids of those that no module can stand in for."""
    is_known = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_known
        if is_known:
            return forward(*args, **kwargs)
        session.proof.lost = lost
        output = forward(*args, **kwargs)
        refuse_until_lent(session, tensors_in(output))
        # A run that was refused in its midst shows nothing.
        session.proof.lost, is_known = None, True
        return output

    return run


def refuse_until_lent(session: Any, tensors: Sequence[Tensor]) -> None:
    """Raise ``UsesOthers`` in a look that may let what these are, or are computed from, have
    stand-ins."""
    if (lost := session.proof.lost) is not None:
        watched = {id(x) for x in session.options.trainable()} - lost
        found = [x for x in used_past_taps(tensors) if id(x) in watched]
        if found:
            raise UsesOthers(found)


def used_past_taps(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """The trainable parameters that these are, or that their graph reaches by another function than
    ours."""
    waiting = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = {id(node) for node in waiting}
    held = [*waiting]  # an id is a node's as long as the node is there
    found = {id(x): x for x in tensors if isinstance(x, nn.Parameter) and x.requires_grad}
    while waiting:
        node: Any = waiting.pop()
        function = function_of(node)
        is_ours = function is not None and function.__module__.startswith(_OURS)
        own = getattr(node, "trainable", None) if is_ours else None  # a layer's, which has inputs
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if isinstance(variable, nn.Parameter):
                if not is_ours or (own is not None and all(variable is not p for p in own[1])):
                    found[id(variable)] = variable
            elif following is not None and id(following) not in seen:
                seen.add(id(following))
                held.append(following)
                waiting.append(following)
    return [*found.values()]
