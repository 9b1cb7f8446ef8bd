"""What a running replay tells its viewer: counters that only grow, filled by the senders, read by the live view.

A sender process adds to one row of an int64 array per tenant (shared memory, one writer a row, no lock): the counts
of FIELDS, then one histogram for each of TIMES. The viewer sums the rows of all processes into a `LiveSnapshot` and
compares it with earlier ones; rates and the last 30 s are differences. Histograms have logarithmic buckets 5 %
wide, so a percentile seen live is right to 5 %; the final result is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FIELDS = ("sent", "done", "ok", "failed", "aborted", "held", "output_tokens")
"""sent: first attempts begun. done: ended in any way. ok, failed, aborted: parts of done. held: held by a cap now (goes
down too). output_tokens: received so far, of running answers too where the sender counts them."""

TIMES = ("ttft", "tpot", "e2e", "late")
BUCKETS = 360
LEAST_MS = 0.1
WIDTH = 1.05
ROW = len(FIELDS) + len(TIMES) * BUCKETS
"""Length of one tenant's row in the shared array."""

_LOG_WIDTH = math.log(WIDTH)


def bucket(value_ms: float) -> int:
    """The bucket of a time in ms: 0 up to LEAST_MS, the last one for 4 × 10⁶ ms and more, and for +∞."""
    if value_ms <= LEAST_MS:
        return 0
    if value_ms == math.inf:
        return BUCKETS - 1
    return min(BUCKETS - 1, 1 + int(math.log(value_ms / LEAST_MS) / _LOG_WIDTH))


def field(name: str) -> int:
    """Where a count stands in a tenant's row."""
    return FIELDS.index(name)


def place(time: str, value_ms: float) -> int:
    """Where in a tenant's row a time is counted: ``row[place("ttft", 412.0)] += 1``."""
    return len(FIELDS) + TIMES.index(time) * BUCKETS + bucket(value_ms)


def upper_edges_ms() -> NDArray[np.float64]:
    """The upper edge of each bucket; the last one is +∞."""
    edges = LEAST_MS * WIDTH ** np.arange(BUCKETS, dtype=np.float64)
    edges[-1] = math.inf
    return edges


class TenantLive(NamedTuple):
    """One tenant at one moment; counts since the start, all processes together."""

    name: str
    priority: int | None
    planned: int
    sent: int
    done: int
    ok: int
    failed: int
    aborted: int
    held: int
    output_tokens: int
    times: dict[str, NDArray[np.int64]]  # by TIMES: counts per bucket

    @property
    def in_flight(self) -> int:
        """Sent and not ended."""
        return max(0, self.sent - self.done)


class LiveSnapshot(NamedTuple):
    """A run at one moment."""

    elapsed_ns: int  # since the common start; below 0 while waiting for it
    planned_ns: int  # last due time of the schedule, from the start
    tenants: tuple[TenantLive, ...]
    stage: str = "sending"  # "sending", "draining" or "stopping"
    failures: dict[str, int] = {}  # outcome → count, where the sender knows it live  # noqa: RUF012


def snapshot(
    elapsed_ns: int,
    planned_ns: int,
    names: list[str],
    priorities: list[int | None],
    planned: list[int],
    *,
    rows: NDArray[np.int64],
    stage: str = "sending",
    failures: dict[str, int] | None = None,
) -> LiveSnapshot:
    """A snapshot of the shared array.

    Args:
        elapsed_ns: since the common start.
        planned_ns: last due time.
        names: tenants, in the order of the array.
        priorities: their ranks.
        planned: requests planned for each.
        rows: shape (processes, tenants, ROW) or (tenants, ROW); not kept.
        stage: see LiveSnapshot.
        failures: see LiveSnapshot.
    """
    total = rows.sum(axis=0) if rows.ndim == 3 else rows.copy()
    found = []
    for number, name in enumerate(names):
        row = total[number]
        counts = {key: int(row[place_]) for place_, key in enumerate(FIELDS)}
        histograms = row[len(FIELDS) :].reshape(len(TIMES), BUCKETS)
        times = {key: histograms[place_] for place_, key in enumerate(TIMES)}
        found.append(TenantLive(name=name, priority=priorities[number], planned=planned[number], times=times, **counts))
    return LiveSnapshot(elapsed_ns, planned_ns, tuple(found), stage, failures or {})


def percentile_ms(counts: NDArray[np.int64], q: float) -> float | None:
    """The q-quantile of a histogram as the upper edge of its bucket; None when it is empty, +∞ where failures are."""
    total = int(counts.sum())
    if total == 0:
        return None
    wanted = max(1, math.ceil(q * total - 1e-9))
    return float(upper_edges_ms()[int(np.searchsorted(np.cumsum(counts), wanted))])
