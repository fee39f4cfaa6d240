"""Processes of one training start alike and refuse to go on where they disagree."""

from __future__ import annotations

import functools

import numpy
import pytest
import torch
from distributed_processes import (
    LONG,
    STEPS,
    assert_close,
    caught,
    evaluate,
    gradients,
    in_one_process,
    objective,
    parameters,
    run,
    without_roll_call,
)

from gpclml.conditioning import RandomHoldout
from gpclml.errors import ArgumentError
from gpclml.fit.distributed import DistributedConditioning, SharedTraining, average_gradients


def train_shared(rank):
    mll = objective(DistributedConditioning(RandomHoldout(0.2)))
    with torch.no_grad():
        for parameter in mll.parameters():
            parameter.add_(rank)
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
    training = SharedTraining(mll, optimizer, every=2, timeout=LONG)
    values = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = evaluate(mll)
        (-value).backward()
        values.append(training.average_gradients(value).item())
        optimizer.step()
    return values, parameters(mll)


def other_targets(mll, optimizer):
    mll.model.train_targets[3] += 1e-9


def other_order(mll, optimizer):
    turned = torch.arange(29, -1, -1)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    mll.model.set_train_data(x[turned], y[turned], strict=True)


def other_inputs(mll, optimizer):
    mll.model.train_inputs[0][0, 0] += 1e-9


def other_draws(mll, optimizer):
    mll._generator.manual_seed(1)


def other_strategy(mll, optimizer):
    mll.conditioning = DistributedConditioning(RandomHoldout(0.3))


def other_parameters(mll, optimizer):
    with torch.no_grad():
        mll.likelihood.noise_covar.raw_noise.add_(1e-9)


def other_rate(mll, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2


def other_solver(mll, optimizer):
    mll.solver = "cholesky"


def other_bound(mll, optimizer):
    mll.likelihood.noise_covar.raw_noise_constraint.lower_bound.fill_(1e-3)


DISAGREEMENTS = {
    other_targets: "targets",
    other_order: "order",
    other_inputs: "order",
    other_draws: "conditioning",
    other_strategy: "conditioning",
    other_parameters: "parameters",
    other_rate: "settings",
    other_solver: "settings",
}


def disagree_in_training(rank, last):
    """What each disagreement ends with, where it is there at the first step or comes at a later."""
    found = {}
    for change in DISAGREEMENTS:
        for late in (False, True):
            mll = objective(DistributedConditioning(RandomHoldout(0.2)))
            optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
            act = functools.partial(change, mll, optimizer) if rank == last else lambda: None
            training = SharedTraining(mll, optimizer, every=3, timeout=LONG)
            found[change.__name__, late] = steps_until_refused(mll, optimizer, training, act, late)
    return found


def steps_until_refused(mll, optimizer, training, act, late):
    for step in range(7):
        if step == (1 if late else 0):
            act()
        optimizer.zero_grad()
        value = evaluate(mll)
        (-value).backward()
        before = gradients(mll)
        with caught(ArgumentError) as errors:
            training.average_gradients(value)
        if errors:
            kept = all(map(numpy.array_equal, before, gradients(mll)))
            return errors[0].argument, str(errors[0]), kept, step
        optimizer.step()
    return None


def disagree_at_the_start(rank):
    """Settings, buffers and steps that differ from the beginning."""
    found = {}
    for name in ("settings", "every", "buffers", "data", "plain"):
        mll = objective(DistributedConditioning(RandomHoldout(0.2)))
        optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
        options: dict = {"settings": {"epochs": 5 + rank}} if name == "settings" else {}
        options |= {"every": 2 + rank} if name == "every" else {}
        options |= {"data": [torch.full((3,), float(rank))]} if name == "data" else {}
        if name == "buffers" and rank:
            other_bound(mll, optimizer)
        training = SharedTraining(mll, optimizer, timeout=LONG, **options)
        value = evaluate(mll)
        (-value).backward()
        with caught(ArgumentError) as errors:
            if name == "plain" and rank:
                average_gradients(mll.parameters(), value, timeout=LONG)
            else:
                training.average_gradients(value)
        found[name] = errors[0].argument
    return found


def count_digests(rank):
    """How often what was digested in seven steps, compared at every third."""
    from gpclml.fit import distributed

    kinds, digest = [], distributed.digest

    def counted(value):
        kinds.append(sum(entry.numel() for entry in value if isinstance(entry, torch.Tensor)))
        return digest(value)

    distributed.digest = counted
    mll = objective(DistributedConditioning(RandomHoldout(0.2)))
    optimizer = torch.optim.SGD(mll.parameters(), lr=0.1)
    training = SharedTraining(mll, optimizer, every=3, timeout=LONG)
    counts = []
    for _ in range(7):
        optimizer.zero_grad()
        (-evaluate(mll)).backward()
        kinds.clear()
        training.average_gradients()
        counts.append(len(kinds))
        optimizer.step()
    return counts


# --- tests


def test_a_shared_training_is_that_of_one_process(tmp_path):
    expected, last = in_one_process(lambda: RandomHoldout(0.2), 2)
    for values, found in run(train_shared, 2, tmp_path):
        assert values == pytest.approx([value for value, _ in expected], rel=1e-12)
        assert_close(found, last)


@pytest.mark.parametrize(
    ("world", "last", "call"),
    [
        (2, 1, (disagree_in_training,)),
        (2, 0, (disagree_in_training,)),
        (3, 2, (disagree_in_training,)),
        (2, 1, (without_roll_call, disagree_in_training)),
    ],
)
def test_every_process_refuses_to_go_on_where_one_disagrees(tmp_path, world, last, call):
    function, *args = call
    for found in run(function, world, tmp_path, *args, last):
        for change, kind in DISAGREEMENTS.items():
            for late in (False, True):
                argument, message, kept, step = found[change.__name__, late]
                # Another rate has moved the parameters apart until it is seen.
                both = late and change is other_rate
                expected = "parameters, settings" if both else kind
                assert (argument, step, kept) == (expected, 3 if late else 0, True), change
                # With rank 0 alone on its side all others are unlike it.
                unlike = ", ".join(str(rank) for rank in range(1, world) if last in (0, rank))
                assert f"other {kind} in rank {unlike} than in rank 0" in message


def test_what_differs_from_the_start_is_refused(tmp_path):
    for found in run(disagree_at_the_start, 2, tmp_path):
        assert found == {
            "settings": "settings", "every": "settings", "buffers": "settings",
            "data": "targets", "plain": "step",
        }  # fmt: skip


def test_steps_between_comparisons_digest_nothing(tmp_path):
    for counts in run(count_digests, 2, tmp_path):
        # Targets, order, conditioning, parameters and settings; data that stay once.
        assert counts == [5, 0, 0, 3, 0, 0, 3]
