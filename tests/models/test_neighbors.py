"""Posteriors given the nearest training points: equal to exact ones, differentiable, kept."""

import copy
import itertools

import gpytorch
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
from botorch.optim import optimize_acqf

from gpclml.errors import UnsupportedError
from gpclml.inference import evaluating
from gpclml.inference.neighbours import count_neighbors
from gpclml.models import GPRegression
from gpclml.models.botorch import DeepKernelGP

pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimization failed:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning"),
]


def data(n=40, d=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(dtype), (7 + 30 * (4 * x).sin().sum(-1) + 3 * noise).to(dtype)


def points(*shape, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def fixed_noise(x, y):
    noise = torch.linspace(0.01, 0.1, len(y)).to(x)
    return GPRegression(x, y, likelihood=gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise))


MODELS = {
    "matern": GPRegression,
    "deep_joint": lambda x, y: GPRegression(x, y, "deep_joint"),
    "deep": lambda x, y: GPRegression(x, y, "deep"),
    "fixed noise": fixed_noise,
    "missing": lambda x, y: GPRegression(x, y.where(torch.arange(len(y)) % 7 != 0, torch.nan)),
    "botorch": lambda x, y: DeepKernelGP(x, y.unsqueeze(-1), kernel="deep_joint"),
    "botorch noise": lambda x, y: DeepKernelGP(x, y.unsqueeze(-1), 1 + y.unsqueeze(-1).square()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_given_all_points_it_is_the_exact_posterior(name, dtype):
    model = MODELS[name](*data(dtype=dtype))
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    for shape in ((1, 2), (3, 2), (5, 3, 2), (2, 2, 1, 2), (50, 2)):
        x = points(*shape, dtype=dtype)
        model.neighbors = None
        exact = model.posterior(x, observation_noise=True)
        model.neighbors = 40
        ours = model.posterior(x, observation_noise=True)
        assert ours.mean.dtype == dtype
        torch.testing.assert_close(ours.mean, exact.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.variance, exact.variance, rtol=tolerance, atol=tolerance)
        if shape[-2] <= 3:
            matrices = [p.distribution.covariance_matrix for p in (ours, exact)]
            torch.testing.assert_close(*matrices, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["matern", "deep_joint", "botorch"])
def test_gradients_are_those_of_finite_differences(name):
    model = MODELS[name](*data())
    model.neighbors = 7
    x = points(3, 2, 2).requires_grad_()
    weights = torch.randn(2, *x.shape[:-1], 1, generator=torch.Generator().manual_seed(2))

    def value(x):
        posterior = model.posterior(x)
        return (weights[0] * posterior.mean + weights[1] * posterior.variance).sum()

    [gradient] = torch.autograd.grad(value(x), x)
    direction = points(3, 2, 2) - 0.5
    with torch.no_grad():
        slope = (value(x + 1e-6 * direction) - value(x - 1e-6 * direction)) / 2e-6
    assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-5)


@pytest.mark.parametrize("q", [1, 3])
def test_a_group_is_given_the_points_nearest_to_any_of_it(q):
    x, y = data()
    model = GPRegression(x, y)
    model.covar_module.base_kernel.lengthscale = [0.3, 4.0]
    model.neighbors = 5
    new = points(q, 2)
    model.eval()
    with torch.no_grad():
        metric = lambda x: model.input_standardizer(x) / torch.tensor([0.3, 4.0])  # noqa: E731
        nearest = torch.cdist(metric(new), metric(x)).amin(0).argsort()
        rows = nearest[: 5 * q] if q == 1 else torch.cdist(metric(new), metric(x)).argsort(-1)
        rows = rows if q == 1 else rows[:, :5].flatten().unique()
        prior = model.likelihood(model.forward(torch.cat([x[rows], new])))
        m = len(rows)
        K, mean = prior.covariance_matrix, prior.mean
        weights = torch.linalg.solve(K[:m, :m], K[:m, m:])
        expected = mean[m:] + weights.mT @ (model.train_targets[rows] - mean[:m])
        covariance = K[m:, m:] - weights.mT @ K[:m, m:]
        ours = model.posterior(new, observation_noise=True).distribution
    scale, offset = model.target_scale, model.target_standardizer.offset
    torch.testing.assert_close(ours.mean, expected * scale + offset, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.covariance_matrix, covariance * scale**2, rtol=1e-9, atol=1e-9)
    if q == 1:
        assert torch.equal(model.predict(new).mean, model.predict(new, neighbors=5).mean)
        torch.testing.assert_close(model.predict(new).mean, ours.mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "copies"), [("fixed noise", 1), ("fixed noise", 4), ("deep_joint", 1), ("botorch", 1)]
)
def test_posteriors_follow_every_change(name, copies):
    x, y = data()
    x = x[: 40 // copies].repeat(copies, 1)[:40]
    model, new, seen = MODELS[name](x, y[: len(x)]), points(6, 1, 2), []
    model.neighbors, base = 7, model.covar_module.base_kernel
    base = getattr(base, "base_kernel", base)

    def predictions(model):
        latent = model.posterior(new)
        moments = [latent.mean, latent.variance]
        if isinstance(model, GPRegression):
            single = model.predict(new[:, 0], observation_noise=False)
            moments += [single.mean, single.variance]
        return torch.cat([values.flatten() for values in moments])

    lengthscales = torch.linspace(0.1, 5.0, base.lengthscale.numel()).to(x)
    noise = torch.linspace(1.0, 0.01, len(x)).to(x) if name == "fixed noise" else 0.3
    for change in (
        lambda: None,
        lambda: setattr(base, "lengthscale", lengthscales),
        lambda: setattr(model.likelihood, "noise", noise),
        lambda: model.set_train_data(targets=model.train_targets.flip(0), strict=False),
        lambda: model.set_train_data(x.flip(0), strict=False),
    ):
        model.train()
        change()
        seen.append(predictions(copy.deepcopy(model)))
        assert torch.equal(predictions(model), seen[-1])
        assert torch.equal(predictions(model), seen[-1])
    assert not any(torch.equal(old, new) for old, new in itertools.pairwise(seen))


def test_it_is_kept_by_files_and_by_models_with_another_kernel(tmp_path):
    model = GPRegression(*data())
    model.save(tmp_path / "exact.pt")
    assert GPRegression.load(tmp_path / "exact.pt").neighbors is None
    model.neighbors = "auto"
    model.save(tmp_path / "model.pt")
    loaded = GPRegression.load(tmp_path / "model.pt")
    assert loaded.neighbors == model.with_kernel("rbf").neighbors == "auto"
    new = points(6, 2)
    assert torch.equal(loaded.predict(new).mean, model.predict(new).mean)
    assert torch.equal(model.predict(new, neighbors="auto").mean, model.predict(new).mean)


@pytest.mark.slow
def test_as_many_as_pay_are_few_for_noise_and_more_for_a_smooth_function():
    x, generator = data(400)[0], torch.Generator().manual_seed(3)
    noise, counts = torch.randn(400, generator=generator).double(), []
    for targets, variance, lengthscale in (
        (noise, 1.0, 0.5),
        ((2 * x).sin().sum(-1) + 0.3 * noise, 0.3, 10.0),
    ):
        model = GPRegression(x, targets)
        model.likelihood.noise = variance
        model.covar_module.base_kernel.lengthscale = lengthscale
        with evaluating(model):
            counts.append(count_neighbors(model, "auto"))
            assert count_neighbors(model, "auto") == counts[-1]
            assert count_neighbors(model, 17) == 17
    assert 32 == counts[0] < counts[1] <= 512


@pytest.mark.slow
@pytest.mark.parametrize("q", [1, 2])
def test_acquisition_functions_are_optimized_on_many_rows(q):
    x, y = data(20_000)
    model = GPRegression(x, y)
    model.likelihood.noise, model.neighbors = 0.01, 32
    kind = LogExpectedImprovement if q == 1 else qLogExpectedImprovement
    acquisition = kind(model, best_f=y.mean() + y.std())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    options = {"maxiter": 4, "seed": 0}
    best, value = optimize_acqf(
        acquisition, bounds, q=q, num_restarts=1, raw_samples=8, options=options
    )
    assert best.shape == (q, 2)
    assert value >= acquisition(points(50, q, 2)).median()


def test_batches_and_several_outputs_are_refused_by_name():
    x, y = data()
    batch = GPRegression(torch.stack([x, x]), torch.stack([y, y]))
    several = DeepKernelGP(x, torch.stack([y, -y], -1))
    for model in (batch, several):
        model.neighbors = 5
        with pytest.raises(UnsupportedError, match="one model of one output"):
            model.posterior(points(1, 2))


def test_further_observations_are_taken_or_refused_by_name():
    x, y = data()
    model, new = GPRegression(x, y), points(2, 2)
    exact = model.condition_on_observations(new, torch.zeros(2, 1).double()).posterior(new)
    model.neighbors = 50
    ours = model.condition_on_observations(new, torch.zeros(2, 1).double()).posterior(new)
    torch.testing.assert_close(ours.mean, exact.mean, rtol=1e-9, atol=1e-9)
    deep = DeepKernelGP(x, y.unsqueeze(-1))
    deep.neighbors = 5
    deep.posterior(new)
    with pytest.raises(UnsupportedError, match="neighbors"):
        deep.condition_on_observations(new, torch.zeros(2, 1).double())
