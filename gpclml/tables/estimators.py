"""The estimators of scikit-learn for tables: of numbers, counts and classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import pandas
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from gpclml._utils.arguments import callers_level, check_counts, checked
from gpclml.errors import ArgumentError
from gpclml.likelihoods import TargetMixture
from gpclml.tables.averages import AVERAGED, KERNELS, ClassModels, CountModels, check_whole
from gpclml.tables.candidates import checked_names
from gpclml.tables.encoding import InputEncoding, Kind, column_of, fit_inputs, kind_of
from gpclml.tables.missing import filled
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.saving import Saved
from gpclml.tables.stacked import LEAST_ROWS, StackedGP

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


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
class Scored(Protocol):
    """The same of scikit-learn's mixins of regressors and classifiers."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The coefficient of determination, or the share of rows whose class is predicted."""
        ...


assert issubclass(BaseEstimator, _Parameters)


class TableEstimator(Saved, BaseEstimator):
    """An estimator of scikit-learn for arrays, and for data frames whose columns are encoded."""

    random_state: int | np.random.RandomState | None
    encoding_: InputEncoding
    n_rows_: int
    # Set by scikit-learn's own check of a fit's rows.
    n_features_in_: int
    feature_names_in_: NDArray[np.object_]

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's tests ask: missing values are taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _seed(self) -> int:
        if self.random_state is None:
            return 0
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _rows(self, X: Any, fitting: bool) -> pandas.DataFrame:
        """The rows as a data frame, of the columns of the fit."""
        if isinstance(X, pandas.DataFrame):
            names = list(map(str, X.columns))
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                got = f"several columns named {', '.join(map(repr, twice))}"
                raise ArgumentError("X", got, "columns of different names")
            # The names and number of columns alone: the encoding looks at their values.
            validate_data(self, cast(Any, X), reset=fitting, skip_check_array=True)
            if X.shape[0] == 0:
                raise ArgumentError("X", "a data frame without rows", "at least one row")
            return X.rename(columns=str)
        X = validate_data(self, X, reset=fitting, dtype=np.float64, ensure_all_finite="allow-nan")
        return pandas.DataFrame(X, columns=[f"x{i}" for i in range(X.shape[1])])

    def _new_inputs(self, X: Any, unknown_inputs: Callable[[Tensor], Tensor]) -> Tensor:
        """Inputs of new rows, NaN where missing; a warning says which hardly any row lacked."""
        x = torch.from_numpy(self.encoding_.encode(self._rows(X, fitting=False)))
        if note := self.encoding_.note_on_unknown(unknown_inputs(x).numpy()):
            warnings.warn(note, UserWarning, stacklevel=callers_level())
        return x

    def _state(self) -> dict[str, Any]:
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        parameters = {
            name: list(value) if isinstance(value, list | tuple | np.ndarray) else value
            for name, value in self.get_params().items()
        }
        state = parameters["random_state"]
        parameters["random_state"] = int(state) if isinstance(state, int | np.integer) else None
        return {
            "parameters": parameters,
            "encoding": asdict(self.encoding_),
            "feature_names": None if names is None else [str(name) for name in names],
            "sizes": [int(self.n_features_in_), int(self.n_rows_)],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        cast(Any, self).__init__(**state["parameters"])
        self.encoding_ = InputEncoding.from_content(state["encoding"])
        self.n_features_in_, self.n_rows_ = state["sizes"]
        if state["feature_names"] is not None:
            self.feature_names_in_ = np.array(state["feature_names"], dtype=object)


def check_given(y: Any) -> None:
    """Refuses a fit without targets, in the words that scikit-learn's tests expect."""
    if y is None:
        raise ValueError("y: this estimator requires y to be passed, but the target y is None.")


def fit_inputs_of_rows(
    X: Any, table: pandas.DataFrame, drawn: NDArray[np.int64] | None, seed: int
) -> tuple[InputEncoding, Tensor]:
    """The encoding of training rows and their inputs, ``(n, d)``; a warning says what is not used.

    ``drawn`` are rows that a limit leaves, all if None. Columns of an array ``X`` are numbers.
    """
    if drawn is not None:
        warnings.warn(
            f"{len(drawn)} of {len(table)} rows, drawn at random, are fitted to. Raise max_rows to "
            "have more, or give None for all.",
            UserWarning, stacklevel=callers_level(),
        )  # fmt: skip
        # The encoding is decided on these rows alone, so that the limit bounds all work.
        table = table.iloc[drawn]
    columns = {name: column_of(table, name) for name in table.columns}
    is_frame = isinstance(X, pandas.DataFrame)
    kinds: dict[str, Kind] = {
        name: kind_of(column) if is_frame or column.isna().all() else "number"
        for name, column in columns.items()
    }
    encoding = fit_inputs(table, kinds)
    if encoding.left_out:
        said = "; ".join(f"{name!r}: {reason}" for name, reason in encoding.left_out.items())
        message = f"Columns that are no inputs: {said}."
        warnings.warn(message, UserWarning, stacklevel=callers_level())
    if encoding.notes:
        warnings.warn(" ".join(encoding.notes), UserWarning, stacklevel=callers_level())
    if not encoding.columns:
        got = f"no usable column of {table.shape[1]}"
        raise ArgumentError("X", got, "at least one column to predict from")
    x = torch.from_numpy(encoding.encode(table))
    return encoding, filled(x, encoding.categories, seed)


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
        restarts: Number of further starts, as of a :class:`StackedGP`. Counts take none.
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
        restarts: int = 0,
        time_budget: float | None = None,
        n_jobs: int | None = None,
        progress: bool | None = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.candidates = candidates
        self.counts = counts
        self.max_rows = max_rows
        self.restarts = restarts
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
        names: Sequence[str] = AVERAGED
        if self.counts and self.candidates is not None:
            names = checked_names("candidates", self.candidates, KERNELS)
        table = self._rows(X, fitting=True)
        targets, seed = torch.from_numpy(_targets(y, table)), self._seed()
        if len(table) < LEAST_ROWS:
            expected = f"at least {LEAST_ROWS} rows"
            raise ArgumentError("X", f"n_samples = {len(table)}", expected, "Give more rows.")
        if self.counts:
            check_whole("y", targets, "Leave out counts=True to predict any numbers.")
            refused = {"restarts": self.restarts or None, "time_budget": self.time_budget}
            for argument, value in refused.items():
                if value is not None:
                    suggestion = "Leave it out, and name fewer candidates if time is short."
                    raise ArgumentError(argument, value, "none for counts", suggestion)
        rows = None
        most = _MOST_COUNTS if self.counts and self.max_rows is None else self.max_rows
        if most is not None and len(table) > most:
            rows = np.sort(np.random.default_rng(seed).permutation(len(table))[:most])
            targets = targets[rows]
        encoding, x = fit_inputs_of_rows(X, table, rows, seed)
        if self.counts:
            fitted = CountModels(x, targets, encoding.categories, seed)
            fitted.fit(names, self.n_jobs, self.progress)
        else:
            fitted = StackedGP(self.candidates, restarts=self.restarts, seed=seed)
            fitted.fit(
                x, targets,
                categories=encoding.categories, time_budget=self.time_budget, n_jobs=self.n_jobs,
                progress=self.progress,
            )  # fmt: skip
        for name in ("stack_", "models_"):
            vars(self).pop(name, None)  # of an earlier fit
        setattr(self, "models_" if self.counts else "stack_", fitted)
        self.encoding_ = encoding
        self.n_rows_ = len(x) - getattr(fitted, "copies", 0)
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

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return {**state, "counts": "models_" in vars(self), "stack": self._model.__getstate__()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        if state["counts"]:
            self.models_ = CountModels.__new__(CountModels)
        else:
            self.stack_ = StackedGP()
        self._model.__setstate__(state["stack"])

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


assert issubclass(ClassifierMixin, Scored)


class Classifier(ClassifierMixin, TableEstimator):
    """A scikit-learn classifier for tables: an average of Gaussian processes of several kernels.

    It takes arrays and data frames as :class:`Regressor` does, with the same rules for categories,
    missing values, codes such as -999 and wild cells, and labels of any type. Probabilities are the
    average of those of three :class:`~gpclml.models.GPClassification` with logistic
    likelihoods: of a linear function, of a sum of functions of single columns, and of a rough
    function of all columns (Matern of 1/2). They are fitted by the Laplace approximation of their
    marginal likelihoods, with weak priors; lengthscales of a Matern or RBF kernel are shrunk
    towards a common one.

    The odds of each model are raised to a power, one for all, that predicts each training row best
    from the others, with a prior around 1: averages of probabilities are too cautious where classes
    are told apart well. With more than two classes there is a model of each against the others, and
    given that exactly one of them is right, classes have probabilities in proportion to their odds.
    The average then weights kernels by how well they predict each training row from the others.

    Args:
        kernels: Names of the kernels, of "linear", "additive" (a sum of Matern kernels of 3/2, one
            for each column), "matern12", "matern32", "matern52" (Matern of 1/2, 3/2 and 5/2) and
            "rbf"; None for the first three.
        max_rows: Largest number of training rows. If there are more, so many are drawn at random,
            with the shares of the classes, and a warning. None for all.
        n_jobs: Number of processes that fit models, as joblib takes it; None for one.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        random_state: Seed of the drawn rows: an integer or a ``RandomState``. None is the same as
            0, so the same call gives the same fit.

    Attributes:
        classes_: The labels, sorted; columns of probabilities are in this order.
        models_: The fitted models, ``models_.models`` by kernel, and ``models_.failures``.
        encoding_: How columns become inputs.
        n_rows_: Number of rows that were fitted to.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X was a data frame whose names are strings.

    Raises:
        ArgumentError: In ``fit``: one class alone, missing labels, fewer rows than classes, two
            columns of one name, a column of both numbers and other texts, or no usable column.
        UnknownNameError: In ``fit``: there is no such kernel.
        ValueError: In ``fit`` and ``predict``: infinite values, columns that are not those of the
            fit, or anything that scikit-learn refuses for all classifiers.

    Note:
        An evaluation in a fit takes about five Cholesky factors of n x n, and a fit about 20
        evaluations; a prediction takes about thirty factors for each model.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> from gpclml import Classifier
        >>> x, y = load_breast_cancer(return_X_y=True, as_frame=True)
        >>> classifier = Classifier(["linear", "rbf"]).fit(x[:80], y[:80])
        >>> probabilities = classifier.predict_proba(x[80:])
    """

    classes_: NDArray[Any]
    models_: ClassModels

    def __init__(
        self,
        kernels: Sequence[str] | None = None,
        *,
        max_rows: int | None = 2000,
        n_jobs: int | None = None,
        progress: bool | None = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.kernels = kernels
        self.max_rows = max_rows
        self.n_jobs = n_jobs
        self.progress = progress
        self.random_state = random_state

    def fit(self, X: ArrayLike | pandas.DataFrame, y: ArrayLike) -> Self:
        """Fits the models to a table.

        Args:
            X: Rows, ``(n, columns)``: an array of numbers or a data frame.
            y: Labels, ``(n,)``, of any type that can be sorted.

        Returns:
            The estimator itself.

        Warns:
            UserWarning: Rows were drawn at random, or columns are not used as inputs.
            FitWarning: A kernel is left out because its fit failed.
        """
        names: Sequence[str] = AVERAGED
        if self.kernels is not None:
            names = checked_names("kernels", self.kernels, KERNELS)
        table = self._rows(X, fitting=True)
        classes, numbers = _classes(y, table)
        seed, rows = self._seed(), None
        check_counts(len(classes), max_rows=self.max_rows)
        if self.max_rows is not None and len(table) > self.max_rows:
            rows = _drawn_rows(numbers, self.max_rows, seed)
            numbers = numbers[rows]
        encoding, x = fit_inputs_of_rows(X, table, rows, seed)
        models = ClassModels(x, torch.from_numpy(numbers), encoding.categories, seed)
        models.fit(names, self.n_jobs, self.progress)
        self.classes_, self.models_, self.encoding_ = classes, models, encoding
        self.n_rows_ = len(x)
        return self

    def predict_proba(self, X: ArrayLike | pandas.DataFrame) -> NDArray[np.float64]:
        """Probabilities of the classes.

        Args:
            X: Rows with the columns of the fit.

        Returns:
            ``(m, classes)``, in the order of ``classes_``.

        Raises:
            ValueError: As in ``fit``, or the columns are not those of the fit.

        Warns:
            UserWarning: A value is missing, or a level unknown, where hardly any training row has
                that. Probabilities are averages over what it may be.
        """
        check_is_fitted(self)
        x = self._new_inputs(X, self.models_.unknown_inputs)
        return self.models_.probabilities(x).T.numpy()

    def predict(self, X: ArrayLike | pandas.DataFrame) -> NDArray[Any]:
        """The labels of the most probable classes, ``(m,)``.

        Args:
            X: Rows with the columns of the fit.

        Raises:
            ValueError: As :meth:`predict_proba`.
        """
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _state(self) -> dict[str, Any]:
        labels = {"classes": self.classes_.tolist(), "dtype": str(self.classes_.dtype)}
        return super()._state() | labels | {"models": self.models_.__getstate__()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.classes_ = np.array(state["classes"], dtype=state["dtype"])
        self.models_ = ClassModels.__new__(ClassModels)
        self.models_.__setstate__(state["models"])


def _classes(y: Any, table: pandas.DataFrame) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The labels, sorted, and for each row the number of its label."""
    check_given(y)
    check: Any = check_array
    labels = column_or_1d(check(y, ensure_2d=False, dtype=None, input_name="y"), warn=True)
    missing = int(cast(Any, pandas.isna(labels)).sum())
    if missing:
        suggestion = "Leave out the rows without a label."
        raise ArgumentError("y", f"{missing} missing labels", "a label for each row", suggestion)
    if labels.dtype == object and not any(isinstance(label, str) for label in labels):
        labels = np.array(labels.tolist())  # numbers and booleans of a column of objects
    check_consistent_length(table, labels)
    check_classification_targets(labels)
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        got, suggestion = f"one class, {classes.tolist()[0]!r}", "Give rows of at least two."
        raise ArgumentError("y", got, "two classes or more", suggestion)
    return classes, numbers


def _drawn_rows(numbers: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Rows drawn at random with the shares of the classes, at least one row of each."""
    draws = np.random.default_rng(seed)
    places = np.empty(len(numbers))
    for label in range(numbers.max() + 1):
        rows = draws.permutation(np.flatnonzero(numbers == label))
        places[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
        places[rows[0]] = 0.0
    return np.sort(np.argsort(places, kind="stable")[:count])
