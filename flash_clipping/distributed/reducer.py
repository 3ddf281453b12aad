"""Clipped sums of all processes into the shards of ``p.grad``, a bucket at a time.

Every process has the same buckets, in the same order: they follow from the parameters alone, and
are planned once. One operation reduces and scatters the sums of a bucket, each from where it was
computed, and leaves this process's parts side by side in one buffer; in the hybrid form that buffer
is reduced once more over replicas. That goes on while the next bucket is computed. The parts are
the gradients; nothing is copied on the way, but for shards along another axis than the first, and
for padding where processes have uneven shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed as dist

from flash_clipping._compat import reduce_scatter_many
from flash_clipping.distributed.parameter_slots import ParameterSlots, local_of
from flash_clipping.distributed.process_groups import device_of
from flash_clipping.factors import accumulation_dtype
from flash_clipping.ops.runtime.shapes import ALIGNMENT

#: Buckets whose reduction has begun and not ended.
IN_FLIGHT = 2

#: Takes ids of parameters; gives this process's clipped sums of those that backward reached.
Sums = Callable[[tuple[int, ...]], Mapping[int, Tensor]]


class _Shard:
    """How the sum of one parameter becomes this process's shard of it.

    Attributes:
        param: where it goes.
        gathered: the shape of a sum: of what ``fully_shard`` gathers of a parameter.
        dim: along which it is cut.
        sent: the shape of what is sent: that dimension first, and padded.
        part: the shape of what arrives.
        own: the shape of the shard.
        device: where it is, on the CPU by ``CPUOffloadPolicy``.
    """

    def __init__(self, param: Any, over: int | None):
        own = local_of(param)
        self.param, self.dim, self.own, self.device = param, 0, own.shape, own.device
        self.gathered = self.sent = self.part = self.own
        if over is None:
            return
        self.dim = param.placements[over].dim
        self.gathered = torch.Size(_gathered_shape(param, over))
        rest = [*self.gathered]
        ranks, rows = param.device_mesh.size(over), rest.pop(self.dim)
        self.part = torch.Size((-(-rows // ranks), *rest))
        self.sent = torch.Size((self.part[0] * ranks, *rest))

    def to_send(self, total: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This process's clipped sum, as it is sent; ``None``: backward did not reach it."""
        if total is None:
            return torch.zeros(self.sent, dtype=dtype, device=device)
        if total.dtype != dtype:
            total = total.to(dtype)
        if total.shape != self.gathered:
            total = total.reshape(self.gathered)
        if self.dim:
            total = total.movedim(self.dim, 0)
        if total.shape != self.sent:
            padding = total.new_zeros(self.sent[0] - total.shape[0], *total.shape[1:])
            return torch.cat([total, padding])
        return total.contiguous()

    def of(self, part: Tensor) -> Tensor:
        """The shard, in the part that has arrived: a view, if it is cut along the first axis."""
        if self.dim:
            part = part.movedim(0, self.dim).narrow(self.dim, 0, self.own[self.dim]).contiguous()
        elif part.shape != self.own:
            part = part[: self.own[0]]
        return part if part.device == self.device else part.to(self.device)


@dataclass
class _Bucket:
    """Parameters whose sums one operation reduces.

    Attributes:
        dtype, device: of the sums.
        group: of processes that have a shard each; ``None`` where nothing is cut: all have had the
            same samples, or the parameter is of experts in parallel, which nobody gathers.
        replicas: groups of those that have the same shard and had other samples.
        room: bytes for further parameters.
        places: of the parameters among all that are trainable, the last first.
        shards: of the same, in the order in which all processes have them.
    """

    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None
    replicas: tuple[Any, ...]
    room: int
    places: list[int] = field(default_factory=list)
    shards: list[_Shard] = field(default_factory=list)

    def launch(self, totals: Sequence[Tensor | None]) -> _Flight:
        """Begin to reduce these sums."""
        pairs = zip(self.shards, totals, strict=True)
        sent = [shard.to_send(total, self.dtype, self.device) for shard, total in pairs]
        if self.group is None:
            return _Flight(self, parts=sent)
        # Parts lie on 16 bytes each, as kernels want it of gradients.
        each = max(ALIGNMENT // self.dtype.itemsize, 1)
        counts = [shard.part.numel() for shard in self.shards]
        sizes = [-(-n // each) * each for n in counts]
        # What lies between parts is read where bits, or replicas, are added up.
        make: Any = torch.empty if sizes == counts else torch.zeros
        arrives = make(sum(sizes), dtype=self.dtype, device=self.device)
        # Not split(), whose views have one version: each part becomes a gradient of its own.
        pieces = torch.unsafe_split_with_sizes(arrives, sizes)
        parts = [
            (piece if len(piece) == n else piece[:n]).view(shard.part)
            for shard, piece, n in zip(self.shards, pieces, counts, strict=True)
        ]
        work = reduce_scatter_many(parts, sent, self.group)
        return _Flight(self, parts, work, arrives, sent)


@dataclass
class _Flight:
    """A bucket on its way: the parts of what arrives, their buffer, and what is sent, until it has
    arrived."""

    bucket: _Bucket
    parts: list[Tensor]
    work: Any = None
    arrives: Tensor | None = None
    sent: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """On a GPU: let its stream wait."""
        if self.work is not None:
            self.work.wait()
            self.work, self.sent = None, []

    def land(self, slots: ParameterSlots) -> None:
        """Wait, and add the parts into ``p.grad``."""
        self.wait()
        for group in self.bucket.replicas:
            for total in self.parts if self.arrives is None else (self.arrives,):
                dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        for shard, part in zip(self.bucket.shards, self.parts, strict=True):
            slots.add_to_grad(shard.param, shard.of(part))


class Reducer:
    """Adds clipped sums up over processes, and adds each shard into its ``p.grad``.

    Args:
        slots: of the model.
        adds_up: whether processes have had other samples.

    Attributes:
        bucket_bytes: of sums that one operation reduces; a larger parameter is a bucket of its own.

    Guarantees:
        Sums are added up in their own dtype, whatever the mixed-precision policy says of gradients.
    """

    def __init__(self, slots: ParameterSlots, adds_up: bool):
        self.slots, self.adds_up, self.bucket_bytes = slots, adds_up, 256 << 20
        self._layout: Any = None
        self._buckets: list[_Bucket] = []

    def begin(self) -> Reduction:
        """Add the sums of all trainable parameters into the shards of ``p.grad``."""
        keys = [id(param) for param in reversed(self.slots.recorded())]
        waiting = [
            (bucket, tuple([keys[place] for place in bucket.places])) for bucket in self._planned()
        ]
        return Reduction(self.slots, deque(waiting))

    def _planned(self) -> list[_Bucket]:
        """The buckets: the model's order backwards, as factors came."""
        params: list[Any] = self.slots.trainable()[::-1]
        layout = [(id(param), param.dtype) for param in params], self.bucket_bytes
        if layout == self._layout:
            return self._buckets
        found: list[_Bucket] = []
        last: dict[Any, _Bucket] = {}
        for place, param in enumerate(params):
            dtype = accumulation_dtype(param.dtype)
            mesh: Any = getattr(param, "device_mesh", None)
            over: int | None = None
            replicas: tuple[Any, ...] = ()
            if id(param) in self.slots.experts:
                replicas = tuple(mesh.get_group(dim) for dim in range(mesh.ndim - 1))
            elif self.adds_up:
                over = int(param.placements[0].is_replicate())  # after replicas, if there are
                replicas = (mesh.get_group(0),) if over else ()
            shard = _Shard(param, over)
            group = None if over is None else mesh.get_group(over)
            kind = dtype, shard.device if over is None else device_of(mesh), group, replicas
            nbytes = shard.gathered.numel() * dtype.itemsize
            if kind not in last or nbytes > last[kind].room:
                last[kind] = _Bucket(*kind, room=self.bucket_bytes)
                found.append(last[kind])
            last[kind].places.append(place)
            last[kind].shards.append(shard)
            last[kind].room -= nbytes
        self._layout, self._buckets = layout, found
        return found


@dataclass
class Reduction:
    """Of one backward pass, which owns it and gives it sums of some parameters at a time: buckets
    in the order that all processes share.

    Attributes:
        waiting: to be sent: buckets, and the ids of their parameters as layers recorded them.
        flying: sent, and not yet added into ``p.grad``.
    """

    slots: ParameterSlots
    waiting: deque[tuple[_Bucket, tuple[int, ...]]]
    flying: deque[_Flight] = field(default_factory=deque)

    def send_while(self, is_complete: Callable[[int], bool], sums: Sums) -> None:
        """Send the next buckets, as long as the sums of all of their parameters are complete.

        Nothing is added into ``p.grad``: a pass that fails leaves nothing there.
        """
        while self.waiting and all(map(is_complete, self.waiting[0][1])):
            self._send(sums)
            for flight in [*self.flying][:-IN_FLIGHT]:
                flight.wait()

    def finish(self, sums: Sums) -> None:
        """Send the others, and add all into ``p.grad``."""
        while self.waiting:
            self._send(sums)
            while len(self.flying) > IN_FLIGHT:
                self.flying.popleft().land(self.slots)
        while self.flying:
            self.flying.popleft().land(self.slots)

    def _send(self, sums: Sums) -> None:
        bucket, part = self.waiting.popleft()
        found = sums(part)
        self.flying.append(bucket.launch([*map(found.get, part)]))


def _gathered_shape(param: Any, over: int) -> list[int]:
    """Of what ``fully_shard`` gathers of a parameter: a part of a layer, in tensor parallelism."""
    mesh, shape = param.device_mesh, [*param.shape]
    for tensor in range(over + 1, mesh.ndim):
        if (placement := param.placements[tensor]).is_shard():
            size = shape[placement.dim]
            each = -(-size // mesh.size(tensor))
            left = size - each * mesh.get_local_rank(tensor)
            shape[placement.dim] = max(0, min(each, left))
    return shape
