"""Families of ``transformers`` whose rows no rehearsal finds: gradients do, or their routing."""

from __future__ import annotations

import pytest

from benchmarks.survey import pool
from benchmarks.survey.kinds import all_kinds

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("LEDForConditionalGeneration", "right"),
        ("LongformerForMaskedLM", "right"),
        ("NllbMoeForConditionalGeneration", "dropout"),
        ("OPTForCausalLM", "right"),
        ("PerceiverForMaskedLM", "right"),
        ("Qwen2VLForConditionalGeneration", "right"),
        ("SwitchTransformersForConditionalGeneration", "left"),
        ("ViltForQuestionAnswering", "right"),
        ("WavLMForCTC", "whole"),
    ],
)
def test_exact_without_a_declaration(name: str, mode: str) -> None:
    (kind,) = [kinds[name] for kinds in all_kinds().values() if name in kinds]
    finding = pool.find(kind, mode)
    assert finding is not None and finding.outcome.verdict == "exact", finding
