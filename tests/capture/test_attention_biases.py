"""Attention whose mask comes from a parameter: biases by relative position, with dropout."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proxies import proxy_ops
from flash_clipping.capture.proxies.parameter_proxy import TableRows
from tests.support.autograd import check_truth, check_with_dropout, truth_of_one_forward
from tests.support.errors import warns
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

B, T, HEADS = 3, 5, 2


class Biased(nn.Module):
    """Self-attention of ``[B, T, 4]`` with a table of biases of pairs of positions.

    Args:
        dropout: of attention.
        padded: a mask of each sample's own is added to the biases.
        frozen: maps to queries, keys and values are frozen.
    """

    def __init__(self, dropout: float = 0.3, padded: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.maps = nn.Linear(4, 12).requires_grad_(not frozen)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * T - 1))
        self.dropout, self.padded = dropout, padded

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, 2)).movedim(2, 0).transpose(2, 3)
        apart = torch.arange(T)[:, None] - torch.arange(T) + T - 1
        mask = self.table[:, apart.to(x.device)].unsqueeze(0)
        if self.padded:  # the longer a sample's first number, the more of it is padding
            count = (x.detach()[:, 0, 0].abs() * 2).long().clamp(max=T - 1)
            hidden = torch.arange(T, device=x.device) < count[:, None]
            mask = mask + hidden[:, None, None, :].to(x.dtype) * -1e4
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """An ordinary layer, attention, and a head; ``checkpointed``: attention runs again."""

    def __init__(self, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.attention = Biased(**options)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        if self.checkpointed:
            x = checkpoint(self.attention, x, use_reentrant=False)
        else:
            x = self.attention(x)
        return self.head(x)


def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    rows = model(*batch).flatten(1)
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1]).to(rows)).sum(1)


def batch_of(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return (torch.randn(B, T, 3, dtype=dtype),)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_biases_with_dropout(padded: bool, checkpointed: bool, mode: str) -> None:
    """Nothing runs twice: gradients are those of the dropout that fell in forward."""
    torch.manual_seed(0)
    model = Model(checkpointed, padded=padded).double()
    check_with_dropout(model, batch_of(), losses, mode=mode)


class Latents(Model):
    """Queries that are parameters, or computed from these, read what is of the samples."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.latents, self.expanded = nn.Parameter(torch.randn(1, HEADS, 2, 2)), expanded

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.embed(x)).unflatten(-1, (HEADS, 2)).transpose(1, 2)
        queries = self.latents.expand(len(x), -1, -1, -1) if self.expanded else self.latents
        return self.head(
            F.scaled_dot_product_attention(
                query=queries, key=keys, value=keys, dropout_p=0.3 if self.training else 0.0
            )
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.parametrize("expanded", [True, False])
def test_queries_of_parameters(expanded: bool) -> None:
    torch.manual_seed(0)
    check_with_dropout(Latents(expanded).double(), batch_of(), losses)


def test_only_biases_are_trained() -> None:
    """CUDA's kernels save nothing for their backward where neither queries, keys nor values need a
    gradient."""
    torch.manual_seed(0)
    model = Model(frozen=True).double()
    model.embed.requires_grad_(False)
    check_with_dropout(model, batch_of(), losses)


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
def test_hugging_face_with_its_dropout(kind: str, prepare: Any) -> None:
    model, batch = hugging_face(kind)
    batch = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
    tolerance = 1e-9 if kind == "Swin" else 1e-6  # T5 takes variances in fp32
    check_with_dropout(
        model.double().train(), (batch,), model_losses, prepare=prepare, tolerance=tolerance
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["Swin", "BEiT", "T5"])
def test_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """Windows and biases, in the dtypes that choose other kernels for attention."""
    model, batch = hugging_face(kind)
    batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    batch = {n: x.cuda() for n, x in batch.items()}
    model = model.to("cuda", dtype).train()
    # Two kernels for one sum differ by rounding, of which softmax over a few tokens leaves more.
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    check_with_dropout(model, (batch,), model_losses, tolerance=tolerance)


def test_backward_in_another_thread() -> None:
    """Autograd runs the backward of what is on a GPU in a thread of its own."""
    torch.manual_seed(0)
    model, batch = Model(padded=True).double(), batch_of()
    torch.manual_seed(7)
    truth = truth_of_one_forward(losses(model, batch), model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    losses(flash, batch).mean().backward()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = losses(flash, batch).mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    check_truth(flash, model, truth, 1.0, 1e-9)


class Scores(nn.Module):
    """Heads' biases of pairs of positions, looked up once and added to the scores of each layer.

    Args:
        rows: of the table; with few of them, each is read at many pairs.
        mask: how what a sample may not attend to is left out: of the biases, before they are added
            (``"causal"``, ``"filled"`` and ``"named"``, the same for all samples, ``"expanded"``,
            which has a row for each of them, ``"where"``, ``"added"``, each sample's own), or not
            at all.
        fused: attention is one function, which gets the biases as its mask.
    """

    def __init__(self, rows: int, mask: str = "", layers: int = 3, fused: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, HEADS, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.mask, self.fused = mask, fused

    def forward(self, x: Tensor) -> Tensor:
        apart = (torch.arange(T)[:, None] - torch.arange(T)).abs() % self.table.num_embeddings
        bias = self.table(apart.to(x.device)).permute(2, 0, 1).unsqueeze(0)
        hidden = (x.detach()[..., 0] < -1)[:, None, None, :]
        for layer in self.layers:
            q = layer(x).unflatten(-1, (HEADS, 2)).transpose(1, 2)
            mask, seen = bias, torch.ones(T, T).tril().bool().view(1, 1, T, T)
            if self.mask == "causal":
                mask = torch.where(seen, bias, -0.5)  # which the table must not get
            elif self.mask == "filled":
                mask = bias.masked_fill(~seen, -0.5)
            elif self.mask == "named":
                mask = torch.where(~seen, other=bias, input=bias.new_tensor(-0.5))
            elif self.mask == "expanded":  # as transformers writes masks out for CUDA graphs
                mask = torch.where(seen.expand(len(x), -1, -1, -1), bias, -0.5)
            elif self.mask == "where":
                mask = torch.where(hidden, -1e4, bias)
            elif self.mask == "added":
                mask = bias + hidden.to(x.dtype) * -1e4
            if self.fused:
                out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=1.0)
            else:
                out = torch.softmax(q @ q.mT + mask, -1) @ q
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", ["", "causal", "filled", "named", "expanded", "where", "added"])
@pytest.mark.parametrize("rows, fused", [(2, False), (5, True), (100, False)])
def test_a_table_that_layers_share(rows: int, fused: bool, mask: str, mode: str) -> None:
    """Its gradient is one factor for all of them, taken through the lookup once."""
    torch.manual_seed(0)
    model = Scores(rows, mask, fused=fused).double()
    x = torch.randn(B, T, 4).double()
    truth = truth_of_one_forward(model(x).square().sum((1, 2)), model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    for _ in range(3):  # later steps take the short way
        flash.zero_grad()
        with mock.patch.object(
            TableRows, "factor", autospec=True, side_effect=TableRows.factor
        ) as spy:
            flash(x).square().sum((1, 2)).mean().backward()
        check_truth(flash, model, truth, 1.0, 1e-9)
    assert spy.call_count == 1 + (mode == "two_pass")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_mask_that_has_a_row_for_each_sample_from_some_step_on(fused: bool, mode: str) -> None:
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
def test_rows_that_are_the_same_only_as_they_are_made(meeting: str) -> None:
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


def test_attention_takes_the_short_way_until_something_changes() -> None:
    torch.manual_seed(0)
    model = Scores(5, "causal", fused=True).double()
    plain = copy.deepcopy(model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    x = torch.randn(B, T, 4).double()

    def short() -> int:
        """Calls of attention that a step spares the general way."""
        flash.zero_grad()
        with mock.patch.object(proxy_ops, "_attention", side_effect=proxy_ops._attention) as spy:
            flash(x).square().sum((1, 2)).mean().backward()
        truth = truth_of_one_forward(plain(x).square().sum((1, 2)), plain)
        check_truth(flash, model, truth, 1.0, 1e-9)
        return len(model.layers) - spy.call_count

    short()
    assert short() == 3
    for each in (model, plain):
        each.layers.requires_grad_(False)
        each.zero_grad()
    assert short() == 2  # the first one's queries need no gradient


def test_a_mask_of_shared_biases_that_is_changed_before_backward() -> None:
    """As autograd has it: an error, not a gradient of other positions."""

    class Masked(Scores):
        def forward(self, x: Tensor) -> Tensor:
            bias = self.table(torch.arange(T).expand(T, T)).permute(2, 0, 1).unsqueeze(0)
            seen = torch.ones(T, T, dtype=torch.bool).tril().view(1, 1, T, T)
            q = self.layers[0](x).unflatten(-1, (HEADS, 2)).transpose(1, 2)
            mask = torch.where(seen, bias, -1e4)
            out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            self.seen = seen
            return out.transpose(1, 2).flatten(2)

    model = Masked(T, layers=1)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    loss = flash(torch.randn(B, T, 4)).square().mean()
    model.seen.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_table_that_changes_between_layers() -> None:
    """Biases that are changed in place are no rows of the table any more."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.map = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            bias = F.embedding(torch.arange(T), self.table).unsqueeze(0)
            x = self.map(x) + bias
            bias.mul_(3)
            return torch.tanh(x) + bias

    torch.manual_seed(0)
    model = Changed().double()
    x = torch.randn(B, T, 4).double()
    truth = truth_of_one_forward(model(x).square().sum((1, 2)), model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash(x).square().sum((1, 2)).mean().backward()
    check_truth(flash, model, truth, 1.0, 1e-9)


def test_a_sample_that_is_not_finite_beside_a_shared_table() -> None:
    torch.manual_seed(0)
    model = Scores(2).double()
    x = torch.randn(B, T, 4).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash(x).square().sum((1, 2)).mean().backward()
    norms = flash.get_norm_sample().clone()
    flash.zero_grad()
    x[1] = torch.inf
    with warns("FC555"):
        flash(x).square().sum((1, 2)).mean().backward()
    found = flash.get_norm_sample()
    torch.testing.assert_close(found[[0, 2]], norms[[0, 2]])
    assert flash.get_clipping_coef()[1] == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
