"""Configurations of ``transformers`` with a few features and layers: what a default one has is made
small by the names of its fields, and the same in the configurations that it is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

#: Sizes by the names of fields, where a configuration has them.
_LIST = Path(__file__).with_name("sizes.yaml")
SIZES: dict[str, Any] = {
    name: size
    for size, names in yaml.safe_load(_LIST.read_text(encoding="utf-8")).items()
    for name in names.split()
} | {"use_cache": False}

#: Parts of names whose numbers are probabilities of leaving something out: 0.
_CHANCE = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def tiny(
    cls: Any, changes: Mapping[str, Any] | None = None, chance: bool = False
) -> dict[str, Any]:
    """Arguments that make a small configuration of this class.

    Args:
        cls: a ``PreTrainedConfig``.
        changes: fields with other values; a mapping, for a configuration inside, those of its own.
        chance: probabilities of leaving something out stay as they are.
    """
    changes = dict(changes or {})
    inner = {name: kind for name, kind in cls.sub_configs.items() if isinstance(kind, type)}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = field.name
        if name in changes or name in inner:
            continue
        if name in SIZES:
            default = _default(field)
            if not isinstance(default, list | tuple):
                found[name] = SIZES[name]
            elif name in ("image_size", "patch_size"):
                found[name] = [SIZES[name]] * len(default)
        elif (
            not chance
            and any(part in name for part in _CHANCE)
            and isinstance(field.default, float)
        ):
            found[name] = 0.0
    for name, kind in inner.items():
        if hasattr(kind, "sub_configs") and name not in changes and kind.__name__ != "AutoConfig":
            found[name] = tiny(kind, None, chance)
        elif isinstance(changes.get(name), Mapping) and "model_type" not in changes[name]:
            found[name] = tiny(kind, changes.pop(name), chance)
    return {**found, **changes}
