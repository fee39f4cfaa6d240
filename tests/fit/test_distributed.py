"""Real processes, joined by Gloo through a file."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
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
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.conditioning import HeldOut, KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import ArgumentError, LostWorkerError, ShapeError
from gpclml.fit.distributed import (
    DistributedConditioning,
    SharedTraining,
    average_gradients,
    broadcast_parameters,
)

STRATEGIES = {
    "all others": lambda: RandomHoldout(0.2),
    "a subset": lambda: RandomHoldout(0.2, condition_on=10),
    "seeded": lambda: RandomHoldout(0.2, seed=5),
}


# --- what runs in a process


def train(rank, strategy):
    mll = objective(DistributedConditioning(STRATEGIES[strategy]()))
    with torch.no_grad():
        for parameter in mll.parameters():
            parameter.add_(rank)
    broadcast_parameters(mll)
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
    record = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = evaluate(mll)
        (-value).backward()
        value = average_gradients(mll.parameters(), value, timeout=LONG)
        record.append((value.item(), gradients(mll)))
        optimizer.step()
    return record, parameters(mll), mll.conditioning.rank, value.requires_grad


def train_with_each(rank):
    return {strategy: train(rank, strategy) for strategy in STRATEGIES}


def average_unlike_tensors(rank):
    """Of mixed dtypes; a gradient in one process alone, in none, and one that is frozen."""
    kinds = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    tensors = [torch.zeros(i + 1, dtype=kind).requires_grad_() for i, kind in enumerate(kinds)]
    both, single, one_alone, _, frozen = tensors
    frozen.requires_grad_(False)
    both.grad = torch.tensor([1.0 + rank], dtype=torch.float64)
    buffer = both.grad
    single.grad = torch.full((2,), 2.0 * rank)
    if rank == 1:
        one_alone.grad = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    value = torch.tensor([rank, 3.0], dtype=torch.float32, requires_grad=True)
    mean = average_gradients(iter(tensors), value, timeout=LONG)
    same = buffer is both.grad
    return [None if t.grad is None else t.grad.tolist() for t in tensors], mean.tolist(), same


def disagree(rank):
    """Errors of calls that do not fit, and whether gradients stayed; then one that fits."""

    def leaf(*shape, dtype=torch.float64):
        tensor = torch.zeros(shape, dtype=dtype, requires_grad=True)
        tensor.grad = torch.full_like(tensor, rank + 1.0)
        return tensor

    module = torch.nn.Linear(3, 2)
    other = torch.nn.Linear(2, 3)
    value = torch.zeros(())
    calls = {
        "shape": lambda t: average_gradients(t, timeout=LONG),
        "number": lambda t: average_gradients(t * (1 + rank), timeout=LONG),
        "dtype": lambda t: average_gradients([*t, leaf(dtype=kinds[rank])], timeout=LONG),
        "value": lambda t: average_gradients(t, [None, value][rank], timeout=LONG),
        "call": lambda t: (
            average_gradients(t, timeout=LONG)
            if rank
            else broadcast_parameters(module, timeout=LONG)
        ),
        "module": lambda t: broadcast_parameters([module, other][rank], timeout=LONG),
        "source": lambda t: broadcast_parameters(module, source=rank, timeout=LONG),
    }
    kinds = [torch.float32, torch.float64]
    told = {}
    for name, call in calls.items():
        tensor = leaf(*([(3, 2), (2, 3)][rank] if name == "shape" else (4,)))
        weight = module.weight.detach().clone()
        with caught(ShapeError) as errors:
            call([tensor])
        kept = (tensor.grad == rank + 1).all() and torch.equal(module.weight, weight)
        told[name] = (str(errors[0]) if errors else None, bool(kept))
    tensor = leaf(2)
    average_gradients([tensor], timeout=LONG)
    return told, tensor.grad.tolist()


def subgroups(rank):
    """Groups {0, 2} and {1}, and a group that this process may not belong to."""
    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    own = single if rank == 1 else pair
    conditioning = DistributedConditioning(KFold(3), group=own)
    tensor = torch.zeros((), requires_grad=True)
    tensor.grad = torch.tensor(float(rank))
    average_gradients([tensor], group=own, timeout=LONG)
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        module.bias.fill_(float(rank))
    broadcast_parameters(module, source=0 if rank == 1 else 1, group=own, timeout=LONG)
    with caught(ArgumentError) as errors:
        average_gradients([tensor], group=pair, timeout=LONG)
    place = (conditioning.rank, conditioning.num_replicas)
    return place, float(tensor.grad), float(module.bias), bool(errors)


def lose(rank, lost, how, timeout):
    """The error that was raised, whether the state stayed, and the step of it."""
    mll = objective(DistributedConditioning(RandomHoldout(0.2)))
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = evaluate(mll)
        (-value).backward()
        if rank == lost and step == STEPS - 1:
            if how == "hangs":
                threading.Event().wait()
            os._exit(3)
        before = gradients(mll), parameters(mll)
        with caught(LostWorkerError) as errors:
            # Only the last step is in a hurry: processes start at times of their own.
            seconds = timeout if step == STEPS - 1 else LONG
            average_gradients(mll.parameters(), value, timeout=seconds)
        if errors:
            after = gradients(mll), parameters(mll)
            kept = all(
                (one == other).all()
                for old, new in zip(before, after, strict=True)
                for one, other in zip(old, new, strict=True)
            )
            return errors[0], kept, step
        optimizer.step()
    return None


# --- tests


def test_two_processes_train_as_one_does_on_the_same_blocks(tmp_path):
    results = run(train_with_each, 2, tmp_path)
    for name, strategy in STRATEGIES.items():
        expected, last = in_one_process(strategy, 2)
        for rank, result in enumerate(results):
            record, found, own, attached = result[name]
            assert own == rank
            assert not attached
            for (value, gradient), (wanted, wanted_gradient) in zip(record, expected, strict=True):
                assert value == pytest.approx(wanted, rel=1e-12)
                assert_close(gradient, wanted_gradient)
            assert_close(found, last)
        # The processes have the very same parameters, not only close ones.
        for one, other in zip(results[0][name][1], results[1][name][1], strict=True):
            assert (one == other).all()


def test_the_draws_of_the_ranks_matter():
    """What the comparison above would not see: that both ranks hold out the same block."""
    both, _ = in_one_process(STRATEGIES["all others"], 2)
    one, _ = in_one_process(STRATEGIES["all others"], 1)
    assert abs(both[0][0] - one[0][0]) > 1e-3


def test_gradients_of_any_dtype_that_some_processes_lack(tmp_path):
    for found, mean, same in run(average_unlike_tensors, 2, tmp_path):
        assert found == [[1.5], [1.0, 1.0], [0.5, 1.0, 2.0], None, None]
        assert mean == [0.5, 3.0]
        assert same


@pytest.mark.parametrize("call", [(disagree,), (without_roll_call, disagree)])
def test_processes_that_disagree_get_an_error_and_go_on(tmp_path, call):
    function, *args = call
    for told, mean in run(function, 2, tmp_path, *args):
        for name, (message, kept) in told.items():
            assert message is not None, name
            assert "rank 0: " in message
            assert "rank 1: " in message
            assert kept, name
        assert "rank 0: 1 of 4 entries; rank 1: 2 of 8 entries" in told["number"][0]
        assert mean == [1.5, 1.5]


def test_groups_of_some_processes(tmp_path):
    found = run(subgroups, 3, tmp_path)
    assert found == [
        ((0, 2), 1.0, 2.0, False),
        ((0, 1), 1.0, 1.0, True),
        ((1, 2), 1.0, 2.0, False),
    ]


@pytest.mark.parametrize(("world", "lost"), [(2, 1), (2, 0), (3, 1)])
def test_a_worker_that_dies_is_named_at_once(tmp_path, world, lost):
    # Who waited for the timeout would still run when ``run`` gives up.
    results = run(lose, world, tmp_path, lost, "dies", LONG)
    assert results[lost] is None
    for error, kept, step in results[:lost] + results[lost + 1 :]:
        assert error.ranks == (lost,)
        assert f"rank {lost} " in str(error)
        assert kept
        assert step == STEPS - 1


def test_a_worker_that_hangs_is_lost_after_the_timeout(tmp_path):
    results = run(lose, 3, tmp_path, 2, "hangs", 5.0, hanging=2)
    assert results[0][0].ranks == (2,)
    assert results[1][0].ranks == ()
    for _, kept, step in results[:2]:
        assert step == STEPS - 1
        assert kept


def test_a_worker_that_dies_without_a_roll_call(tmp_path):
    results = run(without_roll_call, 3, tmp_path, lose, 1, "dies", LONG)
    for error, kept, _ in results[::2]:
        assert error.ranks == ()
        assert "not known" in str(error)
        assert kept


def test_in_one_process_nothing_changes():
    mll = objective(DistributedConditioning(KFold(3)))
    plain = objective(KFold(3))
    value, wanted = evaluate(mll), evaluate(plain)
    assert value.item() == wanted.item()
    value.backward()
    before = gradients(mll), parameters(mll)
    mean = average_gradients(mll.parameters(), value)
    assert mean.item() == value.item()
    assert not mean.requires_grad
    assert average_gradients(mll.parameters()) is None
    assert SharedTraining(mll).average_gradients(value).item() == value.item()
    broadcast_parameters(mll)
    assert_close(gradients(mll) + parameters(mll), before[0] + before[1])


def test_processes_of_a_launcher_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls = [
        lambda: DistributedConditioning(KFold(3)),
        lambda: average_gradients([torch.zeros(1, requires_grad=True)]),
        lambda: broadcast_parameters(torch.nn.Linear(1, 1)),
        lambda: SharedTraining(objective(KFold(3, seed=0))),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"WORLD_SIZE.*init_process_group"):
            call()
    DistributedConditioning(KFold(3), num_replicas=2, rank=1)


@given(
    n=st.integers(4, 30), world=st.integers(2, 4), seed=st.integers(0, 99), own=st.booleans(),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_ranks_take_successive_draws(n, world, seed, own, data):
    make = data.draw(
        st.sampled_from(
            [
                lambda seed: RandomHoldout(0.3, seed),
                lambda seed: RandomHoldout(0.3, seed, condition_on=1),
                lambda seed: KFold(3, seed),
            ]
        )
    )
    observed = torch.ones(n, dtype=torch.bool)
    observed[data.draw(st.integers(0, n - 1))] = False
    source = torch.Generator().manual_seed(seed)
    draws = [make(None).split(n, source, observed) for _ in range(world)]
    for rank, wanted in enumerate(draws):
        generator = None if own else torch.Generator().manual_seed(seed)
        strategy = DistributedConditioning(
            make(seed if own else None), num_replicas=world, rank=rank
        )
        split = strategy.split(n, generator, observed)
        for found, group in zip(split.held_out, wanted.held_out, strict=True):
            assert torch.equal(found, group)
        if wanted.conditioned_on is not None:
            assert torch.equal(split.conditioned_on, wanted.conditioned_on)
        if generator is not None:
            assert torch.equal(generator.get_state(), source.get_state())


@pytest.mark.parametrize("fixed", [LeaveOneOut(), LastPoints(2), HeldOut([0, 3])])
def test_a_strategy_that_draws_nothing_is_for_one_process(fixed):
    generator = torch.Generator().manual_seed(0)
    alone = DistributedConditioning(fixed, num_replicas=1, rank=0)
    assert torch.equal(alone.held_out(5, generator)[0], fixed.held_out(5)[0])
    with pytest.raises(ArgumentError, match=f"conditioning: got {type(fixed).__name__}"):
        DistributedConditioning(fixed, num_replicas=2, rank=0).split(5, generator)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DistributedConditioning(KFold(), rank=1), "rank: got this one alone"),
        (lambda: DistributedConditioning(KFold(), num_replicas=2), "num_replicas: got this"),
        (lambda: DistributedConditioning(KFold(), num_replicas=0, rank=0), "num_replicas: got 0"),
        (lambda: DistributedConditioning(KFold(), num_replicas=2, rank=2), "rank: got 2"),
        (lambda: DistributedConditioning(KFold(), num_replicas=2, rank=-1), "rank: got -1"),
        (lambda: DistributedConditioning(KFold(), num_replicas=2, rank=0).split(9), "generator"),
        (lambda: average_gradients([]), "parameters: got none"),
        (lambda: average_gradients([torch.zeros(1)]), "parameters: got none"),
        (lambda: average_gradients([torch.zeros(1).requires_grad_()], timeout=0), "timeout: got 0"),
        (lambda: broadcast_parameters(torch.nn.Linear(1, 1), timeout=-1), "timeout: got -1"),
        (lambda: broadcast_parameters(torch.nn.Linear(1, 1), source=1), "source: got 1"),
        (lambda: SharedTraining(torch.nn.Linear(1, 1)), r"data: got None.*data=\(train_x"),
        (lambda: SharedTraining(objective(KFold(3)), every=0), "every: got 0"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_a_lost_worker_is_named_across_process_borders():
    error = pickle.loads(pickle.dumps(LostWorkerError("lost", [1, 2])))
    assert (str(error), error.ranks) == ("lost", (1, 2))
