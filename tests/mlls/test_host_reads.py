"""Steps that a GPU is looked at once for: what they read, and what they do where something fails.

On a CPU reads are free and taken at once; these tests have the objective believe that they are not.
"""

import gpytorch
import pytest
import torch
from exact_gps import PlainGP
from linear_operator.utils.warnings import NumericalWarning
from torch.utils._python_dispatch import TorchDispatchMode

import gpclml.mlls.conditional_marginal_log_likelihood
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import NonFiniteError
from gpclml.linalg import DenseCovariance
from gpclml.mlls import ConditionalMarginalLogLikelihood

N = 40
READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")
CONDITIONINGS = [
    RandomHoldout(0.2, seed=0), LastPoints(m=0), LeaveOneOut(), KFold(4, seed=0),
    RandomHoldout(0.2, seed=0, condition_on=20),
]  # fmt: skip


class Reads(TorchDispatchMode):
    """Operations that need a value of a floating-point tensor on the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READING and args[0].dtype.is_floating_point:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def objective(conditioning=None, n=N, dtype=torch.float64):
    x = torch.rand(n, 2, dtype=dtype)
    y = torch.sin(4 * x.sum(-1)) + 0.1 * torch.randn(n, dtype=dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = PlainGP(x, y, likelihood=likelihood).to(dtype).train()
    return ConditionalMarginalLogLikelihood(likelihood, model, conditioning)


def step(mll, target=None):
    mll.zero_grad()
    model = mll.model
    value = mll(model(*model.train_inputs), model.train_targets if target is None else target)
    value.backward()
    return value.detach(), [parameter.grad.clone() for parameter in mll.parameters()]


def make_reads_costly(monkeypatch):
    module = gpclml.mlls.conditional_marginal_log_likelihood
    monkeypatch.setattr(module, "reads_are_free", lambda device: False)


@pytest.fixture
def costly_reads(monkeypatch):
    make_reads_costly(monkeypatch)


@pytest.mark.parametrize("conditioning", CONDITIONINGS, ids=repr)
def test_a_step_is_looked_at_once(conditioning, costly_reads):
    mll = objective(conditioning)
    with gpytorch.settings.debug(False), Reads() as reads:  # else the model compares its inputs
        step(mll)
    ours = [name for name in reads.seen if name != "equal"]  # kernels compare theirs
    assert ours == ["_local_scalar_dense"]


@pytest.mark.parametrize("conditioning", CONDITIONINGS[:4], ids=repr)
def test_a_failed_factor_is_jittered_all_the_same(conditioning, monkeypatch):
    mll = objective(conditioning)
    x = mll.model.train_inputs[0]
    mll.model.set_train_data(x[: N // 2].repeat(2, 1), strict=False)
    mll.likelihood.noise_covar.register_constraint(
        "raw_noise", gpytorch.constraints.GreaterThan(0.0)
    )
    mll.likelihood.noise = 1e-18
    with pytest.warns(NumericalWarning):
        checked = step(mll)
    make_reads_costly(monkeypatch)
    with pytest.warns(NumericalWarning):
        unchecked = step(mll)
    assert torch.equal(checked[0], unchecked[0])
    assert all(map(torch.equal, checked[1], unchecked[1]))


def test_single_precision_that_fails_is_repeated_in_double(costly_reads, monkeypatch):
    mll = objective(n=600, dtype=torch.float32)
    mll.conditioning = RandomHoldout(0.2, seed=0)
    mll.likelihood.noise_covar.register_constraint(
        "raw_noise", gpytorch.constraints.GreaterThan(0.0)
    )
    mll.likelihood.noise = 3e-6
    mll.model.covar_module.base_kernel.lengthscale = 3.0
    covariance = mll.likelihood(mll.model(*mll.model.train_inputs)).covariance_matrix
    assert torch.linalg.cholesky_ex(covariance).info > 0
    value, _ = step(mll)
    monkeypatch.setattr("gpclml.linalg.matrices.DOUBLE_UP_TO", 600)
    torch.testing.assert_close(value, step(mll)[0])


def test_what_is_not_finite_is_named(costly_reads):
    mll = objective()
    target = mll.model.train_targets.clone()
    target[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"target minus prior mean: got 1 non-finite of 40"):
        step(mll, target)
    with gpytorch.settings.observation_nan_policy("mask"):
        assert torch.isfinite(step(mll, target)[0])
    mll.model.covar_module.base_kernel.raw_lengthscale.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"covariance.*\(40, 40\)"):
        step(mll)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_and_gradients_wait_for_nothing_on_a_gpu(dtype):
    root = torch.randn(600, 600, dtype=dtype, device="cuda")
    covariance = (root @ root.mT / 600 + torch.eye(600, device="cuda")).requires_grad_()
    residual = torch.randn(600, dtype=dtype, device="cuda", requires_grad=True)
    everything = torch.randperm(600)

    def values():
        unchecked = DenseCovariance(covariance, checked=False)
        block = unchecked.conditional_log_density(residual, everything[:60])
        return block + unchecked.held_out_log_density(residual, [everything.reshape(10, 60)])

    values().backward()  # libraries are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        values().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(covariance.grad).all()
