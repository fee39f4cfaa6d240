"""Runs a sweep in a process of its own: ``grid_sweep.py FUNCTION GRID.json PATH OPTIONS``.

OPTIONS are JSON: those of ``run_grid``, and the name of a batch function. The process says
``ready`` when all is imported and starts at a line on stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grid_cells

from benchmarks.runner import Batches, run_grid

if __name__ == "__main__":
    name, grid, path, text = sys.argv[1:]
    cells, options = json.loads(Path(grid).read_text()), json.loads(text)
    if "batch" in options:
        batch = getattr(grid_cells, options.pop("batch"))
        options["batches"] = Batches(batch, lambda cell: 0, lambda cell: 3)
    print("ready", flush=True)
    sys.stdin.readline()
    summary = run_grid(cells, getattr(grid_cells, name), path, progress=False, **options)
    print(json.dumps({"computed": summary.computed, "complete": summary.complete}))
