"""The stack of GPs as an estimator of scikit-learn, for tables of numbers and categories."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from gpclml._utils.arguments import callers_level, check_counts, checked
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.datasets.columns import (
    CategoryColumn,
    NumberColumn,
    category_places,
    column_of,
    columns_of,
    fit_column,
    kind_of,
)
from gpclml.errors import ArgumentError, DataError
from gpclml.tables.missing import filled
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.stacked import LEAST_ROWS, StackedGP

if TYPE_CHECKING:
    import pandas
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "InputEncoding",
    "Regressor",
    "check_names",
    "fit_inputs",
    "is_frame",
]

_KIND = "gpclml.Regressor"


@runtime_checkable
class _Parameters(Protocol):
    """What a checker knows of ``BaseEstimator`` without reading scikit-learn's source."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Arguments of the constructor by name."""
        ...

    def set_params(self, **params: Any) -> Self:
        """Sets arguments of the constructor."""
        ...

    def __sklearn_tags__(self) -> Any: ...


@runtime_checkable
class _Scored(Protocol):
    """The same of ``RegressorMixin``."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The coefficient of determination."""
        ...


assert issubclass(BaseEstimator, _Parameters)
assert issubclass(RegressorMixin, _Scored)


class Regressor(RegressorMixin, BaseEstimator):
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
    (``gpclml.datasets.columns.unusual_values``). A warning says so.

    Args:
        candidates: Names of the models; None for those of a :class:`StackedGP`.
        max_rows: Largest number of training rows. If there are more, so many are drawn at random,
            with a warning. Time grows with the cube of the rows, memory with their square.
        time_budget: Seconds after which no further candidate is begun; None for no limit.
        n_jobs: Number of processes that fit candidates, as joblib takes it; None for one.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        random_state: Seed of the drawn rows and of networks: an integer or a ``RandomState``. None
            is the same as 0, so the same call gives the same fit.

    Attributes:
        stack_: The fitted :class:`StackedGP`; ``stack_.summary()`` says what each model adds.
        encoding_: How columns become inputs.
        n_rows_: Number of rows that were fitted to, without copies of others
            (``stack_.copies`` of them).
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X was a data frame whose names are strings.

    Raises:
        ArgumentError: In ``fit``: fewer than five rows, two columns of one name, a column of both
            numbers and other texts, no usable column, or numbers out of range.
        ValueError: In ``fit`` and ``predict``: infinite values, columns that are not those of the
            fit, or anything that scikit-learn refuses for all estimators.

    Examples:
        >>> regressor = Regressor(candidates=("linear", "matern")).fit(x, y)
        >>> mean, std = regressor.predict(x_new, return_std=True)
        >>> mean, limits = regressor.predict(x_new, quantiles=(0.05, 0.95))
    """

    # Set by scikit-learn's own check of a fit's rows.
    n_features_in_: int
    feature_names_in_: NDArray[np.object_]

    def __init__(
        self,
        candidates: Sequence[str] | None = None,
        *,
        max_rows: int = 5000,
        time_budget: float | None = None,
        n_jobs: int | None = None,
        progress: bool | None = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.candidates = candidates
        self.max_rows = max_rows
        self.time_budget = time_budget
        self.n_jobs = n_jobs
        self.progress = progress
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's tests ask: missing values are taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: ArrayLike | pandas.DataFrame, y: ArrayLike) -> Self:
        """Fits the stack to a table.

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
        table = self._rows(X, fitting=True)
        targets, seed = _targets(y, table), self._seed()
        if len(table) < LEAST_ROWS:
            expected = f"at least {LEAST_ROWS} rows"
            raise ArgumentError("X", f"n_samples = {len(table)}", expected, "Give more rows.")
        if len(table) > self.max_rows:
            rows = np.sort(np.random.default_rng(seed).permutation(len(table))[: self.max_rows])
            warnings.warn(
                f"{self.max_rows} of {len(table)} rows, drawn at random, are fitted to. Raise "
                "max_rows to have more.", UserWarning, stacklevel=callers_level(),
            )  # fmt: skip
            table, targets = table.iloc[rows], targets[rows]
        encoding = fit_inputs(table, None if is_frame(X) else "number")
        stack = StackedGP(self.candidates, seed=seed)
        x = filled(torch.from_numpy(encoding.encode(table)), encoding.categories, seed)
        stack.fit(
            x, torch.from_numpy(targets),
            categories=encoding.categories, time_budget=self.time_budget, n_jobs=self.n_jobs,
            progress=self.progress,
        )  # fmt: skip
        self.encoding_ = encoding
        self.stack_ = stack
        self.n_rows_: int = len(table) - stack.copies
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
        if quantiles is not None and not all(0 < one < 1 for one in quantiles):
            raise ArgumentError("quantiles", list(quantiles), "probabilities such as 0.05")
        prediction = self.predict_distribution(X)
        parts = [prediction.mean.numpy()]
        parts += [prediction.std.numpy()] if return_std else []
        parts += [] if quantiles is None else [prediction.quantile(list(quantiles)).numpy()]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def predict_distribution(self, X: ArrayLike | pandas.DataFrame) -> StackedPrediction:
        """The distribution of a new observation at each row.

        Args:
            X: Rows with the columns of the fit.

        Returns:
            Means, intervals, quantiles, densities, scores and draws.

        Warns:
            UserWarning: A value is missing, or a level unknown, where hardly any training row has
                that. Predictions average over what it may be (:meth:`StackedGP.predict`).
        """
        check_is_fitted(self)
        table = self._rows(X, fitting=False)
        x = torch.from_numpy(self.encoding_.encode(table))
        unknown = self.stack_.unknown_inputs(x).numpy()
        if unknown.any():
            places = self.encoding_.places
            seen = {one.name for one in self.encoding_.columns if one.has_missing}
            lacks = {name: unknown[:, inputs].any(1) for name, inputs in places.items()}
            new = {name: rows for name, rows in lacks.items() if rows.any() and name not in seen}
            if new:
                message = (
                    f"{int(np.any(list(new.values()), axis=0).sum())} of {len(x)} rows have values "
                    f"missing, or levels, where hardly any training row has that, in "
                    f"{', '.join(map(repr, new))}. Predictions are averages over what these may "
                    "be, with wider intervals."
                )
                warnings.warn(message, UserWarning, stacklevel=callers_level())
        return self.stack_.predict(x)

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
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        parameters = self.get_params()
        state = parameters["random_state"]
        parameters["random_state"] = int(state) if isinstance(state, int | np.integer) else None
        chosen = parameters["candidates"]
        parameters["candidates"] = None if chosen is None else list(chosen)
        content = {
            "parameters": parameters,
            "encoding": self.encoding_.to_content(),
            "stack": self.stack_.__getstate__(),
            "feature_names": None if names is None else [str(name) for name in names],
            "sizes": [int(self.n_features_in_), int(self.n_rows_)],
        }
        write_checkpoint(path, _KIND, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Regressor:
        """Reads an estimator that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.

        Raises:
            DataError: The file is missing, damaged or not such a checkpoint.
        """
        required = {"parameters": dict, "encoding": dict, "stack": dict, "sizes": list}
        content = read_checkpoint(path, _KIND, "cpu", required)
        try:
            made = cls(**content["parameters"])
            made.encoding_ = InputEncoding.from_content(content["encoding"])
            made.n_features_in_, made.n_rows_ = content["sizes"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"path: {path} is not complete ({error}). Restore a copy of it, or save the "
                "estimator again."
            ) from error
        made.stack_ = StackedGP()
        made.stack_.__setstate__(content["stack"])
        if content["feature_names"] is not None:
            made.feature_names_in_ = np.array(content["feature_names"], dtype=object)
        return made

    def _seed(self) -> int:
        if self.random_state is None:
            return 0
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _rows(self, X: Any, fitting: bool) -> pandas.DataFrame:
        """The rows as a data frame, of the columns of the fit."""
        import pandas

        if is_frame(X):
            check_names(X)
            # The names and number of columns alone: the encoding looks at their values.
            validate_data(self, X, reset=fitting, skip_check_array=True)
            if X.shape[0] == 0:
                raise ArgumentError("X", "a data frame without rows", "at least one row")
            table = X.rename(columns=str)
        else:
            X = validate_data(
                self, X, reset=fitting, dtype=np.float64, ensure_all_finite="allow-nan"
            )
            table = pandas.DataFrame(X, columns=[f"x{i}" for i in range(X.shape[1])])
        return table


def _targets(y: Any, table: pandas.DataFrame) -> NDArray[np.float64]:
    if y is None:
        raise ValueError("y: this estimator requires y to be passed, but the target y is None.")
    check: Any = check_array
    try:
        y = column_or_1d(check(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
    except ValueError as error:
        if "could not convert" in str(error):
            raise ArgumentError("y", f"texts ({error})", "numbers") from error
        raise
    check_consistent_length(table, y)
    return np.array(y, dtype=np.float64)


_MOST_LEVELS = 50  # of a category
_FEW_MISSING, _FEW_MISSING_SHARE = 5, 0.1  # rows from which on what they have in common is learned


@dataclass(frozen=True)
class InputEncoding:
    """How the columns of a table become inputs; every row becomes a row of numbers.

    ``left_out`` has the columns that are no inputs, and why.
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def places(self) -> dict[str, slice]:
        """For each column the places of its inputs among all inputs."""
        ends = np.cumsum([0, *(len(column.inputs) for column in self.columns)]).tolist()
        names = (column.name for column in self.columns)
        return dict(zip(names, map(slice, ends, ends[1:]), strict=False))

    @property
    def categories(self) -> list[list[int]]:
        """For each category the places of its levels among the inputs."""
        return category_places(self.columns)

    def encode(self, table: pandas.DataFrame) -> NDArray[np.float64]:
        """The inputs of rows, ``(n, d)``.

        A missing number has NaN, a level that is not among those of its column zeros. Where hardly
        any training row lacks it, a missing category has NaN.
        """
        names = {str(name): name for name in table.columns}
        inputs = []
        for column in self.columns:
            values = column.encode(column_of(table, names[column.name]))
            if isinstance(column, NumberColumn) and column.has_missing:
                values[values[:, 1] == 1, 0] = np.nan
            inputs.append(values)
        return np.hstack(inputs)

    def to_content(self) -> dict[str, Any]:
        """All of it in lists and primitives."""
        return asdict(self)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> InputEncoding:
        """What :meth:`to_content` gave; a KeyError or TypeError if it is something else."""
        columns = columns_of(content["columns"])
        return cls(columns, content["left_out"])


def is_frame(X: object) -> bool:
    """Whether it is a data frame of pandas."""
    pandas = sys.modules.get("pandas")  # without it nothing can be one
    return pandas is not None and isinstance(X, pandas.DataFrame)


def check_names(table: pandas.DataFrame) -> None:
    """Refuses a data frame in which two columns have one name."""
    names = [str(name) for name in table.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        got = f"several columns named {', '.join(map(repr, twice))}"
        raise ArgumentError("X", got, "columns of different names")


def fit_inputs(table: pandas.DataFrame, kinds: str | None = None) -> InputEncoding:
    """Decides on training rows how columns become inputs; ``kinds`` is that of all, if known.

    Numbers stay numbers, booleans become 0 and 1, dates days since 1970, and a category one input
    for each of its levels, at most the 50 that most rows have. A missing number is replaced by the
    median, with an input that is 1 where it was missing; a missing category is a level of its own.
    Columns without a value, or of lists, are left out, with a warning.
    """
    columns, left_out = [], {}
    for name in table.columns:
        column = column_of(table, name)
        kind = kind_of(column) if kinds is None or column.isna().all() else kinds
        if kind == "empty":
            left_out[str(name)] = "no values"
        elif kind == "other":
            left_out[str(name)] = "values that are lists or objects"
        else:
            least = max(_FEW_MISSING, _FEW_MISSING_SHARE * len(table))
            columns.append(fit_column(column, kind, least, _MOST_LEVELS))  # pyright: ignore[reportArgumentType]
    if left_out:
        said = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        message = f"Columns that are no inputs: {said}."
        warnings.warn(message, UserWarning, stacklevel=callers_level())
    if notes := [one.note for one in columns if isinstance(one, NumberColumn) and one.note]:
        warnings.warn(" ".join(notes), UserWarning, stacklevel=callers_level())
    if not columns:
        got = f"no usable column of {table.shape[1]}"
        raise ArgumentError("X", got, "at least one column to predict from")
    return InputEncoding(tuple(columns), left_out)
