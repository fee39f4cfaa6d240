"""How the pages of the gallery are run: in the order of their names, and an error ends the build."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of upstream, at import; not for a page
    import gpytorch  # noqa: F401

conf = {
    "filename_pattern": "plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "remove_config_comments": True,
    "capture_repr": ("_repr_html_",),  # tables, no addresses of objects
    "matplotlib_animations": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "download_all_examples": False,
}
