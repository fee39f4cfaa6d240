import pytest
import torch
from botorch.models import MultiTaskGP, SingleTaskGP
from botorch.models.transforms import Log, Normalize, Standardize
from exact_gps import MultitaskGP, PlainGP
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.means import LinearMean
from matplotlib.figure import Figure

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation import decompose
from gpclml.inference.posterior import exact_posterior, new_points, reading
from gpclml.kernels import MLP, DeepKernel
from gpclml.models import GPRegression

SCALE, SHIFT = 37.0, 5.0


def data(n=14, m=5, d=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n + m, d, generator=generator, dtype=torch.float64)
    y = SCALE * (5 * x.sum(-1)).sin() + SHIFT
    return x[:n], y[:n], x[n:]


def nested_sum():
    """A kernel with sums inside of scales, products and columns, and its terms by hand."""
    rbf, linear = RBFKernel(active_dims=[1]), LinearKernel(active_dims=[0])
    periodic, power, matern = PeriodicKernel(active_dims=[1]), RQKernel(), MaternKernel()
    # The outer kernel sees the columns 2 and 0, of which the inner ones take some.
    inner = ScaleKernel(rbf + (linear + periodic) * power, active_dims=[2, 0])
    outer = ScaleKernel(inner + matern).double()
    inner.outputscale, outer.outputscale = 1.7, 0.6

    def terms(x):
        columns, scale = x[:, [2, 0]], inner.outputscale * outer.outputscale
        factor = scale * power(columns).to_dense()
        return [
            scale * rbf(columns).to_dense(),
            factor * linear(columns).to_dense(),
            factor * periodic(columns).to_dense(),
            outer.outputscale * matern(x).to_dense(),
        ]

    return outer, terms


def brute_force(terms, noise, residual, m, center):
    """Mean and covariance of all components at the last m points, by one joint Gaussian.

    Args:
        terms: Matrices of the terms at training and new points.
        noise: Variances of the training targets.
        residual: Training targets less their mean.
        m: Number of new points.
        center: Whether to subtract means over the training points.
    """
    n, C = len(residual), len(terms)
    prior = torch.block_diag(*terms)
    identity = torch.eye(n + m, dtype=torch.float64)
    pick, average = identity[n:], center * identity[:n].mean(0).expand(m, -1)
    maps = torch.cat([torch.kron(torch.eye(C), pick - average), average.repeat(1, C)])
    observe = identity[:n].repeat(1, C)
    K = observe @ prior @ observe.mT + torch.diag(noise)
    gain = maps @ prior @ observe.mT @ torch.linalg.inv(K)
    covariance = maps @ prior @ maps.mT - gain @ observe @ prior @ maps.mT
    shape = C + 1, m, C + 1, m
    return (gain @ residual).view(C + 1, m), covariance.view(shape).transpose(1, 2)


@pytest.mark.parametrize("center", [False, True])
@torch.no_grad()
def test_components_of_nested_sums_are_those_of_one_joint_gaussian(center):
    x, y, new = data()
    kernel, terms = nested_sum()
    noise = torch.linspace(0.1, 1, len(x), dtype=torch.float64)
    likelihood = FixedNoiseGaussianLikelihood(noise)
    mean = LinearMean(3).double()
    model = PlainGP(x, y, kernel, likelihood, mean)
    result = decompose(model, new, center=center)
    matrices = terms(torch.cat([x, new]))
    torch.testing.assert_close(model.covar_module(new).to_dense(), sum(matrices)[14:, 14:])
    shift, covariance = brute_force(matrices, noise, y - mean(x), 5, center)
    shift[-1] += mean(new)
    assert result.names == (
        "RBF(0)", "Linear(2) * RQ(2, 0)", "Periodic(0) * RQ(2, 0)", "Matern", "mean function",
    )  # fmt: skip
    torch.testing.assert_close(result.mean, shift, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.covariance, covariance, rtol=1e-9, atol=1e-9)
    variances = covariance.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)
    torch.testing.assert_close(result.stddev, variances.clamp_min(0).sqrt(), rtol=1e-7, atol=1e-7)
    assert model.training


def regression(x, y):
    return GPRegression(x, y, ScaleKernel(RBFKernel()) + LinearKernel())


def missing(x, y):
    return regression(x, y.clone().index_fill_(0, torch.tensor([3, 8]), torch.nan))


def deep(x, y):
    torch.manual_seed(0)
    return GPRegression(x, y, RBFKernel() + DeepKernel(MLP([3, 4, 2]), RBFKernel()), "mlp")


def batch(x, y):
    shape = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape) + LinearKernel()
    return GPRegression(torch.stack([x, x.flip(0)]), torch.stack([y, y.cos()]), kernel)


@pytest.mark.parametrize("make", [regression, missing, deep, batch])
@pytest.mark.parametrize("center", [False, True])
def test_components_add_up_to_the_prediction(make, center):
    x, y, new = data()
    model = make(x, y)
    function, result = model.predict(new, False), decompose(model, new, center=center)
    scale = SCALE**2
    torch.testing.assert_close(result.mean.sum(-2), function.mean, rtol=1e-10, atol=1e-10)
    covariance = result.covariance.sum((-4, -3))
    torch.testing.assert_close(covariance, function.covariance_matrix, rtol=1e-9, atol=1e-9 * scale)
    if center:
        data_mean = decompose(model, x, center=True).mean[..., :-1, :].mean(-1)
        torch.testing.assert_close(data_mean, torch.zeros_like(data_mean), rtol=0, atol=1e-9)


@pytest.mark.parametrize("outputs", [1, 2])
def test_models_of_botorch_in_their_units(outputs):
    x, y, new = data()
    shape = torch.Size([outputs] if outputs > 1 else [])
    kernel = RBFKernel(batch_shape=shape) + LinearKernel(batch_shape=shape)
    targets = torch.stack([y, y.cos()], -1)[:, :outputs]
    model = SingleTaskGP(
        x, targets, covar_module=kernel, input_transform=Normalize(3),
        outcome_transform=Standardize(outputs),
    )  # fmt: skip
    mean = decompose(model, new, center=True).mean.sum(-2)
    theirs = model.posterior(new).mean.detach().mT.view_as(mean)
    torch.testing.assert_close(mean, theirs, rtol=1e-9, atol=1e-9)


def test_kernels_of_tasks_in_a_column_of_the_points():
    x, y, new = data()
    x, new = (torch.cat([z, torch.arange(len(z))[:, None] % 2], -1) for z in (x, new))
    kernel = RBFKernel(active_dims=[0, 1]) + LinearKernel(active_dims=[2])
    model = MultiTaskGP(x, y[:, None], task_feature=-1, covar_module=kernel)
    result = decompose(model, new)
    assert result.names[0] == "RBF(0, 1) * PositiveIndex(3)"
    with reading(model):
        function = exact_posterior(model, new_points(model, new), marginal=True)
    units = model.outcome_transform
    mean = function.mean * units.stdvs[0] + units.means[0]
    torch.testing.assert_close(result.mean.sum(0), mean, rtol=1e-10, atol=1e-10)


def test_a_model_in_single_precision_is_decomposed_as_one_in_double():
    x, y, new = data()
    double = decompose(regression(x, y), new)
    single = decompose(regression(x.float(), y.float()), new.float())
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(single.stddev.double(), double.stddev, rtol=1e-3, atol=1e-2)


def test_names_are_unique_readable_and_may_be_given():
    pandas = pytest.importorskip("pandas")
    x, y, new = data()
    frame = pandas.DataFrame(x.numpy(), columns=["age", "height", "weight"])
    kernels = RBFKernel(active_dims=[0]), RBFKernel(), RBFKernel(active_dims=[0])
    model = GPRegression(frame, y, kernels[0] + kernels[1] + kernels[2])
    names = decompose(model, new).names
    assert names == ("RBF(age)", "RBF", "RBF(age) 2", "mean function")
    given = decompose(model, new, names=["a", "b", "c"]).names
    assert given == ("a", "b", "c", "mean function")
    for names in (["a"], ["a", "b", "b"], ["a", "b", "mean function"]):
        with pytest.raises(ArgumentError, match=r"3 distinct names, of RBF\(age\)"):
            decompose(model, new, names=names)


def two_inputs(x, y):
    model = PlainGP(x, y, RBFKernel() + LinearKernel())
    model.train_inputs = (x, torch.zeros(len(x), 1, dtype=torch.long))
    return model


def several_tasks(x, y):
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    return MultitaskGP(x, torch.stack([y, y], -1), likelihood, RBFKernel() + LinearKernel())


def added_covariances(x, y):
    class TwoKernels(PlainGP):
        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x) + RBFKernel()(x))

    return TwoKernels(x, y)


REFUSED = {
    "the kernel Matern, expected a sum": GPRegression,
    "the kernel Deep, expected a sum": lambda x, y: GPRegression(x, y, "deep"),
    "the kernel Index": lambda x, y: PlainGP(x, y, IndexKernel(num_tasks=2)),
    "the kernel RBF .* Linear": lambda x, y: PlainGP(x, y, RBFKernel() * LinearKernel()),
    "called on 2 tensors": two_inputs,
    "several tasks": several_tasks,
    "SumLinearOperator": added_covariances,
    "outcome_transform: got Log": lambda x, y: SingleTaskGP(
        x, y[:, None] + 100, covar_module=RBFKernel() + LinearKernel(), outcome_transform=Log()
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_components_is_refused_by_name(message):
    x, y, new = data()
    with pytest.raises(UnsupportedError, match=message):
        decompose(REFUSED[message](x, y).double(), new)


def test_components_are_plotted_over_a_column_in_its_order():
    x, y, new = data()
    result = decompose(regression(x, y), new, center=True)
    panels = result.plot(new[:, 0], ax=Figure().subplots(2))  # the constant mean has none
    assert [panel.get_title() for panel in panels] == ["RBF", "Linear"]
    line, order = panels[1].lines[0], new[:, 0].argsort()
    torch.testing.assert_close(torch.as_tensor(line.get_xdata()), new[order, 0])
    torch.testing.assert_close(torch.as_tensor(line.get_ydata()), result.mean[1, order])
    heights = panels[1].collections[0].get_paths()[0].vertices[:, 1]
    band = result.mean[1] + 2 * result.stddev[1]
    assert heights.max() == pytest.approx(float(band.max()))
    with pytest.raises(ShapeError, match="at: got"):
        result.plot(new[:3, 0])
