"""Opacus' tests of its grad sample module and hooks: what they do beside per-sample gradients."""

from __future__ import annotations

import torch

from flash_clipping import GradSampleHooksFlashClipping, GradSampleModuleFlashClipping
from tests.opacus_suite.substitutes import (
    not_applicable,
    opacus_tests,
)
from tests.opacus_suite.test_ghost_clipping import NO_FUNCTORCH

module_tests = opacus_tests(
    "grad_sample_module_test", GradSampleModule=GradSampleModuleFlashClipping
)
hooks_tests = opacus_tests("grad_sample_hooks_test", GradSampleHooks=GradSampleHooksFlashClipping)


class TestModule(module_tests.GradSampleModuleTest):
    CLS = GradSampleModuleFlashClipping
    test_standard_module_validation = not_applicable(NO_FUNCTORCH)


class TestHooks(hooks_tests.GradSampleHooksTest):
    CLS = GradSampleHooksFlashClipping
    test_standard_module_validation = not_applicable(NO_FUNCTORCH)
    test_grad_sample_computation = not_applicable(
        "reads param.grad_sample, which ghost clipping (Opacus' too) leaves at None; "
        "test_norm_sample_computation asserts the norms instead"
    )

    def test_norm_sample_computation(self) -> None:
        x, _ = next(iter(self.dl))
        output = self.hooks_model(x)
        self.criterion(output, torch.zeros_like(output)).backward()
        for param in self.hooks_model.parameters():
            self.assertEqual(param._norm_sample.shape, (self.DATA_SIZE,))
            self.assertIsNone(param.grad_sample)
