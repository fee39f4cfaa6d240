from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.conditioning import (
    Conditioning,
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
    Split,
)
from gpclml.errors import ArgumentError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def flat(blocks):
    return torch.cat([group.flatten() for group in blocks])


@given(n=st.integers(1, 60), folds=st.integers(2, 15), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_folds_partition_all_points_and_differ_by_at_most_one(n, folds, seed):
    blocks = KFold(folds).held_out(n, generator(seed))
    assert flat(blocks).sort().values.tolist() == list(range(n))
    sizes = [group.shape[1] for group in blocks for _ in group]
    assert len(sizes) == min(folds, n)
    assert max(sizes) - min(sizes) <= 1


@given(n=st.integers(1, 60), fraction=st.floats(0.001, 1.0), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_random_holdout_holds_out_its_share(n, fraction, seed):
    (block,) = RandomHoldout(fraction).held_out(n, generator(seed))
    assert block.shape[0] == 1
    b = block.numel()
    assert block.unique().numel() == b
    assert abs(b - fraction * n) <= 1
    assert b == n if fraction == 1 or n == 1 else 1 <= b < n


@given(n=st.integers(2, 40), k=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_orderings_condition_on_m(n, k, seed, data):
    m = data.draw(st.integers(0, n - 1))
    (blocks,) = RandomOrderings(k, m).held_out(n, generator(seed))
    assert blocks.shape == (k, n - m)
    assert all(block.unique().numel() == n - m for block in blocks)


@given(n=st.integers(2, 30), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=100, deadline=None)
def test_only_observed_rows_are_held_out_and_counted(n, seed, data):
    observed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    observed[data.draw(st.integers(0, n - 1))] = True
    rows = observed.nonzero().flatten().tolist()
    for strategy in (KFold(3), LeaveOneOut(), LastPoints(0)):
        blocks = strategy.held_out(n, generator(seed), observed)
        assert flat(blocks).sort().values.tolist() == rows
    assert set(flat(RandomHoldout(0.4).held_out(n, generator(seed), observed)).tolist()) <= set(
        rows
    )
    (last,) = LastPoints(len(rows) - 1).held_out(n, None, observed)
    assert last.tolist() == [[rows[-1]]]


def test_every_point_is_held_out_equally_often():
    n, draws = 20, 3000
    source = generator(1)
    counts = torch.zeros(n)
    for _ in range(draws):
        counts[flat(RandomHoldout(0.25).held_out(n, source))] += 1
    # Binomial(3000, 1/4): five standard deviations are 119.
    assert (counts - draws / 4).abs().max() < 119


@pytest.mark.parametrize("make", [RandomHoldout, KFold, lambda seed: RandomOrderings(2, 3, seed)])
def test_a_seed_fixes_the_draw_and_none_redraws(make):
    redrawn, source = make(seed=None), generator()
    assert not torch.equal(flat(redrawn.held_out(30, source)), flat(redrawn.held_out(30, source)))
    fixed = make(seed=7)
    assert torch.equal(flat(fixed.held_out(30, source)), flat(fixed.held_out(30)))
    again, other = make(seed=7).held_out(30), make(seed=8).held_out(30)
    assert torch.equal(flat(fixed.held_out(30)), flat(again))
    assert not torch.equal(flat(again), flat(other))


def test_last_points_and_leave_one_out_keep_data_order():
    (block,) = LastPoints(m=3).held_out(7)
    assert block.tolist() == [[3, 4, 5, 6]]
    (points,) = LeaveOneOut().held_out(3)
    assert points.tolist() == [[0], [1], [2]]


def test_chosen_blocks_may_differ_in_size():
    blocks = HeldOut([4, 1], torch.tensor([0]), [2, 3]).held_out(5)
    assert [group.tolist() for group in blocks] == [[[4, 1], [2, 3]], [[0]]]
    observed = torch.tensor([True, True, False, True, False])
    blocks = HeldOut([4, 1], [0], [2]).held_out(5, observed=observed)
    assert [group.tolist() for group in blocks] == [[[1], [0]]]
    with pytest.raises(ArgumentError, match="missing"):
        HeldOut([2, 4]).held_out(5, observed=observed)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ArgumentError, match="fraction"):
        RandomHoldout(fraction)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KFold(1), "n_splits"),
        (lambda: KFold(2.5), "n_splits"),
        (lambda: LastPoints(-1), "m: got -1"),
        (lambda: LastPoints(0.9), "m: got 0.9"),
        (lambda: RandomOrderings(0, 1), "k"),
        (lambda: RandomOrderings(1, True), "m: got True"),
        (lambda: RandomHoldout(0.1, seed=-1), "seed"),
        (lambda: HeldOut(), "none"),
        (lambda: HeldOut([]), "shape"),
        (lambda: HeldOut([[1, 2]]), "expected an integer"),
        (lambda: HeldOut([0.5]), "expected an integer"),
        (lambda: HeldOut([-1]), "-1"),
        (lambda: HeldOut([1, 1]), r"repeated indices \[1\]"),
        (lambda: HeldOut([1, 2], [2, 3]), r"repeated indices \[2\]"),
        (lambda: HeldOut([5]).held_out(5), "index 5"),
        (lambda: LastPoints(5).held_out(5), "m: got 5"),
        (lambda: RandomOrderings(1, 5).held_out(5), "m: got 5"),
        (lambda: RandomHoldout(condition_on=0), "condition_on"),
        (lambda: RandomHoldout(0.2, condition_on=9).split(10), "condition_on: got 9"),
        (lambda: KFold().held_out(0), "num_data"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


class Nearest(Conditioning):
    """Holds out the point that is nearest to the origin."""

    needs_points = True

    def split(self, num_data, generator=None, observed=None, points=None):
        rows = self.observed_rows(num_data, observed)
        return Split([rows[points[rows].norm(dim=-1).argmin()].reshape(1, 1)])


@pytest.mark.parametrize("kernel", ["matern", "deep_bottleneck"])
def test_a_strategy_of_ones_own_is_given_the_points_that_it_asks_for(kernel):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1).sin(), kernel)
    points = model.input_standardizer.transform(x)
    if kernel == "deep_bottleneck":
        points = model.covar_module.base_kernel.features(points)
    index = int(points.norm(dim=-1).argmin())
    values = [
        ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)(
            model(*model.train_inputs), model.train_targets
        )
        for conditioning in (Nearest(), HeldOut([index]))
    ]
    torch.testing.assert_close(*values)


def test_representation_names_the_arguments():
    assert repr(KFold(5, seed=3)) == "KFold(seed=3, n_splits=5)"
    assert repr(LeaveOneOut()) == "LeaveOneOut()"


@given(n=st.integers(2, 60), fraction=st.floats(0.01, 0.5), seed=st.integers(0, 99), data=st.data())
def test_a_conditioning_subset_is_drawn_among_the_others(n, fraction, seed, data):
    whole = RandomHoldout(fraction).split(n, generator(seed))
    assert whole.conditioned_on is None
    b = whole.held_out[0].numel()
    m = data.draw(st.integers(1, n - b))
    split = RandomHoldout(fraction, condition_on=m).split(n, generator(seed))
    assert torch.equal(split.held_out[0], whole.held_out[0])
    assert split.conditioned_on.unique().numel() == m
    assert not torch.isin(split.conditioned_on, split.held_out[0]).any()
