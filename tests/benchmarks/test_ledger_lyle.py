"""Problems of Lyle et al. (2020): the models, their evidence, and the bound by training speed."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

import reference
from benchmarks.evidence.ledger import training_speed_linear, training_speed_networks
from benchmarks.evidence.ledger.training_speed_linear import PROBLEMS, linear_models


@pytest.mark.parametrize("problem", PROBLEMS)
def test_models_of_a_problem_share_their_targets(problem):
    models = linear_models(problem, seed=1, num_points=14)
    targets = [model.train_targets for model in models.values()]
    assert all(torch.equal(targets[0], other) for other in targets)
    again = linear_models(problem, seed=1, num_points=14)
    other = linear_models(problem, seed=2, num_points=14)
    for setting, model in models.items():
        assert torch.equal(model.train_inputs[0], again[setting].train_inputs[0])
    assert not torch.equal(targets[0], next(iter(other.values())).train_targets) or (
        problem == "frequency"  # two classes
    )


def test_features_are_prefixes_with_the_informative_first():
    models = linear_models("features", seed=0, num_points=4000)
    widest = models[30].train_inputs[0]
    y = models[30].train_targets
    correlation = torch.corrcoef(torch.cat([widest, y.unsqueeze(-1)], -1).T)[-1, :-1]
    assert correlation[:15].min() > 0.6 > 0.1 > correlation[15:].abs().max()
    assert torch.equal(models[10].train_inputs[0], widest[:, :10])
    assert models[10].prior_variance[0].item() == pytest.approx(0.01)


@pytest.mark.slow
def test_the_gap_of_the_expected_sum_is_the_sum_of_divergences():
    small = {"num_points": 12, "repeats": 2, "steps": 3}
    cell = training_speed_linear.LINEAR.cells()[0] | small
    row = training_speed_linear.run_linear(cell)
    models = linear_models(cell["problem"], cell["seed"], 12)
    for index, model in enumerate(models.values()):
        x, y = model.train_inputs[0], model.train_targets
        K = x @ torch.diag(model.prior_variance) @ x.mT + model.noise * torch.eye(12).double()
        exact = reference.log_density(K.detach(), y).item()
        assert row["lml"][index] == pytest.approx(exact, abs=1e-8)
        assert row["expected"][index] + row["kl"][index] == pytest.approx(exact, abs=1e-7)


def test_weights_of_a_combination_follow_a_better_model():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (60,), generator=generator)
    right = torch.nn.functional.one_hot(y, 3).float() * 4
    wrong = torch.randn(60, 3, generator=generator)
    cell = {"epochs": 5, "seed": 0, "weights_lr": 0.1}
    weights = training_speed_networks._weights_after(torch.stack([right, wrong], -1), y, cell)
    assert weights[0] > 0.6 > 0.5 > weights[1]


def test_losses_of_groups_are_those_of_logistic_classifiers():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 10
    units = torch.randn(120, 10, 40, generator=generator)
    units[:, 2, 10:20] += (y == 2).float().unsqueeze(-1)
    units[:, 2, 13] = 0.5  # a dead unit
    losses = training_speed_networks._group_losses(units, y)
    x = StandardScaler().fit_transform(units[:, 2, 10:20].double().numpy())
    classifier = LogisticRegression(tol=1e-10).fit(x, y == 2)  # of the same prior
    assert losses.shape == (10, 4)
    expected = log_loss(y == 2, classifier.predict_proba(x)[:, 1])
    assert losses[2, 1].item() == pytest.approx(expected, rel=1e-4)
