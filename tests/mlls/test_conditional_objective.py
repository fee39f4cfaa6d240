import copy
import inspect
import pickle
import subprocess
import sys

import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP
from objective_cases import STRATEGIES, data, dense, gradients_of, make

import gpclml
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
from gpclml.models import GPRegression


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
    for gradient, other in pairs:
        torch.testing.assert_close(gradient, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("conditioning", STRATEGIES, ids=repr)
def test_batch_is_a_stack_of_singles(conditioning):
    batch = (2, 3)
    x, y = data(batch=batch)
    model, likelihood = make(x, y, batch, priors=True)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
    value = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)(model(x), y)
    for index in torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)):
        i = tuple(index.tolist())
        member, its_likelihood = make(x[i], y[i], priors=True)
        for single, many in zip(member.parameters(), model.parameters(), strict=True):
            single.data.copy_(many.data[i])
        mll = ConditionalMarginalLogLikelihood(its_likelihood, member, conditioning)
        alone = mll(member(x[i]), y[i])
        torch.testing.assert_close(value[i], alone)


def test_the_prior_of_a_shared_ard_kernel_counts_whole_in_every_member():
    batch = (3, 3)
    x, y = data(d=3, batch=batch)
    model, likelihood = make(x, y, (), priors=True)
    plain, plain_likelihood = make(x, y, ())
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "prior" not in k})
    prior_value = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())(model(x), y)
    mll = ConditionalMarginalLogLikelihood(plain_likelihood, plain, LeaveOneOut())
    plain_value = mll(plain(x), y)
    expected = sum(
        prior.log_prob(closure(module)).sum()
        for _, module, prior, closure, _ in model.named_priors()
    )
    torch.testing.assert_close(
        prior_value - plain_value, (expected / y.shape[-1]).expand(batch), rtol=1e-8, atol=1e-8
    )


NAMES = ["ExactMarginalLogLikelihood", "LeaveOneOutPseudoLikelihood"]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_objectives_by_gpytorchs_names_are_gpytorchs(name, batch):
    x, y = data(batch=batch)
    model, likelihood = make(x, y, batch, priors=True)
    kinds = [getattr(package, name) for package in (gpclml, gpytorch.mlls)]
    ours, upstream = (kind(likelihood, model)(model(x), y) for kind in kinds)
    assert ours.shape == torch.Size(batch)
    torch.testing.assert_close(ours, upstream, rtol=1e-9, atol=1e-9)
    pairs = zip(gradients_of(ours, model), gradients_of(upstream, model), strict=True)
    for gradient, other in pairs:
        torch.testing.assert_close(gradient, other, rtol=1e-7, atol=1e-8)
    ours, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in kinds)
    assert ours == theirs


@pytest.mark.parametrize("conditioning", [None, KFold(10), RandomHoldout(0.5)], ids=repr)
def test_tiny_data(conditioning):
    for n in (1, 2, 3):
        x, y = data(n=n)
        model, likelihood = make(x, y)
        mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning)
        assert torch.isfinite(mll(model(x), y))
        assert torch.isfinite(mll.compute_custom_loss())


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


def test_default_redraws_in_a_loop_and_is_fixed_for_a_line_search():
    x, y = data(n=40)
    model, likelihood = make(x, y)
    state = torch.get_rng_state()
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


# --- several tasks, and missing targets ---


@pytest.mark.parametrize("interleaved", [True, False])
def test_multitask_holds_out_rows_with_all_their_tasks(interleaved):
    x, _ = data(n=7, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x), x], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    model = MultitaskGP(x, y, likelihood).double()
    output = likelihood(model(x))
    K = output.lazy_covariance_matrix.to_dense()
    r = (y - output.mean).flatten()
    rows = torch.tensor([4, 1])
    flat = (rows[:, None] * 3 + torch.arange(3)).flatten()
    expected = reference.conditional_log_density(K, r, flat) / 6
    if not interleaved:
        # Task noises differ by task: the same covariance in the other order.
        state = model.state_dict()
        model = MultitaskGP(x, y, likelihood, interleaved=False).double()
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
    torch.testing.assert_close(gradients, gradients_of(expected, complete))


def test_missing_targets_of_one_batch_member_do_not_touch_the_others():
    x, y = data(batch=(2,))
    y[1, 4] = float("nan")
    model, likelihood = make(x, y, (2,), priors=True)
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, LeaveOneOut())
        value = mll(model(x), y)
    for i in range(2):
        keep = ~y[i].isnan()
        member, its_likelihood = make(x[i][keep], y[i][keep], priors=True)
        mll = ConditionalMarginalLogLikelihood(its_likelihood, member, LeaveOneOut())
        torch.testing.assert_close(value[i], mll(member(x[i][keep]), y[i][keep]))


@pytest.mark.parametrize(("num_groups", "noises"), [(1, True), (3, False)])
def test_missing_tasks_of_a_row(noises, num_groups):
    x, _ = data(n=6, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x)], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, has_task_noise=noises).double()
    model = MultitaskGP(x, y, likelihood).double()
    output = likelihood(model(x))
    K, r = output.lazy_covariance_matrix.to_dense(), (y - output.mean).flatten()
    y[2, 0] = y[5, 0] = y[5, 1] = float("nan")
    observed = torch.tensor([i for i in range(12) if i not in (4, 10, 11)])
    K, r = K[observed][:, observed], r[observed]
    # Row 2 keeps task 1 (flat 5, now at 4); row 5 is gone whole.
    rows = [[0, 2, 5], [1], [3, 4]][:num_groups]
    blocks = [torch.tensor(block) for block in ([0, 1, 4], [2, 3], [5, 6, 7, 8])][:num_groups]
    expected = sum(reference.conditional_log_density(K, r, block) for block in blocks)
    expected = expected / sum(map(len, blocks))
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = ConditionalMarginalLogLikelihood(likelihood, model, HeldOut(*rows))
        value = mll(model(x), y)
    torch.testing.assert_close(value, expected)
    gradients = gradients_of(value, model), gradients_of(expected, model)
    torch.testing.assert_close(*gradients)


# --- dtypes and devices that do not go together ---

# What is moved where, and what is named. "meta" stands for a device that is another one.
MIXED = {
    "single target": (lambda m: None, torch.float32, r"target: got torch.float32 on cpu, expected"),
    "counts": (lambda m: None, torch.int64, "target: got torch.int64"),
    "target elsewhere": (lambda m: None, "meta", "target: got torch.float64 on meta"),
    "single likelihood": (lambda m: m.likelihood.float(), None, "likelihood.noise_covar.raw_noise"),
    "likelihood elsewhere": (lambda m: m.likelihood.to("meta"), None, "likelihood.noise_covar"),
    "single mean": (lambda m: m.mean_module.float(), None, "expected torch.float32"),
    "kernel elsewhere": (lambda m: m.covar_module.to("meta"), None, r"kernel\.raw_outputscale"),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_is_mixed_is_named(case):
    move, target_to, message = MIXED[case]
    x = torch.rand(30, 2, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1)).train()
    move(model)
    target = model.train_targets if target_to is None else model.train_targets.to(target_to)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, RandomHoldout(0.2))
    with pytest.raises(ArgumentError, match=message), gpytorch.settings.debug(False):
        mll(model(x), target)


@pytest.mark.slow
def test_neither_networks_nor_tables_are_imported_for_it():
    code = """
import sys
from gpclml import ConditionalMarginalLogLikelihood
for room in ("curvature", "kernels", "models", "tables"):
    assert f"gpclml.{room}" not in sys.modules, room
ours = [name for name in sys.modules if name.partition(".")[0] == "gpclml"]
assert len(ours) < 36, ours
"""
    subprocess.run([sys.executable, "-c", code], check=True)
