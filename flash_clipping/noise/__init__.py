"""Correlated and discrete noise, batches that Opacus' accountants do not know, and reports."""

from flash_clipping.engine import wings
from flash_clipping.noise.discrete import discrete_noisy_means
from flash_clipping.noise.process import PoissonSampling
from flash_clipping.noise.report import make_report
from flash_clipping.noise.requested import begin, requested_process

wings.PoissonSampling = PoissonSampling
wings.requested_process = requested_process
wings.begin_process = begin
wings.discrete_noisy_means = discrete_noisy_means
wings.make_report = make_report
