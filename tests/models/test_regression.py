import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
)
from gpytorch.means import LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.conditioning import LastPoints
from gpclml.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.fit import warm_start
from gpclml.inference import IterativePosterior
from gpclml.kernels import DeepKernel
from gpclml.kernels.networks import MLP
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, find_networks

KERNELS = ["rbf", "rq", "matern", "spectral_mixture", "deep", "deep_bottleneck", "deep_joint"]


def lml(model):
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return mll(model(*model.train_inputs), model.train_targets)


def steps(model, count=5):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(count):
        optimizer.zero_grad()
        loss = -lml(model).sum()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_trains_in_a_plain_loop_and_predicts(kernel, train, new_x):
    model = GPRegression(*train, kernel=kernel, warm_start=False)
    before = lml(model).item()
    steps(model)
    assert lml(model).item() > before
    prediction = model.predict(new_x)
    assert prediction.variance.min() > 0
    assert 50 < prediction.mean.mean() < 300  # original units


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 2, 60])
def test_few_points_constant_columns_duplicates_and_float32(kernel, n, train, new_x):
    x, y, new = train[0][:n].float(), train[1][:n].float(), new_x.float()
    for points in (x, new):
        points[:, 3], points[:, 7] = 288.15, 0.0
    x[10:15] = x[0]
    model = GPRegression(x, y, kernel=kernel)
    steps(model, 2)
    prediction = model.predict(new)
    assert prediction.mean.dtype == torch.float32
    assert prediction.mean.isfinite().all()
    assert prediction.variance.isfinite().all()


@pytest.mark.parametrize("kernel", ["rbf", "deep_bottleneck"])
def test_prediction_is_gpytorchs(kernel, train, new_x):
    model = GPRegression(*train, kernel=kernel)
    steps(model)
    ours, latent = model.predict(new_x), model.predict(new_x, observation_noise=False)
    marginal = model.predict(new_x, marginal=True)
    model.eval()
    reference = model.likelihood(model(new_x))
    scale = model.target_scale
    mean = reference.mean * scale + train[1].mean()
    torch.testing.assert_close(ours.mean, mean)
    torch.testing.assert_close(ours.covariance_matrix, reference.covariance_matrix * scale**2)
    noise = model.likelihood.noise * scale**2
    torch.testing.assert_close(latent.variance + noise, ours.variance)
    torch.testing.assert_close(marginal.mean, ours.mean)
    torch.testing.assert_close(marginal.variance, ours.variance)
    assert marginal.covariance_matrix.count_nonzero() == 10


def test_prediction_keeps_the_mode_of_every_module(train, new_x):
    network = torch.nn.Sequential(MLP([10, 4]), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))
    model = GPRegression(*train, kernel=ScaleKernel(DeepKernel(network, RBFKernel(), False)))
    network[2].eval()
    modes = [module.training for module in model.modules()]
    first, second = model.predict(new_x), model.predict(new_x)
    assert torch.equal(first.mean, second.mean)  # no dropout
    assert [module.training for module in model.modules()] == modes
    model.eval()
    model.predict(new_x)
    assert not any(module.training for module in model.modules())


def test_batch_is_the_stack_of_singles(diabetes):
    x, y = diabetes[0][:60].reshape(3, 20, 10), diabetes[1][:60].reshape(3, 20)
    new = diabetes[0][60:68]
    for kernel in ["rbf", "deep_bottleneck", "spectral_mixture"]:
        model = GPRegression(x, y, kernel=kernel, mean="mlp" if kernel == "rbf" else "constant")
        assert model.target_scale.shape == (3,)
        value, prediction = lml(model), model.predict(new)
        marginal = model.predict(new, marginal=True)
        assert prediction.mean.shape == (3, 8)
        for i in range(3):
            single = GPRegression(x[i], y[i], kernel=kernel, mean=model._config["mean"])
            state = {
                k: v[i] if v.shape != single.state_dict()[k].shape else v
                for k, v in model.state_dict().items()
            }
            single.load_state_dict(state)
            torch.testing.assert_close(value[i], lml(single))
            alone = single.predict(new)
            torch.testing.assert_close(prediction.mean[i], alone.mean)
            torch.testing.assert_close(prediction.covariance_matrix[i], alone.covariance_matrix)
            torch.testing.assert_close(marginal.variance[i], alone.variance)


def test_the_seed_decides_and_the_global_rng_is_untouched(train):
    before = torch.get_rng_state()
    values = [
        lml(GPRegression(*train, kernel="deep_bottleneck", seed=seed)).item() for seed in (0, 0, 1)
    ]
    GPRegression(*train, kernel="spectral_mixture")
    assert torch.equal(before, torch.get_rng_state())
    assert values[0] == values[1] != values[2]


def test_given_parts_are_used_in_the_data_dtype(train, new_x):
    kernel, mean = ScaleKernel(RBFKernel()), LinearMean(10)
    likelihood = FixedNoiseGaussianLikelihood(torch.full((60,), 0.2))
    model = GPRegression(*train, kernel=kernel, mean=mean, likelihood=likelihood)
    assert model.covar_module is kernel
    assert model.mean_module is mean
    assert kernel.raw_outputscale.dtype == torch.float64
    steps(model)
    latent = model.predict(new_x, observation_noise=False)
    model.eval()
    torch.testing.assert_close(latent.variance, model(new_x).variance * model.target_scale**2)


@pytest.mark.parametrize("additional", [False, True])
@pytest.mark.parametrize("count", [1, 60])
def test_new_points_have_no_fixed_noise_of_training_points(count, additional, train):
    likelihood = FixedNoiseGaussianLikelihood(
        torch.linspace(0.1, 1, 60, dtype=torch.float64), learn_additional_noise=additional
    )
    model = GPRegression(*train, likelihood=likelihood)
    x = train[0][:1].expand(count, -1)
    for predict in (model.predict, IterativePosterior(model).variance):
        with pytest.raises(ArgumentError, match=r"observation_noise.*noise variances of the new"):
            predict(x)
    latent, unit = model.predict(x, observation_noise=False).variance, model.target_scale**2
    given = torch.linspace(1, 2, count, dtype=torch.float64)
    for variance in (
        model.predict(x, given).variance,
        IterativePosterior(model).variance(x, given),
        model.posterior(x, observation_noise=given.unsqueeze(-1)).variance.squeeze(-1),
    ):
        torch.testing.assert_close(variance, latent + (given + likelihood.second_noise) * unit)
    mean = 0.55 + likelihood.second_noise  # BoTorch's models take the mean over training points
    noisy = model.posterior(x, observation_noise=True).variance.squeeze(-1)
    torch.testing.assert_close(noisy, latent + mean * unit)


@pytest.mark.parametrize("ard", [True, False])
@pytest.mark.parametrize("kernel", ["rbf", "rq", "matern"])
def test_lengthscales_start_at_the_root_of_the_number_of_columns(kernel, ard, train):
    x, y = train
    for d in (1, 4, 10):
        base = GPRegression(x[:, :d], y, kernel=kernel, ard=ard).covar_module.base_kernel
        expected = torch.full((1, d if ard else 1), d**0.5, dtype=torch.float64)
        torch.testing.assert_close(base.lengthscale.detach(), expected, rtol=1e-6, atol=0)
    plain = GPRegression(x, y, kernel=kernel, ard=ard, standardize=False)
    start = plain.covar_module.base_kernel.lengthscale.detach()
    torch.testing.assert_close(start, torch.full_like(start, 2.0).log())  # GPyTorch's


def test_ard_is_a_choice(train):
    model = GPRegression(*train, kernel="deep-bottleneck", mean="mlp", ard=False)
    assert model.covar_module.base_kernel.base_kernel.lengthscale.shape == (1, 1)
    networks = model.covar_module.base_kernel.feature_extractor, model.mean_module.network
    assert {*find_networks(model)} == {*networks}
    deep = GPRegression(*train, kernel="deep", num_features=3, hidden=[7], warm_start=False)
    assert find_networks(deep)[0].sizes == (10, 7, 3)
    assert deep.covar_module.base_kernel.base_kernel.kernels[0].lengthscale.shape == (1, 10)


@pytest.mark.parametrize("kernel", ["rbf", "spectral_mixture", "deep"])
def test_units_do_not_matter(kernel, train, new_x):
    x, y = train
    factor, shift = torch.logspace(-2, 3, 10, dtype=x.dtype), torch.arange(10.0)
    # Without a warm start, whose optimum is found to a line search's tolerance only.
    first = GPRegression(x, y, kernel=kernel, warm_start=False)
    second = GPRegression(x * factor + shift, 7 * y - 300, kernel=kernel, warm_start=False)
    torch.testing.assert_close(lml(first), lml(second))
    ours, other = first.predict(new_x), second.predict(new_x * factor + shift)
    torch.testing.assert_close(other.mean, 7 * ours.mean - 300, rtol=1e-3, atol=0.1)
    covariance = 49 * ours.covariance_matrix
    torch.testing.assert_close(other.covariance_matrix, covariance, rtol=1e-3, atol=1)
    torch.testing.assert_close(second.target_scale, 7 * first.target_scale)


def test_target_scale_turns_densities_into_original_units(train):
    x, y = train
    model = GPRegression(x, y)
    density = lml(model) * 60 - 60 * model.target_scale.log()
    prior = model.likelihood(model(x))
    covariance = prior.covariance_matrix * y.var()
    original = torch.distributions.MultivariateNormal(y.mean() + 0 * y, covariance).log_prob(y)
    torch.testing.assert_close(density, original)


@pytest.mark.filterwarnings("ignore::gpytorch.utils.warnings.GPInputWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_objective_refuses_targets_in_original_units(train, dtype):
    x, y = (values.to(dtype) for values in train)
    model = GPRegression(x, y, kernel="rbf")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    for original in (y, y.clone(), y.unsqueeze(-1).squeeze(-1)):
        with pytest.raises(ArgumentError, match=r"Pass model\.train_targets"):
            mll(model(x), original)
    value = mll(model(x), model.train_targets)
    assert torch.equal(mll(model(x), model.train_targets.clone()), value)
    other = model.train_targets + 0.1 * torch.randn_like(y)  # as in a bootstrap of the noise
    assert not torch.equal(mll(model(x), other), value)
    with pytest.raises(UnsupportedError, match="swapped"):
        mll(model.train_targets, model(x))  # type: ignore[arg-type]
    mll.eval()
    with pytest.raises(ArgumentError, match=r"Pass model\.train_targets"):
        mll(model(x), y)
    mll.train()
    missing = y.clone()
    missing[3] = torch.nan
    model = GPRegression(x, missing, kernel="rbf")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.observation_nan_policy("mask"):
        with pytest.raises(ArgumentError, match="original units"):
            mll(model(x), missing)
        mll(model(x), model.train_targets)


def test_targets_that_are_standardized_already_are_taken(train):
    x, y = train
    y = (y - y.mean()) / y.std()
    for target, standardize in ((y, True), (5 * y, False)):
        model = GPRegression(x, target, standardize=standardize)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        value, expected = mll(model(x), target), mll(model(x), model.train_targets)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_missing_targets(train, new_x):
    x, y = train
    missing = y.clone()
    missing[::6] = torch.nan
    observed = ~missing.isnan()
    model = GPRegression(x, missing, kernel="deep")
    warm_start(model)
    reference = GPRegression(x[observed], y[observed], kernel="deep")
    reference.load_state_dict(model.state_dict())
    for marginal in (False, True):
        ours = model.predict(new_x, marginal=marginal)
        theirs = reference.predict(new_x, marginal=marginal)
        torch.testing.assert_close(ours.mean, theirs.mean)
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix)
    with gpytorch.settings.observation_nan_policy("mask"):
        value = lml(model)
    torch.testing.assert_close(value * 60, lml(reference) * 50)
    cold = GPRegression(x[observed], y[observed], kernel="deep", warm_start=False)
    assert lml(reference) > lml(cold)


X, Y = torch.zeros(5, 2) + torch.arange(5.0).unsqueeze(-1), torch.arange(5.0)


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "match"),
    [
        (X, Y[:4], {}, ShapeError, "train_y"),
        (X, Y.unsqueeze(-1), {}, ShapeError, "squeeze"),
        (X[:0], Y[:0], {}, ShapeError, "train_x"),
        (X[:, :0], Y, {}, ShapeError, "train_x"),
        (torch.tensor(1.0), Y, {}, ShapeError, "train_x"),
        (X.half(), Y, {}, ArgumentError, r"train_x.double\(\)"),
        (X, Y.half(), {}, ArgumentError, r"train_y.double\(\)"),
        (X, Y.double(), {}, ArgumentError, "as train_x"),
        (X.tolist(), Y, {}, ArgumentError, "as_tensor"),
        (X / 0, Y, {}, NonFiniteError, "train_x"),
        (X, Y / 0, {}, NonFiniteError, "NaN"),
        (X, Y * torch.nan, {}, ArgumentError, "observed"),
        (X, Y, {"kernel": "rbff"}, UnknownNameError, "'rbf'"),
        (X, Y, {"mean": "constnat"}, UnknownNameError, "'constant'"),
        (X, Y, {"kernel": 3}, ArgumentError, "kernel"),
        (X, Y, {"mean": None}, ArgumentError, "mean"),
        (X, Y, {"likelihood": BernoulliLikelihood()}, ArgumentError, "Gaussian"),
    ],
)
def test_bad_input(x, y, options, error, match):
    with pytest.raises(error, match=match):
        GPRegression(x, y, **options)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (X[:, :1], ShapeError),
        (Y, ShapeError),
        (X[:0], ShapeError),
        (X.double(), ArgumentError),
        (X / 0, NonFiniteError),
        ([[1.0, 2.0]], ArgumentError),
    ],
)
def test_bad_points(x, error):
    with pytest.raises(error, match="x: got"):
        GPRegression(X, Y).predict(x)
    batch = GPRegression(torch.randn(2, 5, 2), torch.randn(2, 5))
    with pytest.raises(ShapeError, match="broadcasts"):
        batch.predict(torch.randn(3, 5, 2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_files_and_copies_give_the_same_predictions(kernel, train, new_x, tmp_path):
    model = GPRegression(*train, kernel=kernel, mean="mlp", num_mixtures=3)
    steps(model, 2)
    path = tmp_path / "model.pt"
    model.save(path)
    loaded = GPRegression.load(path)
    model.eval()
    model(new_x).mean.sum().backward()  # fills GPyTorch's caches
    expected = model.predict(new_x)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        prediction = other.predict(new_x)
        assert torch.equal(prediction.mean, expected.mean)
        assert torch.equal(prediction.covariance_matrix, expected.covariance_matrix)
    assert torch.equal(model.train_targets, loaded.train_targets)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(steps(model.train(), 1), steps(loaded, 1))


def test_save_and_load_with_missing_targets_batches_and_given_parts(diabetes, tmp_path):
    x, y = diabetes[0][:40].reshape(2, 20, 10), diabetes[1][:40].reshape(2, 20).clone()
    y[0, 3] = torch.nan
    path = tmp_path / "model.pt"

    def objects():
        likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-2))
        return {"kernel": ScaleKernel(RBFKernel()), "likelihood": likelihood}

    model = GPRegression(x, y, **objects())
    model.covar_module.outputscale = 3.0
    model.save(path)
    for given, match in (
        ({}, r"load\(path, kernel="),
        ({"kernel": objects()["kernel"]}, r"load\(path, likelihood="),
        (objects() | {"kernel": RBFKernel()}, "same classes and sizes"),
    ):
        with pytest.raises(ArgumentError, match=match):
            GPRegression.load(path, **given)
    loaded = GPRegression.load(path, **objects())
    new = diabetes[0][60:65]
    assert torch.equal(loaded.predict(new).mean, model.predict(new).mean)


def test_files_that_cannot_be_read_or_written(train, tmp_path):
    model = GPRegression(*train)
    for path in (tmp_path / "missing" / "model.pt", tmp_path):
        with pytest.raises(DataError, match="cannot write"):
            model.save(path)
    with pytest.raises(DataError, match="no file"):
        GPRegression.load(tmp_path / "model.pt")
