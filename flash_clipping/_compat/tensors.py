"""Tensors: their memory, their subclasses, the operators that see them, containers of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_clipping._compat.lookup import attribute, find, load, needed, refuse


def memory_id(storage: torch.UntypedStorage) -> int:
    """What tells one storage from another. Without: an error."""
    number: int = attribute(storage, "_cdata")
    return number


#: References to a storage, which is given by its ``memory_id``. Without: an error.
references_to: Callable[[int], int] = needed("_C._storage_Use_Count")

#: Whether two tensors share a storage. Without: an error.
is_alias_of: Callable[[Tensor, Tensor], bool] = needed("_C._is_alias_of")

#: Context: torch functions see subclasses as plain tensors. Without: an error.
plain_functions: Callable[[], Any] = needed("_C.DisableTorchFunctionSubclass")


#: A tensor of a subclass, of the same memory. Without: an error.
make_subclass: Callable[[Any, Tensor, bool], Any] = needed("Tensor._make_subclass")


class _NoPytree:
    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"torch.utils._pytree.{name}")


#: Tensors in nested arguments: a module. Without: an error.
pytree: Any = load("torch.utils._pytree") or _NoPytree()


class _NoDispatchMode:
    def __init__(self, *_: Any) -> None:
        refuse("torch.utils._python_dispatch.TorchDispatchMode")


#: Base class of what sees every operator that runs. Without: an error.
DispatchMode: Any = (
    find(load("torch.utils._python_dispatch"), "TorchDispatchMode") or _NoDispatchMode
)


def arguments_of(operator: Any) -> Sequence[str]:
    """Names of an operator's arguments. Without: none; what is found by them stays as it is."""
    schema = getattr(operator, "_schema", None)
    return () if schema is None else [argument.name for argument in schema.arguments]


#: Without: an error.
_assert_async: Callable[[Tensor, str], Any] = needed("_assert_async")

#: Bytes of a message. A kernel of CUDA takes no more.
MOST_OF_A_MESSAGE = 254


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device, later, if this is not so: with the beginning of the message, as many
    whole words as a kernel takes."""
    text = message.encode()
    if len(text) > MOST_OF_A_MESSAGE:
        text = text[: MOST_OF_A_MESSAGE - 3].rpartition(b" ")[0] + b"..."
    _assert_async(condition, text.decode())


#: What loaders do with a batch. Without: an error.
pin_memory: Callable[..., Any] = needed("utils.data._utils.pin_memory.pin_memory")


_grouped_mm = find(torch, "nn.functional.grouped_mm") or find(torch, "_grouped_mm")


_GROUPS = 1024
"""From so many runs on, PyTorch's grouped products refuse."""


def grouped_mm(X: Tensor, Y: Tensor, runs: int) -> Callable[..., Tensor] | None:
    """PyTorch's products of runs of rows with a matrix each, or of runs of columns with runs of
    rows, for these operands. Without, and for operands it does not take: ``None``, and a kernel of
    ours runs."""
    if _grouped_mm is None or runs >= _GROUPS:
        return None
    if X.dtype != torch.bfloat16 or Y.dtype != torch.bfloat16:
        return None
    if not X.is_cuda or torch.version.hip is not None:
        return None
    major = torch.cuda.get_device_capability(X.device)[0]
    # Blackwell leaves what it found in the product of a run without rows (pytorch#172439), and a
    # unit's gradient would be another's.
    if major < 9 or (major > 9 and X.dim() == Y.dim() == 2):
        return None
    return _grouped_mm if _is_on_16_bytes(X) and _is_on_16_bytes(Y) else None


def _is_on_16_bytes(x: Tensor) -> bool:
    """Whether features, or rows, lie next to each other, and begin on 16 bytes."""
    *outer, rows, columns = x.stride()
    apart = rows if columns == 1 else columns if rows == 1 else 1
    each = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n > 0 and n % each == 0 for n in (*outer, apart))
