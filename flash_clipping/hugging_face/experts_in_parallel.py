"""Experts in parallel: each process of a mesh has some of them, and tokens go to them.

Every process has samples of its own. What is recorded of experts is in ``experts_backward.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from flash_clipping.capture.layer_inputs import positional
from flash_clipping.errors import InvalidValue, NotServed
from flash_clipping.hugging_face.experts import DbrxExpertsRule, ExpertsRule, Llama4ExpertsRule
from flash_clipping.hugging_face.experts_backward import ExpertsBackwardPass
from flash_clipping.layers.by_rule import by_rule
from flash_clipping.layers.mixture_of_experts import MixtureOfExpertsRule
from flash_clipping.rules import find_rule
from flash_clipping.rules.registry import Rule, UnsupportedLayer

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
            number of dimensions; or parameters are not there yet (``meta``), or not finite.
        NotImplementedError: experts that are not supported, or that compute something else.
    """
    if mesh.ndim > 2:
        raise InvalidValue(
            f"FC630 distribute_experts: found a mesh of {mesh.ndim} dimensions; expected (expert,) "
            "or (data, expert). Use init_device_mesh(device, (data, experts), mesh_dim_names=...)."
        )
    found: dict[int, nn.Parameter] = {}
    for path, module in [*model.named_modules()]:
        rule = find_rule(module)
        if type(rule) in _SERVED:
            _distribute(path or "the model", module, rule, mesh, found)
        elif isinstance(rule, ExpertsRule):
            raise NotServed(
                f"FC631 {path} ({type(module).__name__}): found adapters around experts, which are "
                "not built for experts in parallel. Distribute the experts of the plain model, or "
                "use flash_clipping.layers.MixtureOfExperts(..., rank=r)."
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
    if isinstance(rule, ExpertsRule):
        _compare(path, layer, rule, experts)
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


def _compare(path: str, layer: Any, rule: ExpertsRule, experts: int) -> None:
    """See that a layer computes what its rule does, while all of its matrices are here: a token for
    every expert."""
    tensors, arithmetic, *_ = rule.described(layer)
    matrices, *_ = arithmetic(tensors).first.Ws_Epd
    tokens = torch.arange(experts * matrices.shape[2], device=matrices.device) * 0.7
    x_1Ed = tokens.sin().to(matrices.dtype).view(1, experts, -1)
    routes: tuple[Tensor, ...] = ()
    if not isinstance(rule, Llama4ExpertsRule):  # whose tokens tell by their places where they go
        ids_E = torch.arange(experts, device=matrices.device)
        routes = ids_E.view(1, -1, 1), torch.ones_like(x_1Ed[..., :1])
    try:
        with torch.no_grad():
            rule.forward(layer, x_1Ed, *routes)
    except UnsupportedLayer as error:
        raise NotServed(f"{path}: {error}") from error
    if layer not in rule.checked:
        raise InvalidValue(
            f"FC632 {path}: found experts that give what is not finite, for tokens of ordinary "
            "size. Load their weights before distribute_experts."
        )


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
