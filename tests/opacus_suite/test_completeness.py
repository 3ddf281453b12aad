"""Every test case that Opacus installs is run here with this library's classes, or says why not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import unittest

import opacus.tests
import pytest

import tests.opacus_suite
from tests.opacus_suite.substitutes import opacus_tests

OTHER_MODE = "runs another gradient mode of Opacus; every mode runs as flash here already"
NO_CLASS = "names no class that flash clipping replaces"
MANY_GPUS = (
    "needs several CUDA devices; tests/engine/test_distributed.py makes the comparison with gloo"
)

#: Test cases that are not run, and why.
NOT_RUN = {
    "accountants_test.AccountantRegistryTest": NO_CLASS,
    "accountants_test.AccountingTest": NO_CLASS,
    "ddp_hook_check.GradientComputationTest": "uses PrivacyEngine.attach, which Opacus removed in "
    "1.0; Opacus' own runs do not collect it",
    "distributed_poisson_test.PoissonSamplingTest": NO_CLASS,
    "dp_layers.dp_multihead_attention_test.DPMultiheadAttention_test": NO_CLASS,
    "dp_layers.dp_rnn_test.DPLSTM_test": NO_CLASS,
    "dpdataloader_test.CollateFnWithEmptyTest": NO_CLASS,
    "dpdataloader_test.DPDataLoaderEmptyFirstBatchTest": NO_CLASS,
    "dpdataloader_test.DPDataLoaderTest": NO_CLASS,
    "module_validator_test.ModuleValidator_test": NO_CLASS,
    "multidevice_optimizer_test.MultiDeviceOptimizerTest": MANY_GPUS,
    "multigpu_adaptive_clipping_test.GradientComputationTestAdaptiveClipping": MANY_GPUS,
    "multigpu_fsdpcheck.GradientComputationTestFSDP": MANY_GPUS,
    "multigpu_gradcheck_test.GradientComputationTest": MANY_GPUS,
    "multigpu_precision_test.MultiGPUPrecisionTest": MANY_GPUS,
    "poisson_test.PoissonSamplingTest": NO_CLASS,
    "prv_accountant.PRVAccountantTest": NO_CLASS,
    "randomness_test.DataLoaderRandomnessTest": NO_CLASS,
    "randomness_test.DataLoaderSwitchRandomnessTest": NO_CLASS,
    "validators.batch_norm_test.BatchNormValidator_test": NO_CLASS,
    "validators.gru_test.GRUValidator_test": NO_CLASS,
    "validators.instance_norm_test.InstanceNormValidator_test": NO_CLASS,
    "validators.lstm_test.LSTMValidator_test": NO_CLASS,
    "validators.multihead_attention_test.MultiheadAttentionValidator_test": NO_CLASS,
    "grad_sample_module_test.EWGradSampleModuleTest": OTHER_MODE,
    "grad_samples.embedding_norm_sample_test.TestComputeEmbeddingNormSample": (
        "calls Opacus' norm sampler as a function on numbers written out; "
        "tests/ops/test_embedding.py tests ours"
    ),
    "batch_memory_manager_test.BatchMemoryManagerTestWithExpandedWeights": OTHER_MODE,
    "batch_memory_manager_test.BatchMemoryManagerTestWithFunctorch": OTHER_MODE,
    "gradient_accumulation_test.GradientAccumulationTestFunctorch": OTHER_MODE,
    "privacy_engine_test.PrivacyEngineConvNetEmptyBatchTest": "skipped by Opacus itself, "
    "'Incompatible with the new empty batch handling'; "
    "tests/capture/test_empty_batches.py steps on empty batches",
    "privacy_engine_test.PrivacyEngineConvNetFrozenTestFunctorch": OTHER_MODE,
    "privacy_engine_test.PrivacyEngineConvNetTestExpandedWeights": OTHER_MODE,
    "privacy_engine_test.PrivacyEngineConvNetTestFunctorch": OTHER_MODE,
    "privacy_engine_test.PrivacyEngineTextTestFunctorch": OTHER_MODE,
    "privacy_engine_test.PrivacyEngineTiedWeightsTestFunctorch": OTHER_MODE,
}


def installed_cases() -> dict[str, type[unittest.TestCase]]:
    cases = {}
    for info in pkgutil.walk_packages(opacus.tests.__path__):
        if info.ispkg:
            for child in pkgutil.iter_modules([f"{opacus.tests.__path__[0]}/{info.name}"]):
                cases.update(cases_in(f"{info.name}.{child.name}"))
        else:
            cases.update(cases_in(info.name))
    return cases


def cases_in(name: str) -> dict[str, type[unittest.TestCase]]:
    module = opacus_tests(name)
    return {
        f"{name}.{key}": value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == module.__name__
        and unittest.TestLoader().getTestCaseNames(value)
    }


def cases_that_run() -> set[type]:
    bases: set[type] = set()
    for info in pkgutil.iter_modules(tests.opacus_suite.__path__):
        if info.name.startswith("test_") and info.name != "test_completeness":
            module = importlib.import_module(f"tests.opacus_suite.{info.name}")
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__ == module.__name__:
                    bases.update(value.__mro__)
    return bases


def test_every_installed_case_runs_or_says_why_not() -> None:
    installed = installed_cases()
    running = cases_that_run()
    runs = {name for name, case in installed.items() if case in running}
    print(f"{len(installed)} test cases installed, {len(runs)} run here, {len(NOT_RUN)} do not")
    assert not runs & set(NOT_RUN), "listed as not run, but run"
    assert set(installed) - runs == set(NOT_RUN)


@pytest.mark.parametrize("name", sorted(n for n, reason in NOT_RUN.items() if reason == NO_CLASS))
def test_no_class_of_ours_is_named(name: str) -> None:
    source = inspect.getsource(installed_cases()[name])
    for named in ("PrivacyEngine", "GradSample", "FastGradientClipping", "DPOptimizer"):
        assert named not in source
