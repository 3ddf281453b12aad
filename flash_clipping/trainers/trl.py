"""TRL's trainers with differential privacy: a text, or a pair of texts, is one sample.

Shape suffixes: ``B`` texts or pairs, ``R`` rows, ``T`` positions, ``K`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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


def _pairs(items: list[Any], batch: Any) -> Tensor:
    """``[R]``: which pair each row is of. Chosen texts come first, then all rejected ones."""
    return torch.arange(len(items)).repeat(2)


def _documents(items: list[Any], batch: Any) -> Tensor:
    """``[1, T]``: which text each position is of, -1 for padding at the end."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    found = torch.full_like(batch["input_ids"], -1)
    found[0, : int(lengths.sum())] = torch.arange(len(items)).repeat_interleave(lengths)
    return found


def _tagged(collate: Any, name: str, whose: Any, items: list[Any]) -> Any:
    """A batch that says whose each row, or position, is."""
    batch = collate(items)
    batch[name] = whose(items, batch)
    return batch


class _OfTRL(PrivateTrainer):
    """What the private forms of TRL's trainers have in common.

    Attributes:
        config: the class of their arguments.
        supported: by the name of a setting, its values under which a loss is what is computed here.
        advice: the end of an error about others.
    """

    config: Any
    supported: Mapping[str, Collection[Any]] = {}
    advice = "For another loss override compute_sample_losses."

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        cls, wanted = type(self), self.config
        args = _bound(cls, arguments, kwargs).arguments["args"]
        if not isinstance(args, wanted):
            raise InvalidValue(
                f"FC809 {cls.__name__}: found args of type {type(args).__name__}; expected "
                f"{wanted.__name__}:\n    from trl import {wanted.__name__}"
            )
        given = {name: getattr(args, name) for name in self.supported}
        if found := [f"{n}={x!r}" for n, x in given.items() if x not in self.supported[n]]:
            expected = ", ".join(f"{n} of {[*values]}" for n, values in self.supported.items())
            raise InvalidValue(
                f"FC802 {cls.__name__}: found {', '.join(found)}; expected {expected}. "
                f"{self.advice}"
            )
        name, whose = self._unit_of(args)
        if name and privacy.unit is not None:
            raise InvalidValue(
                f"FC801 PrivacyArguments: found unit={privacy.unit} for one of TRL's trainers, "
                f"which says itself whose each row is ({name!r}). Leave it out."
            )
        privacy = replace(privacy, unit=Documents(name)) if name else privacy
        super().__init__(*arguments, privacy=privacy, **kwargs)
        if name:
            self.data_collator = partial(_tagged, self.data_collator, name, whose)

    def _unit_of(self, args: Any) -> tuple[str, Any]:
        """The name of the part of a batch that says whose each row is, if any, and what makes
        it."""
        return "pair", _pairs


class PrivateSFTTrainer(_OfTRL, SFTTrainer):
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

    config = SFTConfig
    supported = {"packing": (False,), "loss_type": ("nll",)}
    advice = (
        f"{_OfTRL.advice} Which texts share a row of a packed set depends on all texts. Let those "
        "that a step draws lie end to end, without padding:\n"
        "    SFTConfig(packing=False, padding_free=True, max_length=None)"
    )

    def _unit_of(self, args: SFTConfig) -> tuple[str, Any]:
        return ("document", _documents) if args.padding_free else ("", None)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of every text, ``[B]``: the mean over its own tokens, fp32."""
        return super().compute_sample_losses(model, inputs)


class PrivateDPOTrainer(_OfTRL, DPOTrainer):
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

    config = DPOConfig
    supported = {
        "loss_type": [[name] for name in _DPO_LOSSES],
        "f_divergence_type": ("reverse_kl",),
        "ld_alpha": (None,),
        "loss_weights": (None,),
        "use_weighting": (False,),
        "router_aux_loss_coef": (0.0, None),
    }

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
        (loss,) = self.args.loss_type  # type: ignore[attr-defined]  # of DPOConfig
        return _DPO_LOSSES[loss](margin_B, self.beta)

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


class PrivateRewardTrainer(_OfTRL, RewardTrainer):
    """``trl.RewardTrainer`` with differential privacy for every pair of ``train_dataset``.

    A pair, its chosen and its rejected text, is one sample, whose loss is as TRL's.
    ``per_device_train_batch_size`` counts pairs.

    Args:
        *arguments, **kwargs: as in ``RewardTrainer``.
        privacy: how private the run is.
    """

    config = RewardConfig

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
