"""One request on the wire and what came back of it, whatever carries it.

A transport takes a `WireRequest` and gives an `Exchange` at once; it fills the exchange as bytes arrive and calls
`done` once when it has ended, however it ended. Nothing here interprets a body: an exchange keeps the body's bytes,
HTTP's framing removed, each with the time of the read that brought it, and `traces.meter` makes a response of them
afterwards, outside the moment that matters.

    transport.start(request, done) ──► Exchange: started → (connected) → written → head → segments ... → end
                                                 └────────────── attempt 2, when a reused connection was dead

All times are `time.monotonic_ns()`.

How an exchange ends (`end`), in the words of the meter:

| end | meaning |
|---|---|
| `eof` | the answer is complete by HTTP's own framing |
| `closed`, `reset` | the connection ended first, by FIN or by reset (also: bytes that are not HTTP) |
| `connect_error` | no connection; `error` tells whose limit it was |
| `timeout_connect`, `timeout_idle`, `timeout_total` | we gave up |
| `client_abort`, `cut`, ... | whatever `cancel` was called with |

`error` is a class and a code: `connect ECONNREFUSED`, `tls CERTIFICATE_VERIFY_FAILED`, `reset ECONNRESET`, `closed`,
`timeout idle`, `protocol ...`. The class `client` is this machine's own limit (`client EMFILE`,
`client EADDRNOTAVAIL`): not the server's failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

SPILL_BYTES = 64 * 1024  # body bytes that may wait in `Exchange.segments` before `spill` is called


class WireRequest(msgspec.Struct, frozen=True, gc=False):
    """What goes on the wire: built ahead, so that sending is one write.

    Attributes:
        method: HTTP method.
        path: absolute path with query, as sent.
        header: encoded header lines, each ending in CRLF, without Host and Content-Length.
        body: the whole body.
        connect_ns: limit of connecting, TLS included; 0 = none.
        idle_ns: limit between two reads, waiting for the head included; 0 = none.
        total_ns: limit from start to end; 0 = none.
    """

    method: str
    path: str
    header: bytes
    body: bytes
    connect_ns: int = 0
    idle_ns: int = 0
    total_ns: int = 0


class Carrier(Protocol):
    """Who moves an exchange's bytes at the moment."""

    def drop(self, exchange: Exchange) -> None:
        """Stop moving them: the exchange has ended from our side."""


class Exchange:
    """A request in flight, then its answer.

    Attributes:
        request: what was asked.
        started_ns: when the first attempt began (a connection was taken, or its making began).
        connect_ns: time spent connecting, TLS included; None when the connection was reused.
        written_ns: when the request had been handed to the kernel (with TLS: to the event loop).
        status: HTTP status; None without a head.
        raw_headers: name and value as bytes, in order.
        headers_ns: last byte of the head.
        segments: body bytes as (time of the read, bytes), in order; whoever reads them may clear the list.
        end_ns: when it ended; None while in flight.
        end: how it ended (see the module).
        error: class and code; None when the answer is complete.
        reused: the (last) connection had carried a request before.
        attempts: 2 when a reused connection closed before any byte of an answer.
        spill: when set, called with the exchange each time more than SPILL_BYTES wait in `segments`: take them there,
            clear the list, and a stream of any length costs the same memory.
    """

    __slots__ = (
        "attempts",
        "carrier",
        "connect_ns",
        "done",
        "end",
        "end_ns",
        "error",
        "headers_ns",
        "last_ns",
        "raw_headers",
        "request",
        "reused",
        "segments",
        "spill",
        "started_ns",
        "status",
        "waiting_bytes",
        "written_ns",
    )

    def __init__(self, request: WireRequest, done: Callable[[Exchange], None], started_ns: int) -> None:
        self.request = request
        self.done = done
        self.started_ns = started_ns
        self.connect_ns: int | None = None
        self.written_ns: int | None = None
        self.status: int | None = None
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.headers_ns: int | None = None
        self.segments: list[tuple[int, bytes]] = []
        self.end_ns: int | None = None
        self.end: str | None = None
        self.error: str | None = None
        self.reused = False
        self.attempts = 1
        self.spill: Callable[[Exchange], None] | None = None
        self.carrier: Carrier | None = None
        self.last_ns = started_ns  # last sign of life: what the idle timeout counts from
        self.waiting_bytes = 0

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Response headers as text, names as the server wrote them."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.raw_headers]

    def finish(self, now_ns: int, end: str, error: str | None = None) -> None:
        """End it and tell `done`; called by the transport. A second end is ignored."""
        if self.end_ns is not None:
            return
        self.end_ns = now_ns
        self.end = end
        self.error = error
        self.carrier = None
        self.done(self)

    def received(self, now_ns: int, data: bytes) -> None:
        """Body bytes have arrived; called by the transport."""
        self.segments.append((now_ns, data))
        self.waiting_bytes += len(data)
        if self.waiting_bytes > SPILL_BYTES:
            self.waiting_bytes = 0
            if self.spill is not None:
                self.spill(self)

    def cancel(self, end: str) -> None:
        """Give it up from our side, as `client_abort` or `cut`: the connection closes and `done` is called, now."""
        if self.end_ns is not None:
            return
        carrier = self.carrier
        self.finish(time.monotonic_ns(), end, end.replace("_", " "))
        if carrier is not None:
            carrier.drop(self)


class Transport(Protocol):
    """What a worker needs of a transport: one target, any number of exchanges."""

    name: str

    async def open(self) -> None:
        """Resolve the target's name and prepare TLS. Raises OSError when the name does not resolve."""

    def start(self, request: WireRequest, done: Callable[[Exchange], None]) -> Exchange:
        """Send it now. `done` is called once, from the event loop, never from inside this call."""

    async def close(self) -> None:
        """Close idle connections and cut what is still in flight."""
