"""Experts of ``transformers`` that have a forward of their own: against autograd, sample by sample.

Texts are padded. Every sample has its own routes, and some experts get no row of some samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.survey.kinds import all_kinds
from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, check_with_dropout, squares
from tests.support.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = all_kinds()["Experts with a forward of their own"]

VOCABULARY = 40
LENGTHS = 7, 4, 6, 2, 5

#: Routers of Switch, and normalizations, are in fp32, and round otherwise in other batches.
ROUNDED = 1e-6

#: Where a family has none of its own.
DROPOUT: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {"resid_pdrop": 0.2},
    "JetMoeForCausalLM": {"attention_dropout": 0.2},
    "Llama4ForCausalLM": {"attention_dropout": 0.2},
}


#: What families call the number of their layers, where it is not ``num_hidden_layers``.
LAYERS = {
    "DbrxForCausalLM": ["n_layers"],
    "SwitchTransformersForConditionalGeneration": ["num_layers", "num_decoder_layers"],
    "NllbMoeForConditionalGeneration": ["encoder_layers", "decoder_layers"],
}


def small(family: str, chance: bool = False, layers: int = 1) -> Any:
    kind = FAMILIES[family]
    changes = kind.changes | dict.fromkeys(LAYERS.get(family, ["num_hidden_layers"]), layers)
    changes |= DROPOUT.get(family, {}) if chance else {}
    torch.manual_seed(0)
    model: Any = replace(kind, changes=changes).build(chance)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3 if param.dim() > 1 else 0.1)
    return model.double().train()


def texts(family: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, ...]:
    """Ids and their mask; of models with a decoder those of its own as well."""
    torch.manual_seed(len(lengths))
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = ids * mask, mask
    return (*batch, *(x.flip(0) for x in batch)) if "Conditional" in family else batch


def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Of each sample; padding has none."""
    names = "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"
    logits = model(**dict(zip(names, batch, strict=False))).logits
    weights = torch.linspace(0.5, 1.5, logits.shape[1:].numel(), dtype=logits.dtype)
    values = (logits.square() * weights.view(logits.shape[1:])).mean(-1)
    return (values * batch[-1]).sum(1)


def mean_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return losses(model, batch).mean()


@pytest.mark.without_gate
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_dropout_match_one_forward(family: str) -> None:
    check_with_dropout(small(family, chance=True), texts(family), losses, tolerance=ROUNDED)


@pytest.mark.without_gate
@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_two_passes_match_autograd(family: str) -> None:
    check_by_autograd(small(family), texts(family), mean_loss, mode="two_pass", tolerance=ROUNDED)


class PositionsFirst(nn.Module):
    """A block of experts that gets tokens position by position."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(32, 32), block, nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x)).transpose(0, 1).contiguous()
        y = self.block(hidden)
        y = y[0].view_as(hidden) if isinstance(y, tuple) else y
        return self.after((hidden + y).transpose(0, 1))


BLOCKS = (
    "transformer.blocks.0.ffn",
    "model.layers.0.mlp",
    "model.layers.0.feed_forward",
    "encoder.block.1.layer.1.mlp",
    "model.encoder.layers.0.ffn",
)


@pytest.mark.parametrize(("family", "path"), [*zip(FAMILIES, BLOCKS, strict=True)])
def test_tokens_of_a_sample_that_do_not_lie_together_are_refused(family: str, path: str) -> None:
    block = small(family, layers=2).get_submodule(path)
    for name, param in block.named_parameters():
        param.requires_grad_("router" not in name)  # it would be refused by itself
    model = PositionsFirst(block).double()
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC201|FC202|FC210", match="(?i)rows"):
        squares(flash, (torch.randn(4, 4, 32, dtype=torch.float64),)).backward()


@pytest.mark.parametrize("family", [name for name in FAMILIES if "Conditional" in name])
def test_an_expert_that_may_be_full_is_refused(family: str) -> None:
    model = small(family)
    routers = [module for module in model.modules() if hasattr(module, "expert_capacity")]
    for router in routers:
        router.expert_capacity = 34  # tokens are 35
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC105", match="router.*34 for 35 tokens") as found:
        mean_loss(flash, texts(family))
    line = str(found.value).splitlines()[-1].strip()
    assert line.endswith(".expert_capacity = 2**31")
    with torch.no_grad():
        flash(*texts(family)[:2], decoder_input_ids=texts(family)[2])
    for router in routers:
        router.expert_capacity = 2**31
    mean_loss(flash, texts(family)).backward()


def test_rows_in_another_order_than_the_routers_are_refused() -> None:
    model = small("JetMoeForCausalLM")
    flash = GradSampleModuleFlashClipping(model)
    experts = model.model.layers[0].mlp.input_linear
    tap = experts.forward
    experts.forward = lambda rows, sizes: tap(rows, [*sizes])
    with raises("FC124", match="layers.0.mlp.input_linear"):
        mean_loss(flash, texts("JetMoeForCausalLM"))
