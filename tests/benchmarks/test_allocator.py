"""Workers keep the memory that a step frees."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from benchmarks._process import keep_freed_memory
from benchmarks.speed.methods import sampled_data
from gpclml.fit import fit_batch
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
models = [
    GPRegression(*sampled_data(300, torch.float64, "cpu", seed), "deep-bottleneck", seed=seed)
    for seed in range(4)
]
mlls = [ConditionalMarginalLogLikelihood(model.likelihood, model) for model in models]

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fit_batch(mlls, steps=steps, progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(3)
print((faults(13) - faults(3)) / 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's malloc")
def test_gradient_steps_no_longer_fault_pages_in():
    def faults(how):
        command = [sys.executable, "-c", PROGRAM, how]
        # An allocator that gives back whatever it can, not only when its heuristics say so.
        variables = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | variables
        )
        return float(result.stdout)

    left = faults("leave")
    assert left > 1_000  # a covariance of 4 x 300 x 300 numbers has 703 pages
    assert faults("keep") < left / 10
