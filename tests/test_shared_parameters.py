"""Parameters that are used more than once in a step, and parameters that are not trained.

Norms and clipped sums against one plain backward per sample, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from flash_clipping import (
    FlashClippingError,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from tests.oracle import Truth, assert_close

TOLERANCE = 1e-9

#: (model, batch) -> the loss of a batch, averaged over its samples.
Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]
WRAPPERS = {"wrapped": GradSampleModuleFlashClipping, "hooks": GradSampleHooksFlashClipping}
MODES = ["one_pass", "two_pass"]


def truth_by_autograd(model: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Truth:
    """One sample at a time through an ordinary backward: nothing but autograd itself."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        loss(model, tuple(x[b : b + 1] for x in batch)).backward()
        for name, param in trainable.items():
            rows[name].append(torch.zeros_like(param) if param.grad is None else param.grad)
    grads_B = {name: torch.stack(row).double() for name, row in rows.items()}
    norms = {n: g.reshape(len(g), -1).norm(dim=1) for n, g in grads_B.items()}
    return Truth(torch.stack(list(norms.values())).norm(dim=0), norms, grads_B)


def check(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss: Loss,
    *,
    wrapper: str = "wrapped",
    mode: str = "one_pass",
    tolerance: float = TOLERANCE,
    loss_reduction: str = "mean",
    steps: int = 2,
) -> None:
    """Norms, norms of each parameter and clipped sums, for two steps in turn."""
    truth = truth_by_autograd(copy.deepcopy(model), batch, loss)
    bound = truth.norms.median().item()
    flash = WRAPPERS[wrapper](model, max_grad_norm=bound, mode=mode, loss_reduction=loss_reduction)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss(flash if wrapper == "wrapped" else model, batch).backward()
        assert_close(flash.get_norm_sample(), truth.norms, tolerance, "norms")
        for name, grad in truth.clipped(bound).items():
            param = model.get_parameter(name)
            norm = param._norm_sample
            # Where a gradient cancels to nothing, at the scale of the whole gradient.
            scale = truth.norms.max() / truth.param_norms[name].max().clamp(min=1e-30)
            slack = max(1.0, 1e-5 * scale.item())
            assert_close(norm, truth.param_norms[name], tolerance * slack, f"norms of {name}")
            assert_close(param.grad, grad, 10 * tolerance * slack, f"clipped sum of {name}")
        for name, param in model.named_parameters():
            if not param.requires_grad:
                assert param.grad is None, name


def mean_squares(output: Tensor) -> Tensor:
    rows = output.flatten(1)
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1])).sum(1).mean() / 2


def squares(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_squares(model(*batch))


# -- one model, several uses ----------------------------------------------------------------------


class Twice(nn.Module):
    """Applies one layer several times, with something else between."""

    def __init__(self, layer: nn.Module, times: int = 2, checkpointing: str = "none"):
        super().__init__()
        self.layer = layer
        self.times = times
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.times):
            # The first use is never checkpointed: its input need not require grad.
            if self.checkpointing == "none" or i == 0:
                x = torch.tanh(self.layer(x))
            else:
                reentrant = self.checkpointing == "reentrant"
                x = torch.tanh(checkpoint(self.layer, x, use_reentrant=reentrant))
        return x


class TiedLinears(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedAcrossKinds(nn.Module):
    """One square matrix as ``Linear``, as ``transformers``' ``Conv1D`` and as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.conv1d = nn.Embedding(5, 5), nn.Linear(5, 5), Conv1D(5, 5)
        self.linear.weight = self.conv1d.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.conv1d(torch.tanh(self.linear(torch.tanh(self.embed(ids)))))


class SharedBias(nn.Module):
    """One vector as the bias of a linear layer, of a convolution and of a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.conv.bias = self.norm.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self.norm(x + self.conv(x.mT).mT)


class TiedHead(nn.Module):
    """An embedding whose table is also the output head, perhaps with a padding row."""

    def __init__(self, padding_idx: int | None = None, bare: bool = False, twice: bool = False):
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=padding_idx)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.randn(5, 6)) if bare else None
        self.twice = twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions
        if self.twice:
            x = x + self.embed(ids.flip(1))
        hidden = torch.tanh(self.hidden(x))
        scores = self.head(hidden)
        return torch.cat([scores, self.head(x)], 1) if self.twice else scores


def floats(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, dtype=torch.float64),)


def ids(*shape: int, vocabulary: int = 9) -> tuple[Tensor, ...]:
    return (torch.randint(0, vocabulary, shape),)


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear_twice": (lambda: Twice(nn.Linear(4, 4)), lambda: floats(5, 3, 4)),
    "linear_twice_2d": (lambda: Twice(nn.Linear(4, 4)), lambda: floats(5, 4)),
    "linear_thrice_long": (lambda: Twice(nn.Linear(3, 3), times=3), lambda: floats(3, 20, 3)),
    "conv_twice": (lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), lambda: floats(4, 3, 5, 4)),
    "layer_norm_twice": (lambda: Twice(nn.LayerNorm(6)), lambda: floats(4, 5, 6)),
    "rms_norm_twice": (lambda: Twice(nn.RMSNorm(6)), lambda: floats(4, 5, 6)),
    "group_norm_twice": (lambda: Twice(nn.GroupNorm(2, 4)), lambda: floats(4, 4, 5)),
    "tied_linears": (TiedLinears, lambda: floats(5, 7, 5)),
    "tied_across_kinds": (TiedAcrossKinds, lambda: ids(4, 6, vocabulary=5)),
    "shared_bias": (SharedBias, lambda: floats(4, 5, 4)),
    "tied_head": (TiedHead, lambda: ids(4, 5)),
    "tied_head_padding": (lambda: TiedHead(padding_idx=2), lambda: ids(4, 5)),
    "tied_head_bare_root": (lambda: TiedHead(bare=True), lambda: ids(4, 5)),
    "tied_head_twice": (lambda: TiedHead(twice=True), lambda: ids(4, 5)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", SHARED)
def test_shared_parameter(name: str, wrapper: str, mode: str) -> None:
    torch.manual_seed(0)
    make, batch = SHARED[name]
    check(make().double(), batch(), squares, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_shared_and_checkpointed(checkpointing: str, mode: str) -> None:
    """One use is recomputed in backward, the other is not."""
    torch.manual_seed(0)
    model = Twice(nn.Linear(4, 4), times=3, checkpointing=checkpointing).double()
    check(model, floats(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize(
    ("checkpointing", "mode"),
    [
        ("non-reentrant", "one_pass"),
        ("non-reentrant", "two_pass"),
        ("reentrant", "one_pass"),
        ("reentrant", "two_pass"),
    ],
)
def test_bare_parameter_shared_with_a_checkpointed_use(checkpointing: str, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Twice(Gain(4), checkpointing=checkpointing), nn.Linear(4, 3)).double()
    check(model, floats(5, 3, 4), squares, mode=mode)


def test_layer_whose_bias_is_its_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    model[1].bias = model[1].weight
    check(model.double(), floats(4, 4), squares)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_concatenation_with_bare_parameters(mode: str) -> None:
    """A class token alone is trained, and joined to the batch under checkpointing."""

    class ClassToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 4))
            self.project = nn.Linear(4, 4).requires_grad_(False)

        def join(self, x: Tensor) -> Tensor:
            return torch.cat([self.token.expand(x.shape[0], -1, -1), self.project(x)], dim=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(x).tanh()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ClassToken()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    check(Checkpointed().double(), floats(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_data_meets_bare_parameters(mode: str) -> None:
    """A model of bare parameters alone, the first of them recomputed on the batch itself."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Gain(4), Gain(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=False))

    torch.manual_seed(0)
    check(Scales().double(), floats(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_attention_output_shared_with_a_layer_outside_its_checkpoint(mode: str) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.last.weight = self.attention.out_proj.weight

        def attend(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.attend, self.first(x), use_reentrant=True))

    torch.manual_seed(0)
    check(Attending().double(), floats(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shared_parameter_and_sum_reduction(reduction: str) -> None:
    torch.manual_seed(0)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        rows = model(*batch).flatten(1).square().sum(1)
        return rows.mean() if reduction == "mean" else rows.sum()

    check(TiedHead().double(), ids(4, 5), loss, loss_reduction=reduction)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["mlp", "embedding", "generic"])
def test_siamese(name: str, wrapper: str, mode: str) -> None:
    """A model called twice before one backward: the two uses of a sample are one gradient."""
    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
        batch = (*floats(5, 7, 4), *floats(5, 7, 4))
    elif name == "embedding":
        model = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3))
        batch = (*ids(5, 7), *ids(5, 7))
    else:
        model = nn.Sequential(nn.Linear(4, 4), Gain(4), nn.Linear(4, 3))
        batch = (*floats(5, 7, 4), *floats(5, 7, 4))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        left, right = batch
        return mean_squares(model(left) - 0.5 * model(right))

    check(model.double(), batch, loss, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_siamese_of_different_lengths(mode: str) -> None:
    """The two calls see different numbers of positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        left, right = batch
        return mean_squares(model(left).mean(1) - 0.5 * model(right).mean(1))

    check(model, (*floats(5, 7, 4), *floats(5, 3, 4)), loss, mode=mode)


class Gain(nn.Module):
    """A module without a rule."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


# -- Hugging Face ---------------------------------------------------------------------------------


def gpt2(tied: bool = True) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=17,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double().train()


def own_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The model's own loss; all samples have one length, so its mean is the mean over samples."""
    (tokens,) = batch
    return model(input_ids=tokens, labels=tokens).loss


def outer_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = batch
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", [own_loss, outer_loss])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gpt2(wrapper: str, loss: Loss, tied: bool, mode: str) -> None:
    """GPT-2 with its head tied to the token embedding, and its own loss."""
    model = gpt2(tied)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    check(model, ids(4, 8, vocabulary=17), loss, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_gpt2_gradient_checkpointing(mode: str) -> None:
    """``gradient_checkpointing_enable``, as the Trainer does."""
    model = gpt2()
    batch = ids(4, 8, vocabulary=17)
    truth = truth_by_autograd(copy.deepcopy(model), batch, own_loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    own_loss(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, TOLERANCE, "norms")
    for name, grad in truth.clipped(1.0).items():
        assert_close(model.get_parameter(name).grad, grad, 1e-7, name)


def test_gpt2_batch_as_large_as_the_sequence() -> None:
    """Positions are read as ``[1, T]``; with ``T = B`` they must not pass for samples."""
    check(gpt2(), ids(8, 8, vocabulary=17), own_loss)


# -- parameters that are not trained --------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bitfit(wrapper: str, mode: str) -> None:
    """Only biases are trained."""
    model = gpt2()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    check(model, ids(4, 8, vocabulary=17), own_loss, wrapper=wrapper, mode=mode)


class LoRA(nn.Module):
    """A frozen linear map with a trainable update of low rank beside it."""

    def __init__(self, base: nn.Module, d: int, p: int, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Linear(rank, p, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class BareLoRA(nn.Module):
    """The same with factors as bare parameters."""

    def __init__(self, base: nn.Module, d: int, p: int, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(d, rank) * 0.5)
        self.up = nn.Parameter(torch.randn(rank, p) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down @ self.up)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("adapter", [LoRA, BareLoRA])
def test_lora(adapter: type[nn.Module], wrapper: str, mode: str) -> None:
    """Adapters in every attention block of a frozen GPT-2."""
    model = gpt2()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = adapter(block.attn.c_attn, 8, 24).double()
        block.mlp.c_fc = adapter(block.mlp.c_fc, 8, 32).double()
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".down" in name or ".up" in name for name in trainable)
    check(model, ids(4, 8, vocabulary=17), own_loss, wrapper=wrapper, mode=mode)


class Prompted(nn.Module):
    """Prompt tuning: vectors that the root module owns, before a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = gpt2()
        self.body.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, 8, dtype=torch.float64) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.body.transformer.wte(tokens)
        prompt = self.prompt.expand(len(tokens), -1, -1)
        return self.body(inputs_embeds=torch.cat([prompt, embedded], dim=1)).logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_prompt_tuning(wrapper: str, mode: str) -> None:
    check(Prompted(), ids(4, 6, vocabulary=17), squares, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_frozen_use_of_a_shared_parameter(wrapper: str) -> None:
    """A tied table that is detached where it serves as head has its embedding's gradient only."""

    class DetachedHead(TiedHead):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.hidden(self.embed(ids))), self.embed.weight.detach())

    torch.manual_seed(0)
    check(DetachedHead().double(), ids(4, 5), squares, wrapper=wrapper)


def test_parameter_used_past_its_module_is_an_error() -> None:
    """A weight read outside its own module has no per-sample gradient: never a wrong norm."""

    class Functional(TiedHead):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.hidden(self.embed(ids))), self.embed.weight)

    model = Functional().double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    with pytest.raises(FlashClippingError, match="embed.weight"):
        squares(flash, ids(4, 5)).backward()


# -- dtypes ---------------------------------------------------------------------------------------


class MixedDtypes(nn.Module):
    """A bf16 body between an fp32 embedding and an fp64 head."""

    def __init__(self, body: torch.dtype, head: torch.dtype):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6).to(body)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3).to(head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(torch.tanh(self.body(x.to(self.body.weight.dtype))).to(x.dtype))
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [torch.float32, torch.float64])
def test_parameters_of_different_dtypes(head: torch.dtype, body: torch.dtype, mode: str) -> None:
    """Each sum is in fp32, or wider; norms are one number per sample over all."""
    torch.manual_seed(0)
    model = MixedDtypes(body, head)
    batch = ids(4, 5)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    bound = truth.norms.median().item()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    squares(flash, batch).backward()
    # The truth rounds every per-sample gradient to the dtype of its parameter.
    unit = torch.finfo(body).eps
    assert_close(flash.get_norm_sample(), truth.norms, max(unit, 1e-5), "norms")
    for name, grad in truth.clipped(bound).items():
        param = model.get_parameter(name)
        wide = torch.promote_types(param.dtype, torch.float32)
        assert param.grad is not None and param.grad.dtype == wide, name
        assert_close(param.grad, grad, max(4 * unit, 1e-5), name)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "tied"])
def test_uses_with_other_batch_sizes_are_refused_by_name(kind: str, mode: str) -> None:
    """Not by whatever then fails to put the uses together."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "tied":
                self.shared = nn.Embedding(7, 3)
                self.head = nn.Linear(3, 7, bias=False)
                self.head.weight = self.shared.weight
            else:
                self.shared = nn.Linear(3, 3) if kind == "linear" else nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "tied":
                return self.head(self.shared(x[:2]).repeat(2, 1, 1))
            # Backward comes to the other use, which is as it should be, first.
            uneven = self.shared(torch.cat([x, x]))[:4]
            return self.shared(x) + uneven

    shapes = {"linear": (4, 3), "convolution": (4, 3, 5)}
    x = torch.randint(7, (4, 5)) if kind == "tied" else torch.randn(shapes[kind])
    wrapped = GradSampleModuleFlashClipping(Uneven(), max_grad_norm=1.0, mode=mode)
    with pytest.raises(FlashClippingError, match=r"shared \(\w+\): what it reads has [28] rows"):
        wrapped(x).square().sum().backward()
