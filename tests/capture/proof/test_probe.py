"""Where samples are in what layers return, as gradients show it: rows of padding are nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.probe import (
    MANY,
    NOBODY,
    ROUTED,
    SEVERAL,
    UNFIT,
    UNREACHED,
    SampleLayout,
    layout_of_owners,
    owners_of,
    probe,
)
from flash_clipping.capture.proof.runs import Subject
from tests.capture.proof.mixers import RIGHT, WRONG, Around, K, T
from tests.capture.proof.proving import table_of
from tests.capture.proof.test_oracle import padded_texts

pytestmark = pytest.mark.filterwarnings("ignore")


def in_words(found: SampleLayout) -> str:
    if (layout := found.layout) is None:
        return found.kind
    axis = f", axis {layout.axis}" if layout.axis else ""
    if found.parts == 1:
        return "position by position" if axis else "sample by sample"
    return f"{found.parts} parts of each sample together{axis}"


def layouts(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    """In words, by path; one for each call, or one alone where they are the same."""
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(model)
    found = probe(Subject(model, model.forward, flash._session, args, kwargs)).layouts
    return {path: [*dict.fromkeys(map(in_words, calls))] for path, calls in found.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "sample by sample"),
        ("dropout", "sample by sample"),
        ("gate of 0", "sample by sample"),
        ("time first", "position by position"),
        ("flat", "4 parts of each sample together"),
        ("first position alone", "sample by sample"),
        ("attention, masked", "sample by sample"),
        ("checkpoint", "sample by sample"),
        ("checkpoint, re-entrant", "sample by sample"),
        ("twice", "sample by sample"),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_regular_layouts(name: str, kind: str, count: int) -> None:
    found = layouts(Around(RIGHT[name]), torch.randn(count, T, K))
    assert found["layer"] == [kind] and found["embed"] == ["sample by sample"]


@pytest.mark.parametrize("name", ["flat, time first", "halves"])
def test_rows_of_a_sample_that_lie_apart_have_no_layout(name: str) -> None:
    assert layouts(Around(WRONG[name]), torch.randn(5, T, K))["layer"] == [ROUTED.kind]


@pytest.mark.parametrize("count", [1, 5])
def test_a_table_of_positions_has_no_layout(count: int) -> None:
    found = layouts(Around(RIGHT["positions, looked up"]), torch.randn(count, T, K))
    assert found["table"] == [SEVERAL.kind]


def test_several_samples_in_a_row() -> None:
    def pooled(m: Any, h: Tensor) -> Tensor:
        return h + m.layer(h.mean(0, keepdim=True))

    # The output of the model shows it: nothing may go backward from it.
    model = Around(pooled)
    flash = GradSampleModuleFlashClipping(model)
    found = probe(Subject(model, model.forward, flash._session, (torch.randn(5, T, K),), {}))
    assert found.unfit == {0} and set(found.layouts["layer"]) == {UNFIT}


def test_calls_of_one_layer_with_other_layouts() -> None:
    def both(m: Any, h: Tensor) -> Tensor:
        return m.layer(m.layer(h).flatten(0, 1)).view_as(h)

    found = layouts(Around(both), torch.randn(5, T, K))
    assert found["layer"] == ["sample by sample", "4 parts of each sample together"]


def test_tokens_that_were_chosen_are_routed() -> None:
    def routed(m: Any, h: Tensor) -> Tensor:
        tokens = h.flatten(0, 1)
        chosen = torch.tensor([1, 0, 7, 4, 11, 3, 9])
        return h + torch.zeros_like(tokens).index_copy(0, chosen, m.layer(tokens[chosen])).view_as(
            h
        )

    assert layouts(Around(routed), torch.randn(3, T, K))["layer"] == [ROUTED.kind]


def test_many_samples_that_must_come_together() -> None:
    """A model of one batch size is looked at whole."""

    class Fixed(Around):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.view(9, T, K))

    assert layouts(Fixed(RIGHT["time first"]), torch.randn(9, T, K))["layer"] == [
        "position by position"
    ]


@pytest.mark.parametrize("B", [1, 2, 5])
def test_every_owner_and_rows_that_have_two(B: int) -> None:
    rows: list[set[int]] = [{b} for b in range(B)] + [set()]
    rows += [{0, B - 1}, {*range(B)}] if B > 1 else []
    masks = [torch.tensor([b in owners for owners in rows]) for b in range(B)]
    found = owners_of(masks).tolist()
    assert found == [*range(B), NOBODY, *([MANY, MANY] if B > 1 else [])]


def test_the_simplest_layout_that_fits() -> None:
    def kind(*owners: int, shape: tuple[int, ...] = ()) -> str:
        return in_words(layout_of_owners(torch.tensor(owners).view(shape or -1), 3))

    assert kind(0, 1, 2) == "sample by sample"
    assert kind(0, -1, 1, 1, -1, 2) == "2 parts of each sample together"
    assert kind(0, 1, 2, 0, -1, 2) == ROUTED.kind
    assert kind(0, 2, 1) == ROUTED.kind
    assert kind(0, 1, -2) == SEVERAL.kind
    assert kind(-1, -1, -1) == UNREACHED.kind
    assert kind(0, 1, 2, 0, 1, 2, shape=(2, 3)) == "position by position"
    assert kind(0, 0, 1, 1, 2, 2, shape=(3, 2)) == "sample by sample"


SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def opt() -> nn.Module:
    more = {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, **more, use_cache=False))


def longformer() -> nn.Module:
    more = {"intermediate_size": 24, "attention_window": 4, "max_position_embeddings": 40}
    return transformers.LongformerModel(transformers.LongformerConfig(**SMALL, **more))


def jetmoe() -> nn.Module:
    more = {"num_key_value_heads": 2, "kv_channels": 4, "intermediate_size": 24}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    del (small := dict(SMALL))["num_attention_heads"]
    return transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**small, **more, **experts))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, intermediate_size=24, use_cache=False)
    )


@pytest.mark.parametrize("make", [opt, longformer, llama])
def test_padded_texts(make: Any) -> None:
    """Every layer is regular, or a table of positions."""
    inputs = dict(padded_texts())
    if make is longformer:
        del inputs["labels"]
    found = layouts(make().train(), **inputs)
    kinds = {kind for calls in found.values() for kind in calls}
    regular = {SEVERAL.kind, UNREACHED.kind, "sample by sample", "position by position"}
    parts = {kind for kind in kinds if "parts of each sample together" in kind}
    assert "sample by sample" in kinds and kinds - parts <= regular
    assert (make is opt) == bool(parts)


def test_experts_of_a_padded_text_are_routed() -> None:
    found = layouts(jetmoe().train(), **dict(padded_texts()))
    assert {path for path, kinds in found.items() if ROUTED.kind in kinds} >= {
        path for path in found if path.endswith(("input_linear", "output_linear"))
    }
    assert found["model.layers.0.self_attention.kv_proj"] == ["sample by sample"]


def test_opt_is_exact_by_what_the_probe_found() -> None:
    """Padded texts, whose rows no comparison of values could tell apart."""
    assert table_of(opt().train(), kwargs=dict(padded_texts()), settles=True, audits=1).outputs


def test_an_unfit_output_does_not_hide_where_samples_are() -> None:
    class Pairs(Around):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x).flatten(1)
            return {"rows": y, "pairs": y @ y.T}

    assert layouts(Pairs(RIGHT["plain"]), torch.randn(5, T, K))["layer"] == ["sample by sample"]


def test_a_shuffled_layer_is_no_regular_one() -> None:
    assert layouts(Around(WRONG["rolled inside"]), torch.randn(5, T, K))["layer"] == [ROUTED.kind]
