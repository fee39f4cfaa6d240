from functools import partial

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from botorch.models.transforms import Log, Normalize, Standardize

import reference
from gpclml.conditioning import KFold, LastPoints, RandomOrderings
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.models import GPRegression

SCALE = 37.0


def data(n=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, SCALE * (torch.sin(5 * x.sum(-1)) + 0.2 * noise) + 5.0


@pytest.fixture
def model():
    return GPRegression(*data())


def dense(model):
    model.train()
    output = model.likelihood(model(*model.train_inputs))
    K = output.lazy_covariance_matrix.to_dense().detach()
    return K, (model.train_targets - output.mean).detach()


@pytest.mark.parametrize("training", [True, False])
def test_scores_match_their_definitions_and_leave_the_mode(model, training):
    K, r = dense(model)
    K, r = model.target_scale**2 * K, model.target_scale * r
    model.train(training)
    n = len(r)
    lml = log_marginal_likelihood(model)
    torch.testing.assert_close(lml, reference.log_density(K, r))
    (clml,) = conditional_log_marginal_likelihood(model, LastPoints(m=10))
    torch.testing.assert_close(
        clml, reference.log_density(K, r) - reference.log_density(K[:10, :10], r[:10])
    )
    orders = torch.stack([torch.arange(n), torch.arange(n).flip(0)])
    curves = learning_curve(model, orders)
    for curve, order in zip(curves, orders, strict=True):
        torch.testing.assert_close(curve, reference.sequential_log_densities(K, r, order))
    torch.testing.assert_close(curves.sum(-1), lml.expand(2))
    torch.testing.assert_close(curves[0, 10:].sum(), clml)
    loo = leave_one_out(model)
    for i in range(n):
        torch.testing.assert_close(
            loo[i], reference.conditional_log_density(K, r, torch.tensor([i]))
        )
    folds = conditional_log_marginal_likelihood(model, KFold(4), seed=2)
    assert folds.shape == (4,)
    assert model.training == training


def test_random_orderings_average_to_the_mean_of_tails(model):
    curves = learning_curve(model, 7, seed=3)
    tails = conditional_log_marginal_likelihood(model, RandomOrderings(k=7, m=11), seed=3)
    torch.testing.assert_close(curves[:, 11:].sum(-1), tails)
    assert torch.equal(curves, learning_curve(model, 7, seed=3))
    assert not torch.equal(curves, learning_curve(model, 7, seed=4))


NEW = data(n=6, seed=4)


# Each score, and how many targets each of its values is the density of.
ALL_SCORES = {
    "lml": (log_marginal_likelihood, 15),
    "clml": (partial(conditional_log_marginal_likelihood, conditioning=KFold(5)), 3),
    "curve": (learning_curve, 1),
    "loo": (leave_one_out, 1),
    "joint": (partial(joint_log_predictive, x=NEW[0], y=NEW[1]), 6),
    "marginal": (partial(marginal_log_predictive, x=NEW[0], y=NEW[1]), 1),
}


@pytest.mark.parametrize("name", ALL_SCORES)
@pytest.mark.parametrize("make", ["gpclml", "botorch"])
def test_original_units_are_the_default(name, make):
    score, count = ALL_SCORES[name]
    x, y = data()
    model = GPRegression(x, y)
    if make == "botorch":
        model = SingleTaskGP(x, y.unsqueeze(-1), outcome_transform=Standardize(1))
    training, original = (score(model, units=units) for units in ("training", "original"))
    torch.testing.assert_close(training - original, (count * y.std().log()).expand_as(original))
    assert torch.equal(score(model), original)
    plain = GPRegression(x, y, standardize=False)
    assert torch.equal(score(plain), score(plain, units="training"))


@pytest.mark.parametrize("training", [True, False])
def test_predictive_densities(model, training):
    model.train(training)
    x, y = data(n=9, seed=5)
    with torch.no_grad():
        normal = model.predict(x)
    expected = torch.distributions.MultivariateNormal(normal.mean, normal.covariance_matrix)
    torch.testing.assert_close(joint_log_predictive(model, x, y), expected.log_prob(y))
    marginal = marginal_log_predictive(model, x, y)
    expected = torch.distributions.Normal(normal.mean, normal.variance.sqrt())
    torch.testing.assert_close(marginal, expected.log_prob(y))
    assert model.training == training


def test_prediction_of_left_out_points_is_their_conditional_likelihood():
    x, y = data()
    options = {"standardize": False}
    whole, first = GPRegression(x, y, **options), GPRegression(x[:10], y[:10], **options)
    (clml,) = conditional_log_marginal_likelihood(whole, LastPoints(m=10))
    torch.testing.assert_close(joint_log_predictive(first, x[10:], y[10:]), clml)


def test_missing_targets_are_left_out():
    x, y = data()
    y[4] = float("nan")
    keep = ~y.isnan()
    with gpytorch.settings.observation_nan_policy("mask"):
        model = GPRegression(x, y)
        complete = GPRegression(x[keep], y[keep])
        # Same standardization of inputs, so that the two are the same model.
        complete.input_standardizer = model.input_standardizer
        for units in ("training", "original"):
            torch.testing.assert_close(
                log_marginal_likelihood(model, units=units),
                log_marginal_likelihood(complete, units=units),
            )
        torch.testing.assert_close(leave_one_out(model), leave_one_out(complete))
        order = torch.arange(15).unsqueeze(0)
        curve = learning_curve(model, order)[0]
        assert curve.isnan().tolist() == y.isnan().tolist()
        torch.testing.assert_close(curve[keep], learning_curve(complete, order[:, :14])[0])
        new_x, new_y = data(n=5, seed=9)
        torch.testing.assert_close(
            joint_log_predictive(model, new_x, new_y),
            joint_log_predictive(complete, new_x, new_y),
        )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("training", [True, False])
def test_botorch_models_with_transforms(training):
    x, y = data()
    y = torch.stack([y, 0.1 * y.cos()], -1)
    model = SingleTaskGP(x, y, input_transform=Normalize(2), outcome_transform=Standardize(2))
    model.train(training)
    training_units = log_marginal_likelihood(model, units="training")
    assert training_units.shape == (2,)
    original = log_marginal_likelihood(model)
    torch.testing.assert_close(training_units - original, 15 * y.std(0).log())
    new_x, _ = data(n=6, seed=4)
    new_y = torch.stack([new_x[:, 0], new_x[:, 1]])  # outputs are batch members
    joint = joint_log_predictive(model, new_x, new_y)
    marginal = marginal_log_predictive(model, new_x, new_y)
    assert model.training == training
    model.eval()
    with torch.no_grad():
        for i in range(2):
            normal = model.posterior(new_x, observation_noise=True).distribution[..., i]
            expected = torch.distributions.MultivariateNormal(normal.mean, normal.covariance_matrix)
            torch.testing.assert_close(joint[i], expected.log_prob(new_y[i]))
            expected = torch.distributions.Normal(normal.mean, normal.variance.sqrt())
            torch.testing.assert_close(marginal[i], expected.log_prob(new_y[i]))


def test_kronecker_multitask_counts_rows_with_all_tasks():
    x, y = data(n=8)
    y = torch.stack([y, y.sin(), 3 * x[:, 0]], -1)
    model = KroneckerMultiTaskGP(x, y, outcome_transform=Standardize(3))
    total = log_marginal_likelihood(model, units="training")
    original = log_marginal_likelihood(model)
    torch.testing.assert_close(total - original, 8 * y.std(0).log().sum())
    assert leave_one_out(model).shape == (8,)
    (clml,) = conditional_log_marginal_likelihood(model, LastPoints(m=5))
    assert torch.isfinite(clml)
    assert joint_log_predictive(model, x[:2] + 0.1, y[:2]).shape == ()
    with pytest.raises(ArgumentError, match="3 targets for each row"):
        learning_curve(model)


@pytest.mark.parametrize("additional", [0.0, 0.1])
def test_fixed_noise_needs_the_noise_of_new_points(additional):
    x, y = data()
    noise = torch.full_like(y, 0.3 - additional)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(
        noise, learn_additional_noise=additional > 0
    )
    if additional:
        likelihood.second_noise = additional
    fixed, learned = GPRegression(x, y, likelihood=likelihood), GPRegression(x, y)
    learned.likelihood.noise = 0.3
    torch.testing.assert_close(log_marginal_likelihood(fixed), log_marginal_likelihood(learned))
    new_x, new_y = data(n=3, seed=2)
    for score in (joint_log_predictive, marginal_log_predictive):
        torch.testing.assert_close(
            score(fixed, new_x, new_y, noise=noise[:3]), score(learned, new_x, new_y)
        )
        with pytest.raises(ArgumentError, match="noise"):
            score(fixed, new_x, new_y)
        with pytest.raises(ArgumentError, match="noise"):
            score(learned, new_x, new_y, noise=noise[:3])


def test_priors_do_not_count():
    x, y = data()
    plain = SingleTaskGP(x, y.unsqueeze(-1))
    assert list(plain.named_priors())
    K, r = dense(plain)
    torch.testing.assert_close(
        log_marginal_likelihood(plain, units="training").squeeze(), reference.log_density(K, r)
    )


def test_bad_input(model):
    x, y = data(n=5)
    with pytest.raises(ArgumentError, match="units"):
        log_marginal_likelihood(model, units="orginal")
    for score in (joint_log_predictive, marginal_log_predictive):
        with pytest.raises(ArgumentError, match=r"x: got torch.float32 .*expected torch.float64"):
            score(model, x.float(), y)
    with pytest.raises(ShapeError, match="y"):
        joint_log_predictive(model, x, y[:4])
    with pytest.raises(ShapeError, match="x"):
        marginal_log_predictive(model, x[:, :1], y)
    with pytest.raises(ArgumentError, match="orderings"):
        learning_curve(model, 0)
    with pytest.raises(ArgumentError, match="order"):
        learning_curve(model, torch.tensor([[0, 1]]))
    log = SingleTaskGP(x, ((y - y.mean()) / y.std()).exp().unsqueeze(-1), outcome_transform=Log())
    assert torch.isfinite(log_marginal_likelihood(log, units="training")).all()
    with pytest.raises(UnsupportedError, match=r"Standardize.*units='training'"):
        log_marginal_likelihood(log)
