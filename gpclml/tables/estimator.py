"""What the estimators for tables share: rows of a user become inputs, and files hold a fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import pandas
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from gpclml._utils.arguments import callers_level
from gpclml.errors import ArgumentError, DataError
from gpclml.tables.encoding import InputEncoding, Kind, column_of, fit_inputs, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


class TableEstimator(BaseEstimator):
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

    def _stored(self) -> dict[str, Any]:
        """Arguments, encoding and columns in primitives."""
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

    @classmethod
    def _from_stored(cls, content: Mapping[str, Any], path: str | os.PathLike[str]) -> Self:
        """An estimator with what :meth:`_stored` gave."""
        try:
            made = cls(**content["parameters"])
            made.encoding_ = InputEncoding.from_content(content["encoding"])
            made.n_features_in_, made.n_rows_ = content["sizes"]
            names = content["feature_names"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"path: {path} is not complete ({error}). Restore a copy of it, or save the "
                "estimator again."
            ) from error
        if names is not None:
            made.feature_names_in_ = np.array(names, dtype=object)
        return made


STORED: Mapping[str, type] = {"parameters": dict, "encoding": dict, "sizes": list}
"""Entries of a checkpoint that every estimator has."""


def warn_of_drawn_rows(count: int, total: int) -> None:
    """Says how many rows a limit leaves."""
    warnings.warn(
        f"{count} of {total} rows, drawn at random, are fitted to. Raise max_rows to have more, "
        "or give None for all.",
        UserWarning, stacklevel=callers_level(),
    )  # fmt: skip


def check_given(y: Any) -> None:
    """Refuses a fit without targets, in the words that scikit-learn's tests expect."""
    if y is None:
        raise ValueError("y: this estimator requires y to be passed, but the target y is None.")


def fit_encoding(table: pandas.DataFrame, is_frame: bool) -> InputEncoding:
    """How columns become inputs; those of an array are numbers. A warning says what is not used."""
    columns = {name: column_of(table, name) for name in table.columns}
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
    return encoding
