"""Nearest neighbours: who they are, and how batches are drawn."""

from __future__ import annotations

import copy

import pytest
import torch

from gpclml.conditioning.neighbours import NearestNeighbors, NeighborIndex
from gpclml.errors import ArgumentError


def brute_force(points: torch.Tensor, row: int, k: int, allowed: torch.Tensor) -> set[int]:
    distances = (points - points[row]).square().sum(-1)
    distances[~allowed] = torch.inf
    distances[row] = torch.inf
    nearest = distances.argsort()[:k]
    return {int(i) for i in nearest if distances[i] < torch.inf}


@pytest.mark.parametrize("d", [2, 20])  # by a tree, and by distances to all points
@pytest.mark.parametrize("order", ["all", "previous"])
def test_neighbours_are_the_nearest_that_may_be(d, order):
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(300, d, generator=generator, dtype=torch.float64)
    observed = torch.rand(300, generator=generator) < 0.8
    strategy = NearestNeighbors(k=7, batch=None, order=order, seed=3)
    split = strategy.split(300, observed=observed, points=points)
    rows = observed.nonzero().squeeze(-1)
    assert torch.equal(split.held_out[0].squeeze(-1), rows)
    positions = torch.full((300,), -1)
    positions[rows] = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    for row, given in zip(rows.tolist(), split.conditioned_on.tolist(), strict=True):
        allowed = observed if order == "all" else observed & (positions < positions[row])
        assert set(given) - {-1} == brute_force(points, row, 7, allowed)


def test_every_point_is_drawn_as_often_as_any_other():
    points = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    generator, counts = torch.Generator().manual_seed(1), torch.zeros(40)
    strategy = NearestNeighbors(k=3, batch=20, refresh=1000)
    for call in range(500):
        split = strategy.split(40, generator, points=points if call == 0 else None)
        counts += torch.bincount(split.held_out[0].flatten(), minlength=40)
    # Of 10,000 draws each point has 250 with a deviation of 15.6.
    assert (counts - 250).abs().max() < 5 * 15.6


def test_neighbours_are_looked_up_anew_after_so_many_calls():
    near, far = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.0], [3.0], [1.0]])
    strategy = NearestNeighbors(k=1, batch=None, refresh=2)
    asked, first = [], []
    for points in (near, far, far):
        asked.append(strategy.needs_points)
        split = strategy.split(3, points=points if strategy.needs_points else None)
        first.append(int(split.conditioned_on[0, 0]))
    assert asked == [True, False, True]
    assert first == [1, 1, 2]


def test_neighbours_stay_where_the_metric_moved_by_a_factor_or_little():
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(300, 3, generator=generator, dtype=torch.float64)
    strategy, asked = NearestNeighbors(k=5, batch=20, refresh=1, seed=0), []

    def metric(factors: list[float]):
        def points_at(rows):
            asked.append(300 if rows is None else len(rows))
            return (points if rows is None else points[rows]) * torch.tensor(factors)

        return points_at

    for factors in ([1.0, 1.0, 1.0], [7.0, 7.0, 7.0], [1.0, 1.0, 1.05], [1.0, 1.0, 9.0]):
        strategy.split(300, points=metric(factors))
    assert asked == [300, 120, 120, 120, 300]  # 20 points and their neighbours decide
    reference = NearestNeighbors(k=5, batch=None).split(300, points=metric([1.0, 1.0, 9.0])(None))
    rows = strategy.split(300)
    expected = reference.conditioned_on[rows.held_out[0].squeeze(-1)]
    assert torch.equal(rows.conditioned_on, expected)


@pytest.mark.parametrize("k", [1, 40, 700])
@pytest.mark.parametrize("d", [2, 12])
def test_an_index_agrees_with_all_distances(d, k):
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(5000, d, generator=generator, dtype=torch.float64)
    index, asked = NeighborIndex(points), points[:150]
    distances = torch.cdist(asked, points)
    assert torch.equal(index.nearest(asked, k), distances.topk(k, largest=False).indices)
    before = torch.randint(5000, (150,), generator=generator)
    distances[torch.arange(5000) >= before.unsqueeze(-1)] = torch.inf
    lengths, expected = distances.topk(k, largest=False)
    near = index.nearest(asked, k, before)
    assert torch.equal(near, expected.where(lengths < torch.inf, -1))


def test_a_copy_has_its_own_neighbours_and_a_generator_draws_batches():
    points = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
    strategy = NearestNeighbors(k=2, batch=5, seed=4)
    first, again = (strategy.split(30, points=points) for _ in range(2))
    assert torch.equal(first.held_out[0], again.held_out[0])
    generator = torch.Generator().manual_seed(0)
    drawn = [strategy.split(30, generator, points=points).held_out[0] for _ in range(9)]
    assert len(torch.cat(drawn).unique()) > 15  # a seed does not hide the other points from a fit
    copied = copy.deepcopy(strategy)
    assert copied.needs_points
    assert repr(copied) == repr(strategy)


@pytest.mark.parametrize("order", ["all", "previous"])
def test_copies_and_few_points(order):
    points = torch.zeros(50, 2)
    split = NearestNeighbors(k=3, batch=None, order=order).split(50, points=points)
    given, held_out = split.conditioned_on, split.held_out[0]
    assert given.shape == (50, 3)
    assert not (given == held_out).any()
    fewer = NearestNeighbors(k=90, batch=None, order=order).split(50, points=points)
    assert fewer.conditioned_on.shape == (50, 49)
    alone = NearestNeighbors(batch=None, order=order).split(1, points=points[:1])
    assert alone.conditioned_on.shape == (1, 0)


def test_a_joint_block_is_a_point_and_its_neighbours():
    points = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    points[20:30] = points[0]
    given, joint = (
        NearestNeighbors(k=6, batch=None, order=order).split(40, points=points)
        for order in ("all", "joint")
    )
    assert torch.equal(joint.held_out[0], torch.cat([given.held_out[0], given.conditioned_on], -1))
    assert joint.conditioned_on.shape == (40, 0)
    rows, local = joint.restricted()
    assert torch.equal(rows[local.held_out[0]], joint.held_out[0])
    alone = NearestNeighbors(batch=None, order="joint").split(1, points=points[:1])
    assert alone.held_out[0].tolist() == [[0]]


def test_points_of_a_batch_and_none_are_refused():
    with pytest.raises(ArgumentError, match="neighbours are those of one model"):
        NearestNeighbors().split(4, points=torch.rand(2, 4, 1))
    with pytest.raises(ArgumentError, match="points"):
        NearestNeighbors().split(4)


def test_other_points_are_near_theirs():
    index = NeighborIndex(torch.tensor([[0.0], [1.0], [5.0]]))
    assert index.nearest(torch.tensor([[1.1], [9.0]]), 2).tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize("d", [2, 20])
def test_points_far_from_the_origin_have_the_same_neighbours(d):
    points = torch.rand(200, d, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    near, far, single = (
        NeighborIndex(values).nearest(values, 6)
        for values in (points, points.double() + 4096.0, points + 4096.0)
    )
    assert torch.equal(near, far)
    # In float32 points keep four digits there, in which some distances are equal.
    assert (single == near).float().mean() > 0.9
