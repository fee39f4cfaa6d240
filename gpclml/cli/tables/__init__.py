"""Reads tables, splits their rows, and encodes their columns as inputs and targets of a model."""

from gpclml.cli.tables.encoding import EncodedRows, TableEncoding, drop_copies, fit_encoding
from gpclml.cli.tables.reading import TrainTestSplit, read_table, read_times, split_rows
from gpclml.estimators.columns import CategoryColumn, NumberColumn

__all__ = [
    "CategoryColumn",
    "EncodedRows",
    "NumberColumn",
    "TableEncoding",
    "TrainTestSplit",
    "drop_copies",
    "fit_encoding",
    "read_table",
    "read_times",
    "split_rows",
]
