"""A mixture of Gaussian processes, weighted by how they predict rows that they did not see."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import pandas
import torch
from torch import Tensor

from gpclml._utils.arguments import callers_level, check_counts, checked, seeded
from gpclml._utils.arrays import checked_training_data, points_as_tensor
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evaluation.copies import copied_rows
from gpclml.fit import FitWarning
from gpclml.tables.candidates import (
    CANDIDATES,
    DEEP_ROWS,
    DEFAULT_CANDIDATES,
    DEFAULT_MANY_ROWS_CANDIDATES,
    MANY_ROWS_CANDIDATES,
    MOST_HELD_OUT,
    THOUSANDS,
    THOUSANDS_CANDIDATES,
    Component,
    FitOptions,
    checked_names,
    expand_starts,
    fit_candidates,
    restored_component,
    stored_component,
    weighted,
    with_common_spread,
)
from gpclml.tables.encoding import MOST_WILD, unusual_values
from gpclml.tables.missing import averaged, unknown_inputs, within_reach
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.saving import Saved

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike


LEAST_ROWS = 5
_FITTED = "x", "y", "columns", "categories"
_EXACT_ROWS = 5000
_ENOUGH_HELD_OUT = 250  # rows, of which an eighth of all is taken if a twentieth is fewer
_LEAST_WEIGHT = 0.01  # of a component that predicts given neighbours


class StackedGP(Saved):
    r"""A mixture of GPs that differ in their kernels, for tables of ten to some million rows.

    .. math:: p(y \mid x) = \sum_k w_k \, \frac{1}{s_k \sigma_k(x)} \,
        t_{\nu_k}\!\left(\frac{y - m_k(x)}{s_k \sigma_k(x)}\right), \qquad s_k = s_k(m_k(x))

    :meth:`fit` fits the candidates by their marginal likelihoods. Each predicts each row, or 2000
    drawn ones of more, from all others, in closed form. To these predictions are fitted the scale
    :math:`s_k` of each component, which may grow with the prediction (:class:`Calibration`), its
    tails :math:`\nu_k`, and the weights, which maximize the log score of the mixture under a
    Dirichlet prior (Yao et al. 2018).
    On most tables the mixture predicts better than the best of its components. A candidate that
    cannot be fitted is left out, with a warning, and is in ``failures``.

    With 2000 rows or more, two of the candidates are deep kernels that are trained by joint
    densities of near points (:class:`~gpclml.conditioning.NearestNeighbors`). Then 5 % of the rows
    are held out from the fits of hyperparameters: an eighth, up to 250, where that is more, and
    never more than 2000. Scales, tails and weights are fitted to these, since a network predicts
    the rows that it learned its features from too well; each component has errors of three scales.
    One factor of all scales makes these rows most likely under the mixture, which is too wide where
    components that are right one by one differ (Gneiting and Ranjan 2013). Predictions are
    conditioned on all rows.

    With more than ``exact_rows`` all candidates are trained by densities of points given their
    nearest neighbours or of near points, and new rows are predicted from their neighbours among all
    rows: time and memory grow in proportion to the rows.

    Rows that are copies of others, as by oversampling or a join, are fitted once, with a warning:
    else each would be predicted from its copy, and new rows would fall out of the intervals. Equal
    rows are copies if new measurements would not have given so many of them: with a continuous
    target all are, with ratings and counts hardly any
    (``gpclml.evaluation.copies.copied_rows``).

    Args:
        candidates: Names of the models; None for all of
            ``gpclml.tables.DEFAULT_CANDIDATES``, and ``"deep"`` from 1000 rows on; from 2000 rows
            on for ``gpclml.tables.THOUSANDS_CANDIDATES``; with more than ``exact_rows`` for
            ``gpclml.tables.DEFAULT_MANY_ROWS_CANDIDATES``.
        fit_rows: Largest number of rows, drawn at random, that hyperparameters are fitted to by the
            marginal likelihood, None for 1000, and 2000 for ``"deep"``; predictions are conditioned
            on all rows.
        exact_rows: Largest number of rows that predictions are conditioned on all together.
        restarts: Number of further starts of each fit by the marginal likelihood; the best is kept.
            Each deep kernel that is trained by near points has 1 + ``restarts`` starts, one more
            with more than ``exact_rows``, from other weights and with other batches, every second
            without weight decay, and each is a component.
        extrapolation: Largest distance of a column's values from those of the training rows, in
            units of the column's range. Values farther away are moved to that distance, and values
            of a constant column to the constant. May be infinite.
        seed: Seed of draws, restarts and networks.

    Attributes:
        components: The components, from the largest weight to the smallest, once fitted.
        failures: For each candidate that was left out, by name, the reason.
        copies: Number of rows that were left out as copies of others.

    Raises:
        UnknownNameError: There is no such candidate.
        ArgumentError: A number is out of range, or no candidate is named.

    Examples:
        >>> from sklearn.datasets import load_diabetes
        >>> from gpclml import StackedGP
        >>> x, y = load_diabetes(return_X_y=True, scaled=False)
        >>> stack = StackedGP(candidates=["linear", "matern"]).fit(x[:100], y[:100])
        >>> lower, upper = stack.predict(x[100:]).interval(0.9)
        >>> table = stack.summary()
    """

    @checked
    def __init__(
        self,
        candidates: Sequence[str] | None = None,
        *,
        fit_rows: int | None = None,
        exact_rows: int = _EXACT_ROWS,
        restarts: int = 0,
        extrapolation: float = 2.0,
        seed: int = 0,
    ) -> None:
        self.candidates: tuple[str, ...] | None = None
        if candidates is not None:  # from the cheapest to the most expensive
            known = {**CANDIDATES, **MANY_ROWS_CANDIDATES}
            self.candidates = checked_names("candidates", candidates, known)
        check_counts(LEAST_ROWS, exact_rows=exact_rows)
        if fit_rows is not None:
            check_counts(LEAST_ROWS, fit_rows=fit_rows)
        check_counts(0, restarts=restarts)
        if not extrapolation >= 0:
            raise ArgumentError("extrapolation", extrapolation, "0 or more")
        self.extrapolation: float = float(extrapolation)
        self.fit_rows = fit_rows
        self.exact_rows = exact_rows
        self.restarts = restarts
        self.seed = seed
        self.components: tuple[Component, ...] = ()
        self.failures: Mapping[str, str] = {}
        self.copies = 0
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._columns: list[str] | None = None
        self._categories: tuple[tuple[int, ...], ...] = ()

    @checked
    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        categories: Sequence[Sequence[int]] = (),
        time_budget: float | None = None,
        n_jobs: int | None = None,
        progress: bool | None = None,
    ) -> Self:
        """Fits the candidates, calibrates them and finds their weights.

        Args:
            x: Inputs, ``(n, d)``, or ``(n,)`` for one column. A tensor, an array or a data frame of
                numbers, as :class:`~gpclml.models.GPRegression` takes them.
            y: Targets, ``(n,)``.
            categories: For each category the columns that are its levels, each 1 in the rows of its
                level and else 0; then ``"categories"`` is a candidate too.
            time_budget: Seconds after which no further candidate is begun. Candidates are fitted
                from the cheapest to the most expensive, and the first is always fitted.
            n_jobs: Number of processes that fit candidates, as joblib takes it; None for one.
            progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

        Returns:
            The stack itself.

        Raises:
            ShapeError, NonFiniteError: The data do not fit each other, or have missing values.
            ArgumentError: There are fewer than five different rows, or ``categories`` has wrong
                columns.
            UnsupportedError: A batch of tables, or no candidate could be fitted.

        Warns:
            UserWarning: Rows are copies of others, and fitted once; or up to 5 % of the values of a
                column are far from all others, and moved to the nearest.
            FitWarning: A candidate is left out because it failed or the time is spent.

        Note:
            About 30 to 100 values and gradients of the marginal likelihood for each candidate, n³
            operations each. Candidates that are trained given neighbours take 300 steps of
            milliseconds, or n / 2.6 and at most 2600 of tens of milliseconds with a network.
        """
        if time_budget is not None and not time_budget >= 0:
            raise ArgumentError("time_budget", time_budget, "0 or more seconds, or None")
        x, y, columns = _checked(x, y)
        x, y, self.copies = _without_copies(x, y)
        x = _without_wild_values(x)
        n, held_out, default = len(y), None, DEFAULT_CANDIDATES
        exact = n <= self.exact_rows
        order = torch.randperm(n, generator=seeded(self.seed)).to(x.device)
        if not exact or (self.candidates is None and n >= THOUSANDS):
            count = max(n // 20, min(n // 8, _ENOUGH_HELD_OUT))
            held_out = order[: min(MOST_HELD_OUT, max(LEAST_ROWS, count))]
            default = tuple(THOUSANDS_CANDIDATES) if exact else DEFAULT_MANY_ROWS_CANDIDATES
        elif n >= DEEP_ROWS:
            default += ("deep",)
        names = self.candidates or default
        names = names if held_out is None else expand_starts(names, self.restarts, exact)
        groups = _checked_categories(categories, x.shape[1])
        options = FitOptions(
            order, self.fit_rows, held_out, exact, self.seed, self.restarts, time_budget,
            categories=groups,
        )  # fmt: skip
        fits, failures = fit_candidates(names, x, y, options, n_jobs=n_jobs, progress=progress)
        if not fits:
            said = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise UnsupportedError(
                "candidates", f"none that could be fitted ({said})", "at least one"
            )
        if failures:
            said = "; ".join(f"{name} ({reason})" for name, reason in failures.items())
            warnings.warn(f"Left out of the stack: {said}.", FitWarning, stacklevel=callers_level())
        components = weighted(list(fits.values()))
        if held_out is not None:  # their errors are those of new rows
            components = with_common_spread(components)
        self.components = tuple(sorted(components, key=lambda component: -component.weight))
        self.failures, self._x, self._y, self._categories = failures, x, y, groups
        self._columns = columns
        return self

    @torch.no_grad()
    @checked
    def predict(self, x: ArrayLike) -> StackedPrediction:
        """The distribution of a new observation at each point.

        At a point with missing values, or with a level of a category that no training row has, each
        component is averaged over the values that these inputs may have, given the others, as the
        training rows show them; its mean and variance are those of this average.

        Args:
            x: Points, ``(m, d)``, or ``(m,)`` for one column, of the type of the training inputs or
                converted to it; NaN where a value is missing.

        Returns:
            Means, deviations, quantiles, densities and draws of the m mixtures.

        Raises:
            ShapeError, NonFiniteError, ArgumentError: As
                :meth:`gpclml.models.GPRegression.predict`, or the stack is not fitted.

        Note:
            A factorization of each component, n³/3 operations, which is kept for further calls as
            that of a :class:`~gpclml.models.GPRegression` is. Each point takes n² operations, 64
            times as many where values are missing.
        """
        x = self._points(x)
        train_x = self._check_fitted()
        if x.shape[1:] != train_x.shape[1:] or x.device != train_x.device:
            self._moments(x)  # says what is wrong with them
        variances = [[c.calibration.tail_variance] for c in self._predictors]
        tails = torch.tensor(variances, dtype=torch.float64).to(x)
        locations, scales = averaged(self._moments, x, train_x, self._categories, tails, self.seed)
        # For each scale of a component's errors: its number, weight, degrees of freedom, factor.
        terms = [
            (number, component.weight * share, component.calibration.degrees, factor)
            for number, component in enumerate(self._predictors)
            for share, factor in component.calibration.mixture
        ]
        numbers = torch.tensor([number for number, *_ in terms], device=x.device)
        columns = torch.tensor([term[1:] for term in terms], dtype=torch.float64)
        weights, degrees, factors = columns.to(x).T
        warps = [self._predictors[number].warp for number, *_ in terms]
        return StackedPrediction(
            weights / weights.sum(), locations[numbers], factors[:, None] * scales[numbers],
            degrees, warps, counts=self.counts,
        )  # fmt: skip

    def unknown_inputs(self, x: Tensor) -> Tensor:
        """Which inputs of points are averaged over: NaN, and levels that no training row has.

        Args:
            x: Points, ``(m, d)``.

        Returns:
            ``(m, d)``.
        """
        return unknown_inputs(x, self._check_fitted(), self._categories)

    @property
    def _predictors(self) -> list[Component]:
        """The components that predict: of many rows those that are worth their time."""
        return [c for c in self.components if c.neighbors is None or c.weight >= _LEAST_WEIGHT]

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Locations and scales of the components at points, ``(K, m)`` each."""
        moments = [component.predict(x) for component in self._predictors]
        locations, scales = zip(*moments, strict=True)
        return torch.stack(locations), torch.stack(scales)

    @property
    def counts(self) -> bool:
        """Whether all targets are whole numbers, none of them negative.

        Then quantiles, intervals and draws are whole numbers, and probability below zero is moved
        to zero.
        """
        y = self._y
        return y is not None and bool(((y >= 0) & (y == y.round())).all())

    def __repr__(self) -> str:
        terms = [f"{component.weight:.2f} {component.name}" for component in self.components]
        names = ", ".join(self.candidates or DEFAULT_CANDIDATES)
        return f"StackedGP({' + '.join(terms) or names + ': not fitted'})"

    def _repr_html_(self) -> str:
        return self.summary().to_html() if self.components else f"<pre>{self!r}</pre>"

    def summary(self) -> pandas.DataFrame:
        """What each component contributes, with a row for each, the largest weight first.

        Returns:
            Weight; mean log density of a row given all others, in nats, after calibration; scale,
            degrees of freedom and slope of its :class:`~gpclml.tables.Calibration`; power of the
            transform of its targets; seconds; and a note on the fit. A candidate that is left out
            has weight 0 and the reason as its note.

        Raises:
            ArgumentError: The stack is not fitted.
        """
        self._check_fitted()
        rows: list[dict[str, Any]] = [
            {
                "weight": component.weight, "loo": component.loo,
                "scale": component.calibration.scale, "degrees": component.calibration.degrees,
                "slope": component.calibration.slope,
                "warp": math.nan if component.warp is None else component.warp.power,
                "seconds": component.seconds, "note": component.note,
            }
            for component in self.components
        ]  # fmt: skip
        rows += [{"weight": 0.0, "note": f"left out: {why}"} for why in self.failures.values()]
        names = [*(component.name for component in self.components), *self.failures]
        return pandas.DataFrame(rows, index=pandas.Index(names, name="model"))

    def _state(self) -> dict[str, Any]:
        self._check_fitted()
        return self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # GPyTorch's priors and constraints hold functions that other processes cannot be sent.
        names = "candidates", "fit_rows", "exact_rows", "restarts", "extrapolation", "seed"
        state: dict[str, Any] = {"config": {name: getattr(self, name) for name in names}}
        if self._x is not None:
            state |= {name: getattr(self, f"_{name}") for name in _FITTED}
            components = [stored_component(component) for component in self.components]
            state |= {"copies": self.copies, "failures": dict(self.failures)}
            state["components"] = components
        return state

    def _restore(self, state: Mapping[str, Any]) -> None:
        StackedGP.__init__(self, **state["config"])
        if "components" not in state:
            return
        for name in _FITTED:
            setattr(self, f"_{name}", state[name])
        self.copies, self.failures = state["copies"], state["failures"]
        self.components = tuple(
            restored_component(stored, state["x"], state["y"], self.seed, self._categories)
            for stored in state["components"]
        )

    __setstate__ = _restore

    def _check_fitted(self) -> Tensor:
        if self._x is None:
            raise ArgumentError("stack", "one that is not fitted", "a fitted one", "Call fit.")
        return self._x

    def _points(self, x: ArrayLike) -> Tensor:
        """Points as a tensor, ``(m, d)``, those far outside moved to the edge of what is known."""
        train_x = self._check_fitted()
        made = points_as_tensor(x, train_x, self._columns, "x")
        made = made.unsqueeze(-1) if made.ndim == 1 else made
        fits = made.shape[-1:] == train_x.shape[-1:] and made.device == train_x.device
        if math.isinf(self.extrapolation) or not fits:
            return made  # the models say what is wrong with it
        return within_reach(made, train_x, self.extrapolation)


def _checked(x: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor, list[str] | None]:
    """Inputs, targets, and the names of columns if the inputs are a data frame."""
    data = checked_training_data(x, y)
    if data.x.ndim != 2:
        raise UnsupportedError("x", f"shape {tuple(data.x.shape)}", "one table, (n, d)")
    if len(data.y) < LEAST_ROWS:
        expected = f"at least {LEAST_ROWS} rows"
        raise ArgumentError("x", f"n_samples = {len(data.y)}", expected, "Give more rows.")
    if bool(data.y.isnan().any()):
        count = int(data.y.isnan().sum())
        suggestion = "Leave out the rows without a target."
        raise ArgumentError("y", f"{count} missing values", "finite values", suggestion)
    return data.x, data.y, data.columns


def _without_copies(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """The rows that are no copies of others, and how many are; a warning says so."""
    copied = torch.from_numpy(copied_rows(x.cpu().double().numpy(), y.cpu().double().numpy()))
    count, kept = int(copied.sum()), (~copied).to(x.device)
    if not count:
        return x, y, 0
    said = f"{count} of {len(y)} rows are copies of others in all inputs and the target"
    if len(y) - count < LEAST_ROWS:
        raise ArgumentError("x", said, f"at least {LEAST_ROWS} different rows", "Give more rows.")
    message = f"{said}. They are left out, because a row that is there twice is one observation."
    warnings.warn(message, UserWarning, stacklevel=callers_level())
    return x[kept], y[kept], count


def _without_wild_values(x: Tensor) -> Tensor:
    """Moves few values far from all others of their column to the nearest; a warning says so."""
    made, moved = x.clone(), []
    for number, column in enumerate(x.T):
        limits = unusual_values(column.detach().cpu().double().numpy())[1]
        if limits is not None:
            clipped = column.clamp(*limits)
            if bool((clipped != column).double().mean() <= MOST_WILD):
                made[:, number] = clipped
                moved.append(str(number))
    if moved:
        said = f"Values far from all others are moved to the nearest, in inputs {', '.join(moved)}."
        warnings.warn(said, UserWarning, stacklevel=callers_level())
    return made


def _checked_categories(groups: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    made = tuple(tuple(int(column) for column in group) for group in groups)
    columns = [column for group in made for column in group]
    if not all(made) or len(set(columns)) < len(columns) or not set(columns) <= set(range(count)):
        expected = f"groups of columns 0 to {count - 1}, none of them empty, and no column twice"
        raise ArgumentError("categories", [list(group) for group in made], expected)
    return made
