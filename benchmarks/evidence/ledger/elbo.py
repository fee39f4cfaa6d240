"""Harvey and Hughes (2026): hyperparameters by lower bounds with restricted posteriors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.evidence.ledger.claims import (
    AtLeast,
    Claim,
    Experiment,
    array,
    graded,
    together,
    with_error,
)
from gpclml.conditioning import RandomOrderings
from gpclml.errors import NonFiniteError
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily, gaussian_kl
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel


def fit_linear_bound(
    mll: LinearEvidenceLowerBound, *, steps: int, lr: float, empirical_bayes: bool = False
) -> list[float]:
    r"""Ascends one group of parameters after the other, each but the last in closed form.

    A step takes the best q; then, with q held, the noise
    :math:`\sigma^2 = E_q \|r - \Phi w\|^2 / n` and, by empirical Bayes, the prior variance
    :math:`\tau = E_q \|w\|^2 / R`; then one step of Adam, its learning rate falling by a cosine,
    on what the features depend on (Harvey and Hughes 2026, Appendix C). The hyperparameters of
    the largest bound are kept. Hyperparameter priors do not weigh in.

    Args:
        mll: The bound; trained in place on the model's own data.
        steps: Number of steps.
        lr: Learning rate of Adam at the start.
        empirical_bayes: Whether the prior variance is fitted, one for all weights.

    Returns:
        The bounds of all steps in nats per point.

    Raises:
        NonFiniteError: The bound is not finite.
    """
    model = mll.model
    kernel, likelihood = model.covar_module, model.likelihood
    inputs, target = model.train_inputs, model.train_targets
    fixed = {id(likelihood.raw_noise), id(kernel.raw_prior_variance)}
    optimizer = torch.optim.Adam([p for p in mll.parameters() if id(p) not in fixed], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    bounds, best = list[float](), mll.state_dict()
    for _ in range(steps):
        data = mll.data_at(model(*inputs), target)
        q = mll.weights_at(data)
        with torch.no_grad():
            likelihood.noise = data.expected_square(q) / len(data.residual)
            if empirical_bayes:
                second = q.variance().sum() + q.mean.square().sum()
                kernel.prior_variance = second / len(q.mean)
        # Noise and prior variance have changed, and with them all but the features.
        data = mll.data_at(model(*inputs), target)
        kl = gaussian_kl(q, data.prior_variance)
        value = (data.expected_log_likelihood(q) - mll.temperature * kl) / len(data.residual)
        bound = float(value.detach())
        if not math.isfinite(bound):
            raise NonFiniteError("mll", f"a bound of {bound}", "a finite bound", "Lower lr.")
        # Before the step: the bound is that of the hyperparameters as they are.
        if bound > max(bounds, default=-math.inf):
            best = copy.deepcopy(mll.state_dict())
        bounds.append(bound)
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
        schedule.step()
    mll.load_state_dict(best)
    return bounds


NUM_DATA, NUM_FEATURES, NOISE, EPSILON = 20, 1024, 0.1, 1e-6


def sine(random: Any, count: int) -> tuple[Tensor, Tensor]:
    """Points, ``(n, 1)``, and targets, ``(n,)``."""
    x = random.randn(count)
    y = np.sin(3 * x) + NOISE * random.randn(count)
    return torch.tensor(x).unsqueeze(-1), torch.tensor(y)


def drawn_features(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Weights, ``(R, 1)``, and biases, ``(R,)``, of random Fourier features."""
    weight = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return weight, 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)


def published_run(cell: Mapping[str, Any]) -> dict[str, float]:
    """Rank one by the steps of the authors' public code, for a cell as of :func:`run_tempering`.

    What their figures print is of the mean and the noise of the best epoch, with the
    hyperparameters after the step of Adam that ends it: ``elbo`` at temperature one and ``lml``.
    """
    seed, steps, temperature = cell["seed"], cell["steps"], cell["temperature"]
    x, y = sine(np.random.RandomState(seed), NUM_DATA)
    drawn = drawn_features(torch.Generator().manual_seed(seed), NUM_FEATURES)
    largest, best = -math.inf, dict[str, float]()
    for rate in cell["rates"]:
        run = _Run(x, y, drawn)
        optimizer = torch.optim.Adam([run.raw], lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            run.update(temperature)
            optimizer.zero_grad()
            value = run.bound(temperature)
            (-value).backward()
            optimizer.step()
            schedule.step()
            # Scores are taken after the step, of the mean before it: the mix that was published.
            if value.item() >= largest:
                largest, best = value.item(), run.scores()
    return best


class _Run:
    """Hyperparameters and the rank-one posterior with mean m and covariance v v' + ε I.

    Its v is the best one, along which all features are zero.
    """

    def __init__(self, x: Tensor, y: Tensor, drawn: tuple[Tensor, Tensor]):
        self.x, self.y, self.drawn = x, y, drawn
        self.raw = torch.full((2,), math.log(math.e - 1), dtype=torch.float64, requires_grad=True)
        self.noise = torch.tensor(1.0, dtype=torch.float64)
        self.mean = torch.zeros(len(drawn[1]), dtype=torch.float64)

    def features(self) -> Tensor:
        """Features at the points, ``(n, R)``; weights have prior variance one."""
        (weight, bias), (lengthscale, amplitude) = self.drawn, softplus(self.raw)
        angles = self.x @ (weight / lengthscale).T + bias
        return amplitude * math.sqrt(2 / len(bias)) * angles.cos()

    def squares(self, phi: Tensor) -> Tensor:
        """Expected squared residuals, their sum."""
        return (self.y - phi @ self.mean).square().sum() + EPSILON * phi.square().sum()

    @torch.no_grad()
    def update(self, temperature: float) -> None:
        """The best mean, then the best noise."""
        phi = self.features()
        # By the small system of n points: there are fifty times as many features.
        noise = temperature * self.noise * torch.eye(len(self.y), dtype=torch.float64)
        self.mean = phi.T @ torch.linalg.solve(phi @ phi.T + noise, self.y)
        self.noise = self.squares(phi) / len(self.y)

    def bound(self, temperature: float) -> Tensor:
        """The lower bound, in nats in all."""
        phi = self.features()
        number = phi.shape[1]
        # Of the best v only its length is known: it is orthogonal to all features.
        length = 1 - EPSILON
        fit = len(self.y) * (2 * math.pi * self.noise).log() + self.squares(phi) / self.noise
        second = length + EPSILON * number + self.mean.square().sum()
        # Eigenvalues of v v' + ε I: ε, R - 1 times, and |v|² + ε, which is one.
        log_det = (number - 1) * math.log(EPSILON)
        divergence = second - number - log_det
        return -0.5 * (fit / temperature + divergence)

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """At the hyperparameters as they are now, see :func:`published_run`."""
        phi = self.features()
        K = phi @ phi.T + self.noise * torch.eye(len(self.y), dtype=torch.float64)
        evidence = torch.distributions.MultivariateNormal(torch.zeros_like(self.y), K)
        return {"elbo": float(self.bound(1.0)), "lml": float(evidence.log_prob(self.y))}


_FAMILIES = {
    "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1, EPSILON), "full": FullFamily(),
}  # fmt: skip


class LearnedBound(NamedTuple):
    """A model whose hyperparameters have the largest bound of several runs.

    Attributes:
        model: The linear model.
        bound: Its bound at the temperature it was learned at, in nats in all.
        bound_at_one: That at temperature one, of the same q.
        objective: The objective that it was learned under, which has q.
        test_x: Points of the same distribution.
        test_y: Their targets.
    """

    model: Any
    bound: float
    bound_at_one: float
    objective: Any
    test_x: Any
    test_y: Any

    def scores(self) -> dict[str, float]:
        """Hyperparameters, and what other criteria and test points say of them.

        Returns:
            ``noise`` (standard deviation), ``lengthscale``, ``amplitude``, ``prior_variance``;
            in nats in all ``elbo`` (at temperature one), ``lml``, ``clml`` (mean over 2000 orders,
            given 15 points), ``loo``; ``test`` log density, nats a point, and ``rmse``.
        """
        model, features = self.model, self.model.covar_module.features
        orders = RandomOrderings(k=2000, m=15, seed=0)
        with torch.no_grad():
            predicted = model.predict(self.test_x, marginal=True)
            test = marginal_log_predictive(model, self.test_x, self.test_y).mean()
            return {
                "noise": float(model.noise.sqrt()), "lengthscale": float(features.lengthscale),
                "amplitude": float(features.amplitude),
                "prior_variance": float(model.prior_variance[0]), "elbo": self.bound_at_one,
                "lml": float(log_marginal_likelihood(model)),
                "clml": float(conditional_log_marginal_likelihood(model, orders).mean()),
                "loo": float(leave_one_out(model).sum()), "test": float(test),
                "rmse": float((predicted.mean - self.test_y).square().mean().sqrt()),
            }  # fmt: skip

    def scores_of_q(self) -> dict[str, float]:
        """What the restricted posterior q itself, not the exact one, predicts at test points.

        Returns:
            ``q_test`` log density, nats a point, and ``q_rmse``, both with the learned noise.
        """
        model, x = self.model, self.test_x
        with torch.no_grad():
            data = self.objective.data_at(model(*model.train_inputs), model.train_targets)
            # Hyperparameters are held: q is the best of its family under them.
            q, phi = self.objective.weights_at(data), model.features(x)
            mean = model.mean_module(x) + phi @ q.mean
            variance = q.predictive_variance(phi) + model.noise
            density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(self.test_y)
            return {
                "q_test": float(density.mean()),
                "q_rmse": float((mean - self.test_y).square().mean().sqrt()),
            }


def learned_bound(
    cell: Mapping[str, Any], drawn: tuple[Tensor, Tensor] | None = None
) -> LearnedBound:
    """Hyperparameters by coordinate ascent, of the best of several learning rates.

    Args:
        cell: ``family``, ``"diagonal"``, ``"rank-1"`` or ``"full"``; ``seed`` of the data,
            :math:`y = sin(3 x) + .1 e` with x and e standard normal, and of the features;
            ``steps`` of each run; ``rates`` of Adam. It may have the ``temperature`` of the bound,
            ``empirical_bayes``, whether the prior variance is learned too, and ``num_features``.
        drawn: Weights and biases of the features; None draws those of the seed.
    """
    seed, number = cell["seed"], cell.get("num_features", NUM_FEATURES)
    x, y = sine(np.random.RandomState(seed), NUM_DATA)
    test_x, test_y = sine(np.random.RandomState(1000 + seed), 500)
    weight, bias = drawn or drawn_features(torch.Generator().manual_seed(seed), number)
    options = {"steps": cell["steps"], "empirical_bayes": cell.get("empirical_bayes", False)}
    family, temperature = _FAMILIES[cell["family"]], cell.get("temperature", 1.0)
    runs = []
    for rate in cell["rates"]:
        features = RandomFourierFeatures(1, len(bias), weight=weight, bias=bias)
        model = BayesianLinearModel(x, y, features)
        mll = LinearEvidenceLowerBound(model.likelihood, model, family, temperature=temperature)
        history = fit_linear_bound(mll, lr=rate, **options)
        with torch.no_grad():
            untempered = float(mll.at_temperature(1.0, model(x), y))
        bounds = (NUM_DATA * max(history), NUM_DATA * untempered)
        runs.append(LearnedBound(model, *bounds, mll, test_x, test_y))
    # As the authors do, the learning rate of the largest bound wins.
    return max(runs, key=lambda run: run.bound)


_KINDS = (*((name, False) for name in _FAMILIES), ("rank-1", True))  # prior variance learned
_RATES = (0.1, 0.01, 0.001, 0.0001)
_SOURCE = "Harvey and Hughes 2026"
_PAPER = {_SOURCE: {"steps": 1000, "rates": _RATES, "num_data": 20, "num_features": 1024}}
_CONSTANTS = {"num_data": NUM_DATA, "num_features": NUM_FEATURES}
# Seed 0 of the paper: noise, lengthscale, amplitude, ELBO, LML, with the digits recomputed.
_SEED_FIGURES = {
    "diagonal": (0.3949, 0.3278, 0.3071, -15.7618, -13.0351),
    "rank-1": (5.539e-4, 0.0204, 0.5563, -6443.5416, -15.1993),
    "full": (0.1340, 0.6738, 1.0797, -2.2153, -2.2153),
}
_NAMES = ("noise", "lengthscale", "amplitude", "elbo", "lml")


def run_families(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of one family, and what other criteria say of them.

    Args:
        cell: ``seed``, ``family``, ``empirical_bayes``, ``steps``, ``rates``.

    Returns:
        Those of :meth:`LearnedBound.scores`; for seed 0 the predictive ``mean`` and ``deviation``
        on a ``grid``, with the points ``x`` and ``y``.
    """
    learned = learned_bound(cell)
    scores: dict[str, Any] = {**learned.scores()}
    if cell["seed"] == 0:
        grid = torch.linspace(-3, 3, 301, dtype=torch.float64)
        with torch.no_grad():
            predicted = learned.model.predict(grid, marginal=True)
        scores |= {
            "grid": grid.tolist(), "mean": predicted.mean.tolist(),
            "deviation": predicted.stddev.tolist(),
            "x": learned.model.train_inputs[0].squeeze(-1).tolist(),
            "y": learned.model.train_targets.tolist(),
        }  # fmt: skip
    return scores


def _rows(cells: pandas.DataFrame, family: str, learned: bool = False) -> pandas.DataFrame:
    # Learned and fixed prior variances are two solutions of one family.
    chosen = cells[(cells["family"] == family) & (cells["empirical_bayes"] == learned)]
    return chosen.set_index("seed").sort_index()


def _families_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    rows = {name: _rows(cells, name) for name in _FAMILIES}
    learned = _rows(cells, "rank-1", learned=True)
    digits = {}
    for name, published in _SEED_FIGURES.items():
        ours = [float(rows[name].loc[0, key]) for key in _NAMES]
        same = [
            abs(value - figure) <= 5.5e-5 * max(1.0, abs(figure) / 1000) if abs(figure) > 1e-3
            else abs(value / figure - 1) < 1e-3
            for value, figure in zip(ours, published, strict=True)
        ]  # fmt: skip
        digits[name] = Claim(
            f"{_SOURCE}, Figure 1",
            "Seed 0, by family: noise deviation, lengthscale, amplitude, ELBO, LML.",
            ", ".join(f"{value:g}" for value in published),
            ", ".join(f"{value:.{4 if abs(value) > 1e-3 else 7}f}" for value in ours),
            graded(*same),
            rule="all printed digits",
        )
    yield together(digits)

    noise = {name: some["noise"].tolist() for name, some in rows.items()}
    seed_noises = "; ".join(
        f"{name} " + ", ".join(f"{value:.2g}" for value in values) for name, values in noise.items()
    )
    order = zip(noise["rank-1"], noise["full"], noise["diagonal"], strict=True)
    yield Claim(
        f"{_SOURCE}, Figures 1 and 3",
        "The diagonal underfits and rank one overfits: noise deviation above and below the .1 of "
        "the data, the full family near it.",
        "seed 0: .39, .00055 and .13",
        "; ".join(f"{name} {with_error(noise[name], 4)}" for name in _FAMILIES)
        + "; test log density "
        + ", ".join(f"{name} {with_error(rows[name]['test'].tolist(), 2)}" for name in _FAMILIES),
        graded(
            all(low < middle < high for low, middle, high in order),
            max(noise["rank-1"]) < 0.05, min(noise["diagonal"]) > 0.2,
        ),
        rule="for each seed in that order, rank one below .05, the diagonal above .2",
        doubt="Ours, by the rule: the paper shows seeds 0 and 2, where all of it holds. On one of "
        "the other seeds rank one's noise is above .05. Tried with two and with four learning "
        f"rates; noise of each seed: {seed_noises}",
        remark="Test log densities are those of the exact posterior at the learned "
        "hyperparameters. What is wrong is the learned noise and not the approximate posterior.",
    )  # fmt: skip

    over = {
        name: int((rows["rank-1"][name] > rows["diagonal"][name]).sum())
        for name in ("lml", "clml", "loo", "elbo", "test")
    }
    count = len(rows["full"])
    yield Claim(
        f"{_SOURCE}, Figures 1 and 5",
        "Of the underfit and the overfit solution the evidence sometimes prefers the overfit one, "
        "the ELBO never.",
        "seed 0: LML -13.04 and -15.20; seed 2: -16.48 and -15.59",
        f"overfit preferred in {over['lml']} of {count} seeds by the LML, {over['clml']} by the "
        f"CLML given 15 points, {over['loo']} by LOO, {over['elbo']} by the ELBO, {over['test']} "
        "by the test log density",
        graded(0 < over["lml"] < count, over["elbo"] == 0),
        rule="by the LML for some seeds and not for all; by the ELBO for none",
        doubt="Ours: few seeds.",
        remark="CLML and LOO do not solve this: they too can prefer the overfit solution.",
    )

    learned_noise, first = learned["noise"].tolist(), learned.loc[0]
    yield Claim(
        f"{_SOURCE}, Figure 3",
        "With a learned prior variance rank one no longer overfits; it underfits instead.",
        "seed 0: noise .68, LML -20.54",
        f"seed 0: noise {first['noise']:.2f}, LML {first['lml']:.2f}; noise "
        f"{with_error(learned_noise, 2)}",
        graded(min(learned_noise) > 0.2, abs(float(first["lml"]) + 20.54) < 0.005),
        rule="noise above .2 for each seed; the LML of seed 0 to the printed digits",
        remark="Here the prior variance ends at ε for every seed, where q is the prior.",
    )

    variance, elbo = (float(learned.loc[0, name]) for name in ("prior_variance", "elbo"))
    yield Claim(
        f"{_SOURCE}, Figure 3",
        "Seed 0, rank one with a learned prior variance: the variance and its ELBO.",
        "1.99e-6, -118.09",
        f"at the optimum: {variance:.2e}, {elbo:.2f}",
        graded(abs(variance / 1.99e-6 - 1) < 0.003, abs(elbo + 118.09) < 0.006),
        rule="both to the printed digits",
        doubt="The paper's: its v moves by a thousand steps of Adam from a random start, which end "
        "short of the optimum. The best v has a closed form, with which the variance ends at ε and "
        "the ELBO at that of noise alone, a larger bound than the published.",
    )

    fixed = rows["rank-1"].loc[0]
    elbo, lml = (learned[name] - rows["rank-1"][name] for name in ("elbo", "lml"))
    yield Claim(
        f"{_SOURCE}, Figure 3",
        "The ELBO prefers what empirical Bayes learns with rank one to what rank one learns "
        "without it; the LML does not.",
        "seed 0: ELBO -118.09 against -6443.54, LML -20.54 against -15.20",
        f"seed 0: ELBO {first['elbo']:.2f} against {fixed['elbo']:.2f}, LML "
        f"{first['lml']:.2f} against {fixed['lml']:.2f}; larger by the ELBO for "
        f"{int((elbo > 0).sum())} of {len(learned)} seeds, by the LML for {int((lml > 0).sum())}",
        graded(elbo.loc[0] > 0, lml.loc[0] < 0, (elbo > 0).all()),
        rule="so for seed 0, and by the ELBO for every seed",
    )


def _draw_families(cells: pandas.DataFrame, figure: Figure) -> None:
    panels = figure.subplots(1, 4, sharex=True, sharey=True)
    for axes, (name, learned) in zip(panels, _KINDS, strict=True):
        axes.set(xlabel="x", ylim=(-2.5, 2.5))
        row = _rows(cells, name, learned).loc[0]
        mean, spread = np.array(row["mean"]), 2 * np.array(row["deviation"])
        axes.fill_between(row["grid"], mean - spread, mean + spread, alpha=0.25, linewidth=0)
        axes.plot(row["grid"], mean)
        axes.plot(row["x"], row["y"], "k.", markersize=4)
        axes.set_title(f"{name}{', learned prior' if learned else ''}", fontsize=9)
        text = f"ELBO {row['elbo']:.2f}\nLML {row['lml']:.2f}\nnoise {row['noise']:.2g}"
        axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=9)


FAMILIES = Experiment(
    "elbo-families", "Which posterior family a lower bound learns hyperparameters with",
    lambda: [
        {"seed": s, "family": name, "empirical_bayes": learned, "steps": 1000, "rates": _RATES}
        for s in range(5) for name, learned in _KINDS
    ],
    run_families, _families_claims, _draw_families, size=(10.0, 2.8),
    items=("Figure 1", "Figure 3", "Figure 5"),
    paper=_PAPER,
    constants=_CONSTANTS,
)  # fmt: skip


_NUMBERS = (25, 40, 63, 100, 158, 251, 398, 631, 1000, 1585, 2512, 3981, 6310, 10000)
_NEAR = (158, 398)  # the crossing of the figure is between these
_sweep_claim = partial(Claim, "Harvey and Hughes 2026, Figure 2")


def _sweep_cells() -> list[dict[str, Any]]:
    common = {"seed": 2, "draws": 10, "steps": 1000, "rates": [0.1]}
    return [
        common | {"family": family, "number": number}
        # Small numbers first: the claims can be read before the large ones end.
        for several in (_NUMBERS[:9], _NUMBERS[9:])
        for families in (("diagonal", "rank-1"), ("full",))
        for number in several
        for family in families
    ]


def run_sweep(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Lower bound and evidence of what one family learns with several draws of the features.

    The data are the same throughout. Features are drawn as the authors' public code draws them:
    one generator for all numbers and draws, of which every second draw is thrown away.

    Args:
        cell: ``seed``, ``family``, ``number`` of features, ``draws``, ``steps``, ``rates``, as for
            :func:`learned_bound`.

    Returns:
        Over draws, in nats in all: ``elbo`` and ``lml``; ``noise``, its deviation.
    """
    generator = torch.Generator().manual_seed(cell["seed"])
    rows = []
    for number in _NUMBERS[: _NUMBERS.index(cell["number"]) + 1]:
        for _ in range(cell["draws"]):
            # The second draw is the one that the authors' code throws away.
            drawn, _ = drawn_features(generator, number), drawn_features(generator, number)
            if number == cell["number"]:
                rows.append(learned_bound(cell, drawn).scores())
    return {name: [row[name] for row in rows] for name in ("elbo", "lml", "noise")}


def _values(cells: pandas.DataFrame, family: str, name: str) -> NDArray[np.float64]:
    """``(numbers, draws)``, in the order of the numbers."""
    return array(cells[cells["family"] == family].sort_values("number")[name])


def _sweep_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    numbers = sorted(map(int, set(cells["number"])))
    gap = _values(cells, "rank-1", "elbo") - _values(cells, "diagonal", "elbo")
    yield _sweep_claim(
        "At every number of features the bound prefers the diagonal's underfit to rank one's "
        "overfit, by more the more features.",
        "the ELBO of rank one falls with R",
        "rank one less diagonal, mean over draws: "
        + ", ".join(f"R={n} {value:.0f}" for n, value in zip(numbers, gap.mean(1), strict=True)),
        graded((gap < 0).all(), (np.diff(gap.mean(1)) < 0).all()),
        rule="negative at every R and draw; the mean falling from each R to the next",
    )

    gap = _values(cells, "rank-1", "lml") - _values(cells, "diagonal", "lml")
    mean = gap.mean(1)
    changes = np.flatnonzero(mean[1:] * mean[:-1] < 0)
    crossings = [(numbers[index], numbers[index + 1]) for index in changes]
    # Every crossing has to lie there, not only one of several.
    near = [_NEAR[0] <= low and high <= _NEAR[1] for low, high in crossings]
    yield _sweep_claim(
        "The evidence prefers the diagonal's underfit with few features and rank one's overfit "
        "with many: their LMLs cross near 250 to 300 features.",
        "a crossing near 250 to 300",
        "LML of rank one less that of the diagonal, mean over draws: "
        + ", ".join(f"R={n} {value:.1f}" for n, value in zip(numbers, mean, strict=True))
        + "; larger on "
        + ", ".join(map(str, (gap > 0).sum(1)))
        + f" of {gap.shape[1]} draws; crosses between "
        + (
            " and between ".join(f"{low} and {high}" for low, high in crossings)
            or "none of these R"
        ),
        graded(mean[0] < 0 < mean[-1], any(near), all(near) and bool(near)),
        rule=f"negative at the fewest features, positive at the most, and crossing between "
        f"{_NEAR[0]} and {_NEAR[1]} alone",
        remark="The data are those of seed 2, the draws of features are ten and the learning rate "
        "is .1, as in the authors' public code. Data of other seeds need not have such a crossing: "
        "at 1024 features the LML prefers rank one for one seed of five (elbo-families).",
        doubt="Tried with the data and draws of the authors' public code, and with five data sets "
        "of one draw each.",
    )


def _draw_sweep(cells: pandas.DataFrame, figure: Figure) -> None:
    labels = {"elbo": "ELBO, nats", "lml": "LML, nats", "noise": "noise deviation"}
    several = figure.subplots(1, len(labels))
    for axes, (name, label) in zip(several, labels.items(), strict=True):
        for family in dict.fromkeys(cells["family"]):
            values = _values(cells, family, name)
            numbers = sorted(cells[cells["family"] == family]["number"])
            axes.plot(numbers, values.mean(1), marker=".", label=family)
            axes.fill_between(numbers, *np.quantile(values, (0.1, 0.9), axis=1), alpha=0.15)
        axes.set(xlabel="features R", ylabel=label, xscale="log")
    # Bounds of rank one are thousands of nats below those of the others.
    several[0].set_yscale("symlog", linthresh=10)
    several[2].set_yscale("log")
    several[0].legend(fontsize=9)


SWEEP = Experiment(
    "elbo-sweep", "Lower bounds by the number of features", _sweep_cells, run_sweep, _sweep_claims,
    _draw_sweep, size=(11.0, 3.0), hours=True,
    items=("Figure 2",),
    paper={"Harvey and Hughes 2026": {"num_data": 20, "draws": AtLeast(1000)}},
    constants=_CONSTANTS,
)  # fmt: skip


# Of each family: seed, and temperatures, from one on outwards, with ELBO at temperature one and LML
# as published.
_TEMPERED_FIGURES = {
    "diagonal": (0, {
        1.0: (-15.76, -13.04), 0.25: (-29.23, -19.44), 0.0625: (-120.88, -61.54),
        0.015625: (-244567610928819.25, -518.86), 0.00390625: (-73983414302416.33, -825.23),
    }),
    "rank-1": (2, {
        1.0: (-6445.39, -15.59), 4.0: (-6451.13, -20.62), 16.0: (-6463.34, -33.98),
        64.0: (-67604.35, -47.53), 256.0: (-6490.48, -61.12),
    }),
}  # fmt: skip


def run_tempering(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of one family at one temperature, and what its q predicts.

    Args:
        cell: ``seed``, ``family``, ``temperature``, ``steps``, ``rates``.

    Returns:
        Those of :meth:`LearnedBound.scores` and :meth:`LearnedBound.scores_of_q`; of rank one
        ``printed``, the ELBO and the LML of :func:`published_run`.
    """
    learned = learned_bound(cell)
    scores: dict[str, Any] = {**learned.scores(), **learned.scores_of_q()}
    if cell["family"] == "rank-1":
        printed = published_run(cell)
        scores["printed"] = [printed["elbo"], printed["lml"]]
    return scores


def _tempering_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    for family, figure, score, sign, statement, remark, doubt, digits in (
        (
            "diagonal", "Figure 4", "q_rmse", -1,
            "Cold posteriors (T below 1, the likelihood weighted up) prevent the diagonal's "
            "underfit.",
            "Triples are the learned noise deviation (that of the data is .1), and the RMSE and "
            "log density of q at 500 test points, in nats per point. The log density of the "
            "diagonal q falls all the same, because a colder q is narrower. Below T = 1/16 the "
            "noise falls to zero and the model overfits. LML and ELBO at temperature one, which "
            "do not depend on what q predicts, are largest at T = 1.",
            "",
            "The others are the paper's: below T = 1/16 the noise falls to zero, with it the "
            "bound at temperature one without limit, and rounding decides where a run ends. What "
            "is printed there is likely also of the mean of one epoch and the features of the "
            "next, as for rank one. Tried with the two larger of the paper's learning rates and "
            "with all four.",
        ),
        (
            "rank-1", "Figure 5", "q_test", 1,
            "Warm posteriors (T above 1, the likelihood weighted down) prevent rank one's overfit.",
            "With rank one the noise and the density of q rise with each temperature, but at 256 "
            "the noise is still a tenth of that of the data, so the overfit remains.",
            "The paper's claim holds in part: each of its five temperatures lessens the overfit, "
            "none removes it. Tried with the two larger of its learning rates and with all four.",
            "The reason is the paper's, found in the authors' public code: what it prints is of "
            "the mean of the best epoch and the features of the next. At T = 64 the best epoch is "
            "early, where features still change (of that epoch alone: -6478.33 and -46.78). So "
            "the LML agrees, and the ELBO has its size but depends on which of a thousand equally "
            "good columns v a library finds. Tried with the best q and features of one epoch, and "
            "by the steps of that code, each with all four of its learning rates.",
        ),
    ):  # fmt: skip
        published = _TEMPERED_FIGURES[family][1]
        rows = cells[cells["family"] == family].set_index("temperature").loc[[*published]]
        # Twice and half the noise of the data are equally wrong.
        away = (rows["noise"] / NOISE).map(lambda ratio: abs(math.log(ratio)))
        better = sign * rows[score] > sign * rows[score].iloc[0]
        steps = slice(1, 3)
        yield Claim(
            f"{_SOURCE}, {figure}, caption",
            statement,
            "it does",
            "; ".join(
                f"T={t:g}: {row['noise']:.3g}, {row['q_rmse']:.3f}, {_density(row['q_test'])}"
                for t, row in rows.iterrows()
            ),
            graded(
                (away.iloc[steps] < away.iloc[0]).all(), better.iloc[steps].all(),
                (away < math.log(2)).any(),
            ),
            remark=remark,
            rule="noise nearer that of the data and a better fit by q (RMSE of an underfit, log "
            "density of an overfit) at the first two temperatures away from one, and noise within "
            "a factor of two of that of the data at some temperature",
            doubt=doubt,
        )  # fmt: skip
        # Of rank one by the steps of the authors' code.
        ours = rows["printed"].tolist() if family == "rank-1" else rows[["elbo", "lml"]].to_numpy()
        same = np.abs(np.array(ours) - [*published.values()]) < 0.01
        yield Claim(
            f"{_SOURCE}, {figure}",
            f"ELBO at temperature one and LML of what is learned at each T, {family}.",
            _pairs(published),
            _pairs(dict(zip(published, ours, strict=True))),
            graded(*same.flatten()),
            rule="all to the printed digits",
            doubt=f"{same.sum()} of {same.size} figures agree. {digits}",
        )


def _density(value: float) -> str:
    return f"{value:.3f}" if value > -10 else f"{value:.0f}" if value > -1e6 else f"{value:.0e}"


def _pairs(values: Mapping[Any, Any]) -> str:
    return "; ".join(f"T={t:g}: {elbo:.2f}, {lml:.2f}" for t, (elbo, lml) in values.items())


def _draw_tempering(cells: pandas.DataFrame, figure: Figure) -> None:
    axes = figure.subplots(2, 2, sharex="col")
    for (upper, lower), family in zip(axes.T, _TEMPERED_FIGURES, strict=True):
        rows = cells[cells["family"] == family].sort_values("temperature")
        upper.plot(rows["temperature"], rows["noise"], "o-")
        upper.axhline(NOISE, color="grey", linewidth=1)
        upper.set(yscale="log", ylim=(1e-4, 1), ylabel="noise deviation")
        upper.set_title(family, fontsize=9)
        lower.plot(rows["temperature"], -rows["q_test"], "o-")
        lower.set_xscale("log", base=4)
        lower.set(yscale="symlog", ylim=(-1, 1e5))
        lower.set(xlabel="temperature", ylabel="NLL of q, nats a test point")


TEMPERING = Experiment(
    "elbo-tempering", "Tempered lower bounds",
    lambda: [
        {"seed": seed, "family": family, "temperature": t, "steps": 1000, "rates": _RATES}
        for family, (seed, published) in _TEMPERED_FIGURES.items() for t in published
    ],
    run_tempering, _tempering_claims, _draw_tempering, size=(8.0, 4.6),
    items=("Figure 4", "Figure 5"),
    paper=_PAPER,
    constants=_CONSTANTS,
)  # fmt: skip


_importance_claim = partial(Claim, "beside Harvey and Hughes 2026; Burda et al. 2016")


def run_importance(cell: Mapping[str, Any]) -> dict[str, Any]:
    r"""The bound :math:`E \log \frac1K \sum_k p(y, w_k) / q(w_k)` by the number K of draws.

    Hyperparameters and q are those that the family learns by its own bound.

    Args:
        cell: ``seed``, ``family``, ``steps``, ``rates``, ``num_features`` as for
            :func:`learned_bound`; ``draws``, a power of two, the largest K; ``repeats`` of all.

    Returns:
        ``elbo`` and ``lml``, and over K = 1, 2, 4, ... ``bound`` with ``error``; nats in all.
    """
    learned = learned_bound(cell)
    scores = learned.scores()
    generator = torch.Generator().manual_seed(cell["seed"])
    weights = [_log_weights(learned, cell["draws"], generator) for _ in range(cell["repeats"])]
    log_weights = torch.stack(weights)
    counts, bounds, errors = [2**k for k in range(int(math.log2(cell["draws"])) + 1)], [], []
    for count in counts:
        # All draws are used for every K: fewer at a time are more estimates.
        groups = log_weights.reshape(cell["repeats"], -1, count)
        values = (groups.logsumexp(-1) - math.log(count)).flatten()
        bounds.append(float(values.mean()))
        errors.append(float(values.std() / math.sqrt(len(values))))
    return {
        "elbo": scores["elbo"], "lml": scores["lml"], "counts": counts, "bound": bounds,
        "error": errors,
    }  # fmt: skip


@torch.no_grad()
def _log_weights(learned: Any, count: int, generator: torch.Generator) -> Tensor:
    """Logarithms of p(y, w) / q(w) at draws of q."""
    model, mll = learned.model, learned.objective
    data = mll.data_at(model(*model.train_inputs), model.train_targets)
    q = mll.weights_at(data)
    weights = q.sample(count, generator)
    # Constants of 2 π cancel between q and the prior.
    centered = (weights - q.mean).mT
    covariance = q.covariance().times(torch.eye(len(centered)).to(centered))
    log_q = -0.5 * ((centered * torch.linalg.solve(covariance, centered)).sum(0) + q.log_det())
    log_prior = -0.5 * (weights.square() / data.prior_variance + data.prior_variance.log()).sum(-1)
    errors = data.residual - weights @ data.features.mT
    log_likelihood = -0.5 * (errors.square() / data.noise + (2 * math.pi * data.noise).log())
    return log_likelihood.sum(-1) + log_prior - log_q


def _importance_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    bounds, errors = array(cells["bound"]), array(cells["error"])
    lml, elbo = cells["lml"].to_numpy(), cells["elbo"].to_numpy()
    first = np.abs(bounds[:, 0] - elbo) <= 4 * errors[:, 0] + 1e-6 * np.abs(elbo)
    rounding = 1e-6 * np.abs(lml[:, None])  # of figures of thousands of nats
    rising = np.diff(bounds, axis=1) >= -2 * (errors[:, 1:] + errors[:, :-1]) - rounding
    below = bounds <= lml[:, None] + 4 * errors + rounding
    figures = "; ".join(
        f"seed {row['seed']}, {row['family']}: {row['elbo']:.1f}, {row['bound'][-1]:.1f} ± "
        f"{row['error'][-1]:.1f}, {row['lml']:.1f}"
        for _, row in cells.iterrows()
    )
    yield _importance_claim(
        "More draws take the bound from the ELBO, K = 1, up towards the LML.",
        "no figure",
        f"ELBO, bound with K = {cells['counts'].iloc[0][-1]}, LML: {figures}",
        graded(first.all(), rising.all(), below.all()),
        rule="at K = 1 the ELBO, rising with K and never above the LML, within errors",
        kind="question",
    )

    diagonal, rank = (
        array(cells[cells["family"] == n]["bound"])[:, -1] for n in ("diagonal", "rank-1")
    )
    gap = rank - diagonal
    yield _importance_claim(
        "Importance weights leave the bound's preference for the underfit as it is.",
        "no figure",
        "rank one less diagonal, a seed each: " + ", ".join(f"{value:.0f}" for value in gap),
        graded((gap < 0).all()),
        "With rank one the draws hardly reach the posterior, and a thousand of them close only a "
        "small part of the gap.",
        rule="negative for each seed",
        kind="question",
    )


def _draw_importance(cells: pandas.DataFrame, figure: Figure) -> None:
    axes = figure.subplots()
    for _, row in cells.iterrows():
        below = np.maximum(row["lml"] - np.array(row["bound"]), 1e-3)
        axes.loglog(row["counts"], below, label=f"{row['family']}, seed {row['seed']}", base=2)
    axes.set_yscale("log", base=10)
    axes.set(xlabel="draws K", ylabel="LML less the bound, nats")
    axes.legend(fontsize=9)


IMPORTANCE = Experiment(
    "elbo-importance", "Importance-weighted lower bounds",
    lambda: [
        {"seed": seed, "family": family, "num_features": 1024, "draws": 1024, "repeats": 20,
         "steps": 1000, "rates": [0.1, 0.01]}
        for seed in (0, 2) for family in _FAMILIES
    ],
    run_importance, _importance_claims, _draw_importance, size=(5.5, 3.4),
)  # fmt: skip
"""Burda et al. (2016) on the model of Harvey and Hughes (2026)."""
