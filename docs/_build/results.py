"""Pages from beside `docs` as pages of the site: results of the benchmarks, and how to take part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("*/results", "evidence/figures")
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Any, config: Any) -> Any:
    """Adds pages, figures and rows at the places that they have in the repository; mkdocs calls it."""
    found = [ROOT / "benchmarks" / "evidence" / "RESULTS.md"]
    for folder in FOLDERS:
        found += sorted(path for path in (ROOT / "benchmarks").glob(f"{folder}/*") if path.is_file())
    for path in found:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name in PROJECT:
        files.append(File.generated(config, name.lower(), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Fits links to the site, which has `docs` as its root; mkdocs calls it."""
    if not page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../benchmarks/", "](benchmarks/")
    if not page.file.src_uri.endswith("README.md"):
        page.meta["search"] = {"exclude": True}  # tables of numbers would hide everything else
    # A number and its error stay in one line of a table.
    markdown = re.sub(r"(?m)^\|.*$", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown)
    return markdown.replace("](../../../docs/", "](../../../")
