"""The parameters that a tapped layer's own forward reads, and gradients that go past it."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from flash_clipping.errors import FlashClippingError

#: Names and parameters that are a layer's own and trainable.
Trainable: TypeAlias = tuple[list[str], list[nn.Parameter]]

#: Modules that hold parameters for their parent and are never called.
PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def owners(module: nn.Module) -> list[nn.Module]:
    """The module and the containers below it whose parameters its forward uses."""
    found = [module]
    for child in module.children():
        if isinstance(child, PARAMETER_CONTAINERS):
            found += owners(child)
    return found


def owned_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module's own forward uses directly."""
    return [p for owner in owners(module) for p in owner.parameters(recurse=False)]


class Guard(dict[None, None]):
    """Refuses gradients that went past a parameter's tap; ``__getitem__`` is the parameter's hook.

    Autograd calls the hook in every backward, with ``None`` where the tap has consumed the
    gradient. This entry is there, so that Python code runs for other gradients only.

    Args:
        name: of the parameter, for the message.
        why: the consequence, and what to do instead.
        session: knows whether backward passes are recorded.
    """

    def __init__(self, name: str, why: str, session: Any):
        super().__init__({None: None})
        self.name, self.why, self.session = name, why, session

    def __missing__(self, grad: Tensor) -> None:
        # Gradients of a probe are autograd's own.
        if self.session.enabled and self.session.probing is None:
            raise FlashClippingError(
                f"{self.name}: this parameter received a gradient from outside the module that "
                f"owns it; it would be {self.why}"
            )
