"""How sure Laplace posteriors of classifiers are: against the network alone, on real data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

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
    validated_temperature,
)

SEEDS = range(5)
EPOCHS = {"overtrained": 200, "early-stopped": 4}


@dataclass
class Trained:
    """A trained network and pairs of points and classes."""

    network: nn.Module
    train: tuple
    validation: tuple
    test: tuple


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
            for some in torch.randperm(count).split(50):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(x[rows[0][some]]), y[rows[0][some]])
                loss.backward()
                optimizer.step()
    return Trained(network.eval(), *((x[one], y[one]) for one in rows))


def fitted(one, structure="kron", validation=None, **options):
    posterior = Laplace(one.network, "classification", structure=structure)
    return posterior.fit(one.train, validation=validation, progress=False, **options)


def loss(posterior, pair, method="closed"):
    return -float(posterior.predict(pair[0], method, progress=False).log_prob(pair[1]).mean())


def losses(name, regime, structure, count):
    """Log loss of new points less that of the network alone, of each seed."""
    found = []
    for seed in SEEDS:
        one = trained(name, regime, seed)
        some = None if count is None else tuple(part[:count] for part in one.validation)
        posterior = fitted(one, structure, some)
        found.append(loss(posterior, one.test) - loss(posterior, one.test, "mode"))
    return torch.tensor(found)


@pytest.mark.parametrize("count", [None, 50], ids=["without", "50"])
@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("regime", EPOCHS)
@pytest.mark.parametrize("name", ["cancer", "digits"])
def test_new_points_are_about_as_likely_as_under_the_network_at_least(
    name, regime, structure, count
):
    found = losses(name, regime, structure, count)
    assert float(found.mean()) <= 0.005
    assert float(found.max()) <= 0.02


def test_networks_that_are_too_sure_gain():
    for structure in ("full", "kron"):
        for count in (None, 100):
            assert float(losses("cancer", "overtrained", structure, count).mean()) < -0.03


def test_networks_that_are_not_sure_enough_gain_by_validation():
    assert float(losses("digits", "early-stopped", "kron", 100).mean()) < -0.04


def auroc(inside, outside):
    confidence = torch.cat([inside, outside]).max(-1).values
    return roc_auc_score([True] * len(inside) + [False] * len(outside), confidence)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_points_unlike_the_training_data_are_told_apart_as_by_the_evidence(structure):
    scores = {}
    for seed in SEEDS:
        one = trained("cancer", "overtrained", seed)
        inside, outside = one.test[0], 5 * one.test[0]
        some = tuple(part[:50] for part in one.validation)
        plain = fitted(one, structure)
        plain.covariance_scale = plain.output_scale = 1.0  # as the evidence has it
        ways = {
            "evidence": plain,
            "without": fitted(one, structure),
            "kept": fitted(one, structure, some, spread="evidence"),
        }
        for name, posterior in ways.items():
            probabilities = (posterior.predict(x, progress=False).probs for x in (inside, outside))
            scores.setdefault(name, []).append(auroc(*probabilities))
        mode = (plain.predict(x, "mode").probs for x in (inside, outside))
        scores.setdefault("mode", []).append(auroc(*mode))
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    assert means["evidence"] > means["mode"] + 0.1
    assert means["without"] == pytest.approx(means["evidence"], abs=0.02)
    assert means["kept"] == pytest.approx(means["evidence"], abs=0.02)


def test_training_points_lose_little_and_a_number_is_taken_as_it_is():
    one = trained("digits", "overtrained", 0)
    posterior = fitted(one)
    assert posterior.output_scale > 1
    assert posterior.output_temperature == 1
    lost = loss(posterior, one.train) - loss(posterior, one.train, "mode")
    assert lost == pytest.approx(0.003, abs=2e-4)
    number = fitted(one, precision=1.0)
    assert (number.covariance_scale, number.output_scale) == (1.0, 1.0)
    again = fitted(one, validation=one.validation, precision=1.0)
    assert loss(again, one.test) < loss(number, one.test) - 0.1


def test_a_loader_gives_the_scale_of_tensors():
    one = trained("digits", "overtrained", 1)
    posterior = fitted(one, validation=one.validation, spread="evidence")
    loader = DataLoader(TensorDataset(*one.train), batch_size=64)
    other = Laplace(one.network, "classification")
    other.fit(loader, validation=one.validation, spread="evidence", progress=False)
    assert other.output_scale == pytest.approx(posterior.output_scale, rel=1e-3)


def sure(count, wrong, outputs=4.0):
    """Outputs of two classes, and classes of which so many are not the likelier one."""
    logits = torch.zeros(count, 2)
    logits[:, 0] = outputs
    return logits, (torch.arange(count) < wrong).long()


SOFTMAX = output_likelihood(SoftmaxLikelihood(num_classes=2, mixing_weights=False))


def test_a_temperature_below_one_needs_evidence():
    none = torch.zeros(1, 2, 2)
    found = {}
    for count, wrong in ((30, 0), (3000, 0), (3000, 54), (300, 60)):
        logits, y = sure(count, wrong)
        covariance = none.expand(count, 2, 2)
        found[count, wrong] = validated_temperature(SOFTMAX, logits, y, covariance, logits)[0]
    assert 0.85 < found[30, 0] < 1
    assert found[3000, 0] < 0.6
    assert found[3000, 54] == pytest.approx(1, abs=0.01)  # 1.8 % are wrong, as it says
    assert found[300, 60] > 1.5


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
