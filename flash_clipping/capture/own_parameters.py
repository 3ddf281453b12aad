"""The parameters that a tapped layer's own forward reads, and gradients that go past it."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.errors import FlashClippingError, to_freeze

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


class OwnParameters:
    """What of a layer's parameters is trainable, looked up anew where something has changed.

    Args:
        layer: the layer.
        owners: it, and the containers below it whose parameters its forward uses.
        path: its name in the model, for messages.
        has_rule: it is served by a rule, which knows parameters only.

    Attributes:
        computed: whether the layer computed with other tensors than its parameters, when these were
            last looked up.
    """

    def __init__(
        self,
        layer: nn.Module,
        owners: list[nn.Module],
        prefixes: list[str],
        path: str,
        has_rule: bool,
    ):
        self.layer = layer
        self.owners = owners
        self.prefixes = prefixes
        self.path = path
        self.has_rule = has_rule
        self.computed = False
        self._trainable: Trainable = [], []
        self._attributes = -1  # how many the layer had when its parameters were last looked up

    def trainable(self) -> Trainable:
        """The parameters that are the layer's own and trainable now, and their names."""
        names: list[str] = []
        params: list[nn.Parameter] = []
        for owner, prefix in zip(self.owners, self.prefixes, strict=True):
            for name, param in owner._parameters.items():
                if param is not None and param.requires_grad:
                    names.append(prefix + name)
                    params.append(param)
        known = self._trainable
        changed = names != known[0] or [*map(id, params)] != [*map(id, known[1])]
        if changed or len(vars(self.layer)) != self._attributes or self.layer._buffers:
            self._attributes = len(vars(self.layer))
            if self.has_rule:  # is there a tensor where a parameter was?
                self.computed = self._computes_weights(names, params)
        if changed:
            self._trainable = names, params
        # The same lists again where they hold: what calls keep would make Python look for garbage
        # in every step.
        return self._trainable

    def _computes_weights(self, names: list[str], params: list[nn.Parameter]) -> bool:
        """Whether the layer reads tensors that are none of its own parameters: a weight that
        another module computes and assigns. A rule would not see that tensor's gradient; the
        layer's own forward uses it as what it is."""
        for name, param in zip(names, params, strict=True):
            if not (param.is_leaf or isinstance(param, ParameterProxy)):
                raise FlashClippingError(
                    f"{self.path}: its {name} is a tensor that was computed from something else "
                    "(torch.func.functional_call, for example), not a parameter, so it has no "
                    "per-sample gradient here. Compute it inside the forward of one module that "
                    "owns what it is computed from (nn.utils.parametrize does), or freeze that."
                    f"{to_freeze(self.path)}"
                )
        attributes, buffers = vars(self.layer), self.layer._buffers
        return (
            any(isinstance(param, ParameterProxy) for param in params)
            or any(isinstance(value, Tensor) for value in attributes.values())
            or "weight" in attributes
            or "bias" in attributes
            or any(x is not None and x.requires_grad for x in buffers.values())
            or any(isinstance(x, ParameterProxy) for x in buffers.values())
        )


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
