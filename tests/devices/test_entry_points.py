"""Every public callable, and steps and fits, on a GPU: the CPU's results, with nothing left on it.

On machines without one the GPU is pretended: the CPU computes its values, and what a GPU would
refuse raises. Where there is one, ``pytest -m cuda`` runs the same on it.
"""

import warnings

import gpytorch
import pytest
import torch
from compared_results import differences
from device_steps import CONDITIONINGS, KERNELS, STEPS, objective
from pretended_gpu import GPU, PretendedTensor, pretended_gpu

from benchmarks.robustness.fuzz.examples import EXAMPLES, without_example
from benchmarks.robustness.fuzz.objects import placed, tasks, transfer
from gpclml.errors import ArgumentError

CPU = torch.device("cpu")
READ_FILES = {"models.GPRegression.load"}
NAMES = [name for name in (*STEPS, *EXAMPLES) if name not in READ_FILES]
ON_CPU = {
    "evaluation.score_models": "scores of models that may be on several devices are one table"
}
SEARCHES = ("fit lbfgs", "fit.warm_start")
SINGLE = ("transfer ", "meta.")  # networks for images, in single precision
ON_GPU = NAMES if torch.cuda.is_available() else []  # hundreds of skips say no more than one
pytestmark = pytest.mark.filterwarnings("ignore")  # of models that are too small to be fitted well


def call(name, device, dtype):
    """What an entry point gives; modules are moved, as their users would."""
    if name == "evidence.criteria.psis_loo":
        pytest.importorskip("arviz_stats")
    torch.manual_seed(0)
    if name in STEPS:
        result = STEPS[name](device, dtype)
    else:
        with placed(device, dtype):
            example = EXAMPLES[name]
            result = example.call(**example.arguments())
    return result.to(device) if isinstance(result, torch.nn.Module) else result


def compare(name, device, dtype):
    single = dtype == torch.float32 or name.startswith(SINGLE)
    expected, result = call(name, CPU, dtype), call(name, device, dtype)
    # Of weights that may change the addresses are kept; extra states are numbers of the host; a GPU
    # records what a CPU repeats; residuals of a stack are calibrated by NumPy.
    ignored = "seconds|runtime|_versions|_extra_state|road|components.*residuals"
    rtol = 2e-3 if single else 1e-6
    if dtype == torch.float32 and name.startswith(SEARCHES):
        rtol, ignored = 0.2, "seconds|history"  # rounding decides where a few steps lead
    assert differences(expected, result, None if name in ON_CPU else device, rtol, ignored) == []


def test_the_list_has_every_public_callable():
    assert without_example() == []
    assert set(ON_CPU) | READ_FILES <= set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_on_a_pretended_gpu(name, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    with pretended_gpu():
        compare(name, GPU, torch.float64)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name, dtype, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    compare(name, GPU, dtype)


SECOND = [
    "step sum tenth", "step deep lml", "step linear lml", "step tenth missing", "step iterative",
    "fit lbfgs rbf tenth", "fit SingleTaskGP", "iterative posterior", "transfer linear",
    "laplace Full classes", "evaluation.score_models", "models.GPRegression.predict",
    "evidence.sampling.log_mean", "fit.fit_map", "fit.fit_online",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SECOND)
def test_on_a_pretended_second_gpu(name):
    with pretended_gpu(1):
        compare(name, torch.device("cuda", 1), torch.float64)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", SECOND[:3])
def test_on_a_second_gpu(name):
    compare(name, torch.device("cuda", 1), torch.float64)


# Neighbours are looked up on the GPU and named on the CPU, which is one more read.
STEPS_READ_ONCE = [
    ("rbf", name) for name in CONDITIONINGS if name not in ("neighbors", "previous", "joint")
] + [(name, "tenth") for name in KERNELS if name not in ("linear", "deep")]


@pytest.mark.parametrize(("kernel", "conditioning"), STEPS_READ_ONCE)
def test_a_step_waits_for_a_gpu_once(kernel, conditioning):
    """For whether its value is finite; everything else is queued."""
    with pretended_gpu() as reads:
        mll, x, y = objective(GPU, torch.float64, kernel, conditioning)
        _step(mll, x, y)
        reads.clear()
        _step(mll, x, y)
    assert dict(reads) == {"_local_scalar_dense": 1}


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "conditioning"), STEPS_READ_ONCE if ON_GPU else [])
def test_a_step_waits_for_a_real_gpu_once(kernel, conditioning):
    mll, x, y = objective(GPU, torch.float64, kernel, conditioning)
    for _ in range(2):
        _step(mll, x, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _step(mll, x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    assert len(waits) <= 1 + (kernel == "spectral")  # GPyTorch's own kernel waits once


def _step(mll, x, y):
    with gpytorch.settings.debug(False):  # else the model compares its inputs
        mll(mll.model(x), y).backward()


def test_mixed_devices_are_refused_by_name():
    with pretended_gpu():
        mll, x, y = objective(GPU, torch.float64)
        with pytest.raises(ArgumentError, match=r"target: .*cpu.*cuda:0"):
            mll(mll.model(x), y.cpu())
        with pytest.raises((ArgumentError, RuntimeError), match=r"device"):
            mll(mll.model(x.cpu()), y)
        model = transfer().to(GPU)
        with pytest.raises(ArgumentError, match=r"episodes: .*cpu.*cuda:0, as the backbone"):
            model.predict(tasks().draw(range(2)))


def test_the_stand_in_refuses_what_a_gpu_refuses():
    generator = torch.Generator().manual_seed(0)
    with pretended_gpu() as reads:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.device == GPU
        assert not there.is_cpu
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here[torch.tensor([0, 1], device="cuda")],
            lambda: torch.linalg.cholesky(torch.eye(3)) @ there,
            lambda: torch.randn(3, generator=generator, device="cuda"),
        ):
            with pytest.raises(RuntimeError, match="device"):
                wrong()
        with pytest.raises(RuntimeError, match=r"cuda:1.*cuda:0"):
            there.to("cuda:1")
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert isinstance(there * torch.tensor(2.0), PretendedTensor)  # numbers may stay
        assert not reads
        assert there.sum().item() == 3
        assert (there[torch.tensor([0, 1])] == 1).tolist() == [True, True]
        assert reads == {"_local_scalar_dense": 1, "CPU index": 1, "_to_copy": 1}
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device="meta").sum().item()
