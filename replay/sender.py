"""Sends what is due, notes what has ended, and measures it when there is time: the loop of one worker.

    wake     what is due is sent, what has lost patience is given up; the alarm is set for the next moment
    ended    the transport reports an end: a cap's slot is free, a next turn may be due; nothing is parsed
    settle   in between: what has ended is measured and becomes a row (`replay.measuring`), the next bodies are built

so between the socket and the time stamp there is nothing but the transport. A turn of `settle` is a third of a
millisecond at most and waits while something is due, unless much has piled up. All times are of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from replay.counters import WorkerCounters
from replay.exchange import Exchange, WireRequest
from replay.flight import Flight, Transport
from replay.measuring import Measuring
from replay.plan import NONE, Plan
from replay.prompts import Bodies
from replay.rows import RowWriter
from replay.schedule import NEVER, Schedule
from traces.units import NS_PER_S

AHEAD = 256  # bodies built before they are due, and
AHEAD_BYTES = 8 << 20  # no more than so much of them
QUIET_NS = 150_000  # measuring waits when something is due sooner
RETRY_LIMIT_NS = 30 * NS_PER_S
RETRY_FIRST_NS = NS_PER_S // 2


class Sender:
    """Sends a schedule through a transport and turns what comes back into rows.

    Args:
        schedule: what goes when; times from T0.
        bodies: requests by row.
        transport: who carries them.
        rows: where measured rows go.
        counters: this worker's counters.
        retry: further attempts after connect errors, 429 and 5xx.
        chunks: which chunk times to keep.
        alarm: `alarm(ns)` makes `wake` be called at that moment of the monotonic clock.
        soon: makes a function be called in the loop's next turn.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        bodies: Bodies,
        transport: Transport,
        rows: RowWriter,
        counters: WorkerCounters,
        *,
        retry: int = 0,
        chunks: str = "all",
        drain_ns: int = 120 * NS_PER_S,
        alarm: Callable[[int], None],
        soon: Callable[[Callable[[], None]], Any],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.schedule, self.bodies, self.transport = schedule, bodies, transport
        self.counters = counters
        self.retry, self.drain_ns = retry, drain_ns
        self.clock = clock
        self.start_ns = 0
        self.retries = 0
        self.stopped = False
        self.drain_ended = False
        self.finished = asyncio.Event()
        self._alarm, self._soon = alarm, soon
        self._plan: Plan = bodies.plan
        self._measuring = Measuring(bodies.plan, rows, counters, chunks=chunks, clock=clock)
        self._ahead: dict[int, WireRequest] = {}
        self._ahead_bytes = 0
        self._built = 0
        self._flying: dict[Flight, None] = {}
        self._timed: list[tuple[int, int, Flight, bool]] = []  # (when, tie, flight, is a retry); else an abort
        self._ties = 0
        self._settling = False
        self._drain_ns: int | None = None
        self._dropped = 0

    def begin(self, start_ns: int) -> None:
        """The run's zero; the first wake follows by itself."""
        self.start_ns = start_ns
        self._measuring.begin(start_ns)
        self.look_ahead()
        self._arm()

    def wake(self) -> None:
        """Send all that is due now, abort what has lost patience, and set the alarm for the next."""
        schedule = self.schedule
        while (release := schedule.take(self.clock() - self.start_ns)) is not None:
            self._send(Flight(self, release))
        now_ns = self.clock()
        while self._timed and self._timed[0][0] <= now_ns:
            _, _, flight, again = heappop(self._timed)
            if again:
                self._attempt(flight)
            elif flight in self._flying and flight.exchange is not None:
                flight.exchange.cancel("client_abort")
        if schedule.finished:
            self._drain(now_ns)
        self._arm()
        self._settle_soon()

    def stop(self) -> None:
        """Send nothing more and cut what is in flight: the run was ended."""
        if not self.stopped:
            self.stopped = True
            self.schedule.stop()
            self._cut()
            self._check_finished()

    def ended(self, flight: Flight, exchange: Exchange) -> None:
        """An exchange is over: free its slot, make its next turn due, and leave the measuring for later."""
        now_ns = exchange.end_ns or self.clock()
        flight.attempts += exchange.attempts
        flight.tries += 1
        if flight.tries <= self.retry and not self.stopped and self._try_again(flight, exchange, now_ns):
            return
        self._flying.pop(flight, None)
        row = flight.release.row
        self.counters.ended(int(self._plan.tenant[row]))
        self.schedule.ended(row, now_ns - self.start_ns)
        self._measuring.add(flight, len(exchange.segments))
        if self.schedule.next_ns <= now_ns - self.start_ns:
            self._soon(self.wake)
        else:
            self._arm()
        self._settle_soon()
        if self.schedule.finished:
            self._check_finished()

    def spilled(self, flight: Flight) -> None:
        """A long answer: measure what has come of it."""
        self._measuring.feed(flight)

    def settle(self) -> None:
        """Measure what has ended and build what is due next, a slice at a time, when nothing is due right now."""
        self._settling = False
        now_ns = self.clock()
        due_ns = self.schedule.next_ns
        gap_ns = due_ns + self.start_ns - now_ns if due_ns < NEVER else NEVER
        measuring = self._measuring
        if gap_ns < QUIET_NS and not measuring.full:
            return  # the next wake comes back to it
        slice_ns = measuring.slice_ns
        until_ns = now_ns + (slice_ns if measuring.full else min(slice_ns, max(gap_ns, QUIET_NS)))
        measuring.turn(now_ns, until_ns)
        while self.clock() < until_ns and self._build():
            pass
        if measuring.waits:
            self._settle_soon()
        elif self.schedule.finished:
            self._check_finished()

    def beat(self, lag_ns: int) -> None:
        """A sign of life, and a turn for what waits: bodies ahead, rows to be measured."""
        schedule, counters = self.schedule, self.counters
        counters.beat(
            self.clock(),
            backlog=len(self._measuring),
            lag_ns=lag_ns,
            connections=self.transport.made,
            dropped=len(schedule.dropped),
        )
        for tenant, count in schedule.held_by_tenant():
            counters.held(tenant, count)
        for row in schedule.dropped[self._dropped :]:
            self._request(row)  # its body is not needed any more
        self._dropped = len(schedule.dropped)
        self._settle_soon()

    def look_ahead(self) -> None:
        """Build the bodies of the next first turns."""
        while self._build():
            pass

    def _build(self) -> bool:
        """One more body ahead of its time; False when there are enough."""
        place = self.schedule.place
        index = max(self._built, place)
        if index >= min(place + AHEAD, self.schedule.first_turns) or self._ahead_bytes > AHEAD_BYTES:
            return False
        row = self.schedule.first_turn(index)
        request = self._ahead[row] = self.bodies.request(row)
        self._ahead_bytes += len(request.body)
        self._built = index + 1
        return True

    def _request(self, row: int) -> WireRequest:
        request = self._ahead.pop(row, None)
        if request is None:
            return self.bodies.request(row)
        self._ahead_bytes -= len(request.body)
        return request

    def _send(self, flight: Flight) -> None:
        flight.sent_ns = self.clock()
        release, row = flight.release, flight.release.row
        late_ns = None if release.due_ns is None else flight.sent_ns - self.start_ns - release.released_ns
        self._flying[flight] = None
        self.counters.sent(int(self._plan.tenant[row]), late_ns)
        patience_ns = int(self._plan.abort_ns[row])
        self._attempt(flight)
        if patience_ns != NONE:
            self._at(flight.sent_ns + patience_ns, flight, again=False)

    def _attempt(self, flight: Flight) -> None:
        row = flight.release.row
        exchange = self.transport.start(self._request(row), flight.done)
        if not flight.attempts and flight.exchange is None:
            flight.sent_ns = exchange.started_ns
        flight.exchange = exchange
        exchange.spill = flight.spill

    def _try_again(self, flight: Flight, exchange: Exchange, now_ns: int) -> bool:
        status = exchange.status
        if exchange.end != "connect_error" and not (status is not None and (status == 429 or 500 <= status < 600)):
            return False
        wait_ns = min(RETRY_FIRST_NS << (flight.tries - 1), RETRY_LIMIT_NS)
        for name, value in exchange.headers:
            if name.lower() == "retry-after" and value.strip().isdigit():
                wait_ns = min(int(value) * NS_PER_S, RETRY_LIMIT_NS)
        self.retries += 1
        self.counters.retried()
        flight.meter = None
        self._at(now_ns + wait_ns, flight, again=True)
        return True

    def _at(self, when_ns: int, flight: Flight, *, again: bool) -> None:
        self._ties += 1
        heappush(self._timed, (when_ns, self._ties, flight, again))
        self._arm()

    def _arm(self) -> None:
        due_ns = self.schedule.next_ns
        when_ns = due_ns + self.start_ns if due_ns < NEVER else NEVER
        if self._timed:
            when_ns = min(when_ns, self._timed[0][0])
        if self._drain_ns is not None:
            when_ns = min(when_ns, self._drain_ns)
        if when_ns < NEVER:
            self._alarm(when_ns)

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self._soon(self.settle)

    def _drain(self, now_ns: int) -> None:
        """All is sent: what is in flight has until the end of the drain."""
        if self._drain_ns is None:
            self._drain_ns = now_ns + self.drain_ns
        elif now_ns >= self._drain_ns and self._flying:
            self.drain_ended = True
            self._cut()
        if self._drain_ns <= now_ns:
            self._drain_ns = NEVER
        self._check_finished()

    def _cut(self) -> None:
        waiting = [flight for _, _, flight, again in self._timed if again]
        self._timed.clear()
        self.retry = 0
        for flight in list(self._flying):
            if flight.exchange is not None and flight.exchange.end_ns is None:
                flight.exchange.cancel("cut")
        for flight in waiting:  # between two attempts: its last answer stands
            if flight in self._flying and flight.exchange is not None:
                flight.attempts -= flight.exchange.attempts
                self.ended(flight, flight.exchange)

    def _check_finished(self) -> None:
        if self.schedule.finished and not self._flying and not self._measuring:
            self.finished.set()
