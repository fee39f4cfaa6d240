"""The choice of a transform of the targets, against densities by SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from gpclml import StackedGP
from gpclml.models import GPRegression
from gpclml.tables.warps import Warp, choose_warp


def fitted_matern(x, y) -> GPRegression:
    return StackedGP(["matern"]).fit(x, y).components[0].model


def rows(n=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, (2 * x[:, 0]).sin() + 0.2 * noise


def profile(model, y, warp):
    """The log density of the targets of the best scale, up to a constant, by a dense normal."""
    z = y.numpy() if warp is None else warp.forward(y).numpy()
    slopes = 0.0 if warp is None else float(warp.log_slope(y).sum())
    with torch.no_grad():
        prior = model.forward(model.train_inputs[0])
        noise = float(model.likelihood.noise) * torch.eye(len(y), dtype=torch.float64)
        covariance = (prior.covariance_matrix + noise).numpy()
        mean = prior.mean.numpy()
    centred, spread = z - z.mean(), z.std(ddof=1)
    factor = np.linalg.inv(np.linalg.cholesky(covariance)) @ (centred / spread - mean)
    best = spread**2 * np.mean(factor**2)
    density = stats.multivariate_normal(z.mean() + spread * mean, best * covariance)
    return density.logpdf(z) + slopes


@pytest.mark.parametrize("transform", [torch.exp, lambda y: (y + 4).square(), lambda y: -y.exp()])
def test_no_transform_of_the_grid_is_more_likely(transform):
    x, y = rows()
    y = transform(y)
    model = fitted_matern(x, y)
    found = choose_warp(model, y)
    assert found is not None
    powers = [place / 4 for place in range(9)]
    units = [share * float(y.mean()) for share in (0.01, 0.1, 1.0)]
    if float(y.min()) < 0:
        units = [float(y.std())]
    offset = 0.0 if float(y.min()) >= 0 else float(y.median())
    grid = [profile(model, y, Warp(offset, unit, power)) for unit in units for power in powers]
    assert profile(model, y, found) == pytest.approx(max(grid), abs=1e-6)
    assert max(grid) > profile(model, y, None) + 1


def test_the_logarithm_is_found_again_and_what_is_normal_stays():
    x, y = rows(200)
    found = choose_warp(fitted_matern(x, (3 * y).exp()), (3 * y).exp())
    assert found is not None
    assert found.power == 0.0
    assert found.unit < 0.05 * float((3 * y).exp().mean())
    assert choose_warp(fitted_matern(x, y), y) is None


def test_zeros_and_constant_targets():
    x, y = rows(60)
    counts = (2 * y.exp()).floor()
    assert float(counts.min()) == 0.0
    found = choose_warp(fitted_matern(x, counts), counts)
    assert found is None or (found.offset == 0.0 and found.unit >= 0.1 * float(counts.mean()))
    constant = torch.full((60,), 3.0, dtype=torch.float64)
    assert choose_warp(fitted_matern(x, constant), constant) is None


def test_targets_near_an_upper_end_have_predictions_among_them():
    # Their squares are normal, and zero is 2.4 deviations of these away from their mean.
    x, y = rows()
    y = (2 + y).clamp_min(0.3).sqrt()
    found = choose_warp(fitted_matern(x, y), y)
    assert found is not None
    assert found.power > 1
    assert found.lowest == float(y.min())
    stack = StackedGP(["matern_warped"]).fit(x, y)
    assert stack.components[0].warp == found
    far = stack.predict(torch.tensor([[1.5], [50.0]], dtype=torch.float64))
    assert float(y.min()) < float(far.mean.min()) <= float(far.mean.max()) < float(y.max())
    assert float(far.std.max()) < 2 * float(y.std())


def test_means_of_heavy_tails_are_not_beyond_all_targets():
    x, y = rows(60)
    y = (4 * y).exp()
    stack = StackedGP(["matern_warped"]).fit(x, y)
    far = stack.predict(torch.tensor([[1.5], [50.0]], dtype=torch.float64))
    assert float(far.mean.max()) < 2 * float(y.max())
    assert float(far.std.max()) < 10 * float(y.max())


def test_symmetric_targets_are_not_transformed():
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(60, 1, generator=generator, dtype=torch.float64)
    y = (6 * x[:, 0]).sin() + 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)
    stack = StackedGP(["matern", "matern_warped"]).fit(x, y)
    assert [one.name for one in stack.components] == ["matern"]
    assert not stack.failures
