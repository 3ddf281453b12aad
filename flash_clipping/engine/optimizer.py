"""Opacus' optimizers for clipped sums, with noise, accumulation and scaling in one pass."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from torch import Tensor, nn, optim

from flash_clipping._compat import check_optimizer
from flash_clipping.distributed.process_groups import device_of, shard_of
from flash_clipping.engine import wings
from flash_clipping.engine.adaptive import COUNT_NOISE, AdaptiveBound
from flash_clipping.engine.grad_ledger import (
    GradLedger,
    StepRecord,
    rescaled,
    sensitivity_of,
    total_bound,
)
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.sampling.loaders import refuse_split_units
from flash_clipping.errors import FlashClippingError, InvalidValue, NotServed, checked_number, warn
from flash_clipping.factors import accumulation_dtype
from flash_clipping.ops.noise import NoiseGrid, gated, noisy_means
from flash_clipping.ops.runtime.backend import compile_ahead
from flash_clipping.ops.runtime.checks import device_checks
from flash_clipping.randomness import ALL_ROUNDS, FEWER_ROUNDS, Draw, Purpose, SecretStream


class FlashDPOptimizer(DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping``, step for step, with fewer passes over memory.

    ``p.grad`` becomes ``(sum + N(0, (noise_multiplier * 1.01 C)^2)) / expected_batch_size``, of the
    sums of clipped gradients that were in it, in this step and in skipped ones before. The noise is
    made of words of :attr:`stream` that are used once. ``C`` is the bound that the step's sums were
    clipped by: see :meth:`follow`. A sample moves a sum by at most 1.01 C
    (:mod:`flash_clipping.ops.error_bounds`).

    Parameters may be shards, if the optimizer is made after ``fully_shard``. Every process adds
    noise to its own (:func:`~flash_clipping.distributed.process_groups.shard_number`), by a key
    that is made of the streams of all: together that is one draw for every element. No process
    holds noise of a whole parameter, and replicas stay bitwise equal.

    Args:
        noise_multiplier: standard deviation of the noise on a sum, in 1.01 ``C``; 0 or more.
        expected_batch_size: what noisy sums are divided by with ``loss_reduction="mean"``; of
            shards, that of all processes together.
        max_grad_norm: clipping bound; a list with one bound per parameter for per-layer clipping,
            where ``C`` is the norm of the list.
        stream: what noise is made of; by default with a key of its own, which nobody knows.
        noise_grid: round noisy sums to a grid that does not depend on data
            (:func:`flash_clipping.ops.noise.grid_of`). ``"exact"``: round sums, and add discrete
            noise (:func:`flash_clipping.noise.discrete.discrete_noisy_means`).
        **kwargs: as in Opacus, but for ``generator``. ``secure_mode=True`` refuses a seeded stream,
            and makes noise by all 20 rounds of ChaCha20 on GPUs, too, where it has 12 otherwise.

    Attributes:
        stream: the :class:`~flash_clipping.randomness.SecretStream`.

    Raises:
        ValueError: noise, bound or expected batch size that is no such number; a generator, or a
            seed in secure mode; in ``step``, for gradients that are not the clipped sums of this
            step.
        FlashClippingError: in ``signal_skip_step``, with shards and from a ``BatchMemoryManager``
            of another loader than ``make_private`` returned.
    """

    #: Moves the bound at the end of every step: adaptive clipping.
    adaptive: AdaptiveBound | None = None

    #: Makes noise that steps partly take back (:mod:`flash_clipping.noise.correlated`); ``None``:
    #: the noise of every step is its own.
    correlated: Any = None

    #: The grids that noisy sums may be rounded to; the last for this class alone.
    _grids: tuple[NoiseGrid, ...] = (False, True, "exact")

    #: The record of the sums that the running step has taken so far.
    step_record: StepRecord | None = None

    _module: Any = None
    #: What the model has besides, if its parameters are shards.
    _sharded: Any = None
    _replaced = False
    #: The generator that announces parts of logical batches: Opacus' ``BatchSplittingSampler``.
    _loop: FrameType | None = None
    #: How many batches its loop is ahead of the steps: workers, or a loop that fetches early.
    _ahead: int | None = None

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        stream: SecretStream | None = None,
        noise_grid: NoiseGrid = False,
        **kwargs: Any,
    ):
        _refuse_optimizer(optimizer)
        checked_number("noise_multiplier", noise_multiplier, "[0, inf)", example=1.0)
        if expected_batch_size is not None:
            checked_number("expected_batch_size", expected_batch_size, "(0, inf)", example=64)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._has_shards = any(hasattr(p, "placements") for p in held)
        self.noise_grid = noise_grid
        self._refuse_grid()
        #: Where the bound is, and the sums that were taken: the model's, once one is followed.
        self._ledger = GradLedger(nn.Module())
        #: Called when noise was added, in this order. The first is the engine's, which accounts.
        self.step_hooks: list[Callable[[Any], None]] = []
        self.stream: SecretStream = SecretStream() if stream is None else stream
        seeded = kwargs.get("secure_mode") and self.stream.is_seeded
        if seeded or kwargs.get("generator") is not None:
            raise InvalidValue(
                "FC311 FlashDPOptimizer: found a generator, or a seeded stream in secure_mode: "
                "whoever knows a seed can subtract the noise. For tests, without secure_mode:\n"
                "    stream=SecretStream(seed=0)"
            )
        kwargs |= {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
        super().__init__(optimizer, expected_batch_size=expected_batch_size, **kwargs)  # type: ignore[arg-type]  # "int" there
        check_optimizer(self)
        for p in self.params:
            del vars(p)["summed_grad"]  # Opacus leaves it; sums of skipped steps are in the ledger

    def __getstate__(self) -> Any:
        # Opacus' own state cannot be copied: it breaks every optimizer's step on the way.
        raise FlashClippingError(
            f"FC537 {type(self).__name__}: a private optimizer cannot be copied or pickled: it "
            "takes the sums of one model, with noise that is drawn once. Copy what it has learnt:\n"
            "    saved = copy.deepcopy(optimizer.state_dict()); optimizer.load_state_dict(saved)"
        )

    # -- the model whose sums it takes ----------------------------------------------------------

    def follow(self, module: GradSampleHooksFlashClipping) -> None:
        """Take the clipped sums of this wrapped model, and no others.

        Its bound and this optimizer's are one from now on. Noise is for the bound that the sums of
        the step were clipped by. A step is refused unless ``p.grad`` of every parameter that would
        be updated is what the model's backward left there.

        All processes of a model with shards call it together.

        Raises:
            ValueError: another optimizer follows the model; or parameters are shards that were none
                when the model was wrapped.
        """
        self.check_alone(module, self.original_optimizer)
        self._sharded = module._sharded
        self._refuse_unknown_shards()
        self._refuse_grid()
        if self._sharded is not None:
            self.stream = self._sharded.processes.shared_stream(self.stream)
        before = module.running_step.follower
        if before is not None and before is not self:
            before._replaced = True
            before.discard_step()
            # Behind what that one has drawn, where both have the key of one seed.
            self.stream.load_state_dict(before.stream.state_dict())
        module.running_step.bound = self._ledger.bound
        module.running_step.follower = self
        self._module, self._ledger = module, module.running_step

    def _refuse_unknown_shards(self) -> None:
        if self._has_shards and (self._sharded is None or type(self) is not FlashDPOptimizer):
            raise InvalidValue(
                f"FC605 {type(self).__name__}: found shards as parameters; expected a "
                "FlashDPOptimizer, of a model that was wrapped after fully_shard. It follows that "
                "(make_private sees to it):\n    optimizer.follow(model)"
            )

    def _refuse_grid(self) -> None:
        is_whole = type(self) is FlashDPOptimizer and not self._has_shards
        grids = self._grids if is_whole and self._sharded is None else self._grids[:2]
        if self.noise_grid not in grids:
            raise NotServed(
                f"FC317 noise_grid={self.noise_grid!r}: found {type(self).__name__}; expected one "
                f"of {grids}. Discrete noise is for whole parameters in one process; and where "
                "sums of other workers are added to a rounded one, fully_shard has grids."
            )

    def compile_ahead(self) -> None:
        """Let a thread compile the kernel that draws noise, which takes seconds."""
        plain = [p for p in self.params if type(p.data) is Tensor and p.is_cuda]
        if not plain or self.correlated is not None or self.noise_grid == "exact":
            return
        for start in (0, 1):  # sums may lie on multiples of 16 bytes, or not
            own = map(self._own, plain)
            sums = [x.new_zeros(2, dtype=accumulation_dtype(x.dtype))[start:] for x in own]
            dtypes, grid = [*map(self._noisy_dtype, plain, sums)], bool(self.noise_grid)
            draw = Draw(bytes(32), Purpose.NOISE, 0, self._rounds(sums))  # never launched
            compile_ahead(partial(noisy_means, sums, 1.0, 1.0, draw=draw, dtypes=dtypes, grid=grid))

    @staticmethod
    def check_alone(module: GradSampleHooksFlashClipping, optimizer: optim.Optimizer) -> None:
        """Raise ``ValueError`` if a model is followed by anything but what wraps ``optimizer``."""
        other = module.running_step.follower
        plain = getattr(optimizer, "original_optimizer", optimizer)
        if other is not None and other.original_optimizer is not plain:
            raise InvalidValue(
                f"FC530 This model has a private optimizer already ({type(other).__name__} around "
                f"{type(other.original_optimizer).__name__}). Two of them would each take the "
                "other's sums. Use one optimizer with several parameter groups; or pass that one "
                "to make_private, or start afresh from module.to_standard_module()."
            )

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound ``C``, or the norm of all parameters' bounds. Noise is drawn for
        ``C (1 + ETA)`` (:func:`~flash_clipping.engine.grad_ledger.sensitivity_of`).

        Setting it sets the model's; in per-layer clipping all bounds keep their proportions. It
        applies from the next step on.
        """
        return total_bound(self._ledger.bound)

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self._ledger.bound = rescaled(self._ledger.bound, value)

    @property
    def max_grad_norms(self) -> list[float] | None:
        """One bound for each trainable parameter, in per-layer clipping."""
        bound = self._ledger.bound
        return [*bound] if isinstance(bound, list) else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch, for parameters of the model that was wrapped.

        Raises:
            ValueError: a parameter is none of them: its gradients would not be clipped.
        """
        params = param_group["params"]
        for param in [params] if isinstance(params, Tensor) else params:
            tensor = param[1] if isinstance(param, tuple) else param
            if self._module is not None:
                self._ledger.name_of(tensor, "add_param_group")
        self.original_optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_") and "original_optimizer" in self.__dict__:
            return getattr(self.original_optimizer, name)  # whose step runs the hooks of users
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- a step ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer. ``ValueError`` for ``GradScaler``, which would divide
        clipped sums by its scale, and skip steps for some sample's overflow."""
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            raise InvalidValue(
                "FC470 torch.amp.GradScaler: found scaler.unscale_(optimizer), a part of "
                "scaler.step(optimizer), on a private optimizer: it would divide the clipped sums. "
                "Use bfloat16, or call loss.backward() and optimizer.step() without the scaler."
            )
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = param_groups

    @property
    def accumulated_iterations(self) -> int:
        """Backward passes whose sums the running step adds up; the accountant counts them."""
        pending = 0 if self._module is None else self._module.backward_count
        taken = 1 if self.step_record is None else max(1, self.step_record.backwards)
        return pending or taken

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: whether one more step, after those announced before, is skipped.

        ``BatchMemoryManager`` may announce a batch that is never stepped on. That is taken back
        when its loop was left, or goes on without. Where the loader's sampler gives it parts, as
        many in every process, the sampler knows which of them is the last. Refused where batches
        come whole.
        """
        caller = sys._getframe(1)
        if not caller.f_code.co_flags & inspect.CO_GENERATOR:
            if do_skip:
                refuse_split_units(self._module, "optimizer.signal_skip_step()")
            self._loop = None
            super().signal_skip_step(do_skip)  # type: ignore[no-untyped-call]
            return
        sampler = getattr(caller.f_locals.get("self"), "sampler", None)
        if (is_last := getattr(sampler, "is_last_part", None)) is None:
            self._refuse_parts_of(sampler)
        else:
            do_skip = not is_last
        if caller is not self._loop:
            self._loop, self._ahead = caller, None
            self._step_skip_queue.clear()
            self._discard("another loop over BatchMemoryManager's loader began")
        elif self._ahead is not None:
            while len(self._step_skip_queue) > self._ahead:  # the oldest was never stepped on
                if not self._step_skip_queue.pop(0):
                    self._discard("its last part was loaded, but optimizer.step() was not called")
        super().signal_skip_step(do_skip)  # type: ignore[no-untyped-call]

    def _refuse_parts_of(self, sampler: object) -> None:
        """Raise ``FlashClippingError`` if batches of this sampler may not be split by others."""
        refuse_split_units(self._module, "BatchMemoryManager")
        if self._sharded is not None:
            raise FlashClippingError(
                "FC604 BatchMemoryManager: found a model that fully_shard was applied to, and a "
                f"loader with {type(sampler).__name__}: processes would split batches into "
                "different numbers of parts. Give it the loader that make_private returned, with "
                "poisson_sampling=True."
            )

    def _discard(self, because: str) -> None:
        """Let go of the sums of a logical batch that will never be complete; none was released."""
        if self.step_record is not None:
            warn(
                "FC513 The first parts of a logical batch had been added up when "
                f"{because}. They are left out: nothing of them was released. Let every loop over "
                "BatchMemoryManager's loader run to the end of a logical batch.",
                stacklevel=3,
            )
            self.discard_step()

    def discard_step(self) -> None:
        """Let go of the sums that skipped steps have added up; nothing of them was released. The
        next backward pass begins a step."""
        self._let_go()
        self._ledger.end_step()

    def _let_go(self) -> None:
        self.step_record = None
        self._is_last_step_skipped = False
        self._ledger.sums = {}

    def _all_params(self) -> list[Any]:
        """All parameters that the wrapped optimizer knows, trainable or not."""
        return [p for group in self.param_groups for p in group["params"]]

    def accumulate(self) -> None:
        """Take what is in ``p.grad``, without a copy.

        Raises:
            ValueError: some ``p.grad`` is not the clipped sum that backward left; nothing changes.
            FlashClippingError: the sums were clipped otherwise than those taken before, or are of
                the same samples.
        """
        if self._loop is not None:
            if not self._step_skip_queue:
                self._discard("the loop over BatchMemoryManager's loader was left")
            elif self._ahead is None:
                self._ahead = len(self._step_skip_queue) - 1
        params = self.params
        record = self._checked(params)
        sums = self._ledger.sums
        for p in params:
            before = sums.get(id(p))
            sums[id(p)] = p.grad if before is None else before.add_(p.grad)  # type: ignore[assignment, arg-type]  # not None: checked
            p.grad = None
        if record is not None:
            self._ledger.forget()
            self.step_record = record
            if record.draw is not None:
                record.draw.taken = True

    def _checked(self, params: Sequence[nn.Parameter]) -> StepRecord | None:
        """The record of the step with what is in ``p.grad`` now, if it may be taken."""
        if device_checks.sent:
            device_checks.raise_found()
        if self._replaced:
            raise InvalidValue(
                "FC531 This optimizer was replaced by that of a later make_private(): use the one "
                "that was returned last."
            )
        if self._module is None:
            self._refuse_unknown_shards()
            if any(p.grad is None for p in params):
                raise InvalidValue(
                    "FC502 A parameter has no clipped sum: its p.grad is None. Call "
                    "loss.backward() on the wrapped model's output before optimizer.step()."
                )
            return None
        record: StepRecord = self._ledger.pending_record(params)
        for p in self._all_params():
            # The wrapped optimizer steps on whatever has a gradient.
            if not p.requires_grad and p.grad is not None:
                name = self._ledger.name_of(p)
                raise InvalidValue(
                    f"FC505 {name}: this parameter is frozen but has a gradient, "
                    "which would be released without noise. Freeze parameters before backward(), "
                    "or clear gradients (optimizer.zero_grad()) after."
                )
        if (before := self.step_record) is None:
            return record
        draw = record.draw
        if draw is not None and draw is before.draw and draw.samples and not draw.in_parts:
            raise FlashClippingError(
                f"FC511 optimizer.step(): found batch {draw.number} of the loader twice in one "
                "step, of which the first was skipped (signal_skip_step): its samples would count "
                "twice. Nothing was released. Skip parts only, and begin the step again:\n"
                "    optimizer.discard_step()"
            )
        return before.plus(record)

    def _multiplier(self) -> float:
        """The noise multiplier of the sum."""
        if self.adaptive is not None:
            return self.adaptive.noise_multiplier(self.noise_multiplier, self._expected_samples())
        # Opacus' own adaptive criterion leaves it here.
        multiplier: float | None = getattr(self, "_adjusted_noise_multiplier", None)
        return self.noise_multiplier if multiplier is None else multiplier

    def _noise_std(self) -> float:
        record = self.step_record
        bound = self._ledger.bound if record is None else record.bound
        std = self._multiplier() * sensitivity_of(bound)
        if not 0 <= std < math.inf:
            raise InvalidValue(
                f"FC521 The noise would have standard deviation {std}: found noise_multiplier="
                f"{self.noise_multiplier} and max_grad_norm={total_bound(bound)}; expected finite "
                "numbers."
            )
        return std

    def _divisor(self) -> float:
        if self.loss_reduction == "sum":
            return 1.0
        assert self.expected_batch_size is not None  # Opacus refuses "mean" without it
        return float(self.expected_batch_size * self.accumulated_iterations)

    def add_noise(self) -> None:
        """Leave the noisy gradient in ``p.grad``, scaled already. Where that fails nothing was
        released, and the step's sums are let go of: the next step's would be added to them."""
        try:
            noisy = self._noisy_means()
        except BaseException:
            self.discard_step()
            raise
        self._release(noisy)

    def _noisy_means(self) -> list[Tensor]:
        std, divisor = self._noise_std(), self._divisor()
        sums, gate = [self._own(summed) for summed in self._sums()], device_checks.gate()
        dtypes, rounds = [*map(self._noisy_dtype, self.params, sums)], self._rounds(sums)
        given: dict[str, Any] = {"shards": self._shards(), "dtypes": dtypes}
        if self.correlated is not None:
            given |= {"batch": None if self.step_record is None else self.step_record.draw}
            given |= {"multiplier": self._multiplier(), "stream": self.stream, "rounds": rounds}
            return [*self.correlated.noisy_means(gated(sums, gate), std, divisor, **given)]
        draw, grid = self.stream.draw(Purpose.NOISE, rounds), self.noise_grid
        if grid == "exact":
            numbers = std, self._multiplier(), divisor
            sums = gated(sums, gate)
            return wings.discrete_noisy_means(sums, *numbers, draw=draw, dtypes=dtypes)
        return noisy_means(sums, std, divisor, draw=draw, grid=grid, gate=gate, **given)

    def _rounds(self, sums: Sequence[Tensor]) -> int:
        """Of the cipher that makes the noise of these: 12 where kernels draw, unless secure mode
        asks for all; 20 on a CPU, where OpenSSL's are faster than 12 of any other."""
        by_kernels = all(summed.is_cuda and summed.dtype != torch.float64 for summed in sums)
        fewer = by_kernels and self.noise_grid != "exact" and not self.secure_mode
        return FEWER_ROUNDS if fewer else ALL_ROUNDS

    def _sums(self) -> list[Tensor]:
        """The sums of all parameters that the step has taken."""
        return [self._ledger.sums[id(p)] for p in self.params]

    def _release(self, grads: Sequence[Tensor]) -> None:
        """Leave these in ``p.grad``, and nothing of what they are made of."""
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = self._placed(p, grad)
        self._ledger.end_step()

    def _own(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or its sum that this process has, as reals."""
        if self._sharded is not None:
            tensor = self._sharded.slots.own(tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    def _placed(self, param: Tensor, own: Tensor) -> Tensor:
        """A gradient as the parameter wants it, from what this process has of it."""
        if self._sharded is not None:
            found: Tensor = self._sharded.slots.as_sharded(param, own.view(self._own(param).shape))
            return found
        if param.is_complex():
            return torch.view_as_complex(own.view(*param.shape, 2))
        return own.view_as(param)

    def _shards(self) -> list[int] | None:
        """This process's part of each parameter's noise, by number; ``None``: all of it."""
        return None if self._sharded is None else [shard_of(p) for p in self.params]

    def _noisy_dtype(self, p: Tensor, summed: Tensor) -> torch.dtype:
        """The dtype of a noisy sum: the parameter's, as optimizers want it."""
        return p.dtype.to_real()

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Have ``fn(optimizer)`` called in every step, behind what was attached before: when noise
        was added and the step was accounted for, and before parameters move.

        ``p.grad`` is the noisy mean then. Anything public may change it: a mask, a proximal term,
        a control variate. If ``fn`` raises, the noisy gradients are let go of.

        The engine's accountant is attached by ``make_private``: twice, it would count every step
        twice.
        """
        self.step_hooks.append(fn)

    @property  # type: ignore[override]  # Opacus assigns None
    def step_hook(self) -> Callable[[Any], None] | None:
        """The hook that runs when noise was added: all :attr:`step_hooks`. Setting adds one."""
        return self._call_step_hooks if self.step_hooks else None

    @step_hook.setter
    def step_hook(self, fn: Callable[[Any], None] | None) -> None:
        if fn is not None:
            self.attach_step_hook(fn)

    def _call_step_hooks(self, optimizer: Any) -> None:
        try:
            for hook in self.step_hooks:
                hook(optimizer)
        except BaseException:  # nobody has accounted for them, maybe
            for p in self.params:
                p.grad = None
            self.discard_step()
            raise

    def scale_grad(self) -> None:
        """Nothing: :meth:`add_noise` divides in the same pass."""

    def pre_step(self, closure: Any = None) -> Any:
        """As in Opacus; a whole step ends the record, and moves an adaptive bound. ``ValueError``
        if Accelerate divides losses before their backward."""
        _refuse_divided_losses()
        if whole := super().pre_step(closure):
            if self.adaptive is not None:
                self._move_bound(self.step_record)
            self.step_record = None
        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, to ``None`` unless told otherwise; sums of skipped steps stay."""
        if self._module is not None:
            self._module._session.forget_calls(self._ledger.draw)
        self.original_optimizer.zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self._let_go()
        self._ledger.note_cleared(self._all_params())

    # -- adaptive clipping ----------------------------------------------------------------------

    def _expected_samples(self) -> float:
        """Samples that are expected in the running step, over all processes."""
        assert self.expected_batch_size is not None  # make_private makes these
        return float(self.expected_batch_size * self.accumulated_iterations)

    def _move_bound(self, record: StepRecord | None) -> None:
        """Set the next step's bound by the samples of this one that were within its bound."""
        assert self.adaptive is not None and record is not None and record.unclipped is not None
        assert not isinstance(record.bound, tuple)  # make_private sees to all of that
        samples = self._expected_samples()
        noisy = float(self._noisy_count(record.unclipped, COUNT_NOISE * samples))
        self.max_grad_norm = self.adaptive.next_bound(record.bound, noisy, samples)

    def _noisy_count(self, count: Tensor, std: float) -> Tensor:
        """Processes with shards count their samples, each of them once, and draw the same noise."""
        if self._sharded is not None:
            processes = self._sharded.processes
            count = processes.reduce(count.to(device_of(processes.mesh)), samples=True)
        draw = self.stream.draw(Purpose.COUNT)
        (noisy,) = noisy_means([count.double()], std, 1.0, draw=draw)
        return noisy


def _refuse_divided_losses() -> None:
    """``Accelerator.backward`` divides every loss by ``gradient_accumulation_steps``."""
    accelerate = sys.modules.get("accelerate.state")
    steps = 1 if accelerate is None else accelerate.GradientState().num_steps
    if steps != 1:
        raise InvalidValue(
            "FC471 optimizer.step(): found an Accelerator with "
            f"gradient_accumulation_steps={steps}. Its backward() divides losses by {steps}: "
            "samples are clipped by gradients that are too small. Nothing was released. Cut larger "
            "batches by BatchMemoryManager:\n"
            "    accelerator = Accelerator(gradient_accumulation_steps=1)"
        )


def _refuse_optimizer(optimizer: optim.Optimizer) -> None:
    """Refuse optimizers that call closures as often as they like, and those of sparse grads."""
    for each in getattr(optimizer, "optimizers", ()):
        _refuse_optimizer(each)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidValue(
            "FC534 optimizer: found SparseAdam, which takes sparse gradients only. A noisy sum is "
            "dense, as every row gets noise. Use Adam:\n"
            "    optimizer = torch.optim.Adam(model.parameters())"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise InvalidValue(
            f"FC533 optimizer: found {name}, whose step evaluates the loss several times: each "
            "would be a release of its own, without noise. Use an optimizer of one gradient a "
            "step:\n"
            "    optimizer = torch.optim.AdamW(model.parameters())"
        )


class DistributedFlashDPOptimizer(FlashDPOptimizer, DistributedDPOptimizerFastGradientClipping):
    """The optimizer of data-parallel training: worker 0 adds the noise, then gradients are summed,
    and the noisy sum is rounded to the parameter's dtype.

    Raises:
        NotImplementedError: ``noise_grid``: the other workers' sums are added after the noise.
    """

    _grids = (False,)

    def add_noise(self) -> None:
        if self.rank == 0:
            FlashDPOptimizer.add_noise(self)
            return
        sums = gated(self._sums(), device_checks.gate())
        self._release([summed / self._divisor() for summed in sums])

    def _noisy_dtype(self, p: Tensor, summed: Tensor) -> torch.dtype:
        # The other workers' part has no noise of its own: it is not rounded separately.
        return summed.dtype

    def reduce_gradients(self) -> None:
        super().reduce_gradients()  # type: ignore[no-untyped-call]
        for p in self.params:
            if p.grad is not None and p.grad.dtype != p.dtype:
                p.grad = p.grad.to(p.dtype)

    def _expected_samples(self) -> float:
        return super()._expected_samples() * self.world_size

    def _noisy_count(self, count: Tensor, std: float) -> Tensor:
        """All processes count; worker 0 adds the noise, and its sum holds for all."""
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.SUM)
        if self.rank == 0:
            count = super()._noisy_count(count, std)
        torch.distributed.broadcast(count, src=0)
        return count
