"""HTTP/1.1 on asyncio's protocol layer: as little as possible between the socket and the time stamp.

A read is stamped before it is parsed, a request leaves by one write on the socket, and the head and the framing of the
body are the only things looked at while streams are open (httptools, a C parser). There is no task, no future and no
timer per request (`replay.deadlines` has the timeouts).

Connections are kept alive and reused, last used first; their number has no limit. A connection that was reused and
closes before any byte of an answer was stale: the request goes out once more on a new one (`attempts` 2). No redirect
is followed, no proxy is taken from the environment, nothing is asked of the server that the request does not say.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from replay.deadlines import Watch
from replay.exchange import Exchange, WireRequest

# Limits of the machine that sends: no fault of the server's.
_OURS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EACCES, errno.EPERM}


class HttpTransport:
    """All connections to one target.

    Args:
        target: `http://host:port` or `https://host:port`; a path in it is ignored, requests bring their own.
        tls: context for https; by default certificates are verified against the system's authorities.

    Attributes:
        made: connections made since the start.
        peak: most exchanges in flight at once.
    """

    name = "protocol"

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self.host, self.port, self.secure = endpoint_of(target)
        self.made = 0
        self.peak = 0
        self.idle: dict[Connection, None] = {}  # an ordered set: the last one used is taken first
        self.busy: set[Connection] = set()
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop
        self._addresses: list[tuple[Any, ...]] = []
        self._prefixes: dict[tuple[str, str], bytes] = {}
        self._watch = Watch(self._in_flight, self._give_up)

    async def open(self) -> None:
        """Resolve the host's name, once, and load the authorities. Raises OSError when the name does not resolve."""
        self._loop = asyncio.get_running_loop()
        found = await self._loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        self._addresses = [address for *_, address in found]
        if not self.secure:
            self._tls = None
        elif self._tls is None:
            self._tls = ssl.create_default_context()

    def start(self, request: WireRequest, done: Callable[[Exchange], None]) -> Exchange:
        """Send on a connection that waits, or on a new one."""
        exchange = Exchange(request, done, time.monotonic_ns())
        self._watch.add(request, exchange.started_ns)
        if self.idle:
            connection, _ = self.idle.popitem()
            self.busy.add(connection)
            connection.send(exchange)
        else:
            self.connect(exchange)
        self.peak = max(self.peak, len(self.busy))
        return exchange

    async def close(self) -> None:
        """Cut what is in flight, close what waits, and let the loop say goodbye to the sockets."""
        self._watch.stop()
        tasks = [connection.task for connection in self.busy if connection.task is not None]
        for connection in [*self.busy]:
            if connection.exchange is not None:
                connection.exchange.cancel("cut")
        for connection in self.idle:
            connection.abort()
        self.idle.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def connect(self, exchange: Exchange) -> None:
        """Carry an exchange on a new connection; for the transport's own use."""
        connection = Connection(self)
        connection.exchange = exchange
        exchange.carrier = connection
        exchange.reused = False
        exchange.written_ns = None
        exchange.last_ns = time.monotonic_ns()
        self.busy.add(connection)
        connection.task = self._loop.create_task(self._establish(connection, exchange))

    def encode(self, request: WireRequest) -> bytes:
        """The request's bytes."""
        key = (request.method, request.path)
        prefix = self._prefixes.get(key)
        if prefix is None:
            default = 443 if self.secure else 80
            host = f"[{self.host}]" if ":" in self.host else self.host
            where = host if self.port == default else f"{host}:{self.port}"
            prefix = f"{request.method} {request.path} HTTP/1.1\r\nhost: {where}\r\n".encode("ascii")
            self._prefixes[key] = prefix
        if not request.body and request.method == "GET":
            return b"%b%b\r\n" % (prefix, request.header)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (prefix, request.header, len(request.body), request.body)

    async def _establish(self, connection: Connection, exchange: Exchange) -> None:
        began_ns = time.monotonic_ns()
        try:
            await self._dial(connection)
        except OSError as error:
            connection.task = connection.exchange = None
            self.busy.discard(connection)
            exchange.finish(time.monotonic_ns(), "connect_error", describe(error))
            return
        except asyncio.CancelledError:
            connection.task = None
            connection.abort()  # it may have been made in this very round of the loop
            raise
        connection.task = None
        self.made += 1
        exchange.connect_ns = time.monotonic_ns() - began_ns
        if exchange.end_ns is None:
            connection.send(exchange)

    async def _dial(self, connection: Connection) -> None:
        """Try the host's addresses in turn; the one that answered is tried first from then on."""
        name = self.host if self.secure else None
        for index, address in enumerate(self._addresses):
            try:
                await self._loop.create_connection(
                    connection.itself, address[0], address[1], ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                if isinstance(error, ssl.SSLError) or index == len(self._addresses) - 1 or error.errno in _OURS:
                    raise
            else:
                if index:
                    self._addresses.insert(0, self._addresses.pop(index))
                return

    def _in_flight(self) -> list[Exchange]:
        return [connection.exchange for connection in self.busy if connection.exchange is not None]

    def _give_up(self, exchange: Exchange, now_ns: int, word: str) -> None:
        if exchange.carrier is not None:
            exchange.carrier.drop(exchange)
        exchange.finish(now_ns, f"timeout_{word}", f"timeout {word}")


class Connection(asyncio.Protocol):
    """One connection and the exchange on it; httptools calls its `on_*` methods.

    Attributes:
        exchange: the one in flight, None while waiting for the next.
        usable: made, and not lost or closed since.
        task: the task that makes the connection, while it does.
    """

    __slots__ = (
        "_begun",
        "_complete",
        "_descriptor",
        "_excess",
        "_head_done",
        "_heard",
        "_interim",
        "_kept",
        "_now_ns",
        "_parser",
        "_pieces",
        "_pool",
        "_transport",
        "_used",
        "exchange",
        "task",
        "usable",
    )

    def __init__(self, pool: HttpTransport) -> None:
        self.exchange: Exchange | None = None
        self.usable = False
        self.task: asyncio.Task[None] | None = None
        self._pool = pool
        self._transport: asyncio.Transport
        self._descriptor = -1  # of the socket, for writing around the loop's buffers; -1 with TLS
        self._parser: Any = httptools.HttpResponseParser(self)
        self._used = False  # has carried a whole exchange
        self._now_ns = 0  # time of the read that is being parsed, and
        self._pieces: list[bytes] = []  # the body bytes in it, without their framing
        self._heard = self._head_done = self._complete = self._interim = self._excess = self._begun = self._kept = False

    def itself(self) -> Connection:
        """What asyncio calls to get a protocol."""
        return self

    def send(self, exchange: Exchange) -> None:
        """Put the request on the wire. The connection is open and free."""
        self.exchange = exchange
        exchange.carrier = self
        exchange.reused = self._used
        self._heard = self._head_done = self._complete = self._begun = False
        data = self._pool.encode(exchange.request)
        if self._descriptor < 0:
            self._transport.write(data)
        else:
            self._write(data)
        exchange.written_ns = exchange.last_ns = time.monotonic_ns()

    def drop(self, exchange: Exchange) -> None:
        """Leave the exchange alone and close: what would still come belongs to nobody."""
        if exchange is self.exchange:
            self.exchange = None
            self._pool.busy.discard(self)
            self.abort()

    def abort(self) -> None:
        """Close at once, without waiting for anything to be sent."""
        if self.task is not None:
            self.task.cancel()
        elif self.usable:
            self.usable = False
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected (with TLS: the handshake is done)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.usable = True
        if not self._pool.secure:
            self._descriptor = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """Stamp, then parse."""
        self._now_ns = now_ns = time.monotonic_ns()
        exchange = self.exchange
        if exchange is None:
            self.abort()  # nobody asked: no answer of a later request may be taken from this connection
            return
        self._heard = True
        exchange.last_ns = now_ns
        broken: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = error
        if self._pieces:
            exchange.received(now_ns, b"".join(self._pieces))
            self._pieces.clear()
        if broken is not None and not self._complete:
            self._end("closed", f"protocol {_word(type(broken).__name__)}")
            return
        self._excess = self._excess or broken is not None
        if self._complete:
            self._answered(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        """FIN or reset; whose turn it was decides what it means."""
        now_ns = time.monotonic_ns()
        self.usable = False
        self._parser = None  # they hold each other, and the garbage collector may be off
        exchange = self.exchange
        if exchange is None:
            self._pool.idle.pop(self, None)
            return
        self._now_ns = now_ns
        if self._used and not self._heard and exchange.attempts == 1:
            self.exchange = None
            self._pool.busy.discard(self)
            exchange.attempts = 2
            self._pool.connect(exchange)
        elif exc is None and self._head_done and _until_close(exchange):
            self._end("eof", None)
        elif exc is None:
            self._end("closed", "closed")
        else:
            self._end("reset", reset_code(exc))

    def on_message_begin(self) -> None:
        """A second answer in the bytes of the first means that the connection can't be trusted."""
        self._excess = self._begun and self._complete
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        if self.exchange is not None and not self._complete:
            self.exchange.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete; an interim one (1xx) is forgotten."""
        if self.exchange is None or self._complete:
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200 and status != 101
        if self._interim:
            self.exchange.raw_headers.clear()
            return
        self._head_done = True
        self.exchange.status = status
        self.exchange.headers_ns = self._now_ns

    def on_body(self, data: bytes) -> None:
        """Body bytes without their framing."""
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The last byte of a message; `data_received` goes on from here."""
        if self._interim:
            self._interim = False
        else:
            self._complete = True
            self._kept = self._parser.should_keep_alive()  # known only here: the parser is about to forget

    def _write(self, data: bytes) -> None:
        """Write on the socket itself: the loop would keep it until the end of its round."""
        try:
            count = os.write(self._descriptor, data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            # Lost already; the loop has not told us yet. It must not call connection_lost within our caller's call.
            self._pool._loop.call_soon(self._failed, error)  # noqa: SLF001
            return
        if count < len(data):
            self._transport.write(memoryview(data)[count:])

    def _failed(self, error: OSError) -> None:
        if self.exchange is not None and self.usable:
            self.connection_lost(error)
            self._transport.abort()

    def _answered(self, exchange: Exchange) -> None:
        """The answer is complete: make the connection free before anybody hears of it."""
        self.exchange = None
        pool = self._pool
        pool.busy.discard(self)
        if self._excess or not self._kept or self._transport.get_write_buffer_size():
            self.usable = False
            self._transport.close()
        else:
            self._used = True
            pool.idle[self] = None
        exchange.finish(self._now_ns, "eof")

    def _end(self, end: str, error: str | None) -> None:
        exchange, self.exchange = self.exchange, None
        self._pool.busy.discard(self)
        self.abort()
        if exchange is not None:
            exchange.finish(self._now_ns, end, error)


def endpoint_of(target: str) -> tuple[str, int, bool]:
    """Host, port and whether TLS is spoken, of a target's URL. Raises ValueError with an example."""
    parts = urlsplit(target)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        raise ValueError(f"{target!r} is not a target: write it as http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    return parts.hostname, parts.port or (443 if secure else 80), secure


def describe(error: OSError) -> str:
    """Class and code of a failed connection: `connect ECONNREFUSED`, `tls ...`, or `client EMFILE` when it is ours."""
    if isinstance(error, ssl.SSLError):
        return f"tls {getattr(error, 'reason', None) or 'handshake'}"
    return f"{'client' if error.errno in _OURS else 'connect'} {_code(error)}"


def reset_code(error: Exception) -> str:
    """Class and code of a connection that broke: `reset ECONNRESET`."""
    return f"reset {_code(error)}"


def _code(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number, str(number)) if number else type(error).__name__


def _word(name: str) -> str:
    """`HttpParserInvalidStatusError` → `invalid-status`."""
    text = name.removeprefix("HttpParser").removesuffix("Error")
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in text).lstrip("-") or "error"


def _until_close(exchange: Exchange) -> bool:
    """Whether the answer had no other end than the connection's."""
    return not any(name.lower() in {b"content-length", b"transfer-encoding"} for name, _ in exchange.raw_headers)
