"""The objective of tasks as one node of autograd: against the objective of their prior."""

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
from gpytorch.priors import GammaPrior
from test_deep_kernel_transfer import SHOTS, WAYS, episodes, regression, transfer

from gpclml.conditioning import KFold, LastPoints, RandomHoldout
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.kernels import CosineSimilarityKernel
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


def is_one_node(value):
    """Whether the objective is one node, from which in regression a number is subtracted."""
    node = value.grad_fn
    if type(node).__name__ == "SubBackward0":
        node = node.next_functions[0][0]
    return type(node).__name__ == "_ObjectiveBackward"


def of_the_prior(model, mll, data):
    """The objective of the prior, in the units of the targets."""
    return mll(*model.prior(data)) - (0.0 if data.ways else math.log(model.targets.deviation))


def assert_same(model, data, mll, *, at_once=True):
    """Value and all gradients are those of the objective of the prior."""
    ways = max(data.ways, 1)
    weights = torch.linspace(-1.0, 2.0, ways, dtype=torch.float64).expand(data.num_tasks, ways)
    expected, gradients = value_and_gradients(model, of_the_prior(model, mll, data), weights)
    value = model.objective(mll, data)
    assert is_one_node(value) == at_once
    found, others = value_and_gradients(model, value, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert others.keys() == gradients.keys()
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, gradient in gradients.items():
        # Biases before a stationary kernel have a gradient of zero and of roundings.
        torch.testing.assert_close(others[name], gradient, rtol=1e-8, atol=1e-10 * largest)


def moved(model):
    """With parameters away from their start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.2 * noise)
    return model


@pytest.mark.parametrize("m", [0, GIVEN])
@pytest.mark.parametrize("data", [episodes(1), regression(3)], ids=["classes", "regression"])
@pytest.mark.parametrize("kernel", KNOWN.values(), ids=KNOWN)
def test_value_and_gradients_are_those_of_the_prior(kernel, data, m):
    model = moved(transfer(kernel))
    assert_same(model, data, objective(model, m))


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


class _Scaled(CosineSimilarityKernel):
    def forward(self, x1, x2, diag=False, last_dim_is_batch=False, **params):
        return 2.0 * super().forward(x1, x2, diag, last_dim_is_batch, **params)


def _with_prior():
    kernel = ScaleKernel(RBFKernel(), outputscale_prior=GammaPrior(2.0, 0.15))
    return transfer(kernel)


def _with_hook():
    model = transfer("rbf")
    model.covar_module.base_kernel.register_forward_hook(lambda module, args, output: 2 * output)
    return model


class _Twice(DeepKernelTransfer):
    def forward(self, features):
        prior = super().forward(features)
        return gpytorch.distributions.MultivariateNormal(
            2 * prior.mean, 2 * prior.covariance_matrix
        )


@pytest.mark.parametrize(
    "model",
    [
        transfer("spectral_mixture"), transfer(_Scaled()), _with_prior(), _with_hook(),
        transfer(RBFKernel(active_dims=[0, 2])), _Twice(torch.nn.Linear(5, 6), "rbf").double(),
    ],
    ids=["mixture", "subclass", "prior", "hook", "columns", "forward"],
)  # fmt: skip
def test_unknown_parts_are_left_to_the_objective(model):
    assert_same(model, episodes(1), objective(model), at_once=False)


def test_of_several_tasks_each_has_a_covariance():
    model = moved(transfer("rbf"))
    assert_same(model, episodes(3), objective(model))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("data", [episodes(2), regression(3)], ids=["classes", "regression"])
@pytest.mark.parametrize("kernel", ["cosine", "batch_norm_cosine", "rbf"])
def test_points_held_out_at_random_are_put_last(kernel, data, fraction):
    model = moved(transfer(kernel))
    seeded = RandomHoldout(fraction, seed=1)
    assert_same(model, data, objective(model, conditioning=seeded))


@pytest.mark.parametrize("conditioning", [None, RandomHoldout(0.5)])
def test_draws_are_those_of_the_objective(conditioning):
    model, data = transfer("rbf"), regression(2)
    mll, other = (objective(model, conditioning=conditioning, seed=4) for _ in range(2))
    found = [model.objective(mll, data) for _ in range(3)]
    expected = torch.stack([of_the_prior(model, other, data) for _ in range(3)])
    assert all(map(is_one_node, found))
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-10)
    assert not torch.allclose(expected[0], expected[1])
    assert torch.equal(mll.get_extra_state(), other.get_extra_state())


def test_draws_of_what_is_left_to_the_objective_are_its_own():
    model, data = transfer("spectral_mixture"), regression(1)
    mll, other = (objective(model, conditioning=RandomHoldout(0.5)) for _ in range(2))
    value = model.objective(mll, data)
    assert not is_one_node(value)
    torch.testing.assert_close(value, of_the_prior(model, other, data))


def test_other_conditionings_are_left_to_the_objective():
    model = transfer("rbf")
    for other in (RandomHoldout(0.5, seed=1, condition_on=3), KFold(3, seed=1)):
        assert_same(model, episodes(1), objective(model, conditioning=other), at_once=False)
    with gpytorch.settings.observation_nan_policy("mask"):
        assert_same(model, episodes(1), objective(model), at_once=False)


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
def test_of_a_model_in_eval_mode_it_is_the_posterior():
    model, data = transfer("rbf"), regression(1)
    mll = objective(model).eval()
    torch.testing.assert_close(model.objective(mll, data), of_the_prior(model, mll, data))


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
    model = transfer("linear")
    value = model.objective(objective(model), episodes(1)).sum()
    with torch.no_grad():
        model.likelihood.noise_covar.raw_noise.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    value = model.objective(objective(model), episodes(1)).sum()
    with pytest.raises(UnsupportedError, match="first derivative only"):
        torch.autograd.grad(value, list(model.backbone.parameters()), create_graph=True)
