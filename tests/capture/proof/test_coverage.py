"""When a model is looked at again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flash_clipping.capture.proof.coverage import KINDS, Coverage


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))


def call(*shape: int, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(*shape),), kwargs


def test_audits_are_of_the_1st_2nd_4th_8th_step() -> None:
    coverage, root = Coverage(0), model()
    found = [coverage.due(root, *call(6, 3), 2) for _ in range(18)]
    assert found[0] == 0
    assert [n for n, due in enumerate(found) if due] == [1, 2, 4, 8, 16]
    assert [due for due in found if due] == [1, 2, 3, 4, 5]


def test_another_batch_size_or_length_asks_for_nothing() -> None:
    coverage, root = Coverage(0), model()
    assert coverage.due(root, *call(6, 5, 3), 2) == 0
    assert [coverage.due(root, *call(n, t, 3), 2) for n, t in ((7, 5), (600, 9), (2, 2))] == [
        1,
        2,
        None,
    ]


def test_another_kind_of_call_is_proven() -> None:
    coverage, root = Coverage(0), model()
    calls = [
        call(6, 5, 3),
        call(1, 5, 3),  # one sample shows nothing of others
        call(6, 1, 3),
        call(6, 0, 3),
        call(6, 3),
        call(6, 5, 3, mask=None),
        call(6, 5, 3, mask=torch.ones(6, 5)),
    ]
    assert [coverage.due(root, *given, 2) for given in calls] == [0] * len(calls)
    root[1].eval()
    assert coverage.due(root, *calls[0], 2) == 0
    assert coverage.due(root, *calls[0], 3) == 0  # other parameters are trainable
    with torch.autocast("cpu", torch.bfloat16):
        assert coverage.due(root, *calls[0], 3) == 0
    assert coverage.due(root, *calls[0], 3) == 1


def test_an_argument_that_counts_steps_makes_few_kinds() -> None:
    coverage, root = Coverage(0), model()
    found = [coverage.due(root, *call(6, 3, step=n), 2) for n in range(40)]
    assert found.count(0) == KINDS + 1


def test_what_is_forgotten_is_proven_again() -> None:
    coverage, root = Coverage(0), model()
    for _ in range(2):
        assert coverage.due(root, *call(6, 3), 2) == 0
        coverage.forget()
