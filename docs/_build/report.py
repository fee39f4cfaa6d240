"""A page of the site that the command itself writes: the report on scikit-learn's diabetes table."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

__all__ = ["on_files", "report"]


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """Adds the report to the site; mkdocs calls it."""
    files.append(File.generated(config, "sample_report.html", content=report()))
    return files


@functools.cache
def report() -> str:
    """The page that ``gpclml compare`` writes."""
    from sklearn.datasets import load_diabetes

    table = load_diabetes(as_frame=True, scaled=False).frame
    table = table.rename(columns={"target": "progression"})
    with tempfile.TemporaryDirectory() as folder:
        table.to_csv(Path(folder) / "diabetes.csv", index=False)
        command = "-m gpclml compare diabetes.csv --target progression --quiet".split()
        subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
        return (Path(folder) / "report" / "index.html").read_text(encoding="utf-8")
