"""Runs of a model that can be repeated: chance is the same for all samples, and nothing is left.

Random floats are one number, dropout keeps the same features of every row, permutations move every
sample, and generators of Python and NumPy start each draw again, and no sample gets what is left
by those before it: runs of batches of different sizes are compared, and of models whose values
decide how much is drawn.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import (
    DispatchMode,
    arguments_of,
    checkpoints_replaced,
    is_autocasting,
    pytree,
    saved_tensors_hooks_now,
)
from flash_clipping.capture.draws import scrambled
from flash_clipping.capture.no_trace import Holdings, PlainCheckpoint, random_state
from flash_clipping.ops.runtime.backend import without_tf32

#: Entries of a parameter that tell how far they are spread.
ENTRIES = 4096

#: Draws of Python's and NumPy's generators that begin again.
DRAWS_ALIKE = 10_000


def without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the probability of dropout, where the operator has one, at 0."""
    place = _place_of_dropout(func)
    if place is None:
        return args, kwargs
    if "dropout_p" in kwargs:
        return args, {**kwargs, "dropout_p": 0.0}
    if place < len(args):
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, kwargs


@functools.lru_cache(maxsize=1024)
def _place_of_dropout(func: Any) -> int | None:
    names = [*arguments_of(func)]
    return names.index("dropout_p") if "dropout_p" in names else None


class Repeatable(DispatchMode):  # type: ignore[misc]  # a private class
    """Takes chance out of random operators.

    ``randperm`` moves every sample: a permutation that leaves a sample in its place shows nothing.

    Args:
        orders: the order of a vector of random floats moves every entry: a permutation may be made
            of it.
        varies: each draw is another one, by the generator of PyTorch: what runs again in backward
            must draw the same there. Otherwise nothing is dropped, and floats are 0.5.
        until: ends this mode.
    """

    def __init__(self, orders: bool, varies: bool, until: ExitStack) -> None:
        super().__init__()
        self._orders, self._varies, self._until = orders, varies, until
        #: Whether backward may draw: in what it recomputes, or as attention drops there.
        self._draws_again = False
        #: How many operators have drawn.
        self.drawn = 0
        #: Dtypes that floats were cast to: by autocast in the model's own code, say.
        self.casts: set[torch.dtype] = set()

    def end_forward(self) -> None:
        """Operators of backward are watched only where it might draw."""
        if not self._draws_again:
            self._until.close()

    def _note_draw(self) -> None:
        """Checkpoints draw in a forward that saves nothing, or what hooks say."""
        if not torch.is_grad_enabled() or saved_tensors_hooks_now():
            self._draws_again = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs:
            kwargs = {}
        elif (dtype := kwargs.get("dtype")) is not None:
            self.casts.add(dtype)
        if torch.Tag.nondeterministic_seeded not in func.tags and _place_of_dropout(func) is None:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
            self._note_draw()
        if name == "randperm":
            self._note_draw()
            like = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
            return torch.arange(args[0], **{"dtype": torch.int64, **like}).roll(1)
        plain_args, plain_kwargs = without_dropout(func, args, kwargs)
        if _place_of_dropout(func) is not None and (plain_args, plain_kwargs) == (args, kwargs):
            return func(*args, **kwargs)  # its probability is 0 already, or left out
        # Attention's own backward was told the probability, and finds no seed where none was drawn.
        self._draws_again |= _place_of_dropout(func) is not None
        self._note_draw()
        return self._alike(func, name, plain_args, plain_kwargs)

    def _alike(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a random operator, the same for all samples."""
        self.drawn += 1
        number = int(torch.randint(1 << 16, ())) if self._varies else 1 << 15
        if name == "native_dropout":
            kept = self._features(args[0].bool(), number)
            return args[0] * kept, kept
        if name == "bernoulli_" and not (len(args) > 1 and isinstance(args[1], Tensor)):
            return self._features(args[0], number)
        if name == "bernoulli" and len(args) > 1 and not isinstance(args[1], Tensor):
            return self._features(args[0].clone(), number)  # dropout under vmap
        # As many numbers are taken from the generator for batches of all sizes.
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        torch.set_rng_state(state)
        if torch.Tag.nondeterministic_seeded not in func.tags or name.startswith("_scaled_dot"):
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                leaf.fill_(number / (1 << 16))
                if self._orders and leaf.dim() == 1 and len(leaf) > 1:
                    leaf.copy_((torch.arange(len(leaf)) / len(leaf)).roll(1))
        if name in ("randint", "random_") and isinstance(result, Tensor):
            given = dict(zip(arguments_of(func), args, strict=False))
            result.fill_(given.get("low", given.get("from", 0)))
        return result

    def _features(self, x: Tensor, number: int) -> Tensor:
        """``x`` with 1 for features that are kept, the same of every row, and 0 for others."""
        x.fill_(1)
        if self._varies and x.dim() > 1 and x.shape[-1] > 1:
            numbers = torch.arange(1, x.shape[-1] + 1, device=x.device)
            x.copy_((scrambled(numbers + number) & 3 != 0).expand_as(x))
        return x


@contextmanager
def _draws_outside(seed: int) -> Iterator[None]:
    """Functions of ``random`` and ``numpy.random`` begin again in each draw.

    Masks of frames (SpecAugment) are drawn by the length of each sample, so that others' lengths
    decide where in the stream a sample's draws begin. After :data:`DRAWS_ALIKE` draws generators go
    on as usual: a loop may wait for a number.
    """
    numpy = sys.modules.get("numpy")
    generators = random.Random if numpy is None else (random.Random, numpy.random.RandomState)
    left = [DRAWS_ALIKE]

    def draw(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            function.__self__.seed(seed)  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    functions = [
        (module, name, function)
        for module in ([random] if numpy is None else [random, numpy.random])
        for name, function in vars(module).items()
        if isinstance(getattr(function, "__self__", None), generators)
        and not any(word in name for word in ("seed", "state"))
    ]
    try:
        for module, name, function in functions:
            setattr(module, name, functools.partial(draw, function))
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


@contextmanager
def repeatable(
    held: Holdings,
    devices: Sequence[torch.device],
    seed: int,
    watched: bool = True,
    orders: bool = False,
    varies: bool = False,
) -> Iterator[Repeatable]:
    """Runs of a model in here draw what ``seed`` says, and leave no trace; ``orders`` and
    ``varies`` as of :class:`Repeatable`, which is left out of what is not ``watched``: batches of
    one size mostly draw alike from one seed.

    What the model has ``held`` and all generators are put back. Products of fp32 are in fp32: by
    TF32, which PyTorch allows in convolutions, runs of two batches would differ by more than a sum
    over a batch does.
    """
    new_seed = torch.seed
    plans = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        # cuDNN plans attention for each new shape, up to a second long.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # A seed from the system would be another one in every run (Reformer).
        torch.seed = torch.initial_seed
        with (
            held.kept(),
            without_tf32(),
            random_state(list(devices), seed),
            checkpoints_replaced(PlainCheckpoint),
            _draws_outside(seed) if watched else nullcontext(),
            ExitStack() as until,
        ):
            draws = Repeatable(orders, varies, until)
            if watched:
                until.enter_context(draws)
            yield draws
    finally:
        torch.seed = new_seed
        torch.backends.cuda.enable_cudnn_sdp(plans)


def moved(data: Tensor, generator: torch.Generator) -> Tensor:
    """Moved by a tenth of its spread, by 0.05 where it is constant: a gate that is 0, or
    ``lora_B``, would hide what is behind it.

    By a product of two random vectors: one read of a large matrix, no numbers as many as it has
    entries.
    """
    columns = data.shape[-1] if data.dim() > 1 else data.numel()
    rows = data.reshape(-1, columns)
    down, along = (torch.randn(n, generator=generator).to(data.device) for n in rows.shape)
    some = data.flatten()[:: -(-data.numel() // ENTRIES)]
    spread = some.float().std(correction=0)
    along = along * torch.where(spread > 1e-4, 0.1 * spread, 0.05)
    return torch.addr(rows, down.to(data.dtype), along.to(data.dtype)).view(data.shape)


def scaled(data: Tensor, generator: torch.Generator, by: float = 0.1) -> Tensor:
    """Each column larger or smaller by this part, or by one unit of rounding if that is more: how
    far results are then off tells what rounding is in them."""
    columns = data.shape[-1] if data.dim() else 1
    signs = torch.randint(0, 2, (columns,), generator=generator).mul_(2).sub_(1).to(data)
    return torch.addcmul(data, data, signs, value=max(by, torch.finfo(data.dtype).eps))


@contextmanager
def perturbed(
    params: Sequence[nn.Parameter],
    how: Callable[[Tensor, torch.Generator], Tensor] = moved,
    seed: int = 7,
) -> Iterator[None]:
    """Parameters perturbed. The tensors themselves are not written to: parameters hold others in
    here, and their own again afterwards, bit for bit."""
    before = [param.data for param in params]
    casts = torch.clear_autocast_cache if is_autocasting() else lambda: None
    generator = torch.Generator().manual_seed(seed)
    casts()
    try:
        for param, data in zip(params, before, strict=True):
            if data.is_floating_point() and data.numel():
                # Autocast would give some products its own dtype, and the parameter with it.
                with torch.no_grad(), torch.autocast(data.device.type, enabled=False):
                    param.data = how(data, generator)
        yield
    finally:
        for param, data in zip(params, before, strict=True):
            param.data = data
        casts()  # of the moved ones


@contextmanager
def computed_in(root: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A model all of whose parameters and buffers that are floats have this dtype, without
    autocast. As in :func:`perturbed`, tensors of the user's are not written to."""
    params = [(p, p.data, p.grad) for p in root.parameters() if p.is_floating_point()]
    buffers = [
        (module._buffers, name, buffer)
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    enable: Any = torch.set_autocast_enabled
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    try:
        for kind in kinds:
            enable(kind, False)
        # Nor in a forward that switches it on.
        torch.set_autocast_enabled = lambda *args: enable(*args[:-1], False)
        for param, data, _ in params:
            param.grad = None  # which has the dtype of its parameter
            param.data = data.to(dtype)
        for held, name, buffer in buffers:
            held[name] = buffer.to(dtype)
        yield
    finally:
        torch.set_autocast_enabled = enable
        for kind in kinds:
            enable(kind, True)
        for param, data, grad in params:
            param.data = data
            param.grad = grad
        for held, name, buffer in buffers:
            held[name] = buffer
