"""Resident memory of a process of its own, as the system counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpclml.errors import UnsupportedError

__all__ = ["bytes_printed_by", "highest_resident", "start_of_peak"]

# Blocks of this many bytes go back to the system once freed: resident memory is memory in use.
_MMAP_THRESHOLD = 65536
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def bytes_printed_by(module: str, *arguments: str) -> int:
    """Runs a module in a fresh process: the number it prints last.

    Args:
        module: Dotted name.
        *arguments: Of its command line.

    Raises:
        subprocess.CalledProcessError: It fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


def start_of_peak() -> int:
    """Resets the peak to the memory resident now, where the system can, and returns it."""
    if _CLEAR_REFS.exists():
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            pass  # a sandbox may forbid it: the peak so far, of the warm-up, is then the start
        else:
            return _status_bytes("VmRSS")
    return highest_resident()


def highest_resident() -> int:
    """The peak of this process, in bytes.

    Raises:
        UnsupportedError: The system does not report it (Windows).
    """
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    try:
        import resource
    except ImportError as error:
        raise UnsupportedError("device", "a CPU under Windows", "Linux, macOS or CUDA") from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
