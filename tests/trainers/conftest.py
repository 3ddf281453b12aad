"""What other packages say in every training, and no test asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

IGNORED = ("ignore:GDP accounting is experimental", "ignore:Secure RNG turned off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for words in IGNORED:
                # In front of those of a file or a test, which may say otherwise.
                item.add_marker(pytest.mark.filterwarnings(words), append=False)
