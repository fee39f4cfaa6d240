"""The Laplace evidence of networks: exact evidence, dense references, finite differences."""

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, SoftmaxLikelihood
from gpytorch.priors import GammaPrior, NormalPrior

import reference
from gpclml.curvature import (
    BlockDiagonal,
    Diagonal,
    Full,
    FunctionSpace,
    GaussianWeightPrior,
    Kronecker,
)
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import ratio, sizes_of

N = 12


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs=3):
    return MLP([2, 5, outputs], torch.nn.Tanh).double()


def softmax():
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()


def gaussian(noise=0.3):
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


CASES = {
    "softmax": (softmax, 3, torch.arange(N) % 3),
    "gaussian": (gaussian, 1, drawn(N, seed=5)),
    "gaussian of two": (gaussian, 2, drawn(N, 2, seed=5)),
    "probit": (BernoulliLikelihood, 1, torch.arange(N) % 2),
}


def objective(case, structure=None, by="layer", **options):
    make, outputs, target = CASES[case]
    net = network(outputs)
    prior = GaussianWeightPrior(net, by, 0.7)
    with torch.no_grad():
        prior.log_precision.add_(0.4 * torch.arange(len(prior.log_precision)))
    model = LinearizedNetwork(net, prior)
    options.setdefault("num_data", N)
    mll = LaplaceMarginalLogLikelihood(make(), model, curvature=structure or Full(), **options)
    return mll, drawn(N, 2, seed=1), target


def densities(case, likelihood, outputs, target):
    """The textbook log density of each target, by torch's own distributions."""
    if case == "softmax":
        return torch.distributions.Categorical(logits=outputs).log_prob(target)
    if case == "probit":
        p = torch.distributions.Normal(0.0, 1.0).cdf(outputs.squeeze(-1))
        return torch.distributions.Bernoulli(p).log_prob(target.double())
    target = target.reshape(outputs.shape)
    scale = likelihood.noise.sqrt()
    return torch.distributions.Normal(outputs, scale).log_prob(target).sum(-1)


def dense_columns(case, likelihood, outputs, target, hessian):
    """Roots of explicit Hessians, or gradients, of each point's log density."""
    columns = []
    for f, y in zip(outputs.detach(), target, strict=True):

        def value(f, y=y):
            return densities(case, likelihood, f.unsqueeze(0), y.unsqueeze(0)).sum()

        if hessian == "ef":
            columns.append(torch.func.grad(value)(f).unsqueeze(0))
            continue
        Lam = -torch.func.hessian(value)(f)
        eigenvalues, vectors = torch.linalg.eigh(Lam)
        columns.append((vectors * eigenvalues.clamp_min(0.0).sqrt()).mT)
    return torch.stack(columns).detach()


def log_joint(case, mll, x, target, temperature=1.0):
    net, prior = mll.model.network, mll.model.prior
    fit = densities(case, mll.likelihood, net(x), target).sum() / temperature
    weights = dict(net.named_parameters())
    return fit - 0.5 * sum(p * weights[k].square().sum() for k, p in prior.precisions().items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hessian", ["ggn", "ef"])
def test_the_definition(case, hessian):
    temperature = 1.3
    mll, x, target = objective(case, hessian=hessian, temperature=temperature)
    columns = dense_columns(case, mll.likelihood, mll.model.network(x), target, hessian)
    power = 2 if hessian == "ef" else 1
    H = reference.weight_curvature(mll.model.network, x, columns) / temperature**power
    log_det_ratio = ratio(H, mll.model.prior.precisions(), sizes_of(mll.model.network))
    expected = log_joint(case, mll, x, target, temperature) - 0.5 * log_det_ratio
    torch.testing.assert_close(mll(mll.model(x), target), expected / N)


def test_of_a_linear_model_at_its_mode_it_is_the_exact_evidence():
    net = torch.nn.Linear(4, 1, bias=False).double()
    x, y, noise, delta = drawn(N, 4), drawn(N, seed=2), 0.3, 2.5
    mode = torch.linalg.solve(x.mT @ x / noise + delta * torch.eye(4), x.mT @ y / noise)
    with torch.no_grad():
        net.weight.copy_(mode)
    model = LinearizedNetwork(net, GaussianWeightPrior(net, "network", delta))
    mll = LaplaceMarginalLogLikelihood(gaussian(noise), model, N, Full())
    exact = reference.log_density(x @ x.mT / delta + noise * torch.eye(N), y)
    assert float(mll(model(x), y).detach()) == pytest.approx(float(exact) / N, abs=1e-10)
    kronecker = LaplaceMarginalLogLikelihood(gaussian(noise), model, N)
    assert float(kronecker(model(x), y).detach()) == pytest.approx(float(exact) / N, abs=1e-10)


@pytest.mark.parametrize("case", ["softmax", "gaussian"])
@pytest.mark.parametrize("hessian", ["ggn", "ef"])
def test_batches_of_a_partition_bound_the_evidence_from_below(case, hessian):
    mll, x, target = objective(case, hessian=hessian)
    whole = float(mll(mll.model(x), target).detach())
    last = whole
    for size in (6, 4, 2, 1):  # each partition refines the one before where sizes divide
        batches = zip(x.split(size), target.split(size), strict=True)
        values = [float(mll(mll.model(a), b).detach()) for a, b in batches]
        bound = sum(values) / len(values)
        assert bound <= whole + 1e-12
        if size in (6, 2, 1):
            assert bound <= last + 1e-12
            last = bound
    looser = [
        float(objective(case, structure, hessian=hessian)[0](mll.model(x), target).detach())
        for structure in (BlockDiagonal("layer"), BlockDiagonal("parameter"), Diagonal())
    ]
    assert whole >= looser[0] >= looser[1] >= looser[2]


@pytest.mark.parametrize(
    ("case", "outputs", "count"), [("gaussian of two", "single", 2), ("softmax", "column", 3)]
)
def test_drawn_outputs_and_columns_add_up_to_a_bound(case, outputs, count):
    """With a Gaussian the partition by outputs is one by points of a larger set: proven."""
    mll, x, target = objective(case)
    drawn = objective(case, outputs=outputs)[0]
    draws = {round(ratio_of(drawn, x, target), 9) for _ in range(30)}
    assert len(draws) == count
    assert sum(draws) >= ratio_of(mll, x, target)


def ratio_of(mll, x, target):
    return float(mll.evidence_of(x, target).log_det_ratio().detach())


def test_single_outputs_of_a_softmax_are_no_proven_bound():
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    tied = Tied().double()
    model = LinearizedNetwork(tied, GaussianWeightPrior(tied, "network", 1.0))
    x, y = torch.ones(1, 1).double(), torch.zeros(1, dtype=torch.long)
    ratios = [
        ratio_of(LaplaceMarginalLogLikelihood(likelihood, model, 1, Full(), outputs=outputs), x, y)
        for outputs in ("all", "single")
    ]
    assert ratios[0] == pytest.approx(math.log(2))
    assert ratios[1] == pytest.approx(math.log(1.25))  # twice, 0.446, is less


class Tied(torch.nn.Module):
    """One weight w with outputs (w, -w)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, x):
        output = x @ self.weight
        return torch.cat([output, -output], dim=-1)


@pytest.mark.parametrize("structure", [Full(), FunctionSpace(), Kronecker(), Diagonal()])
@pytest.mark.parametrize(
    ("outputs", "hessian"), [("all", "ggn"), ("single", "ggn"), ("column", "ggn"), ("all", "ef")]
)
def test_gradients_in_hyperparameters_and_an_augmentation(structure, outputs, hessian):
    mll, x, target = objective("gaussian of two", structure, hessian=hessian)
    weights = [p.detach().clone() for p in mll.model.network.parameters()]

    def function(angle, log_precision, raw_noise, temperature):
        mll, _, _ = objective(
            "gaussian of two", structure, hessian=hessian, outputs=outputs, temperature=temperature
        )
        turned = x @ torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()]).view(2, 2)
        del mll.model.prior.log_precision, mll.likelihood.noise_covar.raw_noise
        mll.model.prior.log_precision = log_precision
        mll.likelihood.noise_covar.raw_noise = raw_noise
        return mll(mll.model(turned), target)

    angle, temperature = torch.tensor([0.3, 1.2]).double()
    raw_noise = mll.likelihood.noise_covar.raw_noise
    inputs = angle, mll.model.prior.log_precision, raw_noise, temperature
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(function, inputs, atol=1e-6)
    assert all(map(torch.equal, weights, mll.model.network.parameters()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hessian", ["ggn", "ef"])
def test_hyperparameters_move_on_one_curvature(case, hessian):
    mll, x, target = objective(case, Full("parameters"), hessian=hessian)
    evidence = mll.evidence_of(x, target)
    with torch.no_grad():
        mll.model.prior.log_precision.add_(0.5)
        for parameter in mll.likelihood.parameters():
            parameter.sub_(0.7)
    mll.temperature = 0.6
    torch.testing.assert_close(evidence(), mll(mll.model(x), target))
    batches = zip(x.split([5, 4, 3]), target.split([5, 4, 3]), strict=True)
    total = sum(mll.evidence_of(*batch) for batch in batches)
    torch.testing.assert_close(total(), evidence())
    for name, draws in total.sample_weights(2).items():
        torch.testing.assert_close(draws, evidence.sample_weights(2)[name], rtol=1e-5, atol=1e-8)


def test_more_points_than_there_are_and_other_things_are_not_added_up():
    mll, x, target = objective("gaussian")
    all_of_them = mll.evidence_of(x, target)
    other = objective("gaussian")[0].evidence_of(x[:3], target[:3])
    with pytest.raises(ArgumentError, match="Add up batches of one objective"):
        mll.evidence_of(x[3:], target[3:]) + other
    single = objective("softmax", outputs="single")[0].evidence_of(*objective("softmax")[1:])
    with pytest.raises(UnsupportedError, match="Average the values"):
        single + single
    with pytest.raises(ArgumentError, match="15 points together, expected at most num_data = 12"):
        all_of_them + mll.evidence_of(x[:3], target[:3])
    for other in (1, 0.5, None):
        with pytest.raises(TypeError):
            other + all_of_them
        with pytest.raises(TypeError):
            all_of_them + other


@pytest.mark.parametrize("structure", [Full(), Kronecker()])
def test_weights_are_trained_on_the_log_joint(structure):
    mll, x, target = objective("softmax", structure)
    weights = list(mll.model.network.parameters())
    ours = torch.autograd.grad(mll(mll.model(x), target), weights)
    theirs = torch.autograd.grad(log_joint("softmax", mll, x, target) / N, weights)
    torch.testing.assert_close(ours, theirs)


def test_bad_input():
    for options, error, text in (
        ({"num_data": 0}, ArgumentError, "num_data"),
        ({"hessian": "fisher"}, UnknownNameError, "hessian"),
        ({"temperature": 0.0}, ArgumentError, "temperature"),
        ({"temperature": torch.ones(3)}, ShapeError, "temperature"),
    ):
        with pytest.raises(error, match=text):
            objective("softmax", **options)
    mll, x, target = objective("softmax")
    for made, outputs, error, text in (
        (gpytorch.likelihoods.BetaLikelihood(), 3, UnsupportedError, "BetaLikelihood"),
        (SoftmaxLikelihood(3, 3), 3, UnsupportedError, "mixing_weights=False"),
        (softmax(), None, UnsupportedError, "expected LinearizedNetwork"),
        (softmax(), 4, ShapeError, "4 outputs"),
        (BernoulliLikelihood(), 4, ShapeError, "as it is binary"),
        (BernoulliLikelihood(), 1, ArgumentError, "zeros and ones"),
    ):
        model = LinearizedNetwork(network(outputs)) if outputs else network()
        with pytest.raises(error, match=text):
            LaplaceMarginalLogLikelihood(made, model, N)(model(x), target)
    with pytest.raises(ArgumentError, match="24 points, expected at most num_data = 12"):
        mll(mll.model(x.repeat(2, 1)), target.repeat(2))
    for given in (target + 1, target.double(), target > 0):
        with pytest.raises(ArgumentError, match=r"target: got .*integers from 0 to 2"):
            mll(mll.model(x), given)
    with pytest.raises(ShapeError, match="target"):
        mll(mll.model(x), target[1:])
    flat = LinearizedNetwork(torch.nn.Sequential(*network(), torch.nn.Flatten(0)))
    with pytest.raises(ShapeError, match="network"):
        flat(x)
    mll, x, target = objective("gaussian")
    target = target.clone()
    target[2] = math.nan
    for value in (mll, mll.log_joint):
        with pytest.raises(NonFiniteError, match=r"got 1 of 12 values not finite.*leave points"):
            value(mll.model(x), target)


def test_weights_that_changed_after_the_curvature_was_computed():
    mll, x, y = objective("softmax", Kronecker())
    weights = list(mll.model.network.parameters())
    halves = [mll.evidence_of(x[:6], y[:6]), mll.evidence_of(x[6:], y[6:])]
    evidence = halves[0] + halves[1]
    evidence(), evidence.sample_weights(1)
    for p in weights:
        p.requires_grad_(False).requires_grad_()
    evidence()  # weights are what they were
    optimizer = torch.optim.SGD(weights, lr=0.1)
    (-mll.log_joint(mll.model(x), y)).backward()
    optimizer.step()
    for call in (
        evidence,
        evidence.log_det_ratio,
        lambda: evidence.sample_weights(1),
        lambda: halves[0] + halves[1],
        lambda: halves[0] + mll.evidence_of(x[6:], y[6:]),
    ):
        with pytest.raises(ArgumentError, match="changed after its curvature"):
            call()
    again = mll.evidence_of(x, y)
    again()
    weights[0].data = weights[0].data.clone()
    with pytest.raises(ArgumentError, match="changed after its curvature"):
        again()


def test_registered_priors_count_and_those_of_weights_are_refused():
    mll, x, y = objective("gaussian")
    noise_prior, normal = GammaPrior(2.0, 3.0).double(), NormalPrior(0.0, 1.0)
    before = [value(mll.model(x), y) for value in (mll, mll.log_joint)]
    mll.likelihood.register_prior("noise_prior", noise_prior, "noise")
    mll.model.register_prior("p", normal, lambda model: model.prior.log_precision)
    log_prior = noise_prior.log_prob(mll.likelihood.noise).sum()
    log_prior = log_prior + normal.log_prob(mll.model.prior.log_precision).sum()
    for value, without in zip((mll, mll.log_joint), before, strict=True):
        torch.testing.assert_close(value(mll.model(x), y) - without, log_prior / N)

    class Weights(gpytorch.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("weight", torch.nn.Parameter(torch.ones(2, 1)))
            self.register_prior("weight_prior", NormalPrior(0.0, 1.0), "weight")

        def forward(self, x):
            return x @ self.weight

    model = LinearizedNetwork(Weights())
    mll = LaplaceMarginalLogLikelihood(GaussianLikelihood(), model, N, Full())
    with pytest.raises(UnsupportedError, match=r"a prior of weights, network.weight_prior"):
        mll(mll.model(x.float()), y.float())
