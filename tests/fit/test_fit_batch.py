"""Many fits at once: each as it would be alone, and what happens where one fails."""

import copy

import gpytorch
import pytest
import torch
from botorch.models import SingleTaskGP

from gpclml.conditioning import (
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    NearestNeighbors,
    RandomHoldout,
)  # fmt: skip
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import fit_batch, fit_mll, suggest_batch_size
from gpclml.kernels import DeepKernel
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

STEPS = 25


def objective(seed, conditioning=None, n=14, dtype=torch.float64, device="cpu", **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    y = (4 * x).sin().sum(-1) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    options = {"kernel": "deep_bottleneck", "hidden": (5, 4), "seed": seed} | options
    model = GPRegression(x.to(device, dtype), y.to(device, dtype), **options)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)


def assert_same_fits(together, results, alone, lone_results, rtol=1e-7):
    for mll, result, other, lone in zip(together, results, alone, lone_results, strict=True):
        for (name, value), (_, expected) in zip(
            mll.named_parameters(), other.named_parameters(), strict=True
        ):
            torch.testing.assert_close(value, expected, rtol=rtol, atol=0.1 * rtol, msg=name)
        assert result.history == pytest.approx(lone.history, rel=10 * rtol, abs=10 * rtol)
        assert result.objective == pytest.approx(lone.objective, rel=10 * rtol, abs=10 * rtol)
        assert result.message == lone.message
        assert not mll.training


CONDITIONINGS = {
    "default": [None, None, None],
    "marginal": [LastPoints(0)] * 3,
    "values of m": [RandomHoldout(0.1), RandomHoldout(0.5), LastPoints(9)],
    "objectives": [LastPoints(0), None, RandomHoldout(0.1)],
    "many blocks": [LeaveOneOut(), LeaveOneOut(), KFold(3)],
    "fixed": [HeldOut([0, 1]), HeldOut([4, 5]), HeldOut([0, 1], [7, 8, 9])],
}


def assert_as_alone(together, optimizer="adam", rtol=1e-7, **options):
    alone = copy.deepcopy(together)
    options = {"steps": STEPS, "progress": False} | options
    results = fit_batch(together, optimizer, **options)
    lone = [fit_mll(mll, optimizer, **options) for mll in alone]
    assert_same_fits(together, results, alone, lone, rtol)
    assert len(results[0].history) == options["steps"]
    return alone


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONINGS)
def test_each_member_is_as_its_lone_fit(name):
    together = [objective(seed, c) for seed, c in enumerate(CONDITIONINGS[name])]
    alone = assert_as_alone(together)
    # Draws go on from where the lone fit's would.
    values = [
        mll(mll.model.train()(*mll.model.train_inputs), mll.model.train_targets).item()
        for mll in (*together, *alone)
    ]
    assert values[:3] == pytest.approx(values[3:], rel=1e-6, abs=1e-6)


KERNELS = [
    {"kernel": "rq"}, {"kernel": "matern", "ard": False}, {"kernel": "spectral_mixture"},
    {"kernel": "deep"}, {"mean": "mlp"}, {"kernel": gpytorch.kernels.LinearKernel()},
]  # fmt: skip


@pytest.mark.parametrize("options", KERNELS, ids=str)
def test_every_kernel_and_mean(options):
    assert_as_alone([objective(seed, **copy.deepcopy(options)) for seed in range(3)], steps=5)


@pytest.mark.slow
def test_priors_and_missing_targets_count_as_alone():
    def regularized(seed):
        mll = objective(seed, kernel="rbf", n=12)
        mll.model.likelihood.register_prior(
            "noise_prior", gpytorch.priors.GammaPrior(1.1, 5.0), "noise"
        )
        mll.model.train_targets[seed] = float("nan")
        if seed == 1:  # another number of held-out points than its neighbours
            mll.model.train_targets[3:6] = float("nan")
        return mll

    with gpytorch.settings.observation_nan_policy("mask"):
        assert_as_alone([regularized(seed) for seed in range(3)])


def test_limits_without_a_transform_are_kept():
    def noiseless(seed):
        x = torch.rand(12, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model = SingleTaskGP(x, x.sum(-1, keepdim=True))  # its noise and lengthscales are bounded
        return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))

    for steps in (1, STEPS):
        together = [noiseless(seed) for seed in range(2)]
        assert_as_alone(together, steps=steps, lr=0.1)
        noise = float(together[0].likelihood.noise.detach().min())
        assert noise == pytest.approx(1e-4) if steps == 1 else noise > 1e-4  # first at its bound


def test_other_optimizers_and_frozen_parameters_of_single_precision():
    together = [objective(seed, dtype=torch.float32) for seed in range(2)]
    start = together[0].likelihood.raw_noise.item()
    for mll in together:
        mll.likelihood.requires_grad_(False)
    assert_as_alone(together, torch.optim.SGD, rtol=1e-4, steps=8, lr=0.02)
    assert together[0].likelihood.raw_noise.item() == start


class Fragile(torch.nn.Module):
    """Scales its input; gives NaN once the scale has moved by more than a limit."""

    def __init__(self, limit):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("limit", torch.tensor(limit, dtype=torch.float64))

    def forward(self, x):
        return torch.where((self.scale - 1).abs() < self.limit, self.scale * x, torch.nan)


def fragile(seed, limit, kind=Fragile):
    kernel = DeepKernel(kind(limit), gpytorch.kernels.RBFKernel(), residual=False)
    return objective(seed, kernel=gpytorch.kernels.ScaleKernel(kernel))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(9.0, 0.055, 9.0), (0.055, 0.035, 9.0), (0.055, 0.055)])
def test_a_member_that_fails_midway_keeps_its_last_good_point(limits):
    together = [fragile(seed, limit) for seed, limit in enumerate(limits)]
    alone = copy.deepcopy(together)
    with pytest.warns(RuntimeWarning, match="stopped after"):
        results = fit_batch(together, steps=STEPS, progress=False)
    with pytest.warns(RuntimeWarning, match="stopped after"):
        lone = [fit_mll(mll, "adam", steps=STEPS, progress=False) for mll in alone]
    assert 0 < len(results[1].history) < STEPS
    assert "network output" in results[1].message
    assert_same_fits(together, results, alone, lone)


def test_a_member_that_cannot_start_is_left_as_it_was():
    together = [fragile(0, 9.0), fragile(1, 0.0), fragile(2, 9.0)]
    alone = [copy.deepcopy(together[0]), copy.deepcopy(together[2])]
    state = copy.deepcopy(together[1].state_dict())
    with pytest.warns(RuntimeWarning, match="stopped after 0 steps"):
        results = fit_batch(together, steps=5, progress=False)
    lone = [fit_mll(mll, "adam", steps=5, progress=False) for mll in alone]
    assert_same_fits([together[0], together[2]], [results[0], results[2]], alone, lone)
    assert (results[1].history, results[1].problem) == ([], "stopped")
    assert results[1].objective != results[1].objective
    assert "network output" in results[1].message
    torch.testing.assert_close(together[1].state_dict(), state, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_retires_its_member():
    class Pole(Fragile):
        def forward(self, x):  # finite everywhere, of infinite slope at the limit
            return x * (1 + (self.scale - self.limit).abs().sqrt())

    together = [fragile(0, 3.0, Pole), fragile(1, 1.0, Pole)]
    with pytest.warns(RuntimeWarning, match="stopped after 0 steps"):
        results = fit_batch(together, steps=3, progress=False)
    assert "gradient" in results[1].message
    assert len(results[0].history) == 3


def test_an_interrupt_keeps_what_was_reached():
    class Interrupting(torch.optim.Adam):
        calls = 0

        def step(self, closure=None):
            Interrupting.calls += 1
            if Interrupting.calls == 4:
                raise KeyboardInterrupt
            return super().step(closure)

    together = [objective(seed) for seed in range(2)]
    alone = copy.deepcopy(together)
    with pytest.raises(KeyboardInterrupt):
        fit_batch(together, Interrupting, steps=STEPS, progress=False)
    for mll in alone:
        fit_mll(mll, "adam", steps=3, progress=False)
    for mll, other in zip(together, alone, strict=True):
        parameters = list(mll.parameters()), list(other.parameters())
        torch.testing.assert_close(*parameters, rtol=1e-7, atol=1e-8)


class Centred(gpytorch.kernels.RBFKernel):
    """A kernel that mixes the members of a batch."""

    def forward(self, x1, x2, **params):
        centre = x1.reshape(-1, x1.shape[-1])[0]
        return super().forward((x1 - centre).abs(), (x2 - centre).abs(), **params)


def test_batches_shrink_as_models_grow():
    for options in ({}, {"device": "cuda"}):
        sizes = [suggest_batch_size(n, **options) for n in (10, 100, 200, 300, 3000, 10**5)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1] == 1
    with pytest.raises(ArgumentError, match="num_data"):
        suggest_batch_size(0)


def test_bad_arguments():
    mll = objective(0)
    other = ConditionalMarginalLogLikelihood(gpytorch.likelihoods.GaussianLikelihood(), mll.model)
    upstream = gpytorch.mlls.ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    subset = objective(0, RandomHoldout(0.2, condition_on=3))
    neighbors = objective(0, NearestNeighbors())
    solvers = [objective(seed) for seed in range(2)]
    solvers[0].solver, solvers[1].solver = "cg", ConjugateGradients(tolerance=1e-3)
    for mlls, options, error, match in (
        ([], {}, ArgumentError, "at least one"), ([mll, mll], {}, ArgumentError, "twice"),
        ([mll], {"steps": 0}, ArgumentError, "steps"),
        ([mll], {"optimizer": "lbfgs"}, UnsupportedError, "fit_mll"),
        ([upstream], {}, UnsupportedError, "ConditionalMarginalLogLikelihood"),
        ([other], {}, UnsupportedError, "likelihood"),
        ([subset], {}, UnsupportedError, "conditioned on a part"),
        ([neighbors], {}, UnsupportedError, "conditioned on a part"),
        ([mll, objective(1, n=15)], {}, UnsupportedError, "different shapes"),
        ([mll, objective(1, kernel="rbf")], {}, UnsupportedError, "at the same place"),
        ([mll, objective(1, hidden=(6, 4))], {}, UnsupportedError, "shapes"),
        *(([mll, other], {}, UnsupportedError, r"solver=.*fit_mll") for other in solvers),
        ([objective(k, kernel=Centred()) for k in (0, 1)], {}, UnsupportedError, "covariance"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            fit_batch(mlls, progress=False, **options)
    with pytest.raises(ArgumentError, match="device"):
        suggest_batch_size(10, "no device")
