"""What a GPU does in one step: how many kernels, how long it is busy, and with which."""

from __future__ import annotations

import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.records import Row
from benchmarks.speed.methods import Problem, gradient_step
from benchmarks.speed.runs import wait_for

__all__ = ["profile_rows"]

_MOST = 8  # kernels told of
_CHARACTERS = 80  # of a kernel's name


def profile_rows(device: str, dtype: str, n: int, methods: list[str]) -> list[Row]:
    """One step of each method under PyTorch's profiler, after two that warm up.

    Returns:
        A row a method: ``ms`` without the profiler, ``launches`` and ``busy``, the milliseconds in
        which the GPU computed or copied. Then rows of the kernels that took longest: their name,
        ``launches`` and ``busy``.
    """
    problem = Problem(n, getattr(torch, dtype), device)
    rows: list[Row] = []
    for method in methods:
        step = gradient_step(method, problem)
        step()
        wait_for(device)
        start = time.perf_counter()
        step()
        wait_for(device)
        seconds = time.perf_counter() - start
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiled:
            step()
            wait_for(device)
        spent, count = defaultdict(float), defaultdict(int)
        for event in profiled.events() or []:
            if event.device_type == DeviceType.CUDA:
                spent[event.name] += 1e-3 * event.time_range.elapsed_us()
                count[event.name] += 1
        total = {"launches": sum(count.values()), "busy": sum(spent.values())}
        rows.append({"method": method, "ms": 1e3 * seconds, **total})
        for name in sorted(spent, key=lambda one: -spent[one])[:_MOST]:
            told = {"of it": name[:_CHARACTERS], "launches": count[name], "busy": spent[name]}
            rows.append({"method": method, **told})
    return rows
