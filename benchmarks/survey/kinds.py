"""The kinds of models: what is built, and what it is called with.

A kind is a class of ``transformers`` with a small configuration. Mixtures of experts have a page of
their own (``docs/mixtures.md``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.survey.inputs import Inputs
from benchmarks.survey.tiny import tiny


@dataclass(frozen=True)
class Help:
    """What a user writes so that a kind is exact which is refused as it is."""

    #: In words of the page.
    words: str
    #: Arguments of the wrapper.
    options: dict[str, Any] = field(default_factory=dict)
    #: Prefixes of parameters that are frozen.
    frozen: tuple[str, ...] = ()
    #: Whether layers are replaced as ``ModuleValidator.fix`` does.
    replaces: bool = False


@dataclass(frozen=True)
class Kind:
    """One set-up of the survey.

    Attributes:
        name: how the page and ``--only`` call it.
        cls: the class of ``transformers``.
        inputs: what it is called with.
        changes: fields of its configuration that are not as :func:`tiny` makes them.
        help: tried in turn where the kind is refused as it is.
    """

    name: str
    cls: str
    inputs: Inputs
    changes: dict[str, Any]
    help: tuple[Help, ...] = ()
    #: Where the model's own code does not run in float64.
    dtype: torch.dtype = torch.float64

    def build(self, chance: bool = False) -> nn.Module:
        """The model, with random weights; ``chance``: with the dropout of its configuration."""
        import transformers

        cls = getattr(transformers, self.cls)
        changes = copy.deepcopy(self.changes)  # configurations take out of what they are made of
        config = cls.config_class(**tiny(cls.config_class, changes, chance))
        model: nn.Module = cls(config)
        return model


def kind(
    cls: str,
    inputs: Inputs,
    *help: Help,
    name: str | None = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Kind:
    return Kind(name or cls, cls, inputs, changes, help, dtype)


def each(inputs: Inputs, names: str, **changes: Any) -> list[Kind]:
    """Kinds of these classes, which are built alike."""
    return [kind(cls, inputs, **changes) for cls in names.split()]


def all_kinds() -> dict[str, dict[str, Kind]]:
    """Section of the page -> name -> kind."""
    from benchmarks.survey import audio, dense, text, vision, vision_and_text

    sections: dict[str, list[Kind]] = {
        "Language models": text.LANGUAGE,
        "State-space and recurrent models": text.RECURRENT,
        "Encoders and their tasks": text.ENCODERS,
        "Text to text": text.TEXT_TO_TEXT,
        "Experts with a forward of their own": text.EXPERTS,
        "Images and videos": vision.IMAGES,
        "Detection, segmentation, depth": dense.DENSE,
        "Audio": audio.AUDIO,
        "Time series and actions": audio.SERIES,
        "Several modalities": vision_and_text.MODELS,
    }
    found = {title: {kind.name: kind for kind in kinds} for title, kinds in sections.items()}
    for title, kinds in sections.items():
        assert len(found[title]) == len(kinds), f"{title}: a name twice"
    return found
