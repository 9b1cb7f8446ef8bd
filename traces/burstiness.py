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

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

NS = 1_000_000_000
CURVE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)  # window widths of the dispersion curve
_CURVE_WINDOWS = 10  # a dispersion of fewer full windows is left out
_STEADY_S = (1, 10, 60, 600, 3600)  # base windows for autocorrelation and comparison of tenants
_LAGS = (1, 2, 5, 10, 30, 60)
_BLOCK = 1 << 20  # rows worked on at a time where an array of all would only be summed up
_MOST_WINDOWS = 4_000_000  # dense counts beyond this use a wider window


class Windows(NamedTuple):
    """Counts in consecutive windows of one width, stored sparsely."""

    width_ns: int
    total: int  # windows from the first arrival to the last, the empty ones too
    place: Int32s | Int64s  # which windows hold an arrival, ascending from 0
    arrivals: Int32s  # how many each of those holds, at least 1

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
        if factor == 1:
            return self
        place = self.place // factor
        starts = _starts(place)
        ends = np.cumsum(self.arrivals)[np.append(starts[1:], len(place)) - 1]
        return Windows(self.width_ns * factor, (self.total - 1) // factor + 1, place[starts], np.diff(ends, prepend=0))

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
    index = arrival_ns - arrival_ns[0]
    index //= width_ns
    total = int(index[-1]) + 1
    starts = _starts(index)
    place = index[starts].astype(np.int32 if total < 1 << 31 else np.int64)
    del index
    return Windows(width_ns, total, place, np.diff(starts, append=len(arrival_ns)).astype(np.int32))


def _starts(index: Int64s | Int32s) -> npt.NDArray[np.intp]:
    """Where a new value begins in an ascending array."""
    new = np.empty(len(index), dtype=bool)
    new[0] = True
    np.not_equal(index[1:], index[:-1], out=new[1:])
    return np.flatnonzero(new)


def idc(arrival_ns: Int64s, width_ns: int) -> float:
    """Index of dispersion of the counts at one window width."""
    return windows(arrival_ns, width_ns).idc()


class Dispersion(NamedTuple):
    """One point of the dispersion curve."""

    window_s: float
    idc: float
    windows: int
    poisson_band: float  # Poisson arrivals would be within 1 ± this in 95 of 100 traces


class Counts(NamedTuple):
    """Counts at the widths that the figures need, each made from a narrower one, and the dispersion curve."""

    second: Windows
    ten: Windows
    minute: Windows
    curve: list[Dispersion]


def counts(arrival_ns: Int64s) -> Counts:
    """Counts of ascending arrivals, and IDC over window widths from 0.1 s to 10 min.

    The curve goes as far as the trace has 10 full windows of a width. Its last window is left out: partial, it would
    count as a lull, and the more the wider windows are. The band is 1.96·√(2/(m − 1)) for m windows, the normal limit
    of the index for Poisson counts.
    """
    kept = {0.1: windows(arrival_ns, NS // 10)}
    curve = []
    for width_s in CURVE_S:
        if width_s not in kept:
            base = max(width for width in kept if round(width_s * 10) % round(width * 10) == 0)
            wider = kept[base].coarser(round(width_s / base))
        else:
            wider = kept[width_s]
        if width_s in {1, 10, 60}:
            kept[width_s] = wider
        if width_s == 1:
            del kept[0.1]
        full = wider.without_last()
        if full is not None and full.total >= _CURVE_WINDOWS:
            curve.append(Dispersion(width_s, full.idc(), full.total, 1.96 * (2 / (full.total - 1)) ** 0.5))
    return Counts(kept[1], kept[10], kept[60], curve)


def timing(arrival_ns: Int64s, counted: Counts) -> dict[str, Any]:
    """Rates, gaps and counts of ascending arrivals. Keys are listed in docs/stats.md; rates are null without a span."""
    rows, span_ns = len(arrival_ns), int(arrival_ns[-1] - arrival_ns[0])
    second = counted.second
    found: dict[str, Any] = {
        "rows": rows,
        "span_s": span_ns / NS,
        "first_ns": int(arrival_ns[0]),
        "last_ns": int(arrival_ns[-1]),
        "mean_rate_rps": (rows - 1) / (span_ns / NS) if span_ns else None,
        "rows_over_span_rps": rows / (span_ns / NS) if span_ns else None,
    }
    if rows > 1:
        found |= _gaps(arrival_ns)
    found |= _counts_at(second, 1)
    found |= {
        "per_second_mean": second.mean(),
        "per_second_p99": second.percentile(99),
        "per_second_p99_over_mean": second.percentile(99) / second.mean(),
        "empty_seconds": second.empty,
    }
    return found | _counts_at(counted.ten, 10) | _counts_at(counted.minute, 60)


def _blocks(arrival_ns: Int64s) -> Iterator[Int64s]:
    """All gaps between neighbours, a million at a time."""
    for start in range(0, len(arrival_ns) - 1, _BLOCK):
        yield np.diff(arrival_ns[start : start + _BLOCK + 1])


def _gaps(arrival_ns: Int64s) -> dict[str, Any]:
    steps = len(arrival_ns) - 1
    mean_ns = int(arrival_ns[-1] - arrival_ns[0]) / steps
    equal = longest = 0
    square = 0.0
    for gaps in _blocks(arrival_ns):
        equal += len(gaps) - int(np.count_nonzero(gaps))
        longest = max(longest, int(gaps.max()))
        off = gaps - mean_ns
        square += float(off @ off)
    return {
        "equal_timestamp_steps": equal,
        "distinct_timestamps": steps + 1 - equal,
        "iat_mean_s": mean_ns / NS,
        "iat_cv": (square / steps) ** 0.5 / mean_ns if mean_ns else None,
        "iat_max_s": longest / NS,
    }


def _counts_at(counted: Windows, width_s: int) -> dict[str, Any]:
    found = {
        f"iod_{width_s}s": counted.idc(),
        f"windows_{width_s}s": counted.total,
        f"max_in_any_{width_s}s": int(counted.arrivals.max()),
    }
    full = counted.without_last()
    if full is not None:
        found[f"iod_{width_s}s_full_windows_only"] = full.idc()
    return found


def base_window(second: Windows) -> int:
    """The narrowest of 1 s, 10 s, 1 min, 10 min, 1 h with a request in a window on average, in seconds."""
    rows = int(second.arrivals.sum())
    for width_s in _STEADY_S:
        total = second.total // width_s + 1
        if rows >= total - 1 and total <= _MOST_WINDOWS:
            return width_s
    return _STEADY_S[-1]


def autocorrelation(second: Windows) -> dict[str, Any]:
    """Correlation of the counts of windows that are 1, 2, 5, 10, 30 and 60 windows apart."""
    width_s = base_window(second)
    counted = second.coarser(width_s).dense().astype(np.float64)
    counted -= counted.mean()
    power = float(counted @ counted)
    lags = [lag for lag in _LAGS if lag <= len(counted) // 4]
    return {
        "window_s": width_s,
        "lags": lags,
        "values": [float(counted[lag:] @ counted[:-lag]) / power if power else 0.0 for lag in lags],
    }


def daily(arrival_ns: Int64s) -> list[float] | None:
    """Mean rate [req/s] in each of 24 hours of the day (from midnight of epoch 0); None below one day."""
    day, hour = 86_400 * NS, 3600 * NS
    first, last = int(arrival_ns[0]), int(arrival_ns[-1])
    if last - first < day:
        return None
    found = np.zeros(24, dtype=np.int64)
    for start in range(0, len(arrival_ns), _BLOCK):
        found += np.bincount(arrival_ns[start : start + _BLOCK] % day // hour, minlength=24)
    covered = [_covered(last, edge, day, hour) - _covered(first, edge, day, hour) for edge in range(0, day, hour)]
    return [rows / max(time / NS, 1.0) for rows, time in zip(found.tolist(), covered, strict=True)]


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
    within 1 % of a multiple of their median (of the first million gaps).
    """
    resolution = shared = near = others = 0
    period: float | None = None
    for gaps in _blocks(arrival_ns):
        distinct = gaps[gaps > 0]
        shared += len(gaps) - len(distinct)
        if not len(distinct):
            continue
        resolution = int(np.gcd(resolution, np.gcd.reduce(distinct)))
        period = float(np.median(distinct)) if period is None else period
        multiple = np.rint(distinct / period)
        others += len(distinct)
        near += int(np.count_nonzero((multiple >= 1) & (np.abs(distinct - multiple * period) <= 0.01 * period)))
    batched = period is not None and shared * 2 > others and near > 0.9 * others
    return Grid(resolution, round(period) if batched and period is not None else None)
