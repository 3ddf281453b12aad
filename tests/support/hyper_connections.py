"""Hyper-connections written out for one position at a time, and left to autograd: the truth.

B samples, S positions, n streams, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("phi", "alpha", "bias", "gamma")


class Params(NamedTuple):
    phi: Tensor
    alpha: Tensor
    bias: Tensor
    gamma: Tensor


def params_of(n: int, D: int, seed: int = 0, sharpness: float = 1.0) -> Params:
    """Random ones in fp32, nothing at its initial value; logits of ``comb`` are about as large as
    ``sharpness``."""
    generator = torch.Generator().manual_seed(seed)
    m = n * n + 2 * n
    phi = torch.randn(m, n * D, generator=generator) / (n * D) ** 0.5
    bias = torch.randn(m, generator=generator) / 2
    gamma = 1 + torch.randn(n, D, generator=generator) / 2
    return Params(phi, torch.tensor([1.1, 0.9, 1.05 * sharpness]), bias, gamma)


def connect(
    x_nD: Tensor,
    params: Params,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, Tensor]:
    """``h [D], post [n], comb [n, n]`` of one position."""
    n = x_nD.shape[0]
    rms = torch.sqrt(torch.mean(x_nD * x_nD) + norm_eps)
    products = torch.mv(params.phi, (x_nD * params.gamma).flatten())
    t = products / rms
    pre = [torch.sigmoid(params.alpha[0] * t[i] + params.bias[i]) + hc_eps for i in range(n)]
    post = [2 * torch.sigmoid(params.alpha[1] * t[n + i] + params.bias[n + i]) for i in range(n)]
    logits = params.alpha[2] * t[2 * n :] + params.bias[2 * n :]
    comb = torch.stack([torch.softmax(row, 0) + hc_eps for row in logits.view(n, n)])
    comb = comb / (comb.sum(0, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(0, keepdim=True) + hc_eps)
    h = sum((pre[i] * x_nD[i] for i in range(1, n)), pre[0] * x_nD[0])
    return h, torch.stack(post), comb


def mix(x_nD: Tensor, y_D: Tensor, post_n: Tensor, comb_nn: Tensor, transposed: bool) -> Tensor:
    """The streams of one position after the sublayer, ``[n, D]``."""
    n = x_nD.shape[0]
    streams = []
    for to in range(n):
        stream = post_n[to] * y_D
        for source in range(n):
            weight = comb_nn[source, to] if transposed else comb_nn[to, source]
            stream = stream + weight * x_nD[source]
        streams.append(stream)
    return torch.stack(streams)


class Truth(NamedTuple):
    """Results ``[B, S, ...]``, gradients of the streams, and of parameters for every sample."""

    outputs: tuple[Tensor, Tensor, Tensor]
    x: Tensor
    params: dict[str, Tensor]


def truth(
    x_BSnD: Tensor, params: Params, grads: tuple[Tensor, Tensor, Tensor], **settings: float
) -> Truth:
    """One sample at a time in float64, with these gradients of ``h, post, comb``."""
    outputs: list[tuple[Tensor, ...]] = []
    of_x: list[Tensor] = []
    of_params: list[tuple[Tensor, ...]] = []
    for b in range(len(x_BSnD)):
        x_SnD = x_BSnD[b].detach().cpu().double().requires_grad_()
        own = Params(*(p.detach().cpu().double().requires_grad_() for p in params))
        at_each = torch.func.vmap(lambda x_nD, own=own: connect(x_nD, own, **settings))
        sample = at_each(x_SnD)
        upstream = tuple(grad[b].detach().cpu().double() for grad in grads)
        found = torch.autograd.grad(sample, (x_SnD, *own), upstream)
        outputs.append(tuple(part.detach() for part in sample))
        of_x.append(found[0])
        of_params.append(found[1:])
    h, post, comb = (torch.stack(parts) for parts in zip(*outputs, strict=True))
    by_name = zip(NAMES, zip(*of_params, strict=True), strict=True)
    return Truth((h, post, comb), torch.stack(of_x), {k: torch.stack(v) for k, v in by_name})


def sections(name: str, grads: Tensor, n: int) -> dict[str, Tensor]:
    """Per-sample gradients of one parameter by what they are for: a mistake in a small part must
    not hide beside a large one."""
    if name == "gamma":
        return {f"gamma {i}": part for i, part in enumerate(grads.unbind(1))}
    sizes = [1, 1, 1] if name == "alpha" else [n, n, n * n]
    parts = grads.split(sizes, 1)
    return {f"{name} {part}": g for part, g in zip(("pre", "post", "res"), parts, strict=True)}
