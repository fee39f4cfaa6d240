"""How the pages of the gallery are run: in the order of their names, and an error ends the build."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of upstream, at import; not for a page
    import gpytorch  # noqa: F401


def use_palette(gallery_conf: Any, name: str) -> None:
    """Colours that colour-blind readers tell apart, before each page."""
    import matplotlib.pyplot as plt

    plt.style.use("tableau-colorblind10")


conf = {
    "reset_modules": ("matplotlib", use_palette),
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
