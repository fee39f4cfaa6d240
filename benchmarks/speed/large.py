"""Beyond one Cholesky factor: accuracy and training; learning curves and memory of bounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.distributions import Normal
from tqdm.auto import tqdm

from benchmarks.data import load
from benchmarks.speed.steps import ExactRBF, gpytorch_defaults
from benchmarks.speed.timing import Row, highest_resident, step_memory, timed, wait_for
from gpclml.conditioning import RandomHoldout
from gpclml.errors import UnknownNameError
from gpclml.evaluation import learning_curve
from gpclml.fit import fit_mll
from gpclml.inference import IterativePosterior
from gpclml.kernels import FourierFeatures, RandomFourierFeatures
from gpclml.linalg import ConjugateGradients
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, GaussianFamily, LowRankFamily
from gpclml.mlls import ConditionalMarginalLogLikelihood, LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel, GPRegression

__all__ = [
    "FAMILIES", "MODELS", "Data", "compare_training", "full_evaluation", "load_split",
    "measure_accuracy", "measure_bounds", "measure_curves", "measure_evaluation",
    "measure_training",
]  # fmt: skip

_FITTED_TO = 500  # points, of a model whose hyperparameters are neither random nor special
_START = 0.7  # lengthscales at the start, by the root of the number of inputs


def measure_accuracy(
    data: str, n: int, noise: float, fitted: bool, block: int = 128, rank: int = 300,
    seed: int = 0, *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Errors of value and gradient at random points of a set, all in float64.

    Each is evaluated once, whatever ``seconds`` are given. Other hyperparameters than the noise
    are fitted to 500 of the points under the LML, or lengthscales are 0.7 times the root of the
    number of inputs and the outputscale is 1.

    Returns:
        ``value error``: in nats per held-out point; ``gradient error``: length of the difference of
        gradients by that of the gradient of raw hyperparameters; ``bound``: of the value's error,
        from residuals; seconds; and ``LML gradient error``: of GPyTorch's default path against its
        Cholesky path.
    """
    x, y = (values.to(device) for values in _points(data, n, seed))
    model = _model(x, y, noise, fitted)
    taken, results = {}, {}
    solvers = {
        "dense": "cholesky",
        "iterative": ConjugateGradients(
            preconditioner_rank=rank, on_failure="warn", max_iterations=2000
        ),
    }
    for name, solver in solvers.items():
        mll = ConditionalMarginalLogLikelihood(
            model.likelihood, model, RandomHoldout(block / n, seed=seed), solver=solver
        )
        results[name], taken[name] = _evaluated(mll)
    [report] = mll.last_solve
    value, gradient = results["dense"]
    error = (results["iterative"][1] - gradient).norm() / gradient.norm()
    return [{
        "value": value, "value error": abs(results["iterative"][0] - value),
        "bound": report.error_bound, "gradient error": float(error),
        "iterations": report.iterations, "residual": report.residual,
        "dense s": taken["dense"], "iterative s": taken["iterative"],
        "LML gradient error": _gpytorch_error(model, seed),
    }]  # fmt: skip


def _points(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    data = load(name)
    chosen = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed))[:n]
    x, y = data.inputs[chosen].double(), data.targets[chosen].double()
    spread = x.std(0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    return x, (y - y.mean()) / y.std()


def _model(x: Tensor, y: Tensor, noise: float, fitted: bool) -> ExactRBF:
    def make(inputs: Tensor, targets: Tensor) -> ExactRBF:
        model = ExactRBF(inputs, targets).to(inputs)
        model.likelihood.noise_covar.register_constraint(
            "raw_noise", gpytorch.constraints.GreaterThan(1e-6)
        )
        model.covar_module.base_kernel.lengthscale = _START * x.shape[-1] ** 0.5
        model.covar_module.outputscale = 1.0
        model.likelihood.noise = noise
        return model

    model = make(x, y)
    if fitted:
        small = make(x[:_FITTED_TO], y[:_FITTED_TO])
        mll = ExactMarginalLogLikelihood(small.likelihood, small)
        freeze = ["likelihood.noise_covar.raw_noise"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # its best point so far will do
            fit_mll(mll, "lbfgs", steps=50, freeze=freeze, progress=False)
        model.load_state_dict(small.state_dict())
    return model.train()


def _evaluated(mll: MarginalLogLikelihood) -> tuple[tuple[float, Tensor], float]:
    model = cast(ExactRBF, mll.model)
    model.zero_grad()
    device = model.train_targets.device
    wait_for(device)
    start = time.perf_counter()
    value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    wait_for(device)
    seconds = time.perf_counter() - start
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return (float(value.detach()), gradient.clone()), seconds


def _gpytorch_error(model: ExactRBF, seed: int) -> float:
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.max_cholesky_size(len(model.train_targets)):
        (_, exact), _ = _evaluated(mll)
    with gpytorch_defaults(), torch.random.fork_rng():
        torch.manual_seed(seed)
        (_, estimate), _ = _evaluated(mll)
    return float((estimate - exact).norm() / exact.norm())


FEW = 2000
CONDITION_ON, BLOCK = 4000, 256
_LR = 0.1
_RANK, _RANK_OF_ONE = 2000, 1000
_PREDICTING = ConjugateGradients(
    tolerance=2e-3, preconditioner_rank=_RANK, kept_bytes=2**32, on_failure="warn", progress=True
)


@dataclass(frozen=True)
class Data:
    """Standardized by the training points."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_split(name: str, num_test: int, seed: int, num_train: int | None = None) -> Data:
    """Random test points of a set; all others, or some, to train on. In single precision."""
    data = load(name)
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed))
    test, train = order[:num_test], order[num_test:][:num_train]
    x, y = data.inputs.double(), data.targets.double()
    location, scale = x[train].mean(0), x[train].std(0).clamp_min(1e-12)
    x, y = (x - location) / scale, (y - y[train].mean()) / y[train].std()
    return Data(*(values.float() for values in (x[train], y[train], x[test], y[test])))


def starting_model(data: Data) -> ExactRBF:
    """Where training starts from: lengthscales √d, a noise of a tenth."""
    model = ExactRBF(data.x, data.y).to(data.x)
    model.covar_module.base_kernel.lengthscale = data.x.shape[-1] ** 0.5
    model.covar_module.outputscale = 1.0
    model.likelihood.noise = 0.1
    return model.train()


def measure_training(
    data: str, num_test: int = 200, steps: int = 100, seed: int = 0,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Training on redrawn subsets of a table against training on a few fixed points, on a CPU.

    See :func:`compare_training`; ``num_test`` are the test points, ``steps`` those of Adam.
    """
    return list(compare_training(load_split(data, num_test, seed), steps, seed))


def compare_training(data: Data, steps: int = 100, seed: int = 0) -> Iterator[Row]:
    """Test densities after training on redrawn subsets, and on fixed points for as long.

    All start alike and take steps of Adam: on the CLML of 256 points given 4000, both redrawn among
    all points; on the LML, and on the CLML of a redrawn tenth, of 2000 points that stay the same,
    until as many seconds are over. Each predicts given all training points, by conjugate
    gradients, and those trained on 2000 also given these alone. ``less than redrawn`` is the mean
    of paired differences of log densities; the bounds are in units of the targets.
    """
    few = Data(data.x[:FEW], data.y[:FEW], data.test_x, data.test_y)
    redrawn = RandomHoldout(BLOCK / len(data.y), condition_on=CONDITION_ON)
    trained = {}
    model, seconds, taken = _train(
        data, lambda m: _clml(m, redrawn, seed), tqdm(range(steps), desc="redrawn")
    )
    trained["redrawn subsets of all"] = model, seconds, taken
    for name, objective in {
        f"LML of fixed {FEW}": lambda m: ExactMarginalLogLikelihood(m.likelihood, m),
        f"CLML of fixed {FEW}": lambda m: _clml(m, RandomHoldout(0.1), seed),
    }.items():
        trained[name] = _train(few, objective, _timed(seconds))
    first = None
    for name, (model, spent, taken) in trained.items():
        for given in [data] if model.train_targets.numel() > FEW else [data, few]:
            row, density = _scored(model, given)
            first = density if first is None else first
            difference = density - first
            yield {
                "trained on": name, "given": len(given.y), "steps": taken, "seconds": spent, **row,
                "less than redrawn": -float(difference.mean()),
                "its error": float(difference.std() / len(difference) ** 0.5),
                "GiB": highest_resident() / 2**30,
            }  # fmt: skip


def _clml(model: ExactRBF, conditioning: RandomHoldout, seed: int) -> MarginalLogLikelihood:
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)


def _timed(seconds: float) -> Iterator[int]:
    start, step = time.perf_counter(), 0
    with tqdm(desc="fixed") as bar:
        while time.perf_counter() - start < seconds:
            yield step
            step += 1
            bar.update()


def _train(
    data: Data, objective: Callable[[ExactRBF], MarginalLogLikelihood], turns: Iterable[int]
) -> tuple[ExactRBF, float, int]:
    model = starting_model(data)
    mll = objective(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)
    start, taken = time.perf_counter(), 0
    for _ in turns:
        optimizer.zero_grad()
        with gpytorch.settings.max_cholesky_size(FEW):
            (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()
        taken += 1
    return model, time.perf_counter() - start, taken


def _scored(model: ExactRBF, given: Data) -> tuple[dict[str, float], Tensor]:
    model.set_train_data(given.x, given.y, strict=False)
    posterior = IterativePosterior(model, _PREDICTING, units="training")
    predicted = posterior.predict(given.test_x, marginal=True)
    normal = Normal(predicted.distribution.mean, predicted.distribution.variance.sqrt())
    density = normal.log_prob(given.test_y).double()
    error = (normal.mean - given.test_y).square().mean().sqrt()
    return {
        "NLL": -float(density.mean()), "error": float(density.std() / len(density) ** 0.5),
        "RMSE": float(error), "noise": float(model.likelihood.noise.detach()),
        "error bound": float(predicted.mean_error.max()),
        "excess bound": float(predicted.variance_excess.max()), "residual": predicted.residual,
    }, density  # fmt: skip


def measure_evaluation(
    data: str, n: int = 20_000, block: int = 256, seed: int = 0,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """One evaluation at ``n`` points of a table on a CPU, see :func:`full_evaluation`."""
    return [full_evaluation(load_split(data, 2, seed, n), block, seed)]


def full_evaluation(data: Data, block: int = 256, seed: int = 0) -> Row:
    """One value and gradient of the CLML of a block given all other points, in double precision.

    Hyperparameters are those that training starts from.
    """
    double = Data(*(values.double() for values in (data.x, data.y, data.test_x, data.test_y)))
    model = starting_model(double)
    n = len(data.y)
    solver = ConjugateGradients(preconditioner_rank=_RANK_OF_ONE, on_failure="warn", progress=True)
    mll = ConditionalMarginalLogLikelihood(
        model.likelihood, model, RandomHoldout(block / n, seed=seed), solver=solver
    )
    start = time.perf_counter()
    value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    [report] = mll.last_solve
    return {
        "nats per point": float(value.detach()),
        "residual": report.residual, "error bound": report.error_bound,
        "iterations": report.iterations, "seconds": time.perf_counter() - start,
        "GiB": highest_resident() / 2**30,
    }  # fmt: skip


_NOISE = 0.1

FAMILIES: dict[str, GaussianFamily] = {
    "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1), "rank-10": LowRankFamily(10),
    "full": FullFamily(),
}  # fmt: skip


def _data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = _NOISE**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, x.squeeze(-1).sin() + noise


def _linear(n: int) -> ExactGP:
    x, y = _data(n)
    return BayesianLinearModel(x, y, FourierFeatures(9), noise=_NOISE)


def _dense(n: int) -> ExactGP:
    x, y = _data(n)
    return GPRegression(x, y, kernel="rbf", mean="zero", standardize=False)


MODELS: dict[str, Callable[[int], ExactGP]] = {"18 features": _linear, "RBF kernel": _dense}


def measure_curves(
    model: str, n: int = 2000, orderings: int = 100,
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Learning curves of all orderings in one call, and of one by refitting each prefix, on a CPU.

    A refit is the least there is to do: with features the precision of the weights of i points
    is summed and factored, with a kernel the covariance of i points; then point i + 1 is
    predicted. ``speedup`` is that of one ordering times their number.
    """
    if model not in MODELS:
        raise UnknownNameError("model", model, MODELS)
    gp = MODELS[model](n)
    refit = _weight_refits(gp) if model == "18 features" else _kernel_refits(gp)
    steps = {"one call": lambda: learning_curve(gp, orderings), "refits of one ordering": refit}
    with torch.no_grad():
        rows = timed(steps, "cpu", seconds, base="one call")
    return [{**row, "speedup": orderings * row["ratio"]} for row in rows]


def _weight_refits(model: ExactGP) -> Callable[[], Tensor]:
    assert isinstance(model, BayesianLinearModel)
    phi, y = model.features(model.train_inputs[0]).detach(), model.train_targets
    noise, prior = model.noise.item(), model.prior_variance.detach()

    def refits() -> Tensor:
        terms = []
        for i in range(len(y)):
            L = torch.linalg.cholesky(phi[:i].mT @ phi[:i] / noise + torch.diag(1 / prior))
            right = torch.stack([phi[:i].mT @ y[:i] / noise, phi[i]], -1)
            mean, v = torch.cholesky_solve(right, L).unbind(-1)
            normal = torch.distributions.Normal(phi[i] @ mean, (noise + phi[i] @ v).sqrt())
            terms.append(normal.log_prob(y[i]))
        return torch.stack(terms)

    return refits


def _kernel_refits(model: ExactGP) -> Callable[[], Tensor]:
    x, y = model.train_inputs[0], model.train_targets
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        K = model.likelihood(model.forward(x)).covariance_matrix

    def refits() -> Tensor:
        terms = [torch.distributions.Normal(0.0, K[0, 0].sqrt()).log_prob(y[0])]
        for i in range(1, len(y)):
            L = torch.linalg.cholesky(K[:i, :i])
            right = torch.stack([y[:i], K[:i, i]], -1)
            z, v = torch.linalg.solve_triangular(L, right, upper=False).unbind(-1)
            normal = torch.distributions.Normal(v @ z, (K[i, i] - v @ v).sqrt())
            terms.append(normal.log_prob(y[i]))
        return torch.stack(terms)

    return refits


def measure_bounds(
    family: str, num_features: int = 100_000, n: int = 1000, dtype: str = "float32",
    *, device: str = "cpu", seconds: float = 2.0,
) -> list[Row]:  # fmt: skip
    """Peak memory in GiB of a family's lower bound, on a CPU each in a process of its own.

    Random Fourier features of inputs with two columns. Features, (n, R), are made within.
    """
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    return [
        {"method": name, "GiB": step_memory(_warm_bound, family, num_features, n, dtype, gradient)}
        for name, gradient in (("value", False), ("with gradient", True))
    ]


def _warm_bound(
    family: str, num_features: int, n: int, kind: str, grad: bool
) -> Callable[[], None]:
    dtype = getattr(torch, kind)
    _bound(family, 50, 20, dtype, grad)  # loads what libraries load at their first use
    return lambda: _bound(family, num_features, n, dtype, grad)


def _bound(family: str, num_features: int, num_data: int, dtype: torch.dtype, grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 2, generator=generator, dtype=dtype)
    features = RandomFourierFeatures(2, num_features, seed=0)
    model = BayesianLinearModel(x, x[:, 0].sin(), features, noise=0.1)
    mll = LinearEvidenceLowerBound(model.likelihood, model, FAMILIES[family])
    with torch.set_grad_enabled(grad):
        value = mll(model(x), model.train_targets)
        if grad:
            value.backward()
