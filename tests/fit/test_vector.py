"""The vector that a line search moves in: logarithms of positive hyperparameters."""

import gpytorch
import numpy as np
import pytest
import threadpoolctl
import torch
from botorch.models import SingleTaskGP
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import RQKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.optimize import minimize

from gpclml.conditioning import LastPoints
from gpclml.fit import fit_mll
from gpclml.fit.search import Vector, bounds_of
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss

CONSTRAINTS = {
    "softplus": Positive(),
    "bounded softplus": GreaterThan(0.05),
    "another softplus": Positive(
        transform=torch.nn.Softplus(beta=3.0),
        inv_transform=lambda v: torch.expm1(3.0 * v).log() / 3.0,
    ),
    "no transform": GreaterThan(0.05, transform=None),
    "exponential": Positive(transform=torch.exp, inv_transform=torch.log),
    "interval": Interval(0.01, 30.0),
    "from above": LessThan(30.0),
}


def data(n=30, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + x.sum(-1) + 0.1 * noise
    return x, (y - y.mean()) / y.std()


class Plain(gpytorch.models.ExactGP):
    def __init__(self, x, y, constraint, dtype=torch.float64):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(x.to(dtype), y.to(dtype), likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        own = RQKernel(ard_num_dims=x.shape[-1], lengthscale_constraint=constraint)
        self.covar_module = ScaleKernel(own)
        self.to(dtype)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def objective(constraint, lengthscale=2.0, dtype=torch.float64):
    model = Plain(*data(), constraint, dtype)
    model.covar_module.base_kernel.lengthscale = lengthscale
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)).train()


@pytest.mark.parametrize("lengthscale", [0.06, 2.0, 25.0])
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_value_and_slope_are_those_of_the_objective(name, lengthscale, logarithmic):
    mll = objective(CONSTRAINTS[name], lengthscale)
    before = {key: value.clone() for key, value in mll.state_dict().items()}
    expected = fixed_loss(mll).item()
    with Vector(mll, bounds_of(mll)) as vector:
        vector.begin(FixedLoss(mll))
        if logarithmic:
            vector.take_logarithms()
        point = vector.best
        value, slope = vector(point.copy())
        assert value == pytest.approx(expected, rel=1e-12)
        for at in range(len(point)):
            step = 1e-5 * np.eye(len(point))[at]
            (above, _), (below, _) = vector(point + step), vector(point - step)
            assert slope[at] == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-9)
        vector.best = point
    for key, value in mll.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=1e-12, atol=1e-12)


def test_coordinates_are_logarithms_where_hyperparameters_are_positive():
    mll = objective(CONSTRAINTS["bounded softplus"])
    with Vector(mll, bounds_of(mll)) as vector:
        vector.begin(FixedLoss(mll))
        raw = torch.cat([p.detach().flatten() for p in mll.parameters()])
        np.testing.assert_allclose(vector.best, raw.numpy(), rtol=1e-12)
        vector.take_logarithms()
        natural = {
            "likelihood.noise_covar.raw_noise": mll.likelihood.noise,
            "model.mean_module.raw_constant": None,
            "model.covar_module.raw_outputscale": mll.model.covar_module.outputscale,
            "model.covar_module.base_kernel.raw_lengthscale": torch.full(
                (3,), 2.0, dtype=torch.float64
            ),
            "model.covar_module.base_kernel.raw_alpha": mll.model.covar_module.base_kernel.alpha,
        }
        expected = [
            torch.zeros(1) if value is None else value.detach().reshape(-1).log()
            for name, value in ((name, natural[name]) for name in vector.parameters)
        ]
        np.testing.assert_allclose(vector.best, torch.cat(expected).numpy(), rtol=1e-12)


def test_a_bound_is_reached_exactly_and_a_flat_direction_stays_finite():
    mll = objective(CONSTRAINTS["no transform"])
    lower = CONSTRAINTS["no transform"].lower_bound.double()
    with Vector(mll, bounds_of(mll)) as vector:
        vector.begin(FixedLoss(mll))
        vector.take_logarithms()
        for side in (0, 1):
            end = np.where(np.isfinite(vector.box[side]), vector.box[side], vector.best)
            vector(end)
            assert all(torch.isfinite(p).all() for p in vector.parameters.values())
            if side == 0:
                assert (mll.model.covar_module.base_kernel.raw_lengthscale == lower).all()


def test_a_point_that_is_not_finite_has_no_loss_and_changes_nothing():
    mll = objective(Positive())
    before = [p.detach().clone() for p in mll.parameters()]
    with Vector(mll, bounds_of(mll)) as vector:
        vector.begin(FixedLoss(mll))
        loss, gradient = vector(np.full_like(vector.best, np.nan))
        assert np.isnan(loss)
        assert np.isnan(gradient).all()
        assert vector.failures == 1
    for parameter, own in zip(mll.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, own)


def test_float32_parameters_move_in_the_same_coordinates():
    mlls = [objective(Positive(), dtype=dtype) for dtype in (torch.float32, torch.float64)]
    found = []
    for mll in mlls:
        with Vector(mll, bounds_of(mll)) as vector:
            vector.begin(FixedLoss(mll))
            vector.take_logarithms()
            found.append(vector(vector.best.copy()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_takes_half_of_the_steps_of_one_in_raw_parameters(seed):
    def make():
        model = SingleTaskGP(*(one.reshape(40, -1) for one in data(40, 6, seed)))
        return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))

    mll = make().train()
    parameters = [p for p in mll.parameters() if p.requires_grad]

    def function(point):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(point), parameters)
        loss = fixed_loss(mll)
        gradients = torch.autograd.grad(loss, parameters)
        return loss.item(), torch.nn.utils.parameters_to_vector(gradients).numpy()

    start = torch.nn.utils.parameters_to_vector(parameters).detach().numpy()
    named = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    bounds = bounds_of(mll)
    box = [
        tuple(None if end is None else float(torch.as_tensor(end)) for end in pair)
        for name, p in named.items() for pair in [bounds.get(name, (None, None))] * p.numel()
    ]  # fmt: skip
    raw = minimize(function, start, jac=True, bounds=box, method="L-BFGS-B")
    result = fit_mll(make(), progress=False)
    assert result.objective > -raw.fun - 1e-4
    assert len(result.history) < 0.5 * raw.nit


def test_the_end_is_an_optimum_of_gpytorch_s_objective():
    x, y = data(40, 4)
    model = SingleTaskGP(x, y.unsqueeze(-1))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert fit_mll(mll, progress=False).problem == ""
    mll.train()
    loss = -mll(model(*model.train_inputs), model.train_targets)
    loss.backward()
    bounds = bounds_of(mll)
    for name, parameter in mll.named_parameters():
        slope = parameter.grad * parameter.detach().abs()  # by its logarithm
        lower, _ = bounds.get(name, (-np.inf, np.inf))
        free = parameter > (-np.inf if lower is None else lower)
        assert float(slope[free].abs().max()) < 1e-4


def test_libraries_of_scipy_have_one_thread_during_a_search_and_theirs_after_it():
    """Also where several searches go on at once, in threads of their own."""
    counted = threadpoolctl.ThreadpoolController().select(user_api="blas")

    def counts():
        return [library["num_threads"] for library in counted.info()]

    with counted.limit(limits=2):
        before = counts()
        model = SingleTaskGP(*(torch.rand(8, k, dtype=torch.float64) for k in (2, 1))).train()
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        first, second = (Vector(mll, bounds_of(mll)) for _ in range(2))
        with first:
            assert set(counts()) == {1}
            with second:
                assert set(counts()) == {1}
            assert set(counts()) == {1}
        assert counts() == before
