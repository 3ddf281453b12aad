"""Layers that ``transformers`` has cut (``from_pretrained(tp_plan="auto")``), as PyTorch cuts them.

``transformers`` keeps parameters as ``DTensor``s, and puts a function of its own in the place of a
layer's ``forward``: it lays the input out, calls the layer, and lays the output out. It takes other
paths without gradients, on which parameters are no ``DTensor``s. While a model is wrapped, hooks
do the same on one path, as those of ``parallelize_module`` do, and ``forward`` is the layer's own.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from flash_clipping._compat import hooks_of_module
from flash_clipping.errors import NotServed

#: Where ``transformers`` 5.17 has its styles; older ones had other places, and use hooks.
_STYLES = "transformers.distributed.tensor_parallel"

_INSTEAD = (
    "Load the model without tp_plan, and cut it by torch.distributed.tensor.parallel."
    "parallelize_module, with a plan that leaves this module whole."
)


def lay_out_by_hooks(root: nn.Module, handles: list[Any]) -> None:
    """Let hooks do what ``transformers`` does around the layers that it has cut.

    Raises:
        NotImplementedError: a style, or a layer with it, that is not known here.
    """
    # Not there where PyTorch was built without torch.distributed.
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for path, layer in root.named_modules():
        *_, of_backward = hooks_of_module(layer)
        for hook in getattr(of_backward, "values", list)():
            if getattr(hook, "__module__", None) == _STYLES:
                _refuse(path, layer, "a sum of its gradients over processes, without its samples")
        forward = layer.__dict__.get("forward")
        if getattr(forward, "__module__", None) != _STYLES:
            continue
        closed: Any = inspect.getclosurevars(forward).nonlocals
        style, mesh, inner = (closed.get(name) for name in ("self", "mesh", "original_forward"))
        name = type(style).__name__
        if name not in ("ColwiseParallel", "RowwiseParallel"):
            _refuse(path, layer, f"the style {name}")
        if type(layer) not in (nn.Linear, nn.Embedding):  # quantized ones, say
            _refuse(path, layer, f"a layer that is neither Linear nor Embedding, with {name}")
        if getattr(inner, "__func__", None) is not type(layer).forward:
            _refuse(path, layer, "a forward that is not its class's")
        by_features = name == "RowwiseParallel" and not isinstance(layer, nn.Embedding)
        found.append((layer, style, mesh, Shard(-1) if by_features else Replicate()))
    for layer, style, mesh, wanted in found:
        forward = layer.__dict__.pop("forward")
        handles.append(SimpleNamespace(remove=partial(setattr, layer, "forward", forward)))
        handles.append(layer.register_forward_pre_hook(partial(_before, style, mesh, wanted)))
        handles.append(layer.register_forward_hook(partial(_after, style)))


def _before(style: Any, mesh: Any, wanted: Any, layer: nn.Module, args: Any) -> tuple[Any, ...]:
    """Lay a layer's input out."""
    from torch.distributed.tensor import DTensor

    x, *others = args
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [style.input_layouts], run_check=False)
    return x.redistribute(placements=[wanted]), *others


def _after(style: Any, layer: nn.Module, args: Any, output: Any) -> Any:
    """Lay a layer's output out."""
    output = output.redistribute(placements=[style.output_layouts])
    return output.to_local() if style.use_local_output else output


def _refuse(path: str, layer: nn.Module, what: str) -> None:
    raise NotServed(
        f"FC626 {path} ({type(layer).__name__}): found {what}, of transformers' tp_plan. Built are "
        f"'colwise', 'rowwise' and those of them that gather. {_INSTEAD}"
    )
