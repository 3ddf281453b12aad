"""The slots of a sharded model: where each parameter's shard goes, and what was in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flash_clipping._compat import dtensor_of, layout_of_dtensor, local_tensor
from flash_clipping.capture.inputs import arrived
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.errors import FlashClippingError


def local_of(x: Tensor) -> Tensor:
    """This process's part of a ``DTensor``, of the same memory and outside of autograd; any other
    tensor as it is."""
    own: Tensor = arrived(local_tensor(x)) if isinstance(x, DTensor) else x
    return own


def in_parallel(root: nn.Module) -> dict[str, nn.Module]:
    """Layers, by their paths, of which each process has other rows of every parameter: a forward of
    theirs says which backward passes the model needs (``backward_passes``)."""
    return {
        path: module
        for path, module in root.named_modules()
        if hasattr(vars(module).get("forward"), "backward_passes")
    }


@dataclass(eq=False)
class Held:
    """A parameter of the model.

    Attributes:
        name: its first, where it is tied.
        destination: the shard, which the optimizer knows; of a frozen one what was left alone.
        unsharded: the parameter that was last seen in its place.
    """

    name: str
    destination: nn.Parameter
    unsharded: nn.Parameter | None = None

    @property
    def recorded(self) -> nn.Parameter:
        """What layers record."""
        return self.destination if self.unsharded is None else self.unsharded


#: A place for a parameter: the module that has it, and its name there. Tied ones have several.
Slot = tuple[nn.Module, str, Held]


class ParameterSlots:
    """All slots of a model, as it is when it is wrapped."""

    def __init__(self, root: nn.Module, watch: Callable[[str, nn.Parameter], None]):
        self.root = root
        self._watch = watch
        #: In the model's order.
        self.held: list[Held] = []
        #: By ``id``, of destinations and of unsharded parameters.
        self._by_id: dict[int, Held] = {}
        #: How gradients are laid out, by ``id`` of destinations and by their dtype.
        self._layouts: dict[tuple[int, torch.dtype], Any] = {}
        #: Parameters of experts in parallel, by ``id``: nobody gathers them.
        layers = in_parallel(root)
        self.experts = {id(param) for layer in layers.values() for param in layer.parameters()}
        #: The classes of backward passes that they need, by mode; ``None`` without any.
        self.backward_passes: Any = next(
            (vars(layer)["forward"].backward_passes for layer in layers.values()), None
        )
        #: By the module that gathers them.
        self._of_module: dict[nn.Module, list[Slot]] = {}
        gathering: dict[str, nn.Module] = {}
        for path, module in root.named_modules():
            is_own = isinstance(module, FSDPModule) or module is root
            gathers = module if is_own else gathering[path.rpartition(".")[0]]
            gathering[path] = gathers
            of_module = self._of_module.setdefault(gathers, [])
            for name, param in module._parameters.items():
                if param is None:
                    continue
                if id(param) not in self._by_id:
                    self.held.append(Held(f"{path}.{name}".lstrip("."), param))
                    self._by_id[id(param)] = self.held[-1]
                of_module.append((module, name, self._by_id[id(param)]))

    @property
    def gathering(self) -> list[nn.Module]:
        """The modules that ``fully_shard`` was applied to."""
        return [*self._of_module]

    def look(self, module: nn.Module, _: Any = None) -> None:
        """A hook: see the unsharded parameters of a module that has gathered them."""
        for owner, name, held in self._of_module[module]:
            param: Any = owner._parameters[name]
            if isinstance(param, ParameterProxy) or param is None:
                continue
            mesh = getattr(held.destination, "device_mesh", None)
            if mesh is not None and getattr(param, "device_mesh", None) == mesh:
                continue  # a shard; what is gathered of a layer that is cut lies over fewer
            if param is not held.unsharded and param is not held.destination:
                held.unsharded, self._by_id[id(param)] = param, held
                if param.requires_grad:
                    self._watch(held.name, param)

    def is_sharded(self, module: nn.Module) -> bool:
        """Whether this module's parameters are shards now, which it would have to gather."""
        return isinstance(module, FSDPModule) and any(
            owner._parameters[name] is held.destination and isinstance(held.destination, DTensor)
            for owner, name, held in self._of_module[module]
        )

    def recorded(self) -> list[nn.Parameter]:
        """The trainable parameters as layers record them: unsharded, where they were seen."""
        return [held.recorded for held in self.held if held.destination.requires_grad]

    def trainable(self) -> list[nn.Parameter]:
        """The destinations of the same, in the same order."""
        return [held.destination for held in self.held if held.destination.requires_grad]

    def to(self, key: int) -> nn.Parameter:
        """The destination of a parameter, by its ``id`` or that of its unsharded form."""
        return self._by_id[key].destination

    def tensors(self) -> Iterator[Tensor]:
        """The memory of all parameters: the shards' own, and that of the whole."""
        for held in self.held:
            yield local_of(held.destination)
            if held.unsharded is not None:
                yield local_of(held.unsharded)

    # -- gradients ----------------------------------------------------------------------------

    own = staticmethod(local_of)

    def as_sharded(self, param: Tensor, shard: Tensor) -> Tensor:
        """What is sharded as a parameter, if that is, from this process's shard: a view of it, but
        where shards lie on other devices than their mesh is for (``CPUOffloadPolicy``)."""
        layout = self._layouts.get((id(param), shard.dtype))
        if layout is not None:
            return dtensor_of(shard, layout)
        if not isinstance(param, DTensor):
            return shard
        if shard.device.type != param.device_mesh.device_type:  # from_local would move it
            with torch.no_grad():
                grad = torch.empty_like(param, dtype=shard.dtype)
                local_of(grad).copy_(shard)
            return grad
        where: Any = param.device_mesh, param.placements
        whole: Any = {"shape": param.shape, "stride": param.stride()}
        grad = DTensor.from_local(shard, *where, run_check=False, **whole)
        self._layouts[id(param), shard.dtype] = layout_of_dtensor(grad)
        return grad

    def add_to_grad(self, param: Tensor, shard: Tensor) -> None:
        """Add this process's shard of a clipped sum into ``p.grad``, of which it may become a
        part."""
        grad = param.grad
        if grad is None:
            param.grad = self.as_sharded(param, shard)
        elif grad.dtype == shard.dtype:
            local_of(grad).add_(shard)
        else:
            param.grad = grad + self.as_sharded(param, shard)

    def check(self) -> None:
        """Refuse shards that were exchanged since the model was wrapped."""
        for owner, name, held in chain.from_iterable(self._of_module.values()):
            found = owner._parameters[name]
            known = found is held.destination or found is held.unsharded
            if isinstance(found, DTensor) and not known:
                raise FlashClippingError(
                    f"FC171 {held.name}: found another parameter than the one that was there when "
                    "the model was wrapped, which the optimizer knows. Load weights without "
                    "assign=True, or before the model is wrapped."
                )
