"""Differentially private training at the speed of training without it, as an Opacus plugin."""

from flash_clipping.clipping import clipping_coefficients
from flash_clipping.criterion import FlashLoss
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Convolution, Dense, Factor, Lookup, Outer
from flash_clipping.ghost_norms import register_flash_norm_samplers
from flash_clipping.grad_sample_module import (
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.graphed_step import GraphedStep
from flash_clipping.ops.backend import is_triton_available
from flash_clipping.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.privacy_engine import FlashPrivacyEngine
from flash_clipping.rules import Needs, Rule, register_rule
from flash_clipping.sampling import NotPoissonWarning

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
    "Lookup",
    "Needs",
    "NotPoissonWarning",
    "Outer",
    "Rule",
    "clipping_coefficients",
    "is_triton_available",
    "register_flash_norm_samplers",
    "register_rule",
]
