"""Regression data sets by name, checked against one registry, and their splits.

``load`` gives a data set, ``fetch`` the original file of one, ``split`` a random split and
``published_splits`` those that published results were computed with. Files are kept in
``$GPCLML_DATA/uci`` where that environment variable is set, else in the user's cache.
"""

from gpclml.datasets._fetch import fetch
from gpclml.datasets._load import load, names
from gpclml.datasets._published import num_published_splits, published_split, published_splits
from gpclml.datasets.regression_data import RegressionData
from gpclml.datasets.sources import UciSource, uci_source, uci_sources
from gpclml.datasets.splits import Split, split, subset

__all__ = [
    "RegressionData",
    "Split",
    "UciSource",
    "fetch",
    "load",
    "names",
    "num_published_splits",
    "published_split",
    "published_splits",
    "split",
    "subset",
    "uci_source",
    "uci_sources",
]
