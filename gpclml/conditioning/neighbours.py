"""Each point given its nearest neighbours: who is conditioned on whom, and how they are near."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked
from gpclml.conditioning.strategies import Conditioning, Split
from gpclml.errors import ArgumentError

# A tree looks at few points where there are few dimensions, and at nearly all where there are many.
_MOST_DIMENSIONS_OF_A_TREE = 8
# Entries of a matrix of distances, points that are looked up, and points to which their distances
# are computed, at once: on a CPU these stay in the processor's cache.
_DISTANCES_AT_ONCE = {"cpu": 1 << 25, "other": 1 << 30}
_POINTS_AT_ONCE = {"cpu": 128, "other": 4096}
_BLOCK = {"cpu": 2048, "other": 1 << 30}
_MOST_IN_A_GROUP = 128
_MOVED = 0.1  # deviation of logarithms of distances from a common factor
_WATCHED = 64  # points whose distances to their neighbours say how far a metric has moved
_SAMPLED = 16  # points whose copies are counted


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

    With ``order="joint"`` each point and its neighbours are held out together, given none: the
    joint log density of these k + 1 points over their number, a block composite likelihood (Caragea
    and Smith 2007), which with ``k = n - 1`` is the log marginal likelihood again. It is for deep
    kernels: one block of 256, ``NearestNeighbors(255, 1, "joint")``, takes a third of the time of
    128 points given 32 neighbours, which they overfit more.

    Neighbours are near in the metric of the kernel: points in units of its lengthscales, features
    of a deep kernel. Every ``refresh`` calls the kernel is asked whether that has moved, and they
    are looked up in the new metric if distances between neighbours have changed by a tenth, apart
    from a common factor. An objective has a copy of its own, so that one strategy can be given to
    several. Where points have more copies than neighbours, only the first k / 8 + 1 copies of each
    are neighbours of others (more where there are too few): all together would say nothing of the
    lengthscales.

    Args:
        k: Number of neighbours, at least 1; all others where there are fewer.
        batch: Number of points held out at each call, drawn with replacement; all of them, once
            each, if None or if there are no more.
        order: Whether neighbours are among ``"all"`` others, or among the ``"previous"`` points; or
            among all and scored with the point, ``"joint"``.
        refresh: Number of calls after which neighbours may be looked up in a new metric.
        seed: Of the random order, 0 if None. Unlike other strategies, this one draws another batch
            at each call even with a seed, by the objective's generator: a fit is to see all points.

    Note:
        Neighbours are exact: by SciPy's k-d tree on a CPU in up to eight dimensions, else by the
        distances to all points, in chunks: ``batch * n * d`` multiplications. Memory is that of the
        points in the metric, in double precision in a tree.

    Examples:
        >>> import torch
        >>> from gpclml.conditioning import NearestNeighbors
        >>> x = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
        >>> NearestNeighbors(k=2, batch=None).split(4, points=x).conditioned_on.tolist()
        [[1, 2], [0, 2], [1, 0], [2, 1]]
    """

    is_random = True

    @checked
    def __init__(
        self,
        k: int = 32,
        batch: int | None = 128,
        order: Literal["all", "previous", "joint"] = "all",
        refresh: int = 10,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        check_counts(k=k, batch=batch, refresh=refresh)
        self.k: int = int(k)
        self.batch: int | None = None if batch is None else int(batch)
        self.order: Literal["all", "previous", "joint"] = order
        self.refresh: int = int(refresh)
        self._neighbors: _Neighbors | None = None
        self._calls = 0

    @property
    def redraws(self) -> bool:
        """Whether each call holds out other points: always, since a batch is only a sample."""
        return True

    @property
    def needs_points(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the next call may look up neighbours in a new metric."""
        return self._neighbors is None or self._calls % self.refresh == 0

    def split(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
        points: Tensor | Points | None = None,  # shape: (num_data, d)
    ) -> Split:
        """Points of a batch, each with its neighbours.

        Args:
            num_data: Number of data rows.
            generator: Draws the batch; without one the seed does.
            observed: See :class:`Conditioning`.
            points: In the metric of the kernel; needed where ``needs_points``. Or a function that
                gives those of some rows, or of all for None.

        Returns:
            Held-out points ``(b, 1)``, and the rows that each is conditioned on, ``(b, k)``,
            nearest first; -1 where there are fewer, as for the first of an order. With
            ``order="joint"`` held-out blocks ``(b, k + 1)``, conditioned on no row, ``(b, 0)``.
        """
        default = self.generator(generator)
        generator = default if generator is None else generator
        if points is not None:
            self._look_up(num_data, observed, points)
        neighbors = self._neighbors
        if neighbors is None or neighbors.num_data != num_data:
            raise ArgumentError("points", None, "the points in whose metric neighbours are near")
        self._calls += 1
        if self.batch is None or self.batch >= neighbors.num_rows:
            chosen = torch.arange(neighbors.num_rows)
        else:
            chosen = torch.randint(neighbors.num_rows, (self.batch,), generator=generator)
        split = neighbors.split(chosen, self.k)
        if self.order != "joint":
            return split
        given = cast(Tensor, split.conditioned_on)
        return Split([torch.cat([split.held_out[0], given], -1)], given[:, :0])

    def _look_up(self, num_data: int, observed: Tensor | None, points: Tensor | Points) -> None:
        """Takes the points for the metric, unless distances are nearly those of the last ones."""
        if isinstance(points, Tensor):
            if points.ndim != 2:
                expected = "(n, d): neighbours are those of one model, not of a batch"
                raise ArgumentError("points", tuple(points.shape), expected)
            given = points
            points = lambda rows: given if rows is None else given[rows.to(given.device)]  # noqa: E731
        check_counts(num_data=num_data)
        count = num_data if observed is None else int(observed.count_nonzero())
        neighbors = self._neighbors
        if neighbors is not None and neighbors.are_near(count, num_data, points):
            return
        self._neighbors = neighbors = None  # memory for one tree is enough
        rows = None if observed is None else self.observed_rows(num_data, observed)
        order = None
        if self.order == "previous":
            drawn = torch.Generator().manual_seed(self.seed or 0)
            order = torch.randperm(count, generator=drawn)
        self._neighbors = _Neighbors(num_data, rows, order, points, self.k)

    def look_again(self) -> None:
        """Lets the next call look at the points, whenever the last one did."""
        self._calls = 0

    @property
    def num_rows(self) -> int:
        """Number of rows that can be held out, those with a target; 0 before the first call."""
        return 0 if self._neighbors is None else self._neighbors.num_rows

    def __deepcopy__(self, memo: Any) -> NearestNeighbors:
        """With the same settings, and neighbours of its own."""
        return NearestNeighbors(self.k, self.batch, self.order, self.refresh, self.seed)

    def __repr__(self) -> str:
        names = ("k", "batch", "order", "refresh", "seed")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({shown})"


Points = Callable[[Tensor | None], Tensor]
"""The points of some rows in the metric of a kernel, of all rows for None."""


class _Neighbors:
    """Rows of a data set that can be neighbours of each other, as near as they were in one metric.

    Rows with a target have places, those of an order that neighbours come before, if there is one.
    Of points with many copies, by the number k of neighbours, the first few are candidates alone.
    Rows are None where all have a target.
    """

    def __init__(
        self, num_data: int, rows: Tensor | None, order: Tensor | None, points: Points, k: int
    ) -> None:
        self.num_data, self.num_rows = num_data, num_data if rows is None else len(rows)
        self._order = order
        if order is not None:
            rows = order.argsort() if rows is None else rows[order.argsort()]
        self._rows = rows
        values = points(rows).detach()
        # Places of candidates, and of each place the first candidate at the same point.
        self._candidates, self._firsts = _few_copies(values, k)
        if self._candidates is not None:
            values = values[self._candidates.to(values.device)]
        self._index = NeighborIndex(values)
        self._watched: tuple[Tensor, Tensor] | None = None

    def split(self, chosen: Tensor, k: int) -> Split:
        """The chosen ones of the rows in data order, each with its k nearest."""
        places = chosen if self._order is None else self._order[chosen]
        near = self._nearest(places, min(k, self.num_rows - 1))
        held_out, given = places, near
        if self._rows is not None:
            held_out, given = self._rows[places], torch.where(near < 0, -1, self._rows[near])
        if self._watched is None and given.numel():
            distances = _distances(self._points(places[:_WATCHED]), self._points(near[:_WATCHED]))
            pairs = torch.cat([held_out.unsqueeze(-1), given], -1)[:_WATCHED]
            self._watched = pairs, distances.where(pairs[:, 1:].to(distances.device) >= 0, 0.0)
        return Split([held_out.unsqueeze(-1)], given)

    def are_near(self, num_rows: int, num_data: int, points: Points) -> bool:
        """Whether distances are as they were apart from a common factor, and rows are the same."""
        if num_data != self.num_data or num_rows != self.num_rows or self._watched is None:
            return False
        pairs, before = self._watched
        values = points(pairs.clamp_min(0).flatten()).detach().unflatten(0, pairs.shape)
        after = _distances(values[:, 0], values[:, 1:]).where(
            pairs[:, 1:].to(before.device) >= 0, 0.0
        )
        apart = (before > 0) | (after > 0)
        least = torch.finfo(torch.float64).tiny
        change = (after[apart] + least).log() - (before[apart] + least).log()
        return len(change) < 2 or bool(change.std() < _MOVED)

    def _points(self, places: Tensor) -> Tensor:
        return self._index[places if self._firsts is None else self._firsts[places]]

    def _nearest(self, places: Tensor, k: int) -> Tensor:
        """Places of the k nearest that may be neighbours, ``(b, k)``, -1 where there are fewer."""
        index, points = self._index, self._points(places)
        result = torch.full((len(places), k), -1)
        # Of neighbours among all of n, the share place / n comes before a place: four times as many
        # are enough for most, and sixteen times for all but the first ones.
        left, wanted = torch.arange(len(places)), k + 1 if self._order is None else 4 * k
        while len(left) and k:
            before, is_last = None, self._order is None
            if self._order is not None and (wanted > index.num_rows // 4 or not index.is_tree):
                before, wanted, is_last = places[left], k, True
                if self._candidates is not None:
                    before = torch.searchsorted(self._candidates, before)
            near = index.nearest(points[left.to(points.device)], wanted, before)
            if self._candidates is not None:
                near = torch.where(near < 0, -1, self._candidates[near])
            asked = places[left].unsqueeze(-1)
            allowed = (near >= 0) & (near != asked if self._order is None else near < asked)
            column = allowed.cumsum(-1) - 1
            done = (column[:, -1] >= k - 1) | is_last
            kept = allowed & (column < k) & done.unsqueeze(-1)
            result[left.unsqueeze(-1).expand_as(column)[kept], column[kept]] = near[kept]
            left, wanted = left[~done], 4 * wanted
        return result


def _distances(points: Tensor, others: Tensor) -> Tensor:
    """Of each point to its others, ``(b, k)``."""
    return (points.double().unsqueeze(-2) - others.double()).square().sum(-1).sqrt()


def _few_copies(points: Tensor, k: int) -> tuple[Tensor | None, Tensor | None]:
    """The first k / 8 + 1 copies of each point, and of each the first one among these.

    Indices ``(c,)`` and places among them ``(n,)``; None where few points have many copies. There
    are more copies where too few would be left.
    """
    sites = find_copies(points, k)
    if sites is None:
        return None, None
    counts, order = sites.bincount(), sites.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(sites)
    rank[order] = torch.arange(len(sites)) - starts[sites[order]]
    most = k // 8 + 1
    while int(counts.clamp_max(most).sum()) <= min(k, len(sites) - 1):
        most *= 2
    candidates = (rank < most).nonzero().squeeze(-1)
    return candidates, torch.searchsorted(candidates, order[starts][sites])


def find_copies(points: Tensor, k: int) -> Tensor | None:
    """Which points are copies of each other, ``(n,)``, where many have more than k / 4; else None.

    Equal points have the same number.
    """
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(len(points), (_SAMPLED,), generator=generator)
    frequent = 0
    for point in points[sample.to(points.device)]:
        alike = points
        for column, value in enumerate(point):  # most others differ in the first columns
            alike = alike[alike[:, column] == value]
            if len(alike) <= max(1, k // 4):
                break
        else:
            frequent += 1
    if frequent < _SAMPLED // 4:
        return None
    return points.unique(dim=0, return_inverse=True)[1].cpu()


class NeighborIndex:
    """Points among which nearest neighbours are looked up, exactly.

    In a metric where near points are correlated, ``(n, q)``, on any device; only some rows, on the
    CPU, can be neighbours. A tree has them on a CPU in few dimensions, else distances to all.
    """

    def __init__(self, points: Tensor, rows: Tensor | None = None) -> None:
        points = points.detach()
        self._rows = rows
        if rows is not None:
            points = points[rows.to(points.device)]
        self.num_rows: int = len(points)
        self._tree: Any = None
        self.is_tree: bool = points.is_cpu and points.shape[-1] <= _MOST_DIMENSIONS_OF_A_TREE
        if self.is_tree:
            from scipy.spatial import KDTree

            # Balanced cells take long to find, and pay where points are not spread evenly.
            options: Any = {"leafsize": 32, "balanced_tree": False, "compact_nodes": False}
            self._tree = KDTree(points.numpy(), **options)
            points = torch.from_numpy(self._tree.data)
        self._points, self._center = points, points.mean(0)
        self._padded: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, index: Tensor) -> Tensor:
        """Points at some places."""
        return self._points[index.to(self._points.device)]

    def nearest(self, points: Tensor, k: int, before: Tensor | None = None) -> Tensor:
        """Rows of the k points nearest to others ``(m, q)``, nearest first, ``(m, min(k, r))``.

        On the CPU; -1 where there are fewer. ``before``, ``(m,)``, says of how many points alone.
        """
        k, points = min(k, self.num_rows), points.detach().to(self._points.dtype)
        if self._tree is not None and before is None:
            workers = torch.get_num_threads()
            near = self._tree.query(points.numpy(), k=[*range(1, k + 1)], workers=workers)[1]
            near = torch.from_numpy(near)
            return near if self._rows is None else self._rows[near]
        kind, group = "cpu" if points.is_cpu else "other", self._group(k)
        entries = min(self.num_rows, _BLOCK[kind]) + self.num_rows // group
        entries = max(1, entries, k * group * points.shape[-1])
        size = max(1, min(_POINTS_AT_ONCE[kind], _DISTANCES_AT_ONCE[kind] // entries))
        limits = None if before is None else before.to(points.device).split(size)
        chunks = [
            self._nearest(chunk, k, None if limits is None else limits[number])
            for number, chunk in enumerate(points.split(size))
        ]
        near = torch.cat(chunks).cpu()
        return near if self._rows is None else self._rows[near]

    def _group(self, k: int) -> int:
        """Number of points of which the nearest one decides whether the others are looked at."""
        # Comparing n / g groups and looking at k g points take about the same time.
        return min(_MOST_IN_A_GROUP, 2 ** round(math.log2(max(1, self.num_rows / (4 * k))) / 2))

    def _nearest(self, points: Tensor, k: int, before: Tensor | None) -> Tensor:
        """By distances to all points.

        A group of points that has one of the k nearest is among the k groups whose nearest points
        are nearest, so that only points of these are sorted.
        """
        if self._padded is None:  # to whole blocks, by points that are near to none
            block = _BLOCK["cpu" if points.is_cpu else "other"]
            block = min(block, -(-self.num_rows // _MOST_IN_A_GROUP) * _MOST_IN_A_GROUP)
            # From the centre products lose fewest digits of distances.
            added = 0, 0, 0, -self.num_rows % block
            whole = torch.nn.functional.pad(self._points - self._center, added)
            lengths = whole.square().sum(-1)
            lengths[self.num_rows :] = torch.inf
            self._padded = whole.unflatten(0, (-1, block)), lengths.unflatten(0, (-1, block))
        blocks, lengths = self._padded
        block, group = lengths.shape[-1], self._group(k)
        stride = block // group  # between points of a group
        if before is not None:
            blocks = blocks[: -(-max(1, int(before.max())) // block)]
        points, nearest = points - self._center, []
        for number, some in enumerate(blocks):
            # The length of the point itself is the same for all of its neighbours.
            distances = torch.addmm(lengths[number], points, some.mT, alpha=-2.0)
            if before is not None:
                places = number * block + torch.arange(block, device=points.device)
                distances.masked_fill_(places >= before.unsqueeze(-1), torch.inf)
            nearest.append(distances.unflatten(-1, (group, stride)).amin(-2))
        nearest = torch.cat(nearest, -1)
        groups = nearest.topk(min(k, nearest.shape[-1]), largest=False).indices.unsqueeze(-1)
        first = groups // stride * block + groups % stride
        near = (first + stride * torch.arange(group, device=points.device)).flatten(1)
        others = blocks.flatten(0, 1).index_select(0, near.flatten()).unflatten(0, near.shape)
        distances = lengths.flatten()[near] - 2 * (others @ points.unsqueeze(-1)).squeeze(-1)
        if before is not None:
            distances.masked_fill_(near >= before.unsqueeze(-1), torch.inf)
        distances, order = distances.topk(min(k, distances.shape[-1]), largest=False)
        near = near.gather(-1, order).masked_fill_(distances == torch.inf, -1)
        return torch.nn.functional.pad(near, (0, k - near.shape[-1]), value=-1)
