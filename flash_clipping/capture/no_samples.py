"""Batches without samples: Poisson sampling draws one about once in ``e^batch`` steps.

Many models cannot run on one (``reshape(batch, -1)`` of nothing is ambiguous), and many collate
functions cannot make one. What either would give for none follows from what it gives for two
samples and for three: every size that depends on the batch is extended down to 0.
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
from flash_clipping.capture.no_trace import random_state, untouched
from flash_clipping.capture.refused_forwards import NoRenormalisation
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import TO_EXPORT, FlashClippingError, InvalidType

#: What a model may raise on samples that are made up, or on none.
DID_NOT_RUN = (
    *(RuntimeError, ValueError, TypeError, AssertionError),
    *(LookupError, AttributeError, ArithmeticError),
)


def shape_of_none(of_two: Any, of_three: Any) -> list[int]:
    """The shape for no samples, from shapes of as many dimensions that grow evenly with them."""
    return [max(0, 3 * n - 2 * m) for n, m in zip(of_two, of_three, strict=True)]


def of_no_samples(
    two: Any,
    three: Any,
    tensor: Callable[[Tensor, Tensor], Tensor],
    *,
    lenient: bool = False,
    depth: int = DEPTH,
) -> Any:
    """What no samples give, from what ``two`` and ``three`` samples gave: tensors, numbers and
    strings in containers, mappings or objects.

    Args:
        tensor: the tensor for no samples, from those for two and three, which have as many
            dimensions.
        lenient: take what two samples gave where nothing else is known; otherwise that is a
            ``TypeError``.
        depth: how many objects inside each other are opened.
    """
    if two is three:
        return two
    if type(two) is type(three):
        if isinstance(two, Tensor):
            if two.dim() == three.dim():
                return tensor(two, three)
        elif isinstance(two, int) and not isinstance(two, bool):
            return 3 * two - 2 * three
        elif isinstance(two, float | complex):
            return two if two == three else math.nan  # a mean, say
        elif isinstance(two, list | tuple) and len(two) != len(three):
            return type(two)(two[: max(0, 3 * len(two) - 2 * len(three))])
        elif type(two).__module__ == "numpy" and hasattr(two, "shape"):
            return type(two)(tuple(shape_of_none(two.shape, three.shape)), dtype=two.dtype)
        elif (opened := _opened(two, depth)) and (other := _opened(three, depth)):
            names, parts, rebuilt, depth = opened
            if names == other[0]:
                pairs = zip(parts, other[1], strict=True)
                return rebuilt(
                    [of_no_samples(*pair, tensor, lenient=lenient, depth=depth) for pair in pairs]
                )
        else:
            with contextlib.suppress(Exception):  # strings, devices, members of enumerations
                if two == three:
                    return two
    if lenient:
        return two
    shapes = (f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else "" for x in (two, three))
    raise InvalidType(
        f"what no samples are like does not follow from what two and three are like: found "
        f"{type(two).__name__}{next(shapes)} and {type(three).__name__}{next(shapes)}; expected "
        "tensors, numbers or strings in lists, tuples, dicts or objects."
    )


def _opened(
    value: Any, depth: int
) -> tuple[Any, list[Any], Callable[[list[Any]], Any], int] | None:
    """Of a container or an object: its structure, its parts, how others are put in, and how many
    objects may be opened below; ``None`` if it has no parts, or is too deep."""
    root = id(value)  # and not the value: the recursion of pytrees is a reference cycle
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != root)
    if len(parts) != 1 or parts[0] is not value:
        return spec, parts, lambda found: pytree.tree_unflatten(found, spec), depth
    is_mapping = isinstance(value, MutableMapping)
    content = value if is_mapping else getattr(value, "__dict__", None)
    if content is None or not depth:
        return None

    def rebuilt(found: list[Any]) -> Any:
        changed = copy.copy(value)
        (changed if is_mapping else vars(changed)).update(zip(content, found, strict=True))
        return changed

    return [*content], [*content.values()], rebuilt, depth - 1


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

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the forward of a private model has no {name!r}, which exports of PyTorch read. "
            f"{TO_EXPORT}"
        )


class EmptyBatchForward(RootForward):
    """Stands in for the root module's ``forward``: a batch without samples does not reach it.

    The model is then run on two and on three made-up samples, without a trace, to learn what it
    returns. The caller gets that structure without samples, and 0 for a scalar that requires grad
    (a loss that the model takes itself). Its backward leaves empty norms and clipped sums of 0, so
    that the step adds noise only.
    """

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, session)
        # A bag makes samples of what it reads: there may be some where the first input has no rows.
        self.has_bags = any(isinstance(module, nn.EmbeddingBag) for module in root.modules())
        self.watched = False  # whether a forward was: functions that write into weights are refused

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.without_samples if self._is_empty() else self.original
        if self.watched or not self.session.recording or is_dynamo_compiling():
            return forward(*args, **kwargs)
        with NoRenormalisation():
            output = forward(*args, **kwargs)
        self.watched = True
        return output

    def _is_empty(self) -> bool:
        """Whether the running call is recorded, and has no samples."""
        session = self.session
        call = session.current_forward
        if call is None or not session.recording:
            return False
        if session.positions is not None and not len(session.positions.map):  # [1, 0], say
            return True
        return call.batch_sizes[:1] == (0,) and not (self.has_bags and any(call.batch_sizes))

    def without_samples(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        anchor = torch.empty(0, requires_grad=True)
        params = session.trainable()
        tensors = [*batched_inputs(args, kwargs), *session.state()]
        devices = [*{x.device for x in tensors if x.is_cuda}]

        def output_of(count: int, fill: int) -> Any:
            made_args, made_kwargs = made_up(args, kwargs, session.batch_axis, count, fill)
            with (
                untouched(self.layer),
                random_state(devices, seed=0),
                session.bypass(),
                torch.enable_grad(),  # to see which outputs require grad; the graph goes with them
            ):
                return self.original(*made_args, **made_kwargs)

        def tensor(two: Tensor, three: Tensor) -> Tensor:
            shape = shape_of_none(two.shape, three.shape)
            if two.requires_grad:
                return NoSamples.apply(session, params, two.detach(), shape, anchor, *params)
            return two if two.shape == three.shape else two.new_zeros(shape)

        failure: Exception | None = None
        for fill in (0, 1):  # lengths, for one, must not be 0
            try:
                return of_no_samples(output_of(2, fill), output_of(3, fill), tensor, lenient=True)
            except torch.OutOfMemoryError:
                raise
            except DID_NOT_RUN as error:
                failure = failure or error
        try:
            return self.original(*args, **kwargs)
        except DID_NOT_RUN:
            raise FlashClippingError(
                f"{self.path}: called with a batch without samples, which Poisson sampling draws "
                "now and then. To learn what it returns it was run on samples made of zeros and of "
                "ones, then on no samples, and ran on none of these. Expected a forward that runs "
                "on zeros of its inputs' shapes and types and returns tensors, numbers or strings "
                f"in containers. The first error was {type(failure).__name__}: {failure}"
            ) from failure


class NoSamples(torch.autograd.Function):
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
            ctx.session.begin_backward().without_samples = ctx.params
        return (None,) * len(ctx.needs_input_grad)


def step_without_samples(module: Any) -> None:
    """Leave what a backward of a batch without samples leaves, where the loader drew such a batch
    for this wrapped model and nothing ran on it."""
    session: ClippingSession = module._session
    draw, params = session.draws.without_samples(), session.trainable()
    if draw is None or not params or not session.enabled or module._sharded is not None:
        return
    call = session.begin_forward([])
    call.draw = draw
    anchor = torch.empty(0, requires_grad=True)
    zeros = NoSamples.apply(session, params, params[0].detach(), [0], anchor, *params)
    zeros.sum().backward()


class CollateWithEmpty:
    """A loader's collate function that also makes a batch of no samples, like those that samples of
    ``dataset`` give; a ``TypeError`` if that cannot be told."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any):
        self.wrapped_collator_fn = collate
        self.dataset = dataset
        self._empty: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        if len(samples):
            return self.wrapped_collator_fn(samples)
        if self._empty is None:
            # Fetched anew: a collate function may take its samples apart.
            two, three = (
                self.wrapped_collator_fn([self.dataset[0] for _ in range(count)])
                for count in (2, 3)
            )
            try:
                self._empty = (of_no_samples(two, three, self._tensor),)
            except TypeError as error:
                raise InvalidType(
                    f"The loader drew a batch without samples, and its collate function "
                    f"({self.wrapped_collator_fn!r}) gives batches of which {error}"
                ) from None
        return copy.deepcopy(self._empty[0])

    @staticmethod
    def _tensor(two: Tensor, three: Tensor) -> Tensor:
        if two.shape != three.shape:
            return two.new_zeros(shape_of_none(two.shape, three.shape))
        return two if torch.equal(two, three) else 3 * two - 2 * three  # a count of samples
