"""The layers and inputs of Opacus' per-sample gradient tests, through flash clipping.

Opacus compares per-sample gradients with those of microbatches of one sample. Flash clipping forms
none, so norms, coefficients and clipped sums are compared with what the same microbatches give.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.utils.per_sample_gradients_utils import (
    ModelWithLoss,
    clone_module,
    compute_microbatch_grad_sample,
    is_batch_empty,
    unpack_packedsequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.testing import assert_close

from flash_clipping import GradSampleModuleFlashClipping
from tests.opacus_suite.substitutes import EXAMPLES, add_case, opacus_tests
from tests.support.errors import raises

#: Reduction and mode: each of Opacus' inputs goes through one of both, by its size. Every rule
#: takes all four in ``tests/rules/test_norms.py::test_rule_matches_oracle``, and here every input
#: where more examples are asked for.
RUNS = [("sum", "one_pass"), ("mean", "two_pass")]
if EXAMPLES > 1:
    RUNS += [("sum", "two_pass"), ("mean", "one_pass")]


def compare_with_microbatches(x: Any, module: nn.Module, **options: Any) -> None:
    first = x[0] if isinstance(x, tuple) else x  # of bags, and of packed sequences
    runs = RUNS if EXAMPLES > 1 else [RUNS[sum(first.shape) % 2]]
    for loss_reduction, mode in runs:
        _compare(x, module, loss_reduction=loss_reduction, mode=mode, **options)


def _compare(
    x: Any,
    module: nn.Module,
    *,
    batch_first: bool,
    loss_reduction: str,
    mode: Any,
    chunk_method: Callable[[Any], Any] = iter,
    atol: float,
    rtol: float,
) -> None:
    packed = isinstance(x, PackedSequence)
    empty = not packed and is_batch_empty(x)
    truth: dict[str, Tensor] = {}
    bound = 1.0
    if not empty:
        truth = compute_microbatch_grad_sample(
            unpack_packedsequences(x) if packed else x,
            module,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            chunk_method=chunk_method,
        )
        if packed and x.unsorted_indices is not None:
            # The microbatches come sorted by length; norms are in the order of the user's batch.
            truth = {name: grads[x.unsorted_indices] for name, grads in truth.items()}
        param_norms = {name: grads.flatten(1).norm(dim=1) for name, grads in truth.items()}
        norms = torch.stack(list(param_norms.values())).norm(dim=0)
        bound = norms.median().item() + 1e-3  # some samples are clipped, some are not
        coef = (bound / (norms + 1e-6)).clamp(max=1)

    flash = GradSampleModuleFlashClipping(
        clone_module(module),
        batch_first=batch_first,
        loss_reduction=loss_reduction,
        max_grad_norm=bound,
        mode=mode,
    )
    if empty and not x.shape[0 if batch_first else 1]:
        with raises("FC250"):
            flash(x)
        return
    torch.manual_seed(0)  # as the microbatches did
    ModelWithLoss(flash, loss_reduction)(x).backward()

    if empty:
        samples = x.shape[0 if batch_first else 1]  # without positions where there are any
        assert flash.get_norm_sample().tolist() == [0.0] * samples
        assert not any(param.grad.any() for param in flash.parameters())
        return
    assert_close(flash.get_norm_sample(), norms, atol=atol, rtol=rtol)
    assert_close(flash.get_clipping_coef(), coef, atol=atol, rtol=rtol)
    for name, param in flash._module.named_parameters():
        assert_close(param._norm_sample, param_norms[name], atol=atol, rtol=rtol)
        # By the coefficients found, which are right by now, and a little small where rounding may
        # hide something: samples may cancel in the sum.
        clipped = torch.einsum("b,b...->...", flash.get_clipping_coef(), truth[name])
        assert_close(param.grad, clipped, atol=atol, rtol=rtol)


class Flash:
    """Takes the place of ``GradSampleHooks_test.run_test``, which every case below goes through."""

    def run_test(
        self,
        x: Any,
        module: nn.Module,
        batch_first: bool = True,
        atol: float = 10e-6,
        rtol: float = 10e-5,
        ew_compatible: bool = True,
        chunk_method: Callable[[Any], Any] = iter,
    ) -> None:
        how: dict[str, Any] = {"batch_first": batch_first, "chunk_method": chunk_method}
        compare_with_microbatches(x, module, atol=atol, rtol=rtol, **how)


def cases(name: str, test_case: str, examples: int = 15) -> type[unittest.TestCase]:
    return getattr(opacus_tests(f"grad_samples.{name}_test", examples=examples), test_case)


recurrent_tests = opacus_tests("grad_samples.dp_rnn_test", examples=20)


#: Modules of Opacus' tests, their test case, and how many inputs are drawn. Most draws of a
#: convolution's shape are not valid, and return at once.
LAYERS = {
    **{f"conv{n}d": (f"Conv{n}d_test", 120) for n in (1, 2, 3)},
    **{f"instance_norm{n}d": (f"InstanceNorm{n}d_test", 15) for n in (1, 2, 3)},
    "dp_multihead_attention": ("MultiHeadAttention_test", 15),
    "embedding_bag": ("Embedding_bag_test", 15),
    "embedding": ("Embedding_test", 15),
    "group_norm": ("GroupNorm_test", 15),
    "layer_norm": ("LayerNorm_test", 15),
    "linear": ("Linear_test", 15),
    "rms_norm": ("RMSNorm_test", 15),
    "sequence_bias": ("SequenceBias_test", 15),
}
for _name, (_case, _examples) in LAYERS.items():
    add_case(globals(), f"Test{_case.removesuffix('_test')}", Flash, cases(_name, _case, _examples))


class Reversed(nn.Module):
    """Packs its batch in reverse order. All sequences are of one length."""

    def __init__(self, layer: type[nn.Module]):
        super().__init__()
        self.rnn = layer(4, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x) - 1, -1, -1)
        rows = x[order].transpose(0, 1).flatten(0, 1)
        packed = PackedSequence(rows, torch.full((x.shape[1],), len(x)), order, order)
        output, _ = self.rnn(packed)
        return self.head(pad_packed_sequence(output, batch_first=True)[0])


class TestRecurrent(Flash, cases("dp_rnn", "RNN_test")):
    def test_packed_sequences_match_opacus(self) -> None:
        sequences = [torch.randn(length, 4) for length in (3, 5, 5, 1)]
        for layer in (DPRNN, DPGRU, DPLSTM):
            for batch_first in (True, False):
                for sort in (True, False):
                    ordered = sorted(sequences, key=len, reverse=True) if sort else sequences
                    x = pack_sequence(ordered, enforce_sorted=sort)
                    model = recurrent_tests.DPRNNAdapter(
                        layer(4, 6, num_layers=2, bidirectional=True, batch_first=batch_first)
                    )
                    self.run_test(x, model, batch_first)

    def test_packed_inside_the_model(self) -> None:
        """No error tells: the rows are in another order than the batch, and as many."""
        for layer in (DPRNN, DPGRU, DPLSTM):
            self.run_test(torch.randn(4, 5, 4), Reversed(layer))


def flash_is_correct(
    x: Tensor,
    module: nn.Module,
    *,
    batch_first: bool,
    atol: float,
    rtol: float,
    grad_sample_mode: str,
) -> bool:
    """In the place of Opacus' check of its own modes. An empty batch has no microbatches."""
    if is_batch_empty(x):
        raise RuntimeError("x is expected to be non-empty.")
    compare_with_microbatches(x, module, batch_first=batch_first, atol=atol, rtol=rtol)
    return True


utils_tests = opacus_tests(
    "per_sample_gradients_utils_test",
    examples=50,
    check_per_sample_gradients_are_correct=flash_is_correct,
)


class TestUtils(utils_tests.PerSampleGradientsUtilsTest): ...
