"""Opacus' tests of ghost clipping, with flash clipping's classes in the place of its own."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.per_sample_gradients_utils import clone_module

from flash_clipping import (
    FlashLoss,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.engine.criterion import FlashTensor
from tests.opacus_suite.substitutes import (
    not_applicable,
    opacus_tests,
)

module_tests = opacus_tests(
    "grad_sample_module_fast_gradient_clipping_test",
    GradSampleModuleFastGradientClipping=GradSampleModuleFlashClipping,
    DPLossFastGradientClipping=FlashLoss,
    DPTensorFastGradientClipping=FlashTensor,
)
hooks_tests = opacus_tests(
    "grad_sample_hooks_fast_gradient_clipping_test",
    GradSampleModuleFastGradientClipping=GradSampleModuleFlashClipping,
    GradSampleHooksFastGradientClipping=GradSampleHooksFlashClipping,
)
# Its tests are inherited by those of ghost clipping and name the class themselves as well.
opacus_tests("grad_sample_module_test", GradSampleModule=GradSampleModuleFlashClipping)

NO_FUNCTORCH = (
    "asserts Opacus' attribute ft_compute_sample_grad on a layer without a sampler; flash clipping "
    "serves such a layer by its functions, which test_layer_without_a_rule asserts"
)


class Replaced:
    """Further replacements for the time of one test."""

    module: types.ModuleType
    replacements: dict[str, Any] = {}

    def setUp(self) -> None:
        for name, replacement in self.replacements.items():
            patch = mock.patch.object(self.module, name, replacement)
            self.enterContext(patch)  # type: ignore[attr-defined]
        super().setUp()  # type: ignore[misc]


class TestModule(Replaced, module_tests.GradSampleModuleFastGradientClippingTest):
    CLS = GradSampleModuleFlashClipping
    module = module_tests

    test_standard_module_validation = not_applicable(NO_FUNCTORCH)

    def test_layer_without_a_rule(self) -> None:
        class SimpleLinear(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.p = torch.nn.Parameter(torch.ones(2, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.linear(x, self.p)

        for strict in (True, False):
            flash = self.CLS(SimpleLinear(), strict=strict)
            flash(torch.ones(3, 4)).sum(1).mean().backward()
            self.assertTrue(torch.allclose(flash.get_norm_sample(), torch.full((3,), 8**0.5)))


class TestModuleOpacusCriterion(TestModule):
    """Opacus' own two backward passes on flash clipping's module."""

    replacements = {"DPLossFastGradientClipping": DPLossFastGradientClipping}


class TestEmbeddingLayer(
    Replaced, module_tests.GradSampleModuleFastGradientClippingEmbeddingLayerTest
):
    module = module_tests

    test_gradient_calculation = not_applicable(
        "compares Opacus' summed_grad with a param.grad that was divided by the batch size 3, and "
        "passes in Opacus because the criterion there multiplies coefficients [3] with losses "
        "[3, 1] into [3, 3] and adds up three times too much; "
        "test_summed_gradient_is_that_of_opacus compares summed_grad with summed_grad"
    )

    def test_summed_gradient_is_that_of_opacus(self) -> None:
        ids = torch.tensor([[1, 1], [2, 0], [2, 0]])
        target = torch.tensor([[[0.1], [0.1]], [[0.2], [0.3]], [[0.2], [0.3]]])
        criterion = torch.nn.CrossEntropyLoss()
        plain = module_tests.SampleEmbeddingModule(3, 1)
        hooks = GradSampleModule(clone_module(plain))
        flash = module_tests.GradSampleModuleFastGradientClipping(
            clone_module(plain), max_grad_norm=0.05
        )
        options = {"noise_multiplier": 0.0, "max_grad_norm": 0.05, "expected_batch_size": 3}
        hooks_optimizer = DPOptimizer(torch.optim.SGD(hooks.parameters(), lr=1), **options)
        flash_optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(flash.parameters(), lr=1), **options
        )
        criterion(hooks(ids), target).backward()
        hooks_optimizer.step()
        FlashLoss(flash, flash_optimizer, criterion)(flash(ids), target).backward()
        flash_optimizer.step()
        for expected, found in zip(hooks.parameters(), flash.parameters(), strict=True):
            torch.testing.assert_close(found.summed_grad, expected.summed_grad)
            torch.testing.assert_close(found.grad, expected.grad)


class TestLossArithmetic(module_tests.DPTensorArithmeticTest): ...


class TestHooks(Replaced, hooks_tests.GradSampleHooksFastGradientClippingTest):
    module = hooks_tests
