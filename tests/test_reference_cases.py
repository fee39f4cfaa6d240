"""Figures of Lotfi et al. (2022), recomputed in float64; conventions as in gpclml.evaluation."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from benchmarks.evidence.ledger.fourier import fourier_data
from gpclml.conditioning import HeldOut, LastPoints, RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.fit import fit_mll
from gpclml.linalg import (
    DenseCovariance,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


@pytest.fixture(scope="module")
def reference_folder(data_folder):
    folder = data_folder.parent / "reference" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of reference arrays beside GPCLML_DATA")
    return folder


def log_marginal(K: Tensor, r: Tensor) -> Tensor:
    return DenseCovariance(K).conditional_log_density(r, torch.arange(len(r)))


# --- 1: Fourier models, whose order the marginal likelihood reverses with n ---


@pytest.fixture(scope="module")
def fourier():
    """The authors' data, drawn anew by their seeds."""
    x, y, _ = fourier_data(15, 6, 500)
    return torch.tensor(x), torch.tensor(y)


def fourier_covariance(x: Tensor, degree: int, decaying: bool = False) -> Tensor:
    d = torch.arange(1, degree + 1, dtype=torch.float64)
    angles = x.unsqueeze(-1) * d
    features = torch.cat([angles.sin(), angles.cos()], dim=-1)
    variances = (1 / d**2 if decaying else torch.ones_like(d)).repeat(2)
    return features * variances @ features.mT + 0.01 * torch.eye(len(x), dtype=torch.float64)


FOURIER = [  # degree, decaying prior, LML, CLML in data order, its mean over orders, standard error
    pytest.param(3, False, 53.803669, 0.304081, 10.858, 0.025, id="M3"),
    pytest.param(9, False, 28.918961, 7.138589, 13.114, 0.016, id="M9"),
    pytest.param(9, True, 54.233923, 7.136201, 13.138, 0.016, id="M9c"),
]


@pytest.mark.parametrize(("degree", "decaying", "lml", "clml", "mean", "error"), FOURIER)
def test_fourier_models(fourier, degree, decaying, lml, clml, mean, error):
    x, y = fourier[0][:100], fourier[1][:100]
    K = fourier_covariance(x, degree, decaying)
    assert log_marginal(K, y).item() == pytest.approx(lml, abs=2e-6)
    in_order = DenseCovariance(K).conditional_log_density(y, torch.arange(85, 100))
    assert in_order.item() == pytest.approx(clml, abs=2e-6)
    (tails,) = RandomOrderings(k=4000, m=85, seed=0).held_out(100)
    values = DenseCovariance(K).block_log_densities(y, [tails])
    own_error = values.std().item() / math.sqrt(len(tails))
    assert abs(values.mean().item() - mean) < 4 * math.hypot(error, own_error)


def test_the_larger_fourier_model_overtakes_near_297_points(fourier):
    x, y = fourier
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(500, generator=generator) for _ in range(100)]
    curves = []
    for degree in (3, 9):
        K = fourier_covariance(x, degree)
        curves.append(DenseCovariance(K).sequential(y, torch.stack(orders)))
    by_order = (curves[1] - curves[0]).cumsum(-1)  # LML of the first n points, M9 less M3
    mean, error = by_order.mean(0), by_order.std(0) / math.sqrt(len(orders))
    assert mean[199] < -4 * error[199]
    assert abs(mean[296]) < 4 * error[296]
    assert mean[399] > 4 * error[399]
    # Its increments are the larger ones from about 55 points on, long before.
    advantage = (curves[1] - curves[0]).mean(0)
    assert advantage[:40].mean() < 0
    assert advantage[60:150].mean() > 0
    assert abs(int(mean.argmin()) - 55) < 12


# --- 2: rational quadratic kernel, over-estimated noise ---


def read_rational_quadratic(path):
    arrays = np.load(path, allow_pickle=False)
    train = GPRegressionData(arrays, "train"), GPRegressionData(arrays, "test")
    return *train, torch.tensor(arrays["f_test"]).double()


@pytest.fixture(scope="module")
def rational_quadratic(reference_folder):
    grid = np.load(
        reference_folder / "gp_rq" / "alpha_optimization_amall_noise.npz", allow_pickle=False
    )
    data = read_rational_quadratic(reference_folder / "gp_rq" / "data.npz")
    return *data, {k: grid[k] for k in grid.files}


def rq_covariance(x: Tensor, alpha: float) -> Tensor:
    squares = (x - x.mT).square() / (2 * alpha * 0.3**2)
    return math.log(2) * (1 + squares) ** -alpha


@pytest.fixture(scope="module")
def made_rational_quadratic(tmp_path_factory):
    """A file like the authors', of another draw from their prior, on which it goes as on theirs."""
    generator = torch.Generator().manual_seed(3)
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    x = x[torch.randperm(200, generator=generator)]
    draws = torch.randn(2, 200, dtype=torch.float64, generator=generator)
    covariance = rq_covariance(x.unsqueeze(-1), 0.05) + 1e-10 * torch.eye(200)
    f = torch.linalg.cholesky(covariance) @ draws[0]
    y = f + 0.1 * draws[1]
    path = tmp_path_factory.mktemp("rq") / "data.npz"
    arrays = {"x_train": x[:50], "y_train": y[:50], "x_test": x[50:], "y_test": y[50:]}
    arrays["f_test"] = f[50:]
    np.savez(path, **{name: one.float().numpy() for name, one in arrays.items()})
    return read_rational_quadratic(path)


class GPRegressionData:
    def __init__(self, arrays, part):
        self.x = torch.tensor(arrays[f"x_{part}"]).double().unsqueeze(-1)
        self.y = torch.tensor(arrays[f"y_{part}"]).double()


def rq_model(data: GPRegressionData, alpha: float) -> GPRegression:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel())
    model = GPRegression(data.x, data.y, kernel=kernel, mean="zero", standardize=False)
    kernel.outputscale = math.log(2)
    kernel.base_kernel.lengthscale = 0.3
    kernel.base_kernel.alpha = alpha
    model.likelihood.noise = 0.04
    return model


# alpha, LML, CLML(45) in data order, its mean over orders and error, joint and marginal test
RQ = [
    (0.001003344543, 16.170516, 0.631775, 1.956, 0.014, 63.125389, 53.982075),
    (0.192642152309, 12.935471, 1.426768, 2.056, 0.011, 72.517637, 65.406863),
]


@pytest.mark.parametrize("alpha", [0.001, 0.2])
def test_rational_quadratic_on_made_data(made_rational_quadratic, alpha):
    train, test, _ = made_rational_quadratic
    model = rq_model(train, alpha)
    x, y = torch.cat([train.x, test.x]), torch.cat([train.y, test.y])
    K = rq_covariance(x, alpha) + 0.04 * torch.eye(200)
    expected = reference.log_density(K[:50, :50], train.y)
    torch.testing.assert_close(log_marginal_likelihood(model), expected)
    (in_order,) = conditional_log_marginal_likelihood(model, LastPoints(m=45))
    expected = reference.conditional_log_density(K[:50, :50], train.y, torch.arange(45, 50))
    torch.testing.assert_close(in_order, expected)
    mean, covariance = reference.conditional_moments(K, y, torch.arange(50, 200))
    joint = reference.log_density(covariance, test.y - mean)
    torch.testing.assert_close(joint_log_predictive(model, test.x, test.y), joint)
    marginals = torch.distributions.Normal(mean, covariance.diagonal().sqrt()).log_prob(test.y)
    torch.testing.assert_close(marginal_log_predictive(model, test.x, test.y), marginals)


def test_conditioning_picks_the_better_shape_on_made_data(made_rational_quadratic):
    train, test, truth = made_rational_quadratic
    lml, clml, joint, rmse = [], [], [], []
    for alpha in np.linspace(0.001, 0.3, 30):
        model = rq_model(train, alpha)
        lml.append(log_marginal_likelihood(model).item())
        scores = conditional_log_marginal_likelihood(model, RandomOrderings(500, 45), seed=0)
        clml.append(scores.mean().item())
        joint.append(joint_log_predictive(model, test.x, test.y).item())
        with torch.no_grad():
            error = model.predict(test.x, marginal=True).mean - truth
        rmse.append(error.square().mean().sqrt().item())
    assert rmse[int(np.argmax(clml))] < 0.85 * rmse[int(np.argmax(lml))]
    assert np.corrcoef(lml, joint)[0, 1] < 0.5
    assert np.corrcoef(clml, joint)[0, 1] > 0.9


@pytest.mark.data
@pytest.mark.parametrize(("alpha", "lml", "clml", "mean", "error", "joint", "marginal"), RQ)
def test_rational_quadratic(rational_quadratic, alpha, lml, clml, mean, error, joint, marginal):
    train, test, _, _ = rational_quadratic
    model = rq_model(train, alpha)
    assert log_marginal_likelihood(model).item() == pytest.approx(lml, abs=2e-6)
    (in_order,) = conditional_log_marginal_likelihood(model, LastPoints(m=45))
    assert in_order.item() == pytest.approx(clml, abs=2e-6)
    values = conditional_log_marginal_likelihood(model, RandomOrderings(k=3000, m=45), seed=1)
    own_error = values.std().item() / math.sqrt(3000)
    assert abs(values.mean().item() - mean) < 4 * math.hypot(error, own_error)
    assert joint_log_predictive(model, test.x, test.y).item() == pytest.approx(joint, abs=2e-6)
    sum_of_marginals = marginal_log_predictive(model, test.x, test.y).sum().item()
    assert sum_of_marginals == pytest.approx(marginal, abs=2e-6)


@pytest.mark.data
def test_conditioning_picks_the_better_shape_of_the_kernel(rational_quadratic):
    train, test, truth, grid = rational_quadratic
    lml, clml, joint, rmse = [], [], [], []
    alphas = [float(alpha) for alpha in grid["alpha"]]
    for alpha in alphas:
        model = rq_model(train, alpha)
        lml.append(log_marginal_likelihood(model).item())
        clml.append(conditional_log_marginal_likelihood(model, LastPoints(m=45)).item())
        joint.append(joint_log_predictive(model, test.x, test.y).item())
        with torch.no_grad():
            error = model.predict(test.x, marginal=True).mean - truth
        rmse.append(error.square().mean().sqrt().item())
    np.testing.assert_allclose(lml, grid["mll"], atol=5.1e-5)
    np.testing.assert_allclose(joint, grid["test_likelihood"], atol=2e-4)
    of_lml, of_clml = int(np.argmax(lml)), int(np.argmax(clml))
    assert alphas[of_lml] == pytest.approx(0.001)
    assert alphas[int(np.argmax(joint))] == pytest.approx(0.11, abs=0.01)
    assert rmse[of_lml] == pytest.approx(0.1233, abs=5e-5)
    assert rmse[of_clml] < 0.09
    # The averaged CLML peaks where the paper says, near 0.19.
    averaged = [
        conditional_log_marginal_likelihood(rq_model(train, a), RandomOrderings(2000, 45)).mean()
        for a in alphas[::10]
    ]
    peak = 10 * int(torch.stack(averaged).argmax())
    assert alphas[peak] == pytest.approx(0.19, abs=0.04)
    assert rmse[peak] == pytest.approx(0.0785, abs=5e-4)
    assert np.corrcoef(lml, joint)[0, 1] < -0.65
    assert np.corrcoef(clml, joint)[0, 1] > 0.9


# --- 3: density estimation, where the marginal likelihood prefers the narrower prior ---


@pytest.fixture(scope="module")
def normals():
    draws = np.random.RandomState(2).randn(1000) + 1
    return torch.tensor(draws[:40]), torch.tensor(draws[40:])


def density_covariance(n: int, prior_variance: float) -> Tensor:
    return torch.eye(n, dtype=torch.float64) + prior_variance


def test_density_estimation(normals):
    train, _ = normals
    assert log_marginal(density_covariance(40, 1.0), train).item() == pytest.approx(
        -60.350350, abs=1e-6
    )
    # The predictive of one more draw, from its conditional density at three places.
    K = density_covariance(41, 1.0)
    places = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    log_density = torch.stack(
        [
            DenseCovariance(K).conditional_log_density(
                torch.cat([train, place.view(1)]), torch.tensor([40])
            )
            for place in places
        ]
    )
    variance = -1 / (log_density[0] - 2 * log_density[1] + log_density[2])
    mean = variance * (log_density[2] - log_density[0]) / 2
    assert variance.item() == pytest.approx(1.024390244, abs=1e-8)
    assert mean.item() == pytest.approx(0.771763826, abs=1e-8)


def test_a_wider_prior_predicts_better_and_has_less_evidence(normals):
    train, test = normals
    variances = [0.1 * 1.2**i for i in range(51)]  # 0.1 to 900
    lml = [log_marginal(density_covariance(40, v), train).item() for v in variances]
    best = int(np.argmax(lml))
    assert variances[best] == pytest.approx(0.6, rel=0.1)
    assert (np.diff(lml[best:]) < 0).all()
    predictive = []
    for v in variances:
        K, held_out = density_covariance(41, v), torch.tensor([40])
        residual = torch.cat([train.expand(len(test), 40), test.unsqueeze(-1)], dim=-1)
        predictive.append(
            DenseCovariance(K).conditional_log_density(residual, held_out).sum().item()
        )
    assert (np.diff(predictive) > 0).all()


# --- 6: a network as prior mean overfits, and both objectives fall for it ---


def extrapolation(seed: int):
    x = torch.linspace(0, 10, 100, dtype=torch.float64).unsqueeze(-1)
    K = torch.exp(-0.5 * (x - x.mT).square() / 0.75**2) + 0.02 * torch.eye(100)
    draw = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    y = torch.linalg.cholesky(K) @ draw
    return (x[:50], y[:50]), (x[50:], y[50:])


def mean_model(data, mean: str, seed: int) -> GPRegression:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model = GPRegression(*data, kernel=kernel, mean=mean, seed=seed, standardize=False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.75
    model.likelihood.noise = 0.02
    return model


@pytest.mark.slow
def test_a_network_mean_overfits_under_either_objective():
    rows = []
    for seed in range(4):
        train, test = extrapolation(seed)
        row = {}
        for name, mean, conditioning in (
            ("constant", "constant", LastPoints(0)),
            ("lml", "mlp", LastPoints(0)),
            ("clml", "mlp", None),
        ):
            model = mean_model(train, mean, seed)
            mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
            frozen = ["likelihood", "model.covar_module"]
            fit_mll(mll, "adam", steps=500, lr=0.01, freeze=frozen, progress=False)
            random_tenth = HeldOut(*torch.randperm(50, generator=generator(seed)).split(5))
            with torch.no_grad():
                error = model.predict(test[0], marginal=True).mean - test[1]
            row[name] = {
                "lml": log_marginal_likelihood(model).item(),
                "clml": conditional_log_marginal_likelihood(model, random_tenth).mean().item(),
                "rmse": error.square().mean().sqrt().item(),
                "nll": -marginal_log_predictive(model, *test).mean().item(),
            }
        rows.append(row)

    def mean_of(name, score):
        return float(np.mean([row[name][score] for row in rows]))

    assert mean_of("lml", "lml") > mean_of("constant", "lml") + 5
    assert mean_of("lml", "clml") > mean_of("constant", "clml")
    assert mean_of("lml", "rmse") > 1.5 * mean_of("constant", "rmse")
    assert mean_of("lml", "nll") > mean_of("constant", "nll") + 1
    assert mean_of("clml", "nll") < mean_of("lml", "nll")
    assert mean_of("clml", "rmse") > mean_of("constant", "rmse")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
