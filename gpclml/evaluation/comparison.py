"""A comparison of models: the table, what it was made of, and what it says."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.evaluation._criteria import Criterion, Scores, favourites
from gpclml.evaluation._sentences import sentences
from gpclml.evaluation._table import for_display
from gpclml.evaluation.findings import Finding
from gpclml.inference.units import Units

if TYPE_CHECKING:
    import pandas

__all__ = ["Comparison"]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Models scored on the data they were trained on; it prints as a table and sentences.

    Attributes:
        table: As :func:`gpclml.evaluation.compare` gives it.
        scores: All scores of each model, the first-ranked first.
        findings: What calls for care.
        models: The models themselves, in the same order.
        targets: Observed targets in the units of the comparison, ``(n,)``.
        rows: Their rows in the training data, ``(n,)``.
        orders: The orderings, as rows, ``(k, n)``.
        m: Number of points that the CLML conditions on.
        rank_by: The criterion that ranks.
        units: Units of the targets.
    """

    table: pandas.DataFrame
    scores: Scores
    findings: tuple[Finding, ...]
    models: Mapping[str, ExactGP]
    targets: Tensor
    rows: Tensor
    orders: Tensor
    m: int
    rank_by: Criterion
    units: Units

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the comparison says: ranking, agreement, weights, then a sentence a finding."""
        weights = dict(zip(self.table.index, self.table["weight"], strict=True))
        return sentences(self.scores, self.rank_by, weights, self.findings)

    @property
    def favourites(self) -> Mapping[Criterion, str]:
        """The best model by each criterion that some model has; of equal ones the first-ranked."""
        return favourites(self.scores)

    @property
    def pointwise(self) -> pandas.DataFrame:
        """Log densities of points given all others: a row a point, a column a model."""
        import pandas

        columns = {name: scores.loo.numpy() for name, scores in self.scores.items()}
        return pandas.DataFrame(columns, index=pandas.Index(self.rows.numpy(), name="row"))

    def __repr__(self) -> str:
        lines = [self._head(), for_display(self.table).to_string(), *self.sentences]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        table = for_display(self.table).to_html()
        return f"<p>{html.escape(self._head())}</p>{table}<ul>{items}</ul>"

    def _head(self) -> str:
        return (
            f"{len(self.models)} models of {len(self.targets)} targets in {self.units} units, in "
            f"nats; CLML of {len(self.targets) - self.m} points given {self.m}, mean over "
            f"{len(self.orders)} orderings; ranked by {self.rank_by.upper()}"
        )
