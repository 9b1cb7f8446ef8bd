"""Timeouts without a timer per request or per chunk.

The earliest possible deadline of all exchanges has the only timer. When it rings, every exchange in flight is looked
at: those past their deadline are given up, the others were alive since and move the timer on. A read costs one
assignment (`last_ns`), and with limits of seconds there are a few looks a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from replay.exchange import Exchange, WireRequest

MIN_LOOK_NS = 1_000_000  # two looks are at least this far apart


def deadline(exchange: Exchange) -> tuple[int, str] | None:
    """When an exchange is given up and by which limit (`connect`, `idle`, `total`); None when it has none.

    Connecting counts from the attempt's begin, idleness from the last read or write, the total from the start.
    """
    request = exchange.request
    word, limit_ns = ("connect", request.connect_ns) if exchange.written_ns is None else ("idle", request.idle_ns)
    silent_ns = exchange.last_ns + limit_ns
    total_ns = exchange.started_ns + request.total_ns
    if limit_ns and (not request.total_ns or silent_ns <= total_ns):
        return silent_ns, word
    return (total_ns, "total") if request.total_ns else None


class Watch:
    """The one timer of a transport.

    Args:
        in_flight: gives the exchanges to look at.
        give_up: ends one: `give_up(exchange, now_ns, word)`.
    """

    def __init__(
        self, in_flight: Callable[[], Iterable[Exchange]], give_up: Callable[[Exchange, int, str], None]
    ) -> None:
        self._in_flight = in_flight
        self._give_up = give_up
        self._look_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: WireRequest, now_ns: int) -> None:
        """An exchange begins now: its first deadline can't be earlier than its smallest limit."""
        connect_ns, idle_ns, total_ns = request.connect_ns, request.idle_ns, request.total_ns
        if connect_ns or idle_ns or total_ns:
            self._set(now_ns + min(limit for limit in (connect_ns, idle_ns, total_ns) if limit))

    def stop(self) -> None:
        """No more looks."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_ns = self._timer = None

    def _set(self, when_ns: int) -> None:
        if self._look_ns is not None and self._look_ns <= when_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._look_ns = when_ns
        wait_s = max(when_ns - time.monotonic_ns(), MIN_LOOK_NS) / 1e9
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._look_ns = self._timer = None
        now_ns = time.monotonic_ns()
        earliest_ns: int | None = None
        for exchange in list(self._in_flight()):
            found = deadline(exchange)
            if found is None or exchange.end_ns is not None:
                continue
            if found[0] <= now_ns:
                self._give_up(exchange, now_ns, found[1])
            elif earliest_ns is None or found[0] < earliest_ns:
                earliest_ns = found[0]
        if earliest_ns is not None:
            self._set(earliest_ns)
