"""Which cells of a grid are computed together, and how many of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpclml.errors import ArgumentError

__all__ = ["BatchFunction", "Batches", "Kind", "group", "kinds_of"]

BatchFunction = Callable[[list[dict[str, Any]]], list[Mapping[str, Any] | Exception]]


@dataclass(frozen=True)
class Batches:
    """How cells are computed several at a time.

    The results must be those of the cell function, to numerical tolerance: cells are saved
    under the same keys.

    Args:
        function: Importable ``function(configurations) -> answers``: one entry a cell, in
            order, its metrics or the exception that ended it. When the function itself
            raises, each cell of the batch is computed alone by the cell function.
        label: Label of a configuration; cells of one label may be computed together.
        size: Most cells in a batch with this one; 1: alone, by the cell function.
    """

    function: BatchFunction
    label: Callable[[dict[str, Any]], Hashable]
    size: Callable[[dict[str, Any]], int]


class Kind(NamedTuple):
    """What cells that may be computed together share.

    Args:
        label: Their label.
        size: Most of them in a batch.
    """

    label: Hashable
    size: int


ALONE = Kind(None, 1)


def kinds_of(plan: Mapping[str, str], batches: Batches | None) -> dict[str, Kind]:
    """The kinds of the cells of a plan by key; none without batches.

    Args:
        plan: Configurations as JSON text by key.
        batches: How cells are computed together, if they are.

    Raises:
        ArgumentError: If a size is not a whole number from 1, or a label is not hashable.
    """
    if batches is None:
        return {}
    return {key: _kind(json.loads(text), batches) for key, text in plan.items()}


def group(keys: Iterable[str], kinds: Mapping[str, Kind]) -> list[list[str]]:
    """The keys in groups of one kind, none above its size, in the order of their first keys.

    Args:
        keys: Keys of cells.
        kinds: Kinds by key; a cell that is not there stays alone.
    """
    groups, unfilled = [], {}
    for key in keys:
        kind = kinds.get(key, ALONE)
        if len(unfilled.get(kind, ())) in (0, kind.size):
            groups.append([])
            unfilled[kind] = groups[-1]
        unfilled[kind].append(key)
    return groups


def _kind(configuration: dict[str, Any], batches: Batches) -> Kind:
    size, label = batches.size(configuration), batches.label(configuration)
    if not isinstance(size, int) or size < 1:
        mend = f"Return 1 where cells are to be computed alone, as {configuration}."
        raise ArgumentError("batches.size", repr(size), "a whole number from 1", mend)
    if not isinstance(label, Hashable):
        raise ArgumentError("batches.label", repr(label), "a hashable label", "Return a tuple.")
    return Kind(label, size)
