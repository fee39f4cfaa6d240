"""Data from loaders: the same results as from tensors, and typed errors for what is no data."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from torch.utils.data import DataLoader, TensorDataset

from gpclml import Laplace
from gpclml.conditioning import partition_at_random
from gpclml.curvature import FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, ModelModeError, NonFiniteError, ShapeError
from gpclml.evidence.sampling import linearized_outputs, sample_sgld, sampled_outputs
from gpclml.fit import fit_hyperparameters, fit_map, fit_online
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

N, SIZE = 22, 6


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, (x.sum((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0.5).long()


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Tanh()]
    made = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8, 3)).double()
    made(data()[0])  # running statistics
    return made.eval()


def objective(structure=None, classes=3, **options):
    model = LinearizedNetwork(made := network(), GaussianWeightPrior(made, "layer"))
    likelihood = SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    return LaplaceMarginalLogLikelihood(likelihood, model, N, structure or Kronecker(), **options)


class Orders(torch.utils.data.Sampler):
    """The batches that a training with a seed takes."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        return iter(rows.tolist() for rows in partition_at_random(N, SIZE, self.generator))

    def __len__(self):
        return 4


def loader(sampler=None, points=None):
    x, y = data()
    x = x if points is None else points
    if sampler is not None:
        return DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    return DataLoader(TensorDataset(x, y), batch_size=SIZE)


def state(mll):
    return {name: value for name, value in mll.state_dict().items() if value is not None}


def assert_equal_states(one, other, **tolerance):
    for name, value in state(one).items():
        torch.testing.assert_close(value, state(other)[name], **tolerance)


@pytest.mark.parametrize("fit", [fit_map, fit_online], ids=["map", "online"])
def test_a_training_from_a_loader_is_that_from_tensors(fit):
    options = {"epochs": 3, "lr": 0.02, "progress": False}
    whole, batches = objective(), objective()
    first = fit(whole, *data(), batch_size=SIZE, seed=3, **options)
    second = fit(batches, loader(Orders(3)), **options)
    assert second.history == pytest.approx(first.history, rel=1e-12)
    assert_equal_states(batches, whole, rtol=0, atol=1e-12)


def test_online_steps_on_hyperparameters_see_all_batches_of_a_loader():
    options = {"epochs": 2, "burn_in": 1, "lr": 1e-12, "hyper_steps": 5, "progress": False}
    whole, batches = objective(), objective()
    first = fit_online(whole, *data(), **options)
    second = fit_online(batches, loader(), **options)
    assert second.objective == pytest.approx(first.objective, rel=1e-9)
    assert_equal_states(batches, whole, rtol=1e-6, atol=1e-8)
    estimate = objective(FunctionSpace())
    found = fit_online(estimate, loader(), **options)
    values = [len(x) * float(estimate.evidence_of(x, y)().detach()) for x, y in loader()]
    assert found.objective == pytest.approx(sum(values) / N)


def test_hyperparameters_from_a_loader():
    whole, batches = objective(), objective()
    first = fit_hyperparameters(whole, *data(), steps=20, progress=False)
    second = fit_hyperparameters(batches, loader(), steps=20, progress=False)
    assert second.history == pytest.approx(first.history, rel=1e-9)
    assert_equal_states(batches, whole, rtol=1e-9, atol=1e-12)


def test_evidence_of_a_loader_is_the_sum_and_that_of_all_points():
    mll = objective()
    x, y = data()
    whole = mll.evidence_of(x, y)()
    parts = [mll.evidence_of(*batch) for batch in loader()]
    for evidence in (sum(parts), mll.evidence_of(loader(), progress=False)):
        torch.testing.assert_close(evidence(), whole)
    single = objective(outputs="single").evidence_of
    with pytest.raises(ArgumentError, match="outputs"):
        single(loader(), progress=False)


def test_langevin_dynamics_from_a_loader():
    options = {"count": 2, "epochs": 2, "lr": 1e-2}
    exact = sample_sgld(objective(), *data(), progress=False, **options)
    again = sample_sgld(objective(), [data()], progress=False, **options)
    assert list(again) == list(exact)
    # A loader draws no order, so that the same noise comes earlier from the generator.
    assert not torch.equal(again["4.bias"], exact["4.bias"])
    torch.testing.assert_close(again["4.bias"].mean(), exact["4.bias"].mean(), rtol=0, atol=0.5)
    with pytest.raises(ArgumentError, match="without a length"):
        sample_sgld(objective(), Batches(), **options)


class Batches:
    """Batches of no known number."""

    def __iter__(self):
        return iter(loader())


@pytest.mark.parametrize("method", ["closed", "draws", "mode"])
def test_predictions_from_a_loader(method):
    x, y = data()
    made = network()
    posterior = Laplace(made, "classification").fit((x, y), progress=False)
    many = x.repeat(20, 1, 1, 1)
    points = DataLoader(TensorDataset(many), batch_size=99)
    for given in (points, [(x, y)] * 20):
        found = posterior.predict(given, method, draws=9, progress=False).probs
        assert torch.equal(found, posterior.predict(many, method, draws=9).probs)
    weights = {"4.bias": torch.randn(3, 3, dtype=torch.float64)}
    for outputs in (sampled_outputs, linearized_outputs):
        found = outputs(made, weights, points)
        torch.testing.assert_close(found, outputs(made, weights, many))


def once():
    yield from loader()


class Nothing:
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


_OPTIONS = {sample_sgld: {"count": 1}}
WRONG = {
    "uint8": (lambda: loader(points=data()[0].mul(9).to(torch.uint8)), ShapeError, "uint8"),
    "float32": (lambda: loader(points=data()[0].float()), ShapeError, "float32"),
    "nothing": (Nothing, ArgumentError, "no points"),
    "generator": (once, ArgumentError, "once"),
    "no pairs": (lambda: [data()[0]], ArgumentError, "sequence of tensors"),
    "fewer": (lambda: [(data()[0][:9], data()[1][:9])], ArgumentError, "num_data"),
    "unlike": (lambda: [(data()[0], data()[1][:9])], ShapeError, "9 targets"),
    "infinite": (lambda: loader(points=data()[0] / 0), NonFiniteError, "train_x"),
    "no targets": (lambda: data()[0], ArgumentError, "train_y"),
}


@pytest.mark.parametrize("fit", [fit_map, fit_online, fit_hyperparameters, sample_sgld])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_data(fit, kind):
    made, error, text = WRONG[kind]
    with pytest.raises(error, match=text):
        fit(objective(), made(), progress=False, **_OPTIONS.get(fit, {}))


@pytest.mark.parametrize("fit", [fit_map, fit_online, fit_hyperparameters])
def test_wrong_options_beside_a_loader(fit):
    for options in ({"batch_size": 5}, {"train_y": data()[1]}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            fit(objective(), loader(), progress=False, **options)
    with pytest.raises(ArgumentError, match="partition"):
        fit_online(objective(), loader(), partition="class", progress=False)
    with pytest.raises(ShapeError, match="3 outputs, expected 5"):
        fit(objective(classes=5), loader(), progress=False)


def test_networks_that_a_curvature_refuses():
    mll = objective()
    mll.model.network.train()
    for call in (
        lambda: mll.evidence_of(loader(), progress=False),
        lambda: mll(mll.model(data()[0]), data()[1]),
    ):
        with pytest.raises(ModelModeError, match="BatchNorm2d"):
            call()
    regression = LaplaceMarginalLogLikelihood(GaussianLikelihood().double(), mll.model, N)
    with pytest.raises(ShapeError, match="target"):
        fit_map(regression, loader(), progress=False)
    with pytest.raises(ArgumentError, match="target"):
        mll.evidence_of(data()[0])
