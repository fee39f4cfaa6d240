"""Deep Kernel Transfer: against loops over tasks and ways, and what it refuses."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import reference
from gpclml.conditioning import KFold, LastPoints
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnknownNameError
from gpclml.kernels.networks import MLP
from gpclml.meta import DeepKernelTransfer, Episodes
from gpclml.meta.deep_kernel_transfer import make_kernel, one_vs_rest
from gpclml.mlls import ConditionalMarginalLogLikelihood

KERNELS = [
    "batch_norm_cosine", "cosine", "linear", "matern", "polynomial", "polynomial_1", "rbf",
    "spectral_mixture",
]  # fmt: skip
TASKS, WAYS, SHOTS, QUERIES = 3, 4, 2, 3


def episodes(tasks=TASKS, ways=WAYS, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def points(shots):
        labels = torch.arange(ways).repeat_interleave(shots).expand(tasks, -1)
        noise = torch.randn(tasks, ways * shots, 5, generator=generator, dtype=torch.float64)
        return torch.nn.functional.one_hot(labels, 5) + 0.5 * noise, labels

    return Episodes(*points(SHOTS), *points(QUERIES), ways=ways)


def regression(tasks=TASKS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tasks, 12, 5, generator=generator, dtype=torch.float64)
    y = x[..., 0].sin() + 0.1 * torch.randn(tasks, 12, generator=generator, dtype=torch.float64)
    return Episodes(x[:, :7], y[:, :7], x[:, 7:], y[:, 7:])


def transfer(kernel="rbf", dtype=torch.float64):
    return DeepKernelTransfer(MLP([5, 8, 6], torch.nn.Tanh), kernel, num_features=6).to(dtype)


def features_of(model, data):
    """Of all points, support first."""
    return model.features(torch.cat([data.support_x, data.query_x], 1))


class PlainGP(gpytorch.models.ExactGP):
    """One way of one task, of GPyTorch's own classes."""

    def __init__(self, x, y, model):
        super().__init__(x, y, model.likelihood)
        self.mean_module, self.covar_module = model.mean_module, model.covar_module

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def plain_marginal(model, features, targets):
    """The mean log marginal likelihood over tasks and ways, by a loop."""
    values = []
    for z, ys in zip(features, targets, strict=True):
        for y in ys:
            plain = PlainGP(z[0], y, model).train()
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, plain)
            values.append(mll(plain(z[0]), y))
    return torch.stack(values).reshape(targets.shape[:2])


@pytest.mark.parametrize("data", [episodes(), regression()], ids=["classes", "numbers"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_marginal_objective_is_that_of_a_loop_over_gpytorchs_own(kernel, data):
    model = transfer(kernel)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    value = mll(*model.prior(data))
    features = features_of(model, data)
    y = torch.cat([data.support_y, data.query_y], 1)
    y = y if data.ways else (y - y.mean()) / y.std(correction=0)
    targets = one_vs_rest(y, data.ways, torch.float64)
    expected = plain_marginal(model, features, targets)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(value.mean(), parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected.mean(), parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kernel", ["cosine", "rbf"])
def test_the_conditional_objective_is_that_of_explicit_conditionals(kernel):
    model, data = transfer(kernel), episodes()
    m = data.num_support
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    output, targets = model.prior(data)
    value = mll(output, targets)
    noisy = model.likelihood(output)
    held_out = torch.arange(m, targets.shape[-1])
    for task in range(TASKS):
        for way in range(WAYS):
            expected = reference.conditional_log_density(
                noisy.covariance_matrix[task, 0], targets[task, way] - noisy.mean[task, 0], held_out
            )
            torch.testing.assert_close(value[task, way], expected / len(held_out))


def test_any_conditioning_can_be_the_objective():
    model, data = transfer(), episodes()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, KFold(4))
    assert mll(*model.prior(data)).shape == (TASKS, WAYS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_predictions_are_those_of_a_loop_and_leave_modes_alone(kernel):
    model, data = transfer(kernel), episodes()
    model.prior(data)  # one step of running statistics
    predictive = model.predict(data)
    assert predictive.mean.shape == (TASKS, WAYS, WAYS * QUERIES)
    assert model.training
    model.eval()
    support, query = features_of(model, data).tensor_split([data.num_support], dim=-2)
    targets = one_vs_rest(data.support_y, WAYS, torch.float64)
    for task in range(TASKS):
        for way in range(WAYS):
            plain = PlainGP(support[task, 0], targets[task, way], model).eval()
            with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
                expected = model.likelihood(plain(query[task, 0]))
            torch.testing.assert_close(
                predictive.mean[task, way], expected.mean, rtol=1e-6, atol=1e-7
            )
            torch.testing.assert_close(
                predictive.variance[task, way], expected.variance, rtol=1e-6, atol=1e-7
            )


@torch.no_grad()
def test_cosines_of_normalized_features_start_about_a_half():
    model = DeepKernelTransfer(torch.nn.Identity(), "batch_norm_cosine", 200)
    x = torch.randn(1, 50, 200, generator=torch.Generator().manual_seed(0))
    cosines = model.covar_module(model.features(x)).to_dense() / model.covar_module.outputscale
    others = ~torch.eye(50, dtype=torch.bool).expand_as(cosines)
    assert float(cosines[others].mean()) == pytest.approx(0.5, abs=0.02)


def test_a_task_does_not_depend_on_the_others_or_its_query_targets():
    model = transfer("rbf").eval()
    data = episodes()
    together = model.predict(data)
    first = Episodes(
        data.support_x[:1], data.support_y[:1], data.query_x[:1], 0 * data.query_y[:1], WAYS
    )
    torch.testing.assert_close(model.predict(first).mean, together.mean[:1])


def test_a_kernel_of_the_users_own_and_float32():
    model = transfer(ScaleKernel(RBFKernel()), torch.float32)
    data = episodes().to(torch.float32)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    value = mll(*model.prior(data))
    assert value.dtype == torch.float32
    double = transfer(ScaleKernel(RBFKernel()))
    double.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    expected = ConditionalMarginalLogLikelihood(double.likelihood, double, LastPoints(m=0))(
        *double.prior(episodes())
    )
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)


def test_non_finite_features_are_caught_before_the_gp():
    model, data = transfer(), episodes()
    with torch.no_grad():
        next(model.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="network output"):
        model.prior(data)
    with pytest.raises(NonFiniteError, match="network output"):
        model.predict(data)


def test_bad_arguments():
    for kernel in ("batch_norm_cosine", "spectral_mixture"):
        model = DeepKernelTransfer(MLP([5, 8, 6]), kernel, num_features=7).double()
        with pytest.raises(ShapeError, match=r"backbone: got 6 features .* the 7 of num_features"):
            model.predict(episodes())
    with pytest.raises(UnknownNameError, match="Did you mean 'cosine'"):
        DeepKernelTransfer(MLP([5, 6]), "cosin")
    with pytest.raises(ArgumentError, match="kernel"):
        DeepKernelTransfer(MLP([5, 6]), 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_features"):
        DeepKernelTransfer(MLP([5, 6]), "rbf", num_features=0)
    model = DeepKernelTransfer(torch.nn.Flatten(0), "rbf")
    with pytest.raises(ShapeError, match="backbone"):
        model.prior(episodes())


def test_a_polynomial_of_degree_one_is_linear_with_an_offset():
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = make_kernel("polynomial_1", 6).double()
    expected = (x @ x.T + kernel.base_kernel.offset) / 6
    torch.testing.assert_close(kernel(x).to_dense(), expected)


def test_targets_of_query_points_need_not_be_known():
    model = transfer("rbf").eval()
    for data in (episodes(), regression()):
        unknown = Episodes(data.support_x, data.support_y, data.query_x, None, ways=data.ways)
        left_out = Episodes(data.support_x, data.support_y, data.query_x, ways=data.ways)
        for less in (unknown, left_out, left_out.to(torch.float64), Episodes.stack([unknown])):
            torch.testing.assert_close(model.predict(less).mean, model.predict(data).mean)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        with pytest.raises(ArgumentError, match="without targets of their query points"):
            model.objective(mll, unknown)
    with pytest.raises(ShapeError, match="query_y"):
        Episodes(data.support_x, data.support_y, data.query_x, data.query_y[:, :1])
