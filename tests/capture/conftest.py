"""What several files use: compiled models begin anew, and random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def same_numbers() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
