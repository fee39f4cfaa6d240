"""Any regression data set by its name."""

from __future__ import annotations

import os

from gpclml._utils.arguments import checked
from gpclml.datasets._embedded import EMBEDDED
from gpclml.datasets._fetch import fetch
from gpclml.datasets._table import read_table
from gpclml.datasets.regression_data import RegressionData
from gpclml.datasets.sources import uci_source, uci_sources
from gpclml.errors import UnknownNameError


def names() -> tuple[str, ...]:
    """Names that ``load`` knows, sorted."""
    return tuple(sorted({*uci_sources(), *EMBEDDED}))


@checked
def load(
    name: str, *, folder: str | os.PathLike[str] | None = None, progress: bool = True
) -> RegressionData:
    """A regression data set by name: read from the data folder, fetched first where missing.

    ``"diabetes"`` ships with scikit-learn and needs neither; ``fetch`` says how files are
    kept and checked.

    Args:
        name: One of ``names()``.
        folder: The data folder; UCI files are in ``uci`` under it. None: ``$GPCLML_DATA``,
            else the user's cache.
        progress: Whether a download shows a progress bar on standard error.

    Raises:
        UnknownNameError: No such data set; the message lists the nearest names.
        DataError: The file is corrupt, cannot be fetched or is not what the registry says.
    """
    if not isinstance(name, str) or name not in names():
        raise UnknownNameError("name", name, names())
    if name in EMBEDDED:
        return EMBEDDED[name]()
    return read_table(fetch(name, folder=folder, progress=progress), uci_source(name))
