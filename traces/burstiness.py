"""How unevenly requests arrive: counts in windows and what follows from them.

The arrivals are cut into windows of width w, aligned to the first arrival; N(w) is the count in a window. Empty
windows count, and so does the last one, which may be partial.

    index of dispersion   IDC(w) = Var N(w) / E N(w)      1 for Poisson arrivals at every w; above 1 = bursty
    inter-arrival CV      std(gaps) / mean(gaps)          1 for Poisson; blind to the order of the gaps
    autocorrelation       of the counts at lag k: do busy seconds follow busy seconds?

The index as a function of w tells at which time scale a trace is bursty; a trend lets it grow with w without end
(Gusella, "Characterizing the variability of arrival processes with indexes of dispersion", IEEE JSAC 1991).

Arrays in, numbers out: `arrival_ns` is int64 nanoseconds in ascending order. Only windows that hold an arrival take
memory, so a month at 0.1 s costs what its requests cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NS = 1_000_000_000
CURVE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)  # window widths of the dispersion curve
_CURVE_WINDOWS = 10  # a dispersion of fewer full windows is left out
_STEADY_S = (1, 10, 60, 600, 3600)  # base windows for autocorrelation and comparison of tenants
_LAGS = (1, 2, 5, 10, 30, 60)
_MOST_WINDOWS = 4_000_000  # dense counts beyond this use a wider window


class Windows(NamedTuple):
    """Counts in consecutive windows of one width, stored sparsely."""

    width_ns: int
    total: int  # windows from the first arrival to the last, the empty ones too
    place: Int64s  # which windows hold an arrival, ascending from 0
    arrivals: Int64s  # how many each of those holds, at least 1

    @property
    def empty(self) -> int:
        """Windows without an arrival."""
        return self.total - len(self.place)

    def mean(self) -> float:
        """Arrivals a window."""
        return float(self.arrivals.sum()) / self.total

    def idc(self) -> float:
        """Var N / E N over all windows (population variance)."""
        mean = self.mean()
        return (float(np.square(self.arrivals, dtype=np.float64).sum()) / self.total - mean * mean) / mean

    def without_last(self) -> Windows | None:
        """The same without the last, possibly partial window; None when nothing is left."""
        if self.total < 2:
            return None
        return Windows(self.width_ns, self.total - 1, self.place[:-1], self.arrivals[:-1])

    def coarser(self, factor: int) -> Windows:
        """Counts in windows `factor` times as wide, from these."""
        place, arrivals = _merged(self.place // factor, self.arrivals)
        return Windows(self.width_ns * factor, (self.total - 1) // factor + 1, place, arrivals)

    def dense(self) -> Int64s:
        """All counts, zeros too."""
        counts = np.zeros(self.total, dtype=np.int64)
        counts[self.place] = self.arrivals
        return counts

    def percentile(self, percent: float) -> float:
        """Percentile of the counts, linear between order statistics as `numpy.percentile` has it."""
        ordered = np.sort(self.arrivals)
        position = (self.total - 1) * percent / 100
        below = int(position)
        share = position - below

        def at(rank: int) -> float:
            return 0.0 if rank < self.empty else float(ordered[min(rank, self.total - 1) - self.empty])

        return at(below) + (at(below + 1) - at(below)) * share


def windows(arrival_ns: Int64s, width_ns: int) -> Windows:
    """Counts of ascending arrivals in windows of `width_ns`, aligned to the first."""
    index = (arrival_ns - arrival_ns[0]) // width_ns
    place, arrivals = _merged(index, None)
    return Windows(width_ns, int(index[-1]) + 1, place, arrivals)


def _merged(index: Int64s, weight: Int64s | None) -> tuple[Int64s, Int64s]:
    """Ascending indices without repeats, and how many (or how much weight) each had."""
    starts = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
    if weight is None:
        return index[starts], np.diff(np.concatenate([starts, [len(index)]]))
    return index[starts], np.add.reduceat(weight, starts)


def idc(arrival_ns: Int64s, width_ns: int) -> float:
    """Index of dispersion of the counts at one window width."""
    return windows(arrival_ns, width_ns).idc()


def timing(arrival_ns: Int64s) -> dict[str, Any]:
    """Rates, gaps and counts of ascending arrivals. Keys are listed in docs/stats.md; rates are null without a span."""
    rows, span_ns = len(arrival_ns), int(arrival_ns[-1] - arrival_ns[0])
    found: dict[str, Any] = {
        "rows": rows,
        "span_s": span_ns / NS,
        "first_ns": int(arrival_ns[0]),
        "last_ns": int(arrival_ns[-1]),
        "mean_rate_rps": (rows - 1) / (span_ns / NS) if span_ns else None,
        "rows_over_span_rps": rows / (span_ns / NS) if span_ns else None,
    }
    if rows > 1:
        gaps = np.diff(arrival_ns)
        mean_ns = span_ns / (rows - 1)
        found |= {
            "equal_timestamp_steps": int(rows - 1 - np.count_nonzero(gaps)),
            "iat_mean_s": mean_ns / NS,
            "iat_cv": float(gaps.std() / mean_ns) if span_ns else None,
            "iat_max_s": int(gaps.max()) / NS,
        }
        found["distinct_timestamps"] = rows - found["equal_timestamp_steps"]
    second = windows(arrival_ns, NS)
    found |= _counts(second, 1)
    found |= {
        "per_second_mean": second.mean(),
        "per_second_p99": second.percentile(99),
        "per_second_p99_over_mean": second.percentile(99) / second.mean(),
        "empty_seconds": second.empty,
    }
    return found | _counts(second.coarser(10), 10) | _counts(second.coarser(60), 60)


def _counts(counted: Windows, width_s: int) -> dict[str, Any]:
    found = {
        f"iod_{width_s}s": counted.idc(),
        f"windows_{width_s}s": counted.total,
        f"max_in_any_{width_s}s": int(counted.arrivals.max()),
    }
    full = counted.without_last()
    if full is not None:
        found[f"iod_{width_s}s_full_windows_only"] = full.idc()
    return found


class Dispersion(NamedTuple):
    """One point of the dispersion curve."""

    window_s: float
    idc: float
    windows: int
    poisson_band: float  # Poisson arrivals would be within 1 ± this in 95 of 100 traces


def dispersion_curve(arrival_ns: Int64s) -> list[Dispersion]:
    """IDC over window widths from 0.1 s to 10 min, as far as the trace has 10 full windows of a width.

    The last window is left out: partial, it would count as a lull, and the more the wider windows are.
    The band is 1.96·√(2/(m − 1)) for m windows, the normal limit of the index for Poisson counts.
    """
    finest = windows(arrival_ns, NS // 10)
    curve = []
    for width_s in CURVE_S:
        counted = finest.coarser(round(width_s * 10)).without_last()
        if counted is None or counted.total < _CURVE_WINDOWS:
            break
        band = 1.96 * (2 / (counted.total - 1)) ** 0.5
        curve.append(Dispersion(width_s, counted.idc(), counted.total, band))
    return curve


def base_window(arrival_ns: Int64s) -> int:
    """The narrowest of 1 s, 10 s, 1 min, 10 min, 1 h with a request in a window on average, in seconds."""
    span_s = int(arrival_ns[-1] - arrival_ns[0]) / NS
    for width_s in _STEADY_S:
        total = span_s // width_s + 1
        if len(arrival_ns) >= total and total <= _MOST_WINDOWS:
            return width_s
    return _STEADY_S[-1]


def autocorrelation(arrival_ns: Int64s) -> dict[str, Any]:
    """Correlation of the counts of windows that are 1, 2, 5, 10, 30 and 60 windows apart."""
    width_s = base_window(arrival_ns)
    counts = windows(arrival_ns, width_s * NS).dense().astype(np.float64)
    counts -= counts.mean()
    power = float(counts @ counts)
    lags = [lag for lag in _LAGS if lag <= len(counts) // 4]
    return {
        "window_s": width_s,
        "lags": lags,
        "values": [float(counts[lag:] @ counts[:-lag]) / power if power else 0.0 for lag in lags],
    }


def daily(arrival_ns: Int64s) -> list[float] | None:
    """Mean rate [req/s] in each of 24 hours of the day (from midnight of epoch 0); None below one day."""
    day, hour = 86_400 * NS, 3600 * NS
    first, last = int(arrival_ns[0]), int(arrival_ns[-1])
    if last - first < day:
        return None
    counts = np.bincount((arrival_ns % day) // hour, minlength=24)
    edges = np.arange(24) * hour
    covered = np.array([_covered(last, edge, day, hour) - _covered(first, edge, day, hour) for edge in edges.tolist()])
    return [float(rate) for rate in counts / np.maximum(covered / NS, 1)]


def _covered(until: int, edge: int, day: int, hour: int) -> int:
    """Time before `until` that lies in the hour of the day that starts at `edge`."""
    return until // day * hour + min(max(until % day - edge, 0), hour)


class Grid(NamedTuple):
    """What the timestamps are made of."""

    resolution_ns: int  # every time is a multiple of this from the first; 0 for a single instant
    period_ns: int | None  # the times come in batches about this far apart, if they do


def grid(arrival_ns: Int64s) -> Grid:
    """Resolution of the timestamps, and whether they were collected in batches.

    Batches: a third of the requests share their instant with the former one, and nine in ten of the other gaps lie
    within 1 % of a multiple of their median.
    """
    gaps = np.diff(arrival_ns)
    distinct = gaps[gaps > 0]
    if not len(distinct):
        return Grid(0, None)
    resolution = int(np.gcd.reduce(distinct))
    period = float(np.median(distinct))
    multiple = np.rint(distinct / period)
    near = (multiple >= 1) & (np.abs(distinct - multiple * period) <= 0.01 * period)
    batched = len(distinct) * 3 < len(gaps) * 2 and near.mean() > 0.9
    return Grid(resolution, round(period) if batched else None)
