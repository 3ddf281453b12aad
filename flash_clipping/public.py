"""The package's names, where they are from. :mod:`flash_clipping` hands them on."""

from flash_clipping import hugging_face, layers, noise, one_by_one  # noqa: F401
from flash_clipping.capture.declared_rows import samples
from flash_clipping.capture.draws import NoStepWarning
from flash_clipping.capture.units import Offsets
from flash_clipping.engine.accounting import LargeDeltaWarning, PlanExceededWarning
from flash_clipping.engine.criterion import FlashLoss
from flash_clipping.engine.grad_sample_module import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.engine.micro_batches import MicroBatches
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine
from flash_clipping.engine.sampling.loaders import NotPoissonWarning
from flash_clipping.engine.several_optimizers import SeveralOptimizers
from flash_clipping.engine.token_losses import per_sample_loss
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors.base import DenseGrad, PerSampleGrad
from flash_clipping.factors.embedding import EmbeddingGrad
from flash_clipping.factors.linear import LinearGrad
from flash_clipping.graphs.graphed_step import GraphedStep
from flash_clipping.pipelines.schedule import PrivateSchedule
from flash_clipping.randomness import SeededNoiseWarning
from flash_clipping.rules import Rule, register_rule

__all__ = [
    "DenseGrad",
    "DistributedFlashDPOptimizer",
    "EmbeddingGrad",
    "FlashClippingError",
    "FlashDPOptimizer",
    "FlashLoss",
    "FlashPrivacyEngine",
    "GradSampleHooksFlashClipping",
    "GradSampleModuleFlashClipping",
    "GraphedStep",
    "LargeDeltaWarning",
    "LinearGrad",
    "MicroBatches",
    "NoStepWarning",
    "NotPoissonWarning",
    "Offsets",
    "PerSampleGrad",
    "PlanExceededWarning",
    "PrivateSchedule",
    "Rule",
    "SeededNoiseWarning",
    "SeveralOptimizers",
    "per_sample_loss",
    "register_rule",
    "samples",
]
