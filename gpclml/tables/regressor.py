"""The stack of GPs as an estimator of scikit-learn, and an average of GPs of counts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
)

from gpclml._utils.arguments import check_counts, checked
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import ArgumentError
from gpclml.likelihoods import TargetMixture
from gpclml.tables.averages import CountModels, check_whole
from gpclml.tables.class_kernels import checked_kernels
from gpclml.tables.estimator import (
    STORED,
    Scored,
    TableEstimator,
    check_given,
    fit_encoding,
    warn_of_drawn_rows,
)
from gpclml.tables.missing import filled
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.stacked import LEAST_ROWS, StackedGP

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


_KIND = "gpclml.Regressor"
_MOST_COUNTS = 2000  # rows

assert issubclass(RegressorMixin, Scored)


class Regressor(RegressorMixin, TableEstimator):
    """A scikit-learn regressor for tables that predicts distributions, by a :class:`StackedGP`.

    It takes arrays, and data frames with columns of numbers, booleans, dates and categories, and is
    used as any estimator: in a ``Pipeline``, ``GridSearchCV`` or ``cross_val_score``. Categories
    become an input for each level.

    Missing values are replaced by their expectation in training rows. In new rows predictions
    average over what they may be, so that intervals are wider, and so they do over levels that no
    training row has. Where 10 % of the training rows, and at least five, lack a value, a further
    input is 1 there; a missing category is then a level.

    Numbers far from all others that are there several times, such as -999, are missing values;
    others as far, of at most 5 % of the rows, are moved to the nearest of the rest
    (``gpclml.tables.encoding.unusual_values``). A warning says so.

    With ``counts=True`` there is in its place the plain average of three
    :class:`~gpclml.models.GPCounts`, with the kernels of :class:`Classifier`: negative binomial
    counts around the exponential of a function. They predict counts with many zeros better than
    normal models do. Counts of different exposures, such as years, need an ``offset``, which
    ``GPCounts`` has.

    Args:
        candidates: Names of the models; None for those of a :class:`StackedGP`. Of counts names of
            kernels, as of :class:`Classifier`.
        counts: Whether targets are counts: whole numbers from 0 on.
        max_rows: Largest number of training rows. If there are more, so many are drawn at random,
            with a warning. None for all; of counts for 2000, because time grows with their cube.
        time_budget: Seconds after which no further candidate is begun; None for no limit. Counts
            take none.
        n_jobs: Number of processes that fit candidates, as joblib takes it; None for one.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        random_state: Seed of the drawn rows and of networks: an integer or a ``RandomState``. None
            is the same as 0, so the same call gives the same fit.

    Attributes:
        stack_: The fitted :class:`StackedGP`; ``stack_.summary()`` says what each model adds.
        models_: Of counts, in its place: ``models_.models`` by kernel, and ``models_.failures``.
        encoding_: How columns become inputs.
        n_rows_: Number of rows that were fitted to, without copies of others
            (``stack_.copies`` of them); of counts with them.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X was a data frame whose names are strings.

    Raises:
        ArgumentError: In ``fit``: fewer than five rows, two columns of one name, a column of both
            numbers and other texts, no usable column, numbers out of range, or counts that are
            negative or not whole.
        ValueError: In ``fit`` and ``predict``: infinite values, columns that are not those of the
            fit, or anything that scikit-learn refuses for all estimators.

    Examples:
        >>> from sklearn.datasets import load_diabetes
        >>> from gpclml import Regressor
        >>> x, y = load_diabetes(return_X_y=True, scaled=False)
        >>> regressor = Regressor(candidates=("linear", "matern")).fit(x[:100], y[:100])
        >>> mean, std = regressor.predict(x[100:], return_std=True)
        >>> mean, limits = regressor.predict(x[100:], quantiles=(0.05, 0.95))
        >>> tens = (y / 10).round()
        >>> regressor = Regressor(candidates=("linear",), counts=True).fit(x[:100], tens[:100])
        >>> log_loss = -regressor.predict_distribution(x[100:]).log_prob(tens[100:]).mean()
    """

    stack_: StackedGP
    models_: CountModels

    def __init__(
        self,
        candidates: Sequence[str] | None = None,
        *,
        counts: bool = False,
        max_rows: int | None = None,
        time_budget: float | None = None,
        n_jobs: int | None = None,
        progress: bool | None = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.candidates = candidates
        self.counts = counts
        self.max_rows = max_rows
        self.time_budget = time_budget
        self.n_jobs = n_jobs
        self.progress = progress
        self.random_state = random_state

    def fit(self, X: ArrayLike | pandas.DataFrame, y: ArrayLike) -> Self:
        """Fits the stack, or models of counts, to a table.

        Args:
            X: Rows, ``(n, columns)``: an array of numbers or a data frame.
            y: Targets, ``(n,)``.

        Returns:
            The estimator itself.

        Warns:
            UserWarning: Rows were drawn at random or are copies of others, or columns are not used
                as inputs.
            FitWarning: A candidate is left out because it failed or the time budget is used up.
        """
        check_counts(LEAST_ROWS, max_rows=self.max_rows)
        names = checked_kernels("candidates", self.candidates) if self.counts else ()
        table = self._rows(X, fitting=True)
        targets, seed = torch.from_numpy(_targets(y, table)), self._seed()
        if len(table) < LEAST_ROWS:
            expected = f"at least {LEAST_ROWS} rows"
            raise ArgumentError("X", f"n_samples = {len(table)}", expected, "Give more rows.")
        if self.counts:
            check_whole("y", targets, "Leave out counts=True to predict any numbers.")
            if self.time_budget is not None:
                expected, suggestion = "none for counts", "Name fewer candidates in its place."
                raise ArgumentError("time_budget", self.time_budget, expected, suggestion)
        most = _MOST_COUNTS if self.counts and self.max_rows is None else self.max_rows
        if most is not None and len(table) > most:
            rows = np.sort(np.random.default_rng(seed).permutation(len(table))[:most])
            warn_of_drawn_rows(most, len(table))
            table, targets = table.iloc[rows], targets[rows]
        # Decided on the drawn rows alone, so that the limit bounds all work.
        encoding = fit_encoding(table, isinstance(X, pandas.DataFrame))
        x = filled(torch.from_numpy(encoding.encode(table)), encoding.categories, seed)
        if self.counts:
            fitted = CountModels(x, targets, encoding.categories, seed)
            fitted.fit(names, self.n_jobs, self.progress)
        else:
            fitted = StackedGP(self.candidates, seed=seed)
            fitted.fit(
                x, targets,
                categories=encoding.categories, time_budget=self.time_budget, n_jobs=self.n_jobs,
                progress=self.progress,
            )  # fmt: skip
        for name in ("stack_", "models_"):
            vars(self).pop(name, None)  # of an earlier fit
        setattr(self, "models_" if self.counts else "stack_", fitted)
        self.encoding_ = encoding
        self.n_rows_ = len(table) - getattr(fitted, "copies", 0)
        return self

    @checked(late=True)
    def predict(
        self,
        X: ArrayLike | pandas.DataFrame,
        return_std: bool = False,
        quantiles: Sequence[float] | None = None,
    ) -> Any:
        """Means of new observations, and if asked their deviations and quantiles.

        Args:
            X: Rows with the columns of the fit.
            return_std: Whether to return standard deviations.
            quantiles: Probabilities of which to return quantiles.

        Returns:
            Means, ``(m,)``; or a tuple of means, standard deviations ``(m,)`` if asked for, and
            quantiles ``(m, q)`` if asked for.

        Raises:
            ArgumentError: Quantiles are not a sequence of numbers between 0 and 1.
            ValueError: As in ``fit``, or the columns are not those of the fit.
        """
        if quantiles is not None and not all(0 < p < 1 for p in quantiles):
            raise ArgumentError("quantiles", list(quantiles), "probabilities such as 0.05")
        prediction = self.predict_distribution(X)
        moments = [prediction.mean, prediction.std] if return_std else [prediction.mean]
        columns = [] if quantiles is None else [prediction.quantile(list(quantiles))]
        results = tuple(values.numpy() for values in moments + columns)
        return results[0] if len(results) == 1 else results

    def predict_distribution(
        self, X: ArrayLike | pandas.DataFrame
    ) -> StackedPrediction | TargetMixture:
        """The distribution of a new observation at each row.

        Args:
            X: Rows with the columns of the fit.

        Returns:
            Means, intervals, quantiles, densities, scores and draws; of counts a
            :class:`gpclml.likelihoods.TargetMixture`, with probabilities in place of densities.

        Warns:
            UserWarning: A value is missing, or a level unknown, where hardly any training row has
                that. Predictions average over what it may be (:meth:`StackedGP.predict`).
        """
        check_is_fitted(self)
        return self._model.predict(self._new_inputs(X, self._model.unknown_inputs))

    def sample_y(
        self,
        X: ArrayLike | pandas.DataFrame,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> NDArray[np.float64]:
        """Draws of new observations, each row on its own.

        Args:
            X: Rows with the columns of the fit.
            n_samples: Number of draws a row.
            random_state: Seed of the draws.

        Returns:
            ``(m, n_samples)``.

        Raises:
            ArgumentError: The number of draws is below 1.
            ValueError: As :meth:`predict`.
        """
        check_counts(n_samples=n_samples)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        return self.predict_distribution(X).sample(n_samples, seed).numpy().T

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator and its training rows to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            DataError: The file cannot be written.
        """
        content = self._stored()
        state = {"counts": "models_" in vars(self), "stack": self._model.__getstate__()}
        write_checkpoint(path, _KIND, content | state)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Regressor:
        """Reads an estimator that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.

        Raises:
            DataError: The file is missing, damaged or not such a checkpoint.
        """
        required = {**STORED, "stack": dict, "counts": bool}
        content = read_checkpoint(path, _KIND, "cpu", required)
        made = cls._from_stored(content, path)
        if content["counts"]:
            made.models_ = CountModels.restored(content["stack"], path)
            return made
        made.stack_ = StackedGP()
        made.stack_.__setstate__(content["stack"])
        return made

    @property
    def _model(self) -> StackedGP | CountModels:
        return self.models_ if "models_" in vars(self) else self.stack_


def _targets(y: Any, table: pandas.DataFrame) -> NDArray[np.float64]:
    check_given(y)
    check: Any = check_array
    try:
        y = column_or_1d(check(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
    except ValueError as error:
        if "could not convert" in str(error):
            raise ArgumentError("y", f"texts ({error})", "numbers") from error
        raise
    check_consistent_length(table, y)
    return np.array(y, dtype=np.float64)
