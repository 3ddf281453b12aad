"""What a rule is, and how a layer type finds its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from flash_clipping.errors import Coded, InvalidType
from flash_clipping.factors import PerSampleGrad
from flash_clipping.ops.runtime.backend import autocast_operands as autocast_operands


class UnsupportedLayer(Coded, ValueError):
    """A layer, or an input of it, that a rule cannot serve. The tap adds the layer's path.

    Args:
        message: what was found, what was expected, and what to do.
        line: code that does it, in which ``{layer}`` stands for the layer.
    """

    def __init__(self, message: str, line: str = ""):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class GradRequest:
    """The results that a backward is asked for.

    Attributes:
        inputs: for every input of the layer, whether its gradient is wanted.
        params: names of the layer's own parameters that are trainable.
        backend: backend for ops that run inside the backward.
        traced: the backward runs inside a compiled region: it consists of PyTorch's operators,
            which the compiler fuses, and adds up there what a factor can hold added up.
    """

    inputs: tuple[bool, ...]
    params: frozenset[str]
    backend: str
    traced: bool = False

    @property
    def input(self) -> bool:
        """Whether the gradient of the first input is wanted."""
        return self.inputs[0]


#: What a backward gives: the gradient of the first input (or ``None``), or a tuple of all inputs'
#: gradients; and a factor for every trainable parameter, by its name.
Grads: TypeAlias = tuple[Any, Mapping[str, PerSampleGrad]]


class Rule(ABC):
    """The forward and the backward of one layer type, the batch being the first axis of its input.

    A rule is written like a ``torch.autograd.Function``, with one difference: where that returns
    the gradient of a parameter, summed over the batch, a rule returns the
    :class:`~flash_clipping.factors.PerSampleGrad` that this gradient is the sum of. Norms, clipping
    and accumulation are not its business.
    """

    #: Whether layers with children are supported too; the children keep their own taps.
    allows_children: bool = False

    #: Whether the rule takes what ``nn.utils.parametrize`` computes of frozen tensors (a base that
    #: is kept in fewer bits) in the place of parameters. It refuses what is computed of trainable.
    allows_computed: bool = False

    #: Whether the layer reads tokens ``[B·T, ...]``, and the rule ``[B, T, ...]``: rows of a sample
    #: lie together, and are put together before the rule sees them.
    folds: bool = False

    #: Of a rule that folds: whether it takes rows that are samples as they are, too.
    takes_samples: bool = False

    def fits(self, layer: Any) -> bool:
        """Whether the rule is for this layer of its type, as it is when the model is wrapped."""
        return True

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in place of ``layer.forward``: ``tapped`` is :meth:`forward` under autograd.

        For layers that do more with their parameters' results than return them.
        """
        return tapped(*args, **kwargs)

    def serves(self, layer: Any, *inputs: Any) -> bool:
        """Whether the rule does what the layer does with these arguments. Where not, the layer's
        own forward runs, as that of a layer without a rule."""
        return True

    def parts(self, layer: Any) -> Mapping[str, nn.Module]:
        """Modules below the layer, by their paths from it, which are not called: its own forward
        uses their parameters. These are named ``path.name`` in ``needs.params``."""
        return {}

    def batch_axis(self, layer: Any, default: int) -> int:
        """Axis of the layer's input and output that holds the samples.

        ``default`` is 0, or 1 for a model wrapped with ``batch_first=False``. The tap hands every
        rule its tensors with that axis in front.
        """
        return default

    def rows(self, layer: Any, *inputs: Any) -> tuple[int, Tensor, bool] | None:
        """Where rows of an input are not samples by its shape: how many samples there are.

        With the tensor that says so, and whether that holds for the whole model where the model
        was called with this tensor.
        """
        return None

    def works_by_position(self, layer: Any) -> bool:
        """Whether the layer does the same with every single position of ``[R, T, ...]``.

        Only then can positions of one row be of several privacy units. The rule gets them as rows.
        """
        return False

    def can_be_traced(self, layer: Any) -> bool:
        """Whether :meth:`forward` of one tensor, and :meth:`backward` with ``needs.traced``, can
        run inside a compiled region: the factors' tensors then leave it one by one."""
        return False

    @abstractmethod
    def forward(self, layer: Any, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Compute the layer's output (or outputs) and what :meth:`backward` will need.

        Runs without autograd. Outputs must be fresh tensors; whatever backward reads, weights
        included, belongs among the saved values, so that autograd notices a change in place.
        """

    @abstractmethod
    def backward(self, layer: Any, saved: Any, grad_output: Any, needs: GradRequest) -> Grads:
        """Compute the gradient of the first input (or ``None``) and a factor per parameter name.

        A layer with several differentiable inputs returns a tuple of their gradients; one with
        several outputs gets a tuple of theirs. Only parameters in ``needs.params`` need a factor.
        """


_RULES: dict[type[nn.Module] | str, Rule] = {}
_FAMILIES: list[tuple[Callable[[nn.Module], bool], Rule]] = []
_R = TypeVar("_R", bound=type[Rule])


def register_rule(*layer_types: type[nn.Module] | str) -> Callable[[_R], _R]:
    """Class decorator: use this :class:`Rule` for layers of the given types.

    A type may be given by its full name, ``"package.module.Layer"``: its package is not imported.

    Subclasses that inherit ``forward`` unchanged take the rule, too. A rule registered later for
    the same type replaces the earlier one; models that are already wrapped keep theirs.

    Example::

        @register_rule(MyScale)
        class MyScaleRule(Rule):
            def forward(self, layer, x):
                return x * layer.gain, (x, layer.gain)

            def backward(self, layer, saved, grad_output, needs):
                x, gain = saved
                per_sample = (grad_output * x).flatten(1, -2).sum(1)   # [B, d]
                return grad_output * gain, {"gain": DenseGrad(per_sample)}
    """
    for layer_type in layer_types:
        if isinstance(layer_type, str) and "." in layer_type:
            continue
        if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
            raise InvalidType(
                f"FC164 register_rule expects nn.Module subclasses, found {layer_type!r}; "
                "write @register_rule(MyLayer)."
            )

    def decorate(rule_type: _R) -> _R:
        rule = rule_type()
        for layer_type in layer_types:
            _RULES[layer_type] = rule
        return rule_type

    return decorate


def register_family(belongs: Callable[[nn.Module], bool]) -> Callable[[_R], _R]:
    """Class decorator: use this :class:`Rule` for layers of which ``belongs`` says so, whatever
    their types are called. Rules that were registered for a type come first."""

    def decorate(rule_type: _R) -> _R:
        _FAMILIES.append((belongs, rule_type()))
        return rule_type

    return decorate


def find_rule(layer: nn.Module) -> Rule | None:
    """The rule for this layer, or ``None`` when its own forward is used.

    A subclass has its parent's rule only while it computes what the parent computes: it
    has the parent's ``forward`` (on the class and on the instance), no children of its own and no
    property in the place of a parameter, but for what :attr:`Rule.allows_computed` says. A forward
    on the instance that is computed by a rule says by which (``computes_rule``).
    """
    if (forward := vars(layer).get("forward")) is not None:
        return getattr(forward, "computes_rule", None)
    children = {name for name, _ in layer.named_children()}
    for ancestor in type(layer).__mro__:
        rule = _RULES.get(ancestor) or _RULES.get(full_name(ancestor))
        if rule is not None and rule.fits(layer):
            kinds = type(layer).__mro__
            # A property in the place of a parameter, as nn.utils.parametrize makes them: the rule
            # would not see what it is computed from.
            computes = any(
                isinstance(value, property) and ("weight" in name or "bias" in name)
                for kind in kinds[: kinds.index(ancestor)]
                for name, value in vars(kind).items()
            )
            same = type(layer).forward is ancestor.forward  # type: ignore[attr-defined]
            if rule.allows_computed and parametrize.is_parametrized(layer):
                children -= {"parametrizations"}
            served = same and not computes and (rule.allows_children or not children)
            return rule if served else None
    return next((rule for belongs, rule in _FAMILIES if belongs(layer)), None)


def full_name(kind: type) -> str:
    """``package.module.Class``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def kinds_of(*things: Any) -> set[str]:
    """The full names of the types that these are of."""
    return {full_name(kind) for thing in things for kind in type(thing).__mro__}


def weight_and_bias(layer: nn.Module) -> tuple[Any, Tensor | None]:
    """``layer.weight`` and ``layer.bias``, past ``nn.Module.__getattr__``: it is a tenth of what a
    tapped layer costs the host."""
    params = layer._parameters
    try:
        return params["weight"], params["bias"]
    except KeyError:  # a subclass computes them
        return layer.weight, layer.bias  # type: ignore[return-value]


def own(output: Tensor) -> Tensor:
    """A tensor in memory that nobody else has, without the mark of a view that it may bear."""
    return output.detach() if output._is_view() else output


def as_BTd(x: Tensor) -> Tensor:
    """``[B, ..., d]`` as ``[B, T, d]`` (a view where strides allow)."""
    return x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
