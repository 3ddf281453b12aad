"""Every kernel compiles for GPUs that are not here; the interpreter would accept much more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_clipping

PROGRAM = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

backend, arch, warp, tma = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "tma"

class Driver:
    def get_current_target(self):
        return GPUTarget(backend, int(arch) if backend == "cuda" else arch, warp)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver())
run = jit.JITFunction.run
compiled = set()

def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    assert kernel.asm, self.fn.__name__
    assert not tma or kernel.metadata.shared <= 227 * 1024, self.fn.__name__  # Hopper's
    compiled.add(self.fn.__name__)
    global made
    made = kernel

jit.JITFunction.run = compile_only

from flash_clipping.ops.clipped_sum import triton as clipped_sum_triton
from flash_clipping.ops.convolution import Geometry, triton as convolution_triton
from flash_clipping.ops.embedding import triton as embedding_triton
from flash_clipping.ops.gram import triton as gram_triton
from flash_clipping.layers.ops.hyper_connections import Settings
from flash_clipping.layers.ops.hyper_connections import triton as hyper_connections_triton
from flash_clipping.ops.noise import triton as noise_triton
from flash_clipping.ops.norm_layer import triton as norm_layer_triton
from flash_clipping.ops.outer import triton as outer_triton
from flash_clipping.layers.ops.product_key import triton as product_key_triton
from flash_clipping.ops.rows import triton as rows_triton
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.segments import Rows, Segments
from flash_clipping.ops.segments import triton as segments_triton
from flash_clipping.ops.runtime.shapes import Normalized
from flash_clipping.layers.ops.stream_mix import triton as stream_mix_triton
from flash_clipping.randomness import Draw, Purpose

tiles._remembers = False
segments_triton.grouped_mm = lambda *_: None
tiles.has_tma = tiles.is_hopper = lambda device: tma
tiles.starts_early = lambda device: tma
if backend == "hip":
    tiles.dot_precision = lambda dtype: "ieee"
for dtype in (torch.bfloat16, torch.float32):
    A, G = torch.empty(2, 512, 256, dtype=dtype), torch.empty(2, 512, 512, dtype=dtype)
    coef, rstd = torch.ones(2), torch.empty(2, 512)
    ids = torch.zeros(2, 512, dtype=torch.long)
    gram_triton.gram_blocks([(A, [G])])
    for work in gram_triton.launches_of([(A, [G])]):  # where Gluon is not used
        gram_triton.launch_gram(work, gram_triton.config_for(dtype, tma))
    gram_triton.gram_blocks([(A[..., 1:], [G[..., 1:]])])
    gram_triton.gram_blocks([(A, [G.float()])])
    odd = G[..., :257]  # rows on 16 bytes, which are no multiple of them
    for work in gram_triton.launches_of([(A, [odd])]):
        gram_triton.launch_gram(work)
        gram_triton.launch_gram(work, gram_triton.config_for(dtype, tma))
    outer_triton.outer_sqnorms(A, G, False)
    outer_triton.outer_sqnorms(A, G, True)
    outer_triton.outer_sqnorms(A[..., :128], G, True)
    outer_triton.outer_sqnorms(A[..., 1:], G[..., 1:], True)
    outer_triton.weighted_sum(A, coef)
    outer_triton.weighted_sums_many([A, G], coef)
    kept = torch.empty(2, 64, 9, 32, dtype=dtype).unflatten(2, (3, 3)).movedim(-1, 2)
    outer_triton.weighted_sums_many([kept, kept], coef)
    for stride, padding, groups, C in ((1, 1, 1, 64), (2, 0, 2, 6)):
        of = Geometry((3, 3), (stride,) * 2, (padding,) * 2, (1, 1), groups)
        x = torch.empty(2, C, 16, 16, dtype=dtype)
        y = torch.empty(2, 128, *of.out_sizes(x.shape), dtype=dtype)
        for lies in (torch.contiguous_format, torch.channels_last):
            pair = x.contiguous(memory_format=lies), y.contiguous(memory_format=lies)
            convolution_triton.convolution_sqnorms(*pair, of)
            convolution_triton.convolution_grads(*pair, of)
            convolution_triton.convolution_sum(*pair, coef, of)
            convolution_triton.convolution_grads(pair[0], pair[0], of._replace(groups=C))
    long = torch.empty(2, 64, 2, 2, 1024, dtype=dtype)
    of = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    convolution_triton.convolution_sum(long, long, coef, of)
    numbers, draws = [(0, 0), (1, 0)], [Draw(bytes(32), Purpose.NOISE, 1, n) for n in (12, 20)]
    noise_triton.noisy_means([A, G], 1.0, 2.0, draws[0], numbers, 0.0, torch.bfloat16)
    noise_triton.noisy_means([A.flatten()[1:], A], 1.0, 2.0, draws[1], numbers, 0.5, dtype)
    rounded = []  # how often, and where: bits do not depend on addresses
    for summed in (A, A.flatten()[1:]):
        noise_triton.noisy_means([summed], 1.0, 2.0, draws[0], numbers[:1], 0.0, dtype)
        rounded.append([made.asm.get("ptx", "").count(name) for name in ("fma.rn.f32", "add.f32")])
    assert rounded[0] == rounded[1], rounded
    rows_triton.row_scale(A, coef)
    for in_place in (False, True):
        for rows in (A[0], A.view(16, -1)):
            rows_triton.finite_rows(rows, ids[0].byte(), in_place)
    rows_triton.row_sums([A, A], [None, None])
    rows_triton.row_sums([A, A], [Normalized(A, rstd, rstd), None])
    norm_layer_triton.norm_backward(A, A, rstd, rstd, A[0, 0], (True, True, True))
    norm_layer_triton.group_norm_grads(A, A, torch.empty(2, 8), torch.empty(2, 8))
    embedding_triton.embedding_sqnorms(ids, A, 3)
    embedding_triton.embedding_sqnorms(ids[:, :128], A[:, :128], 3)
    embedding_triton.tied_cross_term(ids, A, A, G, 3)
    for width, k in ((5, 25), (64, 16), (1024, 32), (4096, 128)):
        logits, chosen = torch.empty(64, width, dtype=dtype), ids.int()[:, :k]
        product_key_triton.product_key_scores(logits, logits, k)
        product_key_triton.product_key_backward(chosen.to(dtype), chosen, logits, logits)
    clipped_sum_triton.clipped_sums_many([(A, G)], coef)  # small
    pairs = [(A, G), (A, A)]
    (kind,) = clipped_sum_triton.kinds_of(pairs)
    kind = kind._replace(small=False)
    work = clipped_sum_triton.Products(pairs)
    clipped_sum_triton.launch_clipped_sums(work, kind, coef)
    portable = clipped_sum_triton.constants_for(dtype, tma)
    clipped_sum_triton.launch_clipped_sums(work, kind, coef, portable)
    work = clipped_sum_triton.Products([(A, odd), (odd, A)])
    clipped_sum_triton.launch_clipped_sums(work, kind, coef)
    clipped_sum_triton.launch_clipped_sums(work, kind, coef, portable)
    pairs = [(A[..., 1:], G[..., 1:])]
    work = clipped_sum_triton.Products(pairs)
    clipped_sum_triton.launch_clipped_sums(work, kind, coef)
    for T in (256, 197):  # other tiles for samples of few positions, in steps of 64 and 32
        work = clipped_sum_triton.Products([(A[:, :T], G[:, :T])])
        clipped_sum_triton.launch_clipped_sums(work, kind._replace(B=64, T=T), coef)
    rows, expert = torch.arange(4096), torch.arange(4096) % 3
    X, Y = torch.empty(4096, 256, dtype=dtype), torch.empty(4096, 128, dtype=dtype)
    segments = Segments(rows % 2, 2, expert, 3)
    lists, order = segments.lists, segments.order_N
    segments_triton.segment_sqnorms(Rows(X), Rows(Y, order), lists)
    segments_triton.segment_sums(X, lists)
    segments_triton.grouped_linear(X, Y[:384].view(3, 64, 256), segments.of_groups)
    segments_triton.sums_of_tokens(X, order.view(-1, 2), lists.starts[-1], coef.expand(2048, 2))
    for segments_triton.SPLIT_BELOW in (0, 1 << 30):
        segments_triton.grouped_sums(Rows(X, order), Rows(Y), lists, coef)
    for operand in (Y, Y[:, :16]):
        operands = segments_triton.operands_of(Rows(X, order), Rows(operand))
        for rows_each in (64.0, 512.0):
            config = segments_triton.sums_config(*operands, rows_each)
            out = torch.empty(3, operand.shape[1], 256)
            segments_triton.launch_sums(*operands, lists, coef, out, config)
    segments_triton.segment_grads(Rows(X, order), Rows(Y[:, :16]), lists, 2)
    for n, D, S in ((4, 2560, 512), (3, 96, 8)):
        m = n * n + 2 * n
        x, vector = torch.empty(2, S, n, D, dtype=dtype), torch.empty(2, S, n)
        params = torch.empty(m, n * D), torch.empty(3), torch.empty(m), torch.empty(n, D)
        connect = x, params, Settings()
        hyper_connections_triton.hyper_connections(*connect)
        comb = torch.empty(2, S, n, n)
        saved = torch.empty(2, S), torch.empty(2, S, m)
        grads = x[:, :, 0], vector, comb
        hyper_connections_triton.hyper_connections_backward(*connect, saved, grads, True, True)
        for transposed in (True, False):
            mixed = stream_mix_triton.stream_mix(x, x[:, :, 0], vector, comb, transposed)
            stream_mix_triton.stream_mix_backward(x, x[:, :, 0], vector, comb, mixed, transposed)
print(" ".join(sorted(compiled)))
"""


def kernels(file: str) -> set[str]:
    """Names of all kernels in files of this name: functions whose first argument is an address."""
    texts = [path.read_text() for path in Path(flash_clipping.__file__).parent.rglob(file)]
    pattern = re.compile(r"^def (\w*kernel)\(\s*\w+_ptr", re.MULTILINE)
    return {name for text in texts for name in pattern.findall(text)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [("cuda", "80", "32", ""), ("cuda", "90", "32", "tma"), ("hip", "gfx942", "64", "")],
    ids=["ampere", "hopper", "cdna3"],
)
def test_every_kernel_compiles(target: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *target],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    from flash_clipping.ops.runtime.tiles import has_gluon

    expected = kernels("triton.py")
    if target[1] == "90" and has_gluon():
        expected |= kernels("hopper.py")
    else:
        expected.remove("blocks_kernel")  # for one of Hopper's
    assert set(result.stdout.split()) == expected
