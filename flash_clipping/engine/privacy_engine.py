"""Opacus' privacy engine with ``grad_sample_mode="flash"``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, get_args, overload

from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader

from flash_clipping._compat import check_engine, explain_flash_mode
from flash_clipping.capture.units import Offsets
from flash_clipping.distributed import has_shards, processes_of
from flash_clipping.distributed.pipeline.stage import shared_by_stages
from flash_clipping.engine.accounting import (
    PldAccountant,
    Process,
    check_delta,
    relation_of,
    without_hints,
)
from flash_clipping.engine.correlated_noise import CorrelatedFlashDPOptimizer
from flash_clipping.engine.criterion import FlashAdaptiveLoss, FlashLoss
from flash_clipping.engine.grad_sample_module import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.engine.graphs.graphed_model import replay_calls
from flash_clipping.engine.noise_stream import SecretNoiseEngine
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.engine.options import (
    ADAPTIVE,
    Backend,
    CudaGraphs,
    EpsilonOptions,
    Mode,
    PrivateOptions,
    Reduction,
    Sampling,
    SumDtype,
    check_keywords,
    check_one_of,
    planned_noise,
    requested_process,
)
from flash_clipping.engine.parallel import refuse_alone
from flash_clipping.engine.pipeline_optimizer import PipelineFlashDPOptimizer, pipeline_group
from flash_clipping.engine.sampling.loaders import (
    PoissonLoader,
    UnitsOfRows,
    refuse_loader,
    refuse_units,
    watch_sampling,
)
from flash_clipping.engine.unsupported import validate
from flash_clipping.randomness.mechanisms import IndependentNoise, NoiseMechanism

if TYPE_CHECKING:
    from flash_clipping.distributed.process_groups import ProcessGroups

# Opacus returns the criterion too for every mode whose name contains "ghost".
_FLASH = "flash-ghost"

explain_flash_mode()

Private: TypeAlias = tuple[
    GradSampleModuleFlashClipping, FlashDPOptimizer, FlashLoss | FlashAdaptiveLoss, DataLoader[Any]
]
#: With ``wrap_model=False``.
PrivateHooks: TypeAlias = tuple[
    GradSampleHooksFlashClipping, FlashDPOptimizer, FlashLoss | FlashAdaptiveLoss, DataLoader[Any]
]


class FlashPrivacyEngine(SecretNoiseEngine):
    """``opacus.PrivacyEngine`` whose default gradient mode is flash clipping.

    Everything that is not named here (accounting, schedulers) is Opacus' own. Modes other than
    ``"flash"`` behave as in Opacus. What epsilon stands for: :meth:`get_epsilon`.

    Args:
        accountant: ``"prv"``, ``"rdp"`` or ``"gdp"``, as in Opacus.
        secure_mode: refuse seeds; noise in mode ``"flash"`` is secure without it too. In other
            modes as in Opacus: it needs ``torchcsprng``.
        seed: for tests and debugging: makes noise repeat. Whoever knows it can subtract the noise.

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

    #: What make_private_with_epsilon takes besides, while it runs.
    _of_epsilon: set[str] = set()
    #: What make_private was told of the rows of the dataset.
    _units: UnitsOfRows | None = None
    dataset: Any
    #: Whether it was said that a mode of Opacus' returns three things.
    _explained_mode = False
    #: Whether it was said that batches are not drawn by Poisson sampling.
    _warned_not_poisson = False
    #: How batches are drawn and noise is made.
    _process = Process()
    #: Whether the model's parameters are shards.
    _is_sharded = False
    #: Of a model whose parameters are shards.
    _processes: ProcessGroups | None = None
    #: What make_private was told of rounding noisy sums.
    _noise_grid = False
    #: How many the dataset of the last make_private has.
    _samples: int | None = None
    #: The δ that there was a warning about.
    _large_deltas: frozenset[float] = frozenset()
    #: The processes of the pipeline that the module is a stage of.
    _pipeline: Any = None

    @overload
    def make_private(
        self,
        *,
        noise_multiplier: float,
        grad_sample_mode: Literal["flash"] = "flash",
        wrap_model: Literal[True] = True,
        **options: Unpack[PrivateOptions],
    ) -> Private: ...

    @overload
    def make_private(
        self,
        *,
        noise_multiplier: float,
        grad_sample_mode: Literal["flash"] = "flash",
        wrap_model: Literal[False],
        **options: Unpack[PrivateOptions],
    ) -> PrivateHooks: ...

    @overload
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Any,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        grad_sample_mode: str,
        **options: Any,
    ) -> Any: ...

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Any,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: Callable[..., Any] | None = None,
        grad_sample_mode: str = "flash",
        clipping: str = "flat",
        wrap_model: bool = True,
        batch_first: bool = True,
        loss_reduction: Reduction = "mean",
        poisson_sampling: bool = True,
        noise_generator: Any = None,
        rand_on_empty: bool = False,
        backend: Backend = "auto",
        mode: Mode = "one_pass",
        folded_modules: Sequence[str] = (),
        sum_dtype: SumDtype = "float32",
        cuda_graphs: CudaGraphs = "off",
        strict: bool = True,
        distributed: bool | None = None,
        sample_of: str | Offsets | None = None,
        units: Sequence[int] | Tensor | None = None,
        max_rows_per_unit: int | None = None,
        sampling: Sampling = "poisson",
        max_batch_size: int | None = None,
        noise: NoiseMechanism | None = None,
        noise_grid: bool = False,
        pipeline: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As :meth:`opacus.PrivacyEngine.make_private`; in mode ``"flash"`` it returns
        ``(module, optimizer, criterion, data_loader)``, like Opacus' mode ``"ghost"``.

        The criterion is optional in training: ``loss.backward()`` on any loss of the model's
        outputs that reduces over samples by ``loss_reduction`` works as well.

        Args:
            module, optimizer, data_loader, noise_multiplier, max_grad_norm, wrap_model,
                batch_first, loss_reduction, poisson_sampling: as in Opacus.
            criterion: a loss, whose own ``reduction`` is ``loss_reduction``
                (:class:`~flash_clipping.FlashLoss`); by default ``nn.CrossEntropyLoss``.
            grad_sample_mode: ``"flash"``, or one of Opacus' modes.
            noise_generator: a seed.
            rand_on_empty: must be false.
            clipping: ``"flat"``; ``"per_layer"``, with one ``max_grad_norm`` per trainable
                parameter; ``"automatic"`` (AUTO-S); ``"adaptive"``, where the returned criterion
                moves the bound at the end of every step
                (:mod:`flash_clipping.engine.adaptive`) and takes the arguments of Opacus'
                ``PrivacyEngineAdaptiveClipping``.
            backend: see :class:`~flash_clipping.GradSampleHooksFlashClipping`; flash only.
            mode: ``"one_pass"`` or ``"two_pass"``; flash only.
            folded_modules, sum_dtype: see :class:`~flash_clipping.GradSampleHooksFlashClipping`;
                flash only.
            cuda_graphs: ``"auto"``: on a GPU, the model's forward and backward are replayed as
                CUDA graphs wherever that gives the same, after three steps with batches of one
                shape; one warning says why not
                (:mod:`flash_clipping.engine.graphs.graphed_model`). Memory of a step is kept;
                flash only.
            strict: refuse buffers that forward changes, in forward; flash only.
            distributed: ``False``: although ``torch.distributed`` runs several processes, each
                trains a model of its own, and releases it by itself. By default such a model must
                be a ``DifferentiallyPrivateDistributedDataParallel``, or ``fully_shard`` was
                applied to it; flash only.
            sample_of: see :class:`~flash_clipping.GradSampleHooksFlashClipping`. The units of a
                batch must be the items that the loader drew, each by itself; flash only.
            units: ``[len(dataset)]``, integers: the user, patient, ... that each row of the
                dataset belongs to. Every step then draws these, not rows, and a batch is all rows
                of those that were drawn; "sample" means such a *unit* from then on; flash only.
            max_rows_per_unit: of a unit with more rows so many are drawn, uniformly and anew each
                time.
            sampling: ``"poisson"``; ``"fixed_order"`` and ``"cyclic_poisson"`` are for correlated
                noise (:class:`~flash_clipping.engine.accounting.Process`); flash only, and
                ``accountant="pld"``.
            max_batch_size: every batch has this many rows. Where more samples are drawn, a random
                subset of them is taken; where fewer, other rows fill the batch up, which add
                exactly nothing. The sample rate is still the loader's; flash only, and
                ``accountant="pld"``.
            noise: how the noise of steps is correlated
                (:mod:`flash_clipping.randomness.mechanisms`); independent if ``None``.
            noise_grid: round noisy sums to a grid that does not depend on data, against attacks on
                floating-point addition (``docs/noise.md``); flash only.
            pipeline: ``True``, or a process group: the module is one stage of a pipeline, and all
                stages' processes make this call, with the same dataset. They draw the same batches
                (:class:`~flash_clipping.PrivateSchedule` runs them); flash only.
            **kwargs: of ``clipping="adaptive"``; of Opacus' modes.

        Guarantees:
            Every step draws every sample independently with probability ``1 / len(data_loader)``,
            the rate that is accounted; in several processes each sample is drawn by one of them. A
            step whose batch is empty runs no model and adds noise only. Gradients are divided by
            the expected batch size, ``len(dataset) / len(data_loader)`` rounded down, a
            public constant (:meth:`get_epsilon`). With ``units`` these are drawn, with the same
            probability, and gradients are divided by the expected number of units.

        Warns:
            NotPoissonWarning: batches are not drawn in that way; once.

        Raises:
            TypeError: an argument that is unknown, or that belongs to another ``clipping``.
            ValueError: arguments that contradict each other; a loader whose sampling can be neither
                replaced nor accounted for.
            opacus.validators.errors.UnsupportedModuleError: the model mixes samples.
        """
        refuse_units(
            units,
            max_rows_per_unit,
            sample_of=sample_of,
            flash=grad_sample_mode == "flash",
            poisson=poisson_sampling,
        )
        if criterion is None and grad_sample_mode == "flash":
            criterion = nn.CrossEntropyLoss(reduction=loss_reduction)
        if criterion is not None:
            kwargs["criterion"] = criterion
        kwargs.update(module=module, optimizer=optimizer, data_loader=data_loader)
        kwargs.update(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        kwargs.update(wrap_model=wrap_model, batch_first=batch_first, loss_reduction=loss_reduction)
        kwargs.update(poisson_sampling=poisson_sampling, noise_generator=noise_generator)
        kwargs.update(rand_on_empty=rand_on_empty)
        process = requested_process(
            self.accountant,
            sampling=sampling,
            noise=noise,
            max_batch_size=max_batch_size,
            flash=grad_sample_mode == "flash",
            with_units=units is not None or sample_of is not None,
            arguments={"clipping": clipping, "noise_grid": noise_grid} | kwargs,
        )
        if grad_sample_mode != "flash":
            for name, given in (("sample_of", sample_of is not None), ("noise_grid", noise_grid)):
                if given:
                    raise ValueError(f"{name}: found with another grad_sample_mode than 'flash'.")
            self._use_opacus_randomness()
            self._explain(grad_sample_mode)
            return super().make_private(
                grad_sample_mode=grad_sample_mode, clipping=clipping, **kwargs
            )
        check_engine(PrivacyEngine)
        self._process = process
        check_keywords(kwargs, clipping, self._of_epsilon)
        if isinstance(module, GradSampleHooksFlashClipping):
            FlashDPOptimizer.check_alone(module, optimizer)
        self._is_sharded = has_shards(module)
        asked: dict[str, Any] = {"mode": mode, "clipping": clipping, "distributed": distributed}
        asked |= {"units": units, "sample_of": sample_of, "sampling": sampling, "noise": noise}
        self._pipeline = pipeline_group(
            pipeline, asked | {"max_batch_size": max_batch_size} | kwargs
        )
        if self._pipeline is None:
            refuse_alone(module, distributed)
        self._processes = processes_of(module)
        if self._is_sharded and units is not None:
            raise NotImplementedError(
                "units: found a model whose parameters are shards. Processes would have to "
                "draw the rows of one unit together, which is not built. Draw rows, or use one "
                "process."
            )
        self._adaptive, self._noise_grid = clipping == "adaptive", noise_grid
        check_one_of("cuda_graphs", cuda_graphs, get_args(CudaGraphs))
        self._cuda_graphs = cuda_graphs
        self._module_options: dict[str, Any] = {
            "backend": backend,
            "mode": mode,
            "folded_modules": folded_modules,
            "sum_dtype": sum_dtype,
            "clipping": "flat" if clipping == "adaptive" else clipping,
            "strict": strict,
            "sample_of": sample_of,
        }
        self._units = None
        if units is not None:
            rows = len(data_loader.dataset)  # type: ignore[arg-type]
            sample_rate = 1 / len(data_loader)
            self._units = UnitsOfRows(units, rows, sample_rate, max_rows_per_unit)
        try:
            wrapper, private, loss, loader = super().make_private(
                grad_sample_mode=_FLASH, clipping=clipping, **kwargs
            )
        finally:
            del self._module_options
        dataset: Any = data_loader.dataset
        self._samples = len(dataset) if self._units is None else self._units.count
        private.follow(wrapper)
        watch_sampling(self, wrapper, private, loader)
        if isinstance(self.accountant, PldAccountant):
            self.accountant.use()
        return wrapper, private, loss, loader

    @overload
    def make_private_with_epsilon(
        self,
        *,
        grad_sample_mode: Literal["flash"] = "flash",
        wrap_model: Literal[True] = True,
        **options: Unpack[EpsilonOptions],
    ) -> Private: ...

    @overload
    def make_private_with_epsilon(
        self,
        *,
        grad_sample_mode: Literal["flash"] = "flash",
        wrap_model: Literal[False],
        **options: Unpack[EpsilonOptions],
    ) -> PrivateHooks: ...

    @overload
    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        grad_sample_mode: str,
        **options: Any,
    ) -> Any: ...

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        grad_sample_mode: str = "flash",
        **options: Any,
    ) -> Any:
        """As :meth:`opacus.PrivacyEngine.make_private_with_epsilon`, with :meth:`make_private`'s
        additional arguments.

        Args:
            target_epsilon, target_delta: what may be spent, by the end of the last epoch.
            epochs: how many there will be.
            grad_sample_mode: as of :meth:`make_private`.
            **options: all arguments of :meth:`make_private` but ``noise_multiplier``; what the
                accountant's ``get_epsilon`` takes.

        Warns:
            LargeDeltaWarning: ``target_delta`` is not below one over the number of samples.
        """
        options.update(target_epsilon=target_epsilon, target_delta=target_delta, epochs=epochs)
        if grad_sample_mode == "flash":
            options.setdefault("criterion", None)  # Opacus' default is a mean
            if isinstance(self.accountant, PldAccountant):
                made = self.make_private(
                    noise_multiplier=planned_noise(self.accountant, options), **options
                )
                self.check_delta(target_delta)
                return made
            # Opacus hands what these read on to make_private.
            self._of_epsilon = {
                *inspect.signature(PrivacyEngine.make_private_with_epsilon).parameters,
                *inspect.signature(get_noise_multiplier).parameters,
                *inspect.signature(self.accountant.get_epsilon).parameters,
            } - {"delta", "steps"}
        try:
            with without_hints():
                made = super().make_private_with_epsilon(
                    grad_sample_mode=grad_sample_mode, **options
                )
        finally:
            self._of_epsilon = set()
        self.check_delta(target_delta)
        return made

    def _explain(self, grad_sample_mode: str) -> None:
        """Say how many things a mode of Opacus' returns, where that is fewer; once."""
        if "ghost" in grad_sample_mode or self._explained_mode:
            return
        self._explained_mode = True
        warnings.warn(
            f"make_private: found grad_sample_mode={grad_sample_mode!r}, which is Opacus' own "
            "clipping, not this library's, and returns (module, optimizer, data_loader). For flash "
            "clipping leave grad_sample_mode out:\n"
            "    model, optimizer, criterion, data_loader = engine.make_private(...)",
            stacklevel=4,
        )

    def _prepare_model(self, module: nn.Module, **kwargs: Any) -> Any:
        if kwargs.get("grad_sample_mode") != _FLASH:
            return super()._prepare_model(module, **kwargs)
        kwargs.pop("grad_sample_mode")
        validate(module)
        wrap_model = kwargs.pop("wrap_model", True)
        if isinstance(module, GradSampleModuleFlashClipping) and wrap_model:
            expected = {key: kwargs[key] for key in ("batch_first", "loss_reduction")}
            defaults: dict[str, Any] = {"backend": "auto", "mode": "one_pass"}
            defaults |= {"folded_modules": (), "sample_of": None}
            for key, default in defaults.items():  # asked for by name
                if (asked := self._module_options[key]) != default:
                    expected[key] = tuple(asked) if key == "folded_modules" else asked
            if self._units is not None:
                expected["sample_of"] = None
            found = {key: getattr(module, key) for key in expected}
            if found != expected:
                raise ValueError(
                    f"The module is wrapped already, with {found}; this call asks for {expected}. "
                    "Pass the plain nn.Module (module.to_standard_module())."
                )
            # The noise will be for the engine's bound, so clipping must be by the same.
            module.max_grad_norm = kwargs["max_grad_norm"]
            module.clipping = self._module_options["clipping"]
            module.running_step.counts_unclipped = False  # until an adaptive criterion is made
            return module
        cls = GradSampleModuleFlashClipping if wrap_model else GradSampleHooksFlashClipping
        model = cls(module, **kwargs, **self._module_options)
        if self._cuda_graphs == "auto":
            replay_calls(model)
        return model

    def _prepare_data_loader(
        self, data_loader: Any, *, poisson_sampling: bool, distributed: bool, **kwargs: Any
    ) -> Any:
        if not hasattr(self, "_module_options"):
            return super()._prepare_data_loader(
                data_loader, poisson_sampling=poisson_sampling, distributed=distributed, **kwargs
            )
        refuse_loader(data_loader, poisson_sampling=poisson_sampling, distributed=distributed)
        if not poisson_sampling:
            return super()._prepare_data_loader(
                data_loader, poisson_sampling=False, distributed=distributed, **kwargs
            )
        dataset = data_loader.dataset
        if self.dataset is None:
            self.dataset = dataset
        elif self.dataset is not dataset:
            warnings.warn(
                "This engine has accounted for another dataset object before. Epsilon is for one "
                "dataset: use a new engine for another one, unless both are the same data.",
                stacklevel=4,
            )
        kwargs.update(distributed=distributed, stream=self.stream.another())
        together = self._processes
        if self._pipeline is not None:
            kwargs["stream"] = shared_by_stages(self._pipeline, kwargs["stream"])
        kwargs["distributed"] = distributed or together is not None
        loader = PoissonLoader.from_data_loader(
            data_loader, process=self._process, units=self._units, **kwargs
        )
        self._sampler = loader.batch_sampler
        if together is not None:  # those that share samples draw the same
            stream = together.shared_stream(kwargs["stream"])
            self._sampler.share(together.data_rank, together.data_size, stream)
        return loader

    def get_epsilon(self, delta: float) -> float:
        """The privacy spent so far: ``epsilon`` for this ``delta``, as the accountant has it.

        Formal guarantee:
            For datasets that are neighbours by :attr:`relation` (they differ in one sample, *added
            or removed*, unless ``sampling`` was given), and any set of outcomes
            ``S``: ``P[outcome in S] <= exp(epsilon) P'[outcome in S] + delta``. The outcome is
            the model's parameters after every step. Replacing one sample by another is one removed
            and one added, and costs more. With ``units`` or ``sample_of`` a sample is a unit: all
            rows of a user, say, added or removed together.

            Public constants, the same for both datasets: the sample rate ``q``, the number of steps
            and the expected batch size ``q N`` that gradients are divided by, where ``N`` is
            the number of samples as given to ``make_private``. If ``N`` itself is secret, choose
            batch size and steps without looking at it.

        Assumptions:
            Poisson sampling (:class:`NotPoissonWarning` if not), a sample's loss that depends on
            that sample only, and the bound that every step's noise is for. A sample whose gradient
            is inf or NaN counts as one that adds nothing.

        Warns:
            LargeDeltaWarning: ``delta`` is not below one over the number of samples; once.
        """
        self.check_delta(delta)
        with without_hints():
            return float(super().get_epsilon(delta))

    def check_delta(self, delta: float | None, stacklevel: int = 1) -> None:
        """Warn of a δ that promises nothing for so many samples; once.

        Warns:
            LargeDeltaWarning: ``delta`` is not below one over the number of samples.
        """
        if delta is None or self._samples is None or delta in self._large_deltas:
            return
        if not check_delta(delta, self._samples, stacklevel=stacklevel + 2):
            self._large_deltas |= {delta}

    @property
    def relation(self) -> str:
        """Which datasets epsilon compares, in words: name it wherever epsilon is reported."""
        return relation_of(self.accountant)

    def _prepare_optimizer(
        self, *, optimizer: Any, grad_sample_mode: str = "hooks", **kwargs: Any
    ) -> Any:
        if grad_sample_mode != _FLASH:
            return super()._prepare_optimizer(
                optimizer=optimizer, grad_sample_mode=grad_sample_mode, **kwargs
            )
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        kwargs.pop("clipping", None)
        if self._units is not None:
            # Opacus counted rows.
            kwargs["expected_batch_size"] = self._units.count * self._units.sample_rate
        generator = kwargs.pop("noise_generator", None)
        kwargs.update(
            stream=self.stream if generator is None else None,
            generator=generator,
            secure_mode=self.secure_mode,
        )
        return self._private_optimizer(optimizer, kwargs.pop("distributed", False), **kwargs)

    def _private_optimizer(
        self, optimizer: Any, distributed: bool, **kwargs: Any
    ) -> FlashDPOptimizer:
        """Of the class for how noise is made, and how the model is spread over processes."""
        if not isinstance(self._process.noise, IndependentNoise):
            assert isinstance(self.accountant, PldAccountant)  # see requested_process
            kwargs.update(mechanism=self._process.noise, before_noise=self._sampler.check_step)
            correlated = CorrelatedFlashDPOptimizer(optimizer, **kwargs)
            self.accountant.before_run = correlated.begin_run
            return correlated
        kwargs["noise_grid"] = self._noise_grid
        if self._is_sharded:
            from flash_clipping.engine.sharded_optimizer import ShardedFlashDPOptimizer

            if distributed:
                kwargs["expected_batch_size"] *= dist.get_world_size()  # Opacus' is one process's
            return ShardedFlashDPOptimizer(optimizer, **kwargs)
        if self._pipeline is not None:
            return PipelineFlashDPOptimizer(optimizer, group=self._pipeline, **kwargs)
        cls = DistributedFlashDPOptimizer if distributed else FlashDPOptimizer
        return cls(optimizer, **kwargs)

    def _prepare_criterion(self, *, module: Any, **kwargs: Any) -> Any:
        if not isinstance(module, GradSampleHooksFlashClipping):
            return super()._prepare_criterion(module=module, **kwargs)
        parts = module, kwargs["optimizer"], kwargs["criterion"], kwargs["loss_reduction"]
        if self._adaptive:
            settings = {name: kwargs[name] for name in ADAPTIVE if name in kwargs}
            return FlashAdaptiveLoss(*parts, **settings)
        return FlashLoss(*parts)
