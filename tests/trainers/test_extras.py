"""What is said where a package of an extra is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from flash_clipping.noise.releases import dp_accounting
from flash_clipping.trainers import private
from tests.support.errors import raises

USERS = {
    "transformers": ("flash_clipping.trainers.transformers", ["transformers", "accelerate"]),
    "trl": ("flash_clipping.trainers.trl", ["trl"]),
    "lightning": ("flash_clipping.trainers.lightning", ["lightning.pytorch.callbacks"]),
}


@pytest.mark.parametrize(
    "extra, missing", [(extra, name) for extra, (_, names) in USERS.items() for name in names]
)
def test_a_trainer_names_its_extra(
    extra: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = USERS[extra][0]
    monkeypatch.delitem(sys.modules, user, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with raises("FC940", ImportError, match=rf"{user} needs .*flash-clipping\[{extra}\]") as error:
        importlib.import_module(user)
    assert str(error.value).splitlines()[-1] == f"    pip install -e '.[{extra}]'"


def test_private_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_clipping.trainers.transformers", raising=False)
    monkeypatch.delattr("flash_clipping.trainers.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises("FC940", ImportError, match=r"flash-clipping\[transformers\]"):
        private(object)


def test_the_accountant_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with raises("FC940", ImportError, match=r'accountant="pld" needs .*\[accounting\]'):
        dp_accounting()
