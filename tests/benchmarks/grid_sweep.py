"""Runs a sweep in a process of its own: ``grid_sweep.py FUNCTION GRID.json PATH JOBS``.

It says ``ready`` when all is imported and starts at a line on stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grid_cells

from benchmarks.runner import run_grid

if __name__ == "__main__":
    name, grid, path, jobs = sys.argv[1:]
    cells = json.loads(Path(grid).read_text())
    print("ready", flush=True)
    sys.stdin.readline()
    summary = run_grid(cells, getattr(grid_cells, name), path, jobs=int(jobs), progress=False)
    print(json.dumps({"computed": summary.computed, "complete": summary.complete}))
