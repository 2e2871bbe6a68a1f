"""Cuts of a partition: at the weighted median, or around its hot logical partition (13.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut, and what it leaves."""

    at: tuple[int, ...]
    """Indices that begin further parts; none where no cut is possible."""
    share: float
    """The largest part, as a share of the whole."""
    hot: int | None = None
    """The index that carries more than half."""
    hot_share: float = 0.0


def best_cut(weights: Sequence[float], more_max: int) -> Cut:
    """Return the cut of a range by its loads, into at most `more_max` more partitions.

    An index with more than half of the load is isolated: [0, h), h, (h, n). Else the cut is at the
    weighted median: the smallest index with half of the load before it, or the index before that
    if the larger part is smaller so.
    """
    total = sum(weights)
    assert weights
    assert total > 0.0
    sums = [0.0, *accumulate(weights)]
    hot = max(range(len(weights)), key=lambda index: weights[index])
    hot_share = weights[hot] / total
    is_hot = hot_share > 0.5
    around = tuple(at for at in (hot, hot + 1) if 0 < at < len(weights))
    median = next(at for at, before in enumerate(sums) if before >= total / 2)
    options: list[tuple[int, ...]] = [(at,) for at in (median, median - 1) if 0 < at < len(weights)]
    if is_hot:
        options = [around, *((at,) for at in around)]
    options = [at for at in options if 0 < len(at) <= more_max]
    best = min(options, key=lambda at: _share(sums, at), default=())
    return Cut(best, _share(sums, best), hot if is_hot else None, hot_share if is_hot else 0.0)


def _share(sums: Sequence[float], cuts: Sequence[int]) -> float:
    """Return the largest part that cuts leave, as a share of the whole."""
    edges = (0, *cuts, len(sums) - 1)
    return max((sums[high] - sums[low]) / sums[-1] for low, high in pairwise(edges))
