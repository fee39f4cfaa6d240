"""Models of classes and counts: fits, predictions by quadrature, and what is refused."""

import numpy as np
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import LinearKernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean

from gpclml import (
    ConditionalMarginalLogLikelihood,
    ExactMarginalLogLikelihood,
    GPClassification,
    GPCounts,
    GPRegression,
    KFold,
    LaplaceMarginalLogLikelihood,
    RandomHoldout,
    fit_mll,
)
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.likelihoods import (
    LogisticLikelihood,
    LogNegativeBinomialLikelihood,
    LogPoissonLikelihood,
    TargetPrediction,
)
from gpclml.models import LatentGP


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    f = 3 * (5 * x[:, 0]).sin()
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    return x, (f + noise > 0).double(), torch.poisson((1 + f / 3).exp(), generator=generator)


def fitted(model, objective=None):
    return fit_mll(objective or LaplaceMarginalLogLikelihood(model.likelihood, model))


def log_loss(model, x, y):
    return -model.predict(x).log_prob(y).mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [BernoulliLikelihood, LogisticLikelihood])
def test_fits_of_each_kind_gain_and_predict(data, likelihood):
    x, y, _ = data
    before = log_loss(GPClassification(x, y, likelihood=likelihood()), x, y)
    model = GPClassification(x, y, likelihood=likelihood())
    result = fitted(model)
    assert result.problem == ""
    assert result.road.way == "closed form, Laplace's approximation"
    loss = log_loss(model, x, y)
    assert loss < min(before, 0.45)
    for optimizer, conditioning in (("lbfgs", KFold(5)), ("adam", RandomHoldout(0.2))):
        model = GPClassification(x, y, likelihood=likelihood())
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
        fit_mll(mll, optimizer, steps=40)
        assert log_loss(model, x, y) < 0.5


def test_botorch_finds_the_same_optimum(data):
    x, y, _ = data
    ours, theirs = GPClassification(x, y), GPClassification(x, y)
    result = fitted(ours)
    mll = fit_gpytorch_mll(LaplaceMarginalLogLikelihood(theirs.likelihood, theirs))
    mll.train()
    assert -mll.compute_custom_loss().item() == pytest.approx(result.objective, abs=1e-5)


def test_classes_that_are_told_apart_are_surer_by_expectation_propagation(data):
    x, _, _ = data
    y, new = x.sum(-1) > 1, torch.rand(500, 2, generator=torch.Generator().manual_seed(3)).double()
    losses = {}
    for approximation in ("ep", "laplace"):
        model = GPClassification(x, y, "rbf", approximation=approximation)
        fitted(model)
        losses[approximation] = log_loss(model, new, (new.sum(-1) > 1).double())
    assert losses["ep"] < losses["laplace"] - 0.02


def test_separable_classes_do_not_run_away(data):
    x, _, _ = data
    model = GPClassification(x, x[:, 0] > 0.5)
    assert fitted(model).problem == ""
    assert model.covar_module.outputscale.item() < 100
    probabilities = model.predict(x).probabilities
    assert ((probabilities > 0.5) == (x[:, 0] > 0.5)).double().mean() > 0.95


@pytest.mark.slow
def test_few_of_a_class_and_copies_of_points_are_right(data):
    x, _, _ = data
    rare = torch.zeros(60, dtype=torch.float64)
    rare[3] = 1
    model = GPClassification(x, rare)
    fitted(model)
    assert model.predict(x).probabilities.mean().item() == pytest.approx(1 / 60, abs=0.05)
    copies = GPClassification(x[:1].expand(60, 2), (torch.arange(60) < 40).double())
    fitted(copies)
    assert copies.predict(x[:2]).probabilities.numpy() == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.slow
def test_types_of_classes_and_precisions_agree(data):
    x, y, _ = data
    expected = GPClassification(x, y).predict(x).probabilities
    for given in (y.numpy(), y.numpy().astype(int), y > 0, y.numpy() > 0):
        inputs = x if isinstance(given, torch.Tensor) else x.numpy()
        probabilities = GPClassification(inputs, given).predict(inputs).probabilities
        torch.testing.assert_close(probabilities, expected)
    single = GPClassification(x.float(), y.float())
    assert fitted(single).problem == ""
    double = GPClassification(x, y)
    fitted(double)
    value, want = single.predict(x.float()).probabilities, double.predict(x).probabilities
    torch.testing.assert_close(value.double(), want, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: 2 * y - 1, "Classifier"),
        (lambda y: y + 1, "Classifier"),
        (lambda y: 0 * y, "class 1"),
        (lambda y: 0 * y + 1, "class 0"),
        (lambda y: y.unsqueeze(-1), "squeeze"),
        (lambda y: np.array(["no", "yes"])[y.long()], "real numbers"),
    ],
)
def test_other_classes_are_refused_by_name(data, change, message):
    x, y, _ = data
    with pytest.raises(ArgumentError, match=message):
        GPClassification(x, change(y))


def test_what_fits_not_is_refused_by_name(data):
    x, y, counts = data
    model = GPClassification(x, y)
    with pytest.raises(ShapeError, match="as trained on"):
        model.predict(x[:, :1])
    with pytest.raises(NonFiniteError):
        GPClassification(torch.where(x > 0.9, torch.nan, x), y)
    for bad, message in ((counts - 5, "whole numbers"), (counts + 0.5, "whole numbers")):
        with pytest.raises(ArgumentError, match=message):
            GPCounts(x, bad)
    with pytest.raises(NonFiniteError, match="positive"):
        GPCounts(x, counts, offset=torch.zeros(60, dtype=torch.float64).log())
    with pytest.raises(ShapeError, match="offset"):
        GPCounts(x, counts, offset=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="classes"):
        _ = GPCounts(x, counts).predict(x).probabilities
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        model.predict(x).quantile(1.0)


def test_a_kernel_of_its_own_keeps_its_priors(data):
    x, y, _ = data
    model = GPClassification(x, y, LinearKernel())
    assert [name for name, *_ in model.named_priors()] == ["mean_module.constant_prior"]
    fitted(model)
    assert log_loss(model, x, y) < 0.69


COUNTS = [LogNegativeBinomialLikelihood, LogPoissonLikelihood, PoissonLikelihood]


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [*COUNTS, NegativeBinomialLikelihood])
def test_counts_are_fitted_with_each_likelihood(data, likelihood):
    x, _, counts = data
    model = GPCounts(x, counts, likelihood=likelihood())
    assert fitted(model).problem == ""
    predicted = model.predict(x)
    constant = torch.distributions.Poisson(counts.mean()).log_prob(counts).mean()
    assert predicted.log_prob(counts).mean() > constant
    assert ((counts <= predicted.quantile(0.9)).double().mean() - 0.9).abs() < 0.1


@pytest.mark.slow
def test_exposures_scale_counts(data):
    x, _, counts = data
    exposure = torch.linspace(1, 50, 60, dtype=torch.float64)
    model = GPCounts(x, (counts * exposure).round(), offset=exposure.log())
    fitted(model)
    twice = model.predict(x, offset=(2 * exposure).log()).mean
    torch.testing.assert_close(twice, 2 * model.predict(x, offset=exposure.log()).mean)
    rate = model.predict(x).mean
    assert ((rate - (1 + (5 * x[:, 0]).sin()).exp()).abs() / rate).median() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_counts_of_zero_and_of_millions_are_fitted(data, scale):
    x, _, counts = data
    y = scale * (counts + 1)
    model = GPCounts(x, y)
    assert fitted(model).problem == ""
    predicted = model.predict(x)
    assert ((y <= predicted.quantile(0.99)).double().mean()) > 0.9
    assert predicted.mean.isfinite().all()


def test_state_round_trip(data):
    x, _, counts = data
    model, other = GPCounts(x, counts), GPCounts(x, counts)
    fitted(model)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.predict(x).mean, model.predict(x).mean)


LATENT = torch.tensor([[-2.0, 0.5, 3.0], [0.01, 1.0, 9.0]], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (BernoulliLikelihood(), [0.0, 1.0]),
        (LogisticLikelihood(), [0.0, 1.0]),
        (LogPoissonLikelihood(), [0.0, 2.0, 30.0, 4000.0]),
        (LogNegativeBinomialLikelihood(), [0.0, 2.0, 30.0, 4000.0]),
        (StudentTLikelihood(), [-3.0, 0.0, 25.0]),
    ],
)
def test_predictions_are_those_of_a_fine_grid(likelihood, targets):
    (mean, variance), likelihood = LATENT, likelihood.double()
    prediction = TargetPrediction(likelihood, mean, variance)
    z = torch.linspace(-15, 15, 300_001, dtype=torch.float64)
    weights = (-0.5 * z.square()).softmax(-1)
    f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z
    with torch.no_grad():
        conditional = likelihood(f)
        for y in targets:
            y = torch.full((3,), y, dtype=torch.float64)
            density = (conditional.log_prob(y.unsqueeze(-1)).exp() * weights).sum(-1)
            value = prediction.log_prob(y).exp()
            torch.testing.assert_close(value, density, rtol=1e-4, atol=1e-9)
        expected = (conditional.mean * weights).sum(-1)
        torch.testing.assert_close(prediction.mean, expected, rtol=1e-6, atol=1e-8)
        square = ((conditional.variance + conditional.mean.square()) * weights).sum(-1)
        want = square - expected.square()
        torch.testing.assert_close(prediction.variance, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_quantiles_are_where_the_distribution_function_crosses():
    mean, variance = LATENT
    for likelihood in (LogPoissonLikelihood(), LogNegativeBinomialLikelihood()):
        prediction = TargetPrediction(likelihood.double(), mean, variance)
        for probability in (0.05, 0.5, 0.95):
            quantile = prediction.quantile(probability)
            assert (prediction.cdf(quantile) >= probability).all()
            assert ((prediction.cdf(quantile - 1) < probability) | (quantile == 0)).all()
    student = TargetPrediction(StudentTLikelihood().double(), mean, variance)
    torch.testing.assert_close(student.quantile(0.5), mean, rtol=1e-6, atol=1e-6)
    classes = TargetPrediction(BernoulliLikelihood(), mean, variance)
    assert classes.quantile(0.5).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_outliers_move_a_student_t_little(data):
    class RobustGP(LatentGP):
        def __init__(self, x, y):
            super().__init__(x, y, StudentTLikelihood().to(x))
            self.mean_module = ConstantMean().to(x)
            self.covar_module = ScaleKernel(MaternKernel()).to(x)

    x, generator = data[0], torch.Generator().manual_seed(1)
    f = (5 * x[:, 0]).sin()
    y = f + 0.02 * torch.randn(60, generator=generator, dtype=x.dtype)
    y[::7] += 20 * torch.randn(9, generator=generator, dtype=x.dtype)
    robust, normal = RobustGP(x, y), GPRegression(x, y)
    fitted(robust)
    fit_mll(ExactMarginalLogLikelihood(normal.likelihood, normal))
    errors = [(model.predict(x).mean - f).square().mean().sqrt() for model in (robust, normal)]
    assert errors[0] < 0.1 < errors[1]


@pytest.mark.parametrize("scale", [10.0, 1e4])
def test_points_far_from_the_boundary_are_predicted(scale):
    """Their sites have hardly any precision."""
    x = torch.linspace(-3, 3, 40, dtype=torch.float64)
    kernel = ScaleKernel(LinearKernel())
    kernel.outputscale = scale
    probabilities = GPClassification(x, x > 0, kernel).predict(x).probabilities
    assert ((probabilities > 0.5) == (x > 0)).all()
    torch.testing.assert_close(probabilities + probabilities.flip(0), torch.ones(40).double())


def test_many_points_are_predicted_in_parts(monkeypatch):
    prediction, y = TargetPrediction(LogPoissonLikelihood(), *LATENT), torch.tensor([0, 2, 30])

    def values():
        return prediction.mean, prediction.cdf(y), prediction.log_prob(y), prediction.quantile(0.9)

    expected = values()
    monkeypatch.setattr("gpclml.likelihoods._POINTS_AT_ONCE", 2)
    torch.testing.assert_close(values(), expected)
