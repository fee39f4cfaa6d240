"""Laplace posteriors of networks as users have them: frozen, adapted, unused, binary, bfloat16."""

import copy
import pickle

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gpclml import Laplace
from gpclml.curvature import BlockDiagonal, Full, FunctionSpace
from gpclml.errors import ArgumentError
from gpclml.fit import FitWarning
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import train

N = 30
STRUCTURES = ["kron", "diag", "full", BlockDiagonal()]


def points():
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(1))


def classes():
    return torch.arange(N) % 3


def frozen(module):
    return module.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2) / 10)
        self.base = frozen(nn.Linear(6, 3))

    def forward(self, x):
        return x @ self.a.mT @ self.b.mT + self.base(x)


class LoRA(nn.Module):
    """An adapter in modules of its own, as peft has them."""

    def __init__(self, size, outputs):
        super().__init__()
        self.base_layer = frozen(nn.Linear(size, outputs))
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2) / 10)

    def forward(self, weight):
        return weight + self.b @ self.a


class Beside(nn.Module):
    """A layer that is called last, of which the outputs do not know, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.aside, self.unused = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        outputs = self.head(hidden)
        self.aside(hidden)
        return outputs


def behind_linear(layer):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer)


def parametrized():
    layer = frozen(nn.Linear(6, 3))
    parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


class TiedEnds(nn.Module):
    """An embedding of tokens and a head that share one weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.tokens((x > 0).long()).mean(1))


SPECTRAL = ["2.bias", "2.parametrizations.weight.original"]
NORMED = ["2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"]
LAST = [
    (lambda: behind_linear(nn.Linear(6, 3)), ["2.weight", "2.bias"]),
    (lambda: behind_linear(Adapted()), ["2.a", "2.b"]),
    (lambda: behind_linear(parametrized()), [f"2.parametrizations.weight.0.{k}" for k in "ab"]),
    (lambda: behind_linear(frozen(nn.Linear(6, 3))), ["0.weight", "0.bias"]),
    (lambda: frozen(behind_linear(nn.Linear(6, 3))), ["2.weight", "2.bias"]),
    (lambda: behind_linear(parametrizations.spectral_norm(nn.Linear(6, 3))), SPECTRAL),
    (lambda: behind_linear(parametrizations.weight_norm(nn.Linear(6, 3))), NORMED),
    (Beside, ["head.weight", "head.bias"]),
    (TiedEnds, ["tokens.weight"]),
    (lambda: frozen(TiedEnds()), ["tokens.weight"]),
    (lambda: nn.Sequential(LoRA(4, 6), nn.Tanh(), nn.Linear(6, 3)), ["2.weight", "2.bias"]),
    (
        lambda: nn.Sequential(frozen(nn.Linear(4, 6)), nn.Linear(6, 6), nn.Linear(6, 3)),
        ["2.weight", "2.bias"],
    ),
]


@pytest.mark.parametrize(("make", "names"), LAST)
def test_the_last_layer_is_the_last_that_trains(make, names):
    torch.manual_seed(0)
    network = make().eval()
    before = [p.requires_grad for p in network.parameters()]
    posterior = Laplace(network, "classification").fit((points(), classes()))
    assert posterior.names == names
    assert len(set(posterior.precisions.values())) == 1  # a layer has one
    assert posterior.predict(points()).probs.shape == (N, 3)
    assert [p.requires_grad for p in network.parameters()] == before


def test_adapters_are_the_default_where_they_alone_are_trained():
    torch.manual_seed(0)
    network = nn.Sequential(LoRA(4, 6), nn.Tanh(), LoRA(6, 3))
    posterior = Laplace(network, "classification").fit((points(), classes()))
    assert posterior.names == [f"{k}.lora_{m}.default.weight" for k in (0, 2) for m in "AB"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_unused_layers_keep_their_prior(structure):
    torch.manual_seed(0)
    network, data = Beside(), (points(), classes())
    whole = Laplace(network, "classification", weights="all", structure=structure)
    used = Laplace(network, "classification", weights=["body", "head"], structure=structure)
    evidences = [posterior.fit(data, precision=2.0).log_evidence for posterior in (whole, used)]
    squares = sum(
        p.square().sum() for n, p in network.named_parameters() if n not in used.names
    )  # fmt: skip
    assert evidences[0] == pytest.approx(evidences[1] - float(squares.detach()), rel=1e-5)
    torch.testing.assert_close(whole.predict(points()).probs, used.predict(points()).probs)
    values = [evidence(network, structure) for structure in (FunctionSpace(), Full())]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def evidence(network, structure):
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    mll = LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(network), N, structure)
    return float(mll.evidence_of(points(), classes())().detach())


class Half(nn.Module):
    """A network under autocast, and its copy in single precision."""

    def __init__(self, half):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.half = half

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return self.head(torch.tanh(self.norm(self.body(x))))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layers_in_half_precision(structure):
    ends = [
        Laplace(Half(half), "classification", weights="all", structure=structure)
        .fit((points(), classes()), precision=1.0)
        .predict(points()).probs
        for half in (True, False)
    ]  # fmt: skip
    assert ends[0].dtype == torch.float32
    assert float((ends[0] - ends[1]).abs().max()) < 0.02
    kernel = [evidence(Half(half), FunctionSpace()) for half in (True, False)]
    assert kernel[0] == pytest.approx(kernel[1], rel=0.02)


class Broken(nn.Linear):
    def __init__(self, error):
        super().__init__(4, 3)
        self.error = error

    def forward(self, input):
        raise self.error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), ValueError("mine"), IndexError("of the user")]
)
def test_errors_of_the_callers_network_are_raised_as_they_are(error):
    network = Broken(error)
    mll = LaplaceMarginalLogLikelihood(
        SoftmaxLikelihood(num_classes=3, mixing_weights=False), LinearizedNetwork(network), N
    )
    for call in (
        lambda: Laplace(network, "classification").fit((points(), classes())),
        lambda: mll.evidence_of(points(), classes()),
        lambda: mll.model(points()),
        lambda: Full().of(network, points(), lambda outputs: outputs.unsqueeze(1)),
    ):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


def binary():
    """Points, labels of a logistic model, and a network of one output trained with logits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    share = torch.sigmoid(2 * x[:, 0] - x[:, 1])
    y = torch.bernoulli(share, generator=generator)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    loss = nn.functional.binary_cross_entropy_with_logits
    return x, y, train(network, lambda f: loss(f(x)[:, 0], y), lr=0.02)


@pytest.mark.slow
def test_a_network_of_one_output_is_that_of_two_logits():
    x, y, network = binary()
    both = copy.deepcopy(network)
    both.append(nn.Linear(1, 2, bias=False).double())
    with torch.no_grad():
        both[-1].weight.copy_(torch.tensor([[0.0], [1.0]]))
    frozen(both[-1])
    options = {"weights": ["0", "2"], "structure": "full"}
    whole = Laplace(both, "classification", **options).fit((x, y.long()), precision=1.0)
    for labels in (y, y.long(), y.bool(), y.int(), y[:, None], y[:, None].long()):
        single = Laplace(network, "classification", **options)
        single.fit((x, labels), precision=1.0, validation=(x, labels))
        single.covariance_scale = single.output_scale = single.output_temperature = 1.0
        assert single.log_evidence == pytest.approx(whole.log_evidence)
        for method in ("closed", "mode"):
            probs, expected = (p.predict(x, method).probs for p in (single, whole))
            torch.testing.assert_close(probs, expected, atol=1e-7, rtol=0)
    draws = [p.predict(x[:50], "draws", draws=20_000).probs for p in (single, whole)]
    torch.testing.assert_close(*draws, atol=0.02, rtol=0)
    assert single.predict(x, "bridge").probs.shape == (400, 2)
    for labels in (y * 2, y.long() + 1):
        with pytest.raises(ArgumentError, match=r"zeros and ones for LogisticLikelihood"):
            Laplace(network, "classification").fit((x, labels))
    log_loss = nn.functional.binary_cross_entropy_with_logits(network(x)[:, 0], y)
    mode_loss = -single.predict(x, "mode").log_prob(y).mean()
    assert float(mode_loss) == pytest.approx(float(log_loss.detach()))


def test_logits_under_a_probit_are_told():
    x, y, network = binary()
    with pytest.warns(FitWarning, match='is a probit.*Give "classification"'):
        Laplace(network, BernoulliLikelihood()).fit((x, y))
    with torch.no_grad():
        network[-1].weight.mul_(0.6)  # about the probit of the same shares
        network[-1].bias.mul_(0.6)
    Laplace(network, BernoulliLikelihood()).fit((x, y))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fitted_posterior_can_be_pickled_and_copied(structure):
    torch.manual_seed(0)
    network = behind_linear(nn.Linear(6, 3))
    posterior = Laplace(network, "classification", structure=structure)
    posterior.fit((points(), classes()), validation=(points(), classes()))
    for other in (pickle.loads(pickle.dumps(posterior)), copy.deepcopy(posterior)):
        assert other.network is not network
        assert torch.equal(other.predict(points()).probs, posterior.predict(points()).probs)
        with torch.no_grad():
            other.network[0].weight[0, 0] += 1
        with pytest.raises(ArgumentError, match="changed after fit"):
            other.predict(points())
    posterior.predict(points())
    model, likelihood = LinearizedNetwork(network), posterior.likelihood
    mll = LaplaceMarginalLogLikelihood(likelihood, model, N, posterior.structure)
    value = mll.evidence_of(points(), classes())
    assert torch.equal(pickle.loads(pickle.dumps(value))(), value())
