"""``packed``: documents end to end in one row, against the same without privacy, and padded.

A decoder reads documents of 16 to 8192 tokens, whose lengths are drawn evenly on a logarithmic
scale. *Packed* they lie end to end in one row and each is a privacy unit; *padded* each is a row,
as long as the longest. Attention runs document by document, or over whole rows where each is one.
Norms are compared with one document at a time in fp32 before anything is timed.

N tokens of all documents, T positions of a row, D width.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Block, LanguageModel, SwiGLU
from benchmarks.ops.bench import Candidate, OpBench, Result, Run, Wrong
from flash_clipping import Documents, GradSampleModuleFlashClipping, Offsets

SHORTEST, LONGEST = 16, 8192
SIZES = {
    "cuda": dict(layers=4, width=2048, hidden=5632, heads=16, vocab=32_000),
    "cpu": dict(layers=1, width=32, hidden=48, heads=2, vocab=64),
}
TOKENS = {"cuda": [8192, 16_384, 32_768], "cpu": [96]}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Attention(nn.Module):
    """Causal attention inside of each document of a single row, or of each row.

    ``lengths`` are known to the host, as they are to whoever packed the documents.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.lengths: tuple[int, ...] = ()

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.joint(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # What lies behind the end of a row is padding, which nothing in front of it reads.
        parts = qkv.split(list(self.lengths), dim=3) if len(x_BTD) == 1 else [qkv]
        mixed = [F.scaled_dot_product_attention(*part.unbind(0), is_causal=True) for part in parts]
        return self.out(torch.cat(mixed, dim=2).transpose(1, 2).flatten(-2))


def decoder(layers: int, width: int, hidden: int, heads: int, vocab: int) -> nn.Module:
    blocks = [Block(width, Attention(width, heads), SwiGLU(width, hidden)) for _ in range(layers)]
    return LanguageModel(blocks, width=width, vocab=vocab)


def read(model: nn.Module, lengths: tuple[int, ...]) -> nn.Module:
    """How long the documents of the next batches are."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.lengths = lengths
    return model


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N")


def work(run: Run) -> Iterator[list[Candidate]]:
    lengths, errors = {}, {}
    run.facts |= {"model": SIZES[run.device.type], "lengths": lengths, "errors": errors}
    for tokens in run.sizes(run.options.tokens, TOKENS):
        steps = _Steps(tokens, run.device, run.dtype)
        lengths[steps.group], errors[steps.group] = steps.lengths, steps.error()
        run.console.print(f"{steps.group}: norms are off by {errors[steps.group]:.1e}")
        if not errors[steps.group] <= ROUNDED[run.dtype]:
            raise Wrong("that is too much")
        yield steps.candidates()


def draw_lengths(tokens: int) -> tuple[int, ...]:
    """Lengths that add up to so many tokens; the last document is cut."""
    generator = torch.Generator().manual_seed(tokens)
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        drawn = SHORTEST * (LONGEST / SHORTEST) ** torch.rand(1, generator=generator).item()
        lengths.append(min(room, round(drawn)))
    return tuple(lengths)


class _Steps:
    """Forward and backward of one batch: packed without privacy, packed, and padded."""

    def __init__(self, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = draw_lengths(tokens)
        self.group = f"{tokens} tokens, {len(self.lengths)} documents"
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(0)
        vocab = SIZES[device.type]["vocab"]
        self.ids_1N = torch.randint(vocab, (1, tokens), generator=generator).to(device)
        self.labels_1N = torch.randint(vocab, (1, tokens), generator=generator).to(device)
        edges = list(itertools.accumulate(self.lengths, initial=0))
        self.offsets = torch.tensor(edges, device=device, dtype=torch.int32)
        self.plain = self._model()
        private = partial(GradSampleModuleFlashClipping, max_grad_norm=1.0, loss_reduction="sum")
        self.packed = private(self._model(), unit=Documents(Offsets("cu_seqlens")))
        self.padded = private(self._model())
        self.ids_BT, self.labels_BT = (self._padded(x) for x in (self.ids_1N, self.labels_1N))
        self.labels_BT[self.ids_BT < 0] = -100
        self.ids_BT.clamp_(min=0)

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:
            model = decoder(**SIZES[self.device.type])
        return read(model, self.lengths).to(self.dtype)

    def _padded(self, x_1N: Tensor) -> Tensor:
        rows = x_1N[0].split(list(self.lengths))
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-100)

    def error(self) -> float:
        """Largest relative error of the shortest and the longest documents' norms, packed and
        padded."""
        oracle = self._model().float()
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        chosen = sorted({*order[:2], *order[-2:]})
        ids, labels = (x[0].split(list(self.lengths)) for x in (self.ids_1N, self.labels_1N))
        true = []
        for b in chosen:
            _backward(read(oracle, (self.lengths[b],)), ids[b][None], labels[b][None])
            norms = [p.grad.norm() for p in oracle.parameters() if p.grad is not None]
            true.append(torch.stack(norms).norm())
        worst = 0.0
        for private, backward in ((self.packed, self.step_packed), (self.padded, self.step_padded)):
            backward()
            off = private.get_norm_sample()[chosen] / torch.stack(true) - 1
            worst = max(worst, float(off.abs().max()))
        return worst

    def step_packed(self) -> None:
        _backward(self.packed, self.ids_1N, self.labels_1N, cu_seqlens=self.offsets)

    def step_padded(self) -> None:
        _backward(self.padded, self.ids_BT, self.labels_BT)

    def candidates(self) -> list[Candidate]:
        floor = "non-private, packed"
        result = partial(Result, self.group)
        return [
            (result(floor), partial(_backward, self.plain, self.ids_1N, self.labels_1N)),
            (result("packed", floor), self.step_packed),
            (result("padded", floor), self.step_padded),
        ]


def _backward(model: nn.Module, ids_BT: Tensor, labels_BT: Tensor, **more: Tensor) -> None:
    """Of the sum over documents of the sum over their tokens."""
    model.zero_grad(set_to_none=True)
    logits_BTV = model(ids_BT, **more)
    F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum").backward()


BENCH = OpBench(
    "packed",
    "documents packed in one row against non-private, and padded",
    __doc__,
    work,
    _arguments,
    unit="",
)
