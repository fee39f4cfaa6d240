"""Times of steps taken in turn, their ratios round by round, and memory at the peak.

Every round takes each step once, so that whatever slows the machine for a while slows all
methods alike; a ratio is formed within its round only.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks._tables import describe_error
from gpclml.errors import UnsupportedError

Row = dict[str, Any]
Steps = Mapping[str, Callable[[], object]]

FAILED = "error"
"""Column of the reason why a method has no figures."""

_MOST_ROUNDS = 41  # odd for a clear median
_LONG = 6.0  # seconds of a first call beyond which warming up is too little of it to be left out
_MOST_CHARACTERS = 300


def timed(
    steps: Steps, device: str, seconds: float, *, base: str | None = None, memory: bool = False
) -> list[Row]:
    """Times of steps, of which one may fail.

    Each is called to warm up, and once more unless that took long; then all are called in turn for
    as many rounds as the seconds have room for, 41 at most. Where there is room for none, the last
    of the calls before counts.

    Args:
        steps: By name.
        device: What is waited for.
        seconds: That the rounds may take.
        base: The step whose ratio is 1.
        memory: Measure a GPU's memory at the peak of those calls.

    Returns:
        A row a ``method``: ``ms``, the median; ``ratio`` to the base in the same round, with
        quartiles ``low`` and ``high``; ``rounds``; ``GiB`` beyond what was there before. Or
        ``error``.
    """
    rows: dict[str, Row] = {name: {"method": name} for name in steps}
    first: dict[str, float] = {}
    on_gpu = torch.device(device).type == "cuda"
    for name, step in steps.items():
        try:
            # The first call loads kernels and fills allocators; the second one is representative.
            for _ in range(2):
                if memory and on_gpu:
                    start = _start_on_gpu(device)
                first[name] = _seconds(step, device)
                if memory and on_gpu:
                    peak = torch.cuda.max_memory_allocated(device) - start
                    rows[name]["GiB"] = peak / 2**30
                if first[name] > _LONG:
                    break
        except Exception as error:  # out of memory, say: that is what is to be known of it
            first.pop(name, None)
            rows[name][FAILED] = describe_error(error)[:_MOST_CHARACTERS]
        if on_gpu:
            gc.collect()
    if not first:
        return list(rows.values())
    # The second calls say how many rounds the time has room for.
    rounds = min(_MOST_ROUNDS, int(seconds / sum(first.values())))
    times = pd.DataFrame([first])
    if rounds:
        times = interleaved_times({name: steps[name] for name in first}, rounds, device)
    table = ratios(times, base) if base in times else pd.DataFrame(index=times.columns)
    for name in first:
        rows[name]["ms"] = 1e3 * float(times[name].median())
        rows[name] |= table.loc[name].to_dict() | {"rounds": max(rounds, 1)}
    return list(rows.values())


def interleaved_times(
    steps: Steps, rounds: int, device: str | torch.device = "cpu"
) -> pd.DataFrame:
    """Wall time of every step in every round, in seconds: a row a round and a column a step.

    The order is rotated by one each round, so that no step always follows the same one.
    """
    names, rows = deque(steps), []
    for _ in range(rounds):
        rows.append({name: _seconds(steps[name], device) for name in names})
        # Caches left by one step would favour the same next one.
        names.rotate(-1)
    return pd.DataFrame(rows, columns=list(steps))


def ratios(times: pd.DataFrame, base: str) -> pd.DataFrame:
    """Each step's time over the base's in the same round: median and quartiles over rounds."""
    quantiles = times.div(times[base], axis=0).quantile([0.5, 0.25, 0.75]).T
    return quantiles.set_axis(["ratio", "low", "high"], axis=1)


def _seconds(step: Callable[[], object], device: str | torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: str | torch.device) -> None:
    """Until all that is queued on a GPU is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def machine_name(device: str) -> str:
    """The name of the card, or of the processor as the system gives it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Blocks of this many bytes go back to the system once freed: resident memory is memory in use.
_MMAP_THRESHOLD = 65536
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def step_memory(prepare: Callable[..., Callable[[], object]], *settings: Any) -> float:
    """GiB at the peak of a step beyond what was there before it, in a fresh process.

    The system counts that process's resident memory, so that nothing a method left behind is
    charged to, or reused by, another. It is exact to about a megabyte.

    Args:
        prepare: A function of a module that makes the step, after whatever warms up.
        *settings: Its arguments, whose ``repr`` can be evaluated.

    Raises:
        UnsupportedError: The system does not report it (Windows).
    """
    return in_fresh_process(_growth, prepare.__module__, prepare.__name__, settings) / 2**30


def _growth(module: str, name: str, settings: tuple) -> int:
    step = getattr(importlib.import_module(module), name)(*settings)
    gc.collect()
    before = start_of_peak()
    step()
    return highest_resident() - before


def _start_on_gpu(device: str) -> int:
    gc.collect()
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def in_fresh_process(function: Callable[..., int], *arguments: object) -> int:
    """What a function of a module returns in a process of its own, with as many threads."""
    name, threads = function.__name__, torch.get_num_threads()
    # The module is imported anew there; its own name may be __main__ here.
    code = (
        f"import torch; torch.set_num_threads({threads}); "
        f"from {function.__module__} import {name}; print({name}(*{arguments!r}))"
    )
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)}
    folder = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    return int(subprocess.check_output(command, env=variables, cwd=folder).split()[-1])


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
    """The peak of this process, in bytes."""
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
