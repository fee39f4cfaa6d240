"""The script of the guide, in two processes that Gloo joins on this machine."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpclml.conditioning import NearestNeighbors
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "data_parallel.py"


def in_one_process(world=2, steps=60):
    """The mean objective of the draws of all processes, at each step that maximizes it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 3, generator=generator)
    y = (6 * x).sin().sum(-1) + 0.3 * torch.randn(2000, generator=generator)
    model = GPRegression(x, y, "deep_joint", seed=0)
    mlls = [
        ConditionalMarginalLogLikelihood(model.likelihood, model, NearestNeighbors(), seed=rank)
        for rank in range(world)
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = sum(mll.redrawn_objective() for mll in mlls) / world
        (-value).backward()
        optimizer.step()
        history.append(value.item())
    return history


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs Gloo")
def test_two_processes_climb_the_mean_of_their_objectives():
    """The processes are started as ``torchrun`` does, which looks up the name of the machine."""
    environment = os.environ | {
        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=environment | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (printed, errors), (others, more_errors) = (p.communicate(timeout=300) for p in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors + more_errors
    assert others == ""
    values = [float(value) for value in re.findall(r": (-?\d+\.\d+) nats", printed)]
    history = in_one_process()
    assert values == pytest.approx(history[19::20], abs=0.02)
    assert history[-1] > history[0] + 0.3
