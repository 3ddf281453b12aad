"""Experts of ``transformers`` that have a forward of their own: against autograd, sample by sample.

Texts are padded. Every sample has its own routes, and some experts get no row of some samples.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, check_steps, check_with_dropout, squares
from tests.support.wrapping import MODES

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, SAMPLES = 40, 5
LENGTHS = 7, 4, 6, 2, 5

#: Routers of Switch, and normalizations, are in fp32, and round otherwise in other batches.
ROUNDED = 5e-7

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False
)
_HEADS: dict[str, Any] = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_key_value_heads=2,
    intermediate_size=24,
    num_local_experts=4,
)
_SIDE: dict[str, Any] = dict(layers=1, ffn_dim=24, attention_heads=4, sparse_step=1, layerdrop=0.0)

#: Class and configuration; what is named in ``DROPOUT`` comes on top.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        dict(
            d_model=16,
            n_heads=2,
            n_layers=1,
            max_seq_len=32,
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
            ffn_config=dict(ffn_hidden_size=24, hidden_size=16, moe_num_experts=4, moe_top_k=2),
        ),
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        _HEADS | dict(kv_channels=4, num_experts_per_tok=2),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _HEADS
        | dict(
            num_attention_heads=4,
            head_dim=4,
            intermediate_size_mlp=24,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
        ),
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        dict(
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_heads=4,
            num_layers=1,
            num_decoder_layers=1,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
            router_jitter_noise=0.0,
            decoder_start_token_id=2,
        ),
    ),
    "nllb": (
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {f"{side}_{name}": x for side in ("encoder", "decoder") for name, x in _SIDE.items()}
        | dict(d_model=16, num_experts=4, decoder_start_token_id=2),
    ),
}
DROPOUT = {
    "dbrx": ["resid_pdrop"],
    "jetmoe": ["attention_dropout"],
    "llama4": ["attention_dropout"],
    "switch": ["dropout_rate"],
    "nllb": ["dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"],
}


def small(family: str, drop: float = 0.0) -> Any:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    cls, config, fields = FAMILIES[family]
    fields = _COMMON | copy.deepcopy(fields) | dict.fromkeys(DROPOUT[family], drop)
    model = getattr(transformers, cls)(getattr(transformers, config)(**fields))
    for param in model.parameters():
        nn.init.normal_(param, std=0.3 if param.dim() > 1 else 0.1)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):  # a router, which casts its weights
            module.dtype = torch.float64
    return model.double().train()


def texts(
    family: str, lengths: tuple[int, ...] = LENGTHS, side: str = "right"
) -> tuple[Tensor, ...]:
    """Ids and their mask; of models with a decoder those of its own as well."""
    torch.manual_seed(len(lengths))
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    if side == "left":
        mask = mask.flip(1)
    batch = ids * mask, mask
    return (*batch, *(x.flip(0) for x in batch)) if family in ("switch", "nllb") else batch


def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Of each sample; padding has none."""
    names = "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"
    logits = model(**dict(zip(names, batch, strict=False))).logits
    weights = torch.linspace(0.5, 1.5, logits[0].numel(), dtype=logits.dtype)
    values = (logits.square() * weights.view(logits.shape[1:])).mean(-1)
    return (values * batch[-1]).sum(1)


def mean_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return losses(model, batch).mean()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded(family: str, side: str) -> None:
    check_by_autograd(small(family), texts(family, side=side), mean_loss, tolerance=ROUNDED)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout(family: str) -> None:
    check_with_dropout(small(family, 0.2), texts(family), losses, tolerance=ROUNDED)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modes(family: str, mode: str) -> None:
    check_by_autograd(small(family), texts(family), mean_loss, mode=mode, tolerance=ROUNDED)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing(family: str) -> None:
    model = small(family)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    else:  # JetMoE
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    check_by_autograd(model, texts(family), mean_loss, tolerance=ROUNDED)


@pytest.mark.parametrize("trained", ["router", "expert", "norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_model(family: str, trained: str) -> None:
    model = small(family)
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name or "lm_head" in name)
    check_by_autograd(model, texts(family), mean_loss, tolerance=ROUNDED)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_batches(family: str) -> None:
    """Other sizes, lengths and routes, after one rehearsal."""
    batches = [texts(family, lengths) for lengths in (LENGTHS, (3, 8), (9, 1, 1, 4), (6,))]
    check_steps(small(family), batches, mean_loss, tolerance=ROUNDED)


class PositionsFirst(nn.Module):
    """A block of experts that gets tokens position by position."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(16, 16), block, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x)).transpose(0, 1).contiguous()
        y = self.block(hidden)
        y = y[0].view_as(hidden) if isinstance(y, tuple) else y
        return self.after((hidden + y).transpose(0, 1))


BLOCKS = dict(
    dbrx="transformer.blocks.0.ffn",
    jetmoe="model.layers.0.mlp",
    llama4="model.layers.0.feed_forward",
    switch="encoder.block.0.layer.1.mlp",
    nllb="model.encoder.layers.0.ffn",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_sample_that_do_not_lie_together_are_refused(family: str) -> None:
    block = small(family).get_submodule(BLOCKS[family])
    for name, param in block.named_parameters():
        param.requires_grad_("router" not in name)  # it would be refused by itself
    model = PositionsFirst(block).double()
    flash = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError, match="(?i)rows"):
        squares(flash, (torch.randn(4, 4, 16, dtype=torch.float64),)).backward()


@pytest.mark.parametrize("family", ["switch", "nllb"])
def test_an_expert_that_may_be_full_is_refused(family: str) -> None:
    model = small(family)
    routers = [module for module in model.modules() if hasattr(module, "expert_capacity")]
    for router in routers:
        router.expert_capacity = 34  # tokens are 35
    flash = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError, match=r"router.*capacity of 34 for 35 tokens") as found:
        mean_loss(flash, texts(family))
    line = str(found.value).splitlines()[-1].strip()
    assert line.endswith(".expert_capacity = 2**31")
    with torch.no_grad():
        flash(*texts(family)[:2], decoder_input_ids=texts(family)[2])
    for router in routers:
        router.expert_capacity = 2**31
    mean_loss(flash, texts(family)).backward()


def test_rows_in_another_order_than_the_routers_are_refused() -> None:
    model = small("jetmoe")
    flash = GradSampleModuleFlashClipping(model)
    experts = model.model.layers[0].mlp.input_linear
    tap = experts.forward
    experts.forward = lambda rows, sizes: tap(rows, [*sizes])
    with pytest.raises(FlashClippingError, match=r"layers.0.mlp.input_linear .* its router put"):
        mean_loss(flash, texts("jetmoe"))


def test_an_activation_with_parameters_is_refused() -> None:
    model = small("llama4")
    for layer in model.model.layers:
        layer.feed_forward.experts.act_fn = nn.PReLU().double()
    flash = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError, match="experts"):
        mean_loss(flash, texts("llama4")).backward()
