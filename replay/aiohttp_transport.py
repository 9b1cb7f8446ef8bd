"""The same exchanges carried by aiohttp: `--transport aiohttp`, for odd servers and for comparison.

It costs several times the CPU of `replay.connection` per request, and a time stamp is taken when the reading task runs,
not when the bytes arrive. Everything else is the same: outcomes, timeouts (`replay.deadlines`), one more attempt on a
stale connection, no redirects, nothing taken from the environment.
"""

from __future__ import annotations

import asyncio
import io
import ssl
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from replay.connection import describe, endpoint_of, reset_code
from replay.deadlines import Watch
from replay.exchange import Exchange, WireRequest

LARGE_BYTES = 1 << 20  # aiohttp wants larger bodies as files
_OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # aiohttp would add them


class AiohttpTransport:
    """All connections to one target; arguments and attributes as `connection.HttpTransport`."""

    name = "aiohttp"

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self.host, self.port, self.secure = endpoint_of(target)
        self.made = 0
        self.peak = 0
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._origin = f"{'https' if self.secure else 'http'}://{host}:{self.port}"
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop
        self._session: aiohttp.ClientSession  # keeps connections
        self._fresh: aiohttp.ClientSession  # never reuses one: for second attempts
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        self._headers: dict[bytes, CIMultiDict[str]] = {}
        self._watch = Watch(lambda: self._tasks, self._give_up)

    async def open(self) -> None:
        """Resolve the name once, so that a wrong one is an OSError here, and prepare the sessions."""
        self._loop = asyncio.get_running_loop()
        await self._loop.getaddrinfo(self.host, self.port)
        self._session = self._new_session(force_close=False)
        self._fresh = self._new_session(force_close=True)

    def start(self, request: WireRequest, done: Callable[[Exchange], None]) -> Exchange:
        """Send in a task of its own."""
        exchange = Exchange(request, done, time.monotonic_ns())
        exchange.carrier = self
        self._watch.add(request, exchange.started_ns)
        self._tasks[exchange] = self._loop.create_task(self._run(exchange))
        self.peak = max(self.peak, len(self._tasks))
        return exchange

    def drop(self, exchange: Exchange) -> None:
        """Close the exchange's connection."""
        task = self._tasks.pop(exchange, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cut what is in flight, and close all connections."""
        self._watch.stop()
        tasks = list(self._tasks.values())
        for exchange in list(self._tasks):
            exchange.cancel("cut")
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()
        await self._fresh.close()
        await asyncio.sleep(0)

    def _new_session(self, *, force_close: bool) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_connecting)
        trace.on_connection_create_end.append(self._connected)
        trace.on_connection_reuseconn.append(_reused)
        trace.on_request_headers_sent.append(_written)
        kept: dict[str, Any] = {} if force_close else {"keepalive_timeout": 3600}
        context = self._tls if self.secure and self._tls is not None else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=force_close, ssl=context, **kept),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_OWN_HEADERS,
            trace_configs=[trace],
            max_line_size=1 << 20,
            max_field_size=1 << 20,
        )

    def _give_up(self, exchange: Exchange, now_ns: int, word: str) -> None:
        self.drop(exchange)
        exchange.finish(now_ns, f"timeout_{word}", f"timeout {word}")

    async def _run(self, exchange: Exchange) -> None:
        end: str = "eof"
        text: str | None = None
        try:
            try:
                await self._attempt(self._session, exchange)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                stale = exchange.reused and exchange.status is None and exchange.end_ns is None
                if not stale or isinstance(error, aiohttp.ClientConnectorError):
                    raise
                exchange.attempts = 2
                exchange.written_ns, exchange.reused, exchange.last_ns = None, False, time.monotonic_ns()
                await self._attempt(self._fresh, exchange)
        except Exception as error:  # noqa: BLE001 whatever aiohttp raises is an outcome; a run never ends by it
            end, text = judge(error)
        self._tasks.pop(exchange, None)
        exchange.finish(time.monotonic_ns(), end, text)

    async def _attempt(self, session: aiohttp.ClientSession, exchange: Exchange) -> None:
        request = exchange.request
        body = request.body if len(request.body) <= LARGE_BYTES else io.BytesIO(request.body)
        async with session.request(
            request.method,
            URL(self._origin + request.path, encoded=True),
            data=body or None,
            headers=self._decoded(request.header),
            allow_redirects=False,
            trace_request_ctx=exchange,
        ) as response:
            exchange.headers_ns = exchange.last_ns = time.monotonic_ns()
            exchange.status = response.status
            exchange.raw_headers = list(response.raw_headers)
            async for data in response.content.iter_any():
                now_ns = time.monotonic_ns()
                exchange.last_ns = now_ns
                exchange.received(now_ns, data)

    async def _connected(self, _session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
        exchange: Exchange = context.trace_request_ctx
        now_ns = time.monotonic_ns()
        exchange.connect_ns = now_ns - context.began_ns
        exchange.written_ns = exchange.last_ns = now_ns
        self.made += 1

    def _decoded(self, header: bytes) -> CIMultiDict[str]:
        found = self._headers.get(header)
        if found is None:
            found = self._headers[header] = CIMultiDict(_pairs(header))
        return found


async def _connecting(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    context.began_ns = time.monotonic_ns()


async def _reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    exchange: Exchange = context.trace_request_ctx
    exchange.reused = True
    exchange.written_ns = exchange.last_ns = time.monotonic_ns()


async def _written(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    exchange: Exchange = context.trace_request_ctx
    exchange.written_ns = exchange.last_ns = time.monotonic_ns()


def judge(error: Exception) -> tuple[str, str]:
    """The end and the error text of what aiohttp raised."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "connect_error", "tls CERTIFICATE_VERIFY_FAILED"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect_error", describe(error.os_error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return "reset", reset_code(cause)
        cause = cause.__cause__
    if "ConnectionResetError" in str(error):  # of a cut body aiohttp keeps the cause in its text only
        return "reset", "reset ECONNRESET"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "closed", "closed"
    known = isinstance(error, aiohttp.ClientError | ValueError)
    return "closed", f"{'protocol' if known else 'client'} {type(error).__name__}"


def _pairs(header: bytes) -> Iterator[tuple[str, str]]:
    for line in header.decode("latin-1").split("\r\n"):
        if line:
            name, _, value = line.partition(":")
            yield name, value.strip()
