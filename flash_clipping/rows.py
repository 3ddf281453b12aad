"""Are the rows of a layer's input the samples? Another batch size tells.

A layer reads ``[T, d]`` positions, the same for all samples, and ``T`` happens to be the size of
the batch: every shape is right, and every norm is wrong. An input that was computed by tapped
layers, or is the model's own, is above suspicion. For any other the model is run once more, at the
first such step, without autograd and on one sample fewer: rows that are samples follow.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from flash_clipping.tape import FlashClippingError, Forward, Recorder


def prove_rows(
    root: nn.Module,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Forward,
) -> None:
    """Check that the rows noted in ``call`` follow the batch; once per model.

    Leaves random number generators as they were. A model that does not run on another batch size
    is taken at its word; ``flash-clipping check`` compares its norms with an oracle.

    Raises:
        FlashClippingError: some layer's rows stay as many when the batch is smaller.
    """
    batch_size = call.batch_size
    if batch_size is None or batch_size < 2:
        return
    read = Counter(path for path, rows in call.rows if rows == batch_size)
    if not any(read[path] for path in call.unproven):
        return
    axis = 0 if recorder.batch_first else 1

    shortened: list[Tensor] = []

    def shorten(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == batch_size:
            shortened.append(leaf)
            return leaf.detach().narrow(axis, 0, batch_size - 1)
        return leaf

    shorter_args, shorter_kwargs = pytree.tree_map(
        shorten, (args, kwargs), is_leaf=lambda x: isinstance(x, PackedSequence)
    )
    if not shortened:  # a packed sequence, say: its layout is not ours to change
        return
    leaves = pytree.tree_leaves((shorter_args, shorter_kwargs))
    probe = recorder.begin_forward([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            # Recording, so that taps note what they read; detached, so that nothing comes of it.
            type(root).forward(root, *shorter_args, **shorter_kwargs)
    except (FlashClippingError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return  # another batch size is more than the model was asked for
    finally:
        probe.spent = True
        recorder.resume_forward(call)
    followed = Counter(path for path, rows in probe.rows if rows == batch_size - 1)
    for path in call.unproven:
        if followed[path] < read[path]:
            raise FlashClippingError(
                f"{path}: what it reads has {batch_size} rows for a batch of {batch_size}, and not "
                f"{batch_size - 1} for a batch of {batch_size - 1}: the rows are not samples, and "
                "its parameters have no per-sample gradients. Expand the input over the batch, "
                "x.expand(batch_size, ...), or freeze the parameters."
            )
    recorder.rows_are_proven = True
