"""Opacus' tests that go through its privacy engine, with ``FlashPrivacyEngine`` in its place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.tap import Tap
from tests.opacus_suite.substitutes import Engine, add_case, not_applicable, opacus_tests, seeded

engine_tests = opacus_tests("privacy_engine_test", examples=5, PrivacyEngine=Engine)
validation_tests = opacus_tests("privacy_engine_validation_test", PrivacyEngine=Engine)
randomness_tests = opacus_tests(
    "randomness_test",
    PrivacyEngine=Engine,
    GradSampleModule=GradSampleModuleFlashClipping,
    DPOptimizer=DPOptimizerFastGradientClipping,
)
memory_manager_tests = opacus_tests("batch_memory_manager_test", PrivacyEngine=Engine)
accumulation_tests = opacus_tests(
    "gradient_accumulation_test",
    PrivacyEngine=Engine,
    get_gsm_class=lambda mode: GradSampleModuleFlashClipping,
)
noise_scheduler_tests = opacus_tests("schedulers.noise_scheduler_test", PrivacyEngine=Engine)
clip_scheduler_tests = opacus_tests("schedulers.grad_clip_scheduler_test", PrivacyEngine=Engine)
accounting_tests = opacus_tests("accounting_noise_multiplier_test", PrivacyEngine=Engine)

NO_GRAD_SAMPLE = "reads p.grad_sample: ghost clipping (Opacus' too) forms no per-sample gradients"


class EngineCase:
    """What every test case of ``privacy_engine_test`` needs here."""

    test_sample_grad_aggregation = not_applicable(
        f"{NO_GRAD_SAMPLE}; that p.grad is their clipped sum is what tests/rules/test_norms.py "
        "compares with vmap(grad) for every layer"
    )


class OfTexts(EngineCase):
    test_make_private_with_epsilon = not_applicable(
        "hands over inputs [T, batch] without batch_first=False; positions would be samples: "
        "refused (tests/engine/test_criterion.py::"
        "test_time_first_input_is_refused_by_the_criterion)"
    )


def add_engine_case(kind: str) -> None:
    case = getattr(engine_tests, f"PrivacyEngine{kind}Test")
    add_case(globals(), f"Test{kind}", OfTexts if "Text" in kind else EngineCase, case)
    made = globals()[f"Test{kind}"]
    made.test_deterministic_run = seeded(case, "test_deterministic_run")
    if "Layer" in kind:  # some hundred numbers: with most seeds their variance is near
        made.test_noise_level = seeded(case, "test_noise_level", 23)


for _kind in ("ConvNet", "ConvNetFrozen", "Text", "TiedWeights", "CustomLayer"):
    add_engine_case(_kind)
    add_engine_case(f"{_kind}Hooks")


class TestValidation(validation_tests.PrivacyEngineValidationTest):
    test_custom_linear_hooks = test_unsupported_hooks = test_extra_param_hooks_requires_grad = (
        not_applicable(
            "asserts Opacus' attribute ft_compute_sample_grad on a layer without a sampler; "
            "test_served_without_a_rule trains the same three modules"
        )
    )
    test_unsupported_ew = test_extra_param_ew = not_applicable(
        "asserts that expanded weights fail on this module; flash clipping supports it: "
        "test_served_without_a_rule trains it"
    )

    def test_served_without_a_rule(self) -> None:
        for module, bare in (
            (validation_tests.CustomLinearModule(5, 8), True),
            (validation_tests.MatmulModule(5, 8), True),
            (validation_tests.LinearWithExtraParam(5, 8), True),
            (validation_tests.BasicSupportedModule(), False),
        ):
            module, optimizer, loader = self._init(module, size=(16, 5))
            flash, optimizer, loader = Engine().make_private(
                module=module,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
            self.assertEqual(isinstance(module.forward.instance_forward, Tap), bare)
            for x in loader:
                optimizer.zero_grad()
                flash(x).flatten(1).sum(1).mean().backward()
                self.assertEqual(flash.get_norm_sample().shape, (len(x),))
                optimizer.step()


class TestOptimizerRandomness(randomness_tests.OptimizerRandomnessTest): ...


def of_opacus(name: str) -> Any:
    """One that Opacus skips: its secure mode needs a package that is no longer maintained."""
    return getattr(randomness_tests.PrivacyEngineSecureModeTest, name).__wrapped__


class TestEngineRandomness(randomness_tests.PrivacyEngineSecureModeTest):
    """Batches and noise are equal where the engine has a seed, and nowhere else."""

    test_raise_secure_mode = of_opacus("test_raise_secure_mode")
    test_secure_mode_global_seed = of_opacus("test_secure_mode_global_seed")
    test_secure_mode_no_poisson = of_opacus("test_secure_mode_no_poisson")


class TestBatchMemoryManager(memory_manager_tests.BatchMemoryManagerTest):
    test_equivalent_to_one_batch = seeded(
        memory_manager_tests.BatchMemoryManagerTest, "test_equivalent_to_one_batch"
    )


for _name in ("global_seed", "dl_seed_no_noise", "seed", "custom_and_global_seed"):
    _run = seeded(TestEngineRandomness.__base__, f"test_{_name}")
    setattr(TestEngineRandomness, f"test_{_name}", _run)


class TestGradientAccumulation(accumulation_tests.GradientAccumulationTest):
    test_grad_sample_accumulation = not_applicable(
        f"{NO_GRAD_SAMPLE}; test_clipped_sums_add_up asserts the same of p.grad"
    )
    test_privacy_engine_no_poisson_accumulation = not_applicable(
        f"{NO_GRAD_SAMPLE}; test_steps_over_accumulated_batches asserts the rest of it"
    )

    test_batch_splitter_zero_grad = not_applicable(
        "asserts an error for a forgotten zero_grad() between the parts of a batch, which would "
        "count their samples twice in Opacus; here optimizer.step() takes p.grad over, and "
        "test_forgotten_zero_grad_between_parts asserts that the sum is the same"
    )

    def test_forgotten_zero_grad_between_parts(self) -> None:
        sums = []
        for do_zero_grad in (True, False):
            module = copy.deepcopy(self.model)
            model, optimizer, loader = Engine().make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0),
                data_loader=self.dl,
                noise_multiplier=0.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
            )
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as parts:
                self.model_forward_backward(
                    model, parts, optimizer, num_steps=8, do_zero_grad=do_zero_grad
                )
            sums.append(flat([p.summed_grad for p in optimizer.params]))
        torch.testing.assert_close(sums[1], sums[0])

    def test_clipped_sums_add_up(self) -> None:
        module = GradSampleModuleFlashClipping(self.model, max_grad_norm=999.0)
        self.model_forward_backward(module, iter(self.dl), num_steps=8)
        grad = flat([p.grad for p in self.model.parameters() if p.requires_grad])
        average = grad / self.DATA_SIZE
        torch.testing.assert_close(average, self.effective_batch_grad, atol=1e-5, rtol=1e-3)

    def test_steps_over_accumulated_batches(self) -> None:
        model, optimizer, loader = Engine().make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.dl,
            noise_multiplier=0.0,
            max_grad_norm=999,
            poisson_sampling=False,
        )
        self.model_forward_backward(model, loader, num_steps=8)
        self.assertEqual(optimizer.accumulated_iterations, 8)
        optimizer.step()
        grad = flat([p.grad for p in self.model.parameters() if p.requires_grad])
        torch.testing.assert_close(grad, self.effective_batch_grad, atol=1e-5, rtol=1e-3)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class TestNoiseScheduler(noise_scheduler_tests.NoiseSchedulerTest): ...


class TestGradClipScheduler(clip_scheduler_tests.GradClipSchedulerTest): ...


class TestAdaptiveClippingAccounting(accounting_tests.AdaClipNoiseMultiplierTest):
    test_privacy_accounting_with_adaclip_e2e = not_applicable(
        "asserts that the optimizer is AdaClipDPOptimizer, which reads p.grad_sample; "
        "tests/engine/test_clipping.py tests clipping=AdaptiveBound() as ghost clipping does it"
    )
