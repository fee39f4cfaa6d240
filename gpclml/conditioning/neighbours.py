"""Each point given its nearest neighbours: who is conditioned on whom, and how they are near."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked
from gpclml.conditioning.strategies import Conditioning, Split
from gpclml.errors import ArgumentError

__all__ = ["NearestNeighbors", "NeighborIndex"]

# A tree looks at few points where there are few dimensions, and at nearly all where there are many.
_MOST_DIMENSIONS_OF_A_TREE = 8
_DISTANCES_AT_ONCE = {"cpu": 1 << 24, "other": 1 << 30}  # entries of a matrix of distances


class NearestNeighbors(Conditioning):
    r"""Holds out each point of a random batch, given its k nearest neighbours.

    .. math:: \frac{1}{|B|} \sum_{i \in B} \log p(y_i \mid y_{N(i)}, X)

    Each term costs :math:`k^3`, whatever the number n of points is, and the mean over a batch is an
    unbiased estimate of the mean over all points. With ``order="all"`` the neighbours N(i) are
    among all other points: leave-one-out given neighbours (Jankowiak and Pleiss 2021; Muyskens et
    al. 2021). With ``order="previous"`` they are among those before i in a random order: the sum
    over all points is Vecchia's approximation of the log marginal likelihood (Vecchia 1988;
    Katzfuss and Guinness 2021), a log density of all targets. With ``k = n - 1`` these are
    leave-one-out and the log marginal likelihood themselves, exactly.

    Neighbours are near in the metric of the kernel: points in units of its lengthscales, features
    of a deep kernel. They are looked up again every ``refresh`` calls, as the kernel is then. An
    objective has a copy of its own, so that one strategy can be given to several. Where points have
    more copies than neighbours, at most k / 8 copies of one point are neighbours of another (more
    where there are too few others): all copies together would say nothing of the lengthscales.

    Args:
        k: Number of neighbours, at least 1; all others where there are fewer.
        batch: Number of points held out at each call, drawn with replacement; all of them, once
            each, if None or if there are no more.
        order: Whether neighbours are among ``"all"`` others, or among the ``"previous"`` points.
        refresh: Number of calls after which neighbours are looked up in a new metric.
        seed: See :class:`Conditioning`; also of the random order, seed 0 if None.

    Note:
        Neighbours are near by SciPy's k-d tree on a CPU in up to eight dimensions, else by the
        distances to all points, a chunk at a time: ``batch * n * d`` multiplications.

    Examples:
        >>> x = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
        >>> NearestNeighbors(k=2, batch=None).split(4, points=x)
        Split(held_out=[tensor([[0],
                [1],
                [2],
                [3]])], conditioned_on=tensor([[1, 2],
                [0, 2],
                [1, 0],
                [2, 1]]))
    """

    is_random = True

    @checked
    def __init__(
        self,
        k: int = 32,
        batch: int | None = 128,
        order: Literal["all", "previous"] = "all",
        refresh: int = 10,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        check_counts(k=k, batch=batch, refresh=refresh)
        self.k: int = int(k)
        self.batch: int | None = None if batch is None else int(batch)
        self.order: Literal["all", "previous"] = order
        self.refresh: int = int(refresh)
        self._index: NeighborIndex | None = None
        self._sites: Tensor | None = None
        self._calls = 0

    @property
    def needs_points(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the next call looks up neighbours in a new metric."""
        return self._index is None or self._calls % self.refresh == 0

    def split(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
        points: Tensor | None = None,  # shape: (num_data, d)
    ) -> Split:
        """Points of a batch, each with its neighbours.

        Args:
            num_data: Number of data rows.
            generator: See :class:`Conditioning`.
            observed: See :class:`Conditioning`.
            points: In the metric of the kernel; needed where ``needs_points``.

        Returns:
            Held-out points ``(b, 1)``, and the rows that each is conditioned on, ``(b, k)``,
            nearest first; -1 where there are fewer, as for the first of an order.
        """
        generator, index = self.generator(generator), self._index
        if points is not None:
            if points.ndim != 2:
                expected = "(n, d): neighbours are those of one model, not of a batch"
                raise ArgumentError("points", tuple(points.shape), expected)
            rows = self.observed_rows(num_data, observed)
            if index is None or index.num_data != num_data:
                self._sites = find_copies(points[rows.to(points.device)], self.k)
            index = NeighborIndex(points, rows, self._order(rows), self._sites)
        if index is None or index.num_data != num_data:
            raise ArgumentError("points", None, "the points in whose metric neighbours are near")
        self._index, self._calls = index, self._calls + 1
        if self.batch is None or self.batch >= index.num_rows:
            chosen = torch.arange(index.num_rows)
        else:
            chosen = torch.randint(index.num_rows, (self.batch,), generator=generator)
        return Split([index.rows[chosen].unsqueeze(-1)], index.neighbors(chosen, self.k))

    @property
    def num_rows(self) -> int:
        """Number of rows that can be held out, those with a target; 0 before the first call."""
        return 0 if self._index is None else self._index.num_rows

    def _order(self, rows: Tensor) -> Tensor | None:
        """Positions of the rows in a random order; None where it does not matter."""
        if self.order == "all":
            return None
        generator = torch.Generator().manual_seed(self.seed or 0)
        return torch.randperm(rows.numel(), generator=generator)

    def __deepcopy__(self, memo: Any) -> NearestNeighbors:
        """With the same settings, and neighbours of its own."""
        return NearestNeighbors(self.k, self.batch, self.order, self.refresh, self.seed)

    def __repr__(self) -> str:
        names = ("k", "batch", "order", "refresh", "seed")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({shown})"


class NeighborIndex:
    """Points among which nearest neighbours are looked up.

    Args:
        points: In a metric where near points are correlated, ``(n, q)``, on any device.
        rows: Rows that can be neighbours, ``(r,)``, on the CPU; all of them if None.
        positions: Positions of these rows in an order: neighbours of a row come before it,
            ``(r,)``.
        sites: Which rows are copies: the same number for rows at the same point, from 0, ``(r,)``;
            None where copies are neighbours as other rows are.

    Attributes:
        num_data: Number n of points.
        num_rows: Number r of rows that can be neighbours.
    """

    def __init__(
        self,
        points: Tensor,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
        sites: Tensor | None = None,
    ) -> None:
        points = points.detach()
        self.num_data: int = len(points)
        self.rows: Tensor = torch.arange(len(points)) if rows is None else rows
        self.num_rows: int = len(self.rows)
        if self.num_rows < self.num_data:
            points = points[self.rows.to(points.device)]
        # From the centre, where products lose no digits of distances.
        self._center = points.mean(0)
        points = points - self._center
        self._points, self._positions = points, positions
        self._norms: Tensor | None = None
        self._tree: Any = None
        self._copies = None if sites is None else _Copies(points, sites, positions)
        is_searched = self._copies is None and points.device.type == "cpu"
        if is_searched and points.shape[-1] <= _MOST_DIMENSIONS_OF_A_TREE:
            from scipy.spatial import KDTree

            # Balanced cells take long to find, and pay where points are not spread evenly.
            self._tree = KDTree(points.numpy(), balanced_tree=False, compact_nodes=False)

    def neighbors(self, chosen: Tensor, k: int) -> Tensor:
        """Rows of the k nearest neighbours of some rows, nearest first, -1 where there are fewer.

        Args:
            chosen: Places of the rows among all that can be neighbours, ``(b,)``.
            k: Number of neighbours.

        Returns:
            ``(b, min(k, r - 1))``, on the CPU.
        """
        k = min(k, self.num_rows - 1)
        if self._copies is not None:
            result = self._copies.neighbors(chosen, k)
        elif self._positions is not None:
            result = self._previous(chosen, k)
        else:
            near = self._nearest(self._points[chosen.to(self._points.device)], k + 1)
            # Among more than k copies of a point, the point itself need not be there.
            itself = near == chosen.unsqueeze(-1)
            itself[:, -1] |= ~itself.any(-1)
            result = near[~itself].view(len(chosen), k)
        return torch.where(result < 0, -1, self.rows[result])

    def nearest(self, points: Tensor, k: int) -> Tensor:
        """Rows of the k points nearest to others, nearest first.

        Args:
            points: In the same metric, ``(m, q)``.
            k: Number of neighbours.

        Returns:
            ``(m, min(k, r))``, on the CPU.
        """
        points = points.detach() - self._center
        return self.rows[self._nearest(points, min(k, self.num_rows))]

    def _nearest(self, points: Tensor, k: int, before: Tensor | None = None) -> Tensor:
        """Places of the k nearest among all, or among those whose positions are below a number."""
        if self._tree is not None and before is None:
            workers = torch.get_num_threads()
            _, near = self._tree.query(points.numpy(), k=[*range(1, k + 1)], workers=workers)
            return torch.from_numpy(near)
        if self._norms is None:
            self._norms = self._points.square().sum(-1)
        most = _DISTANCES_AT_ONCE["cpu" if self._points.is_cpu else "other"]
        size = max(1, most // self.num_rows)
        chunks = []
        for start in range(0, len(points), size):
            chunk = slice(start, start + size)
            # The norm of the point itself is the same for all of its neighbours.
            distances = torch.addmm(self._norms, points[chunk], self._points.mT, alpha=-2.0)
            if before is not None:
                assert self._positions is not None
                positions = self._positions.to(distances.device)
                later = positions >= before[chunk, None].to(distances.device)
                distances.masked_fill_(later, torch.inf)
            lengths, near = distances.topk(k, largest=False)
            chunks.append(near.masked_fill_(lengths == torch.inf, -1).cpu())
        return torch.cat(chunks)

    def _previous(self, chosen: Tensor, k: int) -> Tensor:
        """Places of the k nearest among those that come before, ``(b, k)``."""
        assert self._positions is not None
        before, points = self._positions[chosen], self._points[chosen.to(self._points.device)]
        if self._tree is None:
            return self._nearest(points, k, before)
        # Of neighbours among all, the share before / n comes before: four times as many are enough
        # for most points, and sixteen times for all but the first ones.
        result = torch.full((len(chosen), k), -1)
        left, wanted = torch.arange(len(chosen)), 4 * k
        while len(left) and wanted < self.num_rows // 4:
            near = self._nearest(points[left], wanted)
            is_before = self._positions[near] < before[left, None]
            enough = is_before.sum(-1) >= k
            kept = is_before & (is_before.cumsum(-1) <= k)
            result[left[enough]] = near[enough][kept[enough]].view(-1, k)
            left, wanted = left[~enough], 4 * wanted
        if len(left):
            result[left] = self._nearest(points[left], k, before[left])
        return result


_SAMPLED = 16  # points whose copies are counted


def find_copies(points: Tensor, k: int) -> Tensor | None:
    """Which points are copies of each other, ``(n,)``, where many have more than k / 4; else None.

    Equal points have the same number. They are equal in any metric, so that it is asked once.
    """
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(len(points), (_SAMPLED,), generator=generator)
    counts = torch.stack([(points == point).all(-1).sum() for point in points[sample]])
    if int((counts > max(1, k // 4)).sum()) < _SAMPLED // 4:
        return None
    return points.unique(dim=0, return_inverse=True)[1].cpu()


class _Copies:
    """Neighbours among points with many copies: near points, a few copies of each.

    Args:
        points: ``(r, q)``.
        sites: Which are copies of each other, ``(r,)``.
        positions: Of rows in an order that neighbours come before; None for any order.
    """

    def __init__(self, points: Tensor, sites: Tensor, positions: Tensor | None) -> None:
        self._is_ordered, r = positions is not None, len(sites)
        self._positions = torch.arange(r) if positions is None else positions
        # Copies side by side, those of one point in their order.
        self._keys, self._sorted = (sites * r + self._positions).sort()
        self._counts = sites.bincount()
        self._starts = self._counts.cumsum(0) - self._counts
        self._sites = sites
        firsts = self._sorted[self._starts]
        self._index = NeighborIndex(points[firsts.to(points.device)])
        self._points = points

    def neighbors(self, chosen: Tensor, k: int) -> Tensor:
        """Places of k neighbours, ``(b, k)``, -1 where there are fewer."""
        near = self._index.nearest(self._points[chosen.to(self._points.device)], k + 1)
        own_site, r = self._sites[chosen].unsqueeze(-1), len(self._sites)
        # Copies that come before a point are the first of theirs.
        keys = near * r + self._positions[chosen].unsqueeze(-1)
        before = torch.searchsorted(self._keys, keys) - self._starts[near]
        rank = torch.where(near == own_site, before, r)
        allowed = before if self._is_ordered else self._counts[near] - (near == own_site).long()
        most = torch.full((len(chosen), 1), max(1, k // 8))
        while True:  # too few points: more copies of each
            taken = allowed.minimum(most)
            short = (taken.sum(-1) < k) & (taken < allowed).any(-1)
            if not bool(short.any()):
                break
            most[short] *= 2
        copies = torch.arange(int(taken.max().clamp_min(1)))
        is_taken = copies < taken.unsqueeze(-1)
        # The point itself is passed over.
        copies = copies + (copies >= rank.unsqueeze(-1)) * (not self._is_ordered)
        rows = self._sorted[(self._starts[near].unsqueeze(-1) + copies).clamp_max(r - 1)]
        rows, is_taken = rows.flatten(1), is_taken.flatten(1)
        column = is_taken.cumsum(-1) - 1
        kept = is_taken & (column < k)
        result = torch.full((len(chosen), k), -1)
        row = torch.arange(len(chosen)).unsqueeze(-1).expand_as(column)
        result[row[kept], column[kept]] = rows[kept]
        return result
