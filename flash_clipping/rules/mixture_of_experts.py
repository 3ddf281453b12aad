"""Our own mixture of experts: a segment of rows for every expert and sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

from flash_clipping.layers import MixtureOfExperts
from flash_clipping.layers.routed_rows import gradients
from flash_clipping.rules.experts import factors_of
from flash_clipping.rules.registry import GradRequest, Grads, Rule, UnsupportedLayer, register_rule


@register_rule(MixtureOfExperts)
class MixtureOfExpertsRule(Rule):
    """The layer's own arithmetic both ways, and factors in the place of sums over all rows."""

    folds = True  # tokens [B·T, d], as blocks of transformers hand them on
    takes_samples = True
    allows_computed = True  # a frozen base that is kept in fewer bits, beside LoRA

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(
        self, layer: Any, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        if parametrize.is_parametrized(layer):
            _refuse_computed(layer)
        try:
            output: tuple[Tensor, tuple[Any, ...]] = layer.compute(x, expert_ids, weights)
        except ValueError as error:
            raise UnsupportedLayer(str(error)) from error
        return output

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x_wanted, _, weights_wanted = needs.inputs
        grad_x, grad_weights, found = gradients(
            layer.arithmetic, saved, grad_output, needs.params, x_wanted, weights_wanted
        )
        return (grad_x, None, grad_weights), factors_of(found)


def _refuse_computed(layer: Any) -> None:
    """Refuse matrices that are computed from something trainable.

    Raises:
        UnsupportedLayer: there are some.
    """
    for name, computed in layer.parametrizations.items():
        if any(param.requires_grad for param in computed.parameters()):
            raise UnsupportedLayer(
                f"its {name} is computed by torch.nn.utils.parametrize from trainable parameters, "
                "which have no per-sample gradients there; expected a frozen base. Freeze it "
                "(LoRA beside it, rank=, is trained).",
                f"{{layer}}.parametrizations.{name}.requires_grad_(False)",
            )
