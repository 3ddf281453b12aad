"""Layers leave their outputs in memory as PyTorch's own do: a dropout behind them draws by the
place in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils import _pytree as pytree

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.rules.registry import _RULES
from tests.support.autograd import check_with_dropout
from tests.support.wrapping import MODES

B, T, D = 3, 4, 6

Layers = dict[str, Callable[[], nn.Module]]

#: On ``[B, T, D]``, of which the second axis holds the channels, if there are any.
ROWS: Layers = {
    "linear": lambda: nn.Linear(D, 5),
    "linear without a bias": lambda: nn.Linear(D, 5, bias=False),
    "quantizable linear": lambda: NonDynamicallyQuantizableLinear(D, 5),
    "recurrent linear": lambda: RNNLinear(D, 5),
    "layer norm": lambda: nn.LayerNorm(D),
    "layer norm of two axes": lambda: nn.LayerNorm((T, D)),
    "rms norm": lambda: nn.RMSNorm(D),
    "group norm": lambda: nn.GroupNorm(2, T),
    "instance norm": lambda: nn.InstanceNorm1d(T, affine=True),
    "convolution": lambda: nn.Conv1d(T, 5, 3, padding=1),
    "weights that are computed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)),
    "generic": lambda: nn.PReLU(T),
}
#: With an option for where the samples are.
SEQUENCES: dict[str, Callable[[bool], nn.Module]] = {
    "attention": lambda first: nn.MultiheadAttention(D, 2, batch_first=first),
    "attention with more keys": lambda first: nn.MultiheadAttention(
        D, 2, batch_first=first, add_bias_kv=True, add_zero_attn=True
    ),
    "Opacus' attention": lambda first: DPMultiheadAttention(D, 2, batch_first=first),
    "bias of sequences": lambda first: SequenceBias(D, first),
    "lstm": lambda first: DPLSTM(D, 5, batch_first=first),
    "gru": lambda first: DPGRU(D, 5, batch_first=first),
    "rnn": lambda first: DPRNN(D, 5, batch_first=first),
    "encoder": lambda first: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=first),
    "linear": lambda first: nn.Linear(D, 5),
    "layer norm": lambda first: nn.LayerNorm(D),
}
IDS: Layers = {
    "embedding": lambda: nn.Embedding(9, D),
    "bags": lambda: nn.EmbeddingBag(9, D, mode="sum"),
}
IMAGES: Layers = {
    "convolution": lambda: nn.Conv2d(4, 8, 3, padding=1),
    "convolution of groups": lambda: nn.Conv2d(4, 8, 3, stride=2, groups=4),
    "circular convolution": lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"),
    "weights in another format": lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "linear": lambda: nn.Linear(6, 5),
    "generic": lambda: nn.ConvTranspose2d(4, 5, 3),
}
VOLUMES: Layers = {
    "convolution": lambda: nn.Conv3d(2, 4, 3, padding=1),
    "group norm": lambda: nn.GroupNorm(2, 2),
    "instance norm": lambda: nn.InstanceNorm3d(2, affine=True),
}


def inputs_of(*shape: int, kind: Callable[..., Tensor] = torch.randn) -> Iterator[Tensor]:
    """Tensors of one shape, in memory in several ways."""
    yield kind(*shape)
    order = [*range(len(shape))]
    for turned in ([1, 0, *order[2:]], [*order[:-2], order[-1], order[-2]], [0, *order[2:], 1]):
        back = [turned.index(axis) for axis in order]
        yield kind(*(shape[axis] for axis in turned)).permute(back)
    yield kind(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    yield kind(1, *shape[1:]).expand(shape)


def strides(output: Any) -> list[Any]:
    return [(x.shape, x.stride()) for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def check(
    make: Callable[[], nn.Module], calls: Sequence[tuple[Any, ...]], batch_first: bool = True
) -> None:
    """All calls of one layer, twice: a layer has a long way and a short one."""
    torch.manual_seed(0)
    layer = make()
    plain = copy.deepcopy(layer)
    flash = GradSampleModuleFlashClipping(layer, batch_first=batch_first, strict=False)
    for inputs in [*calls, *calls]:
        output = flash(*inputs)
        assert strides(output) == strides(plain(*inputs))
        parts = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        sum(x.sum() for x in parts if x.requires_grad).backward()  # type: ignore[union-attr]
        layer.zero_grad(set_to_none=True)


def test_layers_of_rows_keep_the_strides_of_pytorch() -> None:
    for make in ROWS.values():
        check(make, [(x,) for x in inputs_of(B, T, D)])


@pytest.mark.parametrize("first", [True, False])
def test_layers_of_sequences_keep_the_strides_of_pytorch(first: bool) -> None:
    for make in SEQUENCES.values():
        given = [x if first else x.transpose(0, 1) for x in inputs_of(B, T, D)]
        calls: list[tuple[Any, ...]] = [(x,) for x in given]
        if isinstance(make(first), nn.MultiheadAttention | DPMultiheadAttention):
            calls = [(x, x, x, None, n % 2 > 0) for n, x in enumerate(given)]
        check(lambda: make(first), calls, batch_first=first)  # noqa: B023


def test_layers_of_ids_images_and_volumes_keep_the_strides_of_pytorch() -> None:
    def ids(*shape: int) -> Tensor:
        return torch.randint(0, 9, shape)

    for make in IDS.values():
        check(make, [(x,) for x in inputs_of(B, T, kind=ids)])
    for layers, shape in ((IMAGES, (B, 4, 6, 6)), (VOLUMES, (B, 2, 4, 4, 4))):
        for make in layers.values():
            check(make, [(x,) for x in inputs_of(*shape)])


def test_every_rule_for_a_layer_of_torch_or_opacus_is_looked_at() -> None:
    made = [make() for layers in (ROWS, IDS, IMAGES, VOLUMES) for make in layers.values()]
    made += [make(True) for make in SEQUENCES.values()]
    seen = {type(part) for layer in made for part in layer.modules()}
    ruled = {kind for kind in _RULES if isinstance(kind, type)}
    assert {kind for kind in ruled if kind.__module__.startswith(("torch.", "opacus."))} <= seen


class DroppedBehind(nn.Module):
    """Dropout of what an attention returns, as HTDemucs has it in its cross layers."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed, self.head = nn.Linear(3, D), nn.Linear(D, 2)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        x = x + self.drop(self.attention(x, x, x, need_weights=False)[0])
        return self.head(x if self.batch_first else x.transpose(0, 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_behind_an_attention_draws_what_it_draws_for_the_plain_model(
    batch_first: bool, mode: str
) -> None:
    torch.manual_seed(0)
    model = DroppedBehind(batch_first).double()
    batch = (torch.randn(B, T, 3, dtype=torch.float64),)

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch).flatten(1).square().sum(1)

    check_with_dropout(model, batch, losses, mode=mode)
