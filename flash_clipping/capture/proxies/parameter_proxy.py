"""The tensor subclass that stands in for a parameter, and for all that is computed from parameters
alone.

What of one parameter such a value is, where that is little more than the parameter itself, is known
as well. ``weight.T``, ``1.0 + weight.float()``, ``weight[:, None, None]``, ``weight * 0.5``: the
gradient of the parameter is that of the value, laid out as the parameter is, times a number. So a
factor of the one is a factor of the other. Anything else (a weight that is standardised, a product
of two parameters) has no origin, and its gradients are formed sample by sample.

Shape suffixes: ``B`` samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import EllipsisType, NoneType
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import make_subclass, plain_functions, pytree, saved_tensors_hooks_now
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import (
    ConvolutionGrad,
    DenseGrad,
    EmbeddingGrad,
    LinearGrad,
    PerSampleGrad,
    SumGrad,
    accumulation_dtype,
)
from flash_clipping.ops.runtime.backend import full_precision
from flash_clipping.rules.attention import multi_head_attention

#: What holds no other arguments. Most functions get nothing else, and small layers wait for the
#: host: opening containers that are not there took it as long as the function itself.
_ATOMS = (Tensor, int, float, str, slice, NoneType, EllipsisType, torch.dtype, torch.device)


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """All arguments in a row, and what :func:`unflattened` needs to put them back."""
    for arg in args:
        if not isinstance(arg, _ATOMS):
            break
    else:
        for arg in kwargs.values():
            if not isinstance(arg, _ATOMS):
                break
        else:
            return [*args, *kwargs.values()], tuple(kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return leaves, spec


def unflattened(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by name."""
    if isinstance(spec, tuple):  # names
        positional = len(leaves) - len(spec)
        return tuple(leaves[:positional]), dict(zip(spec, leaves[positional:], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def called(
    func: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    instead: Callable[[ParameterProxy], Any] | None = None,
) -> Any:
    """The function of these arguments, with other tensors in place of stand-ins: their values,
    where nothing else is said."""
    given = [
        leaf
        if not isinstance(leaf, ParameterProxy)
        else (leaf.value if instead is None else instead(leaf))
        for leaf in leaves
    ]
    args, kwargs = unflattened(given, spec)
    return func(*args, **kwargs)


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, of a property with the property's own name."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # a property; its own name is on the descriptor
        name += str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
#: Functions after which all elements are still there, in their order, if their number is the same.
_RESHAPES = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "clone"}
_TRANSPOSES = {"__get__T", "__get__mT", "t"}


@dataclass(frozen=True)
class AffineView:
    """A value is ``scale · leaf + constant``, in whatever dtype and layout.

    Attributes:
        leaf: the stand-in for the parameter.
        scale: a number, or a tensor of one element.
        transposed: the rows of a matrix are its columns.
    """

    leaf: Tensor
    scale: float | Tensor = 1.0
    transposed: bool = False

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.scale, Tensor) or self.scale != 1.0

    def matched(self, x: Tensor) -> Tensor:
        """Cast where one of the tensor and the parameter is float64: sums are like the latter."""
        dtype = accumulation_dtype(self.leaf.dtype)
        return x.to(dtype) if torch.float64 in (x.dtype, dtype) else x

    def scaled(self, G: Tensor) -> Tensor:
        """An output gradient, times what the parameter was multiplied by."""
        G = self.matched(G)
        return G * self.scale if self.is_scaled else G

    def grads(self, grads_B: Tensor) -> Tensor:
        """Per-sample gradients of the value ``[B, *value]`` as those of the parameter."""
        B, shape = len(grads_B), self.leaf.shape
        if self.transposed:
            grads_B = grads_B.reshape(B, shape[1], shape[0]).mT
        return self.scaled(grads_B).reshape(B, *shape)

    def of_parameter(self, factor: PerSampleGrad, value: Tensor) -> PerSampleGrad | None:
        """A factor of the value as one of the parameter; it is nobody else's and may be changed.

        Returns: ``None`` where it has no such form.
        """
        if isinstance(factor, LinearGrad | EmbeddingGrad | ConvolutionGrad):
            turned = self.transposed and not isinstance(factor, LinearGrad)
            if turned or not self.is_whole(value):
                return None
        if isinstance(factor, LinearGrad):
            A, G = self.matched(factor.A_BTd), self.scaled(factor.G_BTp)
            return LinearGrad(G, A) if self.transposed else LinearGrad(A, G)
        if isinstance(factor, EmbeddingGrad):
            factor.G_BTd = self.scaled(factor.G_BTd)
            return factor
        if isinstance(factor, ConvolutionGrad):
            factor.x, factor.G = self.matched(factor.x), self.scaled(factor.G)
            return factor
        as_it_is = not (self.is_scaled or self.transposed) and value.shape == self.leaf.shape
        if isinstance(factor, SumGrad) and as_it_is:
            rows_BTn = self.matched(factor.rows_BTn)
            if rows_BTn is factor.rows_BTn or factor.normalized is None:
                return SumGrad(rows_BTn, factor.shape, factor.normalized)
        return DenseGrad(self.grads(factor.dense()))

    def is_whole(self, value: Tensor) -> bool:
        """Whether the value has the parameter's axes, or these exchanged."""
        shape = self.leaf.shape
        return value.shape == (shape[::-1] if self.transposed else shape)


def origin_of(
    name: str, leaves: list[Any], named: bool, before: Tensor, origin: AffineView, value: Tensor
) -> AffineView | None:
    """The origin of a floating ``value``, which the function ``name`` made of ``leaves``.

    Args:
        leaves: its arguments; one of them stands in for a parameter, all others are constants.
        named: some were given by name, in whatever order.
        before: the value of the one.
        origin: the origin of that.

    Returns:
        ``None`` if the function does more than keep it.
    """
    if name in _CASTS:
        return origin if value.shape == before.shape else None
    if name in _TRANSPOSES:
        turned = replace(origin, transposed=not origin.transposed)
        return turned if value.dim() == 2 and origin.is_whole(before) else None
    # What an index of slices leaves out, the number of elements tells.
    slices = all(x is None or x is Ellipsis or isinstance(x, slice) for x in leaves[1:])
    if name in _RESHAPES or (name == "__getitem__" and slices):
        sizes, kept = ([n for n in x.shape if n != 1] for x in (value, before))
        return origin if value.dtype == before.dtype and sizes == kept else None
    if named or len(leaves) != 2 or value.shape != before.shape:
        return None
    constants = [leaf for leaf in leaves if not hasattr(leaf, "leaves")]
    other, first = constants[0], constants[0] is leaves[1]
    if not isinstance(other, int | float | Tensor):
        return None
    if name == "add" or (name == "sub" and first):
        return origin
    if name == "sub" or name in ("__rsub__", "rsub"):
        return _times(origin, -1.0)
    if name in ("mul", "multiply"):
        return _times(origin, other)
    if name in ("div", "true_divide") and first and not isinstance(other, Tensor) and other:
        return _times(origin, 1.0 / other)
    return None


def _times(origin: AffineView, number: float | Tensor) -> AffineView | None:
    if isinstance(number, Tensor):
        if number.numel() != 1:
            return None
        # A copy: a buffer may have changed when backward needs it.
        number = number.detach().clone().reshape(())
    return replace(origin, scale=number * origin.scale)


#: Set on the tensors that stand in for parameters, for who finds them in autograd's graph.
_STANDS_IN = "_flash_clipping_stands_in"


class UnsupportedUse(FlashClippingError):
    """A use of a bare parameter that gives no per-sample gradient."""

    def __init__(self, tap: FactorSource, found: str):
        self.tap, self.found = tap, found
        super().__init__(
            f"FC140 {tap.path}: a parameter of this module is used in a way that gives no "
            f"per-sample gradient: {found}. Use it in ordinary operations of the module's own "
            f"forward, or write a rule for the module (flash_clipping.register_rule).{ONE_BY_ONE}"
        )


#: Elements of the matrix that tells which positions read which row of a small table.
_SELECTED = 1 << 26


@dataclass(frozen=True)
class TableRows:
    """Rows of a table (an embedding) which a module looks up: ``[*ids, d]``, a leaf like a
    parameter. What reaches it is nobody's gradient of the whole table.

    ``padding_idx``: the row that gets none.
    """

    ids: Tensor
    table: nn.Parameter
    padding_idx: int | None

    def factor(self, grads_B: Tensor) -> PerSampleGrad:
        """Per-sample gradients ``[B, *ids, d]`` of these rows as those of the table."""
        G, V, T, d = grads_B, len(self.table), self.ids.numel(), grads_B.shape[-1]
        ids = self.ids.expand(G.shape[:-1])
        if 2 * V <= T and V * T <= _SELECTED and len(G):
            # Every sample reads the same rows, and each many times: sums are one matrix product.
            dtype = accumulation_dtype(G.dtype)
            ids_T = ids[0].reshape(T, 1)
            reads_TV = ids_T == torch.arange(V, device=ids.device)
            if self.padding_idx is not None:
                reads_TV &= ids_T != self.padding_idx
            with full_precision(G.device):
                grads_BdV = G.reshape(-1, T, d).mT.to(dtype) @ reads_TV.to(dtype)
            return DenseGrad(grads_BdV.mT.contiguous())
        return EmbeddingGrad(ids.reshape(-1, T), G.reshape(-1, T, d), V, self.padding_idx)


#: What a stand-in begins with.
Leaf: TypeAlias = nn.Parameter | TableRows


class ParameterProxy(torch.Tensor):
    """Something computed from parameters alone, the same for all samples.

    What was computed with gradients off (``torch.no_grad()``) has a ``value`` that does not require
    grad. It must still be known while gradients are off, as in the first forward of a re-entrant
    checkpoint, whose recomputation will need gradients.
    """

    value: Tensor  # the ordinary tensor, with autograd's graph back to ``leaves``
    leaves: dict[Tensor, Leaf]  # a detached stand-in for each parameter -> the parameter
    origin: AffineView | None  # what ``value`` is of one parameter, if little more than that
    version: int  # of ``value`` as it was made
    whole: Tensor | None  # the leaf that it is, if nothing has been computed from that
    one: ParameterProxy | None  # its only row, if constants that repeat over samples gave it many
    tap: FactorSource  # the module's
    #: Runs a torch function that got a stand-in; set by ``functions.py``, which needs this class.
    run: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def wrap(
        value: Tensor,
        leaves: dict[Tensor, Leaf],
        tap: FactorSource,
        origin: AffineView | None = None,
    ) -> ParameterProxy:
        # It requires grad so that a gradient which got past these functions is noticed.
        bare: ParameterProxy = make_subclass(ParameterProxy, value.detach(), value.requires_grad)
        bare.value, bare.leaves, bare.tap = value, leaves, tap
        bare.origin, bare.version = origin, value._version
        bare.whole = bare.one = None
        if value.requires_grad:
            with plain_functions():
                bare.register_hook(partial(_bypassed, tap))
        return bare

    @staticmethod
    def stand_in(param: nn.Parameter, tap: FactorSource) -> ParameterProxy:
        """The parameter itself, as what nothing has been computed from yet.

        Raises:
            FlashClippingError: it is a ``DTensor``.
        """
        if hasattr(param, "placements"):
            raise FlashClippingError(
                f"FC620 {tap.path}: its own forward uses a parameter that is a DTensor, as tensor "
                "parallelism makes them; only layers that are called are supported. Call the "
                "layer that owns it, or leave that layer out of parallelize_module."
            )
        return ParameterProxy.of_leaf(param, param, tap)

    @staticmethod
    def of_leaf(value: Tensor, leaf_of: Leaf, tap: FactorSource) -> ParameterProxy:
        """What nothing has been computed from yet."""
        leaf = value.detach().requires_grad_()
        vars(leaf)[_STANDS_IN] = True
        # Per-sample gradients are asked for, never accumulated: whatever is has got past.
        leaf.register_post_accumulate_grad_hook(partial(_bypassed, tap))
        # Rows that were looked up may be changed in place.
        value = leaf.clone() if isinstance(leaf_of, TableRows) else leaf
        bare = ParameterProxy.wrap(value, {leaf: leaf_of}, tap, AffineView(leaf))
        bare.whole = leaf
        return bare

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that it is computed from."""
        leaves = self.leaves.values()
        return [leaf.table if isinstance(leaf, TableRows) else leaf for leaf in leaves]

    @property
    def is_kept(self) -> bool:
        """Whether ``value`` was not changed in place since, by this name or another."""
        with plain_functions():
            return self.value._version == self.version

    @property
    def kept_origin(self) -> AffineView | None:
        """The origin, unless ``value`` was changed since."""
        return self.origin if self.is_kept else None

    @property
    def of_one_row(self) -> ParameterProxy:
        """What it is of one sample, if it was made to be the same for every one, and neither was
        changed since; else itself."""
        return self if self.one is None or not (self.is_kept and self.one.is_kept) else self.one

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(getattr(kind, "inside_regions", False) for kind in types):
            return NotImplemented  # it refuses what is not inside its region
        if func is F.multi_head_attention_forward:
            return multi_head_attention(*args, **kwargs or {})
        if func in _CELLS and not kwargs:
            return _CELLS[func](*args)
        with plain_functions():
            return cls.run(func, args, dict(kwargs or {}))


def _gates(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None
) -> tuple[Tensor, Tensor]:
    return F.linear(x, w_x, b_x), F.linear(h, w_h, b_h)


def _lstm_cell(x: Tensor, state: Any, *weights: Any) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.add(*_gates(x, state[0], *weights)).chunk(4, -1)
    c = f.sigmoid() * _as_cast(state[1], i) + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    of_x, of_h = _gates(x, h, *weights)
    (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    z, n = (z_x + z_h).sigmoid(), (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return n + z * (_as_cast(h, of_x) - n)


def _as_cast(state: Tensor, gates: Tensor) -> Tensor:
    """A state as a cell reads it: autocast on a GPU, and only there, casts it with the weights."""
    return state.to(gates.dtype) if gates.device.type == "cuda" else state


#: PyTorch's functions of several, each of which has a factor: as one they went sample by sample.
_CELLS: dict[Any, Any] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: lambda *args: torch.add(*_gates(*args)).tanh(),
    torch.rnn_relu_cell: lambda *args: torch.add(*_gates(*args)).relu(),
}


def _bypassed(tap: FactorSource, _: Any = None) -> NoReturn:
    """Tensor hook of a stand-in: its operation was none that the stand-in could see."""
    raise UnsupportedUse(
        tap,
        "it is an argument of a re-entrant checkpoint, of another torch.autograd.Function, or of "
        "a scripted or compiled function, or was written into another tensor",
    )


def refuse_bypassed(tap: FactorSource, args: Any, output: Any) -> None:
    """Look for stand-ins in the graph of what a module returned, back to its arguments.

    Raises:
        UnsupportedUse: a gradient would reach one as an ordinary tensor, past the functions here.
    """

    def nodes_of(tensors: Any) -> list[Any]:
        found = [x.grad_fn for x in pytree.tree_leaves(tensors) if is_plain(x) and x.requires_grad]
        return [node for node in found if node is not None]

    held = nodes_of(args)  # an id is a node's as long as the node is there
    seen = {id(node) for node in held}
    waiting = nodes_of(output)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        held.append(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, ParameterProxy) or _STANDS_IN in getattr(variable, "__dict__", ()):
            _bypassed(tap)
        waiting += [following for following, _ in node.next_functions if following is not None]


def is_plain(leaf: Any) -> bool:
    kind = leaf.__class__
    return kind is Tensor or (kind is not ParameterProxy and isinstance(leaf, Tensor))


def circumstances() -> Any:
    """What a checkpoint changes while it runs its function: grad mode, or saved-tensor hooks."""
    return torch.is_grad_enabled(), saved_tensors_hooks_now()


@contextlib.contextmanager
def parameter_proxies(tap: FactorSource, owners: list[nn.Module]) -> Iterator[None]:
    """Stand in for the trainable parameters of these modules while the body runs."""
    stood_in = tap.session.calls.stood_in  # of all modules that are running, outermost first
    before = len(stood_in)
    outside, tap.entered = tap.entered, circumstances()
    try:
        for module in owners:
            slots: dict[str, Any] = module._parameters
            for name, param in slots.items():
                if isinstance(param, ParameterProxy):
                    continue  # a recomputation: stood in for during the whole backward
                if param is not None and param.requires_grad:
                    stood_in.append((module, name, param))
                    slots[name] = ParameterProxy.stand_in(param, tap)
        yield
    finally:
        tap.entered = outside
        while len(stood_in) > before:
            module, name, param = stood_in[-1]
            module._parameters[name] = param
            stood_in.pop()


@contextlib.contextmanager
def recomputable(tap: FactorSource) -> Iterator[None]:
    """Stand in during backward, for what a checkpoint inside the module's forward recomputes.

    A failed backward lets go of this whenever it is collected: it puts back only what it put in.
    """
    mine: list[tuple[dict[str, Any], str, nn.Parameter, ParameterProxy]] = []
    try:
        for module in tap.owners:
            slots: dict[str, Any] = module._parameters
            for name, param in slots.items():
                if param is not None and param.requires_grad:
                    bare = ParameterProxy.stand_in(param, tap)
                    mine.append((slots, name, param, bare))
                    slots[name] = bare
        yield
    finally:
        for slots, name, param, bare in mine:
            if slots.get(name) is bare:
                slots[name] = param
