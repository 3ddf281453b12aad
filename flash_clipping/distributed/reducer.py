"""Clipped sums of all processes into the shards of ``p.grad``, a bucket at a time.

Every process adds the same parameters in the same order. A bucket holds sums of one kind: padded as
``fully_shard`` pads, side by side, they are reduced and scattered in one operation, and in the
hybrid form reduced once more over replicas. That goes on while the next bucket is computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor import DTensor

from flash_clipping.distributed.process_groups import device_of
from flash_clipping.distributed.tensor.local import local_of
from flash_clipping.finish.clipping import Coefficients
from flash_clipping.finish.grouped_factors import GroupedFactors
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.clipped_sum import clipped_sums_many, in_turn
from flash_clipping.ops.outer import weighted_sums_many


class OrderedSums:
    """The sums that :meth:`GroupedFactors.add_clipped_sums` gives in the order that suits launches,
    when they are asked for: those of parameters that share an input together, small ones at once.
    """

    def __init__(self, groups: GroupedFactors, plan: Plan, coef: Coefficients):
        self.groups, self.plan, self.coef = groups, plan, coef
        self.backend = groups.backend
        self._group = {key: number for number, keys in enumerate(plan.linear) for key in keys}
        self._ready: dict[int, Tensor] = {}
        while groups.stacks:
            stack = groups.stacks.pop()
            sums = stack.clipped_sums([coef[key] for key in stack.keys], self.backend)
            self._ready.update(zip(stack.keys, sums, strict=True))

    def take(self, key: int) -> Tensor | None:
        """The clipped sum of a parameter; ``None`` where backward did not reach it."""
        groups = self.groups
        if key in self._ready:
            return self._ready.pop(key)
        if key in groups.stored:
            grads = [groups.stored.pop(key).dense()]
            return weighted_sums_many(grads, self.coef[key], backend=self.backend)[0]
        if key in groups.others:
            return groups.others.pop(key).clipped_sum(self.coef[key], self.backend)
        if self._group.get(key) in groups.linear:
            self._multiply(self._group[key])
            return self._ready.pop(key)
        return None

    def _multiply(self, number: int) -> None:
        """Linear maps that read one input."""
        A_BTd, Gs = self.groups.linear.pop(number)
        pairs = {key: (A_BTd, G) for key, G in zip(self.plan.linear[number], Gs, strict=True)}
        # Per-layer clipping weights a shared input differently for every reader.
        for keys in self.coef.alike(pairs):
            operands = [pairs.pop(key) for key in keys]
            for part in in_turn(operands, backend=self.backend):
                members = [keys[i] for i in part]
                sums = clipped_sums_many(
                    [operands[i] for i in part],
                    self.coef[keys[0]],
                    backend=self.backend,
                    checked=True,
                    memo=self.plan.memos["ordered", *members],
                )
                self._ready.update(zip(members, sums, strict=True))


#: Its older name is deprecated.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

#: Bytes of unsharded sums that one operation reduces. A larger parameter is a bucket of its own.
BUCKET = 64 << 20

#: Buckets whose reduction has begun and not ended.
IN_FLIGHT = 2


@dataclass
class _Flight:
    """A bucket on its way, and the shapes of the shards that it has, with padding."""

    work: Any
    sent: Tensor
    arrives: Tensor
    destinations: list[nn.Parameter]
    shapes: list[torch.Size]


class Reducer:
    """Adds clipped sums up over processes, and adds each shard into its ``p.grad``.

    Guarantees:
        Sums are added up in their own dtype, whatever the mixed-precision policy says of gradients.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, Tensor]] = []
        self._bytes = 0
        self._kind: Any = None
        self._flying: deque[_Flight] = deque()

    def add(self, destination: Any, total: Tensor | None, dtype: torch.dtype) -> None:
        """Take this process's clipped sum of a parameter; ``None``: no sample of it has any."""
        mesh, placements = destination.device_mesh, tuple(destination.placements)
        shape = _gathered_shape(destination)
        if total is None:
            total = torch.zeros(shape, dtype=dtype, device=device_of(mesh))
        total = total.to(dtype).reshape(shape)
        kind = mesh, placements, dtype, total.device
        full = self._bytes + total.nbytes > BUCKET
        if self._waiting and (kind != self._kind or full):
            self._launch()
        self._kind = kind
        self._waiting.append((destination, total))
        self._bytes += total.nbytes

    def add_own(self, destination: Any, total: Tensor | None, dtype: torch.dtype) -> None:
        """The same of what nobody gathers, and this process and its replicas alone have."""
        own, mesh = local_of(destination), destination.device_mesh
        if total is None:
            total = torch.zeros_like(own, dtype=dtype)
        total = total.to(dtype).reshape(own.shape).contiguous()
        for over in range(mesh.ndim - 1):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=mesh.get_group(over))
        _add_to_grad(destination, total)

    def finish(self) -> None:
        """Wait (on a GPU: let its stream wait) until all sums are in ``p.grad``."""
        if self._waiting:
            self._launch()
        while self._flying:
            self._land()

    def _launch(self) -> None:
        mesh, placements, _, _ = self._kind
        over = _scattered(placements)
        group, dim, ranks = mesh.get_group(over), placements[over].dim, mesh.size(over)
        parts, shapes = [], []
        for _, total in self._waiting:
            rows = total.movedim(dim, 0)
            each = -(-rows.shape[0] // ranks)
            if missing := each * ranks - rows.shape[0]:
                rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
            parts.append(rows.reshape(ranks, -1))
            shapes.append(torch.Size((each, *rows.shape[1:])))
        destinations = [destination for destination, _ in self._waiting]
        sent = torch.cat(parts, 1).view(-1)
        self._waiting, self._bytes = [], 0
        # All of it is written by the operation.
        arrives = sent.new_empty(sent.numel() // ranks)
        work = _reduce_scatter(arrives, sent, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self._flying.append(_Flight(work, sent, arrives, destinations, shapes))
        while len(self._flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        flight = self._flying.popleft()
        flight.work.wait()
        first: Any = flight.destinations[0]
        mesh, over = first.device_mesh, _scattered(first.placements)
        dim = first.placements[over].dim
        if over:  # replicas of a shard have had other samples
            dist.all_reduce(flight.arrives, op=dist.ReduceOp.SUM, group=mesh.get_group(0))
        pieces = flight.arrives.split([shape.numel() for shape in flight.shapes])
        for destination, shape, piece in zip(
            flight.destinations, flight.shapes, pieces, strict=True
        ):
            _add_shard(destination, piece.view(shape).movedim(0, dim))


class LocalSums(Reducer):
    """The same where all processes have the same samples: nothing is to be added up over them."""

    def add(self, destination: Any, total: Tensor | None, dtype: torch.dtype) -> None:
        own = local_of(destination)
        if total is None:
            total = torch.zeros_like(own, dtype=dtype)
        _add_to_grad(destination, total.to(dtype).reshape(own.shape))


def _scattered(placements: Any) -> int:
    """The dimension of the mesh over which ``fully_shard`` cuts: after replicas, if there are."""
    return 1 if placements[0].is_replicate() else 0


def _gathered_shape(destination: Any) -> list[int]:
    """Of what ``fully_shard`` gathers of a parameter: a part of a layer, in tensor parallelism."""
    mesh, shape = destination.device_mesh, [*destination.shape]
    for over in range(_scattered(destination.placements) + 1, mesh.ndim):
        if (placement := destination.placements[over]).is_shard():
            size = shape[placement.dim]
            each = -(-size // mesh.size(over))
            left = size - each * mesh.get_local_rank(over)
            shape[placement.dim] = max(0, min(each, left))
    return shape


def _add_shard(destination: Any, piece: Tensor) -> None:
    """Add one shard, with padding at its end, into ``p.grad``."""
    own, dim = local_of(destination), destination.placements[_scattered(destination.placements)].dim
    # A copy: a view would keep all of the bucket, and versions of its parts are one.
    shard = piece.narrow(dim, 0, own.shape[dim]).to(own.device, copy=True).contiguous()
    _add_to_grad(destination, shard)


def _add_to_grad(destination: Any, shard: Tensor) -> None:
    grad = as_sharded(destination, shard)
    if destination.grad is None:
        destination.grad = grad
    elif destination.grad.dtype == grad.dtype:
        destination.grad.add_(grad)
    else:
        destination.grad = destination.grad + grad


def as_sharded(like: Any, shard: Tensor) -> Tensor:
    """What is sharded as ``like``, if that is, from this process's shard."""
    if not isinstance(like, DTensor):
        return shard
    if shard.device.type != like.device_mesh.device_type:  # offloaded: from_local would move it
        with torch.no_grad():
            grad = torch.empty_like(like, dtype=shard.dtype)
            local_of(grad).copy_(shard)
        return grad
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
