"""Lines of a report that say what computed its cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__all__ = ["describe_cells", "listed_values"]

_PACKAGES = ("gpclml", "torch", "gpytorch", "botorch", "python")


def describe_cells(done: pandas.DataFrame, num_failed: int) -> list[str]:
    """How many cells there are, how long they took, and what computed them.

    Args:
        done: Finished cells, loaded with their provenance.
        num_failed: Number of failed cells.
    """
    versions = [f"{name} {listed_values(done[f'_{name}'])}" for name in _PACKAGES]
    hours = done["_seconds"].sum() / 3600
    wall = done["_finished_at"].max() - (done["_finished_at"] - done["_seconds"]).min()
    device = listed_values(done["device"])
    dtype = f", {listed_values(done['dtype'])}" if "dtype" in done else ""
    return [
        f"{len(done)} cells done in {hours:.2f} h of computing, {num_failed} failed; "
        f"{wall / 3600:.2f} h from the first start to the last end",
        f"{', '.join(versions)}; code {listed_values(done['_code_version'])}",
        f"device {device}{dtype}",
    ]


def listed_values(values: Iterable[object]) -> str:
    """The distinct values, sorted."""
    return " and ".join(sorted(map(str, set(values))))
