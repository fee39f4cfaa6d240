"""Models by name, and how they are fitted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.evaluation import log_marginal_likelihood
from gpclml.tables.predictions import predicted
from gpclml.tables.recipes import MODELS, OBJECTIVES, Recipe


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    return x, 30 * torch.sin(6 * x[:, 0]) + 2 * noise + 7


RECIPES = [Recipe(model, seed=1, steps=4) for model in MODELS[:-1]] + [
    Recipe("rbf", objective, seed=1, steps=4, restarts=1) for objective in OBJECTIVES
]


@pytest.mark.parametrize("recipe", [*RECIPES, Recipe("deep", "clml", steps=1)], ids=str)
def test_fits_are_repeatable_and_gain(data, recipe):
    x, y = data
    if recipe.model == "deep":
        x, y = x[:24], y[:24]
    (model, note, _), (again, *_) = (recipe.fit(x, y, progress=False) for _ in range(2))
    torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=0, atol=0)
    assert note == "" or note.endswith(".")
    assert ("on held-out rows" in note) == (recipe.model == "deep")
    if recipe.model == "deep" or recipe.objective != "lml":
        return
    start, *_ = replace(recipe, steps=1, restarts=0).fit(x, y, progress=False)
    assert log_marginal_likelihood(model) > log_marginal_likelihood(start)


def test_the_linear_model_is_ridge_regression(data):
    x, y = data
    model, *_ = Recipe("linear").fit(x, y, progress=False)
    phi = torch.cat([torch.ones(60, 1).to(x), model.input_standardizer.transform(x)], dim=1)
    ratio = model.likelihood.noise / model.covar_module.prior_variance
    target = model.train_targets
    weights = torch.linalg.solve(phi.mT @ phi + ratio * torch.eye(3).to(x), phi.mT @ target)
    expected = model.target_standardizer.inverse(phi @ weights)
    torch.testing.assert_close(model.predict(x).mean, expected)


def test_the_spectral_mixture_starts_where_scattered_points_can_train_it():
    """From the smallest gap it starts as white noise and stays there."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(60, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, 0]) * x[:, 0] + 0.3 * noise
    model, *_ = Recipe("sm", seed=1).fit(x, y, progress=False)
    between = torch.linspace(0.5, 9.5, 100, dtype=torch.float64)
    errors = predicted(model, between[:, None]).mean - torch.sin(2 * between) * between
    assert errors.square().mean().sqrt() < 1  # the function's deviation is 4


def curved_data(d, n, seed):
    """A function of two numbers that d inputs are nearly functions of."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, d, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return torch.tanh(z @ weights) + noise, torch.sin(5 * z[:, 0]) * z[:, 1]


@pytest.mark.parametrize(("d", "n", "seed"), [(8, 40, 3), (8, 60, 0)])
def test_the_rational_quadratic_does_not_end_below_the_rbf_that_it_contains(d, n, seed):
    x, y = curved_data(d, n, seed)
    rbf, rq = (Recipe(name).fit(x, y, progress=False).model for name in ("rbf", "rq"))
    assert log_marginal_likelihood(rq) > log_marginal_likelihood(rbf) - 0.1


def test_no_limit_of_steps_ends_a_fit_unless_it_is_asked_for():
    x, y = curved_data(16, 80, 2)
    for name in ("rbf", "rq"):
        assert Recipe(name).fit(x, y, progress=False).note == ""


def test_steps_that_are_not_enough_are_told(data):
    fitted = Recipe("rbf", steps=2).fit(*data, progress=False)
    assert fitted.problem == ""
    assert fitted.note.startswith("The fit was stopped after 2 steps, before it converged.")


def test_names_and_numbers_are_checked():
    with pytest.raises(UnknownNameError, match="Did you mean 'rbf'"):
        Recipe("rfb")
    with pytest.raises(UnknownNameError, match="objective"):
        Recipe("rbf", "cmll")
    with pytest.raises(ArgumentError, match="steps"):
        Recipe("rbf", steps=0)
    with pytest.raises(ArgumentError, match="restarts"):
        Recipe("rbf", restarts=-1)
