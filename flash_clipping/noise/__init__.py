"""Correlated and discrete noise, batches that Opacus' accountants do not know, and reports."""

from flash_clipping.engine import wings
from flash_clipping.engine.accounting import Mechanism as Mechanism
from flash_clipping.noise import report
from flash_clipping.noise.accountants import begin, requested_process
from flash_clipping.noise.discrete import discrete_noisy_means
from flash_clipping.noise.mechanisms import (
    BandedInverseNoise as BandedInverseNoise,
    BandedNoise as BandedNoise,
    BufferedNoise as BufferedNoise,
    IndependentNoise as IndependentNoise,
    NoiseMechanism as NoiseMechanism,
)
from flash_clipping.noise.process import PoissonSampling
from flash_clipping.noise.report import compose as compose, statistics_report as statistics_report

wings.PoissonSampling = PoissonSampling
wings.requested_process = requested_process
wings.begin_process = begin
wings.discrete_noisy_means = discrete_noisy_means
wings.make_report = report.make_report
