"""Runs the examples and keeps what they print: ``python docs/_build/examples.py [NAME ...]``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def main(names: list[str]) -> None:
    """Writes the output of each example beside it."""
    for script in sorted(EXAMPLES.glob("*.py")):
        if names and script.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:  # what it writes is not kept
            done = subprocess.run(
                [sys.executable, str(script)], cwd=folder, check=True, capture_output=True,
                text=True, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
            )  # fmt: skip
        script.with_suffix(".txt").write_text(done.stdout)
        print(f"{script.stem}\n{done.stdout}")


if __name__ == "__main__":
    main(sys.argv[1:])
