"""Private training in trainers that own the loop: Hugging Face's, Lightning's; a dashboard for any.

Each trainer is an optional dependency, imported by its own module only.
"""

from __future__ import annotations

from typing import Any

from flash_clipping.errors import InvalidType

__all__ = ["private"]


def private(trainer: type) -> Any:
    """The private form of any subclass of ``transformers.Trainer``.

    ::

        trainer = private(TheirTrainer)(
            model=model, args=args, train_dataset=dataset, privacy=PrivacyArguments(...))

    Args:
        trainer: the class. ``Trainer``, ``Seq2SeqTrainer`` and TRL's ``SFTTrainer``, ``DPOTrainer``
            and ``RewardTrainer`` have private forms in this package, which are returned.

    Returns:
        A subclass of :class:`~flash_clipping.trainers.transformers.PrivateTrainer` and of it.

    Raises:
        TypeError: it is no subclass of ``Trainer``.
        ValueError: when the trainer is made: a ``compute_loss`` of its own, without
            ``compute_sample_losses``; what else a private trainer does not support.
    """
    from flash_clipping.trainers import transformers as hf

    if not (isinstance(trainer, type) and issubclass(trainer, hf.Trainer)):
        raise InvalidType(
            f"FC809 private: found {trainer!r}; expected a subclass of transformers.Trainer:\n"
            "    trainer = private(Trainer)(model, args, privacy=privacy, ...)"
        )
    if issubclass(trainer, hf.PrivateTrainer):
        return trainer
    forms: list[type] = [hf.PrivateTrainer, hf.PrivateSeq2SeqTrainer]
    if any(cls.__module__.partition(".")[0] == "trl" for cls in trainer.__mro__):
        from flash_clipping.trainers import trl

        forms += [trl.PrivateSFTTrainer, trl.PrivateDPOTrainer, trl.PrivateRewardTrainer]
    own = {form.__bases__[-1]: form for form in forms}  # by the trainer that it is a form of
    known: Any = next(cls for cls in trainer.__mro__ if cls in own)
    if known is trainer:
        return own[trainer]
    theirs: Any = trainer
    members = {"__module__": trainer.__module__}
    if hasattr(theirs, "compute_sample_losses"):
        members["compute_sample_losses"] = theirs.compute_sample_losses
    return type(f"Private{trainer.__name__}", (own[known], trainer), members)
