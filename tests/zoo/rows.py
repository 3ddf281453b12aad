"""Layers that read samples along another axis, in parts, or in another order.

Shape suffixes: B samples, T positions, d features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import Tensor, nn

from tests.support.models import squared_loss
from tests.support.uses import D, Holder
from tests.zoo.case import Batch, ModelCase, around
from tests.zoo.shared import Use, held, one, rows


def mix(layer: Callable[[], nn.Module] = lambda: nn.Linear(D, D)) -> Callable[[], dict[str, Any]]:
    return one(layer)


# -- exact ----------------------------------------------------------------------------------------


def time_first(m: Any, h: Tensor) -> Tensor:
    """``[T, B, d]``, as fairseq's models have it."""
    h = m.ffn(m.norm(h.transpose(0, 1))) * m.gain
    return torch.einsum("tbd,dhe->tbhe", h, m.weight).flatten(2).transpose(0, 1).contiguous()


def scores(m: Any, h: Tensor) -> Tensor:
    """The operation moves samples to the front; heads lie behind them: XLNet, SpeechT5."""
    B, T = h.shape[:2]
    found = torch.einsum("tbd,de->bte", h.transpose(0, 1), m.weight)
    by_head = h.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [T, BH, e]
    places = m.places(torch.arange(T)[:, None] + torch.arange(T))  # [T, T, e]
    biases = (by_head @ places.mT).transpose(0, 1).unflatten(0, (B, 2))  # [B, H, T, T]
    return found + biases.sum((1, 3))[..., None]


def blocks(m: Any, h: Tensor) -> Tensor:
    """One matrix for each head in front of all positions of all samples: RecurrentGemma."""
    rows_HNe = h.reshape(-1, 2, 3).transpose(0, 1)
    return torch.baddbmm(m.bias[:, None], rows_HNe, m.weight).transpose(0, 1).reshape(h.shape)


def turned(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.layer(h.transpose(0, 1))).transpose(0, 1)


def flat(m: Any, h: Tensor) -> Tensor:
    """Positions of all samples are one axis: OPT's feed-forward."""
    return h + m.layer(h.flatten(0, 1)).view_as(h)


def windows_in_front(m: Any, h: Tensor) -> Tensor:
    """``[windows, samples * positions, features]``."""
    x_WNd = h.unflatten(1, (3, -1)).transpose(0, 1).flatten(1, 2)
    return torch.tanh(m.layer(x_WNd)).unflatten(1, (len(h), -1)).transpose(0, 1).flatten(1, 2)


def windows_with_biases(m: Any, h: Tensor) -> Tensor:
    """Windows folded into the batch, with a table of biases by relative position, as Swin's."""
    found = h.unflatten(1, (-1, 4)).flatten(0, 1)
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in m.qkv(found).chunk(3, -1))
    places = torch.arange(4)
    bias = m.table[places[:, None] - places + 3].permute(2, 0, 1)
    weights = (m.scale * (q @ k.mT) + bias).softmax(-1)
    return h + (weights @ v).transpose(1, 2).flatten(2).view_as(h)


def places_added(m: Any, h: Tensor) -> Tensor:
    """To parts of samples: the choices of a question."""
    parts = h.unflatten(1, (2, -1)).flatten(0, 1)
    parts = parts + m.mlp(m.places(torch.arange(parts.shape[1])[None]).relu())
    return torch.tanh(parts).view_as(h)


def self_attention(m: Any, h: Tensor) -> Tensor:
    rows_ = h if m.layer.batch_first else h.transpose(0, 1)
    found = m.layer(rows_, rows_, rows_, need_weights=False)[0]
    return found if m.layer.batch_first else found.transpose(0, 1)


def attention(batch_first: bool) -> Callable[[], dict[str, Any]]:
    return one(lambda: nn.MultiheadAttention(D, 2, batch_first=batch_first))


def heads(scaled: bool) -> Use:
    """``torch.cat`` of heads along the batch: they meet parameters there if they are scaled."""

    def use(m: Any, h: Tensor) -> Tensor:
        q, k, v = (torch.cat(x.chunk(2, -1)) for x in m.qkv(h).chunk(3, -1))
        if scaled:
            q = m.layer(q)
        return torch.cat(((q @ k.mT).softmax(-1) @ v).chunk(2), -1)

    return use


def columns(m: Any, h: Tensor) -> Tensor:
    """A bare parameter meets rows that lie apart."""
    found = h.transpose(0, 1).flatten(0, 1) * m.gain
    return found.view(h.shape[1], -1, D).transpose(0, 1)


def types(order: str) -> Use:
    """Ids that are all alike, one for every position: gradients show whose they are."""

    def use(m: Any, h: Tensor) -> Tensor:
        ids = h[..., 0].long() * 0
        if order == "positions first":
            return h + m.layer(ids.T.flatten()).unflatten(0, ids.T.shape).transpose(0, 1)
        return h + m.layer(ids.flatten()).unflatten(0, ids.shape)

    return use


def mask_that_python_reads(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Integers are no values: models ask whether a mask has any 0."""
    return flat(m, h if mask.all() else h * mask[..., None])


def compared_beside(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what compares samples as well, which no loss reads."""
    found = flat(m, m.embed(x))
    return found, found.mean(1) @ found.mean(1).T


def contrasts(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings, and the similarities of all pairs: CLIP."""
    h = m.embed(x) * m.gain
    return h, h @ h.T * m.scale.exp() + m.shift


def of_contrasts() -> dict[str, Any]:
    return {
        "embed": nn.Linear(3, 4),
        "scale": torch.ones(()),
        "shift": torch.zeros(1),
        "gain": torch.randn(4),
    }


def output(number: int) -> Callable[[Any, Batch], Tensor]:
    return lambda model, batch: squared_loss(lambda *args: model(*args)[number], batch)


def views(m: Any, h: Tensor) -> Tensor:
    """One layer reads the samples, and two views of each; backward comes to the views first."""
    return m.layer(h) + m.layer(torch.cat([h, h]))[: len(h)]


def bags(number: int, flatly: bool) -> Use:
    """Several bags of ids in every sample, as rows of one call, or end to end."""

    def use(m: Any, ids: Tensor) -> Tensor:
        found = ids.unflatten(1, (number, -1)).flatten(0, 1)
        if flatly:
            found = m.bag(found.flatten(), torch.arange(0, found.numel(), found.shape[1]))
        else:
            found = m.bag(found)
        return m.head(found.unflatten(0, (len(ids), -1)).flatten(1))

    return use


def of_bags(number: int, frozen: bool) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "bag": nn.EmbeddingBag(9, 4, mode="sum"),
        "head": nn.Linear(4 * number, 3).requires_grad_(not frozen),
    }


def weighted_bags(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """With weights that a layer computes, and that are parameters."""
    weights = m.weigh(x).squeeze(-1)
    found = m.layer(ids, per_sample_weights=weights)
    return x + (found + m.layer(ids, per_sample_weights=m.of_ids[ids]))[:, None]


def of_weighted_bags(padding: int | None) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "layer": nn.EmbeddingBag(9, D, mode="sum", padding_idx=padding),
        "weigh": nn.Linear(D, 1),
        "of_ids": torch.rand(9),
    }


SHAPES = {"": (4, 5, 3), ", T is B": (5, 5, 3), ", one sample": (1, 5, 3)}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "layer norm": lambda: nn.LayerNorm(D),
}


def of_time_first() -> dict[str, Any]:
    weight, gain = torch.randn(D, 2, 3), torch.randn(D)
    return {"norm": nn.LayerNorm(D), "ffn": nn.Linear(D, D), "gain": gain, "weight": weight}


def of_places() -> dict[str, Any]:
    return {"places": nn.Embedding(20, D), "mlp": nn.Linear(D, D)}


EXACT: dict[str, ModelCase] = {
    **{
        f"{name}{shape}": around(
            use, build, batch=rows(*SHAPES[shape]), lengths=(4, 2), without=(*without,)
        )
        for shape in SHAPES
        for name, use, build, *without in (
            ("time first", time_first, of_time_first),
            (
                "scores",
                scores,
                lambda: {"weight": torch.randn(D, D), "places": nn.Embedding(40, 3)},
            ),
            (
                "blocks",
                blocks,
                lambda: {"weight": torch.randn(2, 3, 3), "bias": torch.randn(2, 3)},
            ),
            ("attention, time first", self_attention, attention(False), "functorch"),
            *((f"{kind}, turned", turned, mix(layer)) for kind, layer in KINDS.items()),
            *((f"{kind}, flat", flat, mix(layer)) for kind, layer in KINDS.items()),
        )
    },
    "two samples, turned": around(turned, mix(), batch=rows(2, 2, 3)),
    "bare parameter, turned": around(
        turned, lambda: {"layer": Holder(lambda m, x: x * m.v, v=torch.randn(D))}
    ),
    "windows in front": around(windows_in_front, mix(), batch=rows(3, 6, 3)),
    "windows with biases": around(
        windows_with_biases,
        lambda: {
            "qkv": nn.Linear(D, 3 * D),
            "table": torch.randn(7, 2),
            "scale": torch.ones(2, 1, 1),
        },
        batch=rows(3, 12, 3),
    ),
    "places added": around(places_added, of_places, batch=rows(3, 8, 3)),
    "heads without a parameter": around(
        heads(False), lambda: {"qkv": nn.Linear(D, 3 * D)}, batch=rows(3, 8, 3)
    ),
    "columns": around(
        columns,
        lambda: {"gain": torch.randn(D)},
        batch=rows(3, 8, 3),
        refused="FC201",
        alone=True,
    ),
    "types": around(types("samples first"), mix(lambda: nn.Embedding(2, D))),
    "a mask that Python reads": around(
        mask_that_python_reads,
        mix(),
        batch=lambda: (torch.randn(3, 2, 3), torch.tensor([[1, 0], [1, 1], [1, 1]])),
        without=("compiled",),
    ),
    "pairs that no loss reads": held(
        compared_beside,
        lambda: {"embed": nn.Linear(3, D), "layer": nn.Linear(D, D)},
        batch=rows(3, 2, 3),
        losses=output(0),
        without=("resized", "autocast"),
    ),
    "similarities that no loss reads": held(
        contrasts, of_contrasts, batch=rows(4, 3), losses=output(0)
    ),
    **{
        f"{number} bags{' end to end' * flatly}{', frozen head' * frozen}": held(
            bags(number, flatly),
            of_bags(number, frozen),
            batch=lambda number=number: (torch.randint(9, (4, 4 * number)),),
        )
        for number, flatly, frozen in (
            (2, False, False),
            (2, True, False),
            (4, True, False),
            (4, False, True),
        )
    },
    **{
        f"weighted bags, padding {padding}": around(
            weighted_bags,
            of_weighted_bags(padding),
            batch=lambda: (torch.randn(4, 5, 3), torch.randint(0, 9, (4, 5))),
            without=("autocast",),
        )
        for padding in (None, 3)
    },
}

# -- refused --------------------------------------------------------------------------------------


def in_order(choose: Callable[[Tensor], Tensor]) -> Use:
    """Samples in another order, and back."""

    def use(m: Any, x: Tensor) -> Tensor:
        order = choose(x)
        return m.layer(x[order])[order.argsort()]

    return use


def positions_first(m: Any, x: Tensor) -> Tensor:
    """As many rows for each sample, and not together."""
    T, B = x.shape[1], x.shape[0]
    return m.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (T, B)).transpose(0, 1)


def routed(choose: Callable[[Tensor, int], Tensor]) -> Use:
    """An expert for some tokens."""

    def use(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = choose(tokens[:, 0], len(x))
        return tokens.index_add(0, chosen, m.layer(tokens[chosen])).view_as(x)

    return use


OTHER: dict[str, Use] = {
    "sorted": in_order(lambda x: x.sum((1, 2)).argsort()),
    "shuffled": in_order(lambda x: torch.arange(len(x)).flip(0)),
    "positions first": positions_first,
    "routed": routed(lambda first, B: (first > first.median()).nonzero().squeeze(1)),
    "as many tokens as samples": routed(lambda first, B: first.topk(B).indices),
    "less their mean": lambda m, x: m.layer(x - x.mean(0)),
}


def windows(m: Any, h: Tensor) -> Tensor:
    """Windows of four positions in front of the samples: of a longer text, rows lie apart."""
    w_WBTd = h.unflatten(1, (-1, 4)).transpose(0, 1)
    return m.layer(w_WBTd.flatten(0, 1)).view(w_WBTd.shape).transpose(0, 1).flatten(1, 2)


def dilated(m: Any, h: Tensor) -> Tensor:
    """Every second position of all samples before the others: forecasting libraries."""
    z_TBd = h.transpose(0, 1)
    found = m.layer(torch.cat([z_TBd[::2], z_TBd[1::2]], 1))[0].unflatten(1, (2, len(h)))
    return found.permute(2, 0, 1, 3).flatten(1, 2)


APART: dict[str, tuple[Use, Callable[[], dict[str, Any]]]] = {
    "linear": (windows, mix()),
    "norm": (windows, mix(lambda: nn.LayerNorm(D))),
    "heads": (heads(True), lambda: {"qkv": nn.Linear(D, 3 * D), "layer": nn.Linear(3, 3)}),
    "recurrence": (dilated, mix(lambda: DPLSTM(D, D))),
}


def two_axes(m: Any, h: Tensor) -> Tensor:
    """One layer reads samples along the second axis, and halves of samples along the first."""
    halves = m.layer(h.unflatten(1, (2, -1)).flatten(0, 1)).view(h.shape)
    return halves + m.layer(h.transpose(0, 1)).transpose(0, 1)


def chosen(m: Any, h: Tensor) -> Tensor:
    places = h[:, 0, 0].argsort()
    out = m.layer(h.transpose(0, 1)[:, places])
    return torch.empty_like(out).index_copy(1, places, out).transpose(0, 1)


def of_neighbours(m: Any, h: Tensor) -> Tensor:
    """The second half of each sample's positions is that of its neighbour. In reverse order,
    without the last of three samples, neighbours are neighbours still."""
    B, T = h.shape[:2]
    neighbour = torch.arange(B) ^ 1
    neighbour[neighbour >= B] = B - 1
    return flat(m, torch.cat([h[:, : T // 2], h[neighbour, T // 2 :]], 1))


def token_of_frames(m: Any, x: Tensor) -> Tensor:
    """A class token in front of every frame; those of the first ``B`` frames are taken for the
    samples': the value that they should have, and other samples' rows. TimeSformer does it."""
    h = m.embed(x.flatten(0, 1))
    h = torch.cat([m.token.expand(len(h), -1, -1), h], 1)
    return m.head(
        h[: len(x), :1].square() + h[:, 1:].unflatten(0, x.shape[:2]).mean((1, 2))[:, None]
    )


def of_frames() -> dict[str, Any]:
    return {"token": torch.randn(1, 1, 4), "embed": nn.Linear(3, 4), "head": nn.Linear(4, 2)}


def some_samples(m: Any, ids: Tensor) -> Tensor:
    return m.b(m.a(ids[:2]).repeat(2, 1, 1))


def own_loss(m: Any, x: Tensor) -> Any:
    h, pairs = contrasts(m, x)
    return (h @ h.T).square().mean(), h, pairs


LAYER = mix()


def refused(use: Use, build: Callable[[], dict[str, Any]] = LAYER, **options: Any) -> ModelCase:
    return around(use, build, **{"refused": "FC201", **options})


REFUSED: dict[str, ModelCase] = {
    **{
        f"{name} {shape}": refused(
            use,
            batch=rows(*shape, 3),
            refused="FC201|FC202",
            match=r"layer \(Linear\): what it reads has|expected rounding alone",
        )
        for name, use in OTHER.items()
        for shape in ((5, 5), (6, 2))
    },
    **{
        f"{name} apart": refused(
            use,
            build,
            batch=rows(4, 8, 3),
            match=r"(?s)middle\.layer.*a sample's rows together.*mode=\"one_by_one\"",
            alone=True,
        )
        for name, (use, build) in APART.items()
    },
    "attention, turned": refused(
        lambda m, h: self_attention(m, h.transpose(0, 1)).transpose(0, 1),
        attention(True),
        batch=rows(5, 5, 3),
        match=r"layer.* what it reads has 5 rows",
    ),
    "two axes": refused(
        two_axes, batch=rows(4, 4, 3), match=r"(?s)layer.*mode=\"one_by_one\"", alone=True
    ),
    **{
        f"samples along the second axis, {name}": refused(
            use, batch=rows(3, 5, 3), match="middle|head"
        )
        for name, use in {
            "turned": lambda m, h: m.layer(h.transpose(0, 1)).roll(1, 1).transpose(0, 1),
            "chosen": chosen,
        }.items()
    },
    "neighbours": refused(
        of_neighbours, batch=rows(3, 2, 3), match=r"layer .* 6 rows for a batch of 3"
    ),
    "types apart": refused(
        types("positions first"),
        mix(lambda: nn.Embedding(2, D)),
        batch=rows(3, 4, 3),
        match="(?s)layer.*a sample's rows lie apart",
    ),
    "token of frames": held(
        token_of_frames,
        of_frames,
        batch=rows(3, 2, 4, 3),
        refused="FC201",
        match=r"token: .* rows that are booked to others",
        gate=True,
    ),
    "views apart": refused(
        views,
        match=r"(?s)layer \(\w+\): what it reads has 8 rows for a batch of 4, and 6 for a batch"
        r" of 3\n.*a sample's rows lie apart.*torch\.stack\(\[a, b\], 1\)\.flatten\(0, 1\) in place"
        r' of torch\.cat\(\[a, b\]\).*mode="one_by_one"',
        alone=True,
    ),
    "a tied table that reads some samples": held(
        some_samples,
        lambda: {"a": nn.Embedding(7, 3), "b": nn.Linear(3, 7, bias=False)},
        batch=lambda: (torch.randint(7, (4, 5)),),
        refused="FC201",
        match=r"a \(Embedding\): what it reads has 2 rows",
    ),
    "a loss of similarities": held(
        contrasts,
        of_contrasts,
        batch=rows(4, 3),
        losses=output(1),
        refused="FC210",
        gate=True,
        match="output 1: the outputs of a sample change",
    ),
    "its own loss of similarities": held(
        own_loss,
        of_contrasts,
        batch=rows(4, 3),
        losses=lambda model, batch: model(*batch)[0],
        refused="FC210",
        gate=True,
        match="output 2: the outputs of a sample change",
    ),
    "less their mean, before a parameter": held(
        lambda m, x: m.head(m.gain * (x - x.mean(0))),
        lambda: {"gain": torch.ones(3), "head": nn.Linear(3, 2)},
        batch=rows(4, 3),
        refused="FC202",
        match=r"head .* other values for the same samples",
    ),
    "rows of one sum and size": held(
        lambda m, x: m.last(F.layer_norm(x, x.shape[-1:]).roll(1, 0)),
        lambda: {"last": nn.Linear(8, 3)},
        batch=rows(4, 8),
        refused="FC202",
        match=r"last \(Linear\).* other values",
    ),
}

#: All rows of a batch of one sample are that sample's.
OF_ONE_SAMPLE = {
    f"{name} apart, of one sample": around(
        use, build, batch=rows(1, 8, 3), without=("padded", "resized")
    )
    for name, (use, build) in {**APART, "two axes": (two_axes, LAYER)}.items()
}

CASES: dict[str, ModelCase] = EXACT | OF_ONE_SAMPLE | REFUSED
