"""Layers that are cut over several processes: PyTorch's ``parallelize_module``.

The processes of a *tensor mesh* run the model on the same batch. Each has a part of a layer, a
``DTensor``, and so a part of every sample's gradient. Kernels never see a ``DTensor``: at the edge
of a tapped layer its tensors become the local ones of this process.

For a linear map ``Y = A Wᵀ + b``, per mesh dimension:

=========  =============  ============  ==========================  =========================
weight     input          output        gradient of the input       a process's share of g_b
=========  =============  ============  ==========================  =========================
Shard(0)   Replicate      Shard(-1)     Partial: own features only  rows of W and b
Shard(1)   Shard(-1)      Partial       Shard(-1)                   columns of W; all of b
Replicate  Replicate      Replicate     Replicate                   all of it
Replicate  Shard(t)       Shard(t)      Shard(t)                    a sum over own positions
=========  =============  ============  ==========================  =========================

A table of embeddings is a linear map of one-hot rows; a norm layer's weight is never cut.

Shape suffixes: ``B`` samples, ``R`` rows of a batch, ``P`` parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flash_clipping.capture.draws import row_hashes, scrambled
from flash_clipping.capture.inputs import arrived, batched_inputs, tensors_in
from flash_clipping.capture.layer_inputs import ReadsNoSamples
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.distributed.backward_pass import ShardedBackwardPass, ShardedTwoWalks
from flash_clipping.distributed.parameter_slots import ParameterSlots, local_of
from flash_clipping.distributed.process_groups import ProcessGroups
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.errors import FlashClippingError, NotServed
from flash_clipping.factors import DenseGrad, PerSampleGrad
from flash_clipping.finish.clipping import Doubts
from flash_clipping.ops.runtime.checks import check_on_device
from flash_clipping.ops.runtime.tables import to_device
from flash_clipping.rules.embedding import EmbeddingRule
from flash_clipping.rules.linear import LinearRule
from flash_clipping.rules.normalization import LayerNormRule, RMSNormRule
from flash_clipping.rules.registry import GradRequest, Rule, UnsupportedLayer

#: Rules of layers whose parameters may be ``DTensor``s, themselves and nothing derived from them.
_SERVED = (LinearRule, EmbeddingRule, LayerNormRule, RMSNormRule)

#: Relative difference of squared norms that are computed by all processes alike.
_ALIKE = 1e-3

_OTHER_SAMPLES = (
    "FC623 the model: processes of one tensor mesh were called with different samples. Give all of "
    "them the same batch, in the same order: from the loader that make_private returns, or seed "
    "samplers and augmentations alike."
)
_OTHER_GRADIENTS = (
    "FC624 the model: found parameters that are whole in every process of a tensor mesh, and whose "
    "gradients differ between them. Parallelize each layer that reads only its process's heads or "
    "positions (SequenceParallel), or seed labels and dropout alike."
)


# -- how a layer's tensors lie ---------------------------------------------------------------------


class Share(Enum):
    """What one process has of a per-sample gradient."""

    #: Elements that no other has: squared norms are added up over processes.
    SHARD = "a shard"
    #: All of it, as every other: counted once.
    WHOLE = "the whole"
    #: A term of a sum, of some of the positions: gradients are added up before they are squared.
    TERM = "a sum over some of the positions"


@dataclass(frozen=True)
class Layout:
    """How one call of a layer lies.

    Attributes:
        input: how it wants its input.
        grad: what its gradient with respect to the local input is.
        output: what it returns.
        shape: of the whole output.
        share: a process's part of the weight's per-sample gradient.
        bias: the same of the bias.
        ids: of a table that is cut by words: processes have other words.
    """

    input: Any
    grad: Any
    output: Any
    shape: tuple[int, ...]
    share: Share
    bias: Share
    ids: bool = False


def layout_of(rule: Rule, weight: DTensor, x: DTensor, axis: int) -> Layout:
    """How a call lies: the table above.

    Raises:
        UnsupportedLayer: a process would have a part of the samples, or the weight is cut in a way
            that the layer's kind does not know.
    """
    if x.device_mesh != weight.device_mesh:
        raise UnsupportedLayer(
            f"FC621 found an input on {x.device_mesh}, and a weight on {weight.device_mesh}. Lay "
            "both out on one tensor mesh."
        )
    (cut,), (lies,) = weight.placements, x.placements
    if lies.is_shard(axis):
        raise UnsupportedLayer(
            f"FC621 found an input that is cut along axis {axis}, that of the samples. Processes "
            "of a tensor mesh see the same samples: cut it along the sequence or the features."
        )
    whole, own = Replicate(), Share.SHARD
    if type(rule) is LinearRule:
        last = x.ndim - 1
        shape = (*x.shape[:-1], weight.shape[0])
        if cut.is_shard(0):
            return Layout(whole, Partial(), Shard(last), shape, own, own)
        if cut.is_shard(1):
            return Layout(Shard(last), Shard(last), Partial(), shape, own, Share.WHOLE)
        features = range(last, last + 1)
    elif type(rule) is EmbeddingRule:
        shape = (*x.shape, weight.shape[1])
        if cut.is_shard(0):
            return Layout(whole, whole, Partial(), shape, own, own, ids=True)
        if cut.is_shard(1):
            return Layout(whole, whole, Shard(x.ndim), shape, own, own)
        features = range(0)
    elif cut.is_replicate():
        shape, features = tuple(x.shape), range(x.ndim - weight.ndim, x.ndim)
    else:
        raise UnsupportedLayer(f"FC621 found a norm layer's weight as {cut}. Leave it whole.")
    # Every process has the parameters.
    if lies.is_partial() or any(lies.is_shard(axis) for axis in features):
        lies = whole
    share = Share.WHOLE if lies.is_replicate() else Share.TERM
    return Layout(lies, lies, lies, shape, share, share)


# -- layers ----------------------------------------------------------------------------------------


class LocalBoundary(Rule):
    """A rule around a layer's own, which converts on the way in and out."""

    def __init__(self, inner: Rule, path: str, layers: TensorParallelLayers):
        self.inner, self.path, self.layers, self.session = inner, path, layers, layers.session
        #: Of the weight, as calls that were not traced have found it.
        self.share: Share | None = None

    def works_by_position(self, layer: Any) -> bool:
        return self.inner.works_by_position(layer)

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight = layer._parameters["weight"]
        if weight is None or not isinstance(x, DTensor):
            found = ", ".join(type(one).__name__ for one in (*args, *kwargs.values()))
            raise UnsupportedLayer(
                f"FC620 it has parameters that are DTensors, and was called with {found}; expected "
                "one DTensor. Parallelize it by parallelize_module, with input_layouts."
            )
        if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
            raise UnsupportedLayer(
                "FC620 some of its parameters are DTensors over a tensor mesh, and its weight is "
                "none. Parallelize all of the layer."
            )
        layout = layout_of(self.inner, weight, x, self.session.options.batch_axis)
        if self.session.rows.positions is not None and layout.share is Share.TERM:
            raise UnsupportedLayer(
                "FC279 found parts of the positions in each process, and a map of all of them "
                "(Documents with a map of positions). Leave SequenceParallel out of the plan."
            )
        if is_dynamo_compiling():  # what is noted in a trace is noted once for many calls
            if layout.share is not self.share:
                raise UnsupportedLayer(
                    "FC620 found a DTensor that is laid out otherwise than when the part of the "
                    "model around this layer was first called. Leave that part uncompiled."
                )
        else:
            self.share = layout.share
            for name, param in layer._parameters.items():
                if param is not None:
                    share = layout.bias if name == "bias" else layout.share
                    self.layers.note_share(f"{self.path}: {name}", id(param), share)
        if tuple(x.placements) != (layout.input,):
            x = x.redistribute(placements=[layout.input])
        floats = x.is_floating_point()
        inside = arrived(x.to_local(grad_placements=[layout.grad]) if floats else x.to_local())
        mine = None
        if layout.ids:
            start, rows = _own_words(weight)
            mine = (inside >= start) & (inside < start + rows)
            inside = (inside - start).remainder(rows)
        try:
            output = tapped(inside)
        except ReadsNoSamples:
            raise UnsupportedLayer(
                "FC620 what it reads is the same for all samples (positions, say), which is not "
                "built for a layer with DTensors. Leave it out of parallelize_module."
            ) from None
        if mine is not None:  # no gradient comes back to the rows that stood for others' words
            output = torch.where(mine.unsqueeze(-1), output, 0)
        sizes: dict[str, Any] = {}
        if layout.output.is_shard() and layout.shape[layout.output.dim] % weight.device_mesh.size():
            sizes["shape"] = torch.Size(layout.shape)
            sizes["stride"] = torch.empty(layout.shape, device="meta").stride()
        mesh = weight.device_mesh
        return DTensor.from_local(output, mesh, [layout.output], run_check=False, **sizes)

    def local_layer(self, layer: Any) -> Any:
        """The layer with this process's part of its parameters, as a rule reads it."""
        local: Any = object.__new__(
            type(layer)
        )  # fully_shard leaves classes that copy() makes again
        vars(local).update(vars(layer))
        vars(local).pop("forward", None)
        local._parameters = {name: local_of(param) for name, param in layer._parameters.items()}
        weight = layer._parameters["weight"]
        (cut,) = weight.placements
        if _adds_no_bias(layer):
            local._parameters["bias"] = None
        elif isinstance(layer, nn.Embedding) and cut.is_shard(0):
            start, rows = _own_words(weight)
            local.num_embeddings = rows
            if (padding := layer.padding_idx) is not None:
                local.padding_idx = padding - start if start <= padding < start + rows else None
        return local

    def local_parameters(self, layer: Any) -> dict[str, Any]:
        """Those of :meth:`local_layer`, in a trace."""
        found = {
            name: None if param is None else param.detach().to_local()
            for name, param in layer._parameters.items()
        }
        if _adds_no_bias(layer):
            found["bias"] = None
        return found

    def forward(self, layer: Any, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        local = self.local_layer(layer)
        output, saved = self.inner.forward(local, *inputs)
        local._parameters = {}  # whatever backward reads is among what was saved
        return output, (local, *saved)

    def backward(
        self, layer: nn.Module, saved: tuple[Any, ...], grad_output: Any, needs: GradRequest
    ) -> tuple[Any, Mapping[str, PerSampleGrad]]:
        if not self.session.mode.enabled:
            raise FlashClippingError(
                f"FC507 {self.path}: hooks were enabled in forward and are disabled in backward, "
                "which leaves ordinary gradients. That is not built for layers that are cut over "
                "processes: disable hooks before forward."
            )
        local, *rest = saved
        return self.inner.backward(local, tuple(rest), arrived(grad_output), needs)


def _adds_no_bias(layer: Any) -> bool:
    """Whether this process's outputs are added to others', of which one has the bias in it."""
    weight = layer._parameters["weight"]
    is_term = isinstance(layer, nn.Linear) and weight.placements[0].is_shard(1)
    return is_term and weight.device_mesh.get_local_rank() != 0


def _own_words(weight: DTensor) -> tuple[int, int]:
    """Where this process's rows of a table begin, and how many they are."""
    mesh = weight.device_mesh
    each = -(-weight.shape[0] // mesh.size())
    return each * mesh.get_local_rank(), local_of(weight).shape[0]


class TensorParallelLayers:
    """What a model with layers that are cut over processes has besides an ordinary one's."""

    def __init__(self, session: ClippingSession, processes: ProcessGroups):
        self.session, self.mesh, self.between_steps = session, processes.tensor, processes.mesh
        session.options.layers_are_cut = True
        #: Of parameters, by their ``id``, as layers have found them in forward.
        self._shares: dict[int, Share] = {}
        #: A number, ``[1]``, of all that the model was called with since the last backward.
        self._number: Tensor | None = None

    def surround(self, taps: Iterable[Tap], handles: list[Any]) -> None:
        """Stand at the edge of every tapped layer.

        Raises:
            NotImplementedError: a layer with a ``DTensor`` has no rule that knows what to do.
        """
        for tap in taps:
            own = [param for owner in tap.owners for param in owner._parameters.values()]
            if not any(getattr(p, "device_mesh", None) == self.between_steps for p in own):
                take = partial(self._take_local, tap)
                handles.append(tap.layer.register_forward_pre_hook(take, with_kwargs=True))
            elif (rule := tap.rule) is not None and type(rule) in _SERVED:
                tap.surround(LocalBoundary(rule, tap.path, self))
            elif any(param is not None and param.requires_grad for param in own):
                raise NotServed(
                    f"FC620 {tap.path}: found a DTensor among its trainable parameters. Tensor "
                    "parallelism is built for nn.Linear, nn.Embedding, nn.LayerNorm and "
                    "nn.RMSNorm; leave this module out of parallelize_module."
                )

    def note_share(self, name: str, key: int, share: Share) -> None:
        """A layer has found its parameter to be this; other uses must have found the same."""
        before = self._shares.setdefault(key, share)
        if before is not share:
            raise FlashClippingError(
                f"FC625 {name}: found a parameter of which a process has {before.value} of the "
                f"gradient in one use, and {share.value} in another. Give all uses of a parameter "
                "inputs of one layout (all cut along the sequence, or none)."
            )

    def share_of(self, key: int) -> Share:
        """What a process has of a parameter's gradients: the whole, if nobody has told of it, as it
        was not parallelized then."""
        return self._shares.get(key, Share.WHOLE)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model: who are the samples?"""
        if not self.session.recording:
            return
        tensors = batched_inputs(args, kwargs)
        if any(isinstance(x, DTensor) for x in tensors):
            raise FlashClippingError(
                "FC622 the model: called with a DTensor. Samples are looked for in plain tensors, "
                "which all processes of a tensor mesh have alike: give it those, and lay them out "
                "inside (PrepareModuleInput on a module below the model)."
            )
        axis = self.session.options.batch_axis
        own = [x for x in tensors if x.dim() > axis and x.layout is torch.strided and not x.is_meta]
        for x in own:
            if x.shape[axis] == own[0].shape[axis]:
                self.note_samples(x)

    def note_samples(self, x: Tensor) -> None:
        """What shows that processes run the same samples: these bits, and their places."""
        number = row_hashes(x.unsqueeze(0))
        if self._number is not None:
            number += 31 * self._number.to(number.device)
        self._number = number

    def take_number(self, like_B: Tensor) -> Tensor:
        """``[B]``: a whole number below 2^20 of all that was noted since the last backward. What
        differs has another one but for one pair in a million."""
        number, self._number = self._number, None
        found_B = torch.zeros_like(like_B)
        return found_B if number is None else found_B + (scrambled(number) & 0xFFFFF).to(like_B)

    def _take_local(
        self, tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The inputs of a layer that every process has as a whole."""
        if is_dynamo_compiling() or not self.session.recording or not tap.trainable()[1]:
            return None
        if any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            raise FlashClippingError(
                f"FC620 {tap.path}: called with a DTensor, and its parameters are none. "
                "Parallelize this layer as well, or let the layer before it return a local tensor "
                "that all processes have alike (output_layouts=Replicate())."
            )
        return tuple(map(arrived, args)), {name: arrived(x) for name, x in kwargs.items()}


# -- a backward pass -------------------------------------------------------------------------------


class TensorParallelBackwardPass(ShardedBackwardPass):
    """Factors are of this process's shares of the gradients; norms are of whole gradients.

    For these, processes of a tensor mesh tell each other once what they know: one all-reduce of
    ``[2 P + 4, B]`` in float64, of squared norms and doubts of every parameter, and what shows that
    all of them have run the same samples. All processes get the same bits, and so the same
    coefficients.
    """

    def __init__(
        self,
        session: ClippingSession,
        slots: ParameterSlots,
        reducer: Reducer,
        layers: TensorParallelLayers,
    ):
        super().__init__(session, slots, reducer)
        self.layers, self.mesh = layers, layers.mesh

    @cached_property
    def _keys(self) -> list[int]:
        """Of all trainable parameters, in an order that all processes share."""
        return [id(param) for param in self.slots.recorded()]

    def _terms_in(self, found: Mapping[int, Any]) -> list[int]:
        """Those of these parameters of whose gradients a process has a term."""
        return [key for key in self._keys if key in found and self._is_term(key)]

    def _is_term(self, key: int) -> bool:
        return self.layers.share_of(key) is Share.TERM

    def merged(self, keys: Sequence[int]) -> dict[int, PerSampleGrad]:
        """Terms of gradients become whole gradients: squares of sums, not sums of squares.

        They are added up in one all-reduce: in float64 if any is, in fp32 otherwise.
        """
        factors = super().merged(keys)
        if not (terms := self._terms_in(factors)):
            return factors
        grads = [factors[key].dense() for key in terms]
        flat = [grad.reshape(len(grad), grad.shape[1:].numel()) for grad in grads]
        wide = torch.float64 if any(x.dtype == torch.float64 for x in flat) else torch.float32
        message = torch.cat([x.to(wide) for x in flat], dim=1)
        if message.numel():
            dist.all_reduce(message, group=self.mesh.get_group())
        pieces = message.split([x.shape[1] for x in flat], dim=1)
        for key, piece, grad in zip(terms, pieces, grads, strict=True):
            factors[key] = DenseGrad(piece.reshape(grad.shape).contiguous())
        return factors

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        """Norms and doubts of whole gradients, from those of this process's shares.

        Raises:
            FlashClippingError: processes have run different samples, or differ in what should be
                the same for all. Of a GPU: later.
        """
        keys, (P, B) = [id(param) for param in params], norms_PB.shape
        sq_PB = norms_PB.double().square()
        doubt_PB = doubts.rows(keys, sq_PB)
        shard_P = [self.layers.share_of(key) is Share.SHARD for key in keys]
        is_shard_P1 = to_device(shard_P, sq_PB.device, torch.int64).bool().unsqueeze(1)
        whole_B = torch.where(is_shard_P1, 0.0, sq_PB).sum(0)
        whole_B = torch.where(whole_B.isfinite(), whole_B, -1.0)  # to be compared as well
        if self.units is not None:
            self.layers.note_samples(self.units.map.on(sq_PB.device).bins_M)
        number_B = self.layers.take_number(whole_B)
        # What is not finite in one process is so for all: a document, say, of which one has lost
        # positions in its own columns.
        lost_B = ~sq_PB.isfinite().all(0)
        counted_PB = is_shard_P1 | lost_B | (self.mesh.get_local_rank() == 0)
        message = torch.cat(
            [
                torch.where(counted_PB, sq_PB, 0.0),  # not a product: 0 * inf is NaN
                torch.where(counted_PB, doubt_PB, 0.0),
                torch.stack([number_B, number_B.square(), whole_B, whole_B.square()]),
            ]
        )
        if B:
            dist.all_reduce(message, group=self.mesh.get_group())
        sq_PB, doubt_PB, alike_4B = message.split([P, P, 4])
        number_B, number_sq_B, whole_B, whole_sq_B = alike_4B
        ranks = self.mesh.size()
        # n Σ x² = (Σ x)² where all x are the same; of whole numbers exactly.
        check_on_device((ranks * number_sq_B == number_B.square()).all(), _OTHER_SAMPLES)
        spread_B = ranks * whole_sq_B - whole_B.square()
        alike_B = (spread_B <= _ALIKE**2 * whole_B.square()) | ~sq_PB.isfinite().all(0)
        check_on_device(alike_B.all(), _OTHER_GRADIENTS)
        return sq_PB.sqrt().to(norms_PB), Doubts([(keys, doubt_PB.to(norms_PB))], doubts.scale)


class TensorParallelTwoWalks(TensorParallelBackwardPass, ShardedTwoWalks):
    """Norms of a gradient of which processes have terms are taken once all of these are there."""

    def _measure(self, path: str, param: nn.Parameter, factor: PerSampleGrad) -> None:
        if self._is_term(id(param)):
            self._keep(path, param, DenseGrad(factor.dense()))
        else:
            super()._measure(path, param, factor)

    def _send_complete(self, params: Sequence[nn.Parameter]) -> None:
        """Not before the terms of other processes are there."""

    def add_clipped_sums(self) -> None:
        """As for any sharded model, once the terms of all processes are added up."""
        for key in self._terms_in(self._sums):
            self._sums[key] = self._sums[key].contiguous()
            dist.all_reduce(self._sums[key], group=self.mesh.get_group())
        super().add_clipped_sums()


#: By mode.
BACKWARD_PASSES = {"one_pass": TensorParallelBackwardPass, "two_pass": TensorParallelTwoWalks}
