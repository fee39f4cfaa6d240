"""DeepKernelGP as a BoTorch model: posteriors, transforms, states, outputs, what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.posteriors import GPyTorchPosterior
from gpytorch.priors import LogNormalPrior

from deep_kernel_cases import BARE, KERNELS, SHAPES, data, make, members, moved, points
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.kernels.networks import reset_network
from gpclml.models import find_networks
from gpclml.models.botorch import DeepKernelGP

pytestmark = pytest.mark.filterwarnings(
    "ignore::botorch.exceptions.warnings.InputDataWarning",  # of single precision
)


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
    for place, output, alone in members(model, *data(batch_shape, m)):
        expected = alone.posterior(x[:, *place])
        found = together.mean[:, *place, :, output], together.variance[:, *place, :, output]
        assert torch.allclose(found[0], expected.mean[..., 0])
        assert torch.allclose(found[1], expected.variance[..., 0])


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_at_the_points_are_those_of_finite_differences(kernel):
    for m in (1, 2):
        model = make(m=m, kernel=kernel)

        def moments(x, model=model):
            posterior = model.posterior(x)
            return posterior.mean, posterior.variance

        assert torch.autograd.gradcheck(moments, points(2, 2, 2).requires_grad_())


def test_units_of_the_data_do_not_matter():
    x, y = data(m=2)
    new = points(4, 2)
    model, other = moved(DeepKernelGP(x, y)), moved(DeepKernelGP(10 * x - 3, 7 * y + 5))
    assert isinstance(model.input_transform, Normalize)
    assert isinstance(model.outcome_transform, Standardize)
    expected, found = model.posterior(new), other.posterior(10 * new - 3)
    assert torch.allclose(found.mean, 7 * expected.mean + 5)
    assert torch.allclose(found.variance, 49 * expected.variance)
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
        found = subset.posterior(x)
        assert torch.allclose(found.mean, expected.mean[..., outputs])
        assert torch.allclose(found.variance, expected.variance[..., outputs])


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


def test_gpclml_itself_does_not_import_botorch():
    code = "import sys, gpclml, gpclml.models; assert 'botorch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("scale", [1e-7, 1e12])
def test_deviations_do_not_depend_on_the_units_of_the_outcome(scale):
    x, y = data()
    new = points(5, 2)
    expected, found = (
        moved(DeepKernelGP(x, y * size, feature_share=0.4)).posterior(new) for size in (1.0, scale)
    )
    base = torch.ones(3, 5, dtype=torch.float64)
    draws = [one.rsample_from_base_samples(torch.Size([3]), base) for one in (expected, found)]
    deviations = [one.variance.sqrt() for one in (expected, found)]
    torch.testing.assert_close(found.mean / scale, expected.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(deviations[1] / scale, deviations[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(draws[1] / scale, draws[0], rtol=1e-5, atol=1e-6)
