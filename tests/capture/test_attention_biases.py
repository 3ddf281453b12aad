"""Attention whose mask comes from a parameter: how it goes back, and what changes later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proxies.parameter_proxy import TableRows
from tests.support.autograd import check_truth, check_with_dropout, truth_of_one_forward
from tests.support.wrapping import MODES
from tests.zoo.attention import B, Scores, T

pytestmark = pytest.mark.without_gate


def hugging_face(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A small model with the dropout that it comes with, and a batch."""
    import transformers

    torch.manual_seed(0)
    ids = torch.randint(3, 17, (B, 7))
    if kind == "Swin":
        config: Any = transformers.SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            attention_probs_dropout_prob=0.1,
            hidden_dropout_prob=0.1,
            drop_path_rate=0.0,
        )
        model: Any = transformers.SwinForImageClassification(config)
        return model, {"pixel_values": torch.randn(B, 3, 16, 16)}
    if kind == "BEiT":
        config = transformers.BeitConfig(
            image_size=32,
            patch_size=8,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            use_relative_position_bias=True,
            drop_path_rate=0.0,
        )
        model = transformers.BeitForImageClassification(config)
        return model, {"pixel_values": torch.randn(B, 3, 32, 32)}
    config_of = {"T5": transformers.T5Config, "UMT5": transformers.UMT5Config}[kind]
    config = config_of(
        vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model, {"input_ids": ids, "decoder_input_ids": ids[:, :5]}


def model_losses(model: Any, batch: tuple[Any, ...]) -> Tensor:
    rows = model(**batch[0])["logits"].flatten(1)
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1]).to(rows)).sum(1)


def checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("prepare", [lambda model: None, checkpointing], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ["Swin", "T5", "UMT5"])
def test_models_of_transformers_with_dropout_are_exact(kind: str, prepare: Any) -> None:
    model, batch = hugging_face(kind)
    batch = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
    tolerance = 1e-9 if kind == "Swin" else 1e-6  # T5 takes variances in fp32
    check_with_dropout(
        model.double().train(), (batch,), model_losses, prepare=prepare, tolerance=tolerance
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["Swin", "BEiT", "T5"])
def test_attention_biases_on_a_gpu_are_exact(kind: str, dtype: torch.dtype) -> None:
    """Windows and biases, in the dtypes that choose other kernels for attention."""
    model, batch = hugging_face(kind)
    batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    batch = {n: x.cuda() for n, x in batch.items()}
    model = model.to("cuda", dtype).train()
    # Two kernels for one sum differ by rounding, of which softmax over a few tokens leaves more.
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    check_with_dropout(model, (batch,), model_losses, tolerance=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
def test_mask_with_a_row_for_each_sample_later_is_exact(fused: bool, mode: str) -> None:
    """T5's causal mask is expanded over the batch while a CUDA graph is captured, and not before.
    The biases stay those of one row: otherwise each sample's go back through the table by
    themselves, 192 times a step of T5-base."""
    torch.manual_seed(0)
    model = Scores(2, "causal", fused=fused).double()
    plain, x = copy.deepcopy(model), torch.randn(B, T, 4).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    flash(x).square().sum((1, 2)).mean().backward()
    model.mask = plain.mask = "expanded"
    truth = truth_of_one_forward(plain(x).square().sum((1, 2)), plain)
    for _ in range(2):
        flash.zero_grad()
        with mock.patch.object(
            TableRows, "factor", autospec=True, side_effect=TableRows.factor
        ) as spy:
            flash(x).square().sum((1, 2)).mean().backward()
        check_truth(flash, model, truth, 1.0, 1e-9)
        assert spy.call_count == 1 + (mode == "two_pass")


class Met(nn.Module):
    """Samples ``[B, B, 4]`` that meet a bias and a constant, which has one row at first, and the
    same for each of ``B`` samples, or positions, from some step on.

    Args:
        use: what is made of the module, samples and the constant.
    """

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.map, self.net = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias, self.number = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(()))
        self.register_buffer("table", torch.randn(1, 4))
        self.use, self.expands = use, False

    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        table = table.expand(B, 4) if self.expands else table
        return torch.tanh(self.use(self, torch.tanh(self.map(x)), table))


def changed(m: Any, x: Tensor, table: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A bias for each sample, made of a table, once something was done to it."""
    bias = m.bias + table
    change(bias)
    return (x + m.number * m.net(x)) * bias[:, None] + bias[:, None]


def apart(bias: Tensor) -> Tensor:
    """A number for each row."""
    return torch.arange(len(bias))[:, None]


def met_as_changed(m: Any, x: Tensor, table: Tensor) -> Tensor:
    """A bias for each sample, of which one row is written, added to samples as it is."""
    bias = m.bias[None] + table[:, None]
    bias[0].mul_(2)
    return m.net(x) * m.number + bias


MEETINGS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "one row is written, and all are added": met_as_changed,
    "one row is written": lambda m, x, c: changed(m, x, c, lambda bias: bias[0].mul_(2)),
    "rows are filled": lambda m, x, c: changed(
        m, x, c, lambda bias: bias.masked_fill_(apart(bias) > 1, 0.5)
    ),
    "rows are added up": lambda m, x, c: m.net(x) * m.number + (m.bias + c).cumsum(0)[:, None],
    "as many positions as samples": lambda m, x, c: m.net(x[:, :1]) * m.number + (m.bias + c),
    "a layer reads positions": lambda m, x, c: x * m.number + m.net(m.bias + c),
    "positions in where": lambda m, x, c: (
        torch.where(x[:, :1] > 0, m.bias + c, m.net(x[:, :1])) * m.number
    ),
    "numbers": lambda m, x, c: m.net(x) * (m.number + c.new_ones(())) + m.bias,
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_rows_that_are_the_same_only_as_they_are_made_are_exact(meeting: str) -> None:
    """What is expanded may be changed in some rows afterwards, and positions be as many as samples.

    Rows that are taken for one then have norms of no sample, or outputs of another shape.
    """
    torch.manual_seed(0)
    model, x = Met(MEETINGS[meeting]).double(), torch.randn(B, B, 4).double()
    plain = copy.deepcopy(model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash(x).square().sum((1, 2)).mean().backward()
    model.expands = plain.expands = True
    truth = truth_of_one_forward(plain(x).square().sum((1, 2)), plain)
    for _ in range(2):
        flash.zero_grad()
        flash(x).square().sum((1, 2)).mean().backward()
        check_truth(flash, model, truth, 1.0, 1e-9)
