"""Laplace posteriors of networks: predictions by hand, their calibration, files, wrong input."""

import copy
import math

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, SoftmaxLikelihood
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

from gpclml import Laplace
from gpclml.curvature import Full, FunctionSpace
from gpclml.errors import (
    ArgumentError,
    DataError,
    ModelModeError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import jacobian

N = 40


def network(outputs=3, seed=0):
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, outputs)
    )
    made.double()
    made(images(seed=5))  # running statistics
    return made.eval()


def images(n=N, seed=1):
    return torch.randn(n, 1, 3, 3, generator=torch.Generator().manual_seed(seed)).double()


def classes(n=N):
    return torch.arange(n) % 3


LAST = ["4.weight", "4.bias"]
ALL = ["0.weight", "0.bias", "1.weight", "1.bias", *LAST]


@pytest.mark.parametrize(
    ("weights", "names", "structure"),
    [("last", LAST, "full"), ("all", ALL, "diag"), (["4", "0.bias"], ["0.bias", *LAST], "full")],
)
def test_classes_by_hand(weights, names, structure):
    net, x, y = network(), images(), classes()
    posterior = Laplace(net, "classification", weights=weights, structure=structure)
    posterior.fit((x, y), precision=0.7, batch_size=11, progress=False)
    assert posterior.names == names
    p, J = net(x).softmax(-1), jacobian(net, x, names)
    H = (J.mT @ (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) @ J).sum(0)
    H = H if structure == "full" else torch.diag(H.diagonal())
    precision = H + 0.7 * torch.eye(len(H)).double()
    at = images(5, seed=2)
    J = jacobian(net, at, names)
    covariance = J @ torch.linalg.inv(precision) @ J.mT
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    expected = (net(at) / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    predicted = posterior.predict(at)
    assert isinstance(predicted, Categorical)
    torch.testing.assert_close(predicted.probs, expected, rtol=1e-12, atol=1e-12)
    penalty = sum(net.get_parameter(name).square().sum() for name in names)
    evidence = p[torch.arange(N), y].log().sum() - 0.35 * penalty
    evidence = evidence - 0.5 * (precision.logdet() - len(H) * math.log(0.7))
    assert posterior.log_evidence == pytest.approx(float(evidence.detach()), rel=1e-10)
    assert all(not p.requires_grad or p.grad is None for p in net.parameters())
    drawn = torch.distributions.MultivariateNormal(net(at), covariance + 1e-9 * torch.eye(3))
    mean = drawn.sample((20_000,)).softmax(-1).mean(0)
    mean_of_draws = posterior.predict(at, "draws", draws=20_000).probs
    assert float((mean_of_draws - mean).abs().max()) < 0.015


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression_by_hand(outputs):
    net, x = network(outputs), images()
    y = torch.randn(N, outputs, generator=torch.Generator().manual_seed(4)).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.3
    posterior = Laplace(net, likelihood, structure="full")
    posterior.fit((x, y), precision=2.0)
    J, at = jacobian(net, x, LAST), images(5, seed=2)
    precision = (J.mT @ J).sum(0) / 0.3 + 2 * torch.eye(J.shape[-1])
    new = jacobian(net, at, LAST)
    variance = (new @ torch.linalg.inv(precision) @ new.mT).diagonal(dim1=-2, dim2=-1) + 0.3
    predicted = posterior.predict(at)
    assert isinstance(predicted, Normal)
    assert predicted.mean.shape == ((5,) if outputs == 1 else (5, 2))
    torch.testing.assert_close(predicted.mean.reshape(5, -1), net(at).detach())
    torch.testing.assert_close(predicted.variance.reshape(5, -1), variance.detach())
    posterior.fit((x, y))  # the noise too
    assert abs(float(likelihood.noise.detach()) - 0.3) > 0.01
    many = images(600)
    chunks = torch.cat([posterior.predict(chunk).mean for chunk in many.split(77)])
    torch.testing.assert_close(posterior.predict(many).mean, chunks)


def test_two_classes():
    net, x, y = network(1), images(), torch.arange(N) % 2
    posterior = Laplace(net, BernoulliLikelihood(), structure="full").fit((x, y), precision=1.0)
    predicted = posterior.predict(x)
    assert isinstance(predicted, Bernoulli)
    outputs = net(x).detach()
    function = torch.special.ndtr(outputs[:, 0])
    nearer = (predicted.probs - 0.5).abs() < (function - 0.5).abs()
    assert bool(nearer.all())
    torch.testing.assert_close(posterior.predict(x, "mode").probs, function)


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_a_loader_gives_what_tensors_give(structure):
    net, x, y = network(), images(), classes()
    loader = DataLoader(TensorDataset(x, y.to(torch.uint8)), batch_size=9, shuffle=True)
    loaded, whole = (
        Laplace(net, "classification", structure=structure, weights="all")
        .fit(data, precision=0.5, batch_size=N)
        for data in (loader, (x, y))
    )  # fmt: skip
    assert loaded.num_data == whole.num_data == N
    assert loaded.log_evidence == pytest.approx(whole.log_evidence)
    torch.testing.assert_close(loaded.predict(x).probs, whole.predict(x).probs)


def test_precisions_of_the_largest_evidence():
    net, x, y = network(), images(), classes()
    fitted = Laplace(net, "classification", weights="all", by="parameter").fit((x, y))
    assert len(set(fitted.precisions.values())) == len(ALL)
    for factor in (0.8, 1.25):
        mll_value = evidence_at(net, x, y, {k: factor * v for k, v in fitted.precisions.items()})
        assert mll_value < fitted.log_evidence
    assert evidence_at(net, x, y, fitted.precisions) == pytest.approx(fitted.log_evidence)


def evidence_at(net, x, y, precisions):
    model = LinearizedNetwork(net)
    model.prior.precisions = lambda: {k: torch.tensor(v).double() for k, v in precisions.items()}
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    mll = LaplaceMarginalLogLikelihood(likelihood, model, N)
    return N * float(mll(model(x), y).detach())


def density(predicted, y):
    return float(predicted.log_prob(y).mean())


@pytest.mark.parametrize("precision", ["evidence", "validation", 1.0])
@pytest.mark.parametrize("factor", [0.3, 8.0])
def test_validation_makes_predictions_no_worse_than_the_network(precision, factor):
    net, x = network(), images(200)
    y = Categorical(logits=3 * net(x)).sample()
    with torch.no_grad():
        net[4].weight.mul_(3 * factor)  # under- and overconfident
        net[4].bias.mul_(3 * factor)
    posterior = Laplace(net, "classification")
    posterior.fit((x[:80], y[:80]), validation=(x[80:], y[80:]), precision=precision)
    now, then = (posterior.predict(x[80:], method) for method in ("closed", "mode"))
    assert density(now, y[80:]) >= density(then, y[80:]) - 1e-12
    assert density(now, y[80:]) > density(then, y[80:]) + 0.02
    raw = Laplace(net, "classification").fit((x[:80], y[:80]), precision=1.0)
    assert (raw.covariance_scale, raw.output_temperature) == (1.0, 1.0)


def test_validation_of_a_regression_chooses_the_noise():
    net, x = network(1), images(300)
    y = (net(x) + 0.5 * torch.randn(300, 1, dtype=torch.float64)).detach()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.01
    for shape in ((-1,), (-1, 1)):
        validation = x[50:], y[50:].reshape(shape)
        posterior = Laplace(net, likelihood)
        posterior.fit((x[:50], y[:50]), validation=validation, precision=10.0)
        assert float(posterior.predict(x).stddev.mean()) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("structure", "outputs", "unit"),
    [("kron", 3, 1.0), ("full", 3, 1.0), ("diag", 3, 1.0), ("kron", 1, 1e-6)],
)
def test_a_file_holds_it_all(structure, outputs, unit, tmp_path):
    net, x = network(outputs), images()
    with torch.no_grad():
        for p in net[4].parameters():
            p.mul_(unit)
    y = classes() if outputs == 3 else unit * x.flatten(1)[:, 0]
    kind = "classification" if outputs == 3 else "regression"
    posterior = Laplace(net, kind, weights="all", structure=structure, by="network")
    posterior.fit((x, y), validation=(images(seed=3), y))
    posterior.covariance_scale, posterior.output_scale = 0.37, 1.2
    posterior.save(tmp_path / "posterior.pt")
    read = Laplace.load(tmp_path / "posterior.pt", network(outputs, seed=9))
    values = [
        p.predict(x).stddev if outputs == 1 else p.predict(x).probs for p in (posterior, read)
    ]
    assert torch.equal(*values)
    for name in ("log_evidence", "num_data", "precisions", "output_scale", "output_temperature"):
        assert getattr(read, name) == getattr(posterior, name)
    with pytest.raises(DataError, match=r"4\.weight|shape"):
        Laplace.load(tmp_path / "posterior.pt", network(outputs + 1))
    content = torch.load(tmp_path / "posterior.pt", weights_only=True)
    for other in ({"a": 1}, content | {"numbers": {}}):
        torch.save(other, tmp_path / "other.pt")
        with pytest.raises(DataError):
            Laplace.load(tmp_path / "other.pt", net)
    assert "weights='all': 40 points" in repr(posterior)


FIVE = SoftmaxLikelihood(num_classes=5, mixing_weights=False)


def fit(data, net=None, likelihood="classification", precision="evidence", more=None, **options):
    made = Laplace(net or network(), likelihood, **options)
    return made.fit(data, validation=more, precision=precision)


WRONG = [
    (lambda: fit((images().mul(50).to(torch.uint8), classes())), ShapeError, "x: got torch.uint8"),
    (lambda: fit((images().float(), classes())), ShapeError, "x: got torch.float32"),
    (lambda: fit((images()[:, 0, 0], classes())), ShapeError, "an input that the module takes"),
    (lambda: fit(DataLoader(TensorDataset(images(0), classes(0)))), ArgumentError, "no points"),
    (lambda: fit(iter(())), ArgumentError, "gives its batches once"),
    (lambda: fit([images()]), ArgumentError, "expected a sequence of"),
    (lambda: fit([(images(), classes(7))]), ShapeError, "40 points and 7 targets"),
    (lambda: fit((images(), classes()), network().train()), ModelModeError, "BatchNorm2d"),
    (
        lambda: fit((images(), classes()), None, FIVE),
        ShapeError,
        "3 outputs, expected 5",
    ),
    (lambda: fit((images(), classes()), nn.Sequential(network(1), nn.Flatten(0))), ShapeError,
     "a row for each point"),
    (lambda: fit((images(), classes() + 1)), ArgumentError, "from 0 to 2"),
    (lambda: fit((images(), images()[:, 0, 0, 0]), None, "regression"), ShapeError, "target"),
    (lambda: fit((images(), classes()), weights="head"), ArgumentError, "'last', 'all', or some"),
    (lambda: fit((images(), classes()), structure="kronecker"), UnknownNameError, "structure"),
    (lambda: fit((images(), classes()), nn.Flatten()), ArgumentError, "no layer with parameters"),
    (lambda: fit((images(), classes()), structure=FunctionSpace()), UnsupportedError, "Full"),
    (lambda: Laplace(network(), "classification").predict(images()), ArgumentError, "not fitted"),
    (lambda: fit((images(), classes()), precision="validation"), ArgumentError, "without val"),
    (lambda: fit((images(), classes()), precision=-1.0), ArgumentError, "positive"),
    (lambda: fit((images(), classes())).predict(images() / 0), NonFiniteError, "x: "),
    (lambda: fit((images(), classes()), more=(images() / 0, classes())), NonFiniteError,
     "validation: "),
    (lambda: fit((images(), classes()), nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).double()
     .requires_grad_(False), weights="all"), ArgumentError, "no parameter"),
    (lambda: fit((images(), images()[:, 0, 0, 0]), network(1), "regression")
     .predict(images(), "bridge"), UnsupportedError, "softmax"),
    *(
        (lambda net=net, x=x: fit((x, classes(len(x))), net), ShapeError, said)
        for net, x, said in [
            (nn.Linear(5, 3), torch.ones(9, 4), "A Linear takes 5 channels"),
            (nn.Linear(4, 3).double(), torch.ones(9, 4), "of torch.float64 got torch.float32"),
            (nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten()), torch.ones(9, 4),
             "A Conv1d takes 2 channels"),
            (nn.Sequential(nn.LayerNorm(3), nn.Linear(4, 3)), torch.ones(9, 4),
             "A LayerNorm takes 3 channels"),
            (nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(4, 3)), torch.ones(9, 4),
             "A BatchNorm1d takes 3"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("call", WRONG, ids=[text for *_, text in WRONG])
def test_wrong_input(call):
    run, error, text = call
    with pytest.raises(error, match=text):
        run()


def test_weights_that_changed_after_fit():
    net, x, y = network(), images(), classes()
    posterior = Laplace(net, "classification", structure=Full()).fit((x, y))
    before = copy.deepcopy(net.state_dict())
    net.load_state_dict(before)  # the same again
    net[4].bias = nn.Parameter(net[4].bias.detach().clone())
    posterior.predict(x)
    net.train()
    with pytest.raises(ModelModeError, match="BatchNorm2d"):
        posterior.predict(x)
    net.eval()
    posterior.predict(x)
    with torch.no_grad():
        net[0].weight.add_(1e-9)
    for call in (lambda: posterior.predict(x), lambda: posterior.save("unused")):
        with pytest.raises(ArgumentError, match="changed after fit"):
            call()
    posterior.fit((x, y)).predict(x)
    assert torch.equal(net.state_dict()["1.running_mean"], before["1.running_mean"])


def test_predictions_by_the_bridge():
    net, x, y = network(), images(), classes()
    posterior = Laplace(net, "classification").fit((x, y))
    at = images(300, seed=7)
    bridge, mean_of_draws = (posterior.predict(at, k).probs for k in ("bridge", "draws"))
    assert 1e-3 < float((bridge - mean_of_draws).abs().mean()) < 0.05
    posterior.covariance_scale = 0.0
    torch.testing.assert_close(posterior.predict(at, "bridge").probs, posterior.predict(at).probs)


def to_mode(net, x, y):
    """Trains the last layer to its mode under a precision of one."""
    optimizer = torch.optim.LBFGS(net[4].parameters(), max_iter=300)

    def closure():
        optimizer.zero_grad()
        penalty = 0.5 * sum(p.square().sum() for p in net[4].parameters())
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum") + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    net.zero_grad()
    return net


def trained(n=60):
    """A network at its mode, its data and others, where one class is likelier."""
    x = images(n + 60, seed=11)
    torch.manual_seed(0)
    y = (x.sum((1, 2, 3)) + torch.randn(len(x), dtype=torch.float64) > 0).long()
    return to_mode(network(), x[:n], y[:n]), (x[:n], y[:n]), (x[n:], y[n:])


@pytest.mark.parametrize(
    ("precision", "structure"),
    [("clml", "full"), ("clml", "diag"), ("validation", "kron")],
)  # fmt: skip
def test_precisions_by_other_points(precision, structure):
    net, data, validation = trained()
    climbed = Laplace(net, "classification", structure=structure).fit(data)
    posterior = Laplace(net, "classification", structure=structure)
    posterior.fit(data, validation=validation, precision=precision, batch_size=7, progress=False)
    factors = {round(math.log10(posterior.precisions[k] / climbed.precisions[k]), 6) for k in LAST}
    assert len(factors) == 1
    assert factors.pop() in range(-2, 7)
    now, then = (posterior.predict(validation[0], k) for k in ("closed", "mode"))
    assert density(now, validation[1]) >= density(then, validation[1]) - 1e-12


def test_labels_that_were_shuffled_apart_from_their_points():
    torch.manual_seed(0)
    net, x = network(), images(200)
    with torch.no_grad():
        net[4].weight.mul_(12)
    y = net(x).argmax(-1)
    shuffled = y[torch.randperm(200)]
    good = Laplace(net, "classification").fit((x, y), validation=(x, y))
    assert good.num_data == 200
    for call in (
        lambda: Laplace(net, "classification").fit((x, shuffled)),
        lambda: Laplace(net, "classification").fit((x, y), validation=(x, shuffled)),
    ):
        with pytest.raises(ArgumentError, match="shuffled apart"):
            call()
