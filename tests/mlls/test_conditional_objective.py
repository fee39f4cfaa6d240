from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from objective_cases import STRATEGIES, data, dense, gradients_of, make

import reference
from gpclml.conditioning import (
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood


@pytest.mark.parametrize("conditioning", STRATEGIES, ids=repr)
def test_value_and_gradient_match_the_definition(conditioning):
    x, y = data()
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)
    K, r = dense(model, likelihood, x, y)
    blocks = [block for group in conditioning.held_out(len(y)) for block in group]
    expected = sum(reference.conditional_log_density(K, r, block) for block in blocks)
    expected = expected / sum(map(len, blocks))
    value = mll(model(x), y)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    pairs = zip(gradients_of(value, model), gradients_of(expected, model), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("priors", [False, True])
def test_no_conditioning_is_the_log_marginal_likelihood(batch, priors):
    x, y = data(batch=batch)
    model, likelihood = make(x, y, batch, priors)
    ours = ConditionalMarginalLogLikelihood(likelihood, model, LastPoints(m=0))(model(x), y)
    upstream = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
    assert ours.shape == torch.Size(batch)
    torch.testing.assert_close(ours, upstream, rtol=1e-9, atol=1e-9)
    pairs = zip(gradients_of(ours, model), gradients_of(upstream, model), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("priors", [False, True])
def test_leave_one_out_is_gpytorchs(batch, priors):
    x, y = data(batch=batch)
    model, likelihood = make(x, y, batch, priors)
    ours = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())(model(x), y)
    upstream = gpytorch.mlls.LeaveOneOutPseudoLikelihood(likelihood, model)(model(x), y)
    torch.testing.assert_close(ours, upstream, rtol=1e-9, atol=1e-9)
    pairs = zip(gradients_of(ours, model), gradients_of(upstream, model), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("conditioning", STRATEGIES, ids=repr)
@pytest.mark.parametrize("batch", [(4,), (2, 3)])
def test_batch_is_a_stack_of_singles(conditioning, batch):
    x, y = data(batch=batch)
    model, likelihood = make(x, y, batch, priors=True)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
    value = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)(model(x), y)
    for index in torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)):
        i = tuple(index.tolist())
        one, one_likelihood = make(x[i], y[i], priors=True)
        for single, many in zip(one.parameters(), model.parameters(), strict=True):
            single.data.copy_(many.data[i])
        alone = ConditionalMarginalLogLikelihood(one_likelihood, one, conditioning)(one(x[i]), y[i])
        torch.testing.assert_close(value[i], alone)


@pytest.mark.parametrize("batch", [(3,), (2, 3), (3, 3)])
def test_the_prior_of_a_shared_ard_kernel_counts_whole_in_every_member(batch):
    x, y = data(d=3, batch=batch)
    model, likelihood = make(x, y, (), priors=True)
    plain, plain_likelihood = make(x, y, ())
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "prior" not in k})
    with_priors = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())(model(x), y)
    without = ConditionalMarginalLogLikelihood(plain_likelihood, plain, LeaveOneOut())(plain(x), y)
    expected = sum(
        prior.log_prob(closure(module)).sum()
        for _, module, prior, closure, _ in model.named_priors()
    )
    torch.testing.assert_close(
        with_priors - without, (expected / y.shape[-1]).expand(batch), rtol=1e-8, atol=1e-8
    )


class _AddedLoss(gpytorch.mlls.AddedLossTerm):
    def __init__(self, value):
        self.value = value

    def loss(self, *params):
        return self.value


def test_added_losses_weigh_one_nth_as_upstream():
    x, y = data()
    model, likelihood = make(x, y)
    model.register_added_loss_term("extra")
    model.update_added_loss_term("extra", _AddedLoss(torch.tensor(-2.5, dtype=torch.float64)))
    ours = ConditionalMarginalLogLikelihood(likelihood, model, LastPoints(0))(model(x), y)
    upstream = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
    torch.testing.assert_close(ours, upstream)


def test_fixed_noise():
    x, y = data()
    noise = torch.linspace(0.01, 0.3, len(y), dtype=torch.float64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    model, likelihood = make(x, y, likelihood=likelihood)
    held_out = torch.tensor([2, 5, 6])
    mll = ConditionalMarginalLogLikelihood(likelihood, model, HeldOut(held_out))
    K = model(x).lazy_covariance_matrix.to_dense() + noise.diag()
    expected = reference.conditional_log_density(K, y - model(x).mean, held_out) / 3
    torch.testing.assert_close(mll(model(x), y), expected)
    torch.testing.assert_close(mll(model(x), y, x), expected)


def test_default_redraws_in_a_loop_and_is_fixed_for_a_line_search():
    x, y = data(n=40)
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model)
    values = torch.stack([mll(model(x), y) for _ in range(6)])
    assert values.unique().numel() == 6
    again = ConditionalMarginalLogLikelihood(likelihood, model)
    torch.testing.assert_close(values, torch.stack([again(model(x), y) for _ in range(6)]))
    other = ConditionalMarginalLogLikelihood(likelihood, model, seed=1)
    assert not torch.equal(values[0], other(model(x), y))
    losses = torch.stack([mll.compute_custom_loss() for _ in range(3)])
    assert losses.unique().numel() == 1
    folds = KFold(10).held_out(40, torch.Generator().manual_seed(0))
    fixed = ConditionalMarginalLogLikelihood(likelihood, model, HeldOut(*torch.cat(folds)))
    torch.testing.assert_close(losses[0], -fixed(model(x), y))


def test_global_random_state_is_untouched():
    x, y = data()
    model, likelihood = make(x, y)
    state = torch.get_rng_state()
    mll = ConditionalMarginalLogLikelihood(likelihood, model)
    mll(model(x), y)
    mll.compute_custom_loss()
    assert torch.equal(state, torch.get_rng_state())


def test_copies_draw_on_from_where_the_original_stands():
    x, y = data(n=30)
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model)
    mll(model(x), y)
    copies = [copy.deepcopy(mll), pickle.loads(pickle.dumps(mll))]
    expected = mll(model(x), y)
    for clone in copies:
        torch.testing.assert_close(clone(clone.model(x), y), expected)


def test_float32_is_close_to_float64():
    values = []
    for dtype in (torch.float32, torch.float64):
        x, y = data(n=60, dtype=dtype)
        model, likelihood = make(x, y)
        for conditioning in STRATEGIES:
            value = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)(model(x), y)
            assert value.dtype == dtype
            values.append(value.detach().double())
    single, double = torch.stack(values).view(2, -1)
    torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_device_gives_the_same_value_and_gradient(device, dtype):
    results = []
    for place in (torch.device("cpu"), device):
        x, y = (t.to(place) for t in data(n=60, dtype=dtype))
        model, likelihood = make(x, y)
        for conditioning in (None, *STRATEGIES):
            value = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)(model(x), y)
            assert value.device.type == place.type
            gradients = [g.cpu().flatten() for g in gradients_of(value, model)]
            results.append(torch.cat([value.detach().cpu().view(1), *gradients]))
    half = len(results) // 2
    tolerance = (
        {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    )
    torch.testing.assert_close(results[:half], results[half:], **tolerance)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_data(n):
    x, y = data(n=n)
    model, likelihood = make(x, y)
    for conditioning in (None, KFold(10), LeaveOneOut(), RandomHoldout(0.5), LastPoints(0)):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)
        assert torch.isfinite(mll(model(x), y))
        assert torch.isfinite(mll.compute_custom_loss())


def test_settings_of_others_do_not_matter():
    x, y = data(n=30)
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())
    expected = mll(model(x), y)
    with (
        gpytorch.settings.max_cholesky_size(1),
        gpytorch.settings.fast_computations(log_prob=False),
        gpytorch.settings.max_root_decomposition_size(2),
    ):
        torch.testing.assert_close(mll(model(x), y), expected, rtol=0, atol=0)


class _Approximate(gpytorch.models.ApproximateGP):
    def __init__(self, x):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(x))
        super().__init__(gpytorch.variational.VariationalStrategy(self, x, distribution))


def test_bad_models():
    x, y = data()
    model, likelihood = make(x, y)
    with pytest.raises(UnsupportedError, match="_Approximate"):
        ConditionalMarginalLogLikelihood(likelihood, _Approximate(x))
    with pytest.raises(UnsupportedError, match="BernoulliLikelihood"):
        ConditionalMarginalLogLikelihood(gpytorch.likelihoods.BernoulliLikelihood(), model)
    bad, _ = make(x.clone(), y)
    bad.train_inputs[0][2, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="1 non-finite of 24"):
        ConditionalMarginalLogLikelihood(likelihood, bad)


def test_bad_targets():
    x, y = data()
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ShapeError, match=r"target.*\(11,\)"):
        mll(model(x), y[:11])
    y[4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"target: got 1 non-finite.*mask"):
        mll(model(x), y)
    with gpytorch.settings.observation_nan_policy("mask"):
        assert torch.isfinite(mll(model(x), y))
        y[5] = float("inf")
        with pytest.raises(NonFiniteError, match="target: got 2"):
            mll(model(x), y)
        with pytest.raises(ArgumentError, match="no observed"):
            mll(model(x), torch.full_like(y, float("nan")))
        y = torch.stack([data()[1], torch.full_like(y, float("nan"))])
        with pytest.raises(ArgumentError, match="all missing in a batch member"):
            mll(model(x), y)
    with (
        gpytorch.settings.observation_nan_policy("fill"),
        pytest.raises(UnsupportedError, match="fill"),
    ):
        mll(model(x), data()[1])
    with pytest.raises(UnsupportedError, match="MultivariateNormal"):
        mll(torch.zeros(3), y)


def test_a_non_finite_mean_and_covariance_are_named():
    x, y = data()
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model)
    model.mean_module.constant.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="mean"):
        mll(model(x), y)
    model.mean_module.constant.data.fill_(0.0)
    model.covar_module.base_kernel.raw_lengthscale.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"covariance.*\(12, 12\)"):
        mll(model(x), y)


@pytest.mark.parametrize(
    "conditioning", [LastPoints(m=12), RandomOrderings(2, m=30), HeldOut([12])], ids=repr
)
def test_conditioning_that_does_not_fit_the_data(conditioning):
    x, y = data()
    model, likelihood = make(x, y)
    mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)
    with pytest.raises(ArgumentError):
        mll(model(x), y)
