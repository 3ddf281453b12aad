"""``nn.MultiheadAttention`` as it is: its projections are tapped, its attention is ordinary.

Shape suffixes: ``B`` samples, ``L`` queries, ``S`` keys, ``E`` features, ``H`` heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad, StackedGrad, SumGrad
from flash_clipping.rules.linear import LinearRule
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    register_rule,
)


@register_rule(nn.MultiheadAttention)
class MultiheadAttentionRule(Rule):
    """``forward`` and ``backward`` are those of the input projections; ``out_proj`` has its tap."""

    allows_children = True

    def batch_axis(self, layer: nn.MultiheadAttention, default: int) -> int:
        return 0 if layer.batch_first else 1

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        return self._attend(layer, tapped, *args, **kwargs)

    def _attend(
        self,
        layer: nn.MultiheadAttention,
        tapped: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() != 3:
            raise UnsupportedLayer(
                "FC203 nn.MultiheadAttention without a batch axis has no samples: expected a query "
                f"of 3 dimensions, found shape {tuple(query.shape)}. Add the axis with unsqueeze.",
                "query, key, value = (x.unsqueeze(0) for x in (query, key, value))",
            )
        if is_causal and attn_mask is None:
            raise UnsupportedLayer(
                "FC118 nn.MultiheadAttention: is_causal=True needs attn_mask as well.",
                "attn_mask = torch.nn.Transformer.generate_square_subsequent_mask(query.shape[1])",
            )
        projected = tapped(query, key, value)
        if not layer.batch_first:
            projected = tuple(x.transpose(0, 1) for x in projected)
        q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in projected)
        extra = int(layer.bias_k is not None)
        if layer.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        mask = _additive_mask(attn_mask, key_padding_mask, q, extra)
        dropout = layer.dropout if layer.training else 0.0
        if need_weights:
            scores_BHLS = (q * q.shape[-1] ** -0.5) @ k.mT
            weights = torch.softmax(scores_BHLS if mask is None else scores_BHLS + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            heads = weights @ v
        else:
            weights = None
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = heads.transpose(1, 2).flatten(2)
        takes_batch_first = isinstance(
            layer.out_proj, NonDynamicallyQuantizableLinear
        )  # OutputRule
        if takes_batch_first:
            output = layer.out_proj(output)
        if not layer.batch_first:
            output = output.transpose(0, 1)
        if not takes_batch_first:
            output = layer.out_proj(output)
        # Positions lie before samples in memory, whatever ``batch_first`` is, as in PyTorch's own
        # attention: a dropout behind it draws by the place in memory.
        if layer.batch_first:
            output = output.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            output = output.contiguous()
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return output, weights

    def forward(
        self, layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        if layer.in_proj_weight is not None:
            weights = layer.in_proj_weight.chunk(3)
        else:
            weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        casted = autocast_operands(query, key, value, *weights)
        inputs, weights = casted[:3], casted[3:]
        if query is key and key is value:
            inputs = (inputs[0],) * 3
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        outputs = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            outputs.append(F.linear(x, weight, None if bias is None else bias.to(x.dtype)))
        for position, extra in ((1, layer.bias_k), (2, layer.bias_v)):
            if extra is not None:
                row = extra.to(outputs[position].dtype).expand(outputs[position].shape[0], 1, -1)
                outputs[position] = torch.cat([outputs[position], row], dim=1)
        return tuple(outputs), (*inputs, *weights)

    def backward(self, layer: Any, saved: Any, grad_output: Any, needs: GradRequest) -> Grads:
        inputs, weights = saved[:3], saved[3:]
        factors: dict[str, PerSampleGrad] = {}
        grads = list(grad_output)
        for position, name in ((1, "bias_k"), (2, "bias_v")):
            if getattr(layer, name) is not None:
                rows = grads[position]
                grads[position] = rows[:, :-1]
                if name in needs.params:
                    factors[name] = DenseGrad(rows[:, -1:].unsqueeze(1).clone())
        outers = [LinearGrad(x, G) for x, G in zip(inputs, grads, strict=True)]
        if "in_proj_weight" in needs.params:
            if len({outer.shares_input_with() for outer in outers}) == 1:  # they read one input
                factors["in_proj_weight"] = LinearGrad(inputs[0], torch.cat(grads, dim=-1))
            else:
                factors["in_proj_weight"] = StackedGrad(outers)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        for name, outer in zip(names, outers, strict=True):
            if name in needs.params:
                factors[name] = outer
        if "in_proj_bias" in needs.params:
            factors["in_proj_bias"] = DenseGrad(torch.cat([SumGrad(G).dense() for G in grads], 1))
        grad_inputs = tuple(
            G @ weight if wanted else None
            for G, weight, wanted in zip(grads, weights, needs.inputs, strict=True)
        )
        return grad_inputs, factors


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` by the functions that the rule is made of, each of which
    has a factor."""
    bound = _ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rule = MultiheadAttentionRule()
    layer: Any = SimpleNamespace(**given)  # what the rule reads of a layer
    layer.batch_first, layer.dropout = True, given["dropout_p"]
    layer.out_proj = lambda x: F.linear(x, given["out_proj_weight"], given["out_proj_bias"])
    if given["use_separate_proj_weight"]:
        layer.in_proj_weight = None
    named = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    output, weights = rule.call(
        layer,
        lambda *inputs: rule.forward(layer, *inputs)[0],
        tuple(given[name].transpose(0, 1) for name in ("query", "key", "value")),
        {name: given[name] for name in named},
    )
    return output.transpose(0, 1), weights


_ATTENTION = inspect.signature(F.multi_head_attention_forward)


@register_rule(NonDynamicallyQuantizableLinear)
class OutputRule(LinearRule):
    """``out_proj``, which gets the batch first, whatever the attention or the model has there."""

    def batch_axis(self, layer: nn.Linear, default: int) -> int:
        return 0


def _additive_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q_BHLE: Tensor, extra: int
) -> Tensor | None:
    """Both masks as one that is added to scores ``[B, H, L, S]``; ``True`` meant "not allowed".

    ``extra`` keys at the end (``bias_k``, ``add_zero_attn``) may always be attended to.
    """
    B, H, L, _ = q_BHLE.shape

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q_BHLE.dtype).masked_fill_(mask, float("-inf"))
        return F.pad(mask.to(q_BHLE.dtype), (0, extra))

    mask = None
    if attn_mask is not None:
        mask = additive(attn_mask)
        mask = mask if mask.dim() == 2 else mask.view(B, H, L, -1)
    if key_padding_mask is not None:
        padding = additive(key_padding_mask)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask
