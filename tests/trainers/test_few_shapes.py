"""Batches that are filled up to few sizes are the batches that were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from flash_clipping.trainers.few_shapes import FewShapes, round_up
from tests.support.graphs import replay_by_hand
from tests.support.oracle import assert_close
from tests.support.trainers import bert, trainer, weights


class Hooks:
    """What is asked of the hooks of a model whose calls are replayed."""

    def __init__(self, **config: Any):
        self._graphs: Any = self
        self.choice = self.running_step = self._session = self.rows = self
        self.units_of_calls = self._module = self
        self.fill, self.counts_unclipped, self.are_known = 1.0, False, False
        self.config: Any = type("Config", (), config)

    def may_replay(self, device: torch.device) -> bool:
        return True


def texts(rows: int, width: int, on_left: bool = False) -> dict[str, Tensor]:
    ids, mask = torch.ones(rows, width, dtype=torch.long), torch.ones(rows, width)
    mask[0, slice(0, 2) if on_left else slice(width - 2, width)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows)}


def rounded(part: Any, size: int, hooks: Any, usual: int = 64, enabled: bool = True) -> Any:
    return FewShapes(usual, enabled).rounded(part, size, hooks, lambda x: x)


@pytest.mark.parametrize("on_left", [False, True])
def test_rows_and_lengths_are_rounded_up(on_left: bool) -> None:
    hooks = Hooks(pad_token_id=7)
    part = texts(61, 123, on_left)
    inputs, rows = rounded(BatchEncoding(part), 61, hooks)
    assert inputs.input_ids is inputs["input_ids"]  # what collators return stays what it is
    assert rows == 64 and hooks.fill == pytest.approx((2 * 61 * 123 + 61) / (2 * 64 * 128 + 64))
    added = slice(0, 5) if on_left else slice(123, 128)
    assert (inputs["input_ids"][:, added] == 7).all() and inputs["input_ids"].shape == (64, 128)
    assert not inputs["attention_mask"][:, added].any()
    kept = slice(5, 128) if on_left else slice(0, 123)
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(inputs[key][:61, kept], part[key]), key
    assert inputs["labels"].tolist() == [*range(61), 60, 60, 60]


def test_lengths_are_few() -> None:
    assert sorted({round_up(width) for width in range(1, 513)}) == [
        *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512
    ]  # fmt: skip
    assert all(width <= round_up(width) <= max(width + 7, 1.25 * width) for width in range(1, 2048))


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({"position_ids": torch.zeros(61, 123)}, {}),  # nobody knows how to pad them
        ({}, {"max_position_embeddings": 124}),
    ],
)
def test_lengths_that_are_left(change: dict[str, Tensor], config: dict[str, int]) -> None:
    inputs, rows = rounded(texts(61, 123) | change, 61, Hooks(**config))
    assert rows == 64 and inputs["input_ids"].shape == (64, 123)


@pytest.mark.parametrize("why", ["rows", "text", "units", "adaptive", "off"])
def test_batches_that_are_left(why: str) -> None:
    hooks, part = Hooks(), {"x": torch.zeros(61, 4)}
    if why == "rows":
        part["y"] = torch.zeros(122, 4)
    elif why == "text":
        part["y"] = ["a"] * 61  # type: ignore[assignment]
    elif why == "units":
        hooks.are_known = True
    elif why == "adaptive":
        hooks.counts_unclipped = True
    assert rounded(part, 61, hooks, enabled=why != "off") == (part, None)


def trained(folder: Path, few_shapes: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    private = trainer(
        folder,
        bert(torch.float64, max_position_embeddings=32),
        of_privacy={"few_shapes": few_shapes},
        num_train_epochs=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        optim="sgd",
    )
    attach = private.run.attach
    met: list[tuple[int, int]] = []

    def attached(*args: Any, **kwargs: Any) -> None:
        attach(*args, **kwargs)
        replay_by_hand(private.run.hooks)
        graphs = private.run.hooks._graphs
        call = graphs._call

        def noted(args: Any, kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                met.append(tuple(kwargs["input_ids"].shape))
            return call(args, kwargs)

        graphs._call = noted

    monkeypatch.setattr(private.run, "attach", attached)
    private.train()
    return private, met


def test_a_training_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, sums and noise: with a seed the weights are those of batches as they were drawn."""
    few, met = trained(tmp_path, True, monkeypatch)
    plain, drawn = trained(tmp_path, False, monkeypatch)
    assert len(met) == len(drawn)
    for (rows, width), (count, _) in zip(met, drawn, strict=True):
        assert width == 8 and rows == max(2, count + count % 2)
    for one, other in zip(weights(few.model).values(), weights(plain.model).values(), strict=True):
        assert_close(one, other, 1e-9, "weights")
    assert few.epsilon == plain.epsilon
