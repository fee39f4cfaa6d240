"""The objectives of the ablation: which points each sees, and when."""

import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch.distributions import MultivariateNormal

from benchmarks.data import load
from benchmarks.uci.training import (
    SubsetMarginalLogLikelihood,
    make_objective,
    objective_names,
    uses_held_out,
)
from gpclml.conditioning import KFold, RandomHoldout, RandomOrderings
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fresh_loss
from gpclml.models import GPRegression

N = 30


@pytest.fixture
def model():
    data = load("diabetes")
    return GPRegression(data.inputs[:N], data.targets[:N])


def drawn_rows(seed, share=0.8):
    [rows] = RandomHoldout(share).held_out(N, torch.Generator().manual_seed(seed))
    return rows.squeeze(0)


def density_of_rows(model, rows):
    prior = model.likelihood(model(*model.train_inputs))
    covariance = prior.covariance_matrix[rows][:, rows]
    return MultivariateNormal(prior.mean[rows], covariance).log_prob(model.train_targets[rows])


def test_the_subset_likelihood_is_that_of_a_model_of_these_rows(model):
    rows = drawn_rows(seed=3)
    mll = make_objective("lml-subset", model, held_out=0.2, seed=3)
    x, y = model.train_inputs[0][rows], model.train_targets[rows]
    small = GPRegression(x, y, standardize=False)
    small.load_state_dict(model.state_dict())  # its standardizer among it
    small.set_train_data(targets=y)
    reference = ExactMarginalLogLikelihood(small.likelihood, small)
    value = reference(small(x), y)
    assert len(rows) == 24
    assert -mll.compute_custom_loss().item() == pytest.approx(value.item(), rel=1e-10)
    assert mll(model(*model.train_inputs), model.train_targets).item() == pytest.approx(
        value.item(), rel=1e-10
    )


def test_the_subset_likelihood_has_its_gradients(model):
    loss = make_objective("lml-subset", model, held_out=0.2, seed=3).compute_custom_loss()
    expected = -density_of_rows(model, drawn_rows(seed=3)) / 24
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, got, want in zip(
        names,
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, msg=name)


def test_the_subset_is_fresh_at_each_call_and_fixed_for_a_line_search(model):
    mll = make_objective("lml-subset", model)
    assert fresh_loss(mll).item() != fresh_loss(mll).item()
    assert mll.compute_custom_loss().item() == mll.compute_custom_loss().item()
    assert isinstance(mll, SubsetMarginalLogLikelihood)
    start = -mll.compute_custom_loss().item()
    assert fit_mll(mll, progress=False).objective > start


def test_priors_weigh_as_in_gpytorch(model):
    import gpytorch

    model.likelihood.noise_covar.register_prior(
        "noise_prior", gpytorch.priors.GammaPrior(2.0, 3.0), "noise"
    )
    mll = SubsetMarginalLogLikelihood(model.likelihood, model, 1.0)
    value = mll(model(*model.train_inputs), model.train_targets)
    reference = ExactMarginalLogLikelihood(model.likelihood, model)
    expected = reference(model(*model.train_inputs), model.train_targets)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize(
    ("name", "conditioning"),
    [
        ("clml-fixed", RandomHoldout(0.2, seed=7)),
        ("clml-folds", KFold(10)),
        ("clml-orderings", RandomOrderings(5, 24)),
    ],
)
def test_what_is_held_out(model, name, conditioning):
    mll = make_objective(name, model, held_out=0.2, seed=7)
    output = model(*model.train_inputs)
    reference = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=7)
    for _ in range(2):
        assert torch.equal(mll(output, model.train_targets), reference(output, model.train_targets))


@pytest.mark.parametrize("name", objective_names())
def test_only_redrawn_objectives_change_from_call_to_call(model, name):
    mll = make_objective(name, model)
    changes = abs(fresh_loss(mll).item() - fresh_loss(mll).item()) > 1e-12
    assert changes == (name not in ("lml", "loo", "clml-fixed"))


def test_objectives_with_a_share():
    assert {name for name in objective_names() if uses_held_out(name)} == {
        "clml", "clml-fixed", "clml-orderings", "lml-subset",
    }  # fmt: skip
