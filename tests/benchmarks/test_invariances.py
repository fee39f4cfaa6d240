"""Affine versions of images, averaged networks, and what the evidence says of ranges."""

import math

import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood

from benchmarks.evidence.invariances import AffineAugmentation, AveragedNetwork
from gpclml.curvature import Full, FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.fit import fit_online
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import cnn, dense, points, precisions, ratio, sizes_of, softmax_columns


def ramp(size=33):
    """Two images whose values are the coordinates x and y of their pixels."""
    y, x = torch.meshgrid(
        *[torch.linspace(-1, 1, size).double() * (1 - 1 / size)] * 2, indexing="ij"
    )
    return torch.stack([x, y]).unsqueeze(1)


def maps(name, value, samples=2000):
    """The linear map and the offset of each version, read off the middle of the ramps."""
    augmentation = AffineAugmentation({name: value}, samples)
    made = augmentation(ramp()).detach().squeeze(2)  # (2, S, H, W)
    middle = slice(14, 19)
    at = ramp()[:, 0, middle, middle].flatten(1).mT
    design = torch.cat([at, torch.ones(len(at), 1)], dim=1)
    return [
        torch.linalg.lstsq(design, image[:, middle, middle].flatten(1).mT)[0].mT for image in made
    ]


def test_rotations_are_uniform_within_their_range():
    first_image = maps("rotation", 0.4)[0]  # x at the rotated place: cos x - sin y
    angle = torch.atan2(-first_image[:, 1], first_image[:, 0])
    torch.testing.assert_close(first_image[:, :2].norm(dim=1), torch.ones(2000).double())
    assert 0.39 < float(angle.abs().max()) <= 0.4 + 1e-6
    assert AffineAugmentation({"rotation": 0.25}).ranges() == {"rotation": pytest.approx(0.25)}
    assert float(angle.mean()) == pytest.approx(0, abs=4 * 0.4 / math.sqrt(3 * 2000))
    assert float(angle.std()) == pytest.approx(0.4 / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    ("name", "first_image"),
    [
        ("translation_x", lambda u: (1, 0, u)),
        ("translation_y", lambda u: (1, 0, 0)),
        ("scale", lambda u: (math.exp(u), 0, 0)),
        ("stretch", lambda u: (math.exp(u), 0, 0)),
        ("shear", lambda u: (math.cosh(u), math.sinh(u), 0)),
    ],
)
def test_the_other_generators(name, first_image):
    first = maps(name, 0.2, 50)[0]
    u = 0.2 * (
        2 * torch.rand(100, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    )
    expected = torch.tensor([first_image(float(step)) for step in u[:50, 0]]).double()
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)


def test_averages_and_their_curvature():
    network, event = cnn()
    network = AveragedNetwork(network)
    x = points((3, *event), n=4)
    mean = torch.stack([network.network(x[:, s]) for s in range(3)]).mean(0)
    torch.testing.assert_close(network(x), mean)
    delta = precisions(network)
    exact = ratio(dense(network, x), delta, sizes_of(network))
    for structure in (Full(), FunctionSpace()):
        value = structure.of(network, x, softmax_columns).log_det_ratio(delta)
        torch.testing.assert_close(value, exact)


def test_kronecker_of_an_average_sums_gradients_and_averages_inputs():
    linear = torch.nn.Linear(3, 2, bias=False).double()
    x = points((5, 3), n=1)  # one point, five versions: the factors are exact
    exact = ratio(dense(AveragedNetwork(linear), x), {"network.weight": torch.tensor(0.7).double()},
                  {"network.weight": 6})  # fmt: skip
    curvature = Kronecker("reduce").of(AveragedNetwork(linear), x, softmax_columns)
    value = curvature.log_det_ratio({"network.weight": torch.tensor(0.7).double()})
    torch.testing.assert_close(value, exact)


def rotated_objective(structure, outputs, samples=3):
    network, event = cnn()
    network = AveragedNetwork(network)
    augmentation = AffineAugmentation({"rotation": 0.5, "scale": 0.2}, samples)
    prior = GaussianWeightPrior(network, "layer", 0.3)
    model = LinearizedNetwork(network, prior, augmentation)
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 6, structure, outputs=outputs)
    return mll, points(event, n=6), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("structure", "outputs"),
    [(FunctionSpace(), "single"), (Full(), "all"), (Kronecker("reduce"), "all")],
)
def test_the_gradient_in_ranges_is_that_of_finite_differences(structure, outputs):
    def value(log_ranges):
        mll, x, y = rotated_objective(structure, outputs)  # the same draws each time
        augmentation = mll.model.augmentation.double()
        with torch.no_grad():
            augmentation.log_ranges.copy_(log_ranges)
        return mll(mll.model(x), y), augmentation.log_ranges

    start = torch.tensor([0.5, 0.2]).double().log()
    number, parameter = value(start)
    (gradient,) = torch.autograd.grad(number, parameter)
    step = 1e-5
    for i in range(2):
        away = step * torch.nn.functional.one_hot(torch.tensor(i), 2)
        ends = [float(value(start + side * away)[0].detach()) for side in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        assert float(gradient[i]) == pytest.approx(difference, rel=1e-5, abs=1e-8)


@pytest.mark.slow
def test_online_training_moves_ranges_and_resumes(tmp_path):
    def ranges(epochs, checkpoint=None):
        mll, x, y = rotated_objective(FunctionSpace(), "single")
        fit_online(
            mll, x, y, epochs=epochs, batch_size=3, burn_in=1, hyper_steps=2, progress=False,
            checkpoint=checkpoint,
        )  # fmt: skip
        return mll.model.augmentation.log_ranges

    whole = ranges(6)
    assert not torch.equal(whole, ranges(3, tmp_path / "a.pt"))
    assert torch.equal(whole, ranges(6, tmp_path / "a.pt"))
