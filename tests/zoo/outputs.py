"""What a model returns: objects, parameters, views that were changed, several rows of a sample."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import squared_loss
from tests.support.uses import D, Data, Holder
from tests.zoo.case import Batch, ModelCase, around
from tests.zoo.shared import held, rows

Named = collections.namedtuple("Named", "a b")


def pack_of_model_output(y: Tensor, z: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return y, BaseModelOutput(last_hidden_state=z)


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
OPEN: dict[str, tuple[Pack, Unpack]] = {
    "dataclass": (Data, lambda o: (o.a, o.b)),
    "in_a_dict": (
        lambda y, z: {"y": y, "z": {"q": Data([z])}},
        lambda o: (o["y"], o["z"]["q"].a[0]),
    ),
    "named_tuple": (lambda y, z: Named(y, Data(z)), lambda o: (o.a, o.b.a)),
    "object": (lambda y, z: [y, types.SimpleNamespace(a=z)], lambda o: (o[0], o[1].a)),
    "user_dict": (
        lambda y, z: collections.UserDict(y=y, z=[z]),
        lambda o: (o["y"], o["z"][0]),
    ),
    "distribution": (
        lambda y, z: (y, torch.distributions.Normal(z, 1.0)),
        lambda o: (o[0], o[1].loc),
    ),
    "model_output": (pack_of_model_output, lambda o: (o[0], o[1].last_hidden_state)),
}
CLOSED: dict[str, tuple[Pack, Unpack]] = {
    "closure": (lambda y, z: (y, lambda: z), lambda o: (o[0], o[1]())),
    "set": (lambda y, z: (y, {z}), lambda o: (o[0], next(iter(o[1])))),
    "only_a_closure": (lambda y, z: lambda: (y, z), lambda o: o()),
}


def with_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return {"mean": m.decode(torch.tanh(m.encode(x))), "sigma": m.sigma}


def with_computed_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return with_sigma(m, x) | {"sigma": m.sigma.exp()}


def with_rows_of_sigma(m: Any, x: Tensor) -> dict[str, Tensor]:
    return with_sigma(m, x) | {"sigma": m.sigma.expand(len(x), -1)}


def returns(pack: Pack) -> Callable[..., Any]:
    def use(m: Any, x: Tensor) -> Any:
        h = torch.tanh(m.first(x))
        return pack(m.a(h), m.b(h))

    return use


def of_both(unpack: Unpack) -> Callable[[Any, Batch], Tensor]:
    def losses(model: Any, batch: Batch) -> Tensor:
        y, z = unpack(model(*batch))
        return squared_loss(lambda *_: y, batch) + squared_loss(lambda *_: torch.tanh(z), batch)

    return losses


def two_outputs() -> dict[str, Any]:
    return {"first": nn.Linear(3, D), "a": nn.Linear(D, D), "b": nn.Linear(D, D)}


def likelihood(model: Any, batch: Batch) -> Tensor:
    found = model(*batch)
    sigma = found["sigma"]
    return ((found["mean"] - batch[0]).square() / sigma.square() + sigma.log()).sum(1)


def scores_masked_in_place(m: Any, x: Tensor) -> Tensor:
    """As Funnel's: by an ``einsum``, whose result is a view."""
    heads = x.unflatten(-1, (2, -1))
    scores = torch.einsum("binh,tnh->bnit", heads, m.kernel)
    shifted = scores[..., 1:, :]
    shifted *= torch.linspace(0.5, 1.5, D, dtype=x.dtype)
    return scores


class Bias(nn.Module):
    """``folded``: it returns a row for every head of every sample."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.folded, self.bias = folded, nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.bias.repeat(len(x), 1) if self.folded else self.bias
        y, _ = torch.max(x.mT * self.bias.sum(0), -1)
        return y, bias


def scaled_by_bias(m: Any, x: Tensor) -> Tensor:
    y, bias = m.bias(x)
    scale = bias.view(len(x), 2, 5).sum((1, 2)) if m.bias.folded else bias.sum((-1, -2))
    return y * scale.unsqueeze(-1)


def streams_mixed(m: Any, x: Tensor) -> Tensor:
    """Streams of each sample lie in the batch axis, as those of hyper-connections."""
    count = m.mix.middle
    found = m.mix(torch.tanh(x).repeat_interleave(count, 0))
    return torch.tanh(found).unflatten(0, (-1, count)).sum(1)


def of_streams(count: int) -> dict[str, Any]:
    def use(m: Any, x: Tensor) -> Tensor:
        streams = x.unflatten(0, (-1, count))
        return torch.einsum("bsd,st->btd", streams, m.weight).flatten(0, 1)

    mix = Holder(use, weight=torch.randn(count, count))
    mix.middle = count
    return {"mix": mix}


#: Losses of samples need a row of each output for each sample.
WHOLE = ("two_pass", "one_by_one")
FUNCTORCH = {"force_functorch": True}
CASES: dict[str, ModelCase] = {
    **{
        f"in a {name}": held(
            returns(pack),
            two_outputs,
            batch=rows(4, 5, 3),
            losses=of_both(unpack),
            without=("empty",) if name == "distribution" else (),  # it refuses what is not finite
        )
        for name, (pack, unpack) in OPEN.items()
    },
    **{
        f"in a {name}": held(
            returns(pack),
            two_outputs,
            batch=rows(4, 5, 3),
            losses=of_both(unpack),
            without=("two_pass", "one_by_one"),
        )
        for name, (pack, unpack) in CLOSED.items()
    },
    **{
        f"{use.__name__}, {length}": held(
            use,
            lambda length=length: {
                "sigma": torch.rand(length) + 0.5,
                "encode": nn.Linear(length, D),
                "decode": nn.Linear(D, length),
            },
            batch=rows(4, length),
            losses=likelihood,
            without=WHOLE,
        )
        for use, length in (
            (with_sigma, D),
            (with_sigma, 4),  # as many as samples
            (with_computed_sigma, 4),
            (with_rows_of_sigma, D),
        )
    },
    "a view of an einsum, changed": around(
        scores_masked_in_place, lambda: {"kernel": torch.randn(D, 2, D // 2)}
    ),
    **{
        f"a bias beside samples, folded {folded}": around(
            scaled_by_bias, lambda folded=folded: {"bias": Bias(folded)}, options=FUNCTORCH
        )
        for folded in (True, False)
    },
    "streams": around(streams_mixed, lambda: of_streams(3), batch=rows(5, 3), options=FUNCTORCH),
}
