"""How sure Laplace posteriors of classifiers are: against the network alone, on real data."""

import functools
import math
from collections import namedtuple

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpclml import Laplace
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.laplace.calibration import (
    confident_as_the_network,
    scaled_outputs,
    validated_factor,
    validated_temperature,
)

SEEDS = range(5)
EPOCHS = {"overtrained": 200, "early-stopped": 4}


Trained = namedtuple("Trained", ("network", "train", "validation", "test"))


@functools.cache
def table(name):
    data = {"digits": load_digits, "cancer": load_breast_cancer}[name]()
    x = (data.data - data.data.mean(0)) / (data.data.std(0) + 1e-9)
    return torch.tensor(x).float(), torch.tensor(data.target).long()


@functools.cache
def trained(name, regime, seed):
    x, y = table(name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    count, held_out = {"digits": (300, 150), "cancer": (150, 100)}[name]
    rows = order[:count], order[count : count + held_out], order[count + held_out :]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, int(y.max()) + 1)
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        for _ in range(EPOCHS[regime]):
            for batch in rows[0][torch.randperm(count)].split(50):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
                optimizer.step()
    return Trained(network.eval(), *((x[index], y[index]) for index in rows))


def fitted(case, structure="kron", validation=None, **options):
    posterior = Laplace(case.network, "classification", structure=structure)
    return posterior.fit(case.train, validation=validation, progress=False, **options)


def loss(posterior, pair, method="closed"):
    return -float(posterior.predict(pair[0], method, progress=False).log_prob(pair[1]).mean())


NO_WORSE = [("cancer", "early-stopped", "full", None, 0.005),
            ("cancer", "early-stopped", "kron", 50, 0.005),
            ("cancer", "overtrained", "full", 50, 0.005),
            ("digits", "overtrained", "full", None, 0.005),
            ("digits", "overtrained", "kron", 50, 0.005),
            ("digits", "early-stopped", "kron", None, 0.005)]  # fmt: skip
TOO_SURE = [("cancer", "overtrained", structure, count, -0.03)
            for structure in ("full", "kron") for count in (None, 100)]  # fmt: skip
NOT_SURE_ENOUGH = [("digits", "early-stopped", "kron", 100, -0.04)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "regime", "structure", "count", "most"), NO_WORSE + TOO_SURE + NOT_SURE_ENOUGH
)
def test_new_points_are_about_as_likely_as_under_the_network_or_gain(
    name, regime, structure, count, most
):
    differences = []
    for seed in SEEDS:
        case = trained(name, regime, seed)
        validation = None if count is None else tuple(v[:count] for v in case.validation)
        posterior = fitted(case, structure, validation)
        differences.append(loss(posterior, case.test) - loss(posterior, case.test, "mode"))
    assert sum(differences) / len(differences) <= most
    assert max(differences) <= 0.02


def auroc(inside, outside):
    confidence = torch.cat([inside, outside]).max(-1).values
    return roc_auc_score([True] * len(inside) + [False] * len(outside), confidence)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_points_unlike_the_training_data_are_told_apart_as_by_the_evidence(structure):
    scores, losses = {}, {}
    for seed in SEEDS:
        case = trained("cancer", "overtrained", seed)
        inside, outside = case.test[0], 5 * case.test[0]
        few = tuple(v[:30] for v in case.validation)
        plain = fitted(case, structure)
        plain.covariance_scale = plain.output_scale = 1.0  # as the evidence has it
        ways = {
            "evidence": plain,
            "without": fitted(case, structure),
            "kept": fitted(case, structure, few, spread="evidence"),
            "dropped": fitted(case, structure, few, spread="validation"),
            "both": fitted(case, structure, few),
        }
        pair = (ways["both"].predict(few[0], method) for method in ("closed", "mode"))
        calibrated, alone = (predicted.log_prob(few[1]).double() for predicted in pair)
        assert (calibrated - alone).mean() >= -(calibrated - alone).std() / len(alone) ** 0.5
        for name, posterior in ways.items():
            losses.setdefault(name, []).append(loss(posterior, case.test))
        for name, posterior in ways.items():
            probabilities = (posterior.predict(x, progress=False).probs for x in (inside, outside))
            scores.setdefault(name, []).append(auroc(*probabilities))
        mode = (plain.predict(x, "mode").probs for x in (inside, outside))
        scores.setdefault("mode", []).append(auroc(*mode))
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    assert means["evidence"] > means["mode"] + 0.1
    assert means["without"] == pytest.approx(means["evidence"], abs=0.02)
    assert means["kept"] == pytest.approx(means["evidence"], abs=0.02)
    # The default has the better of two: densities of a dropped, scores of a kept covariance.
    assert means["both"] == pytest.approx(means["evidence"], abs=0.02)
    assert means["dropped"] < means["evidence"] - 0.05
    assert sum(losses["both"]) <= sum(losses["dropped"]) + 0.01


def test_training_points_lose_little_and_a_number_is_taken_as_it_is():
    case = trained("digits", "overtrained", 0)
    posterior = fitted(case)
    assert posterior.output_scale > 1
    assert posterior.output_temperature == 1
    lost = loss(posterior, case.train) - loss(posterior, case.train, "mode")
    assert lost == pytest.approx(0.003, abs=2e-4)
    number = fitted(case, precision=1.0)
    assert (number.covariance_scale, number.output_scale) == (1.0, 1.0)
    loader = DataLoader(TensorDataset(*case.train), batch_size=64)
    assert Laplace(case.network, "classification").fit(loader).output_scale == pytest.approx(
        posterior.output_scale, rel=1e-3
    )
    again = fitted(case, validation=case.validation, precision=1.0)
    assert loss(again, case.test) < loss(number, case.test) - 0.1


def sure(count, wrong, outputs=4.0):
    """Outputs of two classes, and classes of which so many are not the likelier case."""
    logits = torch.zeros(count, 2)
    logits[:, 0] = outputs
    return logits, (torch.arange(count) < wrong).long()


SOFTMAX = output_likelihood(SoftmaxLikelihood(num_classes=2, mixing_weights=False))


def test_a_temperature_below_one_needs_evidence():
    temperatures = {}
    for count, wrong in ((30, 0), (3000, 0), (3000, 54), (300, 60)):
        logits, y = sure(count, wrong)
        covariance = torch.zeros(count, 2, 2)
        temperatures[count, wrong] = validated_temperature(SOFTMAX, logits, y, covariance, logits)[
            0
        ]
    assert 0.85 < temperatures[30, 0] < 1
    assert temperatures[3000, 0] < 0.6
    assert temperatures[3000, 54] == pytest.approx(1, abs=0.01)  # 1.8 % are wrong, as it says
    assert temperatures[300, 60] > 1.5


def test_only_points_of_larger_variances_than_validation_points_are_less_sure():
    logits, y = sure(200, 1)
    covariance = 9 * torch.eye(2).expand(200, 2, 2)
    factor, temperature = validated_factor(SOFTMAX, logits, y, covariance, 1.1)
    assert 1.1 < factor <= math.sqrt(1 + 9 * math.pi / 8)
    scaled = scaled_outputs(SOFTMAX, logits, covariance.diagonal(dim1=-2, dim2=-1), factor)
    alone = SOFTMAX.predictive(logits, 0 * covariance)
    predicted = SOFTMAX.predictive(scaled / temperature, covariance)
    gains = predicted.log_prob(y).double() - alone.log_prob(y).double()
    assert gains.mean() >= -gains.std() / math.sqrt(200)
    wider = SOFTMAX.predictive(factor * logits / temperature, 4 * covariance)
    assert float(wider.probs.max()) < float(predicted.probs.max()) - 0.02


@pytest.mark.parametrize("binary", [False, True])
def test_no_covariance_is_the_network(binary):
    logits, y = sure(200, 4)
    likelihood = output_likelihood(BernoulliLikelihood()) if binary else SOFTMAX
    outputs = logits[:, :1] / 2 if binary else logits
    y = 1 - y if binary else y
    covariance = torch.zeros(200, outputs.shape[-1], outputs.shape[-1])
    assert confident_as_the_network(likelihood, outputs, y, covariance) == 1
    wide = covariance + 9 * torch.eye(outputs.shape[-1])
    factor = confident_as_the_network(likelihood, outputs, y, wide)
    # All points have the same covariance: the factor makes up for nearly all of it.
    root = math.sqrt(1 + 9 if binary else 1 + 9 * math.pi / 8)
    assert 0.6 < factor / root <= 1
