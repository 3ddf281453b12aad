"""Opacus' privacy engine with ``grad_sample_mode="flash"``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, Unpack, overload

from opacus import PrivacyEngine
from opacus.data_loader import switch_generator
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as _DataParallel
from opacus.optimizers import DPOptimizer
from torch import distributed as dist, nn, optim
from torch.utils.data import DataLoader

from flash_clipping.distributed import has_shards, is_sharded, processes_of
from flash_clipping.distributed.process_groups import shared_stream
from flash_clipping.engine import wings
from flash_clipping.engine.accounting import (
    SAMPLE,
    LargeDeltaWarning,
    Mechanism,
    PlanExceededWarning,
    process_of,
    with_right_length,
    without_hints,
)
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.engine.criterion import FlashLoss
from flash_clipping.engine.grad_ledger import checked_bound
from flash_clipping.engine.grad_sample_module import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.engine.options import (
    EpsilonOptions,
    Kernels,
    Mode,
    ModelOptions,
    No,
    NoiseOptions,
    Pipeline,
    Reduction,
    check_keywords,
    check_options,
    check_target,
    planned_noise,
    steps_of,
)
from flash_clipping.engine.sampling.loaders import (
    PoissonLoader,
    refuse_loader,
    refuse_no_batch,
    refuse_repeats,
    warn_of_mixing,
    watch_sampling,
)
from flash_clipping.engine.sampling.units import Documents, Users
from flash_clipping.engine.unsupported import refuse_alone, refuse_frozen, refuse_lacking, validate
from flash_clipping.errors import InvalidValue, checked_number, warn
from flash_clipping.finish.clipping import Clipping, check_bounds
from flash_clipping.ops.runtime.checks import device_checks
from flash_clipping.randomness.stream import SecretStream, seed_notice

#: Arguments that Opacus' make_private gets in any mode.
_OF_OPACUS = """module optimizer data_loader noise_multiplier max_grad_norm grad_sample_mode
wrap_model batch_first loss_reduction poisson_sampling clipping"""

#: Arguments of the wrapped model.
_OF_MODEL = (*ModelOptions.__annotations__, "max_grad_norm", "clipping", "unit", "kernels")

#: The noise's stream in a checkpoint.
_IN_CHECKPOINTS = "noise_stream_state_dict"

_Loader: TypeAlias = DataLoader[Any]
#: What ``make_private`` returns: without a criterion, and with one.
Private: TypeAlias = tuple[GradSampleModuleFlashClipping, FlashDPOptimizer, _Loader]
PrivateLoss: TypeAlias = tuple[GradSampleModuleFlashClipping, FlashDPOptimizer, FlashLoss, _Loader]
#: The same with ``wrap_model=False``.
Hooks: TypeAlias = tuple[GradSampleHooksFlashClipping, FlashDPOptimizer, _Loader]
HooksLoss: TypeAlias = tuple[GradSampleHooksFlashClipping, FlashDPOptimizer, FlashLoss, _Loader]
#: A loss of the user's; whether the model is wrapped.
Criterion: TypeAlias = Callable[..., Any]
Yes: TypeAlias = Literal[True]


class FlashPrivacyEngine(PrivacyEngine):
    """``opacus.PrivacyEngine`` whose default gradient mode is flash clipping.

    Everything that is not named here (accounting, schedulers) is Opacus' own. Modes other than
    ``"flash"`` behave as in Opacus. :meth:`get_epsilon` says what ε stands for.

    Args:
        accountant: ``"prv"``, ``"rdp"`` or ``"gdp"``, as in Opacus; ``"pld"``
            (:class:`~flash_clipping.noise.accountants.PldAccountant`); ``"discrete_gaussian"``
            (:class:`~flash_clipping.noise.accountants.DiscreteGaussianAccountant`).
        secure_mode: refuse seeds, and make noise by all 20 rounds of ChaCha20 (RFC 8439) on GPUs,
            too. Without it they are 12 there, which nobody knows an attack on (``docs/noise.md``).
            In modes other than ``"flash"`` as in Opacus: it needs ``torchcsprng``.
        seed: for tests and debugging: makes noise repeat. Anyone who knows it can
            subtract the noise.

    Attributes:
        stream: the secret stream that noise is made of.

    Raises:
        ValueError: a seed in secure mode.

    Warns:
        SeededNoiseWarning: a seed was given.

    Example::

        engine = FlashPrivacyEngine()
        model, optimizer, criterion, loader = engine.make_private(
            module=model, optimizer=optimizer, criterion=criterion, data_loader=loader,
            noise_multiplier=1.1, max_grad_norm=1.0)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    """

    accountant: Any
    dataset: Any
    #: How many samples, or units, the dataset of the last make_private has.
    _samples: int | None = None
    #: The unit that is hidden as a whole.
    _unit = SAMPLE
    #: The δ that there was a warning about, and other warnings that came once.
    _large_deltas: frozenset[float] = frozenset()
    _warned_not_poisson = _has_opacus_randomness = False

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None
    ):
        if secure_mode and seed is not None:
            raise InvalidValue(
                f"FC311 FlashPrivacyEngine: found seed={seed} with secure_mode=True: whoever knows "
                "the seed can subtract the noise. Leave one of them out."
            )
        with warnings.catch_warnings():
            # That noise is not secure: it is. Modes of Opacus warn where they are used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self.accountant = with_right_length(self.accountant)
        self.secure_mode = secure_mode
        self.stream: SecretStream = SecretStream(seed=seed)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "accountant" and self._samples is not None:
            raise InvalidValue(
                "FC561 engine.accountant: found another after make_private, whose epsilon would be "
                "0. Name it before:\n"
                '    engine = FlashPrivacyEngine(accountant="rdp")'
            )
        super().__setattr__(name, value)

    @overload  # type: ignore[override]  # returns and takes other values than Opacus'
    def make_private(
        self, *, criterion: None = None, wrap_model: Yes = True, **options: Unpack[NoiseOptions]
    ) -> Private: ...

    @overload
    def make_private(
        self, *, criterion: Criterion, wrap_model: Yes = True, **options: Unpack[NoiseOptions]
    ) -> PrivateLoss: ...

    @overload
    def make_private(
        self, *, criterion: None = None, wrap_model: No, **options: Unpack[NoiseOptions]
    ) -> Hooks: ...

    @overload
    def make_private(
        self, *, criterion: Criterion, wrap_model: No, **options: Unpack[NoiseOptions]
    ) -> HooksLoss: ...

    @overload  # in modes of Opacus'
    def make_private(
        self, *, grad_sample_mode: str, wrap_model: bool = True, **options: Unpack[NoiseOptions]
    ) -> Any: ...

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: Criterion | None = None,
        grad_sample_mode: str = "flash",
        clipping: Clipping | AdaptiveBound = "flat",
        wrap_model: bool = True,
        batch_first: bool = True,
        loss_reduction: Reduction = "mean",
        poisson_sampling: bool = True,
        mechanism: Mechanism | None = None,
        unit: Users | Documents | None = None,
        strict: bool = True,
        distributed: No | Pipeline | None = None,
        kernels: Kernels | None = None,
        mode: Mode = "one_pass",
        folded_modules: Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """As :meth:`opacus.PrivacyEngine.make_private`: returns ``(module, optimizer,
        data_loader)``; with ``criterion``, ``(module, optimizer, criterion, data_loader)``.

        ``mechanism``, ``unit``, ``clipping`` and ``strict`` decide what is promised. ``kernels``
        and ``mode`` decide how fast it is computed, and change no promise.

        Args:
            module, optimizer, data_loader, noise_multiplier, max_grad_norm: as in Opacus.
            wrap_model, batch_first, loss_reduction, poisson_sampling: as in Opacus.
            criterion: a loss, whose own ``reduction`` is ``loss_reduction``
                (:class:`~flash_clipping.FlashLoss`). Without it ``loss.backward()`` on any loss
                of the model's outputs, which reduces over samples in that way, does the same.
            grad_sample_mode: ``"flash"``, or one of Opacus' modes.
            clipping: ``"flat"``; ``"per_layer"``, with one ``max_grad_norm`` per trainable
                parameter; ``"automatic"`` (AUTO-S); a bound that moves at the end of every step
                (:class:`~flash_clipping.AdaptiveBound`; flash only).
            mechanism: how batches are drawn and noise is made, which tells what steps release
                (``docs/sampling.md``): by default :class:`~flash_clipping.PoissonSampling`; others
                need ``accountant="pld"``: :class:`~flash_clipping.RandomAllocation`,
                :class:`~flash_clipping.Shuffled`, :class:`~flash_clipping.PoissonRows`, and, for
                correlated noise, :class:`~flash_clipping.FixedOrder` and
                :class:`~flash_clipping.CyclicPoisson`; flash only.
            unit: whom ε protects: a row of the dataset (``None``); its owner, with all of their
                rows (:class:`~flash_clipping.Users`); what an argument of the forward says
                (:class:`~flash_clipping.Documents`). "Sample" means such a *unit* from then on;
                flash only.
            strict, mode, folded_modules: see
                :class:`~flash_clipping.GradSampleHooksFlashClipping`; flash only.
            distributed: ``False``: each process of ``torch.distributed`` trains a model of its own,
                and releases it alone. By default such a model must be a
                ``DifferentiallyPrivateDistributedDataParallel``, or ``fully_shard`` was applied to
                it. :class:`~flash_clipping.Pipeline`: the module is one stage of a pipeline; flash
                only.
            kernels: what computes, and how fast (:class:`~flash_clipping.Kernels`); flash only.
            **kwargs: of Opacus' modes.

        Guarantees:
            ``PoissonSampling``: every step draws every sample (unit) independently with probability
            ``1 / len(data_loader)``, the rate that is accounted. In several processes each sample
            is drawn by one of them (all draw one batch, and take parts of it, where it is cut or in
            an order). Where no sample is drawn the batch has one row, and the step adds noise only.
            Gradients are divided by the expected batch size, ``len(dataset) / len(data_loader)``
            rounded down and at least 1, or the number of units: a public constant
            (:meth:`get_epsilon`).

        Warns:
            NotPoissonWarning: batches are not drawn in that way; once.

        Raises:
            TypeError: an argument that is unknown, or of another type.
            ValueError: noise or bound that is no such number; arguments that contradict each other;
                a loader whose sampling can be neither replaced nor accounted for.
            opacus.validators.errors.UnsupportedModuleError: the model mixes samples.
        """
        given = {**locals(), **kwargs}
        checked_number("noise_multiplier", noise_multiplier, "[0, inf)", example=1.0)
        refuse_no_batch(data_loader)
        check_options(given)
        check_keywords(kwargs, grad_sample_mode)
        process = wings.requested_process(self.accountant, given)
        if grad_sample_mode != "flash":
            if not self._has_opacus_randomness:  # and its warnings, which come once
                self.secure_rng = PrivacyEngine(secure_mode=self.secure_mode).secure_rng
                self._has_opacus_randomness = True
            of_opacus = {name: given[name] for name in _OF_OPACUS.split()} | kwargs
            if criterion is not None:
                of_opacus["criterion"] = criterion
            return super().make_private(**of_opacus)
        checked_bound(max_grad_norm)
        for name, needed in (("module", "parameters"), ("optimizer", "param_groups")):
            if not hasattr(given[name], needed):
                found = f"found {given[name]!r}, which has no {needed}"
                raise InvalidValue(f"FC319 {name}: {found}; expected one of PyTorch.")
        if criterion is not None and not callable(criterion):
            raise InvalidValue(f"FC319 criterion: found {criterion!r}; expected nn.MSELoss(), say.")
        if isinstance(module, GradSampleHooksFlashClipping):
            FlashDPOptimizer.check_alone(module, optimizer)
        group = wings.pipeline_group(distributed, given)
        if group is None:
            refuse_alone(module, distributed)
        dataset: Any = data_loader.dataset
        if unit is None:
            refuse_repeats(dataset)
        users = unit if isinstance(unit, Users) else None
        if users is not None and (shape := tuple(users.by_row.shape)) != (len(dataset),):
            raise InvalidValue(
                f"FC281 Users: found shape {shape} for a dataset of {len(dataset)} rows; expected "
                "the id of one unit for each row."
            )
        params = {*module.parameters()}
        if any(p not in params for settings in optimizer.param_groups for p in settings["params"]):
            raise InvalidValue(  # in Opacus' words
                "FC536 Module parameters are different than optimizer Parameters: optimizer has "
                "one that the module has not; expected none. Make it again:\n"
                "    optimizer = torch.optim.AdamW(model.parameters())"
            )
        refuse_lacking(module, optimizer)
        if group is None:
            refuse_frozen(module)
        in_parts = isinstance(module, _DataParallel) or is_sharded(module)
        wrapper = self._wrapped(given)
        refuse_loader(data_loader, poisson_sampling=poisson_sampling, distributed=in_parts)
        warn_of_mixing(data_loader)
        if self.dataset is not dataset and self.dataset is not None:
            warn(
                "FC560 This engine has accounted for another dataset object before. Epsilon is for "
                "one dataset: use a new engine for another one, unless both are the same data.",
                stacklevel=2,
            )
        self.dataset = dataset if self.dataset is None else self.dataset
        loader = data_loader
        if poisson_sampling:
            stream = self.stream.another()
            loader = PoissonLoader.from_data_loader(
                data_loader,
                process=process,
                fills_up=group is None,  # stages do that themselves
                units=users,
                stream=stream if group is None else shared_stream([group], stream),
                distributed=in_parts,
                processes=processes_of(module),
            )
        elif self.secure_mode:  # its order does not follow a seed
            loader = switch_generator(data_loader=data_loader, generator=self.secure_rng)
        sampler: Any = loader.batch_sampler
        expected: float = max(1, len(dataset) // len(loader))
        if users is not None:
            expected = getattr(sampler, "total_size", sampler.num_samples) / len(loader)
        private = self._optimizer({**given, "process": process}, expected, group)
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(1 / len(loader)))
        loss = [] if criterion is None else [FlashLoss(wrapper, private, criterion, loss_reduction)]
        if isinstance(clipping, AdaptiveBound):
            private.adaptive = clipping
            wrapper.running_step.counts_unclipped = True
        self._samples = len(dataset) if users is None else len(users.rows)
        if unit is not None:
            self._unit = f"{unit.argument}" if isinstance(unit, Documents) else "an owner of rows"
        private.follow(wrapper)
        watch_sampling(self, wrapper, private, loader)
        wings.begin_process(process, self.accountant, private, sampler)
        return (wrapper, private, *loss, loader)

    @overload  # type: ignore[override]  # returns and takes other values than Opacus'
    def make_private_with_epsilon(
        self, *, criterion: None = None, wrap_model: Yes = True, **options: Unpack[EpsilonOptions]
    ) -> Private: ...

    @overload
    def make_private_with_epsilon(
        self, *, criterion: Criterion, wrap_model: Yes = True, **options: Unpack[EpsilonOptions]
    ) -> PrivateLoss: ...

    @overload
    def make_private_with_epsilon(
        self, *, criterion: None = None, wrap_model: No, **options: Unpack[EpsilonOptions]
    ) -> Hooks: ...

    @overload
    def make_private_with_epsilon(
        self, *, criterion: Criterion, wrap_model: No, **options: Unpack[EpsilonOptions]
    ) -> HooksLoss: ...

    @overload  # in modes of Opacus'
    def make_private_with_epsilon(
        self, *, grad_sample_mode: str, wrap_model: bool = True, **options: Unpack[EpsilonOptions]
    ) -> Any: ...

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        grad_sample_mode: str = "flash",
        **options: Any,
    ) -> Any:
        """As Opacus' ``make_private_with_epsilon``, with :meth:`make_private`'s own arguments.

        Args:
            target_epsilon, target_delta: what may be spent, by the end of the last epoch.
            epochs: how many there will be.
            grad_sample_mode: as of :meth:`make_private`.
            **options: all arguments of :meth:`make_private` but ``noise_multiplier``; what the
                accountant's ``get_epsilon`` takes.

        Raises:
            ValueError: a target that is no such number, or out of reach; less than one step.

        Warns:
            LargeDeltaWarning: ``target_delta`` is not below one over the number of samples.
            PlanExceededWarning: in a step after the last epoch; once.
        """
        refuse_no_batch(data_loader)
        options["data_loader"] = data_loader
        check_target(target_epsilon, target_delta, epochs, options)
        target: Any = dict(target_epsilon=target_epsilon, target_delta=target_delta, epochs=epochs)
        if grad_sample_mode == "flash":
            noise = planned_noise(self.accountant, options, target)
            planned = len(self.accountant) + steps_of(epochs, len(data_loader))
            made = self.make_private(noise_multiplier=noise, **options)
            made[1].attach_step_hook(self._watch_plan(planned, target_epsilon, epochs))
        else:
            with without_hints():
                made = super().make_private_with_epsilon(
                    grad_sample_mode=grad_sample_mode, **target, **options
                )
        self.check_delta(target_delta)
        return made

    def _watch_plan(self, planned: int, epsilon: float, epochs: float) -> Callable[[Any], None]:
        """A hook for each step that warns in the first one that was not planned."""
        warned = False

        def hook(_: Any) -> None:
            nonlocal warned
            if warned or (steps := len(self.accountant)) <= planned:
                return
            warned = True
            warnings.warn(
                f"FC565 optimizer.step(): found step {steps}; make_private_with_epsilon was asked "
                f"for target_epsilon={epsilon} after epochs={epochs}, which end with step "
                f"{planned}. Each further step spends more than the target. End training here, or "
                "plan more epochs:\n"
                "    make_private_with_epsilon(..., epochs=...)",
                PlanExceededWarning,
                stacklevel=5,
            )

        return hook

    def _wrapped(self, given: dict[str, Any]) -> GradSampleHooksFlashClipping:
        """The model of a call of make_private with these arguments, wrapped if it is not yet."""
        module, wrap_model = given["module"], given["wrap_model"]
        validate(module, given["mode"])
        options = {name: given[name] for name in _OF_MODEL}
        if isinstance(options["unit"], Users):
            options["unit"] = None
        if isinstance(options["clipping"], AdaptiveBound):
            options["clipping"] = "flat"
        if not (isinstance(module, GradSampleModuleFlashClipping) and wrap_model):
            cls = GradSampleModuleFlashClipping if wrap_model else GradSampleHooksFlashClipping
            return cls(module, **options)
        options["folded_modules"] = tuple(options["folded_modules"])
        if kernels := options["kernels"]:
            options["kernels"] = replace(kernels, cuda_graphs=kernels.cuda_graphs or "off")
        defaults = {"mode": "one_pass", "folded_modules": (), "kernels": None}
        asked = [key for key, default in defaults.items() if options[key] != default]  # by name
        asked += ["unit"] * (given["unit"] is not None)
        expected = {key: options[key] for key in ("batch_first", "loss_reduction", *asked)}
        found = {key: getattr(module, key) for key in expected}
        if found != expected:
            raise InvalidValue(
                f"FC173 The module is wrapped already, with {found}; this call asks for "
                f"{expected}. Pass the plain nn.Module (module.to_standard_module())."
            )
        count = len(module.trainable_parameters)
        check_bounds(options["clipping"], options["max_grad_norm"], count)
        # The noise will be for the engine's bound, so clipping must be by the same.
        module.max_grad_norm = options["max_grad_norm"]
        module.clipping = options["clipping"]
        module.running_step.counts_unclipped = False  # unless clipping is adaptive
        return module

    def _optimizer(self, given: dict[str, Any], expected: float, group: object) -> FlashDPOptimizer:
        """The private optimizer, of the class for how the model is spread over processes.

        ``expected``: the batch size, over all processes; ``group``: those of a pipeline.
        """
        module, optimizer = given["module"], given["optimizer"]
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        names = "noise_multiplier max_grad_norm loss_reduction"
        kwargs = {name: given[name] for name in names.split()}
        kwargs |= {"stream": self.stream, "secure_mode": self.secure_mode}
        kwargs["noise_grid"] = given["process"].noise_grid
        cls: Callable[..., FlashDPOptimizer] = FlashDPOptimizer
        if group is not None:
            cls, kwargs["group"] = wings.stage_optimizer, group
        elif isinstance(module, _DataParallel) and not has_shards(module):
            cls, expected = DistributedFlashDPOptimizer, expected / dist.get_world_size()
        return cls(optimizer, expected_batch_size=expected, **kwargs)

    def get_epsilon(self, delta: float) -> float:
        """The privacy spent so far: ``epsilon`` for this ``delta``, as the accountant has it; 0
        before any step, infinite without noise.

        Formal guarantee:
            For datasets that are neighbours by :attr:`relation` (they differ in one sample, *added
            or removed*, unless ``mechanism`` was given), and any set of outcomes
            ``S``: ``P[outcome in S] <= exp(epsilon) P'[outcome in S] + delta``. The outcome is
            the model's parameters after every step. Replacing one sample by another is one removed
            and one added, and costs more. With ``unit`` a sample is a unit: all
            rows of a user, say, added or removed together.

            Public constants, the same for both datasets: the sample rate ``q``, the number of steps
            and the expected batch size ``q N`` that gradients are divided by, where ``N`` is
            the number of samples as given to ``make_private``. If ``N`` itself is secret, choose
            batch size and steps without looking at it.

        Assumptions:
            Poisson sampling (a ``NotPoissonWarning`` if not), a sample's loss that depends on
            that sample only, and the bound that every step's noise is for. A sample whose gradient
            is inf or NaN counts as one that adds nothing.

        Raises:
            ValueError: ``delta`` is not between 0 and 0.5.

        Warns:
            LargeDeltaWarning: ``delta`` is not below one over the number of samples; once.
        """
        self.check_delta(delta)
        device_checks.raise_found(wait=True)
        history = self.accountant.history
        if not history or any(multiplier == 0 for multiplier, _, _ in history):
            return math.inf if history else 0.0
        with without_hints():
            return max(0.0, float(super().get_epsilon(delta)))  # type: ignore[no-untyped-call]

    def check_delta(self, delta: float | None, stacklevel: int = 1) -> None:
        """Warn once, with a ``LargeDeltaWarning``, of a δ that promises nothing for so many
        samples; ``ValueError`` unless it is between 0 and 0.5."""
        if delta is not None:
            checked_number("delta", delta, "(0, 0.5)", example=1e-5)
        samples = self._samples
        if delta is None or samples is None or delta in self._large_deltas or delta * samples < 1:
            return
        self._large_deltas |= {delta}
        warnings.warn(
            f"FC564 delta: found {delta:g} for {samples} samples; expected less than 1 / {samples} "
            f"= {1 / samples:.3g}. A mechanism that publishes one sample in the clear, chosen at "
            f"random, is (0, 1/{samples})-private. Take delta well below it, such as "
            f"delta={0.1 / samples:.1g}.",
            LargeDeltaWarning,
            stacklevel=stacklevel + 2,
        )

    @property
    def relation(self) -> str:
        """The neighbouring relation of epsilon, in words: name it wherever epsilon is reported."""
        return str(process_of(self.accountant).relation)

    def summary(self, delta: float) -> str:
        """The privacy spent, in a line to report: ε with δ, and the neighbouring relation. A seed
        is named, loudly."""
        found = f"ε = {self.get_epsilon(delta):.4g} at δ = {delta:g} ({self.relation})"
        return found + seed_notice(self.stream)

    def report(self, delta: float) -> dict[str, Any]:
        """All that ε depends on, to publish with a model: plain values, for ``json.dumps``.

        Returns:
            ``epsilon`` by ``"pld"``, ``"prv"`` and ``"rdp"``, each with ``is_bound``, or
            ``None`` and ``why``. ``relation`` and ``unit`` (the neighbours), ``assumptions``,
            ``violated`` (there was a warning), ``seeds`` (empty, or no release is private),
            ``parts`` (sampling, noise, steps), ``releases`` (for
            :func:`~flash_clipping.noise.compose`) and ``versions``.

        Warns:
            LargeDeltaWarning: as :meth:`get_epsilon`.
        """
        self.check_delta(delta)
        return wings.make_report(self, delta)

    def __getstate__(self) -> dict[str, Any]:
        # Neither data nor, by SecretStream, a key of noise.
        return self.__dict__ | {"dataset": None}

    def save_checkpoint(
        self, *, optimizer: Any = None, checkpoint_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in Opacus, and how far the noise's stream has come; its key is in no checkpoint."""
        state = getattr(optimizer, "stream", self.stream).state_dict()
        checkpoint_dict = {**(checkpoint_dict or {}), _IN_CHECKPOINTS: state}
        super().save_checkpoint(optimizer=optimizer, checkpoint_dict=checkpoint_dict, **kwargs)

    def load_checkpoint(self, *, optimizer: Any = None, **kwargs: Any) -> Any:
        """As in Opacus, before this engine's first step. Noise goes on from this process's own key,
        or, with the seed of the checkpoint, behind what it had drawn: nothing is drawn again.

        Raises:
            ValueError: this engine has accounted for steps, which would be forgotten.
        """
        checkpoint = super().load_checkpoint(optimizer=optimizer, **kwargs)
        if _IN_CHECKPOINTS in checkpoint:
            getattr(optimizer, "stream", self.stream).load_state_dict(checkpoint[_IN_CHECKPOINTS])
        return checkpoint
