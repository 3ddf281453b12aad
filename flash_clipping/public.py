"""The package's names, where they are from. :mod:`flash_clipping` hands them on."""

from flash_clipping import hugging_face, layers, noise, one_by_one  # noqa: F401
from flash_clipping.capture.declared_rows import samples as samples
from flash_clipping.capture.draws import NoStepWarning as NoStepWarning
from flash_clipping.capture.units import Offsets as Offsets
from flash_clipping.engine.accounting import (
    LargeDeltaWarning as LargeDeltaWarning,
    PlanExceededWarning as PlanExceededWarning,
)
from flash_clipping.engine.adaptive import AdaptiveBound as AdaptiveBound
from flash_clipping.engine.criterion import FlashLoss as FlashLoss
from flash_clipping.engine.grad_sample_module import (
    GradSampleHooksFlashClipping as GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping as GradSampleModuleFlashClipping,
)
from flash_clipping.engine.micro_batches import MicroBatches as MicroBatches
from flash_clipping.engine.optimizer import (
    DistributedFlashDPOptimizer as DistributedFlashDPOptimizer,
    FlashDPOptimizer as FlashDPOptimizer,
)
from flash_clipping.engine.options import Kernels as Kernels, Pipeline as Pipeline
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine as FlashPrivacyEngine
from flash_clipping.engine.private_state import PrivateState as PrivateState
from flash_clipping.engine.sampling.loaders import (
    NotPoissonWarning as NotPoissonWarning,
    PoissonLoader as PoissonLoader,
)
from flash_clipping.engine.sampling.samplers import (
    PoissonSampler as PoissonSampler,
    ShardedPoissonSampler as ShardedPoissonSampler,
)
from flash_clipping.engine.sampling.streams import StreamedDataset as StreamedDataset
from flash_clipping.engine.sampling.units import Documents as Documents, Users as Users
from flash_clipping.engine.several_optimizers import SeveralOptimizers as SeveralOptimizers
from flash_clipping.engine.token_losses import per_sample_loss as per_sample_loss
from flash_clipping.errors import FlashClippingError as FlashClippingError
from flash_clipping.factors.base import DenseGrad as DenseGrad, PerSampleGrad as PerSampleGrad
from flash_clipping.factors.embedding import EmbeddingGrad as EmbeddingGrad
from flash_clipping.factors.linear import LinearGrad as LinearGrad
from flash_clipping.graphs.graphed_step import GraphedStep as GraphedStep
from flash_clipping.noise.process import (
    CyclicPoisson as CyclicPoisson,
    FixedOrder as FixedOrder,
    PoissonRows as PoissonRows,
    PoissonSampling as PoissonSampling,
    RandomAllocation as RandomAllocation,
    Shuffled as Shuffled,
)
from flash_clipping.pipelines.schedule import PrivateSchedule as PrivateSchedule
from flash_clipping.randomness import SeededNoiseWarning as SeededNoiseWarning
from flash_clipping.rules import Rule as Rule, register_rule as register_rule
from flash_clipping.trainers.arguments import PrivacyArguments as PrivacyArguments
from flash_clipping.trainers.dashboard import PrivacyDashboard as PrivacyDashboard
