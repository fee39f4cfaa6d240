"""The study of classes and counts: ``python -m benchmarks.tables classes run``, and ``report``."""

from __future__ import annotations

__all__ = ["DEVELOPMENT", "JUDGED"]

DEVELOPMENT = (
    "birthwt", "contraception", "pima", "swiss-labor", "doctor-visits", "interlocks", "quine",
)  # fmt: skip
"""The tables by which anything may be chosen or tuned: of each kind every other name, from the
second."""

JUDGED = (
    "biopsy", "breast-cancer", "credit-card", "spam", "titanic", "articles", "fishing", "nmes",
)  # fmt: skip
"""The others, by which what was chosen is judged, and nothing else."""
