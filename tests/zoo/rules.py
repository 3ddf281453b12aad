"""Models that between them use every rule of the library."""

from __future__ import annotations

from tests.support.models import CASES as MODELS
from tests.zoo.case import ModelCase

CASES: dict[str, ModelCase] = {
    name: ModelCase(
        model.make,
        model.batch,
        model.loss,
        options={"strict": False},
        always=("units", "not_finite"),
        without=("functorch",) if name == "hyper_connections" else (),  # has its rule alone
    )
    for name, model in MODELS.items()
}
