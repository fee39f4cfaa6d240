"""Rows to train on and rows to test on, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets.regression_data import RegressionData
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["TrainTestSplit", "split", "subset"]


@dataclass(frozen=True, eq=False)
class TrainTestSplit:
    """Row numbers of a data set, from 0, parted in two.

    Attributes:
        train: Shape ``(num_train,)``, int64.
        test: Shape ``(num_test,)``, int64.
    """

    train: Tensor
    test: Tensor


@checked
def split(
    data_or_n: RegressionData | int, seed: int | Generator, test_fraction: float = 0.1
) -> TrainTestSplit:
    """A random split; by default the usual 90% to train on and 10% to test on.

    Args:
        data_or_n: The data set, or its number of rows.
        seed: Seed or generator of the permutation; one seed gives one split.
        test_fraction: Share of the rows to test on, in (0, 1); their number is rounded.

    Raises:
        ArgumentError: ``test_fraction`` is outside (0, 1), or leaves no row on one side.
    """
    n = data_or_n.num_data if isinstance(data_or_n, RegressionData) else data_or_n
    if not 0.0 < test_fraction < 1.0:
        raise ArgumentError("test_fraction", test_fraction, "a number between 0 and 1")
    num_test = round(n * test_fraction)
    if not 0 < num_test < n:
        raise ArgumentError(
            "test_fraction",
            f"{test_fraction}, which tests on {num_test} of {n} rows",
            "at least one row to train on and one to test on",
            "Take another fraction or more rows.",
        )
    order = _permutation(n, seed)
    return TrainTestSplit(train=order[num_test:], test=order[:num_test])


@checked(train="integer (N,)")
def subset(train: Tensor, n: int, seed: int | Generator) -> Tensor:
    """Random rows out of the training rows, without replacement: a small training set.

    One seed gives nested subsets: that of 100 rows begins with that of 50.

    Args:
        train: Training row numbers, shape ``(num_train,)``.
        n: How many to take.
        seed: Seed or generator of the permutation.

    Returns:
        Row numbers, shape ``(n,)``, on the device of ``train``.

    Raises:
        ShapeError: ``train`` has not one dimension.
        ArgumentError: ``n`` is less than one or more than there are.
    """
    if train.ndim != 1:
        raise ShapeError("train", tuple(train.shape), "(num_train,)")
    if not 1 <= n <= len(train):
        raise ArgumentError(
            "n", n, f"1 to {len(train)}, the number of training rows", "Ask for fewer rows."
        )
    return train[_permutation(len(train), seed)[:n].to(train.device)]


def _permutation(n: int, seed: int | Generator) -> Tensor:
    if isinstance(seed, Generator):
        return torch.randperm(n, generator=seed, device=seed.device).cpu()
    return torch.randperm(n, generator=Generator().manual_seed(seed))
