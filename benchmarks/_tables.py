"""What reports are made of: tables as GitHub writes them, what computed cells, CSV files."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import ArrayLike
from scipy.stats import t as student_t

from benchmarks.runner import package_versions
from gpclml.errors import DataError

_PACKAGES = ("gpclml", "torch", "gpytorch", "botorch", "python")
_DIGITS = 6  # of numbers in CSV files


def table(frame: pandas.DataFrame) -> str:
    """A data frame as a Markdown table: its index as the first columns, numbers to the right."""
    rows = [tuple(map(_text, row)) for row in frame.reset_index().itertuples(index=False)]
    heads = [_text(name) for name in (*frame.index.names, *frame.columns)]
    marks = ["---"] * frame.index.nlevels + ["---:"] * len(frame.columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, marks, *rows])


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
    """The mean of values and its standard error, infinite for a single value."""
    numbers = np.asarray(values, dtype=float)
    error = numbers.std(ddof=1) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.inf
    return float(numbers.mean()), float(error)


def with_error(values: ArrayLike, digits: int = 3, sign: str = "") -> str:
    """Mean and standard error of values, as text: of a single one its value, of none ``"-"``.

    Args:
        values: The values.
        digits: Digits after the point.
        sign: ``"+"`` for a sign before the mean in any case.
    """
    if not np.size(values):
        return "-"
    mean, error = mean_and_error(values)
    spread = "" if math.isinf(error) else f" ± {error:.{digits}f}"
    return f"{mean:{sign}.{digits}f}{spread}"


def with_interval(values: ArrayLike, digits: int = 3, sign: str = "") -> str:
    """Mean and half its 95% interval by Student's t, as text: of a single value that alone."""
    mean, error = mean_and_error(values)
    # Few seeds: Student's quantile.
    half = float(student_t.ppf(0.975, len(np.asarray(values)) - 1)) * error
    return f"{mean:{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def describe_error(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def command_lines(program: str) -> str:
    """The command of this process and the versions of packages, as comments above a table."""
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return f"# python -m {program} {' '.join(sys.argv[1:])}".rstrip() + f"\n# {versions}"


def section(heading: str, *paragraphs: str) -> str:
    """A heading and what stands below it."""
    return "\n\n".join([f"## {heading}", *paragraphs])


def code(lines: list[str]) -> str:
    """Lines shown as they are."""
    return "\n".join(["```", *lines, "```"])


def _text(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def describe_cells(done: pandas.DataFrame, num_failed: int) -> list[str]:
    """How many cells there are, how long they took, and what computed them."""
    versions = [f"{name} {_listed(done[f'_{name}'])}" for name in _PACKAGES]
    hours = done["_seconds"].sum() / 3600
    wall = done["_finished_at"].max() - (done["_finished_at"] - done["_seconds"]).min()
    device = f"device {_listed(done['device'])}" if "device" in done else "device cpu"
    return [
        f"{len(done)} cells done in {hours:.2f} h of computing, {num_failed} failed; "
        f"{wall / 3600:.2f} h from the first start to the last end",
        f"{', '.join(versions)}; code {_code(done['_code_version'])}",
        device + (f", {_listed(done['dtype'])}" if "dtype" in done else ""),
    ]


def _code(versions: pandas.Series) -> str:
    """The version of the code; of several functions with one each, one for all of them."""
    distinct = sorted(set(versions.dropna()))
    if len(distinct) <= 2:
        return " and ".join(distinct)
    whole = hashlib.sha256(" ".join(distinct).encode()).hexdigest()[:16]
    return f"{whole}, of {len(distinct)} functions"


def _listed(values: pandas.Series) -> str:
    return " and ".join(sorted(map(str, set(values.dropna()))))


def write_rows(done: pandas.DataFrame, path: str | os.PathLike[str], about: Sequence[str]) -> None:
    """Writes a row for each cell, its configuration and then its metrics, as CSV.

    Numbers have six significant digits, lists are separated by spaces.

    Args:
        done: Finished cells; columns that begin with an underscore are left out.
        path: The file; compressed where its name ends in ``.gz``.
        about: The lines in front.

    Raises:
        DataError: The file cannot be written.
    """
    table = spread_rows(done.drop(columns=[name for name in done if name.startswith("_")]))
    write_csv(table.map(_value), path, about)


def write_csv(table: pandas.DataFrame, path: str | os.PathLike[str], about: Sequence[str]) -> None:
    """Writes a table, compressed where the name of the file ends in ``.gz``.

    Lines in front that begin with ``#`` say what made the file; ``pandas.read_csv(path,
    comment="#")`` passes over them. The same table gives the same bytes.

    Raises:
        DataError: The file cannot be written.
    """
    data = ("".join(f"# {line}\n" for line in about) + table.to_csv(index=False)).encode()
    try:
        # No time of day: the same cells give the same bytes.
        packed = gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data
        Path(path).write_bytes(packed)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}). Name another file.") from error


def read_csv(path: str | os.PathLike[str]) -> tuple[pandas.DataFrame, list[str]]:
    """The table of a file of :func:`write_csv`, and the lines in front."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
        lines = list(takewhile(lambda line: line.startswith("#"), file))
    table = pandas.read_csv(path, comment="#")
    return table, [line.removeprefix("# ").rstrip() for line in lines]


def read_rows(paths: Iterable[str | os.PathLike[str]]) -> pandas.DataFrame:
    """The rows of several files that :func:`write_rows` wrote, together.

    Raises:
        DataError: A file cannot be read, or has no cells of an objective.
    """
    tables = []
    for path in paths:
        try:
            tables.append(pandas.read_csv(path, comment="#").astype({"objective": object}))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path}: no rows of cells ({error}). Give a file that report --csv wrote."
            ) from error
    return pandas.concat(tables, ignore_index=True)


def spread_rows(done: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each entry of the lists in the column ``rows``, if there are, beside its cell's."""
    if "rows" not in done:
        return done
    cells = done.to_dict("records")
    return pandas.DataFrame([cell | row for cell in cells for row in cell.pop("rows")])


def print_tables(
    program: str,
    tables: Iterable[pandas.DataFrame],
    *,
    threads: int = 1,
    csv: Path | None = None,
    digits: str = ".2f",
) -> None:
    """Prints tables as they come, each with further rows, below the command and the versions.

    The CSV file is written after each table, so that a long run that is stopped keeps what it has.
    """
    import torch

    torch.set_num_threads(threads)
    header = command_lines(program)
    print(header, flush=True)
    done: list[pandas.DataFrame] = []
    for rows in tables:
        print(
            rows.to_string(index=False, header=not done, float_format=lambda x: format(x, digits)),
            flush=True,
        )
        done.append(rows)
        if csv:
            csv.write_text(f"{header}\n{pandas.concat(done).to_csv(index=False)}")


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(str(_value(entry)) for entry in value)
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) and value == value else value
