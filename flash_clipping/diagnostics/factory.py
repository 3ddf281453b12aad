"""``MODULE:FACTORY``, as commands are given it: a model, a batch and a loss of the user's."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

import torch
from torch import nn

from flash_clipping.capture.inputs import map_tensors
from flash_clipping.diagnostics.oracle import BadBatchError, Loss, cast


def load_factory(
    name: str, device: str | None = None, dtype: str | None = None
) -> tuple[nn.Module, Any, Loss | None]:
    """Import ``module:factory``, call it, and look at what it returns.

    Args:
        name: of the factory.
        device, dtype: what model and batch are moved and cast to, if they are.

    Raises:
        BadBatchError: anything about it that is not as documented.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise BadBatchError(
            f"FC920 expected MODULE:FACTORY, found {name!r}; e.g. my_project.train:factory for the "
            "function factory in my_project/train.py."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise BadBatchError(f"FC920 cannot import {module_name!r}: {_where(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found))
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise BadBatchError(f"FC920 found no {attribute!r} in {module_name!r}.{hint}")
        found = getattr(found, part)
    try:
        made = found()
    except Exception as error:
        raise BadBatchError(f"FC920 {name}() failed: {_where(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise BadBatchError(
            f"FC920 {name}() returned a {type(made).__name__}{size}; expected the tuple (model, "
            "batch) or (model, batch, loss)."
        )
    model, batch, loss = (*made, None)[:3]
    if not isinstance(model, nn.Module) or hasattr(model, "autograd_grad_sample_hooks"):
        raise BadBatchError(
            f"FC920 {name}() returned a {type(model).__name__} as model; expected an nn.Module "
            "first, as it is before make_private, then the batch."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise BadBatchError(f"FC305 {name}() returned a model without a trainable parameter.")
    if loss is not None and not callable(loss):
        raise BadBatchError(
            f"FC920 {name}() returned a {type(loss).__name__} as loss; expected loss(model, batch)."
        )
    if device is not None:
        try:
            model = model.to(device)
            batch = map_tensors(lambda x: x.to(device), batch, packed=True)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise BadBatchError(f"FC921 --device {device}: cannot move there: {error}") from error
    if dtype is not None:
        kind = getattr(torch, dtype)
        model, batch = model.to(kind), cast(batch, kind)
    if next(model.parameters()).is_meta:
        raise BadBatchError(f"FC125 {name}: found parameters on the meta device.")
    return model, batch, loss


def _where(error: BaseException) -> str:
    """The error and the line of the user's own file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
    own = [f for f in own if f"{os.sep}importlib{os.sep}" not in f.filename] or own
    text = f"{type(error).__name__}: {error}"
    return f"{text} (line {own[-1].lineno} of {own[-1].filename})" if own else text
