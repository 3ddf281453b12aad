"""Are the rows of what a layer reads the samples? Another batch size tells.

A layer reads ``[T, d]`` positions, the same for all samples, or the batch as ``[T, B, d]``, and
``T`` happens to be the size of the batch: every shape is right, and every norm is wrong. What is
the model's own input, or was computed by tapped layers and has no second axis that could be the
batch, is above suspicion. For anything else the model is run once more, at the first such step,
without keeping activations and on one sample fewer: rows that are samples follow.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from flash_clipping.errors import FlashClippingError
from flash_clipping.inputs import batched_inputs, map_tensors
from flash_clipping.recorder import Forward, Recorder

#: Shapes of inputs that are tried for the same layers where a run on fewer samples tells nothing.
ATTEMPTS = 3


def prove_rows(
    root: nn.Module,
    forward: Callable[..., Any],
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Forward,
) -> None:
    """Check that the rows noted in ``call`` follow the batch; once per layer.

    ``forward`` runs ``root``. Leaves buffers, attributes of modules and random number generators
    as they were. A model that does not run on another batch size is taken at its word, after it was
    tried on inputs of a few shapes; ``flash-clipping check`` compares its norms with an oracle.

    Raises:
        FlashClippingError: some layer's rows stay as many when the batch is smaller.
    """
    batch_size = call.batch_size
    assert batch_size is not None  # else nothing was noted
    parts: dict[str, set[int]] = {}  # rows per sample: 1, unless they are declared to be parts
    read: Counter[str] = Counter()
    others: set[str] = set()
    for path, rows in call.rows:
        if rows == batch_size or (path in recorder.folded and rows % batch_size == 0):
            read[path] += 1
            parts.setdefault(path, set()).add(rows // batch_size)
        else:
            others.add(path)
    # Only one axis can be the batch: so it is, whatever sizes a later batch has.
    recorder.proven |= read.keys() - others - call.unproven
    if not any(read[path] for path in call.unproven):
        return
    axis = recorder.batch_axis

    shortened: list[Tensor] = []

    def shorten(x: Tensor) -> Tensor:
        if x.dim() > axis and x.shape[axis] == batch_size:
            shortened.append(x)
            return x.detach().narrow(axis, 0, batch_size - 1)
        return x

    shorter_args, shorter_kwargs = map_tensors(shorten, (args, kwargs))
    if not shortened:  # a packed sequence, say: its layout is not ours to change
        return
    tensors = batched_inputs(shorter_args, shorter_kwargs)
    shapes = tuple(tensor.shape for tensor in tensors)
    tried = recorder.undecided.setdefault(frozenset(call.unproven), set())
    if shapes in tried or len(tried) >= ATTEMPTS:
        return
    own = frozenset(recorder.model_storages())
    probe = recorder.begin_forward(tensors)
    probe.whole_batch, probe.put_aside = batch_size, own
    devices = {x.device for x in (*tensors, *recorder.state()) if x.is_cuda}
    try:
        with (
            _untouched(root),
            _random_state(list(devices)),
            _without_activations(),
            _without_checkpoints(),
        ):
            # Recording, so that taps note what they read; detached, so that nothing comes of it.
            forward(*shorter_args, **shorter_kwargs)
    except FlashClippingError as error:
        raise FlashClippingError(
            f"{error} (Found when the model was run on the batch without its last sample.)"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        tried.add(shapes)
        return  # another batch size is more than the model was asked for
    finally:
        probe.spent = True
        recorder.resume_forward(call)
    followed: Counter[str] = Counter()
    stayed: dict[str, int] = {}
    for path, rows in probe.rows:
        found = parts.get(path, ())
        if any(rows == part * (batch_size - 1) for part in found):
            followed[path] += 1
        elif any(rows == part * batch_size for part in found):
            stayed[path] = rows
    for path in sorted(call.unproven):
        if not read[path]:
            continue
        if path in stayed:
            raise FlashClippingError(
                f"{path}: what it reads has {stayed[path]} rows for a batch of {batch_size}, and "
                f"still for a batch of {batch_size - 1}: the rows are not samples, and its "
                "parameters have no per-sample gradients. Keep the batch the "
                f"{'first' if axis == 0 else 'second'} axis of what the layer reads; expand what "
                "has no batch axis, x.expand(batch_size, ...); or freeze the parameters."
            )
        if followed[path] >= read[path] and path not in others:
            recorder.proven.add(path)
    if not call.unproven <= recorder.proven:  # a layer that was skipped at random, say
        tried.add(shapes)


@contextlib.contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Put back buffers and attributes of all modules; writing in place hits copies of buffers."""
    modules = list(root.modules())
    before = [(vars(module).copy(), module._buffers.copy()) for module in modules]
    copies: dict[int, Tensor] = {}
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copies[id(buffer)] = copies.get(id(buffer), buffer.detach().clone())
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


@contextlib.contextmanager
def _random_state(devices: list[torch.device]) -> Iterator[None]:
    """Put back the generators of PyTorch, Python and, where it is in use, NumPy."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _without_activations() -> Any:
    """Autograd that saves nothing: the first step needs no more memory than the others."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _nothing_saved)


def _nothing_saved(_: None) -> Tensor:
    raise RuntimeError("this forward has no backward")


@contextlib.contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Re-entrant checkpoints hide from taps what was computed by tapped layers: see through."""
    before = checkpoint.CheckpointFunction
    setattr(checkpoint, "CheckpointFunction", _Through)  # noqa: B010 (mypy sees a type)
    try:
        yield
    finally:
        setattr(checkpoint, "CheckpointFunction", before)  # noqa: B010


class _Through:
    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)
