"""The Laplace posterior of a network as an object: against dense algebra by autograd."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize, Standardize
from gpytorch.likelihoods import (
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.priors import LogNormalPrior
from torch import nn
from torch.utils.data import DataLoader

import network_cases
from gpclml import (
    MLP,
    FitWarning,
    GaussianWeightPrior,
    Laplace,
    LaplaceMarginalLogLikelihood,
    LinearizedNetwork,
    fit_mll,
)
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from gpclml.likelihoods import HeteroscedasticGaussianLikelihood, LogisticLikelihood
from network_cases import (
    check_sample_covariance,
    check_twelve_digits,
    covariance_in_long_double,
    log_det_in_long_double,
    train,
)

STRUCTURES = "full", "kron", "diag"


def trained(sizes, loss, steps=200):
    torch.manual_seed(0)
    return train(MLP(sizes).double(), lambda network: loss(network(X)), steps)


def table(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = torch.stack([(4 * x[:, 0]).sin() + 0.1 * noise[:, 0], x[:, 1] ** 2 + 0.2 * noise[:, 1]], 1)
    return x, y


X, Y = table()
NEW = torch.rand(5, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def jacobian(network, x):
    """Rows of all outputs, ``(N C, P)``, in the order of the parameters."""
    return network_cases.jacobian(network, x).flatten(0, 1)


def dense_precisions(posterior):
    values = []
    for name, value in posterior.precisions.items():
        shape = posterior.network.get_parameter(name).shape
        values.append(torch.as_tensor(value, dtype=torch.float64).expand(shape).flatten())
    return torch.cat(values)


def squared_errors(f):
    """Of one output."""
    return (f[:, 0] - Y[:, 0]).square().mean()


def regression(structure="full", **options):
    network = trained([2, 6, 2], lambda f: (f - Y).square().mean())
    return Laplace(network, "regression", weights="all", structure=structure, **options)


@pytest.fixture(scope="module", params=STRUCTURES)
def fitted(request):
    return regression(request.param).fit((X, Y))


def test_distributions_of_outputs_are_those_of_the_weights(fitted):
    joint = fitted.output_distribution(NEW, joint=True)
    alone = fitted.output_distribution(NEW)
    weights = fitted.sample_weights(20_000, seed=3)
    center = {name: p.detach() for name, p in fitted.network.named_parameters()}
    away = torch.cat([(weights[name] - center[name]).flatten(1) for name in center], dim=-1)
    draws = away @ jacobian(fitted.network, NEW).mT
    check_sample_covariance(draws, joint.covariance_matrix, 0.06)
    torch.testing.assert_close(joint.variance, alone.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(joint.mean, fitted.network(NEW), rtol=1e-12, atol=0)
    noise = fitted.likelihood.noise
    torch.testing.assert_close(fitted.predict(NEW).variance, joint.variance + noise)
    blocks = alone.covariance_matrix
    assert float(blocks[:2, 2:].abs().max()) == 0
    torch.testing.assert_close(blocks[:2, :2], joint.covariance_matrix[:2, :2])
    cross = fitted.output_covariance(NEW[:2], NEW[2:])
    torch.testing.assert_close(cross, joint.covariance_matrix[:4, 4:], rtol=1e-9, atol=1e-14)


def test_covariances_of_layers_with_several_places():
    """Convolutions and normalizations have rows of gradients, in groups too."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)
    network = nn.Sequential(*layers).double()
    x = torch.randn(12, 1, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 2, (12,))
    for structure in STRUCTURES:
        posterior = Laplace(network, "classification", weights="all", structure=structure)
        posterior.fit((x, y), precision=1.0)
        joint = posterior.output_distribution(x[:4], joint=True).covariance_matrix
        alone = posterior.output_distribution(x[:4]).covariance_matrix
        for n in range(4):
            block = slice(2 * n, 2 * n + 2)
            torch.testing.assert_close(joint[block, block], alone[block, block])
        check_sample_covariance(posterior.sample_outputs(x[:4], 5000, seed=0).flatten(1), joint)
        assert float(torch.linalg.eigvalsh(joint).min()) > -1e-10


def test_a_draw_is_one_function(fitted):
    values = fitted.sample_outputs(NEW, 3, seed=5)
    assert values.shape == (3, 5, 2)
    torch.testing.assert_close(fitted.sample_outputs(NEW[2:4], 3, seed=5), values[:, 2:4])
    assert not torch.equal(fitted.sample_outputs(NEW, 3, seed=6), values)
    torch.testing.assert_close(fitted.sample_outputs(NEW, 3, seed=5), values, rtol=0, atol=0)
    many = fitted.sample_outputs(NEW, 4000, seed=1).flatten(1)
    joint = fitted.output_distribution(NEW, joint=True)
    check_sample_covariance(many, joint.covariance_matrix)
    weights = fitted.sample_weights(2, seed=4)
    assert {name: w.shape for name, w in weights.items()} == {
        name: (2, *p.shape) for name, p in fitted.network.named_parameters()
    }


def test_gradients_with_respect_to_points(fitted):
    x = NEW[:2].clone().requires_grad_()
    for function in (
        lambda x: fitted.output_distribution(x).covariance_matrix,
        lambda x: fitted.output_distribution(x, joint=True).covariance_matrix,
        lambda x: fitted.output_distribution(x).mean,
        lambda x: fitted.output_covariance(x, NEW[2:]),
        lambda x: fitted.sample_outputs(x, 2, seed=1),
    ):
        assert torch.autograd.gradcheck(function, (x,))
    assert all(p.grad is None for p in fitted.network.parameters())


class Attention(nn.Module):
    """Fused attention has first derivatives alone, and recurrent layers have none of cuDNN's."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.recurrent(self.encoder(x))[0]
        return self.last(hidden.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["all", "last"])
def test_gradients_with_respect_to_sequences(weights):
    torch.manual_seed(0)
    network, x = Attention().double().eval(), torch.randn(8, 3, 4, dtype=torch.float64)
    posterior = Laplace(network, "regression", weights=weights, structure="full")
    posterior.fit((x, x.mean((1, 2))), precision=1.0)
    points = x[:1].clone().requires_grad_()
    for function in (
        lambda x: posterior.output_distribution(x).variance,
        lambda x: posterior.sample_outputs(x, 3),
    ):
        assert torch.autograd.gradcheck(function, (points,), nondet_tol=1e-10)


@pytest.mark.slow
def test_outputs_of_classes_are_what_predictions_average_over():
    network = trained([2, 10, 3], CASES["softmax"][-1], 400)
    posterior = Laplace(network, "classification").fit(
        (X, LABELS), validation=(X[:20], LABELS[:20])
    )
    outputs = posterior.output_distribution(NEW)
    assert outputs.mean.shape == (5, 3)
    draws = torch.softmax(posterior.sample_outputs(NEW, 20_000, seed=0), -1).mean(0)
    probs = posterior.predict(NEW, "draws", draws=20_000, seed=1).probs
    torch.testing.assert_close(draws, probs, atol=0.02, rtol=0)


def test_as_a_model_of_botorch():
    y = Y[:, :1]
    scale = Standardize(1)
    standardized, _ = scale(y)
    scale.eval()
    network = trained([2, 8, 1], lambda f: (f - standardized).square().mean())
    posterior = Laplace(network, "regression", structure="full").fit((X, standardized))
    model = posterior.to_botorch(outcome_transform=scale)
    assert (model.num_outputs, model.batch_shape) == (1, torch.Size())
    points = torch.rand(4, 3, 2, dtype=torch.float64, requires_grad=True)
    predicted = model.posterior(points)
    assert predicted.mean.shape == predicted.variance.shape == (4, 3, 1)
    joint = posterior.output_distribution(points[1].detach(), joint=True)
    mean, deviation = scale.means.item(), scale.stdvs.item()
    torch.testing.assert_close(predicted.mean[1, :, 0], mean + deviation * joint.mean)
    covariance = predicted.distribution.covariance_matrix[1]
    torch.testing.assert_close(covariance, deviation**2 * joint.covariance_matrix)
    noisy = model.posterior(points, observation_noise=True)
    noise = deviation**2 * posterior.likelihood.noise.item()
    torch.testing.assert_close(
        noisy.variance - predicted.variance, torch.full((4, 3, 1), noise).double()
    )
    given = torch.full((4, 3, 1), 0.5, dtype=torch.float64)
    more = posterior.to_botorch().posterior(points, observation_noise=given)
    less = posterior.to_botorch().posterior(points)
    torch.testing.assert_close(more.variance, less.variance + 0.5)
    value = qLogExpectedImprovement(model, best_f=float(y.max()))(points)
    (slope,) = torch.autograd.grad(value.sum(), points)
    assert value.shape == (4,)
    assert bool(slope.isfinite().all())
    assert float(slope.abs().max()) > 0
    inputs = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double())
    moved = posterior.to_botorch(input_transform=inputs).posterior(2 * points)
    torch.testing.assert_close(moved.mean, less.mean)
    single = posterior.to_botorch().posterior(points.detach().float())
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), less.mean, rtol=1e-4, atol=1e-4)


def test_a_botorch_model_of_several_outputs():
    posterior = regression().fit((X, Y))
    model, points = posterior.to_botorch(), torch.rand(3, 4, 2, dtype=torch.float64)
    both = model.posterior(points)
    assert both.mean.shape == (3, 4, 2)
    joint = posterior.output_distribution(points[2], joint=True)
    torch.testing.assert_close(both.distribution.covariance_matrix[2], joint.covariance_matrix)
    for index in (0, 1, -1):
        single = model.posterior(points, output_indices=[index])
        torch.testing.assert_close(single.mean[..., 0], both.mean[..., index])
        torch.testing.assert_close(single.variance[..., 0], both.variance[..., index])
    weights = ScalarizedPosteriorTransform(torch.tensor([2.0, -1.0], dtype=torch.float64))
    sums = model.posterior(points, posterior_transform=weights)
    torch.testing.assert_close(sums.mean[..., 0], 2 * both.mean[..., 0] - both.mean[..., 1])
    assert both.rsample(torch.Size([6])).shape == (6, 3, 4, 2)
    for wrong, error in (
        (lambda: model.posterior(points[0, 0]), ShapeError),
        (lambda: model.posterior(points, output_indices=[2]), ArgumentError),
        (lambda: model.posterior(points[..., :1]), (ShapeError, ArgumentError)),
        (lambda: model.posterior(points.to("meta")), ArgumentError),
    ):
        with pytest.raises(error):
            wrong()


def fisher(likelihood, network, x):
    """Expected curvature of the negative log density of each point, ``(N, C, C)``."""
    outputs = network(x).detach()
    if isinstance(likelihood, MultitaskGaussianLikelihood):
        return torch.diag(1 / likelihood.task_noises.detach()).expand(len(x), 2, 2)
    if isinstance(likelihood, LogisticLikelihood):
        p = outputs.sigmoid()
        return (p * (1 - p)).unsqueeze(-1)
    if isinstance(likelihood, StudentTLikelihood):
        noise, df = likelihood.noise.item(), likelihood.deg_free.item()
        # The Fisher information by quadrature of the squared score.
        r = torch.linspace(-400, 400, 800_001, dtype=torch.float64) * noise**0.5
        density = torch.distributions.StudentT(df, 0.0, noise**0.5).log_prob(r).exp()
        score = (df + 1) * r / (df * noise + r.square())
        exact = torch.tensor((df + 1) / ((df + 3) * noise), dtype=torch.float64)
        torch.testing.assert_close(torch.trapezoid(density * score.square(), r), exact)
        return exact.expand(len(x), 1, 1)
    if isinstance(likelihood, SoftmaxLikelihood):
        p = outputs.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    precision = (-outputs[:, 1]).exp()
    return torch.diag_embed(torch.stack([precision, torch.full_like(precision, 0.5)], -1))


def log_density(likelihood, outputs, target, loss):
    if isinstance(likelihood, MultitaskGaussianLikelihood):
        deviation = likelihood.task_noises.sqrt()
        return torch.distributions.Normal(outputs, deviation).log_prob(target).sum()
    if isinstance(likelihood, StudentTLikelihood):
        return likelihood(outputs[:, 0]).log_prob(target).sum()
    return -len(outputs) * loss(outputs)  # the others are trained by their density


LABELS = (Y[:, 0] > 0.3).long() + (Y[:, 1] > 0.5)
CASES = {
    "softmax": (
        lambda: SoftmaxLikelihood(num_classes=3, mixing_weights=False), 3, LABELS,
        lambda f: nn.functional.cross_entropy(f, LABELS),
    ),
    "heteroscedastic": (
        HeteroscedasticGaussianLikelihood, 2, Y[:, 0],
        lambda f: -HeteroscedasticGaussianLikelihood()(f).log_prob(Y[:, 0]).mean(),
    ),
    "student": (
        StudentTLikelihood, 1, Y[:, 1], lambda f: nn.functional.huber_loss(f[:, 0], Y[:, 1]),
    ),
    "noises": (
        lambda: MultitaskGaussianLikelihood(2, rank=0, has_global_noise=False), 2, Y,
        lambda f: (f - Y).square().mean(),
    ),
    "logistic": (
        LogisticLikelihood, 1, (Y[:, 0] > 0.3).long(),
        lambda f: nn.functional.binary_cross_entropy_with_logits(f[:, 0], (Y[:, 0] > 0.3).double()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_likelihoods_against_dense_algebra(name, tmp_path):
    make, outputs, target, loss = CASES[name]
    network = trained([2, 5, outputs], loss, steps=50)
    likelihood = make().double()
    posterior = Laplace(network, likelihood, weights="all", structure="full")
    posterior.fit((X, target), precision=0.7)
    J = jacobian(network, X).unflatten(0, (len(X), outputs))
    H = torch.einsum("ncp,nck,nkq->pq", J, fisher(likelihood, network, X), J)
    H = H + 0.7 * torch.eye(len(H), dtype=H.dtype)
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    ratio = log_det_in_long_double(H) - len(H) * math.log(0.7)
    density = float(log_density(likelihood, network(X), target, loss).detach())
    expected = density - 0.5 * (0.7 * float(weights.square().sum()) + ratio)
    got = float(posterior._fitted().log_det_ratio().detach())
    assert got == pytest.approx(ratio, rel=1e-12)
    assert posterior.log_evidence == pytest.approx(expected, abs=len(X) * 1e-10)
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(posterior.log_evidence)
    covariance = posterior.output_distribution(NEW, joint=True).covariance_matrix
    check_twelve_digits(covariance, covariance_in_long_double(H, jacobian(network, NEW)))
    # A search ends at the optimum of precisions and, where there is one, noise.
    posterior.fit((X, target))
    best = torch.tensor([posterior.precisions[k] for k in posterior.names if "weight" in k])
    for factor in (0.9, 1.1):  # of each layer's precision
        moved = posterior.log_marginal_likelihood(factor * best)
        assert float(moved) < posterior.log_evidence + 1e-4
    posterior.save(tmp_path / "file")
    density = posterior.predict(NEW).log_prob(target[:5])
    assert bool(density.isfinite().all())
    loaded = Laplace.load(tmp_path / "file", MLP([2, 5, outputs]).double())
    for other in (loaded, pickle.loads(pickle.dumps(posterior))):
        assert type(other.likelihood) is type(posterior.likelihood)
        assert torch.equal(other.predict(NEW).log_prob(target[:5]), density)
        assert torch.equal(other.log_marginal_likelihood(), posterior.log_marginal_likelihood())


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("name", ["student", "noises", "heteroscedastic"])
def test_likelihoods_do_not_depend_on_units(name, unit):
    make, outputs, target, loss = CASES[name]
    network = trained([2, 5, outputs], loss)
    scales = torch.tensor([unit, 1.0] if name == "heteroscedastic" else [unit] * outputs).double()
    last = nn.Linear(outputs, outputs).double().requires_grad_(False)
    last.weight.copy_(torch.diag(scales))
    shift = 2 * math.log(unit) if name == "heteroscedastic" else 0.0
    last.bias.copy_(torch.tensor([0.0, shift][:outputs]))
    count = target.numel()
    values = []
    for net, y in ((network, target), (nn.Sequential(network, last), unit * target)):
        posterior = Laplace(net, make().double(), weights="all", structure="full").fit((X, y))
        predicted = posterior.predict(NEW)
        spread = getattr(predicted, "scale", None)
        values.append((posterior.log_evidence, spread))
    assert values[1][0] + count * math.log(unit) == pytest.approx(values[0][0], abs=1e-3)
    torch.testing.assert_close(values[1][1] / unit, values[0][1], rtol=1e-3, atol=0)


@pytest.mark.slow
def test_several_noises_are_those_of_each_output():
    make, outputs, target, _ = CASES["noises"]
    target = target * torch.tensor([1.0, 0.1])
    network = trained([2, 8, outputs], lambda f: (f - target).square().mean(), 600)
    posterior = Laplace(network, make().double(), structure="full").fit((X, target))
    residuals = (network(X) - target).square().mean(0)
    noises = posterior.likelihood.task_noises.detach()
    torch.testing.assert_close(noises / noises.mean(), (residuals / residuals.mean()).detach())
    with pytest.warns(FitWarning, match="has_global_noise=False"):
        shared = Laplace(network, "regression", structure="full").fit((X, target))
    assert posterior.log_evidence > shared.log_evidence + 10


def test_the_evidence_at_other_hyperparameters():
    network = trained([2, 6, 1], squared_errors)
    posterior = Laplace(network, "regression", weights="all", structure="full").fit((X, Y[:, 0]))
    before = posterior.log_marginal_likelihood()
    assert not before.requires_grad
    assert float(before) == pytest.approx(posterior.log_evidence, rel=1e-12)
    numbers = torch.tensor([2.0, 0.02], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: posterior.log_marginal_likelihood(v[0], v[1]), numbers
    )
    groups = torch.tensor([2.0, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(posterior.log_marginal_likelihood, groups)
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.02
    other = Laplace(network, likelihood, weights="all", structure="full")
    other.fit((X, Y[:, 0]), precision=3.0)
    assert other.log_evidence == pytest.approx(
        float(posterior.log_marginal_likelihood(3.0, 0.02)), abs=1e-5
    )
    for wrong, error in (
        (lambda: posterior.log_marginal_likelihood(-1.0), ArgumentError),
        (lambda: posterior.log_marginal_likelihood(torch.ones(3)), ShapeError),
        (lambda: posterior.log_marginal_likelihood(1.0, 0.0), ArgumentError),
    ):
        with pytest.raises(error):
            wrong()
    classes = Laplace(MLP([2, 3]).double(), "classification").fit(
        (X, torch.arange(60) % 3), precision=1.0
    )
    with pytest.raises(UnsupportedError, match="noise"):
        classes.log_marginal_likelihood(noise=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_precision_for_each_weight(structure):
    network = trained([2, 6, 1], squared_errors)
    options = {"weights": "all", "structure": structure}
    single = Laplace(network, "regression", **options).fit((X, Y[:, 0]))
    each = Laplace(network, "regression", by="weight", **options).fit((X, Y[:, 0]))
    assert each.log_evidence > single.log_evidence
    shapes = {name: p.shape for name, p in each.precisions.items()}
    assert shapes == {name: p.shape for name, p in network.named_parameters()}
    J, delta = jacobian(network, X), dense_precisions(each)
    H = J.mT @ J / each.likelihood.noise.item()
    H = H if structure == "full" else torch.diag(H.diagonal())
    at = jacobian(network, NEW)
    expected = at @ torch.linalg.solve(H + torch.diag(delta), at.mT)
    got = each.output_distribution(NEW, joint=True).covariance_matrix
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-10 * float(expected.max()))
    with pytest.raises(UnsupportedError, match="one for each weight"):
        Laplace(network, "regression", by="weight").fit((X, Y[:, 0]))


def test_a_prior_mean_is_where_weights_are_expected():
    network = trained([2, 6, 1], squared_errors)
    center = {name: p.detach().clone() for name, p in network.named_parameters()}
    near = {name: value + 0.01 for name, value in center.items()}
    plain, informed = (
        Laplace(network, "regression", weights="all", prior_mean=mean).fit((X, Y[:, 0]))
        for mean in (0.0, near)
    )
    assert informed.log_evidence > plain.log_evidence + 5
    prior = GaussianWeightPrior(network, "network", 2.0, near)
    count = sum(p.numel() for p in network.parameters())
    assert float(prior.penalty(network).detach()) == pytest.approx(2 * count * 1e-4)
    assert float(
        GaussianWeightPrior(network, "layer", 1.0, 1.0).penalty(network).detach()
    ) == pytest.approx(sum(float((p.detach() - 1).square().sum()) for p in network.parameters()))
    with pytest.raises(ArgumentError, match="nothing"):
        GaussianWeightPrior(network, mean={"nothing": torch.zeros(1)})
    name = next(iter(center))
    with pytest.raises(ShapeError, match=name):
        GaussianWeightPrior(network, mean={name: torch.zeros(7)})
    with pytest.raises(NonFiniteError):
        GaussianWeightPrior(network, mean=math.nan)


class Reader(nn.Module):
    """A classifier of sequences, called and answering as those of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.score = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None):
        hidden = torch.tanh(self.body(self.embedding(input_ids)))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.score(pooled), "hidden": hidden}


def sentences():
    """Batches of sequences, each as long as its longest, with masks and labels."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for count, length in ((20, 6), (20, 9), (10, 7)):
        ids = torch.randint(1, 20, (count, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[: count // 2, length // 2 :] = 0
        means = (ids * mask).sum(1) // mask.sum(1)
        entries = {"input_ids": ids, "attention_mask": mask, "labels": (means // 7).clamp(0, 2)}
        batches.append(entries)
    return batches


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def reader(batches):
    def loss(network):
        batch = next(endless)
        return nn.functional.cross_entropy(
            network(**without_labels(batch))["logits"], batch["labels"]
        )

    torch.manual_seed(0)
    endless = itertools.cycle(batches)
    return train(Reader().double(), loss, 40 * len(batches), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_ragged_dictionaries_are_padded_tensors(structure):
    batches = sentences()
    network = reader(batches)

    class Padded(nn.Module):
        """The same network as a function of one padded tensor."""

        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x[:, 0].long(), x[:, 1].long())["logits"]

    def padded(batch):
        both = torch.stack([batch["input_ids"], batch["attention_mask"]], 1)
        return nn.functional.pad(both, (0, 9 - both.shape[-1]))

    x = torch.cat([padded(batch) for batch in batches]).double()
    y = torch.cat([batch["labels"] for batch in batches])
    # Kronecker factors count places, of which padding has more: of the last layer there is one.
    options = {"weights": ["score"] if structure == "kron" else "all", "structure": structure}
    posterior = Laplace(network, "classification", **options).fit(batches)
    options["weights"] = ["network.score"] if structure == "kron" else "all"
    expected = Laplace(Padded().eval(), "classification", **options).fit((x, y))
    assert [f"network.{name}" for name in posterior.names] == expected.names
    assert posterior.log_evidence == pytest.approx(expected.log_evidence, abs=1e-6)
    for got in (posterior.predict(batches), posterior.predict([(b, b["labels"]) for b in batches])):
        torch.testing.assert_close(got.probs, expected.predict(x).probs, rtol=0, atol=1e-6)
    first = without_labels(batches[0])
    torch.testing.assert_close(
        posterior.output_distribution(first, joint=True).covariance_matrix,
        expected.output_distribution(x[:20], joint=True).covariance_matrix,
        rtol=1e-6, atol=1e-9,
    )  # fmt: skip
    pairs = [(without_labels(batch), batch["labels"]) for batch in batches]
    options["weights"] = posterior.names
    again = Laplace(network, "classification", **options).fit(pairs)
    assert again.log_evidence == posterior.log_evidence


def test_dictionaries_in_every_form(tmp_path):
    batches = sentences()
    network, batch = reader(batches), batches[0]
    inputs = without_labels(batch)
    posterior = Laplace(network, "classification").fit(batch)
    assert posterior.names == ["score.weight", "score.bias"]
    same = Laplace(network, "classification", output=lambda result: result["logits"])
    assert same.fit((inputs, batch["labels"])).log_evidence == posterior.log_evidence
    posterior.save(tmp_path / "file")
    loaded = Laplace.load(tmp_path / "file", Reader().double())
    assert torch.equal(loaded.predict(inputs).probs, posterior.predict(batch).probs)
    assert torch.equal(
        pickle.loads(pickle.dumps(posterior)).predict(batch).probs, posterior.predict(batch).probs
    )
    for wrong, error, message in (
        ({"input_ids": [1]}, UnsupportedError, "input_ids"),
        ({**inputs, "attention_mask": inputs["attention_mask"][:3]}, ShapeError, "rows"),
        ({}, ArgumentError, "no entry"),
    ):
        with pytest.raises(error, match=message):
            posterior.predict(wrong)
    with pytest.raises(ArgumentError, match="labels"):
        Laplace(network, "classification").fit([inputs])
    with pytest.raises(ArgumentError, match="no points"):
        Laplace(network, "classification").fit(iter(batches))
    with pytest.raises(ArgumentError, match="no points"):
        Laplace(network, "classification").fit([])
    wrapped = nn.Module()
    wrapped.inner = network
    wrapped.forward = lambda data: network(**data)  # of one dictionary, as laplace-torch has it
    whole = Laplace(wrapped, "classification").fit(batch)
    assert whole.log_evidence == pytest.approx(posterior.log_evidence)


def test_a_network_with_its_data_is_fitted_as_a_gp():
    network = trained([2, 6, 1], squared_errors)
    expected = Laplace(network, "regression", weights="all").fit((X, Y[:, 0]))
    weights = copy.deepcopy(network.state_dict())
    fits = []
    for fit in (fit_gpytorch_mll, fit_mll):
        model = LinearizedNetwork(network, train_inputs=X, train_targets=Y[:, 0])
        likelihood = GaussianLikelihood().double()
        mll = LaplaceMarginalLogLikelihood(likelihood, model)
        fit(mll)
        mll.eval()
        fits.append(float(-mll.compute_custom_loss().detach()))
        assert fits[-1] * len(X) == pytest.approx(expected.log_evidence, abs=1e-3)
        noise = likelihood.noise.item()
        assert noise == pytest.approx(expected.likelihood.noise.item(), rel=0.02)
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
    outputs, targets = model(NEW), likelihood(model(NEW))
    torch.testing.assert_close(outputs.mean, network(NEW)[:, 0].detach())
    torch.testing.assert_close(targets.variance, outputs.variance + noise)
    torch.testing.assert_close(
        outputs.variance, expected.output_distribution(NEW).variance, rtol=0.05, atol=0
    )


def test_registered_priors_count_in_fits():
    network = trained([2, 6, 1], squared_errors)
    noises = []
    for prior in (None, LogNormalPrior(math.log(1.0), 0.05)):
        model = LinearizedNetwork(network, train_inputs=X, train_targets=Y[:, 0])
        likelihood = GaussianLikelihood(noise_prior=prior).double()
        fit_gpytorch_mll(LaplaceMarginalLogLikelihood(likelihood, model))
        noises.append(likelihood.noise.item())
    assert noises[1] > 3 * noises[0]
    with pytest.raises(ArgumentError, match="train_targets"):
        LinearizedNetwork(network, train_inputs=X)
    with pytest.raises(UnsupportedError, match="train_inputs"):
        LinearizedNetwork(network, train_inputs=DataLoader(X), train_targets=Y)


@pytest.mark.slow
def test_training_by_the_evidence_is_one_call_that_resumes(tmp_path):
    def made():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)).double()
        return Laplace(network, "regression", weights="all")

    options = {"batch_size": 30, "burn_in": 4, "lr": 0.01, "every": 2}
    whole = made().fit_online((X, Y[:, 0]), epochs=12, **options)
    path = tmp_path / "checkpoint"
    made().fit_online((X, Y[:, 0]), epochs=6, checkpoint=path, **options)
    resumed = made().fit_online((X, Y[:, 0]), epochs=12, checkpoint=path, **options)
    assert resumed.training.history == whole.training.history
    assert torch.equal(resumed.predict(NEW).mean, whole.predict(NEW).mean)
    assert torch.equal(resumed.predict(NEW).stddev, whole.predict(NEW).stddev)
    assert whole.log_evidence / len(X) >= whole.training.objective - 0.05
    loader = DataLoader(list(zip(X, Y[:, 0], strict=True)), batch_size=30)
    online = made().fit_online(loader, epochs=3, burn_in=1)
    assert math.isfinite(online.log_evidence)
    read = reader(sentences())
    online = Laplace(read, "classification").fit_online(sentences(), epochs=2, burn_in=1)
    assert online.predict(sentences()).probs.shape == (50, 3)


def test_bad_inputs_are_refused_by_name():
    posterior = Laplace(MLP([2, 4, 1]).double(), "regression")
    for call in (
        lambda: posterior.output_distribution(NEW),
        lambda: posterior.sample_outputs(NEW),
        posterior.to_botorch,
        posterior.log_marginal_likelihood,
    ):
        with pytest.raises(ArgumentError, match="not fitted"):
            call()
    network = trained([2, 4, 1], squared_errors)
    posterior = Laplace(network, "regression").fit((X, Y[:, 0]))
    for call, error in (
        (lambda: posterior.output_distribution(NEW[:, :1]), (ShapeError, ArgumentError)),
        (lambda: posterior.output_distribution(NEW[:0]), (ShapeError, ArgumentError)),
        (lambda: posterior.output_distribution(NEW / 0), NonFiniteError),
        (lambda: posterior.output_covariance(NEW, NEW[:, :1]), ShapeError),
        (lambda: posterior.sample_outputs(NEW, 0), ArgumentError),
        (lambda: posterior.sample_weights(0), ArgumentError),
        (lambda: posterior.predict(NEW.float()), ArgumentError),
        (lambda: posterior.output_distribution(NEW.float()), ArgumentError),
    ):
        with pytest.raises(error):
            call()
    single = copy.deepcopy(network).float()
    fitted = Laplace(single, "regression").fit((X.float(), Y[:, 0].float()))
    with pytest.raises(ArgumentError):
        fitted.output_distribution(NEW)
    labels = torch.nn.functional.one_hot(torch.arange(60) % 3)
    with pytest.raises(ShapeError, match="argmax"):
        Laplace(MLP([2, 3]).double(), "classification").fit((X, labels))
    for wrong in (
        MultitaskGaussianLikelihood(2, rank=0),
        MultitaskGaussianLikelihood(2, rank=1, has_global_noise=False),
        SoftmaxLikelihood(num_classes=3, num_features=3),
    ):
        with pytest.raises(UnsupportedError, match="likelihood"):
            Laplace(network, wrong)
    with pytest.raises(ShapeError, match="one for LogisticLikelihood"):
        Laplace(MLP([2, 3]).double(), LogisticLikelihood()).fit((X, (Y[:, 0] > 0).long()))
    with pytest.raises(ShapeError, match="a mean and the logarithm"):
        Laplace(network, HeteroscedasticGaussianLikelihood()).fit((X, Y[:, 0]))
