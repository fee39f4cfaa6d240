"""The conditional objective of several tasks a row, and of targets that are missing."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from objective_cases import STRATEGIES, MultitaskModel, data, gradients_of, make

import reference
from gpclml.conditioning import (
    HeldOut,
    KFold,
    LeaveOneOut,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood


@pytest.mark.parametrize("interleaved", [True, False])
def test_multitask_holds_out_rows_with_all_their_tasks(interleaved):
    x, _ = data(n=7, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x), x], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    model = MultitaskModel(x, y, likelihood).double()
    output = likelihood(model(x))
    K = output.lazy_covariance_matrix.to_dense()
    r = (y - output.mean).flatten()
    rows = torch.tensor([4, 1])
    flat = (rows[:, None] * 3 + torch.arange(3)).flatten()
    expected = reference.conditional_log_density(K, r, flat) / 6
    if not interleaved:
        # Task noises differ by task: the same covariance in the other order.
        state = model.state_dict()
        model = MultitaskModel(x, y, likelihood, interleaved=False).double()
        model.load_state_dict(state)
    mll = ConditionalMarginalLogLikelihood(likelihood, model, HeldOut(rows))
    torch.testing.assert_close(mll(model(x), y), expected)
    folds = ConditionalMarginalLogLikelihood(likelihood, model, KFold(3))
    assert folds(model(x), y).shape == ()


@pytest.mark.parametrize("conditioning", STRATEGIES[:4], ids=repr)
def test_missing_targets_leave_value_and_count(conditioning):
    x, y = data()
    y[3] = y[10] = float("nan")
    keep = ~y.isnan()
    model, likelihood = make(x, y)
    complete, _ = make(x[keep], y[keep], likelihood=likelihood)
    complete.load_state_dict(model.state_dict())
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)
        value = mll(model(x), y)
        gradients = gradients_of(value, model)
    mll = ConditionalMarginalLogLikelihood(likelihood, complete, conditioning)
    expected = mll(complete(x[keep]), y[keep])
    torch.testing.assert_close(value, expected)
    for one, other in zip(gradients, gradients_of(expected, complete), strict=True):
        torch.testing.assert_close(one, other)


def test_missing_targets_of_one_batch_member_do_not_touch_the_others():
    x, y = data(batch=(2,))
    y[1, 4] = float("nan")
    model, likelihood = make(x, y, (2,), priors=True)
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())
        value = mll(model(x), y)
    for i in range(2):
        keep = ~y[i].isnan()
        one, one_likelihood = make(x[i][keep], y[i][keep], priors=True)
        mll = ConditionalMarginalLogLikelihood(one_likelihood, one, LeaveOneOut())
        torch.testing.assert_close(value[i], mll(one(x[i][keep]), y[i][keep]))


@pytest.mark.parametrize("some", [1, 3])
@pytest.mark.parametrize("noises", [True, False])
def test_missing_tasks_of_a_row(noises, some):
    x, _ = data(n=6, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x)], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, has_task_noise=noises).double()
    model = MultitaskModel(x, y, likelihood).double()
    output = likelihood(model(x))
    K, r = output.lazy_covariance_matrix.to_dense(), (y - output.mean).flatten()
    y[2, 0] = y[5, 0] = y[5, 1] = float("nan")
    observed = torch.tensor([i for i in range(12) if i not in (4, 10, 11)])
    K, r = K[observed][:, observed], r[observed]
    # Row 2 keeps task 1 (flat 5, now at 4); row 5 is gone whole.
    rows = [[0, 2, 5], [1], [3, 4]][:some]
    blocks = [torch.tensor(one) for one in ([0, 1, 4], [2, 3], [5, 6, 7, 8])][:some]
    expected = sum(reference.conditional_log_density(K, r, block) for block in blocks)
    expected = expected / sum(map(len, blocks))
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, HeldOut(*rows))
        value = mll(model(x), y)
    torch.testing.assert_close(value, expected)
    gradients = gradients_of(value, model), gradients_of(expected, model)
    torch.testing.assert_close(*gradients)
