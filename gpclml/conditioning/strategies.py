"""Conditioning strategies: which training points are held out at each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked, seeded
from gpclml.errors import ArgumentError, UnsupportedError

Indices = Sequence[int] | Tensor


@dataclass(frozen=True)
class Split:
    """Held-out blocks and the rows that they are conditioned on, as indices on the CPU.

    Attributes:
        held_out: Row indices, one tensor for each block size: ``k_i`` blocks of ``b_i`` rows,
            ``(k_i, b_i)``.
        conditioned_on: Row indices, ``(m,)``; None where each block is conditioned on every row
            outside it; ``(k, m)`` for rows of its own for each of k held-out blocks, which are then
            of one size, and -1 for no row.
    """

    held_out: list[Tensor]
    conditioned_on: Tensor | None = None

    @property
    def has_neighbors(self) -> bool:
        """Whether each held-out block is conditioned on rows of its own."""
        return self.conditioned_on is not None and self.conditioned_on.ndim == 2

    def restricted(self) -> tuple[Tensor, Split]:
        """The rows that take part, ``(r,)``, and the split of these rows alone, from 0.

        For held-out blocks that are each conditioned on rows of their own.
        """
        given, blocks = self.conditioned_on, self.held_out[0]
        assert given is not None
        rows, places = torch.cat([given, blocks], -1).clamp_min(0).unique(return_inverse=True)
        places, blocks = places.tensor_split((given.shape[-1],), -1)
        return rows, Split([blocks], torch.where(given < 0, -1, places))


class Conditioning(ABC):
    """Base class of strategies, which divide data into held-out points and those conditioned on.

    A strategy of your own has a method :meth:`split`.

    Args:
        seed: With a seed every call gives the same blocks; without one, random strategies
            draw new blocks at each call from the caller's generator.

    Attributes:
        is_random: Whether blocks are drawn at random.
        needs_points: Whether :meth:`split` is to be given the points.

    Examples:
        >>> from gpclml.conditioning import Conditioning, Split
        >>> class EveryThird(Conditioning):
        ...     def split(self, num_data, generator=None, observed=None, points=None):
        ...         rows = self.observed_rows(num_data, observed)
        ...         return Split([rows[::3].unsqueeze(0)])
        ...
        >>> EveryThird().split(7)
        Split(held_out=[tensor([[0, 3, 6]])], conditioned_on=None)
    """

    is_random = False
    needs_points = False

    def __init__(self, seed: int | None = None) -> None:
        check_counts(0, seed=seed)
        self.seed: int | None = None if seed is None else int(seed)

    @property
    def redraws(self) -> bool:
        """Whether each call holds out other points: a random strategy without a seed."""
        return self.is_random and self.seed is None

    @abstractmethod
    def split(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
        points: Tensor | None = None,  # shape: (*batch, num_data, d)
    ) -> Split:
        """The held-out blocks, blocks of one size stacked, and what they are conditioned on.

        Args:
            num_data: Number of data rows, at least 1.
            generator: CPU generator of random strategies without a seed, which it advances.
            observed: Mask of the rows that have a target, boolean, ``(num_data,)``; the others
                are neither held out nor counted. All rows if None.
            points: Inputs of the model, or features where it has a deep kernel, on the data's
                device, ``(*batch, num_data, d)``; None unless ``needs_points``.

        Raises:
            ArgumentError: If there are no rows, or the strategy does not fit their number.
        """

    def held_out(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
    ) -> list[Tensor]:
        """The held-out blocks of :meth:`split`, which takes the same arguments.

        Returns:
            Row indices on the CPU, one tensor for each block size: ``k_i`` blocks of ``b_i`` rows,
            ``(k_i, b_i)``.
        """
        return self.split(num_data, generator, observed).held_out

    @checked(late=True, observed="boolean (n,)")
    def observed_rows(self, num_data: int, observed: Tensor | None) -> Tensor:
        """Indices of the rows that have a target, in data order.

        Args:
            num_data: Number of data rows.
            observed: As :meth:`split` takes it.

        Raises:
            ArgumentError: If there are none.
        """
        if type(num_data) is not int or num_data < 1:  # cheap, since each step comes here
            check_counts(num_data=num_data)
        # On the CPU, so that a seed gives the same draw on every device.
        rows = torch.arange(int(num_data))
        if observed is not None:
            rows = rows[observed.cpu()]
        if rows.numel() == 0:
            raise ArgumentError("target", "no observed value", "at least one")
        return rows

    def generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """The caller's generator, or a new one of the strategy's own seed."""
        # A seed begins anew at each call, so that all calls give the same blocks.
        if not isinstance(generator, torch.Generator | None):
            raise UnsupportedError("generator", type(generator).__name__, "Generator or None")
        return generator if self.seed is None else seeded(self.seed)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({arguments})"


class RandomHoldout(Conditioning):
    """Holds out a random share of the points as one block, given all others or some of them.

    With ``condition_on`` only that many points are evaluated beside the held-out ones, so that the
    cost does not grow with the data. Over redraws the score is an unbiased estimate of the mean
    CLML given so many points.

    Args:
        fraction: Share held out, in (0, 1]; 1 holds out everything and gives the log marginal
            likelihood. At least one point is held out, and below 1 at least one is conditioned on
            if there are two or more.
        seed: See :class:`Conditioning`.
        condition_on: Number of points conditioned on, drawn among the others; all others if
            None.

    Raises:
        ArgumentError: If ``fraction`` is outside (0, 1], ``condition_on`` is below 1, or, when
            blocks are drawn, too few points are left to condition on.

    Examples:
        >>> from gpclml import RandomHoldout
        >>> RandomHoldout(0.2, seed=0, condition_on=3).split(10)
        Split(held_out=[tensor([[4, 1]])], conditioned_on=tensor([5, 0, 6]))
    """

    is_random = True

    @checked
    def __init__(
        self, fraction: float = 0.1, seed: int | None = None, *, condition_on: int | None = None
    ) -> None:
        super().__init__(seed)
        if not 0 < fraction <= 1:
            raise ArgumentError("fraction", fraction, "a share in (0, 1]")
        check_counts(condition_on=condition_on)
        self.fraction: float = float(fraction)
        self.condition_on: int | None = None if condition_on is None else int(condition_on)

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        rows, generator = self.observed_rows(num_data, observed), self.generator(generator)
        n, m = len(rows), self.condition_on
        # A share below one leaves a point to condition on, where there are two.
        most = n if self.fraction == 1 else max(1, n - 1)
        b = min(max(1, round(self.fraction * n)), most)
        block = rows[torch.randperm(n, generator=generator)[:b]].unsqueeze(0)
        if m is None:
            return Split([block])
        # Drawn after the block: a seed holds out the same points with and without a subset.
        others = rows[~torch.isin(rows, block)]
        if m > len(others):
            expected = f"at most {len(others)}: {b} of {n} observed points are held out"
            suggestion = "Condition on fewer points, or hold out a smaller fraction."
            raise ArgumentError("condition_on", m, expected, suggestion)
        return Split([block], others[torch.randperm(len(others), generator=generator)[:m]])


class KFold(Conditioning):
    """Holds out each fold of a random partition, given the others; sizes differ by at most one.

    Args:
        n_splits: Number of folds, at least 2; with fewer points than folds, each point is a fold.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``n_splits`` is below 2.

    Examples:
        >>> from gpclml import KFold
        >>> KFold(3, seed=0).held_out(6)[0].tolist()
        [[2, 5], [3, 0], [1, 4]]
    """

    is_random = True

    @checked
    def __init__(self, n_splits: int = 10, seed: int | None = None) -> None:
        super().__init__(seed)
        check_counts(2, n_splits=n_splits)
        self.n_splits: int = int(n_splits)

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        rows = self.observed_rows(num_data, observed)
        # Sizes of a tensor_split differ by at most one.
        order = rows[torch.randperm(len(rows), generator=self.generator(generator))]
        return Split(stack_by_size(order.tensor_split(min(self.n_splits, len(rows)))))


class RandomOrderings(Conditioning):
    """Holds out the tails of k random orderings, each conditioned on its first m points.

    Args:
        k: Number of orderings, at least 1.
        m: Number of points conditioned on.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``k`` or ``m`` is out of range.

    Examples:
        >>> from gpclml import RandomOrderings
        >>> RandomOrderings(k=2, m=3, seed=0).held_out(5)[0].tolist()
        [[3, 2], [1, 2]]
    """

    is_random = True

    @checked
    def __init__(self, k: int, m: int, seed: int | None = None) -> None:
        super().__init__(seed)
        check_counts(k=k)
        check_counts(0, m=m)
        self.k: int = int(k)
        self.m: int = int(m)

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        rows, generator = self.observed_rows(num_data, observed), self.generator(generator)
        if self.m >= len(rows):
            raise _too_many(self.m, len(rows))
        orders = [torch.randperm(len(rows), generator=generator) for _ in range(self.k)]
        return Split([rows[torch.stack(orders)[:, self.m :]]])


class LeaveOneOut(Conditioning):
    """Holds out every point by itself, given all others.

    (Rasmussen and Williams 2006, Section 5.4.2)

    Examples:
        >>> from gpclml import LeaveOneOut
        >>> LeaveOneOut().held_out(3)[0].tolist()
        [[0], [1], [2]]
    """

    def __init__(self) -> None:
        super().__init__()

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        return Split([self.observed_rows(num_data, observed).unsqueeze(-1)])


class LastPoints(Conditioning):
    """Holds out all points after the first m, in data order.

    Args:
        m: Number of points conditioned on; 0 gives the log marginal likelihood.

    Raises:
        ArgumentError: If ``m`` is negative, or, when blocks are drawn, not below the number of
            points.

    Examples:
        >>> from gpclml import LastPoints
        >>> LastPoints(m=3).held_out(5)
        [tensor([[3, 4]])]
    """

    @checked
    def __init__(self, m: int) -> None:
        super().__init__()
        check_counts(0, m=m)
        self.m: int = int(m)

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        rows = self.observed_rows(num_data, observed)
        if self.m >= len(rows):
            raise _too_many(self.m, len(rows))
        return Split([rows[None, self.m :]])


class HeldOut(Conditioning):
    """Holds out blocks that the caller chooses: a validation set, or one block for each group.

    Args:
        *blocks: Row indices, one sequence or one-dimensional tensor for each block; blocks are
            disjoint and may differ in size.

    Raises:
        ArgumentError: If there is no block, one is empty, or indices are negative, repeated, shared
            by blocks, or, when blocks are drawn, beyond the data.

    Examples:
        >>> from gpclml import HeldOut
        >>> HeldOut([0, 1, 2]).held_out(5)
        [tensor([[0, 1, 2]])]
    """

    @checked
    def __init__(self, *blocks: Indices) -> None:
        super().__init__()
        if not blocks:
            raise ArgumentError("blocks", "none", "at least one sequence of row indices")
        self.blocks: tuple[Tensor, ...] = tuple(_row_indices(block) for block in blocks)
        values, counts = torch.cat(self.blocks).unique(return_counts=True)
        if (counts > 1).any():
            repeated = f"repeated indices {values[counts > 1].tolist()[:5]}"
            raise ArgumentError("blocks", repeated, "each row in one block, once")

    def split(self, num_data, generator=None, observed=None, points=None):
        """See :class:`Conditioning`."""
        rows = self.observed_rows(num_data, observed)
        highest = max(int(block.max()) for block in self.blocks)
        if highest >= num_data:
            raise ArgumentError("blocks", f"index {highest}", f"rows from 0 to {num_data - 1}")
        # Rows without a target drop out, and blocks that are empty then.
        kept = [block[torch.isin(block, rows)] for block in self.blocks]
        if not any(map(len, kept)):
            got = "rows whose targets are all missing"
            raise ArgumentError("blocks", got, "at least one observed target")
        return Split(stack_by_size([block for block in kept if len(block)]))


def _row_indices(block: Indices) -> Tensor:
    indices = torch.as_tensor(block).cpu()
    if indices.ndim != 1 or len(indices) == 0:
        got = f"indices of shape {tuple(indices.shape)}"
    elif indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        got = f"indices of {indices.dtype}"
    elif int(indices.min()) < 0:
        got = f"index {int(indices.min())}"
    else:
        return indices.long()
    expected = "a one-dimensional sequence of non-negative integers, not empty"
    raise ArgumentError("blocks", got, expected)


def stack_by_size(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Blocks of indices, ``(b_i,)``, as one tensor for each size, ``(k_i, b_i)``, as sizes come."""
    # Blocks of one size are scored by one batched factorization.
    sizes = dict.fromkeys(map(len, blocks))
    return [torch.stack([block for block in blocks if len(block) == size]) for size in sizes]


def _too_many(m: int, n: int) -> ArgumentError:
    suggestion = "m is the number of points conditioned on; at least one must remain."
    return ArgumentError("m", m, f"an integer below the {n} observed points", suggestion)
