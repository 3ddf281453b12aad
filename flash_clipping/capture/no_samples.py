"""Batches without samples: Poisson sampling draws one about once in ``e^batch`` steps.

Many models cannot run on one (``reshape(batch, -1)`` of nothing is ambiguous), and many collate
functions cannot make one. What either would give for no samples follows from what it gives for two
and for three: every size that depends on the batch is extended down to 0.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, MutableMapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import pytree
from flash_clipping.capture.inputs import DEPTH, batched_inputs, map_tensors
from flash_clipping.capture.max_norm import NoRenormalisation
from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import FlashClippingError

#: What a model may raise on samples that are made up, or on none.
_DID_NOT_RUN = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


def size_of_none(of_two: int, of_three: int) -> int:
    """The size for no samples of what grows evenly with them."""
    return max(0, 3 * of_two - 2 * of_three)


def shape_of_none(of_two: Tensor, of_three: Tensor) -> list[int]:
    """The shape for no samples; of tensors with as many dimensions."""
    return [size_of_none(*sizes) for sizes in zip(of_two.shape, of_three.shape, strict=True)]


def of_no_samples(
    two: Any,
    three: Any,
    tensor: Callable[[Tensor, Tensor], Tensor],
    *,
    lenient: bool = False,
    depth: int = DEPTH,
) -> Any:
    """The same structure as ``two`` and ``three``, for no samples.

    Args:
        two: what two samples gave: tensors, numbers and strings in containers, mappings or objects.
        three: what three gave.
        tensor: the tensor for no samples, from those for two and three, which have as many
            dimensions.
        lenient: take what two samples gave where nothing else is known.
        depth: how many objects inside each other are opened.

    Raises:
        TypeError: unless ``lenient``, something that is neither the same in both nor known to hold
            samples.
    """

    def between(a: Any, b: Any, depth: int = depth) -> Any:
        return of_no_samples(a, b, tensor, lenient=lenient, depth=depth)

    if two is three:
        return two
    if type(two) is not type(three):
        pass
    elif isinstance(two, Tensor):
        if two.dim() == three.dim():
            return tensor(two, three)
    elif isinstance(two, bool | str | bytes):
        if two == three:
            return two
    elif isinstance(two, int):
        return 3 * two - 2 * three
    elif isinstance(two, float | complex):
        return two if two == three else math.nan  # a mean, say
    elif isinstance(two, list | tuple) and len(two) != len(three):
        return type(two)(two[: size_of_none(len(two), len(three))])
    elif _is_node(two):
        parts, spec = pytree.tree_flatten(two, is_leaf=lambda part: part is not two)
        other_parts, other_spec = pytree.tree_flatten(three, is_leaf=lambda part: part is not three)
        if spec == other_spec:
            found = [between(a, b) for a, b in zip(parts, other_parts, strict=True)]
            return pytree.tree_unflatten(found, spec)
    elif type(two).__module__ == "numpy" and hasattr(two, "shape"):
        sizes = zip(two.shape, three.shape, strict=True)
        return type(two)(tuple(size_of_none(*pair) for pair in sizes), dtype=two.dtype)
    elif depth and isinstance(two, MutableMapping):
        if two.keys() == three.keys():
            changed = copy.copy(two)
            for key in two:
                changed[key] = between(two[key], three[key], depth - 1)
            return changed
    elif depth and hasattr(two, "__dict__") and vars(two).keys() == vars(three).keys():
        content = {k: between(v, vars(three)[k], depth - 1) for k, v in vars(two).items()}
        changed = copy.copy(two)
        vars(changed).update(content)
        return changed
    else:
        with contextlib.suppress(Exception):  # devices, types, members of enumerations
            if two == three:
                return two
    if lenient:
        return two
    raise TypeError(
        f"what no samples are like does not follow from what two and three are like: found "
        f"{_described(two)} and {_described(three)}; expected tensors, numbers or strings in "
        "lists, tuples, dicts or objects."
    )


def _is_node(value: Any) -> bool:
    parts = pytree.tree_leaves(value, is_leaf=lambda part: part is not value)
    return len(parts) != 1 or parts[0] is not value


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def made_up(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: int, count: int, fill: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call without samples, with ``count`` samples that are all ``fill``.

    ``axis`` is that of samples; a tensor that is empty along another one grows there.
    """

    def make_up(x: Tensor) -> Tensor:
        if x.numel():
            return x
        empty = x.shape.index(0) if x.dim() <= axis or x.shape[axis] else axis
        return x.new_full((*x.shape[:empty], count, *x.shape[empty + 1 :]), fill)

    found: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(make_up, (args, kwargs))
    return found


class RootForward(Tap):
    """Stands in for the root module's ``forward``, around its tap if it has one."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, "", None, session)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, which trainers choose arguments by."""
        forward = self.instance_forward
        while isinstance(forward, Tap):
            forward = forward.instance_forward
        if forward is None:
            forward = MethodType(type(self.layer).forward, self.layer)
        return inspect.signature(forward)


class EmptyBatchForward(RootForward):
    """Stands in for the root module's ``forward``: a batch without samples does not reach it.

    The model is then run on two and on three made-up samples, to learn what it returns, without
    recording anything. What the caller gets has that structure and no samples. Its backward leaves
    empty norms and clipped sums of 0, so that the step adds noise only. Buffers, attributes of
    modules and random number generators are as they were. A scalar that requires grad, as the loss
    that a model takes itself, is 0.

    Args:
        root: the model.
        session: what its taps share.
        has_bags: some layer makes samples of what it reads (``nn.EmbeddingBag``), so that a batch
            may hold samples although its first input has no rows.

    Raises:
        FlashClippingError: in forward, of a model that runs neither on made-up samples nor on none.
    """

    def __init__(self, root: nn.Module, session: ClippingSession, has_bags: bool):
        super().__init__(root, session)
        self.has_bags = has_bags
        #: Whether a forward was looked at for functions that write into weights.
        self.watched = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if not self.watched and session.recording and not is_dynamo_compiling():
            with NoRenormalisation():
                output = self._forward(args, kwargs)
            self.watched = True
            return output
        return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self.session
        call = session.current_forward
        if call is None or not session.recording:
            return self.original(*args, **kwargs)
        positions = session.positions
        if positions is not None and not len(positions.map):  # [1, 0], say
            return self._without_samples(args, kwargs)
        if call.batch_sizes[:1] != (0,):
            return self.original(*args, **kwargs)
        if self.has_bags and any(call.batch_sizes):
            return self.original(*args, **kwargs)
        return self._without_samples(args, kwargs)

    def _without_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self.session
        anchor = torch.empty(0, requires_grad=True)
        params = session.trainable()

        def tensor(two: Tensor, three: Tensor) -> Tensor:
            shape = shape_of_none(two, three)
            if two.requires_grad:
                return _NoSamples.apply(session, params, two.detach(), shape, anchor, *params)
            return two if two.shape == three.shape else two.new_zeros(shape)

        failure: Exception | None = None
        for fill in (0, 1):  # lengths, for one, must not be 0
            try:
                two, three = (self._run_on(count, fill, args, kwargs) for count in (2, 3))
                return of_no_samples(two, three, tensor, lenient=True)
            except torch.OutOfMemoryError:
                raise
            except _DID_NOT_RUN as error:
                failure = failure or error
        try:
            return self.original(*args, **kwargs)
        except _DID_NOT_RUN:
            raise FlashClippingError(
                f"{self.path}: called with a batch without samples, which Poisson sampling draws "
                "now and then. To learn what it returns it was run on samples made of zeros and of "
                "ones, then on no samples, and ran on none of these. Expected a forward that runs "
                "on zeros of its inputs' shapes and types and returns tensors, numbers or strings "
                f"in containers. The first error was {type(failure).__name__}: {failure}"
            ) from failure

    def _run_on(self, count: int, fill: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for so many samples that are all zeros, or all ones."""
        session = self.session
        made_up_args, made_up_kwargs = made_up(args, kwargs, session.batch_axis, count, fill)
        tensors = [*batched_inputs(args, kwargs), *session.state()]
        devices = {x.device for x in tensors if x.is_cuda}
        with (
            untouched(self.layer),
            random_state(list(devices), seed=0),
            session.bypass(),
            torch.enable_grad(),  # to see which outputs require grad; the graph goes with them
        ):
            return self.original(*made_up_args, **made_up_kwargs)


class _NoSamples(torch.autograd.Function):
    """Zeros whose backward records no samples of any parameter.

    The parameters are inputs, so that autograd knows which of them a backward was asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        session: ClippingSession,
        params: list[nn.Parameter],
        like: Tensor,
        shape: list[int],
        *anchor_and_params: Tensor,
    ) -> Tensor:
        ctx.session, ctx.params = session, params
        ctx.set_materialize_grads(False)
        return like.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if ctx.session.enabled:
            # Its end leaves zeros wherever nothing was recorded.
            ctx.session.begin_backward().record_no_samples(ctx.params)
        return (None,) * len(ctx.needs_input_grad)


class CollateWithEmpty:
    """A loader's collate function that also makes a batch of no samples.

    Args:
        collate: the loader's own.
        dataset: where samples are looked at to learn what a batch is like.

    Raises:
        TypeError: in a call without samples, if batches hold something that is neither the same in
            all of them nor known to hold samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any):
        self.wrapped_collator_fn = collate
        self.dataset = dataset
        self._empty: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        if len(samples):
            return self.wrapped_collator_fn(samples)
        if self._empty is None:
            self._empty = (self._learned(),)
        return copy.deepcopy(self._empty[0])

    def _learned(self) -> Any:
        def tensor(two: Tensor, three: Tensor) -> Tensor:
            shape = shape_of_none(two, three)
            if two.shape != three.shape or torch.equal(two, three):
                return two.new_zeros(shape) if two.shape != three.shape else two
            return 3 * two - 2 * three  # a count of samples, say

        # Fetched anew: a collate function may take its samples apart.
        two, three = (
            self.wrapped_collator_fn([self.dataset[0] for _ in range(count)]) for count in (2, 3)
        )
        try:
            return of_no_samples(two, three, tensor)
        except TypeError as error:
            raise TypeError(
                f"The loader drew a batch without samples, and its collate function "
                f"({self.wrapped_collator_fn!r}) gives batches of which {error}"
            ) from None
