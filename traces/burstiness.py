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

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NS = 1_000_000_000


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
    starts = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
    count = np.diff(np.concatenate([starts, [len(index)]]))
    return Windows(width_ns, int(index[-1]) + 1, index[starts], count)


def idc(arrival_ns: Int64s, width_ns: int) -> float:
    """Index of dispersion of the counts at one window width."""
    return windows(arrival_ns, width_ns).idc()
