"""A server that behaves as told, and what each transport makes of it: one table for both."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import ipaddress
import resource
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from replay.aiohttp_transport import AiohttpTransport
from replay.connection import Connection, HttpTransport, describe, endpoint_of
from replay.exchange import SPILL_BYTES, Exchange, WireRequest

MS = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
TRANSPORTS = {"protocol": HttpTransport, "aiohttp": AiohttpTransport}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(body: bytes = b"{}", **limits: int) -> WireRequest:
    header = b"content-type: application/json\r\nx-request-id: 7\r\n"
    return WireRequest("POST", "/v1/chat/completions", header, body, **limits)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


class Scene:
    """A server with a handler per connection, and a transport that talks to it."""

    def __init__(self, handler: Handler, transport: str, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        self.handler, self.kind, self.tls = handler, transport, tls
        self.connections = 0
        self.open = 0
        self.peak = 0

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(
            self.serve, "127.0.0.1", 0, backlog=1024, ssl=self.tls[0] if self.tls else None, limit=1 << 24
        )
        port = self.server.sockets[0].getsockname()[1]
        scheme = "https" if self.tls else "http"
        self.transport = TRANSPORTS[self.kind](f"{scheme}://127.0.0.1:{port}", self.tls[1] if self.tls else None)
        await self.transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()
        self.server.close()
        for _ in range(500):
            if not self.open:
                break
            await asyncio.sleep(0.01)
        assert not self.open, "the transport left connections open"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                await self.handler(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    def start(self, request: WireRequest) -> tuple[Exchange, asyncio.Future[Exchange]]:
        future: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()

        def done(exchange: Exchange) -> None:
            if not future.cancelled():
                future.set_result(exchange)

        return self.transport.start(request, done), future

    async def send(self, request: WireRequest | None = None) -> Exchange:
        exchange, future = self.start(request or ask())
        assert await asyncio.wait_for(future, 20) is exchange
        return exchange


def play(
    handler: Handler,
    scenario: Callable[[Scene], Awaitable[None]],
    transport: str = "protocol",
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
) -> None:
    async def main() -> None:
        async with Scene(handler, transport, tls) as scene:
            await scenario(scene)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def says(*parts: bytes, close: bool = False) -> Handler:
    """Answers every request with these bytes, each in a write of its own."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return handler


def body_of(exchange: Exchange) -> bytes:
    return b"".join(data for _, data in exchange.segments)


@pytest.fixture(params=TRANSPORTS)
def kind(request) -> str:
    return request.param


ANSWERS = {
    "content-length": ((PLAIN,), False, 200, b"ok"),
    "chunked": (
        (HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n"),
        False,
        200,
        b"data: 1\n\ndata: 2\n\n",
    ),
    "chunked with extensions and trailers": (
        (HEAD, b"3;a=b\r\nabc\r\n0\r\nx-sum: 1\r\n\r\n"),
        False,
        200,
        b"abc",
    ),
    "until the connection closes": ((b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it"), True, 200, b"all of it"),
    "HTTP/1.0": ((b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",), True, 200, b"ok"),
    "no body": ((b"HTTP/1.1 204 No Content\r\n\r\n",), False, 204, b""),
    "an interim answer first": ((b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", PLAIN), False, 200, b"ok"),
    "an error": ((b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",), False, 503, b"busy"),
    "a redirect, which is not followed": (
        (b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",),
        False,
        307,
        b"",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_complete_answer_is_taken_as_it_is(kind, case):
    parts, close, status, body = ANSWERS[case]

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send()
        assert (exchange.end, exchange.error, exchange.status, body_of(exchange)) == ("eof", None, status, body)
        assert exchange.attempts == 1
        times = [exchange.started_ns, exchange.written_ns, exchange.headers_ns]
        times += [when_ns for when_ns, _ in exchange.segments]
        assert times == sorted(times)
        assert exchange.end_ns >= times[-1]

    play(says(*parts, close=close), scenario, kind)


def test_the_request_is_what_was_asked_and_nothing_more():
    seen = []

    async def handler(reader, writer):
        seen.append(await read_request(reader))
        writer.write(PLAIN)

    async def scenario(scene: Scene) -> None:
        await scene.send(ask(b'{"n":1}'))
        port = scene.transport.port
        head, body = seen[0]
        assert body == b'{"n":1}'
        assert head.split(b"\r\n") == [
            b"POST /v1/chat/completions HTTP/1.1",
            b"host: 127.0.0.1:%d" % port,
            b"content-type: application/json",
            b"x-request-id: 7",
            b"content-length: 7",
            b"",
            b"",
        ]

    play(handler, scenario)


def test_the_aiohttp_transport_adds_no_headers_of_its_own():
    seen = []

    async def handler(reader, writer):
        seen.append((await read_request(reader))[0])
        writer.write(PLAIN)

    async def scenario(scene: Scene) -> None:
        await scene.send()
        names = {line.split(b":")[0].lower() for line in seen[0].split(b"\r\n")[1:] if line}
        assert names == {b"host", b"content-type", b"x-request-id", b"content-length"}

    play(handler, scenario, "aiohttp")


def test_a_connection_is_used_again_and_only_the_first_request_pays_for_connecting(kind):
    async def scenario(scene: Scene) -> None:
        first, second = await scene.send(), await scene.send()
        assert (first.reused, second.reused) == (False, True)
        assert first.connect_ns > 0
        assert second.connect_ns is None
        assert scene.connections == scene.transport.made == 1

    play(says(PLAIN), scenario, kind)


@pytest.mark.parametrize("how", ["close", "not http", "two answers"])
def test_a_connection_that_cannot_be_trusted_is_not_used_again(how):
    answer = {
        "close": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        "not http": PLAIN + b"surprise",
        "two answers": PLAIN + PLAIN,
    }[how]

    async def scenario(scene: Scene) -> None:
        for _ in range(2):
            exchange = await scene.send()
            assert (exchange.status, body_of(exchange), exchange.reused, exchange.attempts) == (200, b"ok", False, 1)
        assert scene.connections == 2

    play(says(answer), scenario)


def test_bytes_that_nobody_asked_for_are_never_taken_for_the_next_answer():
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(PLAIN)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await reader.read()

    async def scenario(scene: Scene) -> None:
        await scene.send()
        for _ in range(200):
            if not scene.transport.idle:
                break
            await asyncio.sleep(0.01)
        second = await scene.send()
        assert body_of(second) == b"ok"
        assert scene.connections == 2

    play(handler, scenario)


def test_a_stale_connection_costs_a_second_attempt_and_no_failure(kind):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(PLAIN)
        await read_request(reader)  # heard, and closed without a byte

    async def scenario(scene: Scene) -> None:
        first, second = await scene.send(), await scene.send()
        assert (second.end, second.status, second.attempts, second.reused) == ("eof", 200, 2, False)
        assert second.connect_ns > 0
        assert second.started_ns >= first.end_ns
        assert second.written_ns - second.started_ns >= second.connect_ns  # the time is the first attempt's
        assert scene.connections == 2

    play(handler, scenario, kind)


def test_a_second_attempt_is_the_last(kind):
    async def handler(reader, writer):
        await read_request(reader)
        if scenes[0].connections == 1:
            writer.write(PLAIN)
            await read_request(reader)

    scenes: list[Scene] = []

    async def scenario(scene: Scene) -> None:
        scenes.append(scene)
        await scene.send()
        second = await scene.send()
        assert (second.end, second.error, second.attempts, second.status) == ("closed", "closed", 2, None)
        assert scene.connections == 2

    play(handler, scenario, kind)


def test_a_connection_closed_while_it_waited_is_not_used(kind):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(PLAIN)

    async def scenario(scene: Scene) -> None:
        await scene.send()
        await asyncio.sleep(0.1)
        second = await scene.send()
        assert (second.status, second.attempts, second.reused) == (200, 1, False)

    play(handler, scenario, kind)


def reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    duplicate = socket.fromfd(writer.get_extra_info("socket").fileno(), socket.AF_INET, socket.SOCK_STREAM)
    duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    duplicate.close()
    writer.transport.abort()


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + chunk(b"data: 1\n\n")])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_connection_that_ends_too_soon_is_told_by_how_it_ended(kind, how, sent):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(sent)
        await writer.drain()
        await asyncio.sleep(0.05)
        if how == "reset":
            reset(writer)

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send()
        error = "reset ECONNRESET" if how == "reset" else "closed"
        assert (exchange.end, exchange.error, exchange.attempts) == (how, error, 1)
        assert exchange.status == (200 if sent else None)
        assert len(exchange.segments) == (len(sent) > len(HEAD))

    play(handler, scenario, kind)


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH_9\r\n", HEAD + b"zz\r\nnot a chunk\r\n"])
def test_bytes_that_are_not_http_end_the_exchange_with_a_protocol_error(kind, garbage):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(garbage)
        await reader.read()

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send(ask(total_ns=5000 * MS))
        assert exchange.end == "closed"
        assert exchange.error.split()[0] in {"protocol", "closed"}
        assert b"SSH" not in exchange.error.encode()

    play(handler, scenario, kind)


def test_nobody_listening_is_a_connect_error(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def scenario(scene: Scene) -> None:
        scene.transport.port = port
        scene.transport._addresses = [("127.0.0.1", port)]
        scene.transport._origin = f"http://127.0.0.1:{port}"
        exchange = await scene.send()
        assert (exchange.end, exchange.error, exchange.status) == ("connect_error", "connect ECONNREFUSED", None)
        assert exchange.written_ns is None

    play(says(PLAIN), scenario, kind)


def test_running_out_of_descriptors_is_the_clients_fault(kind):
    async def scenario(scene: Scene) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as probe:
            lowest = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            exchange = await scene.send()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (exchange.end, exchange.error) == ("connect_error", "client EMFILE")

    play(says(PLAIN), scenario, kind)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EADDRNOTAVAIL, "ports used up"), "client EADDRNOTAVAIL"),
        (OSError(errno.EMFILE, "too many files"), "client EMFILE"),
        (OSError(errno.ENFILE, "too many files in the system"), "client ENFILE"),
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), "connect ECONNREFUSED"),
        (ConnectionResetError(errno.ECONNRESET, "backlog overflow"), "connect ECONNRESET"),
        (OSError(errno.EHOSTUNREACH, ""), "connect EHOSTUNREACH"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version"), "tls handshake"),
    ],
)
def test_the_machines_own_limits_are_told_apart_from_the_servers(error, text):
    assert describe(error) == text


def test_silence_ends_in_an_idle_timeout_and_comments_are_no_silence(kind):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(HEAD)
        for _ in range(8):
            writer.write(chunk(b": still here\n\n"))
            await asyncio.sleep(0.1)
        await reader.read()

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send(ask(idle_ns=500 * MS))
        assert (exchange.end, exchange.error) == ("timeout_idle", "timeout idle")
        assert len(exchange.segments) == 8  # 800 ms of comments went by
        silence_ns = exchange.end_ns - exchange.segments[-1][0]
        assert 500 * MS <= silence_ns < 5000 * MS

    play(handler, scenario, kind)


def test_waiting_for_the_head_is_idle_time(kind):
    async def handler(reader, writer):
        await reader.read()

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send(ask(idle_ns=50 * MS, total_ns=60_000 * MS))
        assert (exchange.end, exchange.status) == ("timeout_idle", None)
        assert exchange.end_ns - exchange.written_ns >= 50 * MS

    play(handler, scenario, kind)


def test_a_stream_that_never_ends_meets_the_total_timeout(kind):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(HEAD)
        while True:
            writer.write(chunk(b"data: x\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send(ask(idle_ns=10_000 * MS, total_ns=150 * MS))
        assert (exchange.end, exchange.error) == ("timeout_total", "timeout total")
        assert 150 * MS <= exchange.end_ns - exchange.started_ns < 5000 * MS
        assert exchange.segments

    play(handler, scenario, kind)


def test_a_handshake_that_never_comes_is_a_connect_timeout(kind):
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            transport = TRANSPORTS[kind](f"https://127.0.0.1:{silent.getsockname()[1]}")
            await transport.open()
            future = asyncio.get_running_loop().create_future()
            transport.start(ask(connect_ns=100 * MS, idle_ns=1 * MS), future.set_result)
            exchange = await asyncio.wait_for(future, 20)
            assert (exchange.end, exchange.error) == ("timeout_connect", "timeout connect")
            await transport.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_giving_up_ends_the_exchange_at_once_and_the_server_sees_it_go(kind):
    gone = asyncio.Event()

    async def handler(reader, writer):
        await read_request(reader)
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()

    async def scenario(scene: Scene) -> None:
        exchange, future = scene.start(ask())
        while not exchange.segments:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        exchange.cancel("client_abort")
        assert exchange.end == "client_abort"
        assert exchange.error == "client abort"
        exchange.cancel("cut")  # a second end is ignored
        assert await future is exchange
        assert exchange.end == "client_abort"
        await asyncio.wait_for(gone.wait(), 10)

    play(handler, scenario, kind)


def test_giving_up_while_connecting_leaves_nothing_behind(kind):
    async def scenario(scene: Scene) -> None:
        exchange, future = scene.start(ask())
        exchange.cancel("cut")
        await future
        assert exchange.end == "cut"
        assert (await scene.send()).status == 200

    play(says(PLAIN), scenario, kind)


def test_closing_the_transport_cuts_what_is_in_flight(kind):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(HEAD)
        await reader.read()

    async def scenario(scene: Scene) -> None:
        exchange, future = scene.start(ask())
        while exchange.headers_ns is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await scene.transport.close()
        assert (await future).end == "cut"

    play(handler, scenario, kind)


def test_b06_three_hundred_streams_are_open_at_once(kind):
    everybody = asyncio.Event()

    async def handler(reader, writer):
        await read_request(reader)
        if scenes[0].open == 300:
            everybody.set()
        await everybody.wait()
        writer.write(PLAIN)
        await reader.read()

    scenes: list[Scene] = []

    async def scenario(scene: Scene) -> None:
        scenes.append(scene)
        done = await asyncio.gather(*(scene.send() for _ in range(300)))
        assert {exchange.status for exchange in done} == {200}
        assert scene.peak == scene.transport.peak == 300

    play(handler, scenario, kind)


def test_c10_a_line_of_two_megabytes_arrives_whole(kind):
    line = b"data: " + b"x" * (2 << 20) + b"\n\n"

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send()
        assert exchange.end == "eof"
        assert body_of(exchange) == line

    play(says(HEAD, chunk(line), b"0\r\n\r\n"), scenario, kind)


def test_a_body_larger_than_the_sockets_buffer_arrives_whole(kind):
    seen = []

    async def handler(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 8388608" in head.lower()
        await asyncio.sleep(0.05)
        seen.append(await reader.readexactly(8 << 20))
        writer.write(PLAIN)

    async def scenario(scene: Scene) -> None:
        body = bytes(range(256)) * (32 << 10)
        assert (await scene.send(ask(body))).status == 200
        assert seen == [body]

    play(handler, scenario, kind)


def test_a_long_stream_is_handed_over_in_parts(kind):
    part = b"data: " + b"y" * 1000 + b"\n\n"

    async def handler(reader, writer):
        await read_request(reader)
        writer.write(HEAD)
        for _ in range(4000):
            writer.write(chunk(part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def scenario(scene: Scene) -> None:
        taken, sizes = [], []

        def take(exchange: Exchange) -> None:
            sizes.append(sum(len(data) for _, data in exchange.segments))
            taken.extend(exchange.segments)
            exchange.segments.clear()

        exchange, future = scene.start(ask())
        exchange.spill = take
        await future
        taken.extend(exchange.segments)
        assert b"".join(data for _, data in taken) == part * 4000
        assert len(sizes) > 3
        assert SPILL_BYTES < max(sizes) < 1 << 20  # one read may bring more than the limit, the stream is 4 MB

    play(handler, scenario, kind)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A self-signed certificate for 127.0.0.1: the server's context and a client's that trusts it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path: Path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cafile=path)


def test_c01_a_tls_handshake_stands_in_its_own_column_and_is_paid_once(kind, certificate):
    async def scenario(scene: Scene) -> None:
        done = [await scene.send() for _ in range(20)]
        assert {exchange.status for exchange in done} == {200}
        assert done[0].connect_ns > 0
        assert done[0].written_ns >= done[0].started_ns + done[0].connect_ns
        assert all(exchange.reused and exchange.connect_ns is None for exchange in done[1:])
        assert scene.connections == 1

    play(says(HEAD, chunk(b"data: 1\n\n"), b"0\r\n\r\n"), scenario, kind, certificate)


def test_a_certificate_nobody_signed_is_a_connect_error(kind, certificate):
    server, _ = certificate
    strict = ssl.create_default_context()

    async def scenario(scene: Scene) -> None:
        exchange = await scene.send()
        assert (exchange.end, exchange.error) == ("connect_error", "tls CERTIFICATE_VERIFY_FAILED")

    play(says(PLAIN), scenario, kind, (server, strict))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False)),
        ("http://vllm", ("vllm", 80, False)),
        ("https://llm.internal/v1", ("llm.internal", 443, True)),
        ("http://[::1]:9", ("::1", 9, False)),
    ],
)
def test_a_target_names_host_and_port(target, expected):
    assert endpoint_of(target) == expected


@pytest.mark.parametrize("target", ["127.0.0.1:8000", "ftp://x", "http://", "http://key@host"])
def test_what_is_no_target_is_refused_with_an_example(target):
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8000"):
        endpoint_of(target)


class Wire(asyncio.Transport):
    """A transport without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes) -> None:
        del data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closed = True

    close = abort


BODY = [b"data: one\n\n", b"data: \xc3\xa9\r\n\r\n", b": ping\n\n", b"data: 0\r\n\r\n\n\n", b"data: [DONE]\n\n"]
STREAM = HEAD + b"".join(chunk(part) for part in BODY) + b"0\r\n\r\n"


def exchange_of(pieces: list[bytes]) -> tuple[Exchange, Connection]:
    """An exchange whose answer arrives in these pieces, twice on one connection."""
    pool = HttpTransport("https://127.0.0.1:1")
    connection = Connection(pool)
    connection.connection_made(Wire())
    done: list[Exchange] = []
    for _ in range(2):
        exchange = Exchange(ask(), done.append, 0)
        connection.send(exchange)
        for index, piece in enumerate(pieces):
            assert exchange.end is None, f"ended {len(pieces) - index} pieces too soon"
            connection.data_received(piece)
        assert done.pop() is exchange
    return exchange, connection


def test_h01_an_answer_may_be_cut_into_reads_anywhere():
    for position in range(1, len(STREAM)):
        exchange, connection = exchange_of([STREAM[:position], STREAM[position:]])
        assert body_of(exchange) == b"".join(BODY)
        assert exchange.end == "eof"
        assert connection.usable


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True, max_size=40))
def test_an_answer_may_be_cut_into_any_number_of_reads(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    exchange, _ = exchange_of([STREAM[a:b] for a, b in pairwise(edges)])
    assert body_of(exchange) == b"".join(BODY)
    stamps = [when_ns for when_ns, _ in exchange.segments]
    assert stamps == sorted(stamps)
