"""Operands that descriptors cannot address are copied to where they can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.runtime import backend, tables
from flash_clipping.ops.runtime.tables import on_16_bytes, operand_row

tiles = pytest.importorskip("flash_clipping.ops.runtime.tiles")


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the interpreter plays the kernels; and of small operands."""
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tiles, "has_tma", lambda device: True)  # as most versions of Triton have it
    monkeypatch.setattr(tables, "WORTH_A_COPY", 1)


HALF = torch.randn(3, 5, 9, dtype=torch.float16)

BADLY: dict[str, Tensor] = {
    "fp16": HALF,
    "bf16": HALF.bfloat16(),
    "fp32": HALF.float(),
    "time first": HALF.transpose(0, 1),
    "features apart": torch.randn(3, 8, 5).mT,
    "one position": HALF[:, :1],
    "one sample": HALF[:1],
    "narrow": HALF[..., :1],
    "every other row": torch.randn(3, 10, 9)[:, ::2],
}

WELL: dict[str, Tensor] = {
    "whole rows": torch.randn(3, 5, 8),
    "room between rows": torch.randn(3, 5, 12)[..., :9],
    "the same row": torch.randn(9).expand(3, 5, 9),
    "time first": torch.randn(5, 3, 8).transpose(0, 1),
    "float64": HALF.double(),
    "nothing": torch.randn(3, 0, 9),
}


@pytest.mark.parametrize("x", BADLY.values(), ids=BADLY.keys())
def test_rows_that_no_descriptor_addresses_are_copied(x: Tensor) -> None:
    rows = on_16_bytes(x)
    assert rows.shape == x.shape and rows.dtype == x.dtype and torch.equal(rows, x)
    read, (address, stride_b, stride_t, width), aligned = operand_row(rows)
    assert read is rows and aligned and address == rows.data_ptr() and width == x.shape[2]
    assert stride_b == x.shape[1] * stride_t and stride_t - width < 16 // x.element_size()
    assert on_16_bytes(rows) is rows


@pytest.mark.parametrize("x", WELL.values(), ids=WELL.keys())
def test_rows_that_descriptors_address_are_not_copied(x: Tensor) -> None:
    assert on_16_bytes(x) is x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_vocabulary_rows_are_copied(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(2, 128, 50257, device="cuda", dtype=dtype)
    rows = on_16_bytes(x)
    assert (rows is not x) == (tiles.has_tma(x.device) and dtype != torch.float64)
    assert torch.equal(rows, x)
    few = x[:, :1]
    assert on_16_bytes(few) is few
