"""When a limit was broken, not only that it was: a quantile over stretches of time with enough requests each. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tenants import quantiles
from tenants.measures import Floats

MOST = 40  # stretches in a run
NICE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


class Stretch(NamedTuple):
    """A stretch of time, half-open, in s from the run's start; the quantile is None where it has too few requests."""

    start_s: float
    end_s: float
    value: float | None


def stretches(at_s: Floats, values: Floats, q: float) -> list[Stretch]:
    """The q-quantile over time.

    Args:
        at_s: when each request was due.
        values: one a request, +∞ for a failed one; NaN is left out.
        q: the quantile; a stretch needs 1 / (1 − q) requests.

    Returns:
        Stretches of one round length that have requests, in order; none where two of them could not be filled.
    """
    counted = ~np.isnan(values) & np.isfinite(at_s)
    at_s, values = at_s[counted], values[counted]
    least = quantiles.needed(q)
    if len(at_s) < 2 * least:
        return []
    span_s = float(at_s.max() - at_s.min())
    width_s = nice_s(max(span_s / MOST, span_s * least / len(at_s) * 1.25))
    order = np.argsort(at_s, kind="stable")
    numbers = np.floor(at_s[order] / width_s).astype(np.int64)
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    found = []
    for members in np.split(order, cuts):
        number = math.floor(float(at_s[members[0]]) / width_s)
        value = quantiles.quantile(values[members], q) if len(members) >= least else None
        found.append(Stretch(number * width_s, (number + 1) * width_s, value))
    return found


def broken(found: list[Stretch], limit: float, *, strict: bool) -> list[tuple[float, float]]:
    """The stretches whose quantile is not below the limit (`strict`) or is above it; neighbours are joined."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s, value in found:
        if value is None or value < limit or (value == limit and not strict):
            continue
        if joined and math.isclose(joined[-1][1], start_s):
            joined[-1] = (joined[-1][0], round(end_s, 3))
        else:
            joined.append((round(start_s, 3), round(end_s, 3)))
    return joined


def nice_s(width_s: float) -> float:
    """The smallest round stretch of time that is at least this long."""
    return next((float(nice) for nice in NICE_S if nice >= width_s), float(NICE_S[-1]))
