"""Parameters that are not trained: adapters, prompts, frozen uses of shared parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.autograd import check_by_autograd, id_batch, squares
from tests.support.hugging_face import gpt2, own_loss
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bitfit(wrapper: str, mode: str) -> None:
    """Only biases are trained."""
    model = gpt2()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    check_by_autograd(model, id_batch(4, 8, vocabulary=17), own_loss, wrapper=wrapper, mode=mode)


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
    check_by_autograd(model, id_batch(4, 8, vocabulary=17), own_loss, wrapper=wrapper, mode=mode)


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
    check_by_autograd(
        Prompted(), id_batch(4, 6, vocabulary=17), squares, wrapper=wrapper, mode=mode
    )
