"""Gradients of outputs that are not each sample's own are refused in backward."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from flash_clipping.capture.inputs import batched_inputs, tensors_in
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.oracle import Examination, examine
from flash_clipping.capture.proof.runs import Subject
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.two_pass import TwoWalks
from flash_clipping.errors import FlashClippingError
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.ops.runtime.checks import check_on_device

logger = logging.getLogger("flash_clipping")

#: The first step that is audited; then every one that is twice as far: what all audits cost
#: together grows as the logarithm of the steps.
FIRST_AUDIT = 32

#: So many calls in a row whose samples are all alike (zeros, to warm up) are followed by an audit:
#: where samples are alike, what mixes them is not seen.
ALIKE = 4


class Gate:
    """Asks the oracle about calls of a model, and lets only gradients of fit outputs back."""

    def __init__(self) -> None:
        #: A number that is another one when other parameters are trainable.
        self._trainable = 0
        #: Calls that were counted, and at which of them the next audit is due.
        self.calls, self.next_audit = 0, FIRST_AUDIT
        self._alike = 0
        #: Whether audits make chance alike for all samples, as one was needed that did.
        self._watched = False
        #: Dtypes that calls were seen to compute in.
        self._dtypes: frozenset[torch.dtype] = frozenset()

    def is_due(self) -> bool:
        """Count the call that begins; whether it is to be audited. What chance decides (a coin that
        is tossed for the batch) one proof may miss."""
        self.calls += 1
        return self.calls >= self.next_audit

    @property
    def is_next(self) -> bool:
        """Whether the next call is to be audited."""
        return self.calls + 1 >= self.next_audit

    def take_audit(self) -> int:
        """The number of the audit that is due now; the next is due after twice as many calls."""
        self.next_audit = max(2 * self.calls, FIRST_AUDIT)
        return max(self.calls.bit_length() - FIRST_AUDIT.bit_length() + 1, 1)

    def examine(self, subject: Subject, trainable: int, audit: int = 0) -> None:
        """Note which outputs of such a call are unfit, if any can be compared: the model may return
        no tensor with a row for each sample, or not run on this batch.

        Args:
            subject: the call.
            trainable: a number that is another one when other parameters are trainable.
            audit: 0 for the proof before the first step, then the number of the audit.
        """
        if trainable != self._trainable:
            self._trainable = trainable
            for kind in subject.session.proof.kinds.values():
                kind.why = {}
        session, args, kwargs = subject.session, subject.args, subject.kwargs
        if session.calls.backward_pass_class not in (BackwardPass, TwoWalks):
            return  # somebody else watches
        if not any(x.dim() > session.options.batch_axis for x in batched_inputs(args, kwargs)):
            return
        kind = subject.kind
        if not kind.why:
            logger.info("checking which rows are samples")
        brief = audit > 1  # the first one sees what begins in training as the proof would
        unfit = frozenset([number for (_, number), why in kind.why.items() if why])
        dtypes = self._dtypes if audit else frozenset[torch.dtype]()
        how = Examination(audit, brief, self._watched or not brief, unfit, dtypes)
        for small in subject.smaller(seed=audit):
            try:
                table = examine(small, how)
                break
            except ModelsOwnError:
                pass
            except torch.OutOfMemoryError:
                return  # one sample fits
        else:
            return  # the model's own forward will raise it
        self._dtypes |= table.dtypes
        self._watched |= table.by_chance
        for doubt in table.doubts:
            self.next_audit, self._watched = self.calls + 1, True
            logger.warning("rounding, or to be seen again in the next call: %s", doubt)
        if small.samples().are_alike and self._alike < ALIKE:
            self._alike += 1
            self.next_audit = self.calls + 1
        # A loss that the model computes itself may read what is unfit.
        other = next(iter(table.unfit.values()), "")
        for number in range(table.returned):  # what was shown once stays
            place = table.returned, number
            why = "" if number in table.outputs else table.unfit.get(number, other)
            why = why or table.losses.get(number, "")
            kind.why[place] = kind.why.get(place) or why

    def refuse(
        self,
        root: nn.Module,
        session: ClippingSession,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Refuse gradients that come back to unfit outputs of a call with these arguments."""
        kinds = session.proof.kinds
        all_whys = [why for kind in kinds.values() for why in kind.why.values() if why]
        if not session.mode.enabled or not all_whys:
            return
        tensors, known = tensors_in(output), kinds.find(root, args, kwargs).why
        # What was never compared may be any of them.
        whys = [known.get((len(tensors), n), all_whys[0]) for n in range(len(tensors))]
        is_part = any(x.numel() == 1 for x, why in zip(tensors, whys, strict=True) if not why)
        for tensor, why in zip(tensors, whys, strict=True):
            if why and tensor.requires_grad:
                # A loss that is fit may hold such a number times 0.
                may_be_0 = is_part and tensor.numel() == 1
                tensor.register_hook(partial(_refuse_gradient, session, why, may_be_0))


def _refuse_gradient(session: ClippingSession, why: str, may_be_0: bool, grad: Any) -> None:
    if not session.mode.enabled or grad is None:  # two passes go through all outputs
        return
    if not may_be_0:
        raise FlashClippingError(why)
    check_on_device(grad == 0, why)
