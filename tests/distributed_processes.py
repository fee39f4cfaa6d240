"""Real processes, joined by Gloo through a file, and an objective for them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from gpclml.fit._exchange import Processes
from gpclml.fit.distributed import DistributedConditioning
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

STEPS = 3


LONG = 600.0
"""Seconds that a busy machine is given; what only a hang would take."""
ATTEMPTS = 3
"""How often processes are started: on a busy machine Gloo may refuse a connection of one."""


def run(function, world, folder, *args, hanging=None, limit=LONG / 2):
    """What ``function(rank, *args)`` returns in each process; None of those that do not end."""
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the last one when first made, which takes seconds.
    context.set_forkserver_preload(["gpclml.fit.distributed", "gpclml.models", "torch._dynamo"])
    for attempt in range(ATTEMPTS):
        refused = folder / f"refused-{attempt}"
        children = [
            context.Process(target=_child, args=(function, rank, world, str(folder), attempt, args))
            for rank in range(world)
        ]
        for child in children:
            child.start()
        try:
            end = time.monotonic() + limit
            while not refused.exists() and any(
                child.exitcode is None for rank, child in enumerate(children) if rank != hanging
            ):
                assert time.monotonic() < end, f"still running after {limit} s"
                time.sleep(0.02)
        finally:
            for child in children:
                child.kill()
                child.join()
        if not refused.exists():
            break
    else:
        raise AssertionError(refused.read_text())
    results = []
    for rank in range(world):
        file = folder / f"result-{rank}"
        results.append(pickle.loads(file.read_bytes()) if file.exists() else None)
        assert not isinstance(results[-1], str), results[-1]
    return results


def _child(function, rank, world, folder, attempt, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=LONG),
        )  # fmt: skip
    except RuntimeError as error:  # the others wait for this process
        Path(f"{folder}/refused-{attempt}").write_text(str(error))
        return
    try:
        result = function(rank, *args)
    except Exception:
        result = traceback.format_exc()
    with open(f"{folder}/part-{rank}", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{folder}/part-{rank}", f"{folder}/result-{rank}")
    dist.destroy_process_group()


def without_roll_call(rank, function, *args):
    """As with NCCL, whose processes cannot send rows to rank 0 one by one."""
    Processes.backends = property(lambda self: {"cpu": "another"})
    return function(rank, *args)


@contextlib.contextmanager
def caught(*kinds):
    """The error raised inside, as a list of one."""
    errors = []
    try:
        yield errors
    except kinds as error:
        errors.append(error)


def objective(conditioning, seed=0):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(30, 2, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin() + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)
    model = GPRegression(x, y)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
    return mll.train()


def evaluate(mll):
    return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def gradients(mll):
    return [parameter.grad.numpy().copy() for parameter in mll.parameters()]


def parameters(mll):
    return [parameter.detach().numpy().copy() for parameter in mll.parameters()]


def in_one_process(strategy, world):
    """Values, gradients and last parameters of steps on the mean over all ranks' draws."""
    first, *others = [
        objective(DistributedConditioning(strategy(), num_replicas=world, rank=rank))
        for rank in range(world)
    ]
    for mll in others:
        mll.model, mll.likelihood = first.model, first.likelihood
    optimizer = torch.optim.Adam(first.parameters(), lr=0.1)
    record = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = sum(evaluate(mll) for mll in [first, *others]) / world
        (-value).backward()
        record.append((value.item(), gradients(first)))
        optimizer.step()
    return record, parameters(first)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(one), torch.as_tensor(other), rtol=1e-12, atol=1e-12
        )
