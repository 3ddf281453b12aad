"""The tensor that is the same for all samples, and what it does with functions of it.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    plain_functions,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.compiled.unbatched.learning import learning
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.capture.proxies.operation import name_of
from flash_clipping.errors import FlashClippingError

#: Functions that are served, by name: each returns whether it serves the call, and the result. They
#: are in ``functions.py``, which builds on what is here; the folder's ``__init__.py`` puts them in.
SERVED: dict[str, Callable[..., tuple[bool, Any]]] = {}


class Unbatched(torch.Tensor):
    """``[B, *shape]`` in memory; the model sees ``shape``."""

    #: Told apart by this from what stands in for parameters outside of regions.
    inside_regions = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with plain_functions():
            return _run(func, args, kwargs or {})


class SameRows(Unbatched):
    """What was expanded over the batch: the model sees ``[B, *row]``, which is what it is."""


def same_for_all(x_B: Tensor, path: str) -> Tensor:
    """``[B, *shape]``, of which the model sees ``shape``. It comes from the module at ``path``."""
    return of_kind(Unbatched, x_B, path)


def of_kind(kind: type[Unbatched], x_B: Tensor, path: str) -> Tensor:
    found = x_B.as_subclass(kind)
    if not is_dynamo_compiling():  # Dynamo has no place for it
        found.path = path  # type: ignore[attr-defined]
    return found


def path_of(z: Tensor) -> str:
    return "" if is_dynamo_compiling() else getattr(z, "path", "")


def memory_of(z: Tensor) -> Tensor:
    """The plain tensor, ``[B, ...]``."""
    # as_subclass(Tensor) is nothing that Dynamo takes.
    with plain_functions():
        return torch.select(z.unsqueeze(0), 0, 0)


def rows_of(z: Tensor) -> Tensor:
    """``[B, *shape]``, also of what was expanded over the batch."""
    d = memory_of(z)
    if isinstance(z, SameRows):
        with plain_functions():
            d = d.unsqueeze(1).expand(d.shape[0], d.shape[0], *d.shape[1:])
    return d


def seen_shape(z: Tensor) -> Any:
    d = memory_of(z)
    return d.shape if isinstance(z, SameRows) else d.shape[1:]


def plain(x: Any) -> Any:
    """What the model would have had without this."""
    if isinstance(x, SameRows):
        return memory_of(x)
    if isinstance(x, Unbatched):
        return torch.select(memory_of(x), 0, 0)
    if type(x) in (tuple, list):
        return type(x)([plain(part) for part in x])
    return x


# -- what is asked of it ---------------------------------------------------------------------------

_ATTRIBUTES = {
    f"__get__{name}": name
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
}


def _attribute(name: str, z: Tensor) -> Any:
    if name == "shape":
        return seen_shape(z)
    if name == "ndim":
        return len(seen_shape(z))
    return getattr(memory_of(z), name)


# -- functions of it -------------------------------------------------------------------------------


@constant_in_traces
def _apart() -> bool:
    """Whether what is traced now keeps the samples where they are: no transform of torch.func, and
    no body of an operator that is run several times."""
    return not transforms_are_active() and (tracing_context() is None or is_traced_once())


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = name_of(func)
    if name in _ATTRIBUTES:
        return _attribute(_ATTRIBUTES[name], args[0])
    if not is_dynamo_compiling():
        note_use(args, kwargs)
    serve = SERVED.get(name)
    if serve is not None and _is_known_call(args, kwargs) and _apart():
        served, result = serve(func, args, kwargs)
        if served:
            return result
    return _refuse(func, name, args, kwargs)


def _is_known_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors are where the functions that are served look for them, and none of
    them is computed from parameters outside of the region."""
    if len(args) == 0 or any([isinstance(x, Tensor | tuple | list) for x in kwargs.values()]):
        return False
    # Inside of a trace there is none: layers that run by themselves break the graph.
    return is_dynamo_compiling() or not any(isinstance(x, ParameterProxy) for x in _leaves(args))


def note_use(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Something is computed with these."""
    for x in [*_leaves(args), *_leaves(kwargs.values())]:
        if isinstance(x, Unbatched) and learning.found is not None:
            learning.used.add(path_of(x))


def note_escaped(output: Any) -> None:
    """What a region returns leaves it: outside, a row for each sample is nothing that is known."""
    for x in tensors_in(output):
        if isinstance(x, Unbatched):
            if learning.found is None:
                _raise(path_of(x), "return")
            learning.found.append(f"the region returns what {path_of(x)} computes")


def without_same(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that takes samples only, as they would have been."""
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    if any(isinstance(x, Unbatched) for x in leaves) and learning.found is not None:
        learning.found.append(f"{path} is called with what is computed from constants alone")
    return plain(args), {key: plain(value) for key, value in kwargs.items()}


def _refuse(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    path = next((path_of(x) for x in leaves if isinstance(x, Unbatched)), "")
    if is_dynamo_compiling() or learning.found is None:
        _raise(path, name)
    learning.found.append(
        f"{name} is called with what {path or 'a layer'} computes from constants or parameters"
    )
    named = {key: plain(value) for key, value in kwargs.items()}
    return func(*plain(args), **named)


def _raise(path: str, name: str) -> NoReturn:
    raise FlashClippingError(
        f"{path or 'a compiled layer'}: it computes what is the same for all samples (from ids of "
        f"positions, or from parameters alone), and {name} is called with it, which flash clipping "
        "does not serve in a compiled graph. Leave fullgraph out and call the layer outside of "
        "what is compiled, expand what it reads over the batch, x.expand(batch_size, ...), or "
        "freeze its parameters."
    )


def _leaves(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += value
        else:
            found.append(value)
    return found
