"""What has ended becomes rows when there is time: the reads of an answer are measured and its row is written.

The sender's loop gives it turns (`turn`), each no longer than it is told: a slice of reads to a meter at a time, a
column of a batch at a time. An answer that is like the one before it is measured as a whole (`traces.lookalike`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import cast

from replay.counters import WorkerCounters
from replay.exchange import Exchange
from replay.flight import Flight
from replay.plan import Plan
from replay.rows import RowWriter
from traces.lookalike import Lookalike
from traces.meter import End, Measured, Meter
from traces.record import ENDPOINTS
from traces.units import NS_PER_S

SLICE_NS = 300_000  # one turn of measuring between two looks at the sockets
FEED = 64  # reads fed to a meter at a time
FLUSH_NS = NS_PER_S
PRESSING, PRESSING_READS = 64, 4_096  # so many exchanges or reads that wait make the turn longer by as much again
BACKLOG, BACKLOG_READS = 1_000, 32_768  # so many may wait before measuring no longer waits for a quiet moment
_NS_PER_MS = 1e6


class Measuring:
    """The flights of one worker that have ended, until they are rows.

    Args:
        plan: what was sent.
        rows: where measured rows go.
        counters: this worker's counters.
        chunks: which chunk times to keep.
        clock: the monotonic clock.
    """

    def __init__(
        self, plan: Plan, rows: RowWriter, counters: WorkerCounters, *, chunks: str, clock: Callable[[], int]
    ) -> None:
        self._plan, self._rows, self._counters = plan, rows, counters
        self._chunks, self._clock = chunks, clock
        self._start_ns = self._flushed_ns = 0
        self._over: deque[Flight] = deque()
        self._reads = 0  # theirs
        self._alike = [Lookalike() for _ in ENDPOINTS]

    def __len__(self) -> int:
        """Flights that wait."""
        return len(self._over)

    @property
    def waits(self) -> bool:
        """Whether a further turn is wanted."""
        return bool(self._over) or self._rows.making

    @property
    def full(self) -> bool:
        """Whether so much waits that measuring cannot wait for a quiet moment."""
        return len(self._over) >= BACKLOG or self._reads >= BACKLOG_READS

    @property
    def slice_ns(self) -> int:
        """How long a turn should be."""
        return SLICE_NS * (1 + max(len(self._over) // PRESSING, self._reads // PRESSING_READS))

    def begin(self, start_ns: int) -> None:
        """The run's zero."""
        self._start_ns = self._flushed_ns = start_ns

    def add(self, flight: Flight, reads: int) -> None:
        """A flight that has ended, with so many reads that wait."""
        self._over.append(flight)
        self._reads += reads

    def turn(self, now_ns: int, until_ns: int) -> None:
        """Measure what waits and write rows until `until_ns`: a slice and a step at least."""
        while self._over:
            exchange = self._over[0].exchange
            reads = 0 if exchange is None else len(exchange.segments)
            if self._measure(self._over[0]):
                self._over.popleft()
            self._reads -= min(FEED, reads)
            if self._clock() > until_ns:
                break
        self._write(now_ns, until_ns)

    def feed(self, flight: Flight, limit: int | None = None) -> None:
        """Give up to `limit` reads of a flight (all) to its meter."""
        exchange = flight.exchange
        assert exchange is not None
        meter = flight.meter
        if meter is None:
            meter = flight.meter = self._meter(flight)
            if exchange.status is not None and exchange.headers_ns is not None:
                meter.head(exchange.headers_ns, exchange.status, exchange.headers)
        segments = exchange.segments
        if limit is None or len(segments) <= limit:
            meter.feed_all(segments)
            segments.clear()
            return
        meter.feed_all(segments[:limit])
        del segments[:limit]

    def _measure(self, flight: Flight) -> bool:
        """Feed a slice of a flight; at its end write its row. True when that is done."""
        exchange = flight.exchange
        assert exchange is not None
        measured = self._as_before(flight, exchange) or self._by_meter(flight, exchange)
        if measured is None:
            return False
        if exchange.error is not None and measured.error is None and measured.outcome != "ok":
            measured.error = exchange.error
        release, row, start_ns = flight.release, flight.release.row, self._start_ns
        sent_ns = flight.sent_ns - start_ns
        origin_ns = sent_ns if release.due_ns is None else release.due_ns
        self._rows.append(
            row,
            (
                release.due_ns,
                release.released_ns if release.due_ns is not None else sent_ns,
                sent_ns,
                exchange.connect_ns,
                flight.attempts,
                len(exchange.request.body),
            ),
            measured,
        )
        tenant = int(self._plan.tenant[row])
        self._counters.measured(
            tenant, measured.outcome, measured.output_tokens or 0, _times_ms(measured, sent_ns - origin_ns)
        )
        flight.exchange = flight.meter = None
        return True

    def _as_before(self, flight: Flight, exchange: Exchange) -> Measured | None:
        """The measured row of a short answer that is like the one before it."""
        reads = exchange.segments
        if flight.meter is not None or exchange.end != "eof" or exchange.status != 200 or not 0 < len(reads) <= FEED:
            return None
        alike = self._alike[int(self._plan.endpoint[flight.release.row])]
        measured = alike.measure(exchange.raw_headers, reads, flight.sent_ns)
        if measured is not None:
            measured.status = 200
            measured.headers_ns = (exchange.headers_ns or 0) - flight.sent_ns
            measured.end_ns = (exchange.end_ns or 0) - flight.sent_ns
            reads.clear()
        return measured

    def _by_meter(self, flight: Flight, exchange: Exchange) -> Measured | None:
        """The measured row when all reads are fed; None while some are left for the next turn."""
        whole = exchange.segments[:] if flight.meter is None and len(exchange.segments) <= FEED else []
        self.feed(flight, FEED)
        if exchange.segments:
            return None
        assert flight.meter is not None
        measured = flight.meter.close(exchange.end_ns or 0, cast("End", exchange.end or "cut"))
        if whole and exchange.end == "eof" and exchange.status == 200 and self._chunks == "all":
            alike = self._alike[int(self._plan.endpoint[flight.release.row])]
            alike.learn(exchange.raw_headers, whole, measured)
        return measured

    def _meter(self, flight: Flight) -> Meter:
        row, plan = flight.release.row, self._plan
        return Meter(
            endpoint=ENDPOINTS[int(plan.endpoint[row])],
            stream=bool(plan.stream[row]),
            n=int(plan.n[row]),
            start_ns=flight.sent_ns,
            chunks=self._chunks,
            max_tokens=int(plan.output_tokens[row]),
        )

    def _write(self, now_ns: int, until_ns: int) -> None:
        """Go on with a batch of rows, or begin one when enough have gathered or a second is over: a step at least."""
        rows = self._rows
        if not rows.making:
            if not rows.full and not (rows and now_ns - self._flushed_ns > FLUSH_NS):
                return
            self._flushed_ns = now_ns
            rows.step()
        while rows.making:
            rows.step()
            if self._clock() > until_ns:
                return


def _times_ms(measured: Measured, offset_ns: int) -> dict[str, float]:
    """The times of an answer for the live view; `offset_ns` from due to sent."""
    if measured.outcome in {"client_abort", "cut"}:
        return {}
    if measured.outcome != "ok":
        return {"ttft": math.inf, "e2e": math.inf}
    found = {}
    if measured.first_token_ns is not None:
        found["ttft"] = (measured.first_token_ns + offset_ns) / _NS_PER_MS
        gaps = (measured.output_tokens or 0) - 1
        if measured.last_token_ns is not None and gaps > 0 and measured.last_token_ns > measured.first_token_ns:
            found["tpot"] = (measured.last_token_ns - measured.first_token_ns) / gaps / _NS_PER_MS
    if measured.end_ns is not None:
        found["e2e"] = (measured.end_ns + offset_ns) / _NS_PER_MS
    return found
