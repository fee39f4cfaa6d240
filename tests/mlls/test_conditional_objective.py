import copy
import inspect
import itertools
import pickle
import subprocess
import sys

import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP, PlainGP
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.priors import GammaPrior, NormalPrior
from linear_operator.utils.warnings import NumericalWarning

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
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

STRATEGIES = [
    RandomHoldout(0.3, seed=4), KFold(5, seed=4), LeaveOneOut(), LastPoints(m=7), LastPoints(m=0),
    RandomOrderings(3, m=6, seed=4), HeldOut([0, 3], [5], [7, 2, 9]),
]  # fmt: skip


def data(n=12, d=2, batch=()):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return x, torch.sin(4.0 * x.sum(-1)) + 0.2 * noise + 0.3


def make(x, y, batch=(), priors=False, likelihood=None):
    """A model in train mode, with a prior of each hyperparameter or none."""

    def prior(*numbers):
        return GammaPrior(*numbers) if priors else None

    batch = torch.Size(batch)
    likelihood = likelihood or GaussianLikelihood(prior(1.1, 0.5), batch_shape=batch)
    kernel = RBFKernel(x.shape[-1], batch_shape=batch, lengthscale_prior=prior(3.0, 6.0))
    kernel = ScaleKernel(kernel, batch_shape=batch, outputscale_prior=prior(2.0, 0.15))
    mean = gpytorch.means.ConstantMean(NormalPrior(0.0, 1.0) if priors else None, batch_shape=batch)
    return PlainGP(x, y, kernel, likelihood, mean).double().train()


def objective(model, conditioning=None, **options):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, **options)


def value_of(mll, target=None):
    model = mll.model
    return mll(model(*model.train_inputs), model.train_targets if target is None else target)


def gradients_of(value, model):
    return torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("conditioning", STRATEGIES, ids=repr)
def test_value_and_gradient_match_the_definition(conditioning):
    x, y = data()
    model = make(x, y)
    output = model.likelihood(model(x), x)
    K, r = output.lazy_covariance_matrix.to_dense(), y - output.mean
    blocks = [block for group in conditioning.held_out(len(y)) for block in group]
    expected = sum(reference.conditional_log_density(K, r, block) for block in blocks)
    expected = expected / sum(map(len, blocks))
    value = value_of(objective(model, conditioning))
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    gradients = gradients_of(value, model), gradients_of(expected, model)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("conditioning", STRATEGIES, ids=repr)
def test_batch_is_a_stack_of_singles(conditioning):
    batch = (2, 3)
    x, y = data(batch=batch)
    model = make(x, y, batch, priors=True)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
    value = value_of(objective(model, conditioning))
    for i in itertools.product(range(2), range(3)):
        member = make(x[i], y[i], priors=True)
        for single, many in zip(member.parameters(), model.parameters(), strict=True):
            single.data.copy_(many.data[i])
        torch.testing.assert_close(value[i], value_of(objective(member, conditioning)))


def test_the_prior_of_a_shared_ard_kernel_counts_whole_in_every_member():
    batch = (3, 3)
    x, y = data(d=3, batch=batch)
    model, plain = make(x, y, priors=True), make(x, y)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "prior" not in k})
    values = [value_of(objective(each, LeaveOneOut())) for each in (model, plain)]
    expected = sum(
        prior.log_prob(closure(module)).sum()
        for _, module, prior, closure, _ in model.named_priors()
    )
    expected = (expected / y.shape[-1]).expand(batch)
    torch.testing.assert_close(values[0] - values[1], expected, rtol=1e-8, atol=1e-8)


NAMES = ["ExactMarginalLogLikelihood", "LeaveOneOutPseudoLikelihood"]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_objectives_by_gpytorchs_names_are_gpytorchs(name, batch):
    x, y = data(batch=batch)
    model = make(x, y, batch, priors=True)
    kinds = [getattr(package, name) for package in (gpclml, gpytorch.mlls)]
    ours, upstream = (value_of(kind(model.likelihood, model)) for kind in kinds)
    assert ours.shape == torch.Size(batch)
    torch.testing.assert_close(ours, upstream, rtol=1e-9, atol=1e-9)
    gradients = gradients_of(ours, model), gradients_of(upstream, model)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
    ours, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in kinds)
    assert ours == theirs


@pytest.mark.parametrize("conditioning", [None, KFold(10), RandomHoldout(0.5)], ids=repr)
def test_tiny_data(conditioning):
    for n in (1, 2, 3):
        mll = objective(make(*data(n=n)), conditioning)
        assert torch.isfinite(value_of(mll))
        assert torch.isfinite(mll.compute_custom_loss())


class _AddedLoss(gpytorch.mlls.AddedLossTerm):
    def __init__(self, value):
        self.value = value

    def loss(self, *params):
        return self.value


def test_added_losses_weigh_one_nth_as_upstream():
    model = make(*data())
    model.register_added_loss_term("extra")
    model.update_added_loss_term("extra", _AddedLoss(torch.tensor(-2.5, dtype=torch.float64)))
    upstream = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    torch.testing.assert_close(value_of(objective(model, LastPoints(0))), value_of(upstream))


def test_default_redraws_in_a_loop_and_is_fixed_for_a_line_search():
    model = make(*data(n=40))
    state = torch.get_rng_state()
    mll, again = objective(model), objective(model)
    values = torch.stack([value_of(mll) for _ in range(6)])
    assert values.unique().numel() == 6
    torch.testing.assert_close(values, torch.stack([value_of(again) for _ in range(6)]))
    assert not torch.equal(values[0], value_of(objective(model, seed=1)))
    losses = torch.stack([mll.compute_custom_loss() for _ in range(3)])
    assert losses.unique().numel() == 1
    folds = KFold(10).held_out(40, torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses[0], -value_of(objective(model, HeldOut(*torch.cat(folds)))))
    assert torch.equal(state, torch.get_rng_state())


def test_copies_draw_on_from_where_the_original_stands():
    mll = objective(make(*data(n=30)))
    value_of(mll)
    copies = [copy.deepcopy(mll), pickle.loads(pickle.dumps(mll))]
    expected = value_of(mll)
    for clone in copies:
        torch.testing.assert_close(value_of(clone), expected)


def test_settings_of_others_do_not_matter():
    mll = objective(make(*data(n=30)), LeaveOneOut())
    expected = value_of(mll)
    with (
        gpytorch.settings.max_cholesky_size(1),
        gpytorch.settings.fast_computations(log_prob=False),
        gpytorch.settings.max_root_decomposition_size(2),
    ):
        torch.testing.assert_close(value_of(mll), expected, rtol=0, atol=0)


class _Approximate(gpytorch.models.ApproximateGP):
    def __init__(self, x):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(x))
        super().__init__(gpytorch.variational.VariationalStrategy(self, x, distribution))


def test_bad_models():
    x, y = data()
    model, bad = make(x, y), make(x.clone(), y)
    bad.train_inputs[0][2, 1] = float("nan")
    for likelihood, given, error, match in (
        (model.likelihood, _Approximate(x), UnsupportedError, "_Approximate"),
        (BernoulliLikelihood(), model, UnsupportedError, "BernoulliLikelihood"),
        (bad.likelihood, bad, NonFiniteError, "1 non-finite of 24"),
    ):
        with pytest.raises(error, match=match):
            ConditionalMarginalLogLikelihood(likelihood, given)


def test_bad_targets():
    y, missing = data()[1], torch.full((12,), torch.nan).double()
    single, several = y.clone(), y.clone()
    single[4] = several[4] = torch.nan
    several[5] = torch.inf
    mll = objective(make(*data()))
    for policy, target, error, match in (
        ("ignore", y[:11], ShapeError, r"target.*\(11,\)"),
        ("ignore", single, NonFiniteError, r"target: got 1 non-finite.*mask"),
        ("mask", several, NonFiniteError, "target: got 2"),
        ("mask", missing, ArgumentError, "no observed"),
        ("mask", torch.stack([y, missing]), ArgumentError, "all missing in a batch member"),
        ("fill", y, UnsupportedError, "fill"),
    ):
        policy = gpytorch.settings.observation_nan_policy(policy)
        with policy, pytest.raises(error, match=match):
            value_of(mll, target)
    with pytest.raises(UnsupportedError, match="MultivariateNormal"):
        mll(torch.zeros(3), y)


def test_a_non_finite_mean_and_covariance_are_named():
    model = make(*data())
    model.mean_module.constant.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="mean"):
        value_of(objective(model))
    model.mean_module.constant.data.fill_(0.0)
    model.covar_module.base_kernel.raw_lengthscale.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"covariance.*\(12, 12\)"):
        value_of(objective(model))


@pytest.mark.parametrize(
    "conditioning", [LastPoints(m=12), RandomOrderings(2, m=30), HeldOut([12])], ids=repr
)
def test_conditioning_that_does_not_fit_the_data(conditioning):
    mll = objective(make(*data()), conditioning)
    with pytest.raises(ArgumentError):
        value_of(mll)


# --- several tasks, and missing targets ---


@pytest.mark.parametrize("interleaved", [True, False])
def test_multitask_holds_out_rows_with_all_their_tasks(interleaved):
    x, _ = data(n=7, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x), x], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=3).double()
    model = MultitaskGP(x, y, likelihood).double()
    output = likelihood(model(x))
    K, r = output.lazy_covariance_matrix.to_dense(), (y - output.mean).flatten()
    rows = torch.tensor([4, 1])
    flat = (rows[:, None] * 3 + torch.arange(3)).flatten()
    expected = reference.conditional_log_density(K, r, flat) / 6
    if not interleaved:
        # Task noises differ by task: the same covariance in the other order.
        state = model.state_dict()
        model = MultitaskGP(x, y, likelihood, interleaved=False).double()
        model.load_state_dict(state)
    torch.testing.assert_close(value_of(objective(model, HeldOut(rows))), expected)
    assert value_of(objective(model, KFold(3))).shape == ()


@pytest.mark.parametrize("conditioning", STRATEGIES[:4], ids=repr)
def test_missing_targets_leave_value_and_count(conditioning):
    x, y = data()
    y[3] = y[10] = float("nan")
    keep = ~y.isnan()
    model, complete = make(x, y), make(x[keep], y[keep])
    with gpytorch.settings.observation_nan_policy("mask"):
        value = value_of(objective(model, conditioning))
        gradients = gradients_of(value, model)
    expected = value_of(objective(complete, conditioning))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients, gradients_of(expected, complete))


def test_missing_targets_of_one_batch_member_do_not_touch_the_others():
    x, y = data(batch=(2,))
    y[1, 4] = float("nan")
    with gpytorch.settings.observation_nan_policy("mask"):
        value = value_of(objective(make(x, y, (2,), priors=True), LeaveOneOut()))
    for i in range(2):
        keep = ~y[i].isnan()
        member = make(x[i][keep], y[i][keep], priors=True)
        torch.testing.assert_close(value[i], value_of(objective(member, LeaveOneOut())))


@pytest.mark.parametrize(("num_groups", "noises"), [(1, True), (3, False)])
def test_missing_tasks_of_a_row(noises, num_groups):
    x, _ = data(n=6, d=1)
    y = torch.cat([torch.sin(5 * x), torch.cos(5 * x)], dim=-1)
    likelihood = MultitaskGaussianLikelihood(2, has_task_noise=noises).double()
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
        value = value_of(objective(model, HeldOut(*rows)), y)
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
    target = None if target_to is None else model.train_targets.to(target_to)
    mll = objective(model, RandomHoldout(0.2))
    with pytest.raises(ArgumentError, match=message), gpytorch.settings.debug(False):
        value_of(mll, target)


# --- steps that a GPU is looked at once for; on a CPU reads are free and taken at once ---


@pytest.fixture
def costly_reads(monkeypatch):
    module = "gpclml.mlls.conditional_marginal_log_likelihood"
    monkeypatch.setattr(f"{module}.reads_are_free", lambda device: False)


def small_noise(noise):
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    likelihood.double().noise = noise
    return likelihood


def step(mll):
    mll.zero_grad()
    value = value_of(mll)
    value.backward()
    return value.detach(), [parameter.grad.clone() for parameter in mll.parameters()]


@pytest.mark.parametrize("conditioning", STRATEGIES[:5], ids=repr)
def test_a_failed_factor_is_jittered_all_the_same(conditioning, costly_reads, monkeypatch):
    x, y = data(n=40)
    mll = objective(make(x[:20].repeat(2, 1), y, likelihood=small_noise(1e-18)), conditioning)
    with pytest.warns(NumericalWarning):
        unchecked = step(mll)
    monkeypatch.undo()
    with pytest.warns(NumericalWarning):
        checked = step(mll)
    torch.testing.assert_close(checked, unchecked, rtol=0, atol=0)


def test_single_precision_that_fails_is_repeated_in_double(costly_reads, monkeypatch):
    x, y = data(n=600)
    model = make(x, y, likelihood=small_noise(3e-6))
    model.float().set_train_data(x.float(), y.float(), strict=False)
    model.covar_module.base_kernel.lengthscale = 3.0
    covariance = model.likelihood(model(x.float())).covariance_matrix
    assert torch.linalg.cholesky_ex(covariance).info > 0
    mll = objective(model, RandomHoldout(0.2, seed=0))
    value, _ = step(mll)
    monkeypatch.setattr("gpclml.linalg.matrices.DOUBLE_UP_TO", 600)
    torch.testing.assert_close(value, step(mll)[0])


def test_what_is_not_finite_is_named_after_the_step(costly_reads):
    x, y = data()
    y[3] = torch.nan
    mll = objective(make(x, y))
    with pytest.raises(NonFiniteError, match=r"target minus prior mean: got 1 non-finite of 12"):
        step(mll)
    with gpytorch.settings.observation_nan_policy("mask"):
        assert torch.isfinite(step(mll)[0])
    mll.model.covar_module.base_kernel.raw_lengthscale.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"covariance.*\(12, 12\)"):
        value_of(mll, data()[1])


@pytest.mark.slow
def test_neither_networks_nor_tables_are_imported_for_it():
    code = """
import sys
from gpclml import ConditionalMarginalLogLikelihood
for room in ("curvature", "kernels", "models", "tables"):
    assert f"gpclml.{room}" not in sys.modules, room
"""
    subprocess.run([sys.executable, "-c", code], check=True)
