"""Held-out points drawn at random."""

from __future__ import annotations

import torch

from gpclml._utils.arguments import checked
from gpclml.conditioning.checks import check_below, integer, stack_by_size
from gpclml.conditioning.strategy import Conditioning, Split
from gpclml.errors import ArgumentError

__all__ = ["KFold", "RandomHoldout", "RandomOrderings"]


class RandomHoldout(Conditioning):
    """A random share of the points, one block, given all others or some of them.

    With ``condition_on`` a draw sees that many points beside the held-out ones, and costs as much
    as data of that size: over redraws it is an unbiased estimate of the mean CLML given so many
    points, whatever the number of data.

    Args:
        fraction: Share held out, in (0, 1]; 1 holds out everything and gives the log marginal
            likelihood. At least one point is held out and, below 1, at least one is
            conditioned on where there are two.
        seed: See :class:`Conditioning`.
        condition_on: Number of points conditioned on, drawn among the others; all others if
            None.

    Raises:
        ArgumentError: If ``fraction`` is outside (0, 1], ``condition_on`` is below 1, or, once
            the data are seen, fewer points than that are not held out.

    Examples:
        >>> RandomHoldout(0.2, seed=0, condition_on=3).split(10)
        Split(held_out=[tensor([[4, 1]])], conditioned_on=tensor([5, 0, 6]))
    """

    _is_random = True

    @checked
    def __init__(
        self,
        fraction: float = 0.1,
        seed: int | None = None,
        *,
        condition_on: int | None = None,
    ) -> None:
        super().__init__(seed)
        if not 0 < fraction <= 1:
            raise ArgumentError("fraction", fraction, "a share in (0, 1]")
        self.fraction = float(fraction)
        if condition_on is not None:
            condition_on = integer("condition_on", condition_on, 1)
        self.condition_on = condition_on

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        most = n if self.fraction == 1 else max(1, n - 1)
        b = min(max(1, round(self.fraction * n)), most)
        return [rows[torch.randperm(n, generator=generator)[:b]].unsqueeze(0)]

    def _split(self, rows, num_data, generator):
        m = self.condition_on
        [block] = self._blocks(rows, num_data, generator)
        if m is None:
            return Split([block])
        others = rows[~torch.isin(rows, block)]
        if m > others.numel():
            held_out, n = block.numel(), rows.numel()
            raise ArgumentError(
                "condition_on",
                m,
                f"at most {others.numel()}: {held_out} of {n} observed points are held out",
                "Condition on fewer points, or hold out a smaller fraction.",
            )
        chosen = torch.randperm(others.numel(), generator=generator)[:m]
        return Split([block], others[chosen])


class KFold(Conditioning):
    """A random partition into folds whose sizes differ by at most one.

    Args:
        folds: Number of folds, at least 2; with fewer points than folds, one point a fold.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``folds`` is below 2.
    """

    _is_random = True

    @checked
    def __init__(self, folds: int = 10, seed: int | None = None) -> None:
        super().__init__(seed)
        self.folds = integer("folds", folds, 2)

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        order = rows[torch.randperm(n, generator=generator)]
        return stack_by_size(order.tensor_split(min(self.folds, n)))


class RandomOrderings(Conditioning):
    """The tails of k random orderings: each conditions on its first m points.

    Args:
        k: Number of orderings, at least 1.
        m: Number of points conditioned on.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``k`` or ``m`` is out of range.
    """

    _is_random = True

    @checked
    def __init__(self, k: int, m: int, seed: int | None = None) -> None:
        super().__init__(seed)
        self.k = integer("k", k, 1)
        self.m = integer("m", m, 0)

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        check_below("m", self.m, n)
        tails = [rows[torch.randperm(n, generator=generator)[self.m :]] for _ in range(self.k)]
        return [torch.stack(tails)]
