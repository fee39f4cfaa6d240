"""DeepKernelGP as a BoTorch model: posteriors, states, conditioning, fantasies and fits."""

import copy
import itertools
import pickle

import pytest
import torch
from botorch.acquisition import qKnowledgeGradient, qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import AdditiveKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import LogNormalPrior

from gpclml.conditioning import LastPoints, LeaveOneOut
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.kernels.networks import reset_network
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import find_networks
from gpclml.models.botorch import DeepKernelGP

pytestmark = [
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

BARE = {"input_transform": None, "outcome_transform": None}
KERNELS = ("deep", "deep_bottleneck", "deep_joint")
SHAPES = [
    pytest.param(torch.Size(batch), m, id=f"batch{list(batch)}-outputs{m}")
    for batch, m in itertools.product([(), (2,)], [1, 2])
]


def data(batch_shape=(), m=1, n=8, dtype=torch.float64):
    """Inputs in the unit square and standardized outcomes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*batch_shape, n, 2, generator=generator, dtype=dtype)
    noise = torch.randn(*batch_shape, n, m, generator=generator, dtype=dtype)
    y = (5 * x[..., :1] + torch.arange(m, dtype=dtype)).sin() + x[..., 1:] ** 2 + 0.1 * noise
    return x, (y - y.mean(-2, keepdim=True)) / y.std(-2, keepdim=True)


def points(*shape, dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=dtype)


def make(batch_shape=(), m=1, kernel="deep", observed_noise=False, dtype=torch.float64, **options):
    """A model whose networks count and whose members differ."""
    x, y = data(batch_shape, m, dtype=dtype)
    noise = 0.01 + 0.02 * points(*y.shape, dtype=dtype) if observed_noise else None
    options = {"feature_share": 0.4} | options
    return moved(DeepKernelGP(x, y, noise, kernel=kernel, **options))


@torch.no_grad()
def moved(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(0.3 * draw.to(parameter))
    return model


def on_data(model, x, y, noise=None, member=()):
    """A model of other data, its units left alone, with the parameters of one or of a member."""
    additive = any(isinstance(module, AdditiveKernel) for module in model.modules())
    deep = model.covar_module.base_kernel
    kernel = KERNELS[0] if additive else KERNELS[2 if deep.residual else 1]
    other = DeepKernelGP(x, y, noise, kernel=kernel, **BARE)
    with torch.no_grad():
        for parameter, given in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(given[member])
    return other


def members(model, x, y, noise=None):
    """The index of each member of a batch, its output, and a model of its data alone."""
    for *index, output in itertools.product(*map(range, y.shape[:-2]), range(y.shape[-1])):
        index, columns = tuple(index), slice(output, output + 1)
        its_noise = None if noise is None else noise[index][..., columns]
        member = (*index, output) if y.shape[-1] > 1 else index
        alone = on_data(model, x[index], y[index][..., columns], its_noise, member)
        yield index, output, alone


def outputs_last(model, values):
    """Outcomes that a model holds, or their noise, ``(*batch, n, m)``."""
    return values.detach().mT if model.num_outputs > 1 else values.detach().unsqueeze(-1)


def noise_of(model):
    """The observed noise variances in the units of the outcomes that the model holds."""
    is_fixed = isinstance(model.likelihood, FixedNoiseGaussianLikelihood)
    return outputs_last(model, model.likelihood.noise) if is_fixed else None


def check_same(posterior, expected, index=(), output=slice(None)):
    for name in ("mean", "variance"):
        values = getattr(posterior, name)[index][..., output]
        assert torch.allclose(values, getattr(expected, name).reshape_as(values), atol=1e-7)


@pytest.mark.parametrize(
    ("kernel", "dtype", "observed_noise"),
    [("deep", torch.float32, False), ("deep_bottleneck", torch.float64, True)],
)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_posteriors_have_botorchs_shapes(batch_shape, m, kernel, dtype, observed_noise):
    model = make(batch_shape, m, kernel, observed_noise, dtype)
    lead = model._aug_batch_shape
    assert all(p.shape[: len(lead)] == lead for p in model.parameters())
    for shape in [(*batch_shape, 3), (4, *batch_shape, 3), (3,), (1, 3)]:
        x = points(*shape, 2, dtype=dtype)
        expected = (*torch.broadcast_shapes(shape[:-1], batch_shape), 3, m)
        posterior = model.posterior(x)
        assert isinstance(posterior, GPyTorchPosterior)
        assert posterior.mean.shape == posterior.variance.shape == expected
        assert posterior.mean.dtype == dtype
        assert posterior.rsample(torch.Size([2])).shape == (2, *expected)
        noisy = model.posterior(x, observation_noise=True).variance
        noise = model.likelihood.noise.mean(-1, keepdim=True)  # (*batch, [m,] 1)
        noise = noise.mT if m > 1 else noise.unsqueeze(-2)
        added = noise * model.outcome_transform.stdvs**2
        assert torch.allclose(noisy - posterior.variance, added.expand(expected), atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_a_member_is_a_model_of_its_data_alone(batch_shape, m, kernel):
    model = make(batch_shape, m, kernel, **BARE)
    x = points(3, *batch_shape, 4, 2)
    together = model.posterior(x)
    for index, output, alone in members(model, *data(batch_shape, m)):
        expected = alone.posterior(x[:, *index])
        check_same(together, expected, (slice(None), *index), output)


def test_the_posterior_is_that_of_its_formula():
    model = make(**BARE)
    with torch.no_grad():
        deep = model.covar_module.base_kernel
        first, second = deep.base_kernel.kernels
        x, new = model.train_inputs[0], points(3, 2)
        every = torch.cat([x, new])
        scaled = every / first.lengthscale
        features = deep.feature_extractor(every) / second.base_kernel.lengthscale
        alpha = second.base_kernel.alpha
        K = (-0.5 * torch.cdist(scaled, scaled) ** 2).exp()
        rational = (1 + torch.cdist(features, features) ** 2 / (2 * alpha)) ** -alpha
        K = model.covar_module.outputscale * (K + second.outputscale * rational)
        n, mean = len(x), model.mean_module.constant
        noisy = K[:n, :n] + model.likelihood.noise * torch.eye(n)
        weights = torch.linalg.solve(noisy, K[:n, n:])
        posterior = model.posterior(new)
    expected = mean + weights.T @ (model.train_targets - mean)
    assert torch.allclose(posterior.mean[:, 0], expected)
    covariance = K[n:, n:] - K[n:, :n] @ weights
    assert torch.allclose(posterior.distribution.covariance_matrix, covariance)


@pytest.mark.parametrize("shape", [(4,), (5, 1), (3, 2, 2)])
@pytest.mark.parametrize(("m", "kernel"), [(1, "deep_joint"), (2, "deep_joint"), (2, "deep")])
def test_posteriors_and_their_gradients_are_those_of_gpytorch(m, kernel, shape):
    model = make((), m, kernel, **BARE)
    x, y = data((), m)
    reference = SingleTaskGP(
        x, y, covar_module=model.covar_module, mean_module=model.mean_module,
        likelihood=model.likelihood, **BARE,
    )  # fmt: skip
    new, results = points(*shape, 2).requires_grad_(), []
    for known in (model, reference):
        normal = known.posterior(new).distribution
        value = normal.mean.sum() + normal.covariance_matrix.square().sum()
        (gradient,) = torch.autograd.grad(value, new)
        results.append((normal.mean, normal.covariance_matrix, gradient))
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=1e-10)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_starts_as_single_task_gp():
    for shape, m in (((), 1), ((), 2), ((2,), 2)):
        x, y = data(shape, m)
        model, plain = DeepKernelGP(x, y), SingleTaskGP(x, y, input_transform=Normalize(2))
        new = points(*shape, 5, 2)
        assert torch.allclose(model.posterior(new).mean, plain.posterior(new).mean, atol=2e-3)
        ours, theirs = model.posterior(new).variance, plain.posterior(new).variance
        assert torch.allclose(ours, theirs, atol=2e-3)
        ard = model.covar_module.base_kernel.base_kernel.kernels[0]
        assert isinstance(ard.lengthscale_prior, LogNormalPrior)
        assert torch.equal(ard.lengthscale, plain.covar_module.lengthscale)
        assert torch.equal(model.likelihood.noise, plain.likelihood.noise)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_at_the_points_are_those_of_finite_differences(kernel):
    for m in (1, 2):
        model = make(m=m, kernel=kernel)

        def moments(x, model=model):
            posterior = model.posterior(x)
            return posterior.mean, posterior.variance

        assert torch.autograd.gradcheck(moments, points(2, 2, 2).requires_grad_())


@pytest.mark.parametrize(("m", "scale", "shift"), [(2, 7.0, 5.0), (1, 1e-7, 0.0), (1, 1e12, 0.0)])
def test_units_of_the_data_do_not_matter(m, scale, shift):
    x, y = data(m=m)
    model, other = moved(DeepKernelGP(x, y)), moved(DeepKernelGP(10 * x - 3, scale * y + shift))
    assert isinstance(model.input_transform, Normalize)
    assert isinstance(model.outcome_transform, Standardize)
    new, base = points(5, 2), torch.ones(3, 5, *[m] * (m > 1), dtype=torch.float64)
    expected, converted = (
        (p.mean, p.variance.sqrt(), p.rsample_from_base_samples(torch.Size([3]), base))
        for p in (model.posterior(new), other.posterior(10 * new - 3))
    )
    for value, reference, moved_by in zip(converted, expected, (shift, 0, shift), strict=True):
        torch.testing.assert_close((value - moved_by) / scale, reference, rtol=1e-5, atol=1e-6)
    bare = DeepKernelGP(x, y, **BARE)
    assert not hasattr(bare, "input_transform")
    assert not hasattr(bare, "outcome_transform")


@pytest.mark.parametrize("kernel", KERNELS)
def test_states_and_copies(kernel):
    batch_shape, m = (2,), 2
    model = make(batch_shape, m, kernel)
    x = points(*batch_shape, 3, 2)
    expected = model.posterior(x).mean
    other = DeepKernelGP(*data(batch_shape, m), kernel=kernel, seed=1)
    assert not torch.allclose(other.posterior(x).mean, expected)
    other.load_state_dict(model.state_dict())
    assert torch.allclose(other.posterior(x).mean, expected)
    model.train()  # as for SingleTaskGP, caches of predictions cannot be pickled
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.posterior(x).mean, expected)


@pytest.mark.parametrize(
    ("batch_shape", "kernel", "observed_noise"),
    [((), "deep", False), ((2,), "deep_bottleneck", True)],
)
def test_subsets_of_outputs(batch_shape, kernel, observed_noise):
    model = make(batch_shape, 3, kernel, observed_noise)
    x = points(*batch_shape, 3, 2)
    expected = model.posterior(x)
    for outputs in ([1], [2, 0], [0, 1, 2]):
        subset = model.subset_output(outputs)
        assert isinstance(subset, DeepKernelGP)
        assert subset.num_outputs == len(outputs)
        posterior = subset.posterior(x)
        assert torch.allclose(posterior.mean, expected.mean[..., outputs])
        assert torch.allclose(posterior.variance, expected.variance[..., outputs])


def test_networks_start_alike_and_are_drawn_anew_alike():
    model = DeepKernelGP(*data(m=2), kernel="deep_bottleneck", hidden=(5,), num_features=3)
    [network] = find_networks(model)
    before = [parameter.clone() for parameter in network.parameters()]
    assert all(torch.equal(p[0], p[1]) for p in before)
    assert {tuple(p.shape) for p in before} == {(2, 5, 2), (2, 5), (2, 3, 5), (2, 3)}
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    reset_network(network, torch.Generator().manual_seed(4))
    assert torch.equal(torch.rand(2), expected)
    for old, new in zip(before, network.parameters(), strict=True):
        assert torch.equal(new[0], new[1])
        assert not torch.equal(old, new)
    with torch.no_grad():
        assert network(points(7, 1, 4, 2)).shape == (7, 2, 4, 3)


def test_what_is_refused():
    x, y = data()
    with pytest.raises(UnknownNameError, match="Did you mean 'deep'"):
        DeepKernelGP(x, y, kernel="dep")
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ArgumentError, match="feature_share"):
            DeepKernelGP(x, y, feature_share=share)
    with pytest.raises(ArgumentError, match="sizes"):
        DeepKernelGP(x, y, hidden=(0,))


CASES = [("deep", False), ("deep_bottleneck", True)]


@pytest.mark.parametrize(("kernel", "observed_noise"), CASES)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_conditioning_is_a_model_of_all_data(batch_shape, m, kernel, observed_noise):
    model = make(batch_shape, m, kernel, observed_noise, **BARE)
    x, y = data(batch_shape, m)
    test = points(*batch_shape, 4, 2)
    model.eval()  # not asked for predictions before
    new_x, new_y = points(*batch_shape, 3, 2, seed=2), points(*batch_shape, 3, m, seed=3)
    noise = {"noise": torch.full_like(new_y, 0.04)} if observed_noise else {}
    conditioned = model.condition_on_observations(new_x, new_y, **noise)
    every = torch.cat([noise_of(model), noise["noise"]], -2) if observed_noise else None
    fresh = on_data(model, torch.cat([x, new_x], -2), torch.cat([y, new_y], -2), every)
    check_same(conditioned.posterior(test), fresh.posterior(test))


@pytest.mark.parametrize(("kernel", "observed_noise"), CASES)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_fantasies_are_exact_conditioning(batch_shape, m, kernel, observed_noise):
    model = make(batch_shape, m, kernel, observed_noise, **BARE)
    test, new_x = points(*batch_shape, 4, 2), points(*batch_shape, 2, 2, seed=4)
    fantasies = model.fantasize(new_x, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    x, y = data(batch_shape, m)
    drawn = outputs_last(fantasies, fantasies.train_targets)[..., -2:, :]
    assert drawn.shape == (3, *batch_shape, 2, m)
    assert float(drawn.std(0).min()) > 0
    posterior = fantasies.posterior(test)
    assert posterior.mean.shape == (3, *batch_shape, 4, m)
    known = noise_of(fantasies)
    for fantasy in range(3):
        every_y = torch.cat([y, drawn[fantasy]], -2)
        noise = None if known is None else known.expand(3, *every_y.shape)[fantasy]
        for index, output, alone in members(model, torch.cat([x, new_x], -2), every_y, noise):
            check_same(posterior, alone.posterior(test[index]), (fantasy, *index), output)


@pytest.mark.parametrize("m", [1, 2])
def test_fantasies_at_batches_of_points(m):
    model = make((), m, **BARE)
    x, test = points(5, 2, 2, seed=4), points(4, 2)
    fantasies = model.fantasize(x, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    batched = fantasies.posterior(test)
    assert batched.mean.shape == (3, 5, 4, m)
    drawn = outputs_last(fantasies, fantasies.train_targets)[2, 1, -2:]
    alone = model.condition_on_observations(x[1], drawn)
    check_same(batched, alone.posterior(test), (2, 1))
    further = fantasies.condition_on_observations(points(1, 2), points(1, m))
    assert further.posterior(test).mean.shape == (3, 5, 4, m)


@pytest.mark.slow
def test_gradients_through_fantasies():
    acquisition = qKnowledgeGradient(make(), num_fantasies=2)
    assert torch.autograd.gradcheck(acquisition, points(1, 3, 2).requires_grad_())


OBJECTIVES = {
    "clml": ConditionalMarginalLogLikelihood,
    "lml": lambda *args: ConditionalMarginalLogLikelihood(*args, LastPoints(0)),
    "loo": lambda *args: ConditionalMarginalLogLikelihood(*args, LeaveOneOut()),
    "gpytorch-lml": ExactMarginalLogLikelihood,
    "gpytorch-loo": LeaveOneOutPseudoLikelihood,
}
FEW = {"optimizer_kwargs": {"options": {"maxiter": 6}}, "max_attempts": 1}


def values(mll):
    mll.train()
    with torch.no_grad():
        if hasattr(mll, "compute_custom_loss"):
            return -mll.compute_custom_loss()
        model = mll.model
        return mll(model(*model.train_inputs), model.train_targets)


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning")
@pytest.mark.parametrize(
    ("name", "kernel"), list(zip(OBJECTIVES, (*KERNELS, *KERNELS[:2]), strict=True))
)
def test_every_objective_is_improved(name, kernel):
    batch_shape, m = (2,), 2
    model = moved(DeepKernelGP(*data(batch_shape, m), kernel=kernel, feature_share=0.3))
    mll = OBJECTIVES[name](model.likelihood, model)
    before, [network] = values(mll), find_networks(model)
    weights = [parameter.clone() for parameter in network.parameters()]
    fit_gpytorch_mll(mll, **FEW)
    assert not mll.training
    after = values(mll)
    assert after.shape == model._aug_batch_shape
    assert (after > before).all()
    moves = [(new != old).any() for new, old in zip(network.parameters(), weights, strict=True)]
    assert sum(moves) >= len(moves) - 1  # a shift of all features, the last bias, changes nothing


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_are_fitted_each_by_itself(kernel):
    x, y = data(m=2)
    model = moved(DeepKernelGP(x, y, kernel=kernel, feature_share=0.3, **BARE))
    ends = []
    for member in (model, *(alone for *_, alone in members(model, x, y))):
        mll = ConditionalMarginalLogLikelihood(member.likelihood, member)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}}, max_attempts=1)
        ends.append(values(mll))
    assert torch.allclose(ends[0], torch.stack(ends[1:]), atol=1e-5)


@pytest.mark.slow
def test_acquisition_functions_are_optimized():
    (x, y), q = data(n=12), 3
    model = DeepKernelGP(x, y, feature_share=0.3)
    fit_gpytorch_mll(ConditionalMarginalLogLikelihood(model.likelihood, model), **FEW)
    acquisition = qLogExpectedImprovement(model, best_f=y.max())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    best, value = optimize_acqf(acquisition, bounds, q, num_restarts=2, raw_samples=16)
    assert best.shape == (q, 2)
    assert ((best >= 0) & (best <= 1)).all()
    with torch.no_grad():
        assert float(acquisition(best)) == pytest.approx(float(value))
        assert float(value) > float(acquisition(points(200, q, 2)).max()) - 1e-3
