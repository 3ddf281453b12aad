"""The ways to wrap a model."""

from __future__ import annotations

from flash_clipping import GradSampleHooksFlashClipping, GradSampleModuleFlashClipping

WRAPPERS = {"wrapped": GradSampleModuleFlashClipping, "hooks": GradSampleHooksFlashClipping}
MODES = ["one_pass", "two_pass"]
