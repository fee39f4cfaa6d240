"""Which points are held out and given, how often, and partitions of points into batches."""

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
    partition_at_random,
    partition_by_class,
)
from gpclml.errors import ArgumentError, ShapeError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def flat(blocks):
    return torch.cat([group.flatten() for group in blocks])


@given(n=st.integers(1, 60), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=60)
def test_held_out_points_are_observed_and_as_many_as_asked_for(n, seed, data):
    observed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    observed[data.draw(st.integers(0, n - 1))] = True
    rows = observed.nonzero().flatten().tolist()
    folds = data.draw(st.integers(2, 15))
    for strategy in (KFold(folds), LeaveOneOut(), LastPoints(0)):
        blocks = strategy.held_out(n, generator(seed), observed)
        assert flat(blocks).sort().values.tolist() == rows
        if isinstance(strategy, KFold):
            sizes = [group.shape[1] for group in blocks for _ in group]
            assert len(sizes) == min(folds, len(rows))
            assert max(sizes) - min(sizes) <= 1
    fraction = data.draw(st.floats(0.001, 1.0))
    (block,) = RandomHoldout(fraction).held_out(n, generator(seed), observed)
    b, most = block.numel(), len(rows)
    assert block.shape == (1, b)
    assert len(set(block.flatten().tolist()) & set(rows)) == b
    assert abs(b - fraction * most) <= 1
    assert b == most if fraction == 1 or most == 1 else 1 <= b < most
    k, m = data.draw(st.integers(1, 6)), data.draw(st.integers(0, most - 1))
    (tails,) = RandomOrderings(k, m).held_out(n, generator(seed), observed)
    assert tails.shape == (k, most - m)
    assert all(set(tail.tolist()) <= set(rows) for tail in tails)
    assert all(tail.unique().numel() == most - m for tail in tails)
    (last,) = LastPoints(m).held_out(n, None, observed)
    assert last.tolist() == [rows[m:]]


@given(n=st.integers(2, 60), fraction=st.floats(0.01, 0.5), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=60)
def test_a_conditioning_subset_is_drawn_among_the_others(n, fraction, seed, data):
    whole = RandomHoldout(fraction).split(n, generator(seed))
    assert whole.conditioned_on is None
    m = data.draw(st.integers(1, n - whole.held_out[0].numel()))
    split = RandomHoldout(fraction, condition_on=m).split(n, generator(seed))
    assert torch.equal(split.held_out[0], whole.held_out[0])
    assert split.conditioned_on.unique().numel() == m
    assert not torch.isin(split.conditioned_on, split.held_out[0]).any()


def test_every_point_is_held_out_equally_often():
    n, draws = 20, 3000
    source, counts = generator(1), torch.zeros(n)
    for _ in range(draws):
        counts[flat(RandomHoldout(0.25).held_out(n, source))] += 1
    # Binomial(3000, 1/4): five standard deviations are 119.
    assert (counts - draws / 4).abs().max() < 119


@pytest.mark.parametrize("make", [RandomHoldout, KFold, lambda seed: RandomOrderings(2, 3, seed)])
def test_a_seed_fixes_the_draw_and_none_redraws(make):
    redrawn, source = make(seed=None), generator()
    assert not torch.equal(flat(redrawn.held_out(30, source)), flat(redrawn.held_out(30, source)))
    fixed = flat(make(seed=7).held_out(30))
    assert torch.equal(flat(make(seed=7).held_out(30, source)), fixed)
    assert not torch.equal(flat(make(seed=8).held_out(30)), fixed)


def test_chosen_blocks_may_differ_in_size():
    blocks = HeldOut([4, 1], torch.tensor([0]), [2, 3]).held_out(5)
    assert [group.tolist() for group in blocks] == [[[4, 1], [2, 3]], [[0]]]
    observed = torch.tensor([True, True, False, True, False])
    blocks = HeldOut([4, 1], [0], [2]).held_out(5, observed=observed)
    assert [group.tolist() for group in blocks] == [[[1], [0]]]
    with pytest.raises(ArgumentError, match="missing"):
        HeldOut([2, 4]).held_out(5, observed=observed)


class Nearest(Conditioning):
    """Holds out the point that is nearest to the origin."""

    needs_points = True

    def split(self, num_data, generator=None, observed=None, points=None):
        rows = self.observed_rows(num_data, observed)
        return Split([rows[points[rows].norm(dim=-1).argmin()].reshape(1, 1)])


@pytest.mark.parametrize("kernel", ["matern", "deep_bottleneck"])
def test_a_strategy_of_ones_own_is_given_the_points_that_it_asks_for(kernel):
    x = torch.randn(12, 2, generator=generator(), dtype=torch.float64)
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


@pytest.mark.parametrize("size", [None, 1, 3, 9])
def test_batches_hold_every_point_once_and_classes_apart(size):
    labels = torch.tensor([4, 0, 0, 4, 4, 1, 0, 0])
    batches = partition_by_class(labels, size, generator())
    assert sorted(torch.cat(batches).tolist()) == list(range(8))
    assert all(len(labels[batch].unique()) == 1 for batch in batches)
    assert size is None or all(len(batch) <= size for batch in batches)
    assert len(batches) == 3 or size in (1, 3)
    batches = partition_at_random(10, size or 4, generator())
    assert [len(batch) for batch in batches] == {4: [4, 4, 2], 9: [9, 1]}.get(
        size or 4, [size] * 10 if size == 1 else [3, 3, 3, 1]
    )
    assert sorted(torch.cat(batches).tolist()) == list(range(10))
    again = partition_at_random(10, size or 4, generator())
    assert torch.equal(torch.cat(batches), torch.cat(again))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        *((lambda f=f: RandomHoldout(f), "fraction") for f in (0, -0.1, 1.1, float("nan"))),
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
        (lambda: HeldOut(torch.ones(2)), "indices of torch.float32"),
        (lambda: HeldOut([-1]), "-1"),
        (lambda: HeldOut([1, 2], [2, 3]), r"repeated indices \[2\]"),
        (lambda: HeldOut([5]).held_out(5), "index 5"),
        (lambda: LastPoints(5).held_out(5), "m: got 5"),
        (lambda: RandomOrderings(1, 5).held_out(5), "m: got 5"),
        (lambda: RandomHoldout(condition_on=0), "condition_on"),
        (lambda: RandomHoldout(0.2, condition_on=9).split(10), "condition_on: got 9"),
        (lambda: KFold().held_out(0), "num_data"),
        (lambda: KFold().held_out(2, observed=torch.zeros(2) > 0), "no observed value"),
        (lambda: partition_at_random(3, 0), "batch_size"),
        (lambda: partition_at_random(0, 3), "num_data"),
        (lambda: partition_by_class(torch.arange(3), 0), "batch_size"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_labels_are_a_vector_and_strategies_are_shown_with_their_arguments():
    with pytest.raises(ShapeError, match="labels"):
        partition_by_class(torch.zeros(3, 2, dtype=torch.long))
    assert repr(KFold(5, seed=3)) == "KFold(seed=3, n_splits=5)"
