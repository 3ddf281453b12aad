"""TRL's trainers with differential privacy: a text, or a pair of texts, is one sample.

Shape suffixes: ``B`` texts or pairs, ``R`` rows, ``T`` positions, ``K`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.errors import InvalidValue, missing_extra

try:
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
    from trl.trainer.dpo_trainer import use_adapter
except ImportError as error:
    raise missing_extra("trl", __name__, error) from error

from flash_clipping.engine.sampling.units import Documents
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.transformers import PrivateTrainer, _bound

__all__ = ["PrivacyArguments", "PrivateDPOTrainer", "PrivateRewardTrainer", "PrivateSFTTrainer"]

#: A loss from the margin ``[B]`` between the gains of the chosen and of the rejected texts, with
#: how strongly these count.
_DPO_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(beta * margin),
    "hinge": lambda margin, beta: F.relu(1 - beta * margin),
}


def _tagged(
    collate: Any, name: str, whose: Callable[[list[Any], Any], Tensor], items: list[Any]
) -> Any:
    """A batch that says whose each row, or position, is."""
    batch = collate(items)
    batch[name] = whose(items, batch)
    return batch


def _by(privacy: PrivacyArguments, name: str) -> PrivacyArguments:
    """The privacy of samples that this part of a batch tells."""
    if privacy.unit is not None:
        raise InvalidValue(
            f"FC801 PrivacyArguments: found unit={privacy.unit} for "
            f"one of TRL's trainers, which says itself whose each row is ({name!r}). Leave it out."
        )
    return replace(privacy, unit=Documents(name))


def _config(cls: type, wanted: type, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a trainer, of the class that its settings are in."""
    args = _bound(cls, arguments, kwargs).arguments["args"]
    if not isinstance(args, wanted):
        raise InvalidValue(
            f"FC809 {cls.__name__}: found args of type {type(args).__name__}; expected "
            f"{wanted.__name__}:\n    from trl import {wanted.__name__}"
        )
    return args


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """``trl.SFTTrainer`` with differential privacy for every text of ``train_dataset``.

    The loss of a text is the mean over its own tokens. With ``padding_free=True`` the texts of a
    part of a batch lie end to end in one row, and each is one sample all the same.

    Args:
        *arguments, **kwargs: as in ``SFTTrainer``.
        privacy: how private the run is.

    Raises:
        ValueError: ``packing``: which texts share a row is chosen by the lengths of all of them,
            so that one text more changes other rows; another loss than ``"nll"``.
    """

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        args: SFTConfig = _config(type(self), SFTConfig, arguments, kwargs)
        if args.packing:
            raise InvalidValue(
                "FC802 PrivateSFTTrainer: found packing=True. Which texts share a row depends on "
                "all texts. Let those that a step draws lie end to end, without padding:\n"
                "    SFTConfig(packing=False, padding_free=True, max_length=None)"
            )
        if args.loss_type != "nll":
            raise InvalidValue(
                f"FC802 PrivateSFTTrainer: found loss_type={args.loss_type!r}; expected 'nll'. For "
                "another loss override compute_sample_losses."
            )
        if args.padding_free:
            privacy = _by(privacy, "document")
        super().__init__(*arguments, privacy=privacy, **kwargs)
        if args.padding_free:
            self.data_collator = partial(_tagged, self.data_collator, "document", _documents)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of every text, ``[B]``: the mean over its own tokens, fp32."""
        return super().compute_sample_losses(model, inputs)


def _documents(items: list[Any], batch: Any) -> Tensor:
    """``[1, T]``: which text each position is of, -1 for padding at the end."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    found = torch.full_like(batch["input_ids"], -1)
    found[0, : int(lengths.sum())] = torch.arange(len(items)).repeat_interleave(lengths)
    return found


def _pairs(items: list[Any], batch: Any) -> Tensor:
    """``[R]``: which pair each row is of. Chosen texts come first, then all rejected ones."""
    return torch.arange(len(items)).repeat(2)


class PrivateDPOTrainer(PrivateTrainer, DPOTrainer):
    """``trl.DPOTrainer`` with differential privacy for every pair of ``train_dataset``.

    A pair, its prompt, the chosen and the rejected text, is one sample: it is drawn, clipped and
    accounted as a whole. ``per_device_train_batch_size`` counts pairs.

    Args:
        *arguments, **kwargs: as in ``DPOTrainer``. Reference models and adapters as there.
        privacy: how private the run is.

    Raises:
        ValueError: other losses than ``"sigmoid"`` and ``"hinge"`` with reverse KL, or settings
            that change them.
    """

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        args: DPOConfig = _config(type(self), DPOConfig, arguments, kwargs)
        divergence = args.f_divergence_type
        losses = [args.loss_type] if isinstance(args.loss_type, str) else [*args.loss_type]
        found = {
            "loss_type": None if len(losses) == 1 and losses[0] in _DPO_LOSSES else losses,
            "f_divergence_type": None if divergence == "reverse_kl" else divergence,
            "ld_alpha": args.ld_alpha,
            "loss_weights": args.loss_weights,
            "use_weighting": args.use_weighting or None,
            "router_aux_loss_coef": args.router_aux_loss_coef or None,
        }
        if refused := {name: value for name, value in found.items() if value is not None}:
            listed = ", ".join(f"{name}={value!r}" for name, value in refused.items())
            raise InvalidValue(
                f"FC802 PrivateDPOTrainer: found {listed}; expected loss_type of "
                f"{sorted(_DPO_LOSSES)}, f_divergence_type='reverse_kl', and nothing else that "
                "changes the loss. For another loss override compute_sample_losses."
            )
        self._loss_of_margin = _DPO_LOSSES[losses[0]]
        super().__init__(*arguments, privacy=_by(privacy, "pair"), **kwargs)
        self.data_collator = partial(_tagged, self.data_collator, "pair", _pairs)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of every pair, ``[B]``, fp32."""
        inputs = dict(inputs)
        mask_RT = inputs.pop("completion_mask")
        known = [inputs.pop(f"ref_{name}_logps", None) for name in ("chosen", "rejected")]
        chosen, rejected = self._gains(model, inputs, mask_RT)
        if known[0] is None:
            with torch.no_grad():
                known = [*self._of_reference(inputs, mask_RT)]
        margin_B = (chosen - known[0]) - (rejected - known[1])
        return self._loss_of_margin(margin_B, self.beta)

    def _of_reference(self, inputs: dict[str, Any], mask_RT: Tensor) -> tuple[Tensor, Tensor]:
        if self.ref_model is not None:
            plain = {name: x for name, x in inputs.items() if name != "pair"}
            return self._gains(self.ref_model, plain, mask_RT)
        model: Any = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._gains(model, inputs, mask_RT)

    def _gains(self, model: Any, inputs: dict[str, Any], mask_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the chosen and of the rejected completions, ``[B]`` each, fp32."""
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        words = inputs["input_ids"][:, 1:]
        gains_RT = logits.gather(2, words[..., None]).squeeze(2) - logits.logsumexp(2)
        gains_R = torch.where(mask_RT[:, 1:] != 0, gains_RT, 0.0).sum(1)
        chosen, rejected = gains_R.chunk(2)
        return chosen, rejected


class PrivateRewardTrainer(PrivateTrainer, RewardTrainer):
    """``trl.RewardTrainer`` with differential privacy for every pair of ``train_dataset``.

    A pair, its chosen and its rejected text, is one sample, whose loss is as TRL's.
    ``per_device_train_batch_size`` counts pairs.

    Args:
        *arguments, **kwargs: as in ``RewardTrainer``.
        privacy: how private the run is.
    """

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        _config(type(self), RewardConfig, arguments, kwargs)
        super().__init__(*arguments, privacy=_by(privacy, "pair"), **kwargs)
        self.data_collator = partial(_tagged, self.data_collator, "pair", _pairs)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of every pair, ``[B]``, fp32."""
        inputs = dict(inputs)
        margin_B = inputs.pop("margin", 0.0)
        rewards_R = model(**inputs, use_cache=False).logits.squeeze(-1)
        rewards_R = rewards_R.to(torch.promote_types(rewards_R.dtype, torch.float32))
        chosen, rejected = rewards_R.chunk(2)
        losses = -F.logsigmoid(chosen - rejected - margin_B)
        args: Any = self.args  # RewardConfig
        if (coefficient := args.center_rewards_coefficient) is not None:
            losses = losses + coefficient * (chosen + rejected).square()
        return losses
