"""Items that are units, and what is refused with ``unit``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from flash_clipping import (
    Documents,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PoissonSampling,
    Users,
)
from flash_clipping.engine.sampling.loaders import OrderedCollate
from tests.support.draws import drawn
from tests.support.errors import raises
from tests.support.packed import Reader
from tests.support.private import TwoLayers
from tests.support.users import BATCH, IDS, ROWS, data, private, step

# -- items that are units: Documents -------------------------------------------------


def packed(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Two views of each item."""
    x = torch.stack([x for x, _ in rows]).repeat_interleave(2, 0) if rows else torch.empty(0, 6)
    labels = torch.tensor([int(row) for _, row in rows], dtype=torch.long).repeat_interleave(2)
    return x, labels, torch.arange(len(rows)).repeat_interleave(2)


def test_views_of_an_item() -> None:
    module, optimizer, criterion, loader = private(
        loader=DataLoader(data(), batch_size=BATCH, collate_fn=packed),
        unit=Documents("item"),
    )
    for x, rows, item in loader:
        optimizer.zero_grad()
        (criterion(module(x, item=item), rows % 3) / 2).backward()
        assert len(module.get_norm_sample()) == len(x) // 2
        optimizer.step()


@pytest.mark.parametrize("change", [lambda item: item // 2, lambda item: item.clamp(min=1)])
def test_items_that_are_joined_are_refused(change: Any) -> None:
    module, optimizer, criterion, loader = private(
        loader=DataLoader(data(), batch_size=BATCH, collate_fn=packed),
        unit=Documents("item"),
    )
    with raises("FC273", match=r"\d+"):
        for x, _, item in loader:
            if len(x) > 2:
                module(x, item=change(item))


class Texts(Dataset[Any]):
    """Token ids of documents of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 17, (1 + index % 5,), generator=generator)


def in_one_row(documents: list[Tensor]) -> dict[str, Tensor]:
    numbers = [torch.full((len(d),), n) for n, d in enumerate(documents)]
    places = [torch.arange(len(d)) for d in documents]
    columns = {"ids": documents, "places": places, "document": numbers}
    return {name: torch.cat(found)[None] for name, found in columns.items()}


def test_documents_that_are_packed() -> None:
    """Drawn one by one, packed by the collate function, clipped one by one."""
    loader = DataLoader(Texts(), batch_size=4, collate_fn=in_one_row)
    model = Reader()
    module, optimizer, criterion, loader = private(
        model=model, loader=loader, unit=Documents("document"), max_grad_norm=0.1
    )
    sizes = [1]
    while min(sizes) > 0 or max(sizes) <= 4:  # one batch in fifty is empty
        assert len(sizes) < 2000
        for batch in loader:
            optimizer.zero_grad()
            logits = module(**batch)
            criterion(logits.flatten(0, 1), batch["ids"].flatten() % 4).backward()
            sizes.append(len(module.get_norm_sample()))
            assert sizes[-1] == drawn(module) in (0, int(batch["document"].max() + 1))
            optimizer.step()
    assert min(sizes) == 0 and max(sizes) > 4
    assert optimizer.expected_batch_size == 4


def test_logical_batches_of_documents() -> None:
    """Items are split between physical batches, and no unit is."""
    loader = DataLoader(Texts(), batch_size=8, collate_fn=in_one_row)
    module, optimizer, criterion, loader = private(
        model=Reader(), loader=loader, unit=Documents("document")
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as batches:
        for batch in batches:
            optimizer.zero_grad()
            logits = module(**batch)
            criterion(logits.flatten(0, 1), batch["ids"].flatten() % 4).backward()
            assert len(module.get_norm_sample()) <= 3
            optimizer.step()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": Users(IDS[1:])}, r"Users: found shape \(35,\) for a dataset of 36 rows"),
        ({"poisson_sampling": False}, r"unit: .*poisson_sampling=False"),
        ({"grad_sample_mode": "ghost"}, r"unit: found with another grad_sample_mode"),
        ({"unit": Documents("x"), "grad_sample_mode": "ghost"}, r"unit: .*'flash'"),
    ],
)
def test_refused_arguments(options: dict[str, Any], words: str) -> None:
    with raises("FC281|FC313", ValueError, match=words):
        private(**options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Users(IDS.float()), r"Users: found torch.float32; expected an integer"),
        (lambda: Users(IDS > 50), r"Users: found torch.bool"),
        (lambda: Users(IDS, max_rows=0), r"max_rows: found 0; .* in \[1, inf\)"),
        (lambda: private(unit=Documents(IDS)), r"Documents: found Tensor"),
        (lambda: private(unit=IDS), r"unit: found .*Tensor.*; .*\n    unit=Users\(ids\)"),
    ],
)
def test_refused_units(make: Any, words: str) -> None:
    with raises("FC280|FC281|FC302|FC319", (ValueError, TypeError), match=words):
        make()


def test_a_model_that_takes_a_map_already() -> None:
    wrapped = GradSampleModuleFlashClipping(TwoLayers(), unit=Documents("user"))
    with raises("FC173", ValueError, match=r"'unit': Documents\(argument='user'\)"):
        private(model=wrapped)


def test_splitting_batches_is_refused() -> None:
    module, optimizer, criterion, loader = private()
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as batches,
        raises("FC283"),
    ):
        next(iter(batches))


def test_a_forward_of_other_rows() -> None:
    module, _, _, loader = private()
    with raises("FC244"):
        module(torch.randn(5, 6))
    batches = iter(loader)
    x, _ = next(batches)
    module(x)
    while len(x) < 2:
        x, _ = next(batches)
        module(x)
    with raises("FC243", match=r"\d+"):
        module(x[1:])
    with torch.no_grad():
        module(x[1:])
    del batches
    module(x)
    x, _ = next(iter(loader))  # of a loop that nobody goes on with
    module(x).sum().backward()
    with raises("FC243"):
        module(torch.randn_like(x))


def test_a_batch_after_a_refused_forward() -> None:
    """It is announced; the batch that was refused has been skipped."""
    module, _, _, loader = private()
    batches = iter(loader)
    x, _ = next(batches)
    with raises("FC243", match=r"\d+"):
        module(x[1:])
    x, _ = next(batches)
    module(x).sum().backward()


def test_batches_that_are_fetched_ahead() -> None:
    """Their rows are not those of the last batch, whose map would be theirs."""
    module, _, _, loader = private()
    batches = [batch for batch in loader if len(batch[0])]
    for x, _ in batches[:-1]:
        with raises("FC243"):
            module(x)


def test_private_again() -> None:
    """Of a loader that is private already, with other units, and without."""
    engine = FlashPrivacyEngine(accountant="rdp")
    module, optimizer, criterion, loader = private(engine)
    model, optimizer = module._module, optimizer.original_optimizer
    module = module.to_standard_module()
    again = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        unit=Users(torch.arange(ROWS) % 9),
    )
    for x, rows in again[3]:
        assert len(step(*again[:3], x, rows)) == len({int(row) % 9 for row in rows})
    assert isinstance(again[0], GradSampleModuleFlashClipping)


def in_order_of_values(rows: list[Any]) -> Any:
    return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))


def noisy(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + torch.randn_like(x), y


@pytest.mark.parametrize("collate", [in_order_of_values, noisy])
@pytest.mark.parametrize("what", ["units", "max_batch_size"])
def test_collate_functions_that_do_not_keep_order(what: str, collate: Any) -> None:
    """The engine says by their places whose rows they are, and which of them count."""
    pld = pytest.importorskip("dp_accounting") and "pld"
    options = (
        {} if what == "units" else {"unit": None, "mechanism": PoissonSampling(max_batch_size=12)}
    )
    engine = FlashPrivacyEngine(accountant="rdp" if what == "units" else pld)
    loader = DataLoader(data(), batch_size=BATCH, collate_fn=collate)
    *_, loader = private(engine, loader=loader, **options)
    with raises("FC284", match=rf"collate_fn: {what} goes by the order"):
        list(loader)


def test_order_is_looked_at_until_rows_differ() -> None:
    calls = []

    def collate(rows: list[Tensor]) -> dict[str, Any]:
        calls.append(len(rows))
        return {"x": torch.stack(rows), "names": ["a"] * len(rows), "all": torch.ones(3)}

    ordered = OrderedCollate(collate, "units")
    for rows in ([0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 2.0]):
        batch = ordered([torch.tensor([value]) for value in rows])
        assert batch["x"].flatten().tolist() == rows
    assert calls == [1, 2, 2, 2, 2, 2]
