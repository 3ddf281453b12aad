"""Opacus' optimizers for clipped sums, with noise, accumulation and scaling in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers import (
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.optimizer import (
    _check_processed_flag,
    _generate_noise,
    _mark_as_processed,
)
from torch import Tensor

from flash_clipping.ops.noise import noisy_means


class FlashDPOptimizer(DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping``, step for step, with fewer passes over memory.

    ``p.grad`` becomes ``(p.summed_grad + N(0, (noise_multiplier * max_grad_norm)^2)) /
    expected_batch_size``, drawn from ``generator`` if one is given, in Opacus' way in secure mode.

    Args:
        max_grad_norm: clipping bound; a list with one bound per parameter for per-layer clipping,
            where the sensitivity is the norm of the list.
        **kwargs: as in Opacus.
    """

    _bound: float
    _module: Any = None
    _iterations = 1

    def __init__(self, optimizer: Any, *, max_grad_norm: float | Sequence[float], **kwargs: Any):
        self.max_grad_norms: list[float] | None = None
        if isinstance(max_grad_norm, Sequence):
            self.max_grad_norms = list(max_grad_norm)
            max_grad_norm = sum(bound**2 for bound in self.max_grad_norms) ** 0.5
        super().__init__(optimizer, max_grad_norm=max_grad_norm, **kwargs)

    def follow(self, module: Any) -> None:
        """Keep the module's bound equal to this optimizer's, and count its backward passes.

        Noise and clipping must use the same bound; a scheduler changes the optimizer's only.
        """
        self._module = module

    @property
    def accumulated_iterations(self) -> int:
        """Backward passes whose sums the running step adds up; the accountant counts them."""
        pending = 0 if self._module is None else self._module.backward_count
        return pending or self._iterations

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks first of the optimizer that it is given.

        Raises:
            ValueError: always. The scale is in the norms, so that samples are clipped at
                ``max_grad_norm / scale``; and a step that is skipped because of some sample's
                overflow is a release without noise.
        """
        raise ValueError(
            "torch.amp.GradScaler: found scaler.step(optimizer) on a private optimizer. Gradients "
            "were clipped as they came, multiplied by the scale, and are divided by it before "
            "noise is added. Call loss.backward() and optimizer.step() without the scaler (samples "
            "that overflow are left out), or use bfloat16, which needs no scaling."
        )

    @property
    def max_grad_norm(self) -> float:
        """Sensitivity of the sum: what the noise multiplier is multiplied by."""
        return self._bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        changed = getattr(self, "_bound", value) != value
        self._bound = value
        if changed and self._module is not None and self.max_grad_norms is None:
            self._module.max_grad_norm = value

    def accumulate(self) -> None:
        """Take ``p.grad`` over into ``p.summed_grad``, without a copy."""
        if self._module is not None:
            self._iterations = max(1, self._module.take_backward_count())
            if not self._module.take_clipped():
                raise ValueError(
                    "No clipped backward pass was recorded since the last step: p.grad is not a "
                    "clipped sum. Call loss.backward() with hooks enabled (module.enable_hooks()) "
                    "before optimizer.step()."
                )
        for p in self.params:
            if p.grad is None:
                raise ValueError(
                    "A parameter has no clipped sum: its p.grad is None. Call loss.backward() on "
                    "the wrapped model's output before optimizer.step()."
                )
            if p.summed_grad is None:
                p.summed_grad = p.grad
            else:
                _check_processed_flag(p.summed_grad)
                p.summed_grad = p.summed_grad.add_(p.grad)
            p.grad = None

    def _noise_std(self) -> float:
        # Opacus keeps the noise that pays for a moving bound beside the accounted one.
        multiplier = getattr(self, "_adjusted_noise_multiplier", None)
        return (self.noise_multiplier if multiplier is None else multiplier) * self._bound

    def _divisor(self) -> float:
        if self.loss_reduction == "mean":
            assert self.expected_batch_size is not None  # Opacus refuses "mean" without it
            return float(self.expected_batch_size * self.accumulated_iterations)
        return 1.0

    def add_noise(self) -> None:
        """Leave the noisy gradient in ``p.grad``, scaled already (see :meth:`scale_grad`)."""
        std, divisor = self._noise_std(), self._divisor()
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        sums = [p.summed_grad for p in self.params]
        dtypes = [self._noisy_dtype(p) for p in self.params]
        if self.secure_mode:
            noisy = [
                (self._with_secure_noise(summed, std) / divisor).to(dtype)
                for summed, dtype in zip(sums, dtypes, strict=True)
            ]
        else:
            noisy = noisy_means(sums, std, divisor, dtypes=dtypes, generator=self.generator)
        for p, grad in zip(self.params, noisy, strict=True):
            p.grad = grad.view_as(p)
            _mark_as_processed(p.summed_grad)

    def _noisy_dtype(self, p: Tensor) -> torch.dtype:
        """Of noisy gradients: the parameter's, as optimizers want them."""
        return p.dtype

    def _with_secure_noise(self, summed: Tensor, std: float) -> Tensor:
        return summed + _generate_noise(
            std=std, reference=summed, generator=self.generator, secure_mode=True
        )

    def scale_grad(self) -> None:
        """Nothing: :meth:`add_noise` divides in the same pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; to ``None`` unless told otherwise, as PyTorch's optimizers do."""
        if self._module is not None:
            self._module.take_backward_count()
        super().zero_grad(set_to_none)


class DistributedFlashDPOptimizer(FlashDPOptimizer, DistributedDPOptimizerFastGradientClipping):
    """The same for data-parallel training: worker 0 adds the noise, then gradients are summed, and
    the noisy sum is rounded to the parameter's dtype."""

    def add_noise(self) -> None:
        if self.rank == 0:
            FlashDPOptimizer.add_noise(self)
            return
        divisor = self._divisor()
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            p.grad = (p.summed_grad / divisor).view_as(p)
            _mark_as_processed(p.summed_grad)

    def _noisy_dtype(self, p: Tensor) -> torch.dtype:
        # The other workers' part has no noise of its own: it is not rounded by itself.
        dtype: torch.dtype = p.summed_grad.dtype  # type: ignore[attr-defined]
        return dtype

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for p in self.params:
            if p.grad.dtype != p.dtype:
                p.grad = p.grad.to(p.dtype)
