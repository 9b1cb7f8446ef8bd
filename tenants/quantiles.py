"""Order statistics, and how sure they are: no distribution is assumed anywhere.

**Quantile.** The q-quantile of n values is the smallest value with at least the share q at or below it: the k-th
smallest, k = ceil(n·q) (Hyndman and Fan 1996, type 1; numpy's `inverted_cdf`). It is always a value that was seen,
so P99 never exceeds the maximum, and +∞ (a failed request) is a value like any other.

**Interval of a quantile.** The number of values at or below the true quantile Q is binomial(n, q) whatever the
distribution, so P(X(l) <= Q <= X(u)) >= F(u − 1) − F(l − 1), F = the binomial's distribution function. With 2.5 %
in each tail at most, an upper end exists from n = ln 0.025 / ln q on: 72 for P95, 368 for P99.

**Share of violations.** Clopper and Pearson 1934: the exact one-sided bounds of a binomial share after k of n,

    upper = Beta⁻¹(c; k + 1, n − k)        lower = Beta⁻¹(1 − c; k, n − k + 1)        c = 95 %

so that P95 without a violation is proven from 59 requests on, P99 from 299.

These assume that requests are alike and independent; queueing makes neighbours alike, which is why the isolation
verdict over several runs resamples blocks of time instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_ROUNDING = 1e-9  # q·n is meant to be an integer where it is one on paper: 0.07 · 100 is 7.000000000000001


class Interval(NamedTuple):
    """Lower and upper end, both included; in the unit of the values."""

    low: float
    high: float


def rank(n: int, q: float) -> int:
    """Which of n sorted values (from 0) is the q-quantile; n >= 1."""
    return min(n - 1, max(0, math.ceil(n * q - _ROUNDING) - 1))


def quantile(values: NDArray[np.float64], q: float) -> float:
    """The q-quantile of values in any order, +∞ allowed; NaN when there are none."""
    if len(values) == 0:
        return math.nan
    k = rank(len(values), q)
    return float(np.partition(values, k)[k])


def needed(q: float) -> int:
    """The least number of values from which the q-quantile is shown: 1 / (1 − q). P50: 2, P95: 20, P99: 100."""
    return math.ceil(1 / (1 - q) - 1e-6) if q < 1 else 1


def interval_ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Which sorted values (from 0) bound the q-quantile, or None where n is too small for one of the two ends."""
    if n < 1 or not 0 < q < 1:
        return None
    tail = (1 - confidence) / 2
    if q**n > tail or (1 - q) ** n > tail:
        return None
    low = _largest_below(n, q, tail)
    high = _smallest_above(n, q, 1 - tail)
    return low, high


def interval(ordered: NDArray[np.float64], q: float, confidence: float = CONFIDENCE) -> Interval | None:
    """The two-sided distribution-free interval of the q-quantile.

    Args:
        ordered: values in ascending order, +∞ allowed.
        q: between 0 and 1.
        confidence: how often the interval holds the true quantile, at least.

    Returns:
        None where the sample is too small (P95 needs 72 values, P99 368).
    """
    ranks = interval_ranks(len(ordered), q, confidence)
    if ranks is None:
        return None
    return Interval(float(ordered[ranks[0]]), float(ordered[ranks[1]]))


def share_upper(violations: int, n: int, confidence: float = CONFIDENCE) -> float:
    """The exact one-sided upper bound of a share of which `violations` of `n` were seen; 1 when nothing was seen."""
    if violations >= n:
        return 1.0
    return _beta_inverse(violations + 1, n - violations, confidence)


def share_lower(violations: int, n: int, confidence: float = CONFIDENCE) -> float:
    """The exact one-sided lower bound of a share of which `violations` of `n` were seen; 0 when nothing was seen."""
    if violations <= 0 or n <= 0:
        return 0.0
    return _beta_inverse(violations, n - violations + 1, 1 - confidence)


def clopper_pearson(violations: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Both one-sided bounds; together they are the two-sided interval of twice the error (90 % for 95 %)."""
    return Interval(share_lower(violations, n, confidence), share_upper(violations, n, confidence))


def settles(violations: int, n: int, allowed: float, confidence: float = CONFIDENCE) -> bool:
    """Whether the bounds clear the allowed share on either side."""
    return n > 0 and (
        share_upper(violations, n, confidence) <= allowed or share_lower(violations, n, confidence) > allowed
    )


def samples_to_settle(violations: int, n: int, allowed: float, *, at_most: int = 10_000_000) -> int | None:
    """The smallest sample that would settle the question if the share of violations stayed as it is.

    Args:
        violations: seen so far.
        n: of how many.
        allowed: share of violations that the rule allows, 0.05 for a P95.
        at_most: where to stop looking.

    Returns:
        The number of values in all, None when the share seen lies on the limit or the answer is beyond `at_most`.
        Without any value seen: as if none of them violated (59 for P95, 299 for P99).
    """
    share = violations / n if n else 0.0

    def settled(count: int) -> bool:
        seen = share * count
        upper = 1.0 if seen >= count else _beta_inverse(seen + 1, count - seen, CONFIDENCE)
        lower = _beta_inverse(seen, count - seen + 1, 1 - CONFIDENCE) if seen > 0 else 0.0
        return upper <= allowed or lower > allowed

    if not 0 < allowed < 1 or not settled(at_most):
        return None
    low, high = 0, at_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle) else (middle, high)
    return high


def ordered(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """A sorted copy without NaN (a time that did not happen has no rank); +∞ stays, at the end."""
    array = np.asarray(values, dtype=np.float64)
    return np.sort(array[~np.isnan(array)])


def _largest_below(n: int, q: float, tail: float) -> int:
    """Largest l (sorted values count from 0) with F(l) <= tail."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _binomial_below(middle, n, q) <= tail else (low, middle - 1)
    return low


def _smallest_above(n: int, q: float, level: float) -> int:
    """Smallest u (sorted values count from 0) with F(u) >= level."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _binomial_below(middle, n, q) >= level else (middle + 1, high)
    return low


def _beta_inverse(a: float, b: float, share: float) -> float:
    """Beta⁻¹(share; a, b). scipy is loaded with the first verdict: parsing a rule must not wait for it."""
    from scipy import special

    return float(special.betaincinv(a, b, share))


def _binomial_below(k: int, n: int, q: float) -> float:
    """P(binomial(n, q) <= k)."""
    from scipy import special

    return float(special.bdtr(k, n, q))
