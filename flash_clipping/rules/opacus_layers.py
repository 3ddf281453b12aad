"""Layers that Opacus brings: ``DPRNN/DPGRU/DPLSTM`` and ``SequenceBias``.

``RNNLinear`` is a linear layer that is used at every time step.

The uses of one weight are laid end to end along ``T`` when a pass ends. With packed sequences a
step holds only the first rows of the batch, and the rows may be sorted by length; factors put them
back where the samples are in the user's batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad
from flash_clipping.rules.linear import LinearRule
from flash_clipping.rules.registry import GradRequest, Grads, Rule, register_rule

#: (samples in the batch, where sorted row i belongs, the packed rows) while a packed sequence is
#: processed.
_PACKED: ContextVar[tuple[int, Tensor | None, Tensor] | None] = ContextVar("_PACKED", default=None)


@contextmanager
def packed_rows(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Tell the layers inside a recurrent network which samples their rows belong to."""
    sequence = args[0] if args else kwargs.get("input")
    if not isinstance(sequence, PackedSequence):
        yield
        return
    samples = int(sequence.batch_sizes[0])
    token = _PACKED.set((samples, sequence.sorted_indices, sequence.data))
    try:
        yield
    finally:
        _PACKED.reset(token)


@register_rule(RNNLinear)
class RNNLinearRule(LinearRule):
    """Rows are samples: one time step at a time, whatever the model's ``batch_first``."""

    def can_be_traced(self, layer: Any) -> bool:
        return False

    def batch_axis(self, layer: Any, default: int) -> int:
        return 0

    def rows(self, layer: Any, *inputs: Any) -> tuple[int, Tensor, bool] | None:
        packed = _PACKED.get()
        # The first states are zeros for whichever rows come first: the sequence says whose.
        return None if packed is None else (packed[0], packed[2], False)

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        output, saved = super().forward(layer, x)
        packed = _PACKED.get()
        batch_size, order_B = packed[:2] if packed is not None else (x.shape[0], None)
        return output, (*saved, order_B, batch_size)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        *saved_linear, order_B, batch_size = saved
        grad_input, factors = super().backward(layer, tuple(saved_linear), grad_output, needs)
        if order_B is None and batch_size == grad_output.shape[0]:
            return grad_input, factors

        def place(rows: Tensor) -> Tensor:
            full, count = rows.new_zeros(batch_size, *rows.shape[1:]), len(rows)
            full[slice(count) if order_B is None else order_B[:count]] = rows
            return full

        placed: dict[str, PerSampleGrad] = {}
        for name, factor in factors.items():
            if isinstance(factor, LinearGrad):
                placed[name] = LinearGrad(place(factor.A_BTd), place(factor.G_BTp))
            else:
                placed[name] = DenseGrad(place(factor.dense()))
        return grad_input, placed


@register_rule(SequenceBias)
class SequenceBiasRule(Rule):
    """One learned position behind the sequence (``add_bias_kv``): ``g_b = G_b,T``."""

    def batch_axis(self, layer: SequenceBias, default: int) -> int:
        return 0 if layer.batch_first else 1

    def forward(self, layer: SequenceBias, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        return torch.cat([x, layer.bias.expand(x.shape[0], 1, -1)], dim=1), ()

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        return grad_output[:, :-1], {"bias": DenseGrad(grad_output[:, -1].clone())}
