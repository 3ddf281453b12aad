"""Private training in trainers that own the loop: Hugging Face's, Lightning's; a dashboard for any.

Each trainer is an optional dependency, imported by its own module only.
"""

from __future__ import annotations

from typing import Any

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
    from flash_clipping.trainers.any_trainer import private_of

    return private_of(trainer)
