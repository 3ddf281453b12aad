"""The comparison before a first step takes part in tests, unless they are marked."""

from __future__ import annotations

import pytest

from flash_clipping.capture.proof.gate import Gate


def test_the_gate_is_on_in_a_new_file() -> None:
    assert Gate.examine.__qualname__ == "Gate.examine"


@pytest.mark.without_gate
def test_the_gate_is_off_where_it_is_marked() -> None:
    assert Gate.examine.__qualname__ != "Gate.examine"
