"""Partitions hold every point once, and classes apart."""

from __future__ import annotations

import pytest
import torch

from gpclml.conditioning import partition_at_random, partition_by_class
from gpclml.errors import ArgumentError, ShapeError


def source(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("n", "size", "sizes"), [(10, 4, [4, 4, 2]), (3, 5, [3]), (4, 2, [2, 2])])
def test_random_batches(n, size, sizes):
    batches = partition_at_random(n, size, source())
    assert [len(batch) for batch in batches] == sizes
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    again = partition_at_random(n, size, source())
    assert torch.equal(torch.cat(batches), torch.cat(again))
    assert not torch.equal(torch.cat(partition_at_random(99, 9, source(1))), torch.arange(99))


@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_batches_of_a_class(size):
    labels = torch.tensor([4, 0, 0, 4, 4, 1, 0, 0])
    batches = partition_by_class(labels, size, source())
    assert sorted(torch.cat(batches).tolist()) == list(range(8))
    for batch in batches:
        assert len(labels[batch].unique()) == 1
        assert size is None or len(batch) <= size
    if size is None:
        assert len(batches) == 3


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="batch_size"):
        partition_at_random(3, 0)
    with pytest.raises(ArgumentError, match="num_data"):
        partition_at_random(0, 3)
    with pytest.raises(ArgumentError, match="batch_size"):
        partition_by_class(torch.arange(3), 0)
    with pytest.raises(ShapeError, match="labels"):
        partition_by_class(torch.zeros(3, 2, dtype=torch.long))
