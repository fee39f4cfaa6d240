"""Public callables that are not fuzzed, each with the reason."""

from __future__ import annotations

__all__ = ["LEFT_OUT"]

_ARCHIVE = "reads an archive, whose damage has tests of its own"
_NOTHING = "takes nothing"
_REPORT = "takes a finished report, which a command makes"

LEFT_OUT = {
    "datasets.load_emnist": _ARCHIVE,
    "datasets.fetch": "downloads",
    "datasets.image_names": _NOTHING,
    "datasets.load_head_poses": _ARCHIVE,
    "datasets.load_images": _ARCHIVE,
    "datasets.names": _NOTHING,
    "datasets.num_published_splits": _ARCHIVE,
    "datasets.load_omniglot": _ARCHIVE,
    "datasets.load_published_split": _ARCHIVE,
    "datasets.load_published_splits": _ARCHIVE,
    "datasets.uci_sources": _NOTHING,
    "linalg.refuse_double_backward": "a context without a computation",
    "inference.evaluating": "makes a context, which does nothing before it is entered",
    "cli.report.answer": _REPORT,
    "cli.report.chosen_models": _REPORT,
    "cli.report.headline": _REPORT,
    "cli.report.package_versions": _NOTHING,
    "cli.report.page_of": _REPORT,
    "cli.report.report_text": _REPORT,
    "inference.solvers.iterative_settings": "takes figures that its caller has computed",
    "inference.solvers.takes_cholesky": "takes figures that its caller has computed",
}
"""Reasons by name."""
