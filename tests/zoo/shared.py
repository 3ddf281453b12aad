"""Parameters with several uses, of one module or of several; and parameters that are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from tests.support.hugging_face import gpt2
from tests.support.models import Gain, squared_loss
from tests.support.uses import D, Holder, Scaling
from tests.zoo.case import Batch, ModelCase, around

Use = Callable[..., Any]


def ids(rows: int = 4, length: int = 5, vocabulary: int = 9) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, vocabulary, (rows, length)),)


def rows(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(*shape),)


def held(use: Use, build: Callable[[], dict[str, Any]], **options: Any) -> ModelCase:
    """A model that is a function of what it holds."""
    return ModelCase(lambda: Holder(use, **build()), **options)


# -- one layer several times ----------------------------------------------------------------------


def twice(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.layer(torch.tanh(m.layer(x))))


def twice_over_channels(m: Any, x: Tensor) -> Tensor:
    return twice(m, x.mT).mT


def recomputed(reentrant: bool) -> Use:
    """One use is recomputed in backward, the others are not."""

    def use(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.layer(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(m.layer, x, use_reentrant=reentrant))
        return x

    return use


def one(layer: Callable[[], nn.Module]) -> Callable[[], dict[str, Any]]:
    return lambda: {"layer": layer()}


TWICE: dict[str, ModelCase] = {
    "linear twice": around(twice, one(lambda: nn.Linear(D, D))),
    "linear thrice on long samples": around(
        lambda m, x: twice(m, m.layer(x)), one(lambda: nn.Linear(D, D)), batch=rows(3, 20, 3)
    ),
    "convolution twice": around(twice_over_channels, one(lambda: nn.Conv1d(D, D, 3, padding=1))),
    "layer norm twice": around(twice, one(lambda: nn.LayerNorm(D))),
    "group norm twice": around(twice_over_channels, one(lambda: nn.GroupNorm(2, D))),
    **{
        f"{name}, {kind} checkpoint": around(
            recomputed(kind == "reentrant"), one(layer), without=("checkpointed", "compiled")
        )
        for kind in ("reentrant", "other")
        for name, layer in {"linear": lambda: nn.Linear(D, D), "gain": lambda: Gain(D)}.items()
    },
}

# -- tied parameters ------------------------------------------------------------------------------


def tied(a: nn.Module, b: nn.Module, *names: str) -> dict[str, Any]:
    """Two layers, of which the second has these parameters of the first."""
    for name in names:
        setattr(b, name, getattr(a, name))
    return {"a": a, "b": b}


def one_bias_for_three() -> dict[str, Any]:
    """Of a linear layer, a convolution and a LayerNorm."""
    found = tied(nn.Linear(D, D), nn.Conv1d(D, D, 3, padding=1), "bias")
    return found | {"norm": tied(found["a"], nn.LayerNorm(D), "bias")["b"]}


def three_kinds() -> dict[str, Any]:
    """One square matrix as ``Linear``, as ``transformers``' ``Conv1D`` and as an embedding."""
    found = tied(nn.Embedding(5, 5), nn.Linear(5, 5), "weight")
    return found | {"c": tied(found["a"], Conv1D(5, 5), "weight")["b"]}


def bias_that_is_a_weight() -> dict[str, Any]:
    norm = nn.LayerNorm(D)
    norm.bias = norm.weight
    return {"layer": norm}


def language(padding: int | None = None) -> dict[str, Any]:
    """An embedding whose table is also the output head."""
    found = tied(nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 9, bias=False), "weight")
    return found | {"hidden": nn.Linear(6, 6), "positions": torch.randn(5, 6)}


def head(m: Any, ids: Tensor) -> Tensor:
    return m.b(torch.tanh(m.hidden(m.a(ids))))


def head_twice(m: Any, ids: Tensor) -> Tensor:
    x = m.a(ids) + m.a(ids.flip(1))
    return torch.cat([m.b(torch.tanh(m.hidden(x))), m.b(x)], 1)


def attending() -> dict[str, Any]:
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    return {"attention": attention} | tied(attention.out_proj, nn.Linear(D, D), "weight")


def attend_recomputed(m: Any, x: Tensor) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        return m.attention(x, x, x, need_weights=False)[0]

    return m.b(checkpoint(attend, x, use_reentrant=True))


TIED: dict[str, ModelCase] = {
    "one bias for three": around(lambda m, x: m.norm(x + m.b(m.a(x).mT).mT), one_bias_for_three),
    "three kinds": held(
        lambda m, ids: m.c(torch.tanh(m.b(torch.tanh(m.a(ids))))),
        three_kinds,
        batch=ids(4, 6, 5),
    ),
    "a bias that is the weight": around(lambda m, x: m.layer(x), bias_that_is_a_weight),
    "head": held(head, language, batch=ids(), always=("units",)),
    "head, a padding row": held(head, lambda: language(2), batch=ids()),
    "head, bare positions": held(
        lambda m, ids: m.b(torch.tanh(m.hidden(m.a(ids) + m.positions))), language, batch=ids()
    ),
    "head twice": held(head_twice, language, batch=ids()),
    "head, as a function": held(
        lambda m, ids: F.linear(torch.tanh(m.hidden(m.a(ids))), m.a.weight),
        language,
        batch=ids(),
    ),
    "a bias past all functions": held(
        lambda m, ids: m.b(Scaling.apply(m.hidden(m.a(ids)), m.hidden.bias)),
        language,
        batch=ids(),
        refused="FC140",
        alone=True,
    ),
    "output of attention in a checkpoint": around(
        attend_recomputed, attending, without=("checkpointed", "compiled", "functorch")
    ),
}

# -- parameters of another module -----------------------------------------------------------------


def mixer(m: Any, h: Tensor) -> Tensor:
    """Layers, and their parameters by themselves as well, as state-space models use them."""
    padded = F.pad(h.mT, (1, 0))
    h = F.conv1d(padded, m.conv.weight, m.conv.bias, groups=D).mT
    h = m.step(h) - m.step.bias + h @ m.step.weight.T
    return h * torch.sigmoid(m.decay + m.step.bias.to(h.dtype))


def detr(m: Any, h: Tensor) -> Tensor:
    """Learned queries in a table that is never called."""
    queries = m.table.weight.unsqueeze(0).repeat(len(h), 1, 1)
    return torch.softmax(queries @ h.mT, -1) @ h + queries


def normed_table(m: Any, h: Tensor) -> Tensor:
    """A table that is never called goes through layers, as DeBERTa's relative places do."""
    keys = m.keys(m.norm(m.table.weight).unsqueeze(0))
    return torch.tanh(h @ keys.mT)


BORROWED: dict[str, ModelCase] = {
    "mixer": around(
        mixer,
        lambda: {
            "step": nn.Linear(D, D),
            "conv": nn.Conv1d(D, D, 2, groups=D),
            "decay": torch.randn(D),
        },
    ),
    "queries of a table": around(detr, lambda: {"table": nn.Embedding(5, D)}),
    "normed table": around(
        normed_table,
        lambda: {"table": nn.Embedding(D, D), "norm": nn.LayerNorm(D), "keys": nn.Linear(D, D)},
    ),
}

# -- a model that is called twice -----------------------------------------------------------------


def siamese(model: Any, batch: Batch) -> Tensor:
    """The two uses of a sample are one gradient; their lengths may differ."""
    left, right = batch
    return squared_loss(lambda *both: model(both[0]).mean(1) - 0.5 * model(both[1]).mean(1), batch)


def pairs(length: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(4, 7, 4), torch.randn(4, length, 4))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))


#: Each call is a batch of its own.
ONE_CALL = ("empty",)
SIAMESE: dict[str, ModelCase] = {
    "two calls": ModelCase(mlp, pairs(7), siamese, without=ONE_CALL, always=("units",)),
    "two calls of other lengths": ModelCase(mlp, pairs(3), siamese, without=ONE_CALL),
}

# -- what is trained, and what is not -------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen map with an update of low rank beside it, of layers or of bare parameters."""

    def __init__(self, base: nn.Module, d: int, p: int, bare: bool) -> None:
        super().__init__()
        self.base, self.bare = base.requires_grad_(False), bare
        self.down: Any = nn.Linear(d, 2, bias=False)
        self.up: Any = nn.Linear(2, p, bias=False)
        if bare:
            self.down, self.up = (nn.Parameter(m.weight.detach().T) for m in (self.down, self.up))

    def forward(self, x: Tensor) -> Tensor:
        if self.bare:
            return self.base(x) + 2.0 * (x @ self.down @ self.up)
        return self.base(x) + 2.0 * self.up(self.down(x))


def adapted(bare: bool) -> nn.Module:
    """Adapters in every attention block of a frozen GPT-2."""
    model = gpt2().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, 8, 24, bare)
        block.mlp.c_fc = LoRA(block.mlp.c_fc, 8, 32, bare)
    return model


def only_biases() -> nn.Module:
    model = gpt2()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    return model


def logits_loss(model: Any, batch: Batch) -> Tensor:
    return squared_loss(lambda *args: model(*args).logits, batch)


def prompted(m: Any, tokens: Tensor) -> Tensor:
    """Vectors that the root owns, before a frozen model."""
    embedded = m.body.transformer.wte(tokens)
    prompt = m.prompt.expand(len(tokens), -1, -1)
    return m.body(inputs_embeds=torch.cat([prompt, embedded], dim=1)).logits


TOKENS = ids(4, 6, 17)
FROZEN: dict[str, ModelCase] = {
    "biases alone": ModelCase(only_biases, TOKENS, logits_loss, always=("units",)),
    "adapters": ModelCase(lambda: adapted(False), TOKENS, logits_loss),
    "bare adapters": ModelCase(lambda: adapted(True), TOKENS, logits_loss),
    "prompts": held(
        prompted,
        lambda: {"body": gpt2().requires_grad_(False), "prompt": torch.randn(2, 8) * 0.5},
        batch=TOKENS,
    ),
}

CASES: dict[str, ModelCase] = TWICE | TIED | BORROWED | SIAMESE | FROZEN
