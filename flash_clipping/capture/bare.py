"""Bare parameters: used by a module's own forward, in whatever way it likes.

While such a module runs, its parameters are stood in for by a tensor subclass. What is computed
from parameters alone stays of that class (a slice, an ``exp``, a cast). Where it meets a tensor
that carries samples - is added, multiplied, concatenated, multiplied as a matrix -, that one
operation becomes an autograd function whose backward gives the operation's gradient per sample.
Only the operation is looked at again in backward, never the module's forward.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from flash_clipping.capture.session import Place, in_backward
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Dense, Factor, Lookup, accumulation_dtype, merge

#: Functions that only look at the other tensor's shape, dtype or device.
_METADATA_ONLY = {"type_as", "expand_as", "view_as", "reshape_as", "to", "broadcast_to"}
#: Functions that move rows of a table about as they are.
_MOVES_ROWS = {"expand", "expand_as", "unsqueeze", "squeeze", "__getitem__"}
_EXPANDING = {"expand", "expand_as", "repeat", "broadcast_to", "tile"}
_ADDITION = {"add", "add_"}
_MULTIPLICATION = {"mul", "multiply"}
_DETACHING = {"detach", "__get__data"}
#: ``x += p`` arrives under this name; what it changes in place is an ordinary tensor.
_IN_PLACE = {"add_"}
#: Functions that draw random numbers: one draw for all rows is not one draw per row.
_RANDOM = ("dropout", "bernoulli", "rand", "normal", "multinomial")
#: Set on the tensors that stand in for parameters, for who finds them in autograd's graph.
_STANDS_IN = "_flash_clipping_stands_in"


class UnsupportedUse(FlashClippingError):
    """A use of a bare parameter that only the generic rule can serve."""

    def __init__(self, tap: Place, found: str):
        self.tap, self.found = tap, found
        super().__init__(
            f"{tap.path}: a parameter of this module is used in a way that gives no per-sample "
            f"gradient: {found}. Freeze the module's own parameters (requires_grad_(False)) and "
            "train adapters (LoRA on the model's linear layers) instead; or use the parameter in "
            "ordinary operations of the module's own forward; or wrap the model with "
            "force_functorch=True, which runs every module under torch.func.vmap and is slow; or "
            "write a rule for the module (flash_clipping.register_rule)."
        )


@dataclass(frozen=True)
class _Rows:
    """Rows of a table (an embedding): ``value[..., :]`` is row ``ids[...]`` of a parameter."""

    ids: Tensor
    table: Tensor  # the stand-in
    padding_idx: int | None

    def factor(self, ids: Tensor, G: Tensor, axis: int) -> Lookup:
        """The per-sample gradients of a sum of these rows and something that has samples."""
        ids, G = ids.expand(G.shape[:-1]).transpose(0, axis), G.transpose(0, axis)
        B, d = G.shape[0], G.shape[-1]
        ids_BT = ids.reshape(B, ids.shape[1:].numel())
        G_BTd = G.reshape(B, ids_BT.shape[1], d)
        return Lookup(ids_BT, G_BTd, self.table.shape[0], self.padding_idx)


class BareParameter(torch.Tensor):
    """Something computed from parameters alone, the same for all samples.

    Attributes:
        value: the ordinary tensor, with autograd's graph back to ``leaves``.
        leaves: a detached stand-in for each parameter -> the parameter.
        row: for an expansion of leading dimension 1, the value before it.
        lookup: for rows of a table, which ones.
        tap: the module's tap.

    What was computed with gradients off (``torch.no_grad()``) has a ``value`` that does not require
    grad. It must still be known while gradients are off, as in the first forward of a re-entrant
    checkpoint, whose recomputation will need gradients.
    """

    value: Tensor
    leaves: dict[Tensor, nn.Parameter]
    row: Tensor | None
    lookup: _Rows | None
    tap: Place

    @staticmethod
    def wrap(
        value: Tensor,
        leaves: dict[Tensor, nn.Parameter],
        tap: Place,
        row: Tensor | None = None,
        lookup: _Rows | None = None,
    ) -> BareParameter:
        # It requires grad so that a gradient which got past these functions is noticed.
        bare = torch.Tensor._make_subclass(BareParameter, value.detach(), value.requires_grad)
        bare.value, bare.leaves, bare.row, bare.tap = value, leaves, row, tap
        bare.lookup = lookup
        if value.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                bare.register_hook(_Bypassed(tap))
        return bare

    @staticmethod
    def stand_in(param: nn.Parameter, tap: Place) -> BareParameter:
        """The parameter itself, as what nothing has been computed from yet."""
        leaf = param.detach().requires_grad_()
        vars(leaf)[_STANDS_IN] = True
        # Per-sample gradients are asked for, never accumulated: whatever is has got past.
        leaf.register_post_accumulate_grad_hook(_Bypassed(tap))
        return BareParameter.wrap(leaf, {leaf: param}, tap)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _dispatch(func, args, dict(kwargs or {}))


class _Bypassed:
    """Tensor hook of a stand-in: its operation was none that the stand-in could see."""

    found = (
        "it is an argument of a re-entrant checkpoint, of another torch.autograd.Function, or of "
        "a scripted or compiled function, or was written into another tensor"
    )

    def __init__(self, tap: Place):
        self.tap = tap

    def __call__(self, _: Tensor) -> None:
        raise UnsupportedUse(self.tap, self.found)


def refuse_bypassed(tap: Place, args: Any, output: Any) -> None:
    """Look for stand-ins in the graph of what a module returned, back to its arguments.

    Raises:
        UnsupportedUse: a gradient would reach one as an ordinary tensor, past the functions here.
    """

    def nodes_of(tensors: Any) -> list[Any]:
        found = [x for x in pytree.tree_leaves(tensors) if _is_plain(x) and x.requires_grad]
        return [x.grad_fn for x in found if x.grad_fn is not None]

    seen = {id(node) for node in nodes_of(args)}
    waiting = nodes_of(output)
    held = []  # an id is a node's as long as the node is there
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        held.append(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, BareParameter) or _STANDS_IN in getattr(variable, "__dict__", ()):
            raise UnsupportedUse(tap, _Bypassed.found)
        waiting += [following for following, _ in node.next_functions if following is not None]


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # a property; its own name is on the descriptor
        name += str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one torch function that got at least one bare parameter."""
    name = _name(func)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    bares = [leaf for leaf in leaves if isinstance(leaf, BareParameter)]
    tap = bares[0].tap
    others = [leaf for leaf in leaves if _is_plain(leaf)]
    if name in _DETACHING:
        return bares[0].value.detach()
    if _are_functorch_transforms_active():
        raise UnsupportedUse(tap, f"{name} inside a transform of torch.func (vmap, grad, jvp, ...)")
    if any(bare.requires_grad and not bare.value.requires_grad for bare in bares):
        raise UnsupportedUse(tap, "a re-entrant checkpoint returned what is computed from it alone")
    if torch.is_grad_enabled() and not any(bare.requires_grad for bare in bares):
        values = [leaf.value if isinstance(leaf, BareParameter) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return func(*args, **kwargs)  # all were computed with gradients off
    if name == "backward":
        raise UnsupportedUse(
            tap,
            "backward() of something that no tensor with the batch as its first axis took part in",
        )
    if name.startswith("__set") or "out" in kwargs:
        raise UnsupportedUse(tap, f"{name} writes into a tensor")
    in_place = name.endswith("_") and not name.startswith("__")
    axis = _axis(name, leaves, bares[0])
    batched = [] if name in _METADATA_ONLY else _carry_samples(tap, others, axis)
    if any(batched):
        if in_place and (name not in _IN_PLACE or len(leaves) != 2 or not _is_plain(leaves[0])):
            raise UnsupportedUse(tap, f"{name} changes a tensor in place")
        _refuse_mixing(tap, name, args, kwargs)
        if any(isinstance(x, nn.Parameter) and x.requires_grad for x in others):
            raise UnsupportedUse(tap, f"{name} puts it together with another module's parameter")
        return _meet(func, leaves, spec, batched, axis)
    if in_place and not isinstance(leaves[0], BareParameter):
        # Only its result would be known to come from parameters, not the tensor itself.
        raise UnsupportedUse(tap, f"{name} writes it into a tensor in place")
    if name not in _METADATA_ONLY and torch.is_grad_enabled() and any(_need_grad(others)):
        raise UnsupportedUse(tap, f"{name} puts it together with another module's parameter")
    values = [leaf.value if isinstance(leaf, BareParameter) else leaf for leaf in leaves]
    plain_args, plain_kwargs = pytree.tree_unflatten(values, spec)
    result = func(*plain_args, **plain_kwargs)
    if name in _METADATA_ONLY and _is_plain(leaves[0]):
        return result  # only the parameter's shape, dtype or device went into it
    origin = {leaf: param for bare in bares for leaf, param in bare.leaves.items()}

    rows = _rows(func, name, leaves, spec, result)
    lookup = _lookup(func, name, leaves, spec, result) if isinstance(result, Tensor) else None

    def derived(value: Tensor, row: Tensor | None) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        if not value.requires_grad and torch.is_grad_enabled():
            return value
        return BareParameter.wrap(value, origin, tap, row, lookup)

    if rows is None:
        return pytree.tree_map_only(Tensor, lambda value: derived(value, None), result)
    return pytree.tree_map(
        lambda value, row: derived(value, row) if isinstance(value, Tensor) else value, result, rows
    )


def _rows(
    func: Callable[..., Any], name: str, leaves: list[Any], spec: Any, result: Any
) -> Any | None:
    """What one sample's row of ``result`` is, where its first axis may be the batch.

    An expansion over a leading axis of 1 makes rows that are all the same; what is computed from
    such rows alone is the same function of one row.
    """
    bares = [leaf for leaf in leaves if isinstance(leaf, BareParameter)]
    if name in _EXPANDING and isinstance(result, Tensor) and result.dim():
        bare = bares[0]
        if bare.dim() < result.dim() or bare.shape[0] == 1:
            return result[:1]
    if not any(bare.row is not None for bare in bares):
        return None
    if any(word in name for word in _RANDOM):
        return None
    sizes = {bare.shape[0] for bare in bares if bare.row is not None}
    ones = [
        (leaf.value if leaf.row is None else leaf.row) if isinstance(leaf, BareParameter) else leaf
        for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(ones, spec)
    try:
        rows = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):  # asks for the whole batch, x[3] or view(B, -1)
        return None
    values, found = pytree.tree_leaves(result), pytree.tree_leaves(rows)
    by_row = len(values) == len(found) and all(
        not isinstance(value, Tensor)
        or (value.dim() > 0 and value.shape[0] in sizes and row.shape == (1, *value.shape[1:]))
        for value, row in zip(values, found, strict=True)
    )
    return rows if by_row else None


def _refuse_mixing(tap: Place, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse functions of samples and parameters whose result for one sample needs the others."""
    trains = name == "batch_norm" and (kwargs.get("training") or any(x is True for x in args[5:6]))
    by_count = "embedding" in name and kwargs.get("scale_grad_by_freq")
    if trains or by_count or name == "masked_scatter":
        instead = "group_norm or layer_norm" if trains else "torch.where(mask, parameter, x)"
        if by_count:
            name, instead = f"{name}(scale_grad_by_freq=True)", "scale_grad_by_freq=False"
        raise FlashClippingError(
            f"{tap.path}: calls {name}, in which one sample's result depends on the others, so no "
            f"clipping can bound what a sample adds. Use {instead}, or freeze the parameter that "
            "takes part in it."
        )


def _need_grad(tensors: list[Tensor]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, BareParameter)


def _lookup(
    func: Callable[..., Any], name: str, leaves: list[Any], spec: Any, result: Tensor
) -> _Rows | None:
    """Which rows of a table ``result`` is, if it is made of such rows alone."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    if name == "embedding":
        return _looked_up(*args, **kwargs)
    bares = [leaf for leaf in leaves if isinstance(leaf, BareParameter)]
    if len(bares) != 1 or (before := bares[0].lookup) is None:
        return None
    value = bares[0].value
    if name == "to":
        return before if (result.dtype, result.shape) == (value.dtype, value.shape) else None
    if name not in _MOVES_ROWS:
        return None
    # The same for the number of the row in every place of it: no memory, if rows stay whole.
    numbers = before.ids.unsqueeze(-1).expand(value.shape)
    moved = [numbers if isinstance(leaf, BareParameter) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(moved, spec)
    ids = func(*args, **kwargs)
    if ids.shape != result.shape or ids.shape[-1:] != value.shape[-1:] or ids.stride(-1):
        return None
    return _Rows(ids[..., 0], before.table, before.padding_idx)


def _looked_up(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Rows | None:
    """The same for the arguments of ``torch.nn.functional.embedding``."""
    if scale_grad_by_freq or max_norm is not None or not isinstance(weight, BareParameter):
        return None
    if weight.value not in weight.leaves or isinstance(ids, BareParameter):
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Rows(ids, weight.value, padding_idx)


def _axis(name: str, leaves: list[Any], bare: BareParameter) -> int:
    """The axis that holds the samples of what meets a bare parameter.

    That is the first, but where rows of a table are added to a batch that has positions first.
    """
    if name not in _ADDITION or len(leaves) != 2 or bare.lookup is None:
        return 0
    plain = next((leaf for leaf in leaves if _is_plain(leaf)), None)
    if plain is None or plain.dim() < 3 or plain.shape[-1] != bare.shape[-1]:
        return 0
    return bare.tap.recorder.batch_axis


def _carry_samples(tap: Place, tensors: list[Tensor], axis: int) -> list[bool]:
    """For tensors that meet bare parameters in one operation: which belong to the batch."""
    # Beside one that surely does, a mask that was computed from it needs no proof.
    certain = any([_is_certain(tensor) for tensor in tensors])
    return [_carries_samples(tap, tensor, axis, beside=certain) for tensor in tensors]


def _is_certain(tensor: Tensor) -> bool:
    """Whether a tensor came out of a tapped layer that read samples."""
    return tensor.requires_grad and not (tensor.is_leaf and isinstance(tensor, nn.Parameter))


def _carries_samples(tap: Place, tensor: Tensor, axis: int, beside: bool) -> bool:
    """Whether a tensor that meets a bare parameter belongs to the batch: rehearsals have shown."""
    recorder = tap.recorder
    if tap.reads_constants or isinstance(tensor, nn.Parameter):
        return False
    sure = _is_certain(tensor)
    if tensor.dim() == 0 or (tap.folded and not sure):
        return sure  # rows of a folded module are not the batch's: see _Meeting.row_by_row
    return recorder.reads_samples(tap.path, tensor, axis, sure=sure, beside=beside and not sure)


@dataclass
class _Meeting:
    """One operation between bare parameters and tensors that carry samples."""

    func: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    bares: list[BareParameter]
    batched: list[bool]
    autocast: tuple[str, bool, torch.dtype]
    recomputed: bool
    #: Axis of what carries samples, and of the output, that holds them.
    axis: int = 0

    @property
    def tap(self) -> Place:
        return self.bares[0].tap

    def call(self, plain: list[Tensor], bare: list[Tensor]) -> Tensor:
        """The operation with these tensors in the place of its own."""
        plain_, bare_ = iter(plain), iter(bare)
        leaves = [
            next(bare_)
            if isinstance(leaf, BareParameter)
            else (next(plain_) if isinstance(leaf, Tensor) else leaf)
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        device_type, enabled, dtype = self.autocast
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            result: Tensor = self.func(*args, **kwargs)
        return result

    @property
    def params(self) -> list[nn.Parameter]:
        return list({param: None for bare in self.bares for param in bare.leaves.values()})

    def happen(self, plain: list[Tensor]) -> Tensor:
        """Run the operation; the parameters are inputs, so that its output requires grad."""
        params = self.params
        self.tap.recorder.count_use(params)
        output: Tensor = _Meet.apply(self, len(plain), *plain, *params)
        return output

    def by_row(self, bare: BareParameter, rank: int) -> bool:
        """Whether the first axis of this operand is the batch, each row the same."""
        return bare.row is not None and bare.dim() == rank and bare.shape[0] != 1

    def row_by_row(self, bare: BareParameter, plain: list[Tensor], G: Tensor) -> bool:
        """Whether every sample meets a row of its own of this operand.

        So it is where a parameter and a constant with a row per sample made it: an attention mask
        that was added to a table of biases before both are added to the scores.
        """
        if bare.row is not None or bare.dim() != G.dim() or bare.shape[0] != G.shape[0] != 1:
            return False
        first = [x[:1] if batched else x for x, batched in zip(plain, self.batched, strict=True)]
        try:
            output = self.call(first, [other.value.detach() for other in self.bares])
        except RuntimeError:
            return True  # one row and all of the operand do not fit
        return output.shape[0] != 1


def _meet(
    func: Callable[..., Any], leaves: list[Any], spec: Any, batched: list[bool], axis: int
) -> Tensor:
    bares = [leaf for leaf in leaves if isinstance(leaf, BareParameter)]
    tap = bares[0].tap
    plain = [leaf for leaf in leaves if _is_plain(leaf)]
    device_type = plain[0].device.type
    meeting = _Meeting(
        func=func,
        leaves=[torch.empty(0) if _is_plain(leaf) else leaf for leaf in leaves],
        spec=spec,
        bares=bares,
        batched=batched,
        autocast=(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        ),
        recomputed=in_backward(),
        axis=axis,
    )
    if tap.entered not in (None, _circumstances()) and not meeting.recomputed:
        tap.recorder.recomputed[tap.path] = functools.partial(recomputable, tap)
    return meeting.happen(plain)


def _circumstances() -> Any:
    """What a checkpoint changes while it runs its function: grad mode, or saved-tensor hooks."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, n_plain: int, *tensors: Tensor) -> Tensor:
        values = [bare.value.detach() for bare in meeting.bares]
        output = meeting.call(list(tensors[:n_plain]), values)
        if not isinstance(output, Tensor):
            raise UnsupportedUse(meeting.tap, f"{_name(meeting.func)} returns several tensors")
        batches = [x for x, batched in zip(tensors, meeting.batched, strict=False) if batched]
        if any(x.dim() == 0 for x in batches):
            raise FlashClippingError(
                f"{meeting.tap.path}: {_name(meeting.func)} puts a parameter together with one "
                "number that was computed from the whole batch, a mean or a sum over samples. It "
                "mixes samples, so no clipping can bound what one adds. Keep the batch as the "
                "first axis (x.mean(-1), not x.mean()), or detach that number."
            )
        if meeting.axis and output.shape != tensors[0].shape:
            raise UnsupportedUse(meeting.tap, f"{_name(meeting.func)} adds axes to the batch")
        sizes = {x.shape[0] for x in batches if x.dim() == output.dim()}
        sizes = sizes or {x.shape[0] for x in batches}
        if output.dim() == 0 or output.shape[0] not in sizes:
            raise UnsupportedUse(meeting.tap, f"{_name(meeting.func)} moves the batch axis")
        ctx.meeting = meeting
        if _name(meeting.func) in _IN_PLACE:
            ctx.mark_dirty(tensors[0])
            ctx.shape = tensors[0].shape
        else:
            ctx.save_for_backward(*tensors[:n_plain])
        return output

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        meeting: _Meeting = ctx.meeting
        if torch.is_grad_enabled():
            raise UnsupportedUse(
                meeting.tap,
                "backward(create_graph=True) asks for the derivative of its gradient",
            )
        plain = list(ctx.saved_tensors)
        if _name(meeting.func) in _IN_PLACE:  # an addition needs no more than the shape
            plain = [G.new_empty(()).expand(ctx.shape)]
        needs = ctx.needs_input_grad[2 : 2 + len(plain)]
        grads = _input_grads(meeting, plain, needs, G)
        recorder = meeting.tap.recorder
        by_param: dict[nn.Parameter, Factor] = {}
        rows = _rows_met(meeting, plain, G)
        if rows is not None:
            by_param.update([rows])
        else:
            for param, grads_B in _per_sample_grads(meeting, plain, G):
                factor = Dense(grads_B)
                by_param[param] = merge([by_param[param], factor]) if param in by_param else factor
        if recorder.enabled:
            meeting.tap.record([*by_param], [*by_param.values()], meeting.recomputed)
            return None, None, *grads, *[None] * len(meeting.params)
        # An ordinary backward: ordinary gradients.
        ordinary = [
            by_param[param].clipped_sum(None, recorder.backend).view_as(param).to(param.dtype)
            if param in by_param
            else None
            for param in meeting.params
        ]
        return None, None, *grads, *ordinary


def _input_grads(
    meeting: _Meeting, plain: list[Tensor], needs: tuple[bool, ...], G: Tensor
) -> list[Tensor | None]:
    """Gradients of the tensors that carry samples: the operation's own backward."""
    if not any(needs):
        return [None] * len(plain)
    if (
        _name(meeting.func) in _ADDITION
        and len(plain) == 1
        and len(meeting.leaves) == 2  # a third is alpha
        and plain[0].shape == G.shape
        and not G.is_complex()
    ):
        return [G.to(plain[0].dtype)]
    inputs = [tensor.detach().requires_grad_(n) for tensor, n in zip(plain, needs, strict=True)]
    with torch.enable_grad():
        output = meeting.call(inputs, [bare.value.detach() for bare in meeting.bares])
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, G))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _rows_met(
    meeting: _Meeting, plain: list[Tensor], G: Tensor
) -> tuple[nn.Parameter, Factor] | None:
    """The gradient of a table of which single rows took part, without a table per sample.

    They were added to something that has samples, or looked up by it.
    """
    bare, name = meeting.bares[0], _name(meeting.func)
    if len(meeting.bares) > 1 or len(plain) != 1:
        return None
    if name in _ADDITION and len(meeting.leaves) == 2 and (rows := bare.lookup) is not None:
        if bare.shape[-1:] != G.shape[-1:]:
            return None
        return bare.leaves[rows.table], rows.factor(rows.ids, G, meeting.axis)
    if name != "embedding":
        return None
    args, kwargs = pytree.tree_unflatten(meeting.leaves, meeting.spec)
    found = _looked_up(*args, **kwargs)
    if found is None or not meeting.batched[0]:
        return None
    return bare.leaves[found.table], found.factor(plain[0], G, 0)


def _per_sample_grads(
    meeting: _Meeting, plain: list[Tensor], G: Tensor
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """For every parameter that took part, its gradient per sample ``[B, *parameter]``."""
    own_row = [meeting.row_by_row(bare, plain, G) for bare in meeting.bares]
    by_row = [meeting.by_row(bare, G.dim()) for bare in meeting.bares]
    try:
        operand_grads = _operand_grads(meeting, plain, G, own_row)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        # An operation that vmap does not have, or that does not take one row of an operand alone.
        own_row = by_row = [False] * len(meeting.bares)
        operand_grads = _operand_grads_in_turn(meeting, plain, G)
    for bare, grads_B, has_own, rowwise in zip(
        meeting.bares, operand_grads, own_row, by_row, strict=True
    ):
        origin = bare.row if rowwise else bare.value
        assert origin is not None
        if not origin.requires_grad:
            continue  # computed with gradients off
        if has_own:
            yield from _through_rows(bare, grads_B)
            continue
        for leaf, param in bare.leaves.items():
            if origin is leaf:
                yield param, grads_B
                continue
            (found,) = torch.autograd.grad(
                origin,
                leaf,
                grads_B.to(origin.dtype),
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
            if found is not None:
                yield param, found


def _through_rows(bare: BareParameter, grads_B: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The same where sample ``b`` met row ``b`` of the operand: ``grads_B [B, 1, *row]``."""
    for leaf, param in bare.leaves.items():
        found = []
        for b in range(len(grads_B)):  # all at once would take B times the operand
            with torch.enable_grad():
                row = bare.value[b : b + 1]
            (grad,) = torch.autograd.grad(
                row, leaf, grads_B[b].to(row.dtype), retain_graph=True, allow_unused=True
            )
            found.append(torch.zeros_like(leaf) if grad is None else grad)
        yield param, torch.stack(found)


def _operand_grads(
    meeting: _Meeting, plain: list[Tensor], G: Tensor, own_row: list[bool]
) -> list[Tensor]:
    """Gradient of the operation per sample with respect to each bare operand: ``[B, *operand]``.

    Of an operand that has a row per sample, with respect to that row: ``[B, 1, *row]``.
    """
    name = _name(meeting.func)
    bares = meeting.bares
    real = not G.is_complex() and all(x.is_floating_point() for x in plain)
    if len(bares) == len(plain) == 1 and len(meeting.leaves) == 2 and real:
        by_row = meeting.by_row(bares[0], G.dim()) or own_row[0]
        shape = torch.Size([1, *bares[0].shape[1:]]) if by_row else bares[0].shape
        if name in _ADDITION:
            return [_reduce_to(G, shape)]
        if name in _MULTIPLICATION:
            return [_reduce_to(G * plain[0], shape)]

    def one_sample(G_1: Tensor, operands: list[Tensor], samples: list[Tensor]) -> Any:
        rows = [
            x.unsqueeze(0) if batched else x
            for x, batched in zip(samples, meeting.batched, strict=True)
        ]

        def run(*values: Tensor) -> Tensor:
            return meeting.call(rows, list(values))

        vjp: Any = torch.func.vjp(run, *operands)[1]
        return vjp(G_1.unsqueeze(0))

    rowwise = [
        meeting.by_row(bare, G.dim()) or own for bare, own in zip(bares, own_row, strict=True)
    ]
    operands = [
        bare.value.detach().unsqueeze(1) if row else bare.value.detach()
        for bare, row in zip(bares, rowwise, strict=True)
    ]
    in_dims: tuple[Any, ...] = (
        0,
        [0 if row else None for row in rowwise],
        [0 if batched else None for batched in meeting.batched],
    )
    return list(torch.func.vmap(one_sample, in_dims=in_dims)(G, operands, plain))


def _operand_grads_in_turn(meeting: _Meeting, plain: list[Tensor], G: Tensor) -> list[Tensor]:
    """The same, ``[B, *operand]``, for whatever the operation is: its own backward for each sample,
    with the output gradients of the others at 0."""
    operands = [bare.value.detach().requires_grad_() for bare in meeting.bares]
    try:
        with torch.enable_grad():
            output = meeting.call([x.detach() for x in plain], operands)
        found = []
        for b in range(G.shape[0]):
            G_b = torch.zeros_like(G)
            G_b[b] = G[b]
            found.append(torch.autograd.grad(output, operands, G_b, retain_graph=True))
        return (
            [torch.stack(grads) for grads in zip(*found, strict=True)]
            if found
            else [operand.new_zeros(0, *operand.shape) for operand in operands]
        )
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UnsupportedUse(
            meeting.tap, f"{_name(meeting.func)} failed in backward ({error})"
        ) from error


def _reduce_to(G: Tensor, shape: torch.Size) -> Tensor:
    """Add up ``G [B, ...]`` over the axes that ``shape`` was broadcast along, sample by sample."""
    aligned = [1] * (G.dim() - len(shape)) + list(shape)
    axes = [i for i in range(1, G.dim()) if aligned[i] == 1 and G.shape[i] != 1]
    if axes:
        G = G.sum(axes, keepdim=True, dtype=accumulation_dtype(G.dtype))
    return G.reshape(G.shape[0], *shape)


@contextlib.contextmanager
def bare_parameters(tap: Place, owners: list[nn.Module]) -> Iterator[None]:
    """Stand in for the trainable parameters of these modules while the body runs."""
    stood_in = tap.recorder.stood_in  # of all modules that are running, outermost first
    before = len(stood_in)
    outside, tap.entered = tap.entered, _circumstances()
    try:
        for module in owners:
            for name, param in module._parameters.items():
                if isinstance(param, BareParameter):
                    continue  # a recomputation: stood in for during the whole backward
                if param is not None and param.requires_grad:
                    stood_in.append((module, name, param))
                    module._parameters[name] = BareParameter.stand_in(param, tap)  # type: ignore[assignment]
        yield
    finally:
        tap.entered = outside
        while len(stood_in) > before:
            module, name, param = stood_in[-1]
            module._parameters[name] = param
            stood_in.pop()


@contextlib.contextmanager
def recomputable(tap: Place) -> Iterator[None]:
    """Stand in during backward, for what a checkpoint inside the module's forward recomputes.

    A failed backward lets go of this whenever it is collected: it puts back only what it put in.
    """
    mine: list[tuple[nn.Module, str, nn.Parameter, BareParameter]] = []
    try:
        for module in tap.owners:
            for name, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    bare = BareParameter.stand_in(param, tap)
                    mine.append((module, name, param, bare))
                    module._parameters[name] = bare  # type: ignore[assignment]
        yield
    finally:
        for module, name, param, bare in mine:
            if module._parameters.get(name) is bare:
                module._parameters[name] = param


def to_samples(x: BareParameter, batch_size: int, path: str) -> Tensor:
    """A bare parameter that was expanded over the batch and is handed to a layer."""
    if x.row is None or x.shape[0] != batch_size:
        raise FlashClippingError(
            f"{path}: its input has shape {tuple(x.shape)} and is computed from parameters alone, "
            f"or from parameters of {x.tap.path} and tensors whose first axis is not the batch "
            f"({batch_size}); the layer's own parameters then have no per-sample gradients. "
            "Expand what is the same for all samples over the batch, x.expand(batch_size, ...); "
            "keep the batch the first axis of what meets parameters."
        )
    row = BareParameter.wrap(x.row, x.leaves, x.tap)
    like = torch.zeros((), dtype=x.dtype, device=x.device).expand(batch_size, *[1] * (x.dim() - 1))
    leaves, spec = pytree.tree_flatten(((like, row), {}))
    with torch._C.DisableTorchFunctionSubclass():
        return _meet_rows(leaves, spec)


def _meet_rows(leaves: list[Any], spec: Any) -> Tensor:
    like, row = leaves
    meeting = _Meeting(
        func=torch.add,
        leaves=[torch.empty(0), row],
        spec=spec,
        bares=[row],
        batched=[True],
        autocast=(like.device.type, False, torch.get_autocast_dtype(like.device.type)),
        recomputed=in_backward(),
    )
    return meeting.happen([like])
