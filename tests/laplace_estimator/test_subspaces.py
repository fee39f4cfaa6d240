"""Subnetworks, curvature of low rank, and data added later: against dense algebra by autograd."""

import math
import pickle

import pytest
import torch
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from torch import nn

from gpclml import (
    MLP,
    Laplace,
    LaplaceMarginalLogLikelihood,
    LinearizedNetwork,
    fit_online,
)
from gpclml.curvature import Full, LowRank, blocks
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.fit import fit_hyperparameters
from network_cases import (
    check_sample_covariance,
    check_twelve_digits,
    covariance_in_long_double,
    jacobian,
    log_det_in_long_double,
    train,
)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(40, 2, generator=GENERATOR, dtype=torch.float64)
Y = (4 * X[:, 0]).sin() + X[:, 1] ** 2
LABELS = (Y > 0.5).long() + (Y > 1.1)
NEW = torch.rand(4, 2, generator=GENERATOR, dtype=torch.float64)


def trained(sizes, loss):
    torch.manual_seed(0)
    return train(MLP(sizes).double(), lambda network: loss(network(X)))


@pytest.fixture(scope="module")
def classifier():
    return trained([2, 8, 3], lambda f: nn.functional.cross_entropy(f, LABELS))


@pytest.fixture(scope="module")
def regressor():
    return trained([2, 8, 1], lambda f: (f[:, 0] - Y).square().mean())


def curvature(network, x):
    """The generalized Gauss-Newton matrix of a softmax."""
    p = network(x).detach().softmax(-1)
    middle = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    rows = jacobian(network, x)
    return (rows.mT @ middle @ rows).sum(0)


@pytest.fixture
def woodbury(monkeypatch):
    """Small last layers are taken as large ones, for which Woodbury's identity is."""
    monkeypatch.setattr(blocks, "_LARGE", 10)
    torch.manual_seed(0)


def fitted(network, data, structure="full", **options):
    return Laplace(network, "classification", structure=structure, **options).fit(
        data, precision=0.7
    )


def test_a_last_softmax_layer_by_woodburys_identity(woodbury):
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 9)).double().eval()
    x, y = X[:20], torch.arange(20) % 9
    posterior = fitted(network, (x, y))
    assert type(posterior._fitted().curvature).__name__ == "LastSoftmax"
    H = curvature(network, x)[15:, 15:]
    H += 0.7 * torch.eye(len(H), dtype=H.dtype)
    rows = jacobian(network, NEW).flatten(0, 1)[:, 15:]
    joint = posterior.output_distribution(NEW, joint=True).covariance_matrix
    check_twelve_digits(joint, covariance_in_long_double(H, rows))
    squares = sum(p.detach().square().sum() for p in network[2].parameters())
    density = -nn.functional.cross_entropy(network(x), y, reduction="sum").item()
    ratio = log_det_in_long_double(H) - len(H) * math.log(0.7)
    expected = density - 0.5 * (0.7 * float(squares) + ratio)
    assert posterior.log_evidence == pytest.approx(expected, rel=1e-12)

    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    batches, dense = (
        fitted(network, data, structure, by="parameter")
        for structure in ("full", Full("parameters"))
    )
    assert batches.log_evidence == pytest.approx(expected, abs=1e-9)
    numbers = torch.tensor([0.3, 5.0], dtype=torch.float64, requires_grad=True)
    values = [p.log_marginal_likelihood(numbers) for p in (batches, dense)]
    slopes = [torch.autograd.grad(value, numbers)[0] for value in values]
    torch.testing.assert_close(*values, rtol=1e-11, atol=0)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=0)
    pairs = [p.output_distribution(NEW).covariance_matrix for p in (batches, dense)]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-12)
    draws = posterior.sample_outputs(NEW[:2], 4000, seed=0).flatten(1)
    check_sample_covariance(draws, joint[:18, :18])
    again = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)


def test_a_last_softmax_layer_beside_other_weights_has_its_matrix(woodbury):
    """A parameter that comes after the last layer's weight is its bias only if it is one."""
    network = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 9, bias=False)).double()
    data = torch.arange(15) % 5, torch.arange(15) % 9
    posterior, dense = (
        fitted(network, data, structure, weights="all")
        for structure in ("full", Full("parameters"))
    )
    assert posterior.log_evidence == pytest.approx(dense.log_evidence, abs=1e-9)
    torch.testing.assert_close(posterior.predict(data[0]).probs, dense.predict(data[0]).probs)


def chosen_weights(network, count=15):
    total = sum(p.numel() for p in network.parameters())
    return torch.randperm(total, generator=torch.Generator().manual_seed(1))[:count].sort().values


@pytest.mark.parametrize("form", ["numbers", "mask"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_subnetworks(classifier, structure, form, tmp_path):
    index, delta = chosen_weights(classifier), 1.3
    weights = torch.cat([p.detach().flatten() for p in classifier.parameters()])
    mask = torch.zeros(len(weights), dtype=torch.bool)
    mask[index] = True
    posterior = Laplace(
        classifier, "classification", weights=mask if form == "mask" else index,
        structure=structure, prior_mean=0.2,
    ).fit((X, LABELS), precision=delta)  # fmt: skip
    H = curvature(classifier, X)[index][:, index]
    H = H if structure == "full" else H.diagonal().diag()
    precision = H + delta * torch.eye(len(index), dtype=H.dtype)
    rows = jacobian(classifier, NEW).flatten(0, 1)[:, index]
    joint = posterior.output_distribution(NEW, joint=True).covariance_matrix
    check_twelve_digits(joint, covariance_in_long_double(precision, rows))
    torch.testing.assert_close(
        posterior.output_distribution(NEW).variance, joint.diagonal().view(4, 3)
    )
    density = -nn.functional.cross_entropy(classifier(X), LABELS, reduction="sum").item()
    nats = density - 0.5 * delta * float((weights[index] - 0.2).square().sum())
    nats -= 0.5 * float(torch.logdet(precision) - len(index) * math.log(delta))
    assert posterior.log_evidence == pytest.approx(nats, rel=1e-10)

    draws = posterior.sample_weights(4000, seed=1)
    away = torch.cat(
        [
            (draws.get(name, p.expand(4000, *p.shape)) - p).detach().flatten(1)
            for name, p in classifier.named_parameters()
        ],
        dim=1,
    )
    assert float(away[:, ~mask].abs().max()) == 0
    check_sample_covariance(away[:, index], torch.linalg.inv(precision), 0.1)
    x = NEW[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: posterior.output_distribution(x).variance, (x,))
    posterior.save(tmp_path / "posterior.pt")
    again = Laplace.load(tmp_path / "posterior.pt", classifier)
    assert torch.equal(again.predict(NEW).probs, posterior.predict(NEW).probs)
    assert float(again.log_marginal_likelihood(2.0)) == float(
        posterior.log_marginal_likelihood(2.0)
    )


def test_subnetworks_search_the_evidence_alike_in_batches_and_layers():
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
    network = nn.Sequential(*layers).double().eval()
    points = X.unsqueeze(1)
    index = chosen_weights(network, 12)
    whole, batches = (
        Laplace(network, "classification", weights=index, structure="full").fit(data)
        for data in (
            (points, LABELS),
            [(points[:15], LABELS[:15]), (points[15:], LABELS[15:])],
        )
    )
    assert whole.log_evidence == pytest.approx(batches.log_evidence, rel=1e-10)
    slope = torch.full((2,), 0.0, dtype=torch.float64, requires_grad=True)
    best = torch.tensor([float(p) for p in dict.fromkeys(whole.precisions.values())])
    value = whole.log_marginal_likelihood(best.double() * slope.exp())
    assert float(torch.autograd.grad(value, slope)[0].abs().max()) < 0.01
    single = Laplace(network, "classification", weights=index, structure="diag", by="weight")
    assert single.fit((points, LABELS), precision=2.0).precisions["0.weight"].shape == (3, 1, 2)


def test_the_largest_variances(classifier):
    every = Laplace(classifier, "classification", weights="all", structure="diag")
    every.fit((X, LABELS), precision=0.5)
    variances = 1 / (curvature(classifier, X).diagonal() + 0.5)
    index = every.largest_variances(9)
    assert torch.equal(index, variances.topk(9).indices.sort().values)
    posterior = Laplace(classifier, "classification", weights=index, structure="full")
    assert posterior.fit((X, LABELS)).predict(NEW).probs.shape == (4, 3)
    with pytest.raises(ArgumentError, match="at most 51"):
        every.largest_variances(52)
    with pytest.raises(UnsupportedError, match="'diag'"):
        posterior.largest_variances(3)


def test_low_rank(classifier):
    full, whole, low = (
        Laplace(classifier, "classification", weights="all", structure=structure).fit(
            (X, LABELS), precision=0.5
        )
        for structure in (Full("parameters"), LowRank(120), LowRank(6))
    )
    assert whole.log_evidence == pytest.approx(full.log_evidence, rel=1e-10)
    pairs = [p.output_distribution(NEW, joint=True).covariance_matrix for p in (whole, full)]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-12)
    values, vectors = torch.linalg.eigh(curvature(classifier, X))
    H = (vectors[:, -6:] * values[-6:]) @ vectors[:, -6:].mT
    precision = H + 0.5 * torch.eye(len(H), dtype=H.dtype)
    rows = jacobian(classifier, NEW).flatten(0, 1)
    covariance = low.output_distribution(NEW, joint=True).covariance_matrix
    check_twelve_digits(covariance, covariance_in_long_double(precision, rows))
    assert low.log_evidence > full.log_evidence
    assert bool((covariance.diagonal() >= pairs[1].diagonal()).all())
    # Of several batches what is left out is little more.
    batches = [(X[:20], LABELS[:20]), (X[20:], LABELS[20:])]
    parted = Laplace(classifier, "classification", weights="all", structure=LowRank(6))
    parted.fit(batches, precision=0.5)
    assert parted.log_evidence >= low.log_evidence - 1e-9
    assert parted.log_evidence == pytest.approx(low.log_evidence, abs=1.0)
    assert parted._fitted().curvature.matrix.shape == (6, 51)
    with pytest.raises(ArgumentError, match="rank"):
        Laplace(classifier, "classification", structure=LowRank(0)).fit((X, LABELS))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_data_that_are_added(regressor, structure):
    halves = [(X[:25], Y[:25, None]), (X[25:], Y[25:, None])]
    whole = Laplace(regressor, "regression", weights="all", structure=structure).fit(halves)
    added = Laplace(regressor, "regression", weights="all", structure=structure).fit(halves[0])
    before = added.log_evidence
    added.fit(halves[1], add=True)
    assert added.num_data == 40
    assert added.log_evidence != before
    assert added.log_evidence == pytest.approx(whole.log_evidence, abs=1e-6)
    torch.testing.assert_close(
        added.predict(NEW).variance, whole.predict(NEW).variance, rtol=1e-3, atol=0
    )
    fixed = [Laplace(regressor, "regression", weights="all", structure=structure) for _ in range(2)]
    fixed[0].fit(halves, precision=2.0)
    fixed[1].fit(halves[0], precision=3.0).fit(halves[1], precision=2.0, add=True)
    assert fixed[1].log_evidence == pytest.approx(fixed[0].log_evidence, rel=1e-12)


def test_what_fails_to_be_added_leaves_the_fit_as_it_was(classifier):
    posterior = Laplace(classifier, "classification").fit((X, LABELS))
    expected, evidence = posterior.predict(NEW).probs, posterior.log_evidence
    with pytest.raises(ShapeError):
        posterior.fit([(X, LABELS), (X, LABELS[:7])], add=True)
    assert torch.equal(posterior.predict(NEW).probs, expected)
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-12)
    with pytest.raises(ArgumentError, match="not fitted"):
        Laplace(classifier, "classification").fit((X, LABELS), add=True)


def test_subnetworks_that_are_none(classifier):
    def fit(weights, structure="full"):
        return Laplace(classifier, "classification", weights=weights, structure=structure).fit(
            (X, LABELS)
        )

    with pytest.raises(UnsupportedError, match="'full' or 'diag'"):
        fit(torch.tensor([1, 2]), "kron")
    for weights in (torch.tensor([], dtype=torch.int64), torch.tensor([51]), torch.tensor([-1, 2])):
        with pytest.raises(ArgumentError, match="from 0 to 50"):
            fit(weights)
    with pytest.raises(ArgumentError, match="integers"):
        fit(torch.tensor([1.0, 2.0]))
    for weights in (torch.tensor([[1], [2]]), torch.ones(7, dtype=torch.bool)):
        with pytest.raises(ShapeError, match="mask"):
            fit(weights)


@pytest.mark.slow
def test_noises_of_several_outputs_in_training_by_the_evidence():
    """Their ratios are those of the residuals, as after ``Laplace.fit``."""
    noise = torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = torch.stack([Y, 2 * X[:, 1]], 1) + noise * torch.tensor([0.02, 0.4], dtype=torch.float64)
    torch.manual_seed(0)
    model = LinearizedNetwork(MLP([2, 10, 2]).double())
    likelihood = MultitaskGaussianLikelihood(2, rank=0, has_global_noise=False).double()
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 40)
    fit_online(mll, X, y, epochs=800, burn_in=400, every=40, lr=0.02)
    residuals = (model.network(X) - y).square().mean(0).detach()
    noises = likelihood.task_noises.detach()
    ratio = float(residuals[1] / residuals[0])
    assert float(noises[1] / noises[0]) == pytest.approx(ratio, rel=0.3)
    assert ratio > 5
    before = mll(model(X), y).item()
    fit_hyperparameters(mll, X, y, steps=30)
    noises = likelihood.task_noises.detach()
    assert float(noises[1] / noises[0]) == pytest.approx(ratio)
    assert mll(model(X), y).item() > before - 1e-3


def test_numbers_have_all_their_digits(regressor):
    posterior = Laplace(regressor, "regression").fit((X, Y[:, None]))
    exact = torch.tensor(0.1, dtype=torch.float64)
    assert float(posterior.log_marginal_likelihood(0.1)) == float(
        posterior.log_marginal_likelihood(exact)
    )
    assert float(posterior.log_marginal_likelihood(noise=0.1)) == float(
        posterior.log_marginal_likelihood(noise=exact)
    )
