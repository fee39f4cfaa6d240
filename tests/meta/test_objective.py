"""The objective of tasks: that of each way of each task on its own, and its gradient."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from test_deep_kernel_transfer import SHOTS, WAYS, episodes, regression, transfer

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.meta import DeepKernelTransfer, Episodes
from gpclml.mlls import ConditionalMarginalLogLikelihood

KNOWN = {
    **{name: name for name in (
        "batch_norm_cosine", "cosine", "linear", "matern", "polynomial", "polynomial_1", "rbf",
    )},
    "cubic": PolynomialKernel(3),
    "sum": ScaleKernel(PeriodicKernel(ard_num_dims=6)) + ScaleKernel(LinearKernel(ard_num_dims=6)),
    "product": ScaleKernel(RBFKernel(ard_num_dims=6)) * RQKernel(),
}  # fmt: skip
GIVEN = WAYS * SHOTS


def objective(model, m=GIVEN, **settings):
    conditioning = settings.pop("conditioning", LastPoints(m=m))
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, **settings)
    return mll.train()


def value_and_gradients(model, value, weights):
    model.zero_grad()
    (value * weights).sum().backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def moved(model):
    """With parameters away from their start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.2 * noise)
    return model


class OfOneTask(gpytorch.models.ExactGP):
    """One way of one task as a GP of its own on the same features."""

    def __init__(self, model, features, targets):
        super().__init__(features, targets, model.likelihood)
        self.mean_module, self.covar_module = model.mean_module, model.covar_module

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("m", [0, GIVEN])
@pytest.mark.parametrize("data", [episodes(2), regression(3)], ids=["classes", "regression"])
@pytest.mark.parametrize("kernel", KNOWN.values(), ids=KNOWN)
def test_values_and_gradients_are_those_of_single_models(kernel, data, m):
    model = moved(transfer(kernel))
    ways = max(data.ways, 1)
    weights = torch.linspace(-1.0, 2.0, ways, dtype=torch.float64).expand(data.num_tasks, ways)
    mll = objective(model, m)
    value, gradients = value_and_gradients(model, model.objective(mll, data), weights)

    _, targets = model.prior(data)
    features = model.train_inputs[0]
    rows = []
    for task in range(data.num_tasks):
        for way in range(ways):
            single = OfOneTask(model, features[task, 0], targets[task, way])
            alone = ConditionalMarginalLogLikelihood(model.likelihood, single, LastPoints(m=m))
            single.train()
            rows.append(alone(single(features[task, 0]), targets[task, way]))
    single = torch.stack(rows).reshape(value.shape)
    single = single - (0.0 if data.ways else math.log(model.targets.deviation))
    expected, others = value_and_gradients(model, single, weights)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    largest = max(float(one.abs().max()) for one in others.values())
    for name, gradient in others.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10 * largest)


@pytest.mark.parametrize("m", [0, GIVEN])
@pytest.mark.parametrize("kernel", KNOWN.values(), ids=KNOWN)
def test_gradients_are_those_of_differences(kernel, m):
    model = moved(DeepKernelTransfer(torch.nn.Identity(), kernel, 5 if kernel in KNOWN else 6))
    model = model.double()
    width = 6 if not isinstance(kernel, str) else 5
    points = torch.randn(1, 20, width, generator=torch.Generator().manual_seed(1)).double()
    mll, data = objective(model, m), episodes(1)
    names, raws = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )

    def value(x, *numbers):
        for name, number in zip(names, numbers, strict=True):
            *path, last = name.split(".")
            module = model.get_submodule(".".join(path))
            module._parameters[last] = number
        task = Episodes(x[:, :GIVEN], data.support_y, x[:, GIVEN:], data.query_y, WAYS)
        return model.objective(mll, task)

    inputs = [points, *(raw.detach().clone() for raw in raws)]
    assert torch.autograd.gradcheck(value, [one.requires_grad_() for one in inputs], fast_mode=True)


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    model = moved(transfer("rbf"))
    value = model.objective(objective(model), episodes(1)).sum()
    parameters = [one for one in model.parameters() if one.requires_grad]
    first = torch.autograd.grad(value, parameters, retain_graph=True)
    kept = [one.clone() for one in first]
    twice = torch.autograd.grad(2.0 * value, parameters)
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))
    for one, two in zip(first, twice, strict=True):
        torch.testing.assert_close(two, 2.0 * one)


def test_single_precision_agrees_with_double():
    model = transfer("cosine", torch.float32)
    value = model.objective(objective(model), episodes(1).to(torch.float32))
    assert value.dtype == torch.float32
    model = model.double()
    torch.testing.assert_close(
        value.double(), model.objective(objective(model), episodes(1)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("conditioning", [None, RandomHoldout(0.5)])
def test_points_are_drawn_anew_and_by_the_seed(conditioning):
    model, data = transfer("rbf"), regression(2)
    one, other = (objective(model, conditioning=conditioning, seed=4) for _ in range(2))
    first, second = ([model.objective(mll, data) for _ in range(3)] for mll in (one, other))
    torch.testing.assert_close(torch.stack(first), torch.stack(second))
    assert not torch.allclose(first[0], first[1])


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
def test_of_a_model_in_eval_mode_it_is_the_posterior():
    model, data = transfer("rbf"), regression(1)
    mll = objective(model).eval()
    expected = mll(*model.prior(data)) - math.log(model.targets.deviation)
    torch.testing.assert_close(model.objective(mll, data), expected)


def test_what_cannot_be_evaluated_is_the_same_error():
    model, data = transfer("rbf"), regression(1)
    data.query_y[0, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="target: got 1 non-finite"):
        model.objective(objective(model, 7), data)
    data = regression(1)
    data.query_x[0, 2] = torch.inf
    with pytest.raises(NonFiniteError, match="network output"):
        model.objective(objective(model, 7), data)


def test_changed_parameters_and_second_derivatives_are_refused():
    model = transfer("rbf")
    value = model.objective(objective(model), episodes(1)).sum()
    with torch.no_grad():
        model.likelihood.noise_covar.raw_noise.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    value = model.objective(objective(model), episodes(1)).sum()
    with pytest.raises(UnsupportedError, match="first derivative only"):
        torch.autograd.grad(value, list(model.backbone.parameters()), create_graph=True)
