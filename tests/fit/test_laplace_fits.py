"""Networks: the mode of the weights, hyperparameters, both together, and data from loaders."""

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from torch.utils.data import DataLoader, TensorDataset

from gpclml import Laplace
from gpclml.conditioning import partition_at_random
from gpclml.curvature import Full, FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, DataError, ModelModeError, NonFiniteError, ShapeError
from gpclml.evidence.sampling import linearized_outputs, sample_sgld, sampled_outputs
from gpclml.fit import fit_hyperparameters, fit_map, fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork


def linear(delta=2.0, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)
    network = torch.nn.Linear(3, 1, bias=False).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", delta))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 40, Full())
    mode = torch.linalg.solve(x.mT @ x / noise + delta * torch.eye(3), x.mT @ y / noise)
    return mll, x, y, mode


@pytest.mark.slow
def test_the_mode_of_a_linear_model():
    mll, x, y, mode = linear()
    fit = fit_map(mll, x, y, epochs=400, lr=0.05, final_lr=1e-4, progress=False)
    assert len(fit.history) == 400
    assert fit.objective == fit.history[-1] > fit.history[0]
    torch.testing.assert_close(mll.model.network.weight[0].detach(), mode, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_hyperparameters_at_fixed_weights_reach_a_stationary_point():
    mll, x, y, mode = linear()
    with torch.no_grad():
        mll.model.network.weight.copy_(mode)
    before = float(mll(mll.model(x), y).detach())
    fit = fit_hyperparameters(mll, x, y, steps=300, batch_size=9)
    after = fit.objective
    assert fit.history[0] == pytest.approx(before, abs=1e-9)
    assert len(fit.history) == 300
    assert torch.equal(mll.model.network.weight[0].detach(), mode)
    value = mll(mll.model(x), y)
    assert after == pytest.approx(float(value.detach()), abs=1e-9)
    assert after > before
    hyper = [mll.model.prior.log_precision, mll.likelihood.raw_noise]
    for gradient in torch.autograd.grad(value, hyper):
        assert float(gradient.abs().max()) < 1e-3


def test_batches_are_drawn_by_the_seed():
    ends = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        mll, x, y, _ = linear()
        fit_map(mll, x, y, epochs=2, batch_size=7, seed=seed, lr=0.1, progress=False)
        ends.append(mll.model.network.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


FITS = [fit_map, fit_online, fit_hyperparameters]


@pytest.mark.parametrize("fit", FITS)
def test_bad_arguments(fit):
    mll, x, y, _ = linear()
    before = [p.clone() for p in mll.parameters()]
    spoiled_x, spoiled_y = x.clone(), y.clone()
    spoiled_x[1, 0], spoiled_y[3] = torch.inf, torch.nan
    cases = [
        (x, y, {"batch_size": 0}, ArgumentError, "batch_size"),
        (x, y, {"lr": 0}, ArgumentError, "lr"),
        (x, y[1:], {}, ShapeError, "train_y"),
        (x[1:], y[1:], {}, ArgumentError, "num_data = 40"),
        (spoiled_x, y, {}, NonFiniteError, "train_x: got 1 of .* not finite"),
        (x, spoiled_y, {}, NonFiniteError, "train_y: got 1 of .* not finite"),
    ]
    if fit is not fit_hyperparameters:
        cases += [
            (x, y, {"epochs": 0}, ArgumentError, "epochs"),
            (x, y, {"final_lr": 0}, ArgumentError, "final_lr"),
        ]
    if fit is fit_online:
        bad = {"hyper_steps": 0, "every": 0, "hyper_lr": 0.0, "burn_in": -1}
        cases += [(x, y, {name: value}, ArgumentError, name) for name, value in bad.items()]
    for x_given, y_given, options, error, match in cases:
        with pytest.raises(error, match=match):
            fit(mll, x_given, y_given, progress=False, **options)
    # Nothing is trained before the data are checked.
    assert all(map(torch.equal, mll.parameters(), before))
    if fit is not fit_hyperparameters:
        with pytest.raises(NonFiniteError, match="Lower lr"):
            fit(mll, x, y, lr=1e200, epochs=5, progress=False)
    for parameter in (mll.model.prior.log_precision, mll.likelihood.raw_noise):
        parameter.requires_grad_(False)
    if fit is not fit_map:
        with pytest.raises(ArgumentError, match="no trainable hyperparameter"):
            fit(mll, x, y, progress=False)


# ------------------------------------------------------------------ weights and hyperparameters


NOISE = 0.2


def waves():
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(60, 1, generator=generator, dtype=torch.float64) - 3
    noise = NOISE * torch.randn(60, generator=generator, dtype=torch.float64)
    return x, x[:, 0].sin() + noise


def regression(network=None, **options):
    network = (network or MLP([1, 20, 1], torch.nn.Tanh)).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 1.0
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer"))
    return LaplaceMarginalLogLikelihood(likelihood, model, 60, **options)


def fit(mll, data, **options):
    options = {"epochs": 60, "lr": 0.02, "burn_in": 10, "every": 5, "progress": False} | options
    return fit_online(mll, *data, **options)


@pytest.mark.slow
def test_the_noise_is_found_and_the_best_is_kept():
    mll, data = regression(), waves()
    result = fit(mll, data, epochs=150, hyper_steps=20)
    assert result.evaluated[0] == 11
    assert result.objective > result.history[0] + 0.3
    assert NOISE / 1.6 < float(mll.likelihood.noise.detach().sqrt()) < NOISE * 1.6
    value = float(mll(mll.model(data[0]), data[1]).detach())
    assert value == pytest.approx(result.objective, abs=1e-9)
    assert result.evaluated[result.history.index(result.objective)] == result.best


def interrupted_after(steps, monkeypatch):
    """Adam, that of weights and that of hyperparameters, until the user gives up."""
    step, calls = torch.optim.Adam.step, []

    def counted(self, *args, **kwargs):
        step(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == steps:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Adam, "step", counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "outputs"), [(1, "all"), (8, "column"), (14, "all"), (16, "column"), (None, "all")]
)  # the first; in an epoch; in a look; after it; after fewer epochs
def test_an_interrupted_training_ends_as_a_whole_one(tmp_path, monkeypatch, steps, outputs):
    data = waves()
    options = {"batch_size": 20, "burn_in": 3, "every": 2, "hyper_steps": 3, "epochs": 9}
    whole = regression(outputs=outputs)
    expected = fit(whole, data, **options)
    path = tmp_path / "a.pt"
    if steps is None:
        fit(regression(outputs=outputs), data, checkpoint=path, **options | {"epochs": 5})
    else:
        with monkeypatch.context() as patch:
            interrupted_after(steps, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(regression(outputs=outputs), data, checkpoint=path, **options)
    resumed = regression(outputs=outputs)
    result = fit(resumed, data, checkpoint=path, **options)
    assert result.log_joints == expected.log_joints
    assert (result.evaluated, result.history) == (expected.evaluated, expected.history)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "outputs"),
    [(FunctionSpace(), "all"), (FunctionSpace(), "single"), (Kronecker(), "column")],
)
def test_stochastic_estimates(structure, outputs):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.nn.functional.one_hot(y, 3) + 0.4 * torch.randn(60, 3, generator=generator)
    network = MLP([3, 10, 3], torch.nn.Tanh)
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer", 0.01))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 60, structure, outputs=outputs)
    result = fit(mll, (x, y), epochs=60, batch_size=20, hyper_steps=5)
    assert result.objective > result.history[0]
    assert bool((model.prior.log_precision > -4.6).all())  # up from 0.01, far too weak


def test_dropout_stays_on_for_the_weights_and_off_for_the_evidence():
    network = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    seen = []
    network[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    mll = regression(network, curvature=Full()).train()
    fit(mll, waves(), epochs=3, burn_in=0, every=1)
    assert network[1].training
    assert seen[0]
    assert not seen[-1]


def test_a_temperature_that_is_a_parameter_is_fitted():
    mll = regression(temperature=torch.nn.Parameter(torch.tensor(2.0).double()))
    fit(mll, waves(), epochs=12, burn_in=5)
    assert float(mll.temperature.detach()) != 2.0


def test_a_checkpoint_of_another_network(tmp_path):
    data, path = waves(), tmp_path / "a.pt"
    fit(regression(), data, epochs=1, burn_in=0, checkpoint=path)
    with pytest.raises(DataError, match="of another architecture"):
        fit(regression(MLP([1, 5, 1])), data, checkpoint=path)


def test_classes_that_were_shuffled_apart_from_their_points():
    x, _ = waves()
    network = MLP([x.shape[-1], 8, 3]).double()
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(6)
        y = network(x).argmax(-1)
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()
    mll = LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(network), len(x))
    assert fit_hyperparameters(mll, x, y, steps=1).objective < 0
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    with pytest.raises(ArgumentError, match="shuffled apart"):
        fit_hyperparameters(mll, x, shuffled)


# ------------------------------------------------------------------ data from loaders


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


def state(mll):
    return {name: value for name, value in mll.state_dict().items() if value is not None}


def objective(structure=None, classes=3, **options):
    model = LinearizedNetwork(made := network(), GaussianWeightPrior(made, "layer"))
    likelihood = SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    return LaplaceMarginalLogLikelihood(likelihood, model, N, structure or Kronecker(), **options)


class Drawn:
    """Batches in the orders that a training with a seed takes."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        x, y = data()
        return ((x[i], y[i]) for i in partition_at_random(N, SIZE, self.generator))


def loader(points=None):
    x, y = data()
    return DataLoader(TensorDataset(x if points is None else points, y), batch_size=SIZE)


@pytest.mark.parametrize("fit", [fit_map, fit_online], ids=["map", "online"])
def test_a_training_from_a_loader_is_that_from_tensors(fit):
    options = {"epochs": 3, "lr": 0.02, "progress": False}
    whole, batches = objective(), objective()
    first = fit(whole, *data(), batch_size=SIZE, seed=3, **options)
    second = fit(batches, Drawn(3), **options)
    assert second.history == pytest.approx(first.history, rel=1e-12)
    torch.testing.assert_close(*map(state, (batches, whole)), rtol=0, atol=1e-12)


def test_steps_on_hyperparameters_see_all_batches_of_a_loader():
    options = {"epochs": 2, "burn_in": 1, "lr": 1e-12, "hyper_steps": 5, "progress": False}
    for fit, kwargs in ((fit_online, options), (fit_hyperparameters, {"steps": 20})):
        whole, batches = objective(), objective()
        first, second = fit(whole, *data(), **kwargs), fit(batches, loader(), **kwargs)
        assert second.history == pytest.approx(first.history, rel=1e-9)
        torch.testing.assert_close(*map(state, (batches, whole)), rtol=1e-6, atol=1e-8)
    estimate = objective(FunctionSpace())
    result = fit_online(estimate, loader(), **options)
    values = [len(x) * float(estimate.evidence_of(x, y)().detach()) for x, y in loader()]
    assert result.objective == pytest.approx(sum(values) / N)


def test_evidence_of_a_loader_is_the_sum_and_that_of_all_points():
    mll = objective()
    x, y = data()
    whole = mll.evidence_of(x, y)()
    batches = [mll.evidence_of(*batch) for batch in loader()]
    for evidence in (sum(batches), mll.evidence_of(loader(), progress=False)):
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
        sample_sgld(objective(), Drawn(0), **options)


@pytest.mark.parametrize("method", ["closed", "draws", "mode"])
def test_predictions_from_a_loader(method):
    x, y = data()
    made = network()
    posterior = Laplace(made, "classification").fit((x, y), progress=False)
    many = x.repeat(20, 1, 1, 1)
    points = DataLoader(TensorDataset(many), batch_size=99)
    for given in (points, [(x, y)] * 20):
        result = posterior.predict(given, method, draws=9, progress=False).probs
        assert torch.equal(result, posterior.predict(many, method, draws=9).probs)
    weights = {"4.bias": torch.randn(3, 3, dtype=torch.float64)}
    for outputs in (sampled_outputs, linearized_outputs):
        result = outputs(made, weights, points)
        torch.testing.assert_close(result, outputs(made, weights, many))


def once():
    yield from loader()


_OPTIONS = {sample_sgld: {"count": 1}}
WRONG = {
    "uint8": (lambda: loader(points=data()[0].mul(9).to(torch.uint8)), ShapeError, "uint8"),
    "float32": (lambda: loader(points=data()[0].float()), ShapeError, "float32"),
    "nothing": (list, ArgumentError, "no points"),
    "generator": (once, ArgumentError, "once"),
    "no pairs": (lambda: [data()[0]], ArgumentError, "sequence of tensors"),
    "fewer": (lambda: [(data()[0][:9], data()[1][:9])], ArgumentError, "num_data"),
    "unlike": (lambda: [(data()[0], data()[1][:9])], ShapeError, "9 targets"),
    "infinite": (lambda: loader(points=data()[0] / 0), NonFiniteError, "train_x"),
    "no targets": (lambda: data()[0], ArgumentError, "train_y"),
}


@pytest.mark.parametrize("fit", [*FITS, sample_sgld])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_data(fit, kind):
    made, error, text = WRONG[kind]
    with pytest.raises(error, match=text):
        fit(objective(), made(), progress=False, **_OPTIONS.get(fit, {}))


@pytest.mark.parametrize("fit", FITS)
def test_wrong_options_beside_a_loader(fit):
    for options in ({"batch_size": 5}, {"train_y": data()[1]}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            fit(objective(), loader(), progress=False, **options)
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
