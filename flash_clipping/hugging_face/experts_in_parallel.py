"""Experts in parallel: each process of a mesh has some of them, and tokens go to them.

Every process has samples of its own.

B samples of this process, M those of all processes of an expert mesh, E parameters of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from flash_clipping.capture.layer_inputs import positional
from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.backward_pass import ShardedBackwardPass
from flash_clipping.distributed.parameter_slots import ParameterSlots
from flash_clipping.distributed.reducer import Reducer
from flash_clipping.errors import FlashClippingError, InvalidValue, NotServed
from flash_clipping.factors import PerSampleGrad, merge
from flash_clipping.finish.backward_pass import Readers, stored_where_cheaper
from flash_clipping.finish.clipping import Doubts
from flash_clipping.hugging_face.experts import DbrxExpertsRule, ExpertsRule, Llama4ExpertsRule
from flash_clipping.hugging_face.losses import is_of
from flash_clipping.layers.by_rule import by_rule
from flash_clipping.layers.exchange import Samples
from flash_clipping.layers.mixture_of_experts import MixtureOfExpertsRule
from flash_clipping.rules import find_rule
from flash_clipping.rules.registry import Rule

_SERVED = (MixtureOfExpertsRule, ExpertsRule, DbrxExpertsRule, Llama4ExpertsRule)


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave every process its part of all experts of a model, in place.

    Supported: :class:`~flash_clipping.layers.MixtureOfExperts` and the stacked experts of
    ``transformers``. Their parameters become ``DTensor``s: of E experts on n processes the first
    has the first E/n, and so on. Give what this returns to ``fully_shard`` as ``ignored_params``,
    with the same mesh, for every block and for the model.

    Args:
        model: with the same weights in all processes; those of the first are taken.
        mesh: of one dimension, along which processes have other experts; or of two (data, expert):
            processes along the first have the same ones.

    Returns:
        The parameters of all experts.

    Raises:
        ValueError: there are no experts, or not as many in each process; or the mesh has another
            number of dimensions; or parameters are not there yet (``meta``).
        NotImplementedError: experts that are not supported.
    """
    if mesh.ndim > 2:
        raise InvalidValue(
            f"FC630 distribute_experts: found a mesh of {mesh.ndim} dimensions; expected (expert,) "
            "or (data, expert). Use init_device_mesh(device, (data, experts), mesh_dim_names=...)."
        )
    found: dict[int, nn.Parameter] = {}
    for path, module in [*model.named_modules()]:
        rule = find_rule(module)
        # Nothing compares experts over processes with their own forward, which goes.
        is_stacked = isinstance(rule, ExpertsRule)
        if type(rule) in _SERVED and (
            not is_stacked or is_of(type(module).forward, "transformers")
        ):
            _distribute(path or "the model", module, rule, mesh, found)
        elif is_stacked:
            raise NotServed(
                f"FC631 {path} ({type(module).__name__}): found adapters around experts, or a "
                "forward of your own, which are not built for experts in parallel. Distribute the "
                "experts of the plain model, or use "
                "flash_clipping.layers.MixtureOfExperts(..., rank=r)."
            )
    if not found:
        raise InvalidValue(
            f"FC630 {type(model).__name__}: found no experts to distribute; expected "
            "flash_clipping.layers.MixtureOfExperts, or stacked experts of transformers."
        )
    return {*found.values()}


def _distribute(
    path: str, layer: Any, rule: Any, mesh: DeviceMesh, found: dict[int, nn.Parameter]
) -> None:
    """Cut one layer; ``found`` has the parts of parameters by the ``id`` of the whole: tied ones
    stay tied."""
    experts, n = rule.described(layer).experts, mesh.size(mesh.ndim - 1)
    if experts % n:
        raise InvalidValue(
            f"FC630 {path}: found {experts} experts and {n} processes along the mesh's last "
            "dimension; expected as many experts in each. Use a mesh whose last dimension divides "
            f"{experts}."
        )
    if any(param.is_meta or isinstance(param, DTensor) for param in layer.parameters()):
        raise InvalidValue(
            f"FC630 {path}: found parameters on the meta device, or DTensors; expected whole ones. "
            "Call distribute_experts before fully_shard, on a model whose weights are loaded."
        )
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for module in layer.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in found:
                shard = distribute_tensor(param.detach(), mesh, placements)
                found[id(param)] = nn.Parameter(shard, requires_grad=param.requires_grad)
            module._parameters[name] = found[id(param)]
    layer.forward = ForwardByRule(layer, rule)


class ExpertsBackwardPass(ShardedBackwardPass):
    """Of a model with experts in parallel: rows of a sample reach several processes, and so does
    its gradient. Squared norms are added up over the expert mesh, and each process gets the
    coefficients of all samples that sent it rows: one all-reduce each."""

    def __init__(self, session: ClippingSession, slots: ParameterSlots, reducer: Reducer):
        super().__init__(session, slots, reducer)
        self._samples: Samples | None = None
        #: Of experts, by ``id``: the factors of all uses; squared norms ``[M]`` and what rounding
        #: may hide of them; coefficients ``[M]``.
        self._held: dict[int, list[PerSampleGrad]] = {}
        self._of_all: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._coefs: dict[int, Tensor] = {}

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[Any],
        readers: Readers | None = None,
    ) -> None:
        """Rows of experts come from all processes, also where this one has no samples."""
        if id(params[0]) not in self.slots.experts:
            super().record(path, params, factors, readers)
            return
        samples: Samples = factors[0].samples
        if self._samples is not None and self._samples.counts != samples.counts:
            raise FlashClippingError(
                f"FC633 {path}: found experts with rows of {samples.counts} samples in the "
                f"processes of their mesh, and of {self._samples.counts} in the same backward. "
                "Call backward() for each batch separately."
            )
        self._samples = samples
        if samples.own != self.batch_size:
            self._check_batch_size(path, samples.own)
        self.elsewhere += params
        whole: Sequence[PerSampleGrad] = [factor.whole for factor in factors]
        if readers is not None:
            call, place = readers
            count = partial(call.count_readers, place, params)
            whole = stored_where_cheaper(whole, count, self.backend)
        for param, factor in zip(params, whole, strict=True):
            self._held.setdefault(id(param), []).append(factor)

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        """Norms and doubts of all parameters; rows of experts hold nothing yet."""
        samples = self._samples
        if samples is None:
            return norms_PB, doubts
        for key in self._held:
            factor = merge(self._held[key])
            self._held[key] = [factor]
            self._of_all[key] = factor.sqnorms(self.backend), factor.error_bound(self.backend)
        sq_M, _ = next(iter(self._of_all.values()))
        nothing_M = sq_M.new_zeros(sum(samples.counts), dtype=torch.float64)
        experts = [id(param) for param in params if id(param) in self.slots.experts]
        found = [self._of_all.pop(key, (nothing_M, None)) for key in experts]
        rows = [sq_M.double() for sq_M, _ in found]
        rows += [nothing_M if doubt_M is None else doubt_M.double() for _, doubt_M in found]
        of_own = samples.added_up(torch.stack(rows))[:, : norms_PB.shape[1]]
        sq_EB, doubt_EB = of_own.chunk(2)
        dtype = torch.promote_types(norms_PB.dtype, sq_M.dtype)
        # A sum that cancels may come out below zero. An overflow is no such sum, and must not be 0.
        sq_EB = sq_EB.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.nan).clamp(min=0)
        norms_EB = (sq_EB.sqrt() * doubts.scale).to(dtype)
        norms = dict(zip(map(id, params), norms_PB.to(dtype), strict=True))
        norms.update(zip(experts, norms_EB, strict=True))
        blocks = [*doubts.blocks, (experts, doubt_EB.to(dtype))]
        return torch.stack([*norms.values()]), Doubts(blocks, doubts.scale)

    def take_norms(self) -> None:
        """And tell all processes of the mesh the coefficients of this one's samples."""
        super().take_norms()
        assert self.coef is not None
        if self._samples is None:
            return
        experts = [key for key in map(id, self.slots.recorded()) if key in self.slots.experts]
        rows = [self.coef.one] if self.coef.one is not None else [self.coef[k] for k in experts]
        of_all = self._samples.gathered(torch.stack(rows))
        self._coefs = dict(zip(experts, of_all.expand(len(experts), -1), strict=True))

    def _sums_of(self, part: tuple[int, ...]) -> dict[int, Tensor]:
        found = super()._sums_of(part)
        for key in part:
            if key in self._held:
                (factor,) = self._held.pop(key)
                found[key] = factor.clipped_sum(self._coefs[key], self.backend)
        return found

    def forget(self) -> None:
        super().forget()
        self._held.clear()
        self._of_all.clear()


class ForwardByRule:
    """The forward of experts in parallel, by their rule: under ordinary autograd, where a model is
    not wrapped. The sums of this process's experts are then left in their ``p.grad``, over the
    samples of all processes along the mesh's last dimension.

    Attributes:
        computes_rule: the rule, by which a wrapped model runs the layer.
        backward_passes: the classes of backward passes that a wrapped model needs, by mode.
    """

    backward_passes = {"one_pass": ExpertsBackwardPass}

    def __init__(self, layer: nn.Module, rule: Rule):
        self.layer, self.computes_rule = layer, rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computes_rule.call(self.layer, self._apply, args, kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        layer, rule = self.layer, self.computes_rule
        inputs = positional(layer, type(layer).__name__, rule, args, kwargs)
        if not rule.takes_samples:  # tokens: of one sample, as it does not matter here
            inputs = tuple(x.unsqueeze(0) for x in inputs)
        output: Tensor = by_rule(rule, layer, inputs, dict(layer.named_parameters()))
        return output if rule.takes_samples else output.squeeze(0)
