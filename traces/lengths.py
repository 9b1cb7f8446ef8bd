"""How long requests are: percentiles, tails, and how input and output go together.

Token counts are small integers, so a column is first turned into a histogram; every figure then costs what the range
costs, not what the rows cost, and stays exact.

    percentile     linear between order statistics, as `numpy.percentile` has it
    tail index     Hill's estimator on the largest 5 %: α = k / Σ ln(xᵢ / x_k). Below 2 the variance has no limit,
                   below 1 not even the mean; a context limit cuts a tail and makes α large
    top 1 % share  tokens that the longest 1 % of the requests hold, of all
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from traces.burstiness import Floats

_TAIL_SHARE = 0.05
_TAIL_LEAST = 200  # rows below which no tail index is given
_RANGE = 1 << 22  # values beyond this are sorted, not counted
_RANK_ROWS = 200_000  # rows looked at for the rank correlation


def describe(values: npt.NDArray[Any]) -> dict[str, Any] | None:
    """Percentiles, mean, extremes, zeros and tail of token counts (−1 is null); None when all are null.

    Keys: n, p50, p95, p99, mean, min, max, zeros, top_1pct_share, tail_index, percentiles (0 to 100).
    """
    there = values[values >= 0]
    if not len(there):
        return None
    if int(there.max()) < _RANGE:
        count = np.bincount(there)
        value = np.flatnonzero(count)
        count = count[value]
    else:
        value, count = np.unique(there, return_counts=True)
    return _of_histogram(value.astype(np.float64), count)


def _of_histogram(value: Floats, count: npt.NDArray[Any]) -> dict[str, Any]:
    ends = np.cumsum(count)
    rows = int(ends[-1])

    def ordered(rank: int) -> float:
        return float(value[np.searchsorted(ends, min(rank, rows - 1), side="right")])

    def percentile(percent: float) -> float:
        position = (rows - 1) * percent / 100
        low = ordered(int(position))
        return low + (ordered(int(position) + 1) - low) * (position - int(position))

    total = float(value @ count)
    return {
        "n": rows,
        **{f"p{percent}": percentile(percent) for percent in (50, 95, 99)},
        "mean": total / rows,
        "min": float(value[0]),
        "max": float(value[-1]),
        "zeros": int(count[0]) if value[0] == 0 else 0,
        "top_1pct_share": _top(value, count, -(-rows // 100)) / total if total else None,
        "tail_index": _hill(value, count, int(rows * _TAIL_SHARE)) if rows >= _TAIL_LEAST else None,
        "percentiles": [percentile(percent) for percent in range(101)],
    }


def _top(value: Floats, count: npt.NDArray[Any], rows: int) -> float:
    """Sum of the `rows` largest values."""
    from_top = np.cumsum(count[::-1])
    taken = np.clip(count[::-1] - np.maximum(from_top - rows, 0), 0, None)
    return float(value[::-1] @ taken)


def _hill(value: Floats, count: npt.NDArray[Any], k: int) -> float | None:
    from_top = np.cumsum(count[::-1])
    threshold = value[::-1][np.searchsorted(from_top, k, side="right")]  # the (k+1)-th largest
    above = value > threshold
    logs = float(np.log(value[above] / threshold) @ count[above]) if threshold > 0 else 0.0
    return k / logs if logs > 0 else None


def spread(values: npt.NDArray[Any], scale: float = 1.0) -> dict[str, Any] | None:
    """Percentiles, mean and extremes of measured values (−1 is null), each times `scale`; None when all are null."""
    there = values[values >= 0]
    if not len(there):
        return None
    p50, p95, p99 = np.percentile(there, [50, 95, 99])
    return {
        "n": len(there),
        "p50": float(p50) * scale,
        "p95": float(p95) * scale,
        "p99": float(p99) * scale,
        "mean": float(there.mean()) * scale,
        "min": float(there.min()) * scale,
        "max": float(there.max()) * scale,
        "zeros": int(np.count_nonzero(there == 0)),
    }


def rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float | None:
    """Spearman's rank correlation of rows where both are known; of every k-th row in a long trace."""
    both = np.flatnonzero((first >= 0) & (second >= 0))
    both = both[:: -(-len(both) // _RANK_ROWS) or 1]
    if len(both) < 3:
        return None
    one, two = _ranks(first[both]), _ranks(second[both])
    if not one.std() or not two.std():
        return None
    return float(np.corrcoef(one, two)[0, 1])


def _ranks(values: npt.NDArray[Any]) -> Floats:
    """Ranks from 0, ties at their mean."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count + 1) / 2)[inverse])
