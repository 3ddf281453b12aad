"""The private form of any subclass of ``transformers.Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_clipping.errors import InvalidType
from flash_clipping.trainers import transformers as hf


def private_of(trainer: type[hf.Trainer]) -> type[hf.PrivateTrainer]:
    """As :func:`flash_clipping.trainers.private`."""
    if not (isinstance(trainer, type) and issubclass(trainer, hf.Trainer)):
        raise InvalidType(
            f"FC809 private: found {trainer!r}; expected a subclass of transformers.Trainer:\n"
            "    trainer = private(Trainer)(model, args, privacy=privacy, ...)"
        )
    if issubclass(trainer, hf.PrivateTrainer):
        return trainer
    own = _own_forms(trainer)
    known: Any = next(cls for cls in trainer.__mro__ if cls in own)
    if known is trainer:
        return own[trainer]
    theirs: Any = trainer
    members = {"__module__": trainer.__module__}
    if hasattr(theirs, "compute_sample_losses"):
        members["compute_sample_losses"] = theirs.compute_sample_losses
    return type(f"Private{trainer.__name__}", (own[known], trainer), members)


def _own_forms(trainer: type[hf.Trainer]) -> Mapping[type[hf.Trainer], type[hf.PrivateTrainer]]:
    """Trainers that have a private form here, those of TRL where this is one of them."""
    own = {hf.Seq2SeqTrainer: hf.PrivateSeq2SeqTrainer, hf.Trainer: hf.PrivateTrainer}
    if any(cls.__module__.partition(".")[0] == "trl" for cls in trainer.__mro__):
        from trl import DPOTrainer, RewardTrainer, SFTTrainer

        from flash_clipping.trainers import trl

        return {
            SFTTrainer: trl.PrivateSFTTrainer,
            DPOTrainer: trl.PrivateDPOTrainer,
            RewardTrainer: trl.PrivateRewardTrainer,
        } | own
    return own
