"""Figures of Lotfi et al. (2022), recomputed in float64; their claims are those of the ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.evidence.ledger.fourier import fourier_data
from gpclml.conditioning import RandomOrderings
from gpclml.linalg import DenseCovariance

FOURIER = [  # degree, decaying prior, LML, CLML in data order, its mean over orders, standard error
    pytest.param(3, False, 53.803669, 0.304081, 10.858, 0.025, id="M3"),
    pytest.param(9, False, 28.918961, 7.138589, 13.114, 0.016, id="M9"),
    pytest.param(9, True, 54.233923, 7.136201, 13.138, 0.016, id="M9c"),
]


def fourier_covariance(x: Tensor, degree: int, decaying: bool) -> DenseCovariance:
    d = torch.arange(1, degree + 1, dtype=torch.float64)
    angles = x.unsqueeze(-1) * d
    features = torch.cat([angles.sin(), angles.cos()], dim=-1)
    variances = (1 / d**2 if decaying else torch.ones_like(d)).repeat(2)
    noise = 0.01 * torch.eye(len(x), dtype=torch.float64)
    return DenseCovariance(features * variances @ features.mT + noise)


@pytest.mark.parametrize(("degree", "decaying", "lml", "clml", "mean", "error"), FOURIER)
def test_fourier_models(degree, decaying, lml, clml, mean, error):
    """The authors' data, drawn anew by their seeds."""
    x, y = (torch.tensor(values)[:100] for values in fourier_data(15, 6, 500)[:2])
    covariance = fourier_covariance(x, degree, decaying)
    for first, expected in ((0, lml), (85, clml)):
        density = covariance.conditional_log_density(y, torch.arange(first, 100))
        assert density.item() == pytest.approx(expected, abs=2e-6)
    (tails,) = RandomOrderings(k=4000, m=85, seed=0).held_out(100)
    values = covariance.block_log_densities(y, [tails])
    standard_error = values.std().item() / math.sqrt(len(tails))
    assert abs(values.mean().item() - mean) < 4 * math.hypot(error, standard_error)


def test_density_estimation():
    train = torch.tensor((np.random.RandomState(2).randn(1000) + 1)[:40])
    prior = DenseCovariance(torch.eye(41, dtype=torch.float64) + 1.0)
    # Mean and variance of one more draw, from its log density at three points.
    below, middle, above = (
        prior.conditional_log_density(torch.cat([train, point.view(1)]), torch.tensor([40])).item()
        for point in torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    )
    variance = -1 / (below - 2 * middle + above)
    assert variance == pytest.approx(1.024390244, abs=1e-8)
    assert variance * (above - below) / 2 == pytest.approx(0.771763826, abs=1e-8)
    prior = DenseCovariance(torch.eye(40, dtype=torch.float64) + 1.0)
    lml = prior.conditional_log_density(train, torch.arange(40)).item()
    assert lml == pytest.approx(-60.350350, abs=1e-6)
