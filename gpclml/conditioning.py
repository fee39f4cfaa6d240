"""Which points are held out, and hence which points each score is conditioned on.

A strategy is asked for blocks of row indices; each block is scored jointly given every row
outside it. Indices live on the CPU, so that a seed means the same draw on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = [
    "Conditioning",
    "HeldOut",
    "KFold",
    "LastPoints",
    "LeaveOneOut",
    "RandomHoldout",
    "RandomOrderings",
]

Indices = Sequence[int] | Tensor


class Conditioning(ABC):
    """A way of dividing data into held-out points and the points conditioned on.

    Args:
        seed: With a seed every call gives the same blocks; without one, random strategies
            draw afresh from the generator of the caller.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = None if seed is None else _integer("seed", seed, 0)

    def held_out(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
    ) -> list[Tensor]:
        """The held-out blocks, blocks of one size stacked.

        Args:
            num_data: Number of data rows, at least 1.
            generator: CPU generator for random strategies without a seed; theirs to advance.
            observed: Which rows have a target at all, boolean, ``(num_data,)``; the others are
                neither held out nor counted. All rows if None.

        Returns:
            Row indices on the CPU, one tensor a block size: ``k_i`` blocks of ``b_i`` rows,
            ``(k_i, b_i)``.

        Raises:
            ArgumentError: If there are no rows, or the strategy does not fit their number.
        """
        rows = torch.arange(_integer("num_data", num_data, 1))
        if observed is not None:
            rows = rows[observed.cpu()]
        if rows.numel() == 0:
            raise ArgumentError("target", "no observed value", "at least one")
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
        return self._blocks(rows, num_data, generator)

    @abstractmethod
    def _blocks(
        self, rows: Tensor, num_data: int, generator: torch.Generator | None
    ) -> list[Tensor]:
        """Blocks among the observed ``rows`` (sorted indices) of ``num_data``."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({arguments})"


class RandomHoldout(Conditioning):
    """A random share of the points, one block.

    Args:
        fraction: Share held out, in (0, 1]; 1 holds out everything and gives the log marginal
            likelihood. At least one point is held out and, below 1, at least one is
            conditioned on where there are two.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``fraction`` is outside (0, 1].
    """

    def __init__(self, fraction: float = 0.1, seed: int | None = None) -> None:
        super().__init__(seed)
        if not 0 < fraction <= 1:
            raise ArgumentError("fraction", fraction, "a share in (0, 1]")
        self.fraction = float(fraction)

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        most = n if self.fraction == 1 else max(1, n - 1)
        b = min(max(1, round(self.fraction * n)), most)
        return [rows[torch.randperm(n, generator=generator)[:b]].unsqueeze(0)]


class KFold(Conditioning):
    """A random partition into folds whose sizes differ by at most one.

    Args:
        folds: Number of folds, at least 2; with fewer points than folds, one point a fold.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``folds`` is below 2.
    """

    def __init__(self, folds: int = 10, seed: int | None = None) -> None:
        super().__init__(seed)
        self.folds = _integer("folds", folds, 2)

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        order = rows[torch.randperm(n, generator=generator)]
        return _stack_by_size(order.tensor_split(min(self.folds, n)))


class LeaveOneOut(Conditioning):
    """Every point on its own, given all others (Rasmussen and Williams 2006, Section 5.4.2)."""

    def __init__(self) -> None:
        super().__init__()

    def _blocks(self, rows, num_data, generator):
        return [rows.unsqueeze(-1)]


class LastPoints(Conditioning):
    """The points after the first m, in data order: what follows given what came before.

    Args:
        m: Number of points conditioned on, the first ones; 0 gives the log marginal
            likelihood.

    Raises:
        ArgumentError: If ``m`` is negative, or, once the data are seen, not below their number.
    """

    def __init__(self, m: int) -> None:
        super().__init__()
        self.m = _integer("m", m, 0)

    def _blocks(self, rows, num_data, generator):
        _check_below("m", self.m, rows.numel())
        return [rows[self.m :].unsqueeze(0)]


class RandomOrderings(Conditioning):
    """The tails of k random orderings: each conditions on its first m points.

    Args:
        k: Number of orderings, at least 1.
        m: Number of points conditioned on.
        seed: See :class:`Conditioning`.

    Raises:
        ArgumentError: If ``k`` or ``m`` is out of range.
    """

    def __init__(self, k: int, m: int, seed: int | None = None) -> None:
        super().__init__(seed)
        self.k = _integer("k", k, 1)
        self.m = _integer("m", m, 0)

    def _blocks(self, rows, num_data, generator):
        n = rows.numel()
        _check_below("m", self.m, n)
        tails = [rows[torch.randperm(n, generator=generator)[self.m :]] for _ in range(self.k)]
        return [torch.stack(tails)]


class HeldOut(Conditioning):
    """Blocks that the caller chooses: a validation set, or one block a group.

    Args:
        *blocks: Row indices, one sequence or one-dimensional tensor a block; blocks are
            disjoint and may differ in size.

    Raises:
        ArgumentError: If there is no block, one is empty, or indices are negative, repeated,
            shared by blocks, or, once the data are seen, beyond them.

    Example:
        >>> HeldOut([0, 1, 2]).held_out(5)
        [tensor([[0, 1, 2]])]
    """

    def __init__(self, *blocks: Indices) -> None:
        super().__init__()
        if not blocks:
            raise ArgumentError("blocks", "none", "at least one sequence of row indices")
        self.blocks = tuple(_row_indices(block) for block in blocks)
        every = torch.cat(self.blocks)
        values, counts = every.unique(return_counts=True)
        if (counts > 1).any():
            repeated = values[counts > 1].tolist()
            raise ArgumentError(
                "blocks", f"repeated indices {repeated[:5]}", "each row in one block, once"
            )

    def _blocks(self, rows, num_data, generator):
        highest = max(int(block.max()) for block in self.blocks)
        if highest >= num_data:
            raise ArgumentError("blocks", f"index {highest}", f"rows from 0 to {num_data - 1}")
        kept = [block[torch.isin(block, rows)] for block in self.blocks]
        kept = [block for block in kept if block.numel()]
        if not kept:
            raise ArgumentError(
                "blocks", "rows whose targets are all missing", "at least one observed target"
            )
        return _stack_by_size(kept)


def _stack_by_size(blocks: Sequence[Tensor]) -> list[Tensor]:
    sizes = dict.fromkeys(block.numel() for block in blocks)
    return [torch.stack([b for b in blocks if b.numel() == size]) for size in sizes]


def _row_indices(block: Indices) -> Tensor:
    expected = "a one-dimensional sequence of non-negative integers, not empty"
    indices = torch.as_tensor(block).cpu()
    if indices.ndim != 1 or indices.numel() == 0:
        raise ArgumentError("blocks", f"indices of shape {tuple(indices.shape)}", expected)
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise ArgumentError("blocks", f"indices of {indices.dtype}", expected)
    if int(indices.min()) < 0:
        raise ArgumentError("blocks", f"index {int(indices.min())}", expected)
    return indices.long()


def _integer(argument: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ArgumentError(argument, repr(value), f"an integer of at least {least}")
    return int(value)


def _check_below(argument: str, value: int, n: int) -> None:
    if value >= n:
        raise ArgumentError(
            argument,
            value,
            f"an integer below the {n} observed points",
            "m is the number of points conditioned on; at least one must remain to be scored.",
        )
