"""The machine that measurements are of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.runner import package_versions
from benchmarks.speed.runs import cpu_name
from gpclml.errors import DataError

__all__ = ["check_machine", "describe_machine"]


def describe_machine(device: str) -> dict[str, Any]:
    """Card, driver, versions, CPU, precision of products and commit of the code, by name."""
    found: dict[str, Any] = {"device": device}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "memory of the card": f"{properties.total_memory / 2**30:.1f} GiB",
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
            "CUDA": torch.version.cuda,
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    return found | package_versions() | {
        "CPU": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "TF32 of products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 of convolutions": torch.backends.cudnn.allow_tf32,
        "commit": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    """The commit that is checked out, with a mark where files differ from it; None if unknown."""
    git = shutil.which("git")
    if git is None:
        return None
    asked = [git, "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).parents[2]
    done = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or None


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "not known: no nvidia-smi"
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout.strip().splitlines() or ["not known"])[0]


def check_machine(folder: Path, device: str) -> dict[str, Any]:
    """What the machine is, which a folder of results remembers.

    Raises:
        DataError: The folder has results of another machine, of other versions or of other code.
    """
    found = describe_machine(device)
    file = folder / "machine.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        return found
    before = json.loads(file.read_text())
    differing = [name for name in found if before.get(name) != found[name]]
    if differing:
        name = differing[0]
        raise DataError(
            f"{folder}: results of another machine or other code ({name}: {before.get(name)!r} "
            f"there, {found[name]!r} here). Name another folder by --results."
        )
    return found
