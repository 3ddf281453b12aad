"""Opacus' mixed and low precision tests, on the CPU where there is no CUDA device."""

from __future__ import annotations

import inspect
import unittest
from typing import Any
from unittest import mock

import torch

from tests.opacus_suite.substitutes import Engine, not_applicable, opacus_tests

precision_tests = opacus_tests("mixed_precision_test", PrivacyEngine=Engine)


class Precision(unittest.TestCase):
    engine: type[Engine] = Engine

    def setUp(self) -> None:
        # Opacus' setUp and every test are marked as for CUDA only; nothing in them needs it.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.input_dim = self.output_dim = self.seq_len = 4
        self.hidden_dim = 16
        self.batch_size = self.num_batches = 2
        self.bf16_supported = True
        self.enterContext(mock.patch.object(precision_tests, "PrivacyEngine", self.engine))
        autocast = torch.amp.autocast
        self.enterContext(
            mock.patch(
                "torch.amp.autocast",
                lambda device_type, **kwargs: autocast(self.device.type, **kwargs),
            )
        )

    def _test_mixed_precision_all_modes(
        self, model_class: Any, model_kwargs: Any, dataloader: Any, low_precision_type: Any
    ) -> None:
        """Once instead of once for each of Opacus' modes; with the criterion and without it."""
        self._all(
            self._train_mixed_precision,
            model_class,
            model_kwargs,
            dataloader,
            low_precision_type,
            ["hooks", "ghost"],
        )

    def _test_low_precision_all_modes(
        self, model_class: Any, model_kwargs: Any, dataloader: Any, low_precision_type: Any
    ) -> None:
        """Without the criterion only: with it, Opacus asserts norms of the model's own dtype."""
        self._all(
            self._train_low_precision,
            model_class,
            model_kwargs,
            dataloader,
            low_precision_type,
            ["hooks"],
        )
        for param in self.last_model.parameters():
            self.assertEqual(param._norm_sample.dtype, torch.float32)

    def _train_low_precision(
        self,
        model: Any,
        dataloader: Any,
        dtype: torch.dtype,
        grad_sample_mode: str,
        wrap_model: bool,
    ) -> None:
        """Opacus' own, which asserts sums of the model's dtype. Norms and sums are fp32 here on
        purpose: rounded to bf16, a sample exceeds the bound."""
        model, optimizer, criterion, dataloader = self._get_training_components(
            model, dataloader, grad_sample_mode, dtype=dtype, wrap_model=wrap_model
        )
        for x, y in dataloader:
            optimizer.zero_grad()
            outputs = model(x.to(dtype) if x.is_floating_point() else x)
            self.assertEqual(outputs.dtype, dtype)
            criterion(outputs, y).backward()
            for p in model.parameters():
                self.assertEqual(p.grad.dtype, torch.float32)
            optimizer.step()
            for p in model.parameters():
                self.assertEqual(p.dtype, dtype)

    def _all(
        self,
        train: Any,
        model_class: Any,
        model_kwargs: Any,
        dataloader: Any,
        dtypes: Any,
        grad_sample_modes: list[str],
    ) -> None:
        for wrap_model in (True, False):
            for dtype in dtypes:
                for grad_sample_mode in grad_sample_modes:
                    self.last_model = model_class(**model_kwargs)
                    train(
                        model=self.last_model,
                        dataloader=dataloader,
                        dtype=dtype,
                        grad_sample_mode=grad_sample_mode,
                        wrap_model=wrap_model,
                    )


def without_cuda_only(name: str) -> Any:
    """A test of Opacus without the mark that skips it."""
    return inspect.unwrap(getattr(precision_tests.MixedPrecisionTest, name))


class TestMixedPrecision(Precision, precision_tests.MixedPrecisionTest): ...


for _name in unittest.TestLoader().getTestCaseNames(precision_tests.MixedPrecisionTest):
    setattr(TestMixedPrecision, _name, without_cuda_only(_name))


if not torch.cuda.is_available():
    TestMixedPrecision.test_conv3d_model_precision = not_applicable(
        "PyTorch has no avg_pool3d below float32 on the CPU; TestConv3d of test_grad_samples.py "
        "covers the layer, and a CUDA device runs this"
    )


# Attention without batch_first, on inputs whose first axis is the batch.
for _name in ("test_attention_model_precision", "test_complex_model_precision"):
    setattr(
        TestMixedPrecision,
        _name,
        not_applicable(
            "Opacus' model attends over the samples of the batch, so no clipping can bound one; it "
            "is refused (tests/zoo/test_zoo.py::test_model_that_is_not_supported_is_refused)"
        ),
    )
