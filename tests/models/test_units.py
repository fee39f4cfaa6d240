"""Predictions do not depend on the units of targets and inputs."""

import math
import warnings

import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.errors import ArgumentError
from gpclml.evaluation import marginal_log_predictive, score_models
from gpclml.fit import fit_mll
from gpclml.models import BayesianLinearModel, GPRegression, Standardizer
from gpclml.tables.fitting import predicted
from gpclml.tables.methods import prediction_scores

SCALES = [10.0**k for k in range(-12, 13, 4)]
FEW = [1e-12, 1e-6, 1e-3, 1e6, 1e12]
TYPES = [torch.float64, torch.float32]


def data(dtype, scale=1.0, input_scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 2, generator=generator, dtype=torch.float64) + 1
    noise = torch.randn(30, generator=generator, dtype=torch.float64)
    y = scale * (3 + torch.sin(5 * x[:, 0]) + 0.1 * noise)
    x = input_scale * x
    return x[:20].to(dtype), y[:20].to(dtype), x[20:].to(dtype), y[20:].to(dtype)


def fitted_model(model, noise=0.01):
    """Hyperparameters as they are after a fit, the same whatever the data."""
    model.likelihood.noise = noise
    model.covar_module.base_kernel.lengthscale = 0.7
    model.covar_module.outputscale = 1.3
    return model


def numbers(model, x, y, scale, **options):
    """All that a user gets of a prediction, over the scale."""
    normal = model.predict(x, **options)
    low, high = normal.confidence_region()
    base = torch.full((3, *normal.mean.shape), 0.5, dtype=x.dtype)
    return torch.cat(
        [
            normal.mean / scale,
            normal.stddev / scale,
            normal.variance / scale / scale,
            low / scale,
            high / scale,
            (normal.rsample(torch.Size([3]), base) / scale).flatten(),
            (normal.log_prob(y) + len(y) * math.log(scale)).reshape(1),
            normal[2:5].stddev / scale,
            (normal * 2.0).stddev / scale,
        ]
    ).detach()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("marginal", "solver"), [(False, "cholesky"), (True, "cg")])
def test_predictions_scale_with_the_targets(dtype, marginal, solver):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y, new_x, new_y = data(dtype)
        model = fitted_model(GPRegression(x, y))
        expected = numbers(model, new_x, new_y, 1.0, marginal=marginal, solver=solver)
        tolerance = 1e-6 if dtype == torch.float64 else 1e-4  # conjugate gradients and log_prob
        for scale in SCALES:
            x, y, new_x, new_y = data(dtype, scale)
            model = fitted_model(GPRegression(x, y))
            values = numbers(model, new_x, new_y, scale, marginal=marginal, solver=solver)
            torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
def test_predictions_do_not_depend_on_the_units_input_scale(dtype):
    with torch.no_grad():
        x, y, new_x, _ = data(dtype)
        expected = fitted_model(GPRegression(x, y)).predict(new_x, marginal=True)
        for scale in SCALES:
            x, y, new_x, _ = data(dtype, input_scale=scale)
            normal = fitted_model(GPRegression(x, y)).predict(new_x, marginal=True)
            rounding = 1e-6 if dtype == torch.float64 else 2e-5  # of x, before it is standardized
            torch.testing.assert_close(normal.mean, expected.mean, rtol=rounding, atol=0)
            torch.testing.assert_close(normal.stddev, expected.stddev, rtol=rounding, atol=0)


@pytest.mark.slow
def test_fitted_predictions_scale_with_targets_and_inputs():
    def fitted(scale, input_scale):
        x, y, new_x, new_y = data(torch.float64, scale, input_scale)
        model = GPRegression(x, y)
        fit_mll(ExactMarginalLogLikelihood(model.likelihood, model), progress=False)
        prediction = predicted(model, new_x)
        coverage = prediction_scores(new_y, prediction).values["rows inside"][0]
        return prediction.mean / scale, prediction.std / scale, coverage

    mean, deviation, coverage = fitted(1.0, 1.0)
    for scale in FEW:
        for input_scale in (1.0, 1 / scale):
            converted = fitted(scale, input_scale)
            torch.testing.assert_close(converted[0], mean, rtol=1e-6, atol=0)
            torch.testing.assert_close(converted[1], deviation, rtol=1e-6, atol=0)
            assert converted[2] == coverage


def test_other_predictions_and_scores_of_small_targets():
    """A linear model, a score of a model that is not standardized, and a comparison."""
    deviations, densities, loo = [], [], []
    for scale in (1.0, 1e-8):
        x, y, new_x, new_y = data(torch.float64, scale)
        linear = BayesianLinearModel(x, y, prior_variance=scale**2, noise=(0.1 * scale) ** 2)
        deviations.append(linear.predict(new_x).stddev / scale)
        model = GPRegression(x, y, standardize=False)
        model.likelihood.noise_covar.register_constraint("raw_noise", Positive())
        model.likelihood.noise, model.covar_module.outputscale = (0.1 * scale) ** 2, scale**2
        model.mean_module.constant = 3 * scale
        score = marginal_log_predictive(model, new_x, new_y)
        densities.append(score + math.log(scale))
        scores = score_models({"a": fitted_model(GPRegression(x, y))}).scores["a"]
        loo.append(scores.loo_variance.sqrt() / scale)
    for values in (deviations, densities, loo):
        torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_standardizer_of_any_magnitude_is_right(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([-0.5, 0.25, 0.5, torch.nan], dtype=dtype)
    expected = Standardizer.fit(values, -1)
    for scale in (largest, 2.0**100, 2.0**-100, torch.finfo(dtype).tiny * 8):
        fitted = Standardizer.fit(values * scale, -1)
        torch.testing.assert_close(fitted.scale / scale, expected.scale)
        torch.testing.assert_close(fitted.offset / scale, expected.offset)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e300), (torch.float32, 1e38)])
def test_targets_whose_variance_the_type_cannot_hold_are_refused(dtype, size):
    x, y, *_ = data(dtype)
    y = y / y.abs().max()
    with pytest.raises(ArgumentError, match=r"train_y.*Measure it in another unit"):
        GPRegression(x, y * size)
    with pytest.raises(ArgumentError, match="train_y"):
        GPRegression(x, y / size)
    half = size**0.35
    model = fitted_model(GPRegression(x, y * half))
    reference = fitted_model(GPRegression(x, y))
    torch.testing.assert_close(
        model.predict(x).stddev / half, reference.predict(x).stddev, rtol=1e-5, atol=0
    )
    large = GPRegression(x * size**0.9, y)
    torch.testing.assert_close(
        fitted_model(large).predict(x * size**0.9).mean,
        reference.predict(x).mean, rtol=1e-4, atol=1e-5,
    )  # fmt: skip
