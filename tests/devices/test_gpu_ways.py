"""What a GPU does in its own way: inverses by halves, recorded losses, sizes that it refuses."""

import gc
import math
import weakref

import pytest
import torch
from device_steps import data
from gpytorch.constraints import GreaterThan
from gpytorch.priors import GammaPrior, LogNormalPrior
from pretended_gpu import GPU, pretended_gpu

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_mll
from gpclml._utils.environment import available_memory
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import ArgumentError
from gpclml.evaluation import learning_curve
from gpclml.linalg import matrices, symmetric_product
from gpclml.linalg.matrices import inverse_of_factor
from gpclml.mlls.fixed_loss import FixedLoss

CPU = torch.device("cpu")
CONDITIONINGS = {
    "lml": LastPoints(m=0), "tenth": RandomHoldout(0.1, seed=0), "folds": KFold(4, seed=0),
    "loo": LeaveOneOut(),
}  # fmt: skip


def needs_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.cuda(skip(test))


def objective(device, conditioning, kernel="rbf", n=40, dtype=torch.float64):
    x, y = data(torch.device(device), dtype, n)
    model = GPRegression(x, y, kernel).train()
    base = model.covar_module.base_kernel
    base.register_prior("lengthscale_prior", LogNormalPrior(0.5, 1.0).to(x), "lengthscale")
    model.likelihood.register_prior("noise_prior", GammaPrior(1.1, 0.5).to(x), "noise")
    return ConditionalMarginalLogLikelihood(model.likelihood, model, CONDITIONINGS[conditioning])


# --- inverses by halves, symmetric products by wide panels


def factors(*shape):
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    eye = torch.eye(shape[-1], dtype=torch.float64)
    return torch.linalg.cholesky(root @ root.mT / shape[-1] + 0.1 * eye)


@pytest.mark.parametrize("shape", [(1,), (7,), (37,), (3, 16)])
def test_an_inverse_by_halves(shape, monkeypatch):
    monkeypatch.setattr(matrices, "_UNDIVIDED_ON_GPU", 4)
    L = factors(*shape)
    with pretended_gpu():
        inverse = inverse_of_factor(L.cuda()).cpu()
    torch.testing.assert_close(inverse, torch.cholesky_inverse(L), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(inverse, inverse.mT, rtol=0, atol=1e-12)
    L[..., -1, -1] = torch.nan  # a factor that failed
    with pretended_gpu():
        assert inverse_of_factor(L.cuda()).isnan().any().item()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_large_inverse_and_a_large_product_on_a_gpu(dtype):
    L = factors(5000).to(GPU)
    expected = torch.cholesky_inverse(L)
    inverse = inverse_of_factor(L.to(dtype)).double()
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    assert (inverse - expected).norm() <= tolerance * expected.norm()
    left = torch.randn(5000, 300, dtype=torch.float64, device=GPU)
    torch.testing.assert_close(symmetric_product(left, left), left @ left.mT, rtol=1e-10, atol=1e-9)


# --- losses of line searches, which are recorded as a CUDA graph and replayed


def losses(mll, count=5):
    """At points of a line, each with its gradients."""
    loss, values = FixedLoss(mll), []
    for step in range(count):
        with torch.no_grad():
            for parameter in mll.parameters():
                parameter.fill_(-0.3 * step)
                parameter.grad = torch.zeros_like(parameter)
        value = loss()
        values.append([value, *(parameter.grad.clone().cpu() for parameter in mll.parameters())])
    return values, loss


@pytest.mark.parametrize("kernel", ["rbf", "matern", "rq"])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_what_is_recorded_reads_nothing(conditioning, kernel):
    with pretended_gpu() as reads:
        loss = FixedLoss(objective(GPU, conditioning, kernel))
        reads.clear()
        loss._without_reads()
    assert not reads


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_losses_that_cannot_be_recorded_are_the_same(conditioning):
    expected, _ = losses(objective("cpu", conditioning))
    with pretended_gpu():
        values, loss = losses(objective(GPU, conditioning))
    assert loss._recorded._graph is None
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-9)


@needs_gpu
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_replayed_losses_are_those_of_the_cpu(conditioning):
    for kernel, n in (("rbf", 40), ("rbf", 700), ("matern", 40), ("rq", 40)):
        expected, _ = losses(objective("cpu", conditioning, kernel, n))
        values, loss = losses(objective(GPU, conditioning, kernel, n))
        assert loss._recorded._graph is not None
        torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-9)


def test_what_has_no_factor_is_computed_as_without_recording():
    with pretended_gpu():
        mll = objective(GPU, "lml")
        x = mll.model.train_inputs[0]
        mll.model.set_train_data(x[:20].repeat(2, 1), strict=False)
        mll.likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(0.0))
        mll.likelihood.noise = 1e-18
        with pytest.warns(RuntimeWarning, match="jitter"):
            value = FixedLoss(mll)()
    assert math.isfinite(value)


@needs_gpu
def test_fits_one_after_another_end_where_those_of_the_cpu_do():
    for n in (30, 60, 30):
        ends = [
            fit_mll(objective(device, "lml", n=n), progress=False).objective
            for device in ("cpu", "cuda")
        ]
        assert ends[0] == pytest.approx(ends[1], abs=1e-5)


@pytest.mark.slow
def test_a_loss_frees_its_memory_when_it_goes():
    with pretended_gpu():
        _, loss = losses(objective(GPU, "lml"))
        known = weakref.ref(loss)
        gc.collect()
        gc.disable()
        try:
            del loss
            assert known() is None
        finally:
            gc.enable()


# --- what there is room for


def test_what_pytorch_keeps_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 300)
    assert available_memory(GPU) == 1400


def refused_sizes(device, n):
    """A step by a Cholesky factor, and a score without a choice, of more than there is room for."""
    x = torch.rand(n, 2, dtype=torch.float64).to(device)
    model, lml = GPRegression(x, x.sum(-1)), LastPoints(m=0)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, lml, solver="cholesky")
    needed, dense = 56 * n * n / 2**30, 16 * n * n / 2**30
    with pytest.raises(ArgumentError, match=rf"needs {needed:.1f} GiB.* GiB, what the cuda has"):
        mll(model(x), model.train_targets)
    with pytest.raises(ArgumentError, match=rf"needs {dense:.1f} GiB.* GiB, what the cuda has"):
        learning_curve(model)


def test_sizes_are_refused_with_figures():
    with pretended_gpu():  # of 16 GiB
        refused_sizes(GPU, 40_000)


@needs_gpu
def test_memory_of_a_gpu():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    refused_sizes(GPU, 300_000)
    assert torch.cuda.max_memory_allocated() < before + 2**30
    size = torch.cuda.get_device_properties(GPU).total_memory // 4
    before = available_memory(GPU)
    block = torch.empty(size, dtype=torch.uint8, device=GPU)
    assert available_memory(GPU) < before - size // 2  # other processes take and give as well
    del block
    assert available_memory(GPU) > before - size // 2  # it is free again
