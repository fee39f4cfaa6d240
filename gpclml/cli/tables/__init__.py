"""Reads tables, splits their rows, and encodes their columns as inputs and targets of a model."""

from gpclml.cli.tables.columns import CategoryColumn, NumberColumn
from gpclml.cli.tables.encoding import (
    FEW_MISSING,
    EncodedRows,
    TableEncoding,
    check_columns,
    fit_encoding,
)
from gpclml.cli.tables.reading import read_table
from gpclml.cli.tables.rows import MOST_ROWS, num_test_rows, read_targets, split_rows, subset_rows

__all__ = [
    "FEW_MISSING",
    "MOST_ROWS",
    "CategoryColumn",
    "EncodedRows",
    "NumberColumn",
    "TableEncoding",
    "check_columns",
    "fit_encoding",
    "num_test_rows",
    "read_table",
    "read_targets",
    "split_rows",
    "subset_rows",
]
