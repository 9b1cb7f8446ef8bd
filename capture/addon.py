"""The mitmproxy addon: hooks only. `mitmdump -s capture/addon.py --set capture_out=traces/staging` loads it by itself.

    requestheaders    a body that is too long to read, or of unknown length, streams through on its way
    request           time zero: the whole request has arrived
    responseheaders   the head is stamped; every piece of the body is stamped, measured and passed on as it came
    response, error   the end, whichever comes first: one row

A flow is known by its id until its end; nothing keeps the flow itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

# mitmproxy loads a script by its path, puts its folder first on sys.path and leaves it there: put the project there
# instead, so that `capture`, `traces` and `tenants` are found and nothing in this folder hides a standard module.
_HERE = Path(__file__).resolve().parent
if __name__.startswith("__mitmproxy_script__"):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    if str(_HERE.parent) not in sys.path:
        sys.path.insert(0, str(_HERE.parent))

from mitmproxy import ctx, exceptions, http  # noqa: E402
from mitmproxy.addonmanager import Loader  # noqa: E402
from mitmproxy.connection import Client, Connection  # noqa: E402
from mitmproxy.proxy.server_hooks import ServerConnectionHookData  # noqa: E402

from capture import rules  # noqa: E402
from capture.ending import end_of, no_connection  # noqa: E402
from capture.exchange import Answer, Exchange  # noqa: E402
from capture.recorder import ANSWERS_BYTES, Recorder, prepared  # noqa: E402
from capture.settings import CHUNKS, Settings  # noqa: E402
from capture.voice import say  # noqa: E402
from traces.errors import TraceError  # noqa: E402
from traces.meter import End, Meter  # noqa: E402

CONNECTIONS = 10_000  # of one client to one server, and
SILENCE_S = 24 * 3600  # how long they may be silent

Piece = Callable[[bytes], bytes | Iterable[bytes]]
Clock = Callable[[], int]


class Capture:
    """Records requests to LLMs.

    Args:
        settings: None to take them from mitmproxy's options (`capture_*`).
        recorder: given by the `capture` command; else made from the settings when mitmproxy runs.
        clock_of: gives the clock for a flow's response, which tells when the bytes at hand came; None for one that
            tells the time (the bytes came a little earlier).
    """

    def __init__(
        self,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        clock_of: Callable[[http.HTTPFlow], Clock] | None = None,
    ) -> None:
        self.settings, self.recorder = settings, recorder
        self._clock_of = clock_of or (lambda _flow: time.monotonic_ns)
        self._own = recorder is None
        self._open: dict[str, Exchange] = {}
        self._readers: WeakKeyDictionary[Connection, object] = WeakKeyDictionary()
        self._idle: asyncio.Event | None = None
        self._number = 0
        self._wall_ns, self._mono_ns = time.time_ns(), time.monotonic_ns()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        self._idle = asyncio.Event()
        if self._open:
            await self._idle.wait()

    # --- life ------------------------------------------------------------------------------------------------------

    def load(self, loader: Loader) -> None:
        """Declare the options."""
        if self.settings is not None:
            return
        defaults = Settings(out="captured")
        for name, kind, text in (
            ("out", str, "Folder to record into."),
            ("chunks", str, f"Chunk times to keep: {', '.join(CHUNKS)}."),
            ("tenant", str, "How a tenant is told: header:NAME, key, path:REGEX or model, separated by commas."),
            ("tenants", str, "A tenants.toml, whose match rules come first."),
            ("session_header", str, "Header that names a session."),
            ("dialect", str, "How priorities on the wire are read."),
            ("tokenizer", str, "Tokenizer file."),
            ("block_size", int, "Prefix block, in characters (in tokens with a tokenizer)."),
            ("keep_salt", bool, "Keep the salt of the hashes in the folder."),
            ("max_bytes", int, "Keep at most so many bytes of parts; 0 = no bound."),
        ):
            loader.add_option(f"capture_{name}", kind, getattr(defaults, name), text)

    def configure(self, updated: set[str]) -> None:
        """Check the options."""
        if self.settings is None and any(name.startswith("capture_") for name in updated):
            with _as_options_error():
                self._from_options()

    def running(self) -> None:
        """Start recording."""
        if ctx.master.addons.get("view") is not None:
            say("mitmproxy's own view keeps every flow in memory; record with capture or mitmdump")
        if self.recorder is None:
            with _as_options_error():
                self.settings = prepared(self._from_options())
                self.recorder = Recorder(self.settings, say)
            self.recorder.start()
            say(f"recording to {self.settings.out}")

    def done(self) -> None:
        """Requests in flight become rows with outcome `cut`; then everything is written."""
        for flow_id in list(self._open):
            self._finish(flow_id, "cut")
        if self.recorder is not None and self._own:
            self.recorder.stop()
            say(f"recorded {self.recorder.counts.rows} rows, {self.recorder.counts.dropped} dropped")

    def client_connected(self, client: Client) -> None:
        """Lift two limits of mitmproxy's that people never meet in a browser, and LLM traffic does.

        A client has at most 5 connections to one server, so of an HTTP/2 client's requests the sixth would wait for one
        of the others to end (mitmproxy/proxy/server.py, `max_conns`); and one that is silent for 10 minutes is cut off,
        as a long queue's are (`TCP_TIMEOUT`).
        """
        proxyserver = ctx.master.addons.get("proxyserver")
        handler = proxyserver.connections.get(client.id) if proxyserver is not None else None
        if handler is not None:
            handler.max_conns = defaultdict(lambda: asyncio.Semaphore(CONNECTIONS))
            handler.timeout_watchdog.timeout = SILENCE_S

    # --- requests --------------------------------------------------------------------------------------------------

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """A body that is longer than we read, or does not say how long it is, streams through: nobody waits for it."""
        request = flow.request
        if request.method != "POST" or self.recorder is None or not rules.endpoint_of(request.path):
            return
        limit, length = self.recorder.settings.body_limit, request.headers.get("content-length")
        with contextlib.suppress(ValueError):
            if length is None or int(length) > limit:
                request.stream = _Passing(limit)

    def request(self, flow: http.HTTPFlow) -> None:
        """The whole request is here."""
        exchange = self._open.get(flow.id)
        if exchange is None:
            self._begin(flow)
        elif isinstance(flow.request.stream, _Passing):  # the server has answered before it had all of it
            exchange.body, exchange.request_bytes = flow.request.stream.body, flow.request.stream.size

    def _begin_early(self, flow: http.HTTPFlow) -> None:
        """A body that streams through was answered, or broken off, before all of it had come."""
        if flow.id not in self._open and isinstance(flow.request.stream, _Passing):
            self._begin(flow)

    def _begin(self, flow: http.HTTPFlow) -> None:
        """Time zero of a request, if it is one to an LLM."""
        now_ns = time.monotonic_ns()
        recorder, request = self.recorder, flow.request
        if recorder is None:
            return
        passing = request.stream if isinstance(request.stream, _Passing) else None
        body = passing.body if passing else request.raw_content
        endpoint = rules.endpoint_of(request.path) if request.method == "POST" else None
        if endpoint is None and request.method == "POST" and body:
            endpoint = rules.endpoint_by_shape(body, request.path)
        if endpoint is None:
            recorder.counts.passed += 1
            return
        wanted = recorder.rows.headers
        self._open[flow.id] = Exchange(
            number=self._number,
            endpoint=endpoint,
            path=request.path,
            headers={name: value for name, value in _lower(request.headers) if name in wanted},
            arrival_ns=self._wall_ns + now_ns - self._mono_ns,
            body=body,
            request_bytes=passing.size if passing else len(body or b""),
            meter=Meter(endpoint=endpoint, start_ns=now_ns, chunks=recorder.settings.chunks),
        )
        self._number += 1
        recorder.counts.in_flight = len(self._open)

    def server_connected(self, data: ServerConnectionHookData) -> None:
        """Remember what reads from the server: by the time a flow's error is told, mitmproxy has forgotten it."""
        proxyserver = ctx.master.addons.get("proxyserver")
        handler = proxyserver.connections.get(data.client.id) if proxyserver is not None else None
        io = handler.transports.get(data.server) if handler is not None else None
        if io is not None:
            self._readers[data.server] = io.reader

    # --- responses -------------------------------------------------------------------------------------------------

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Let the body through piece by piece, measured on its way if the request is recorded."""
        response = flow.response
        if response is None:
            return
        self._begin_early(flow)
        exchange = self._open.get(flow.id)
        if exchange is None:
            response.stream = response.stream or True
            return
        clock = self._clock_of(flow)
        exchange.meter.head(clock(), response.status_code, response.headers.items(multi=True))
        former = response.stream if callable(response.stream) else None
        assert self.recorder is not None
        exchange.answer = self.recorder.answer(response.status_code, list(response.headers.items(multi=True)))
        response.stream = self._through(exchange.meter, clock, former, exchange.answer)

    def _through(self, meter: Meter, clock: Clock, former: Piece | None, answer: Answer | None) -> Piece:
        """A function for mitmproxy that measures pieces and gives them back untouched."""
        feed = meter.feed
        assert self.recorder is not None
        recorder, counts = self.recorder, self.recorder.counts

        def piece(data: bytes) -> bytes | Iterable[bytes]:
            if data:
                try:
                    feed(clock(), data)
                    if answer is not None:
                        grown = answer.add(data)
                        recorder.answers_bytes += grown
                        if recorder.answers_bytes > ANSWERS_BYTES:
                            recorder.answers_bytes += answer.let_go()
                except Exception:  # noqa: BLE001 - the traffic passes, whatever becomes of its row
                    counts.failed += 1
            return data if former is None else former(data)

        return piece

    def response(self, flow: http.HTTPFlow) -> None:
        """The response is complete."""
        exchange = self._open.get(flow.id)
        if exchange is None:
            return
        response = flow.response
        if response is not None and not exchange.meter.received and response.raw_content:
            exchange.meter.feed(time.monotonic_ns(), response.raw_content)  # another addon answered, or took it whole
            if exchange.answer is not None and self.recorder is not None:
                self.recorder.answers_bytes += exchange.answer.add(response.raw_content)
        self._finish(flow.id, "eof")

    def error(self, flow: http.HTTPFlow) -> None:
        """It ended before it was complete: the client left, the server broke off, or could not be reached."""
        self._begin_early(flow)
        if flow.id in self._open:
            end = end_of(flow, self._readers.get(flow.server_conn))
            if end == "connect_error" and flow.error:
                self._open[flow.id].error = no_connection(flow.error.msg)
            self._finish(flow.id, end)

    def _finish(self, flow_id: str, end: End) -> None:
        exchange = self._open.pop(flow_id)
        exchange.end, exchange.end_ns = end, time.monotonic_ns()
        assert self.recorder is not None
        self.recorder.put(exchange)
        self.recorder.counts.in_flight = len(self._open)
        if self._idle is not None and not self._open:
            self._idle.set()

    def _from_options(self) -> Settings:
        options = ctx.options
        names = (
            "out",
            "chunks",
            "tenant",
            "tenants",
            "session_header",
            "dialect",
            "tokenizer",
            "block_size",
            "keep_salt",
        )
        settings = Settings(
            **{name: getattr(options, f"capture_{name}") for name in names}, max_bytes=options.capture_max_bytes
        )
        check(settings)
        return settings


class _Passing:
    """A request body that streams through; its bytes are kept up to a limit, or not at all."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._kept: list[bytes] = []

    def __call__(self, data: bytes) -> bytes:
        self.size += len(data)
        if self.size <= self._limit:
            self._kept.append(data)
        else:
            self._kept.clear()
        return data

    @property
    def body(self) -> bytes | None:
        """All bytes so far; None when they were more than the limit."""
        return b"".join(self._kept) if self.size <= self._limit else None


def check(settings: Settings) -> None:
    """Whether the settings make sense. Raises ValueError or TraceError."""
    if settings.chunks not in CHUNKS:
        raise ValueError(f"chunks {settings.chunks!r} is none of {', '.join(CHUNKS)}")
    if settings.block_size < 1:
        raise ValueError(f"block size {settings.block_size} must be at least 1")
    rules.dialect_named(settings.dialect)
    rules.TenantRules(settings.tenant, (), rules.salted(b""))


@contextlib.contextmanager
def _as_options_error() -> Any:
    try:
        yield
    except (ValueError, TraceError, OSError) as error:
        raise exceptions.OptionsError(f"capture: {error}") from error


def _lower(headers: http.Headers) -> Iterable[tuple[str, str]]:
    return ((name.lower(), value) for name, value in headers.items())


addons = [Capture()]
