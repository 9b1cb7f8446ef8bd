"""An OpenAI-compatible server on the scheduler: vLLM's routes, shapes and errors, over aiohttp.

A handler parses, queues its sequences and waits; the step loop writes the tokens to the connection itself, so that a
token costs one encoded event and no task switch. When a client goes away aiohttp cancels the handler, and the
sequences are freed before the next step.

Nothing of a prompt is kept: the log has lengths, times, the client's request id and the tenant header's value.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from replay.engine import api
from replay.engine.answer import Reply, Streamed, Style, output_id, seed_of, whole
from replay.engine.loop import Choice, Engine
from replay.engine.record import Log
from replay.engine.request import EngineRequest

OWNER = "convoy"
LEAST_URGENT = 2**62
MAX_BODY = 256 * 1024 * 1024
_JSON = "application/json"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Server": OWNER}
_JSON_HEADERS = {"Content-Type": _JSON, "Server": OWNER}
_METRICS_HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Server": OWNER}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the server presents its engine.

    Attributes:
        models: names it serves; the first answers requests that name none.
        max_model_len: prompt and output tokens together.
        version: what `/version` says.
        style: what answers hold.
        higher_first: a larger priority is more urgent, and a request without one the least (SGLang's way).
        natural_tokens: mean length of answers that may end by themselves; None: they never do.
        keep_alive_s: comment on a stream that was silent for so long; 0: never.
        idle_connection_s: close a connection that carried nothing for so long.
        tenant_header: names the tenant, for fair queueing and the log.
        info: what `/server_info` says.
    """

    models: tuple[str, ...]
    max_model_len: int
    version: str
    style: Style
    higher_first: bool = False
    natural_tokens: float | None = None
    keep_alive_s: float = 0.0
    idle_connection_s: float = 5.0
    tenant_header: str = "x-tenant"
    info: dict[str, Any] = {}


class Server:
    """The routes of one engine.

    Args:
        engine: runs the sequences.
        settings: how it presents itself.
        log: called with the row of each request when it is over.
    """

    def __init__(self, engine: Engine, settings: Settings, log: Callable[[Log], None] | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.limits = api.Limits(
            models=settings.models, max_model_len=settings.max_model_len, natural_tokens=settings.natural_tokens
        )
        self._log = log
        self._serial = itertools.count()
        self._streams: set[Streamed] = set()
        self._keeping_alive: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY)
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): functools.partial(self._generate, parse=api.chat, prefix="chatcmpl"),
            ("POST", "/v1/completions"): functools.partial(self._generate, parse=api.completion, prefix="cmpl"),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/server_info"): self._server_info,
        }
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, handler)
        paths = {path for _, path in routes}
        app.router.add_route("*", "/{rest:.*}", functools.partial(_no_route, paths=paths))
        if self.settings.keep_alive_s > 0:
            app.on_startup.append(self._start_keep_alive)
            app.on_cleanup.append(self._stop_keep_alive)
        return app

    def runner(self) -> web.AppRunner:
        """The application, ready to be bound to an address; a client that goes away cancels its handler."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.2,
            keepalive_timeout=self.settings.idle_connection_s,
        )

    # --- generation ---------------------------------------------------------------------------------------------------

    async def _generate(
        self, request: web.Request, *, parse: Callable[[bytes, Any, api.Limits], api.Ask], prefix: str
    ) -> web.StreamResponse:
        body = await request.read()
        arrival_ns = time.monotonic_ns()
        headers = request.headers
        name = f"{prefix}-{headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}"
        tenant = headers.get(self.settings.tenant_header)
        try:
            ask = parse(body, headers, self.limits)
            if ask.stream:
                return await self._stream(request, ask, name, arrival_ns, tenant)
            return await self._answer(ask, name, arrival_ns, tenant)
        except api.ApiError as error:
            return web.Response(status=error.status, body=error.body(), headers=_JSON_HEADERS)

    async def _stream(
        self, request: web.Request, ask: api.Ask, name: str, arrival_ns: int, tenant: str | None
    ) -> web.StreamResponse:
        chunked = request.version >= HttpVersion11
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        if chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        reply = Streamed(ask, name, arrival_ns, tenant, self.settings.style, write=_writer(transport), chunked=chunked)
        self._queue(reply)  # a refusal must come before the status
        with self._running(reply):
            await response.prepare(request)
            self._streams.add(reply)
            await reply.done
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
        return response

    async def _answer(self, ask: api.Ask, name: str, arrival_ns: int, tenant: str | None) -> web.StreamResponse:
        reply = Reply(ask, name, arrival_ns, tenant, self.settings.style)
        self._queue(reply)
        with self._running(reply):
            await reply.done
            if reply.refusal is not None:
                raise api.overloaded(reply.refusal)
            return web.Response(body=whole(reply), headers=_JSON_HEADERS)

    def _queue(self, reply: Reply) -> None:
        """Add the sequences of a reply to the engine, all or none. Raises ApiError when the queue is full."""
        choices = self._choices(reply)
        refusal = self.engine.refusal(choices[0].request, len(choices))
        if refusal is not None:
            displaced: Choice = refusal.request.tag
            if displaced is choices[0]:
                self._count_refusal(refusal.message)
                self._write_log(reply)
                raise api.overloaded(refusal.message)
            self.engine.abort(displaced)
            displaced.answer.refused(refusal.message)
        for choice in choices:
            self.engine.add(choice)
            reply.choices.append(choice)
        self.engine.metrics.n.observe(reply.ask.n)

    def _count_refusal(self, message: str) -> None:
        reason = "max_num_queued_tokens" if "token" in message else "max_num_queued_reqs"
        self.engine.metrics.rejected[reason] += 1

    def _choices(self, reply: Reply) -> list[Choice]:
        ask = reply.ask
        serial = next(self._serial)
        priority = self._urgency(ask.priority)
        choices = []
        for number, prompt in enumerate(ask.prompts):
            for copy in range(ask.n):
                index = number * ask.n + copy
                seed = seed_of(prompt, index)
                request = EngineRequest(
                    f"{index}_{reply.id}-{serial:08x}",
                    prompt_tokens=prompt,
                    max_tokens=ask.max_tokens[number],
                    priority=priority,
                    arrival_time=reply.arrival_ns / 1e9,
                    tenant=reply.tenant or "default",
                    ends_after=ask.ends_after[number],
                    output_ids=functools.partial(output_id, seed),
                )
                choices.append(Choice(reply, index, number, seed, request, reply.arrival_ns))
        return choices

    def _urgency(self, priority: int | None) -> int:
        """The scheduler's value (smaller is more urgent) of the one on the wire."""
        if self.settings.higher_first:
            return LEAST_URGENT if priority is None else -priority
        return priority or 0

    @contextlib.contextmanager
    def _running(self, reply: Reply) -> Any:
        """Whatever ends the handler: free what is unfinished, and write the log."""
        try:
            yield
        finally:
            if isinstance(reply, Streamed):
                self._streams.discard(reply)
            self._withdraw(reply)
            self._write_log(reply)

    def _withdraw(self, reply: Reply) -> None:
        for choice in reply.choices:
            if choice.request.finish is None:
                self.engine.abort(choice)

    def _write_log(self, reply: Reply) -> None:
        if self._log is not None:
            self._log(reply.log())

    # --- the other routes ---------------------------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return await _sized(request, lambda body: api.tokenize(body, self.limits))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return await _sized(request, lambda body: api.detokenize(body, self.limits))

    async def _reset_prefix_cache(self, _request: web.Request) -> web.StreamResponse:
        self.engine.scheduler.pool.forget_all()
        return web.Response(headers={"Server": OWNER})

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        created = int(time.time())
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": OWNER,
                "root": self.settings.models[0],
                "parent": None,
                "max_model_len": self.settings.max_model_len,
            }
            for name in self.settings.models
        ]
        return _json({"object": "list", "data": cards})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Server": OWNER})

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return _json({"version": self.settings.version})

    async def _server_info(self, _request: web.Request) -> web.StreamResponse:
        return _json(self.settings.info)

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        text = self.engine.metrics.text(self.engine.gauges())
        return web.Response(body=text.encode(), headers=_METRICS_HEADERS)

    # --- keep-alive comments ------------------------------------------------------------------------------------------

    async def _start_keep_alive(self, _app: web.Application) -> None:
        self._keeping_alive = asyncio.create_task(self._keep_alive())

    async def _stop_keep_alive(self, _app: web.Application) -> None:
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping_alive

    async def _keep_alive(self) -> None:
        interval_s = self.settings.keep_alive_s
        while True:
            await asyncio.sleep(interval_s / 10)
            silent_since = time.monotonic_ns() - int(interval_s * 1e9)
            for reply in [reply for reply in self._streams if reply.written_ns <= silent_since]:
                reply.keep_alive()


def _writer(transport: asyncio.Transport) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        if not transport.is_closing():
            transport.write(data)

    return write


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers=_JSON_HEADERS)


async def _sized(request: web.Request, answer: Callable[[bytes], bytes]) -> web.StreamResponse:
    try:
        return web.Response(body=answer(await request.read()), headers=_JSON_HEADERS)
    except api.ApiError as error:
        return web.Response(status=error.status, body=error.body(), headers=_JSON_HEADERS)


async def _no_route(request: web.Request, *, paths: set[str]) -> web.StreamResponse:
    known = request.path in paths
    detail = "Method Not Allowed" if known else "Not Found"
    body = msgspec.json.encode({"detail": detail})
    return web.Response(status=405 if known else 404, body=body, headers=_JSON_HEADERS)
