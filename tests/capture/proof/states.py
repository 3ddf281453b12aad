"""All of a wrapped model that a proof could change, as something that can be compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _bits(x: Tensor | None) -> Any:
    if x is None:
        return None
    flat = x.detach().contiguous().view(-1)
    return x.dtype, tuple(x.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def every_state(flash: Any) -> dict[str, Any]:
    """Parameters, their memory and versions, ``p.grad``, buffers, attributes, hooks, generators,
    and what the session knows."""
    model, session = flash._module, flash._session
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "draws": (random.random, random.choice, np.random.rand, np.random.choice),
        "torch": _bits(torch.get_rng_state()),
    }
    for name, param in model.named_parameters():
        found[name] = _bits(param), param.data_ptr(), param._version, id(param)
        found[f"{name}.grad"] = _bits(param.grad), id(param.grad)
    for name, buffer in model.named_buffers():
        found[name] = _bits(buffer), id(buffer)
    for name, module in model.named_modules():
        found[f"{name} attributes"] = {
            key: repr(value)
            for key, value in vars(module).items()
            if not key.startswith("_")
            and not isinstance(value, torch.nn.Module)
            and "fails_at" not in key
        }
        hooks = [key for key in vars(module) if key.endswith("_hooks")]
        found[f"{name} hooks"] = {key: [*(vars(module)[key] or ())] for key in hooks}
    known = {"enabled", "bypassed", "comparing", "plans", "backward_pass_class"}
    parts = session.mode, session.calls
    found["session"] = {
        name: vars(part)[name] for part in parts for name in sorted(known & vars(part).keys())
    }
    found["pass"] = session.calls.running_pass()
    found["folded"] = set(session.known.folded), dict(session.known.layouts)
    return found
