"""Batches that are filled up to few sizes are the batches that were drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    BatchEncoding,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)

from flash_clipping import Kernels
from flash_clipping.engine.micro_batches import Parts
from flash_clipping.trainers import few_shapes
from flash_clipping.trainers.few_shapes import FewShapes, round_up
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.graphs import replay_by_hand
from tests.support.oracle import assert_close
from tests.support.trainers import bert, trainer, weights


class Hooks:
    """What is asked of the hooks of a model whose calls are replayed."""

    def __init__(self, **config: Any):
        self._graphs: Any = self
        self.choice = self.running_step = self._module = self
        self.fill, self.counts_unclipped, self.is_made = 1.0, False, True
        self.config: Any = type("Config", (), config)

    def parameters(self) -> Iterator[Tensor]:
        yield torch.zeros(())

    def may_replay(self, device: torch.device) -> bool:
        return True


def texts(rows: int, width: int, on_left: bool = False) -> dict[str, Tensor]:
    ids, mask = torch.ones(rows, width, dtype=torch.long), torch.ones(rows, width)
    mask[0, slice(0, 2) if on_left else slice(width - 2, width)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows)}


def rounded(parts: list[Any], hooks: Any, *, most: int = 100, enabled: bool = True) -> Any:
    """The last of these parts as the model takes it, after the others, each of a shape of its
    own."""
    shapes, found = FewShapes(64, enabled), None
    with mock.patch.object(few_shapes, "CAPTURE", 0.0):
        for part in parts:
            size = len(part.get("input_ids", part.get("x", ())))
            found = shapes.rounded(part, size, most, hooks, lambda x: x)
    return found


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_batches_are_copied_without_waiting(tmp_path: Path, pinned: bool) -> None:
    private, copied = trainer(tmp_path, bert()), torch.ones(1)
    copies = mock.Mock(return_value=copied)
    with (
        mock.patch.object(Tensor, "is_pinned", lambda x: pinned),
        mock.patch.object(Tensor, "to", copies),
    ):
        inputs = private._prepare_inputs({"x": torch.zeros(1)})
    assert inputs["x"] is copied
    (call,) = copies.call_args_list
    assert call.kwargs.get("non_blocking", False) is pinned


@pytest.mark.gpu
def test_a_batch_of_the_loader_is_copied_to_a_gpu_without_waiting(tmp_path: Path) -> None:
    private = trainer(tmp_path, bert(), use_cpu=False)
    for batch in private.get_train_dataloader():
        torch.cuda.set_sync_debug_mode("error")
        try:
            inputs = [private._prepare_inputs(part) for part in batch.parts]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(x.is_cuda for part in inputs for x in part.values())


@pytest.mark.parametrize("is_made", [True, False])
def test_a_new_shape_has_to_pay(is_made: bool) -> None:
    """A batch is filled up to a shape that was met, until that has cost what a capture costs; not
    while replays are compared with calls as they are."""
    shapes, hooks, met = FewShapes(64, True), Hooks(), []
    hooks.is_made = is_made
    for size, width in [(64, 128), (32, 96), *[(64, 112)] * 60]:
        inputs, _ = shapes.rounded(texts(size, width), size, 64, hooks, lambda x: x)
        met.append(tuple(inputs["input_ids"].shape))
        assert {len(x) for x in inputs.values()} == {met[-1][0]}
        assert not inputs["attention_mask"][:, width:].any()
    filled = -(-few_shapes.CAPTURE // (128 / 112 - 1)) - 1 if is_made else 0
    assert met[:2] == [(64, 128), (32, 96)] and 0 <= filled < 60
    assert met[2:] == [(64, 128)] * int(filled) + [(64, 112)] * int(60 - filled)


@pytest.mark.parametrize("what", ["far smaller", "rows", "other arguments", "left"])
def test_shapes_that_no_batch_is_filled_up_to(what: str) -> None:
    shapes, part = FewShapes(64, True), texts(64, 112, on_left=what == "left")
    first = texts(64, 128)
    if what == "far smaller":
        part = texts(64, 80)
    elif what == "rows":
        first, part = texts(56, 128), texts(64, 112)
    elif what == "other arguments":
        part["token_type_ids"] = torch.zeros(64, 112, dtype=torch.long)
    for x in (first, part):
        size = len(x["labels"])
        inputs, rows = shapes.rounded(x, size, 64, Hooks(), lambda x: x)
    assert inputs["input_ids"].shape == part["input_ids"].shape and rows == size


def test_rows_and_lengths_are_rounded_up() -> None:
    hooks = Hooks(pad_token_id=7)
    part = texts(61, 123)
    inputs, rows = rounded([texts(64, 130), BatchEncoding(part)], hooks)
    assert inputs.input_ids is inputs["input_ids"]  # what collators return stays what it is
    assert rows == 64 and hooks.fill == pytest.approx((2 * 61 * 123 + 61) / (2 * 64 * 128 + 64))
    assert (inputs["input_ids"][:, 123:] == 7).all() and inputs["input_ids"].shape == (64, 128)
    assert not inputs["attention_mask"][:, 123:].any()
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(inputs[key][:61, :123], part[key]), key
    assert inputs["labels"].tolist() == [*range(61), 60, 60, 60]


def test_no_batch_gets_more_rows_than_fit() -> None:
    shapes = FewShapes(64, True)
    for size, most, rows in [(64, 64, 64), (56, 60, 56), (48, 64, 56)]:
        part = {"x": torch.zeros(size, 4)}
        assert shapes.rounded(part, size, most, Hooks(), lambda x: x)[1] == rows


def test_lengths_are_few() -> None:
    assert sorted({round_up(width) for width in range(1, 513)}) == [
        *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512
    ]  # fmt: skip
    assert all(width <= round_up(width) <= max(width + 7, 1.25 * width) for width in range(1, 2048))


def test_no_text_is_longer_than_the_collator_has_made_one() -> None:
    inputs, rows = rounded([texts(60, 90), texts(61, 90), texts(61, 85)], Hooks())
    assert rows == 64 and inputs["input_ids"].shape == (64, 90)  # 96 may be too long


def test_classes_are_no_positions() -> None:
    """Not even where a batch has texts of as many tokens as there are classes."""
    classes = {"labels": torch.zeros(61, 3, dtype=torch.long)}
    inputs, _ = rounded([texts(61, 8) | classes, texts(61, 5) | classes], Hooks())
    assert inputs["labels"].shape == (64, 3) and inputs["input_ids"].shape == (64, 8)
    inputs, _ = rounded([texts(61, 8) | classes, texts(61, 3) | classes], Hooks())
    assert inputs["labels"].shape == (64, 3) and inputs["input_ids"].shape == (64, 3)


def test_a_table_is_not_filled_where_it_has_as_many_rows() -> None:
    table = {"table": torch.ones(61)}
    part = {"x": torch.zeros(61, 4)} | table
    assert rounded([{"x": torch.zeros(60, 4)} | table, part], Hooks()) == (part, None)


@pytest.mark.parametrize(("size", "most", "rows"), [(3, 4, 4), (1, 1, 1), (0, 1, 1), (61, 62, 62)])
def test_no_part_has_more_rows_than_fit(size: int, most: int, rows: int) -> None:
    part = {"x": torch.zeros(max(1, size), 4)}
    assert FewShapes(64, True).rounded(part, size, most, Hooks(), lambda x: x)[1] == rows


@pytest.mark.parametrize("pad_token_id", [None, -1, [2, 3], "none"])
def test_tokens_that_stand_for_no_padding(pad_token_id: Any) -> None:
    config = {} if pad_token_id == "none" else {"pad_token_id": pad_token_id}
    inputs, _ = rounded([texts(61, 128), texts(61, 123)], Hooks(**config))
    assert not inputs["input_ids"][:, 123:].any() and inputs["input_ids"].shape == (64, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"position_ids": torch.zeros(61, 123)},  # nobody knows how to pad them
        {"attention_mask": torch.ones(61, 123, 123)},
        {"labels": torch.zeros(61, 123)},  # numbers, none of which is left out of a loss
    ],
)
def test_lengths_that_are_left(change: dict[str, Tensor]) -> None:
    inputs, rows = rounded([texts(61, 128) | change, texts(61, 123) | change], Hooks())
    assert rows == 64 and inputs["input_ids"].shape == (64, 123)


@pytest.mark.parametrize("what", ["padding on the left", "an empty text"])
def test_positions_stay_where_they_are(what: str) -> None:
    part = texts(61, 123, on_left=what == "padding on the left")
    if what == "an empty text":
        part["attention_mask"][1] = 0
    inputs, rows = rounded([texts(61, 128), part], Hooks())
    assert rows == 64 and inputs["input_ids"].shape == (64, 123)


@pytest.mark.parametrize("why", ["rows", "text", "adaptive", "off"])
def test_batches_that_are_left(why: str) -> None:
    hooks, part = Hooks(), {"x": torch.zeros(61, 4)}
    if why == "rows":
        part["y"] = torch.zeros(122, 4)
    elif why == "text":
        part["y"] = ["a"] * 61  # type: ignore[assignment]
    elif why == "adaptive":
        hooks.counts_unclipped = True
    assert rounded([part], hooks, enabled=why != "off") == (part, None)


class RowsOnly(Parts):
    def samples(self, part: Any, size: int, start: int, stop: int) -> Any:
        return {key: x[start:stop] for key, x in part.items()}


@pytest.mark.parametrize(
    ("usual", "size", "sizes"),
    [
        (64, 64, [64]),
        (64, 65, [36, 29]),
        (64, 100, [52, 48]),
        (64, 129, [44, 44, 41]),
        (50, 99, [50, 49]),
        (1, 3, [1, 1, 1]),
    ],
)
def test_large_draws_are_cut_while_calls_are_replayed(
    usual: int, size: int, sizes: list[int]
) -> None:
    part = texts(size, 8)
    batch = RowsOnly([part], [size])
    FewShapes(usual, True).cut(batch, Hooks())
    assert batch.sizes == sizes and [len(x["labels"]) for x in batch.parts] == sizes
    assert torch.equal(torch.cat([x["labels"] for x in batch.parts]), part["labels"])


@pytest.mark.parametrize("why", ["no graphs", "rows", "off"])
def test_draws_that_are_not_cut(why: str) -> None:
    hooks, part = Hooks(), texts(65, 8)
    if why == "rows":
        part["more"] = torch.zeros(130)
    elif why == "no graphs":
        hooks._graphs = None
    batch = RowsOnly([part], [65])
    FewShapes(64, why != "off").cut(batch, hooks)
    assert batch.parts == [part] and batch.sizes == [65]


def cut(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch whose texts are as long as its longest."""
    batch = default_data_collator([{k: x for k, x in s.items() if k != "index"} for s in samples])
    longest = int(batch["attention_mask"].sum(1).max())
    return {key: x[:, :longest] if x.dim() == 2 else x for key, x in batch.items()}


class NoRoom(PrivateTrainer):
    """Three rows fit."""

    def compute_sample_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if len(inputs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("more than three rows")
        return super().compute_sample_losses(model, inputs)


def trained(
    folder: Path, few_shapes: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Any, Any]:
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "optim": "sgd"}
    of_privacy = {"few_shapes": few_shapes, "max_grad_norm": 0.8} | settings.pop("of_privacy", {})
    private = trainer(
        folder,
        settings.pop("model", None) or bert(torch.float64),
        of_privacy=of_privacy,
        num_train_epochs=settings.pop("epochs", 3),
        learning_rate=1.0,
        more={"data_collator": cut} | settings.pop("more", {}),
        **(usual | settings),
    )
    attach = private.run.attach
    met: list[tuple[int, int]] = []

    def attached(*args: Any, **kwargs: Any) -> None:
        attach(*args, **kwargs)
        private._shapes.step = 2
        replay_by_hand(private.run.hooks)
        graphs = private.run.hooks._graphs
        GRAPHS[:] = [graphs]
        call = graphs._call

        def noted(args: Any, kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                met.append(tuple(kwargs["input_ids"].shape))
            return call(args, kwargs)

        graphs._call = noted

    monkeypatch.setattr(private.run, "attach", attached)
    private.train()
    return private, met


def parts_of_four(count: int) -> list[int]:
    """Rows of the parts of a draw, of four at most, in steps of two."""
    pairs, parts = max(1, -(-count // 2)), max(1, -(-count // 4))
    return [2 * (pairs // parts + (n < pairs % parts)) for n in range(parts)]


def test_a_training_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, sums and noise: with a seed the weights are those of batches as they were drawn."""
    few, met = trained(tmp_path, True, monkeypatch)
    plain, drawn = trained(tmp_path, False, monkeypatch)
    assert len({width for _, width in drawn}) > 1
    expected = []
    for n, (count, _) in enumerate(drawn):
        width = max(width for _, width in drawn[: n + 1])
        expected += [(rows, width) for rows in parts_of_four(count)]
    assert met == expected and max(rows for rows, _ in met) == 4 < max(n for n, _ in drawn)
    for one, other in zip(weights(few.model).values(), weights(plain.model).values(), strict=True):
        assert_close(one, other, 1e-9, "weights")
    assert few.epsilon == plain.epsilon


@pytest.mark.parametrize("found", [True, False])
def test_parts_have_no_more_rows_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    """Neither where a size is found by halves, nor where it is given."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "cls": NoRoom}
    if found:
        settings["auto_find_batch_size"] = True
    else:
        settings["of_privacy"] = {"max_physical_batch_size": 3}
    few, _ = trained(tmp_path, True, monkeypatch, **settings)
    plain, _ = trained(tmp_path, False, monkeypatch, **settings)
    for one, other in zip(weights(few.model).values(), weights(plain.model).values(), strict=True):
        assert_close(one, other, 1e-9, "weights")


def test_a_model_with_a_decoder_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache of keys and values is returned, which no replay renews."""
    config = T5Config(
        vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).double()
    texts = [{"input_ids": [n % 29 + 1, 5, 1], "labels": [n % 7 + 1, 1]} for n in range(20)]
    more = {"train_dataset": texts, "eval_dataset": None, "data_collator": default_data_collator}
    given = {"model": model, "more": more, "label_names": ["labels"], "epochs": 6}
    private, met = trained(tmp_path, True, monkeypatch, **given)
    counted: Any = GRAPHS.pop()
    assert len(met) > 12 and counted.off is None and counted.replays > 6
    assert private.run.steps == private.state.global_step


GRAPHS: list[Any] = []


@pytest.mark.parametrize(
    ("kernels", "replays"),
    [
        (None, True),
        (Kernels(backend="torch"), True),
        (Kernels(backend="torch", cuda_graphs="off"), False),
    ],
)
def test_graphs_are_the_default_beside_other_choices(
    tmp_path: Path, kernels: Kernels | None, replays: bool
) -> None:
    class Watched(PrivateTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.replays = self.run.hooks._graphs is not None
            self.backend = self.run.hooks._session.options.backend
            return super().training_step(*args, **kwargs)

    made: Any = trainer(tmp_path, cls=Watched, of_privacy={"kernels": kernels}, max_steps=1)
    made.train()
    assert made.replays == replays
    assert made.backend == ("auto" if kernels is None else "torch")
