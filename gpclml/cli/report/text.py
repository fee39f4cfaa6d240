"""A report on a terminal."""

from __future__ import annotations

from gpclml._utils.files import printable
from gpclml.cli.report._page_tables import MODEL_COLUMNS, model_rows
from gpclml.cli.report.headline import answer, headline
from gpclml.cli.report.page import Report

__all__ = ["report_text"]


def report_text(report: Report) -> str:
    """The table of models and what is to be said of it.

    Args:
        report: What is to be told.
    """
    lines = [["model", *MODEL_COLUMNS]]
    for name, cells in model_rows(report.comparison, report.predictions, report.fitted):
        lines.append([name, *(f"{text} ± {error}" if error else text for text, error in cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    said = headline(report.comparison, printable(report.encoding.target))
    told = answer(report.comparison, report.predictions)
    text = "\n".join([*table, "", said, told, *report.comparison.sentences])
    return text.replace("\N{MINUS SIGN}", "-")  # not in every code page
