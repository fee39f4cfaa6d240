"""Steps, fits and predictions by name, each a function of a device and a floating-point type.

Together with the examples of all public callables (``benchmarks.robustness.fuzz``) these are what
is done on a device and compared with the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import kernel_cases
import torch
from botorch.models import SingleTaskGP
from exact_gps import PlainGP
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, SoftmaxLikelihood
from torch import Tensor, nn

from gpclml import (
    MLP,
    ConditionalMarginalLogLikelihood,
    ConjugateGradients,
    DeepKernelTransfer,
    GPRegression,
    IterativePosterior,
    LaplaceMarginalLogLikelihood,
    LinearizedNetwork,
    NetworkMean,
    fit_mll,
)
from gpclml.conditioning import (
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    NearestNeighbors,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.curvature import BlockDiagonal, Diagonal, Full, FunctionSpace, Kronecker
from gpclml.fit import fit_gpytorch_mll_fused
from gpclml.meta import Conv4, DatasetTasks, ImageTasks, evaluate_tasks, train_on_tasks
from gpclml.models.botorch import DeepKernelGP

Step = Callable[[torch.device, torch.dtype], Any]


def data(
    device: torch.device, dtype: torch.dtype, n: int = 40, d: int = 3, batch: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Points and targets, drawn on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    y = torch.sin(4 * x.sum(-1)) + 0.3 * torch.randn(*batch, n, generator=generator).double()
    return x.to(device, dtype), y.to(device, dtype)


def _network(inputs: int = 3, outputs: int = 2) -> MLP:
    return MLP([inputs, 8, outputs], nn.Tanh, generator=torch.Generator().manual_seed(1))


KERNELS = {  # and their names among the kernels of every kind
    "rbf": "rbf_ard", "matern_12": "matern12", "matern_32": "matern32", "matern_52": "matern52_ard",
    "rq": "rq_ard", "cosine": "cosine", "polynomial": "polynomial", "linear": "linear",
    "sum": "linear_and_rbf", "product": "rbf_times_periodic", "spectral": "spectral_mixture",
    "deep": "deep",
}  # fmt: skip

CONDITIONINGS = {
    "lml": LastPoints(m=0),
    "tenth": RandomHoldout(0.1, seed=0),
    "given": RandomHoldout(0.2, seed=0, condition_on=10),
    "folds": KFold(4, seed=0),
    "loo": LeaveOneOut(),
    "orders": RandomOrderings(2, m=20, seed=0),
    "chosen": HeldOut([0, 3], [5], [7, 2, 9]),
    "neighbors": NearestNeighbors(5, batch=8, refresh=2, seed=0),
    "previous": NearestNeighbors(5, batch=8, order="previous", refresh=2, seed=0),
    "joint": NearestNeighbors(5, batch=8, order="joint", refresh=2, seed=0),
}


def objective(
    device: torch.device, dtype: torch.dtype, kernel: str = "rbf", conditioning: str = "tenth",
    batch: tuple[int, ...] = (), n: int = 40, *, noise: bool = False,
    mean: Callable[[], gpytorch.means.Mean] | None = None, solver: Any = "auto",
    missing: bool = False,
) -> tuple[ConditionalMarginalLogLikelihood, Tensor, Tensor]:  # fmt: skip
    """An objective with its points and targets."""
    x, y = data(device, dtype, n, batch=batch)
    shape = torch.Size(batch)
    likelihood: Any = GaussianLikelihood(batch_shape=shape)
    if noise:
        likelihood = FixedNoiseGaussianLikelihood(0.05 + 0.1 * torch.rand_like(y.cpu()).to(y))
    if missing:
        y = torch.where(torch.arange(n, device=device) % 7 == 3, torch.nan, y)
    mean_module = gpytorch.means.ConstantMean(batch_shape=shape) if mean is None else mean()
    options = {"batch_shape": shape} if batch else {}
    covariance = kernel_cases.KERNELS[KERNELS[kernel]](3, **options)
    model = PlainGP(x, y, covariance, likelihood, mean_module).to(device, dtype).train()
    strategy = CONDITIONINGS[conditioning]
    return ConditionalMarginalLogLikelihood(likelihood, model, strategy, solver=solver), x, y


def _step(**options: Any) -> Step:
    """Value and gradient of an objective."""

    def step(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        mll, x, y = objective(device, dtype, **options)
        policy = "mask" if options.get("missing") else "ignore"
        with gpytorch.settings.observation_nan_policy(policy):
            return _backward(mll, mll.model(x), y)

    return step


def _fit(optimizer: str, kernel: str, conditioning: str, **options: Any) -> Step:
    def fit(device: torch.device, dtype: torch.dtype) -> Any:
        mll, x, _ = objective(device, dtype, kernel, conditioning, **options)
        result = fit_mll(mll, steps=3, optimizer=optimizer, progress=False)
        mll.model.eval()
        with torch.no_grad():
            predicted = mll.likelihood(mll.model(x[:5]))
        return result.objective, predicted.mean, predicted.variance

    return fit


def _botorch(make: Callable[[Tensor, Tensor], Any]) -> Step:
    def fit(device: torch.device, dtype: torch.dtype) -> Any:
        x, y = data(device, dtype)
        model = make(x, y.unsqueeze(-1))
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        fit_gpytorch_mll_fused(mll, options={"maxiter": 2})
        posterior = model.eval().posterior(x[:5])
        return posterior.mean, posterior.variance

    return fit


def _regression(kernel: str) -> Step:
    def fit(device: torch.device, dtype: torch.dtype) -> Any:
        model = GPRegression(*data(device, dtype), kernel, hidden=(4,))
        fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model), steps=2, progress=False)
        return model.predict(data(device, dtype)[0][:5])

    return fit


def _given_neighbors(kernel: str) -> Step:
    def fit(device: torch.device, dtype: torch.dtype) -> Any:
        model = GPRegression(*data(device, dtype), kernel, hidden=(4,))
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, CONDITIONINGS["neighbors"])
        fit_mll(mll, "adam", steps=2, progress=False)
        predicted = model.predict(data(device, dtype)[0][:5], neighbors=10)
        return predicted.mean, predicted.variance

    return fit


def _posterior(device: torch.device, dtype: torch.dtype) -> Any:
    mll, x, _ = objective(device, dtype, n=60)
    posterior = IterativePosterior(mll.model.eval(), ConjugateGradients(tolerance=1e-5))
    return posterior.mean(x[:5])


def _transfer(kernel: str) -> Step:
    def train(device: torch.device, dtype: torch.dtype) -> Any:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(30, 1, 28, 28, generator=generator)
        tasks = ImageTasks(pictures, torch.arange(30) % 6, ways=3, shots=1, queries=2)
        torch.manual_seed(0)
        network = Conv4(width=4, generator=generator)
        model = DeepKernelTransfer(network, kernel, num_features=4).to(device)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=3))
        result = train_on_tasks(model, mll, tasks, steps=3, tasks_per_step=2, progress=False)
        return result.history, model.predict(tasks.draw(range(2)).to(device))

    return train


def _train_on_tasks_of_sizes(device: torch.device, dtype: torch.dtype) -> Any:
    x = torch.rand(4, 9, 2, generator=torch.Generator().manual_seed(0))
    results: list[Any] = []
    for ways in (0, 2):
        y = x[..., 0].sin() if ways == 0 else torch.arange(9).expand(4, 9) % ways
        items = [(x[i, :s], y[i, :s], x[i, s:], y[i, s:]) for i, s in enumerate((2, 5, 3, 4))]
        tasks = DatasetTasks(items, ways).to(device)
        network = MLP([2, 4, 3], generator=torch.Generator().manual_seed(0))
        model = DeepKernelTransfer(network, "batch_norm_cosine", 3, standardize="task").to(device)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=5))
        options: Any = {"tasks_per_step": 2, "progress": False, "optimizer": torch.optim.AdamW}
        results.append(train_on_tasks(model, mll, tasks, steps=3, **options).history)
        results.append(model.predict(tasks.draw(range(4)).to(next(model.parameters()))))
        scores = evaluate_tasks(model, tasks, 4)
        results.extend([scores.values, scores.nll])
    return results


def _backward(mll: Any, output: Any, target: Tensor) -> dict[str, Tensor]:
    value = mll(output, target)
    value.sum().backward()
    gradients = {n: p.grad for n, p in mll.named_parameters() if p.grad is not None}
    return {"value": value.detach(), **gradients}


def _laplace(structure: Callable[[], Any], classes: bool) -> Step:
    def step(device: torch.device, dtype: torch.dtype) -> Any:
        x, y = data(device, dtype)
        network = LinearizedNetwork(_network(3, 3 if classes else 1)).to(device, dtype)
        likelihood: Any = GaussianLikelihood()
        if classes:
            likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
            y = torch.arange(len(y), device=device) % 3
        likelihood = likelihood.to(device, dtype)
        mll = LaplaceMarginalLogLikelihood(likelihood, network, len(y), structure())
        return _backward(mll, network(x), y)

    return step


STEPS: dict[str, Step] = {
    **{f"step {k} {c}": _step(kernel=k, conditioning=c) for k in KERNELS for c in ("lml", "loo")},
    **{
        f"step {k} {c}{n}": _step(kernel=k, conditioning=c, **options)
        for k, n, options in (
            ("rbf", "", {}), ("sum", "", {}), ("rbf", " batch", {"batch": (2,)}),
            ("sum", " batch", {"batch": (2,)}), ("rbf", " n=300", {"n": 300}),
        )
        for c in CONDITIONINGS
        if not (c == "orders" and n == " n=300")
        and not (c in ("neighbors", "previous", "joint") and n == " batch")
    },
    **{f"step {k} tenth batch": _step(kernel=k, batch=(2,)) for k in ("rq", "spectral")},
    **{
        f"step {c} missing": _step(conditioning=c, missing=True)
        for c in ("lml", "tenth", "loo", "neighbors")
    },
    **{
        f"step {c} noise": _step(conditioning=c, noise=True)
        for c in ("lml", "tenth", "loo", "previous", "joint")
    },
    "step network mean": _step(mean=lambda: NetworkMean(_network(3, 1))),
    "step iterative": _step(n=60, solver=ConjugateGradients(tolerance=1e-4)),
    "step linear low rank": _step(kernel="linear", n=100),
    **{
        f"fit {o} {k} {c}": _fit(o, k, c)
        for o in ("lbfgs", "adam")
        for k, c in (("rbf", "tenth"), ("sum", "loo"), ("deep", "lml"))
    },
    "fit noise": _fit("lbfgs", "rbf", "tenth", noise=True),
    "fit SingleTaskGP": _botorch(SingleTaskGP),
    "fit DeepKernelGP": _botorch(lambda x, y: DeepKernelGP(x, y, hidden=(4,))),
    **{
        f"regression {k}": _regression(k)
        for k in ("rq", "spectral_mixture", "deep", "deep_bottleneck", "deep_joint")
    },
    **{f"neighbors {k}": _given_neighbors(k) for k in ("matern", "deep")},
    "iterative posterior": _posterior,
    **{f"transfer {k}": _transfer(k) for k in ("linear", "rbf", "batch_norm_cosine")},
    "transfer of sizes": _train_on_tasks_of_sizes,
    **{
        f"laplace {s.__name__} {'classes' if c else 'regression'}": _laplace(s, c)
        for s in (Full, BlockDiagonal, Diagonal, Kronecker, FunctionSpace)
        for c in (False, True)
    },
}  # fmt: skip
