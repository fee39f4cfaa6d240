"""Methods for tables of tens of thousands of rows, each as a competent user of it would use it.

Inputs and targets are standardized. A method that is trained step by step has a budget of
processor seconds, four minutes unless said otherwise, and learning rates that fall with it by half
a cosine; one that ends by itself takes what it takes. What predicts a number alone gets a density:
a normal whose standard deviation is the root mean squared error on a tenth of the training rows
that are held out.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import gpytorch
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tables.peers import Peer, make_catboost
from benchmarks.tables.scores import Array, normal
from gpclml import (
    ConditionalMarginalLogLikelihood,
    ExactMarginalLogLikelihood,
    GPRegression,
    Regressor,
    fit_mll,
)
from gpclml.conditioning import Conditioning, NearestNeighbors, RandomHoldout
from gpclml.tables import StackedPrediction

Predict = Callable[[Array], StackedPrediction]

OURS = (
    "neighbors-64", "neighbors-256", "deep-neighbors", "deep-previous", "deep-blocks", "deep-lml",
    "regressor",
)  # fmt: skip
"""The methods of this library; the subset is what it did before."""

_NEIGHBORS = 32  # of VNNGP
_MEMBERS = 5  # of an ensemble


class Effort(NamedTuple):
    """What training may cost.

    Args:
        seconds: Processor seconds.
        steps: Most steps, epochs, trees or iterations; None for what the method has by itself.
    """

    seconds: float
    steps: int | None = None

    def divided(self, count: int) -> Effort:
        """That of each of several trainings."""
        return Effort(self.seconds / count, self.steps)


def _descend(
    optimizer: torch.optim.Optimizer, step: Callable[[], None], effort: Effort, most: int
) -> None:
    """Takes steps until the effort is spent; learning rates fall by half a cosine."""
    rates = [group["lr"] for group in optimizer.param_groups]
    start, most = time.process_time(), effort.steps or most
    for number in range(most):
        done = max(number / most, (time.process_time() - start) / effort.seconds)
        if done >= 1:
            break
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done))
        step()


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Random batches of rows, epoch after epoch, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def _in_chunks(predict: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> Predict:
    """Densities of test rows from a function that gives normals of a few of them."""

    def predicted(x: Array) -> StackedPrediction:
        with torch.no_grad():
            chunks = [predict(rows) for rows in torch.tensor(x, dtype=dtype).split(1000)]
        mean, variance = (
            torch.cat([getattr(chunk, name) for chunk in chunks]).double().numpy()
            for name in ("mean", "variance")
        )
        return normal(mean, np.sqrt(variance))

    return predicted


# This library.


def fit_given_neighbors(
    kernel: str, x: Array, y: Array, strategy: Conditioning, steps: int | None, seed: int
) -> GPRegression:
    """A model in float32, fitted by Adam in so many steps, or as many as its kernel asks for."""
    inputs, targets = torch.tensor(x).float(), torch.tensor(y).float()
    options = {"hidden": (256, 256), "num_features": x.shape[1], "seed": seed}
    model = GPRegression(inputs, targets, kernel, **options)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, strategy, seed=seed)
    usual, rates = (1500, {"final_lr": 1e-3, "network_lr": 2e-3}) if kernel == "deep" else (300, {})
    fit_mll(mll, "adam", steps=steps or usual, lr=0.1, progress=False, **rates)
    return model


def _neighbors(
    kernel: str, given: int, x: Array, y: Array, seed: int, effort: Effort, objective: str = "all"
) -> Predict:
    strategies: dict[str, Conditioning] = {
        "all": NearestNeighbors(),
        "previous": NearestNeighbors(order="previous"),
        "blocks": NearestNeighbors(255, 1, "joint"),
        # With one point to condition on, nearly the LML of 256 random rows.
        "lml": RandomHoldout(min(0.5, 256 / len(x)), condition_on=1),
    }
    model = fit_given_neighbors(kernel, x, y, strategies[objective], effort.steps, seed)
    return _in_chunks(lambda rows: model.predict(rows, neighbors=given))


def _regressor(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    return Regressor(random_state=seed).fit(x, y).predict_distribution


def _subset(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    rows = np.random.default_rng(seed).permutation(len(x))
    few, more = (torch.tensor(rows[:size]) for size in (2000, 5000))
    inputs, targets = torch.tensor(x), torch.tensor(y)
    fitted = GPRegression(inputs[few], targets[few], seed=seed)
    mll = ExactMarginalLogLikelihood(fitted.likelihood, fitted)
    fit_mll(mll, steps=effort.steps, progress=False)
    # In the units of the fit, so that its hyperparameters mean the same.
    added = inputs[more[len(few) :]], targets[more[len(few) :]].unsqueeze(-1)
    model = fitted.condition_on_observations(*added) if len(added[0]) else fitted
    return _in_chunks(lambda rows: model.predict(rows, marginal=True), torch.float64)


# Variational Gaussian processes of GPyTorch.


def _perceptron(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths[:-1]):
        layers += [nn.Linear(inputs, outputs), nn.SiLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


class VariationalGP(gpytorch.models.ApproximateGP):
    """SVGP with learned inducing points; or VNNGP, whose inducing points are all rows.

    Of several classes each has a function and a kernel of its own.
    """

    def __init__(
        self, points: Tensor, network: Any = None, neighbors: int | None = None, classes: int = 0
    ) -> None:
        variational, d = gpytorch.variational, points.shape[-1]
        batch = torch.Size([classes] if classes else [])
        if neighbors is None:
            features = points if network is None else network(points).detach()
            distribution = variational.CholeskyVariationalDistribution(len(points), batch)
            strategy: Any = variational.VariationalStrategy(self, features, distribution)
        else:
            distribution = variational.MeanFieldVariationalDistribution(len(points))
            strategy = variational.NNVariationalStrategy(
                self, points, distribution, k=neighbors, training_batch_size=256
            )
        if classes:
            strategy = variational.IndependentMultitaskVariationalStrategy(strategy, classes)
        super().__init__(strategy)
        self.network = network
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=d, batch_shape=batch)
        base.lengthscale = math.sqrt(d)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior distribution of the function there."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(self, x: Tensor | None, **kwargs: Any) -> Any:
        """The variational distribution there, of what the network makes of inputs."""
        return super().__call__(x if self.network is None else self.network(x), **kwargs)


def _variational(
    points: int | None, is_deep: bool, x: Array, y: Array, seed: int, effort: Effort
) -> Predict:
    """SVGP with so many inducing points; VNNGP if None."""
    torch.manual_seed(seed)
    # In a random order: the first rows are the inducing points.
    order, d = torch.randperm(len(x)), x.shape[1]
    inputs, targets = torch.tensor(x).float()[order], torch.tensor(y).float()[order]
    network = _perceptron(d, 256, 256, d) if is_deep else None
    model = VariationalGP(inputs[:points], network, _NEIGHBORS if points is None else None)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    named = [*model.named_parameters(), *likelihood.named_parameters()]
    groups = [
        {"params": [p for name, p in named if name.startswith("network") == is_network], "lr": rate}
        for is_network, rate in ((False, 0.03), (True, 3e-3))
    ]
    optimizer, batches = torch.optim.Adam(groups), _batches(len(x), 1024, seed)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        rows = next(batches)
        if points is None:  # the strategy draws the rows itself, which are its inducing points
            output = model(None)
            rows = cast(Any, model.variational_strategy).current_training_indices
        else:
            output = model(inputs[rows])
        (-cast(Tensor, mll(output, targets[rows]))).backward()
        optimizer.step()

    _descend(optimizer, step, effort, 20_000)
    model.eval()
    likelihood.eval()
    return _in_chunks(lambda rows: likelihood(model(rows)))


# Gaussian processes of other packages, given nearest neighbours.


def _gpboost(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    import gpboost

    options: dict[str, Any] = {
        "cov_function": "matern_ard", "cov_fct_shape": 2.5, "gp_approx": "vecchia",
        "num_parallel_threads": 1, "seed": seed,
    }  # fmt: skip
    rows = np.random.default_rng(seed).permutation(len(x))[:5000]
    fitted = gpboost.GPModel(gp_coords=x[rows], num_neighbors=20, **options)
    fitted.fit(y=y[rows], params={"maxit": effort.steps or 100})
    parameters = np.asarray(fitted.get_cov_pars(format_pandas=False)).ravel()
    model = gpboost.GPModel(gp_coords=x, num_neighbors=20, **options)
    model.set_prediction_data(num_neighbors_pred=100)

    def predict(new: Array) -> StackedPrediction:
        results = model.predict(
            y=y, gp_coords_pred=new, cov_pars=parameters, predict_var=True, predict_response=True
        )
        return normal(results["mu"], np.sqrt(results["var"]))

    return predict


def _muygps(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    from MuyGPyS.gp import MuyGPS
    from MuyGPyS.gp.deformation import Anisotropy, l2
    from MuyGPyS.gp.hyperparameter import AnalyticScale, Parameter, VectorParameter
    from MuyGPyS.gp.kernels import Matern
    from MuyGPyS.gp.noise import HomoscedasticNoise
    from MuyGPyS.neighbors import NN_Wrapper
    from MuyGPyS.optimize import L_BFGS_B_optimize

    def near(points: Array, count: int) -> Any:
        return NN_Wrapper(points, min(count, len(x) - 1), nn_method="exact", n_jobs=1)

    rows = np.random.default_rng(seed).permutation(len(x))[:500]
    points, noise, scales = x, 1e-2, np.full(x.shape[1], math.sqrt(x.shape[1]))
    # Neighbours are near in units of the lengthscales, so that these are fitted twice.
    for _ in range(2):
        points = points / scales
        lengths = [Parameter(1.0, (1e-2, 1e2)) for _ in scales]
        gp = MuyGPS(
            kernel=Matern(Parameter(2.5), Anisotropy(l2, VectorParameter(*lengths))),
            noise=HomoscedasticNoise(noise, (1e-5, 1.0)), scale=AnalyticScale(),
        )  # fmt: skip
        neighbors, _ = near(points, 30).get_batch_nns(rows)
        crosswise, pairwise, *targets = gp.make_train_tensors(rows, neighbors, points, y)
        most = {"maxiter": effort.steps or 30}
        gp = L_BFGS_B_optimize(gp, *targets, crosswise, pairwise, options=most)
        noise, length = float(gp.noise()), gp.kernel.deformation.length_scale
        scales = np.array(length())

    def moments(crosswise: Array, pairwise: Array, targets: Array) -> tuple[Array, Array]:
        inner, cross = gp.kernel(pairwise), gp.kernel(crosswise)
        # Variances are of the function: the noise of a new target comes on top.
        return gp.posterior_mean(inner, cross, targets), gp.posterior_variance(inner, cross) + noise

    # The scale by which the predictions left out have the errors that they expect.
    mean, variance = moments(crosswise, pairwise, targets[1])
    scale = np.mean((targets[0] - mean) ** 2 / variance)
    lookup, units = near(points, 64), np.std(x, 0) / np.std(points, 0)

    def predict(new: Array) -> StackedPrediction:
        results = []
        for chunk in np.array_split(new / units, max(1, len(new) // 500)):
            neighbors, _ = lookup.get_nns(chunk)
            places = np.arange(len(chunk))
            results.append(moments(*gp.make_predict_tensors(places, neighbors, chunk, points, y)))
        means, variances = (np.concatenate(values) for values in zip(*results, strict=True))
        return normal(means, np.sqrt(scale * variances))

    return predict


# Trees.


def _held_out(count: int, seed: int) -> tuple[Any, Any]:
    """Rows to train on, and the tenth that is held out."""
    rows = np.random.default_rng(seed).permutation(count)
    return rows[count // 10 :], rows[: count // 10]


def _residual_prediction(mean: Callable[[Array], Array], x: Array, y: Array) -> Predict:
    """Normals whose deviation is the root mean squared error on held-out rows."""
    deviation = float(np.sqrt(np.mean((mean(x) - y) ** 2)))
    return lambda new: normal(mean(new), deviation)


def _lightgbm(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    import lightgbm

    kept, held = _held_out(len(x), seed)
    boosters = []
    for leaves in (31, 127):
        settings = {
            "learning_rate": 0.05, "num_leaves": leaves, "bagging_fraction": 0.8, "bagging_freq": 1,
            "seed": seed, "num_threads": 1, "verbosity": -1,
        }  # fmt: skip
        rows = lightgbm.Dataset(x[kept], y[kept])
        others = lightgbm.Dataset(x[held], y[held], reference=rows)
        stop = lightgbm.early_stopping(100, verbose=False)
        boosters.append(
            lightgbm.train(
                settings, rows, effort.steps or 10_000, valid_sets=[others], callbacks=[stop]
            )
        )
    best: Any = min(boosters, key=lambda booster: booster.best_score["valid_0"]["l2"])
    return _residual_prediction(best.predict, x[held], y[held])


def _catboost(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    kept, held = _held_out(len(x), seed)
    options = {"iterations": effort.steps or 5000, "depth": 8, "learning_rate": 0.03}
    model = make_catboost("Regressor", seed, loss_function="RMSEWithUncertainty", **options)
    model.fit(x[kept], y[kept], eval_set=(x[held], y[held]), early_stopping_rounds=200)

    def predict(new: Array) -> StackedPrediction:
        mean, variance = model.predict(new, prediction_type="RMSEWithUncertainty").T
        return normal(mean, np.sqrt(variance))

    return predict


# Networks.


def _network(
    outputs: int, rate: float, dropout: float, x: Array, y: Array, seed: int, effort: Effort
) -> tuple[float, nn.Sequential]:
    """A network of mean, or mean and variance, at its best epoch, and its loss on held-out rows."""
    torch.manual_seed(seed)
    kept, held = map(torch.tensor, _held_out(len(x), seed))
    inputs, targets = torch.tensor(x).float(), torch.tensor(y).float()
    network = _perceptron(x.shape[1], 256, 256, outputs, dropout=dropout)
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-4)
    batches, epoch = _batches(len(kept), 128, seed), math.ceil(len(kept) / 128)
    best = (math.inf, copy.deepcopy(network))

    def loss(rows: Tensor) -> Tensor:
        mean, variance = _mean_and_variance(network(inputs[rows]))
        return nn.functional.gaussian_nll_loss(mean, targets[rows], variance)

    def step() -> None:
        nonlocal best
        for _ in range(epoch):
            optimizer.zero_grad()
            loss(kept[next(batches)]).backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            value = float(loss(held))
        if value < best[0]:
            best = value, copy.deepcopy(network)
        network.train()

    _descend(optimizer, step, effort, 300)
    best[1].eval()
    return best


def _mean_and_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of outputs of a network, 1 where it has a mean alone."""
    if outputs.shape[-1] == 1:
        return outputs[:, 0], torch.ones_like(outputs[:, 0])
    return outputs[:, 0], nn.functional.softplus(outputs[:, 1]) + 1e-6


@torch.no_grad()
def _moments(network: nn.Sequential, x: Array) -> Array:
    """Means and variances that it predicts, ``(2, n)``."""
    return torch.stack(_mean_and_variance(network(torch.tensor(x).float()))).double().numpy()


def _tuned_network(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    trials = ((1e-3, 0.0), (3e-3, 0.0), (1e-3, 0.1))
    fits = [_network(1, *trial, x, y, seed, effort.divided(len(trials))) for trial in trials]
    _, network = min(fits, key=lambda fit: fit[0])
    _, held = _held_out(len(x), seed)
    return _residual_prediction(lambda new: _moments(network, new)[0], x[held], y[held])


def _ensemble(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    share = effort.divided(_MEMBERS)
    fits = [_network(2, 1e-3, 0.0, x, y, _MEMBERS * seed + k, share) for k in range(_MEMBERS)]

    def predict(new: Array) -> StackedPrediction:
        moments = np.stack([_moments(network, new) for _, network in fits], 1)
        return normal(moments[0], np.sqrt(moments[1]), np.full(_MEMBERS, 1 / _MEMBERS))

    return predict


def _mean(x: Array, y: Array, seed: int, effort: Effort) -> Predict:
    return lambda new: normal(np.full(len(new), y.mean()), y.std())


LARGE_METHODS: Mapping[str, Peer] = {
    "neighbors-64": Peer(
        "GPRegression, Matern, NearestNeighbors(), predictions given 64",
        partial(_neighbors, "matern", 64),
    ),
    "neighbors-256": Peer("the same, given 256", partial(_neighbors, "matern", 256)),
    "deep-neighbors": Peer(
        "the same, a deep kernel of width 256, 1500 steps", partial(_neighbors, "deep", 256)
    ),
    "deep-previous": Peer(
        "the same by Vecchia's approximation of the LML: neighbours among previous points",
        partial(_neighbors, "deep", 256, objective="previous"),
    ),
    "deep-blocks": Peer(
        "the same by the joint density of 256 near rows",
        partial(_neighbors, "deep", 256, objective="blocks"),
    ),
    "deep-lml": Peer(
        "the same by the LML of 256 rows, drawn anew at each step",
        partial(_neighbors, "deep", 256, objective="lml"),
    ),
    "regressor": Peer("gpclml.Regressor", _regressor),
    "subset": Peer("GPRegression, LML of 2,000 rows, predictions given 5,000", _subset),
    "svgp-512": Peer(
        "GPyTorch's SVGP, Matern, 512 inducing points", partial(_variational, 512, False)
    ),
    "svgp-1024": Peer("the same, 1024 inducing points", partial(_variational, 1024, False)),
    "svgp-deep": Peer(
        "the same, 512 in features of a network of width 256", partial(_variational, 512, True)
    ),
    "vnngp": Peer(
        "GPyTorch's VNNGP, Matern, 32 neighbours", partial(_variational, None, False), "faiss"
    ),
    "gpboost": Peer(
        "GPBoost's Vecchia approximation, Matern, fitted to 5,000 rows given 20, predictions from "
        "all given 100", _gpboost, "gpboost",
    ),
    "muygps": Peer(
        "MuyGPyS, Matern, 500 predictions left out given 30, predictions given 64", _muygps,
        "MuyGPyS",
    ),
    "lightgbm": Peer("LightGBM, the better of two sizes of trees", _lightgbm, "lightgbm"),
    "catboost": Peer("CatBoost, RMSEWithUncertainty", _catboost, "catboost"),
    "network": Peer("network of width 256, the best of three trials", _tuned_network),
    "ensemble": Peer("five networks of mean and variance", _ensemble),
    "mean": Peer("mean and deviation of the training targets", _mean),
}  # fmt: skip
"""By name, those of this library first, baselines last; ``predict`` maps training inputs, targets,
a seed and the effort to a function that predicts densities of test inputs."""
