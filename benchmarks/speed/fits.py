"""Whole fits: line searches, batches, many points, what they predict, and loops around them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import gpytorch
import numpy as np
import pandas as pd
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions import BadInitialCandidatesWarning, OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.stats import binomtest
from torch import Tensor
from torch.distributions import Normal

from benchmarks._options import check_known
from benchmarks._process import keep_freed_memory
from benchmarks.bo.surrogates import initial_points, make_problem
from benchmarks.data import load, names
from benchmarks.data.classes import load_labelled
from benchmarks.speed.steps import sampled_data
from benchmarks.speed.timing import Row, timed, wait_for
from benchmarks.tables.class_methods import fit_variational
from gpclml import StackedGP
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut
from gpclml.evaluation import leave_one_out, log_marginal_likelihood
from gpclml.fit import FitWarning, fit_batch, fit_gpytorch_mll_fused, fit_mll, suggest_batch_size
from gpclml.likelihoods import LogisticLikelihood
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import GPClassification, GPRegression, LatentGP
from gpclml.models.botorch import DeepKernelGP

Data = tuple[Tensor, Tensor]
End = Callable[[], np.ndarray]
"""The fit's log marginal likelihood a point, noise and lengthscales."""
Way = Callable[[Data], End | None]
"""Makes a model of data and fits it; gives its end where that is of the log marginal likelihood."""

_CLML = ConditionalMarginalLogLikelihood
SEARCH_BASE = "botorch fit_gpytorch_mll"
_TO_THE_END = {"ftol": 1e-14, "gtol": 1e-8, "maxiter": 20_000, "maxfun": 100_000}


def measure_searches(
    n: int, dimensions: int = 8, outputs: int = 1, seed: int = 0, exact: bool = False,
    *, device: str = "cpu", seconds: float = 3.0,
) -> list[Row]:  # fmt: skip
    """Fits of BoTorch's ``SingleTaskGP`` with its default priors, on the same data from its start.

    Fits of the log marginal likelihood by BoTorch, with its own optimizer and with ours, by
    ``fit_mll`` (of GPyTorch's objective and of ours); of leave-one-out and of ten folds by
    ``fit_mll``; and by scikit-learn's ``GaussianProcessRegressor``, whose model is the same without
    the priors. All search by SciPy's L-BFGS-B; of several outputs BoTorch searches for each on its
    own, evaluated together. scikit-learn and the stack are left out of several outputs, and on a
    GPU. Of ``StackedGP`` all is counted: its six models, calibration
    and weights.

    Args:
        n: Number of points.
        dimensions: Number of inputs.
        outputs: Outputs of a model.
        seed: Seed of the data.
        exact: BoTorch's search goes on to a gradient of 1e-8; by default it stops earlier.
        device: Where.
        seconds: That the rounds may take.

    Returns:
        Rows as from :func:`benchmarks.speed.timing.timed`. ``gain`` is the log marginal likelihood
        a point, priors included, above that of BoTorch's fit; ``apart`` the largest relative
        difference of a noise variance or a lengthscale.
    """
    data = search_data(n, dimensions, seed, device, outputs)
    left_out = ("scikit-learn", "StackedGP") if outputs > 1 or device != "cpu" else ("-",)
    options = {"optimizer_kwargs": {"options": _TO_THE_END}} if exact else {}
    known = {**SEARCHES, SEARCH_BASE: _botorch_fit(**options)}
    ways = {name: way for name, way in known.items() if not name.startswith(left_out)}
    ends: dict[str, End | None] = {}

    def fit(name: str) -> None:
        with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(n + 1):
            warnings.simplefilter("ignore", FitWarning)
            ends[name] = ways[name](data)

    steps = {name: partial(fit, name) for name in ways}
    rows = timed(steps, device, seconds, base=SEARCH_BASE)
    # Ends are computed after the rounds, so that no time has them.
    values = {name: end() for name, end in ends.items() if end is not None}
    for row in rows if SEARCH_BASE in values else ():
        if row["method"] in values:
            value, base = values[row["method"]], values[SEARCH_BASE]
            row |= {"LML a point": float(value[0]), "gain": float(value[0] - base[0])}
            row["apart"] = float(abs(value / base - 1)[1:].max())
    return rows


def search_data(n: int, dimensions: int, seed: int, device: str = "cpu", outputs: int = 1) -> Data:
    """Inputs on the unit cube, standardized targets ``(n, outputs)``: sums of sines and noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, dimensions, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    y = torch.stack([torch.sin(3 * x[:, :3] + k).sum(-1) for k in range(outputs)], -1) + 0.1 * noise
    return x.to(device), ((y - y.mean(0)) / y.std(0)).to(device)


def _botorch_fit(**options: Any) -> Way:
    def fit(data: Data) -> End:
        model = SingleTaskGP(*data, outcome_transform=None)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
        return partial(_end, model)

    return fit


def _mll_fit(objective: Callable[..., Any], is_lml: bool = True) -> Way:
    def fit(data: Data) -> End | None:
        model = SingleTaskGP(*data, outcome_transform=None)
        fit_mll(objective(model.likelihood, model), progress=False)
        return partial(_end, model) if is_lml else None

    return fit


def _end(model: SingleTaskGP) -> np.ndarray:
    """The log marginal likelihood includes the priors' share and is per point and output."""
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)).train()
    kernel = cast(Any, model.covar_module)
    with torch.no_grad():
        value = -mll.compute_custom_loss().mean().reshape(1)
        noise, scales = model.likelihood.noise, kernel.lengthscale
        return torch.cat([value, noise.reshape(-1), scales.reshape(-1)]).cpu().numpy()


def _sklearn_fit(data: Data) -> None:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    x, y = (values.numpy() for values in data)
    kernel = RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        GaussianProcessRegressor(kernel, alpha=0.0).fit(x, y[:, 0])


def _stacked_fit(data: Data) -> None:
    StackedGP().fit(data[0], data[1][:, 0], progress=False)


SEARCHES: dict[str, Way] = {
    SEARCH_BASE: _botorch_fit(),
    "botorch, fit_gpytorch_mll_fused": _botorch_fit(optimizer=fit_gpytorch_mll_fused),
    "fit_mll, gpytorch LML": _mll_fit(ExactMarginalLogLikelihood),
    "fit_mll, LastPoints(m=0)": _mll_fit(partial(_CLML, conditioning=LastPoints(m=0))),
    "fit_mll, LeaveOneOut()": _mll_fit(partial(_CLML, conditioning=LeaveOneOut()), is_lml=False),
    "fit_mll, KFold(10)": _mll_fit(_CLML, is_lml=False),
    "StackedGP, all its models": _stacked_fit,
    "scikit-learn": _sklearn_fit,
}
"""Ways of fitting, by name."""


Fitted = tuple[Callable[[Tensor], Any], float]
"""What predicts probabilities, and the log evidence a point; NaN where there is none."""


class _LogisticGP(LatentGP):
    """The model of scikit-learn's classifier with an RBF kernel, from its start."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, LogisticLikelihood())
        self.mean_module = ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1]))
        self.to(x)
        self.covar_module.outputscale = self.covar_module.base_kernel.lengthscale = 1.0


def _laplace_fit(make: Callable[[Tensor, Tensor], LatentGP]) -> Callable[..., Fitted]:
    def fit(x: Tensor, y: Tensor) -> Fitted:
        model = make(x, y)
        result = fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model), progress=False)
        return lambda new: model.predict(new, progress=False).probabilities, result.history[-1]

    return fit


def _sklearn_classes(x: Tensor, y: Tensor) -> Fitted:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    gp = GaussianProcessClassifier(ConstantKernel() * RBF(np.ones(x.shape[1])))
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        gp.fit(x.numpy(), y.numpy())
    evidence = float(cast(Any, gp).log_marginal_likelihood_value_)
    return lambda new: gp.predict_proba(new.numpy()), evidence / len(y)


def _variational_classes(x: Tensor, y: Tensor) -> Fitted:
    likelihood = BernoulliLikelihood()
    with torch.random.fork_rng(devices=[]):
        model = fit_variational(x.numpy(), y.numpy(), likelihood, seed=0)

    def predict(new: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([likelihood(model(points)).mean for points in new.split(1000)])

    return predict, math.nan


_CLASS_BASE = "scikit-learn"
CLASS_FITS: dict[str, Callable[[Tensor, Tensor], Fitted]] = {
    _CLASS_BASE: _sklearn_classes,
    "LatentGP, the same model": _laplace_fit(_LogisticGP),
    "GPClassification": _laplace_fit(GPClassification),
    "GPyTorch's SVGP": _variational_classes,
}
"""Ways of fitting two classes, by name."""


def measure_class_fits(
    n: int, data: str = "breast-cancer", new: int = 100_000, *, seconds: float = 3.0
) -> list[Row]:
    """Fits of Gaussian processes of two classes, and their predictions.

    scikit-learn and ``LatentGP`` maximize Laplace's evidence of one model from one start: logistic,
    an RBF kernel with ARD, no mean. ``GPClassification`` has its default kernel and priors, and
    predicts by expectation propagation; SVGP has a Matern kernel, 200 inducing points and 300 steps
    of Adam.

    Args:
        n: Number of points.
        data: A table of classes, or ``"drawn"``: the sign of a noisy function of eight inputs.
        new: Points predicted.
        seconds: That the rounds may take.

    Returns:
        Rows as from :func:`benchmarks.speed.timing.timed`, with the log ``evidence`` a point at the
        end, and seconds to ``predict`` the new points. None where the table has too few.
    """
    if data == "drawn":
        x, numbers = search_data(n, 8, 0)
        y = (numbers[:, 0] > 0).double()
    else:
        table = load_labelled(data)
        if len(table.targets) < n:
            return []
        order = np.random.default_rng(0).permutation(len(table.targets))[:n]
        x, y = torch.tensor(table.inputs[order]), torch.tensor(table.targets[order]).double()
        x = x[:, x.std(0) > 0]
    x = (x - x.mean(0)) / x.std(0)
    fitted: dict[str, Fitted] = {}

    def fit(name: str) -> None:
        fitted[name] = CLASS_FITS[name](x, y)

    rows = timed(
        {name: partial(fit, name) for name in CLASS_FITS}, "cpu", seconds, base=_CLASS_BASE
    )
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(new, x.shape[-1], generator=generator, dtype=x.dtype)
    for row in rows:
        if row["method"] in fitted:
            predict, row["evidence"] = fitted[row["method"]]
            start = time.perf_counter()
            predict(points)
            row["predict s"] = time.perf_counter() - start
    return rows


def measure_batches(
    n: int, objective: str = "clml", size: int = 10, steps: int = 20,
    *, device: str = "cpu", seconds: float = 3.0,
) -> list[Row]:  # fmt: skip
    """Fits of bottleneck deep kernels, one by one, so many in a batch, and as is best.

    Freed memory is kept in the process, as the runner's workers do.

    Returns:
        A row a number of fits at once: its times, and ``models a second``;
        ``suggested`` is the number that ``gpclml.fit.suggest_batch_size`` says.
    """
    # As in a worker of the runner, for which batches were made.
    keep_freed_memory()
    suggested = suggest_batch_size(n, device)
    sizes = {f"{together} at once": together for together in (1, min(size, suggested), size)}
    ways = {
        name: partial(fit_models, n, objective, size, together, steps, device)
        for name, together in sizes.items()
    }
    rows = timed(ways, device, seconds, base="1 at once", memory=True)
    for row in rows:
        row["suggested"] = suggested
        if "ms" in row:
            row["models a second"] = 1e3 * size / row["ms"]
    return rows


def fit_models(
    n: int, objective: str, count: int, together: int, steps: int, device: str
) -> list[ConditionalMarginalLogLikelihood]:
    """Makes bottleneck deep kernels on data of their own and fits them, some at a time."""
    mlls = []
    for seed in range(count):
        x, y = sampled_data(n, torch.float64, device, seed)
        model = GPRegression(x, y, "deep_bottleneck", seed=seed)
        held_out = {"clml": None, "lml": LastPoints(m=0)}[objective]
        mlls.append(ConditionalMarginalLogLikelihood(model.likelihood, model, held_out, seed=seed))
    for start in range(0, len(mlls), together):
        members = mlls[start : start + together]
        if together == 1:
            fit_mll(members[0], "adam", steps=steps, progress=False)
        else:
            fit_batch(members, "adam", steps=steps, progress=False)
    return mlls


_TEST = 5000
_LARGE_OBJECTIVES: dict[str, Callable[..., Any]] = {
    "LML": partial(_CLML, conditioning=LastPoints(m=0)),
    "leave-one-out": partial(_CLML, conditioning=LeaveOneOut()),
    "ten folds": partial(_CLML, conditioning=KFold(10)),
    "GPyTorch's LML": ExactMarginalLogLikelihood,
}


_LARGE_KERNELS: dict[str, Callable[..., gpytorch.kernels.Kernel]] = {
    "rbf": RBFKernel,
    "matern 5/2": partial(MaternKernel, nu=2.5),
    "matern 3/2": partial(MaternKernel, nu=1.5),
    "matern 1/2": partial(MaternKernel, nu=0.5),
}


def measure_large_fits(
    n: int, kernel: str = "matern 5/2", method: str = "LML", data: str = "kin40k",
    *, device: str = "cpu",
) -> list[Row]:  # fmt: skip
    """One exact fit of ``GPRegression`` by a line search, and its scores on up to 5000 other rows.

    Args:
        n: Number of training rows.
        kernel: ``"rbf"``, or ``"matern"`` with 1/2, 3/2 or 5/2.
        method: ``"LML"``, ``"leave-one-out"``, ``"ten folds"`` or ``"GPyTorch's LML"``, its own
            objective under the same search.
        data: A table, or ``"drawn"``.
        device: Where.
    """
    check_known("method", [method], _LARGE_OBJECTIVES)
    check_known("kernel", [kernel], _LARGE_KERNELS)
    if data == "drawn":
        x, y = sampled_data(n + 5000, torch.float64, "cpu", 0)
    else:
        table = load(data)
        x, y = table.inputs.double(), table.targets.double()
    # One split for all kernels, objectives and n: smaller training sets are nested.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:n], order[n:][-_TEST:]
    covariance = ScaleKernel(_LARGE_KERNELS[kernel](ard_num_dims=x.shape[-1]))
    model = GPRegression(x[train].to(device), y[train].to(device), covariance)
    mll = _LARGE_OBJECTIVES[method](model.likelihood, model)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    wait_for(device)
    start = time.perf_counter()
    with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(n + 1):
        warnings.simplefilter("ignore", FitWarning)
        result = fit_mll(mll, progress=False)
    wait_for(device)
    row: Row = {
        "seconds": time.perf_counter() - start, "steps": len(result.history),
        "ended": result.problem or "converged",
    }  # fmt: skip
    if on_gpu:
        row["GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    with torch.no_grad():
        row["LML a point"] = float(log_marginal_likelihood(model, units="training")) / n
        row["LOO a point"] = float(leave_one_out(model, units="training").mean())
        row |= _test_scores(model, x[test].to(device), y[test].to(device))
    row["noise"] = float(model.likelihood.noise.detach())
    return [row]


def _test_scores(model: GPRegression, x: Tensor, y: Tensor) -> Row:
    """Scores of held-out rows in standardized units, in which a variance of 1 knows nothing."""
    predicted = model.predict(x, marginal=True, solver="cholesky", progress=False)
    mean, variance = predicted.mean, predicted.variance
    scale = model.target_scale
    density = Normal(mean, variance.sqrt()).log_prob(y) + scale.log()
    return {
        "test NLL": -float(density.mean()),
        "its error": float(density.std() / len(y) ** 0.5),
        "test RMSE": float((mean - y).square().mean().sqrt() / scale),
    }


TABLES: tuple[str, ...] = tuple(name for name in names() if name != "challenger")
"""Tables with 50 rows or more. Rules of the search are chosen on every second one, from the first
on, and judged on the others."""

_OPTIMIZERS: dict[str, Any] = {"botorch": {}, "fused": {"optimizer": fit_gpytorch_mll_fused}}
_CLEAR = 0.02  # nats a row
_LEAST_TESTED, _MOST_TESTED = 30, 500


def measure_predictions(table: str, n: int, subset: int = 0) -> list[Row]:
    """Fits of BoTorch's ``SingleTaskGP`` by both optimizers, from the same start on the same rows.

    Args:
        table: Name of a table.
        n: Number of training rows.
        subset: Seed of the random subset of rows.

    Returns:
        One row: of both optimizers the negative log density of test rows (``nll``, in nats) and
        their root mean square error (``rmse``), for targets of deviation 1 in the training rows,
        and seconds of processor time. None where fewer than 30 rows are left to test on.
    """
    data = load(table)
    if data.num_data < n + _LEAST_TESTED:
        return []
    generator = torch.Generator().manual_seed(1000 * subset + n)
    order = torch.randperm(data.num_data, generator=generator)[: n + _MOST_TESTED]
    x, y = data.inputs[order], data.targets[order]
    # Normalize divides by the range of a column.
    x = x[:, x[:n].std(0) > 0]
    scores = {way: _predicted_fit(x, y, n, subset, how) for way, how in _OPTIMIZERS.items()}
    return [{f"{name}_{way}": value for way in scores for name, value in scores[way].items()}]


def _predicted_fit(
    x: Tensor, y: Tensor, n: int, seed: int, options: dict[str, Any]
) -> dict[str, float]:
    transform = Normalize(x.shape[-1])
    model = SingleTaskGP(x[:n], y[:n, None], input_transform=transform)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)  # BoTorch tries again
        torch.manual_seed(seed)  # both optimizers retry from the same draws
        start = time.process_time()
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
        seconds = time.process_time() - start
    with torch.no_grad():
        predicted = model.posterior(x[n:], observation_noise=True)
        normal = Normal(predicted.mean[:, 0], predicted.variance[:, 0].sqrt())
    scale = y[:n].std()
    return {
        "nll": -float(normal.log_prob(y[n:]).mean() + scale.log()),
        "rmse": float((normal.mean - y[n:]).square().mean().sqrt() / scale),
        "seconds": seconds,
    }


def summarize_predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """The fused fits less BoTorch's own, paired: of all, of both halves of tables, of each n.

    Args:
        rows: As from :func:`measure_predictions`, with their table, n and subset.

    Returns:
        A row a group: number of ``fits``; mean difference in ``nll`` and its standard error
        ``se``; fits that are ``worse`` and ``better`` by more than .02 nats and ``p`` of the
        two-sided sign test between them; geometric mean of the ratios of RMSEs (``rmse``) and
        median ratio of processor times (``time``).
    """
    # What rules were chosen on does not judge them.
    chosen = rows["table"].isin(TABLES[::2])
    groups = {"all": rows, "chosen on": rows[chosen], "judged on": rows[~chosen]}
    groups |= {f"n = {n}": sized for n, sized in rows.groupby("n")}
    summaries = {}
    for name, fits in groups.items():
        change = fits.nll_fused - fits.nll_botorch
        worse, better = int((change > _CLEAR).sum()), int((change < -_CLEAR).sum())
        p = binomtest(worse, worse + better).pvalue if worse + better else 1.0
        rmse = np.exp(np.log(fits.rmse_fused / fits.rmse_botorch).mean())
        time_ratio = (fits.seconds_fused / fits.seconds_botorch).median()
        values = len(fits), change.mean(), change.sem(), worse, better, p, rmse, time_ratio
        columns = "fits", "nll", "se", "worse", "better", "p", "rmse", "time"
        summaries[name] = dict(zip(columns, values, strict=True))
    table = pd.DataFrame.from_dict(summaries, orient="index").rename_axis("of")
    return table[table["fits"] > 0]


def measure_loops(
    function: str, evaluations: int = 50, start: int = 0, restarts: int = 10,
    raw_samples: int = 512,
) -> list[Row]:  # fmt: skip
    """Loops of a fit of ``SingleTaskGP`` and a search of ``LogExpectedImprovement``.

    Each evaluation fits a new model from its start, as BoTorch's tutorials do.

    Args:
        function: Name of a test function.
        evaluations: Their number beside the initial ones.
        start: Seed of the initial points.
        restarts: Starts of the acquisition's search.
        raw_samples: Points that they are chosen from.

    Returns:
        A row an optimizer of fits, BoTorch's and ours: seconds in ``fits``, in the ``acquisition``
        and in both, their ``ratio`` to BoTorch's, and ``regret``: the largest value less the best.
    """
    rows: list[Row] = []
    for name, options in _OPTIMIZERS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)  # BoTorch's optimizers draw starts
            row = _loop(function, evaluations, start, restarts, raw_samples, options)
        base = rows[0]["total"] if rows else row["total"]
        rows.append({"method": name, **row, "ratio": row["total"] / base})
    return rows


def _loop(
    function: str, evaluations: int, seed: int, restarts: int, raw_samples: int, options: Any
) -> dict[str, float]:
    problem = make_problem(function)
    x = initial_points(problem.dim, seed)
    y = problem.values(x)
    bounds = torch.tensor([[0.0], [1.0]], dtype=x.dtype).expand(2, problem.dim)
    fits = acquisition = 0.0
    with warnings.catch_warnings():  # the best point so far will do
        warnings.simplefilter("ignore", OptimizationWarning)
        warnings.simplefilter("ignore", BadInitialCandidatesWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # of the acquisition's search
        for _ in range(evaluations):
            start = time.perf_counter()
            model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
            fitted = time.perf_counter()
            point, _ = optimize_acqf(
                LogExpectedImprovement(model, y.max()), bounds, 1, restarts, raw_samples
            )
            fits += fitted - start
            acquisition += time.perf_counter() - fitted
            x, y = torch.cat([x, point]), torch.cat([y, problem.values(point)])
    return {
        "fits": fits, "acquisition": acquisition, "total": fits + acquisition,
        "regret": float(problem.regrets(x).min()),
    }  # fmt: skip


def measure_acquisitions(
    n: int, points: int = 256, dimensions: int = 6, *, device: str = "cpu", seconds: float = 2.0
) -> list[Row]:
    """Time of a posterior at many points, and of ten predictions, by models that stay as they are.

    A posterior is a mean and a variance for each of a batch of points, as acquisition functions ask
    for them, with their gradient; the base is that of BoTorch's ``SingleTaskGP``.
    """
    keep_freed_memory()
    x, y = sampled_data(n, torch.float64, device, 0, dimensions)
    new = torch.rand(points, 1, dimensions, generator=torch.Generator().manual_seed(1)).to(x)
    new.requires_grad_()
    models = {
        "SingleTaskGP": SingleTaskGP(x, y.unsqueeze(-1)),
        "GPRegression": GPRegression(x, y, "matern"),
        "GPClassification": GPClassification(x, y > y.median()),
        "DeepKernelGP": DeepKernelGP(x, y.unsqueeze(-1)),
        "DeepKernelGP, two outcomes": DeepKernelGP(x, torch.stack([y, y.square()], dim=-1)),
    }

    def evaluate(model: Any) -> None:
        normal = model.posterior(new) if hasattr(model, "posterior") else model(new)
        torch.autograd.grad(normal.mean.sum() + normal.variance.sum(), new)

    steps = {name: partial(evaluate, model.eval()) for name, model in models.items()}
    few = new[:10, 0].detach()
    steps["GPRegression.predict, 10 rows"] = lambda: models["GPRegression"].predict(few)
    steps["GPClassification.predict, 10 rows"] = lambda: models["GPClassification"].predict(few)
    return timed(steps, device, seconds, base="SingleTaskGP")
