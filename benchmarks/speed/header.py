"""What a table of times is headed by: command, versions and machine."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from benchmarks.runner import package_versions

__all__ = ["describe_run"]


def describe_run(program: str, device: str) -> str:
    """Comment lines with the command of this process, versions, and what it ran on.

    Args:
        program: The module that was run.
        device: Where it computed.
    """
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return "\n".join(
        [
            f"# python -m {program} {' '.join(sys.argv[1:])}".rstrip(),
            f"# {versions}",
            f"# {_device_name(device)}, {torch.get_num_threads()} CPU threads",
        ]
    )


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        name, precision = torch.cuda.get_device_name(device), torch.get_float32_matmul_precision()
        return f"{name}, precision of float32 products: {precision} (TF32 if high)"
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
