"""Differentially private training at the speed of training without it, as an Opacus plugin."""

from flash_clipping.capture.declared_rows import samples
from flash_clipping.capture.units import Offsets
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Convolution, Dense, Factor, Lookup, Outer
from flash_clipping.finish.clipping import clipping_coefficients
from flash_clipping.integration.accounting import LargeDeltaWarning
from flash_clipping.integration.criterion import FlashLoss
from flash_clipping.integration.ghost_norms import register_flash_norm_samplers
from flash_clipping.integration.grad_sample_module import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.integration.graphed_step import GraphedStep
from flash_clipping.integration.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.integration.pipeline_schedule import PrivateSchedule
from flash_clipping.integration.privacy_engine import FlashPrivacyEngine
from flash_clipping.integration.sampling import NotPoissonWarning
from flash_clipping.integration.token_losses import per_sample_loss
from flash_clipping.ops.runtime.backend import is_triton_available
from flash_clipping.randomness import SecretStream, SeededNoiseWarning
from flash_clipping.rules import Needs, Rule, register_rule

__version__ = "0.1.0"

__all__ = [
    "Convolution",
    "Dense",
    "DistributedFlashDPOptimizer",
    "Factor",
    "FlashClippingError",
    "FlashDPOptimizer",
    "FlashLoss",
    "FlashPrivacyEngine",
    "GradSampleHooksFlashClipping",
    "GradSampleModuleFlashClipping",
    "GraphedStep",
    "LargeDeltaWarning",
    "Lookup",
    "Needs",
    "NotPoissonWarning",
    "Offsets",
    "Outer",
    "PrivateSchedule",
    "Rule",
    "SecretStream",
    "SeededNoiseWarning",
    "clipping_coefficients",
    "is_triton_available",
    "per_sample_loss",
    "register_flash_norm_samplers",
    "register_rule",
    "samples",
]
