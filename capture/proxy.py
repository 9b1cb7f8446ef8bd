"""mitmproxy, run in this process with the recorder as its addon.

Only the parts of mitmproxy that a recorder needs are loaded: every hook of every request runs through the whole chain
of addons, so a short chain is what pays for the recording. `mitmdump -s capture/addon.py` gives the long one.

Bytes of a response are stamped when they come off the socket (`StampedReader`), before mitmproxy has parsed them and
before its tasks have their turn: on a busy proxy that is milliseconds earlier.

The listening socket is made here, not by mitmproxy: an address in use is a clear error before anything starts, and
several workers can share one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mitmproxy import ctx, exceptions, http, options
from mitmproxy.addons import (
    anticomp,
    block,
    core,
    disable_h2c,
    dns_resolver,
    maplocal,
    mapremote,
    modifybody,
    modifyheaders,
    next_layer,
    proxyauth,
    proxyserver,
    tlsconfig,
    update_alt_svc,
    upstream_auth,
)
from mitmproxy.master import Master
from mitmproxy.proxy import mode_servers

from capture.addon import Capture
from capture.voice import say, speak

DRAIN_S = 5.0


class StampedReader(asyncio.StreamReader):
    """asyncio's reader, which also knows when its last bytes came."""

    fed_ns = 0

    def feed_data(self, data: Any) -> None:
        """Called by the transport."""
        self.fed_ns = time.monotonic_ns()
        super().feed_data(data)


Listen = Callable[[Callable[..., Awaitable[None]]], Awaitable[Any]]


def chain() -> list[Any]:
    """The addons that proxying itself needs, in mitmproxy's order, and those that change requests on their way."""
    return [
        core.Core(),
        block.Block(),
        anticomp.AntiComp(),
        disable_h2c.DisableH2C(),
        proxyauth.ProxyAuth(),
        proxyserver.Proxyserver(),
        dns_resolver.DnsResolver(),
        next_layer.NextLayer(),
        mapremote.MapRemote(),
        maplocal.MapLocal(),
        modifybody.ModifyBody(),
        modifyheaders.ModifyHeaders(),
        tlsconfig.TlsConfig(),
        upstream_auth.UpstreamAuth(),
        update_alt_svc.UpdateAltSvc(),
    ]


class ArrivalClock:
    """Tells when the bytes of a response that are being handled came off the socket."""

    def __init__(self, reader: StampedReader) -> None:
        self._reader = reader

    def __call__(self) -> int:
        """Monotonic ns."""
        return self._reader.fed_ns


def clock_of(flow: http.HTTPFlow) -> Callable[[], int]:
    """The clock for a flow's response, while its connection lives."""
    handler = ctx.master.addons.get("proxyserver").connections.get(flow.client_conn.id)
    io = handler.transports.get(flow.server_conn) if handler is not None else None
    return ArrivalClock(io.reader) if io is not None and isinstance(io.reader, StampedReader) else time.monotonic_ns


def run(mode: str, sets: tuple[str, ...], addon: Capture, listen: Listen, ready: Callable[[], None]) -> None:
    """Proxy until SIGTERM or SIGINT; requests in flight then have `DRAIN_S` to end, or until a second signal.

    Args:
        mode: mitmproxy's mode, such as `reverse:http://127.0.0.1:8000`.
        sets: mitmproxy's own options, each `name=value`.
        addon: the recorder's hooks.
        listen: makes the server from mitmproxy's connection handler.
        ready: called once connections are taken.

    Raises:
        ValueError: an option that mitmproxy does not know or take.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.get_loop().set_exception_handler(_unless_cancelled)
        runner.run(_run(mode, sets, addon, listen, ready))


def _unless_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Python 3.11 tells of a connection that is cancelled at the end as of an exception in a callback."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop, with task factories that need not know `eager_start`.

    From Python 3.13 on uvloop 0.22 and newer hand it to every factory; mitmproxy 12 sets asyncio's own, which takes it
    only in later releases of 3.13.
    """
    import uvloop

    class Loop(uvloop.Loop):
        def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
            super().set_task_factory(factory and _told_when_asked(factory))

    return Loop()


def _told_when_asked(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(loop: asyncio.AbstractEventLoop, coro: Any, *, eager_start: bool | None = None, **more: Any) -> Any:
        return (
            factory(loop, coro, **more) if eager_start is None else factory(loop, coro, eager_start=eager_start, **more)
        )

    return make


def listen_on(sock: socket.socket) -> Listen:
    """Take connections from one socket."""

    async def listen(handle: Callable[..., Awaitable[None]]) -> asyncio.Server:
        return await asyncio.start_server(handle, sock=sock)

    return listen


async def _run(mode: str, sets: tuple[str, ...], addon: Capture, listen: Listen, ready: Callable[[], None]) -> None:
    servers: list[Any] = []

    async def _listen(instance: Any, _host: str, _port: int) -> list[Any]:
        servers.append(await listen(instance.handle_stream))
        return servers

    # mitmproxy has no other way in for either
    setattr(mode_servers.AsyncioServerInstance, "listen", _listen)  # noqa: B010
    setattr(asyncio.streams, "StreamReader", StampedReader)  # noqa: B010
    master = Master(options.Options())
    handler = _Warnings()
    logging.getLogger().addHandler(handler)
    try:
        master.addons.add(*chain(), addon)
        # lazy: a stale connection to the server must not answer a new request; http3 would open UDP ports
        master.options.update(connection_strategy="lazy", http3=False, show_ignored_hosts=False)
        try:
            master.options.set(*sets)
            _check_choices(master.options, sets)
            master.options.update(mode=[mode])
        except exceptions.OptionsError as error:
            raise ValueError(str(error)) from error
        _stop_on_signals(master, addon, servers)
        loop = asyncio.get_running_loop()
        loop.call_later(0, _when_up, loop, servers, ready)
        await master.run()
    finally:
        logging.getLogger().removeHandler(handler)


def _check_choices(given: options.Options, sets: tuple[str, ...]) -> None:
    """Whether the values are among those that an option knows; mitmproxy itself looks at none. Raises ValueError."""
    known = dict(given.items())
    for name in (each.partition("=")[0] for each in sets):
        choices = known[name].choices
        if choices and getattr(given, name) not in choices:
            raise ValueError(f"{name}={getattr(given, name)} is none of {', '.join(choices)}")


def _when_up(loop: asyncio.AbstractEventLoop, servers: list[Any], ready: Callable[[], None]) -> None:
    if servers:
        ready()
    else:
        loop.call_later(0.01, _when_up, loop, servers, ready)


def _stop_on_signals(master: Master, addon: Capture, servers: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        for server in servers:
            with contextlib.suppress(Exception):
                server.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(addon.idle(), DRAIN_S)
        master.shutdown()

    def stop() -> None:
        if draining:
            master.shutdown()
            return
        if addon.recorder is not None and (count := addon.recorder.counts.in_flight):
            say(f"in flight: {count}, with {DRAIN_S:g} s to end; a second signal ends them now")
        draining.append(loop.create_task(drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


class _Warnings(logging.Handler):
    """mitmproxy's warnings as plain lines; without tracebacks, which could show what passes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        speak(f"mitmproxy: {record.getMessage().splitlines()[0]}")
