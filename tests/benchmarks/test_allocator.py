"""Workers keep the memory that a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from benchmarks._allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def step():
    arrays = [torch.ones(700, 700, dtype=torch.float64) for _ in range(20)]
    return sum(float(array[0, 0]) for array in arrays)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's malloc")
def test_steps_no_longer_fault_pages_in():
    def faults(how):
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # 20 arrays of 957 pages a step, ten steps.
    assert faults("leave") > 10_000
    assert faults("keep") < 1_000
