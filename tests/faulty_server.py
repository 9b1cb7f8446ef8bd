"""A server that misbehaves as told: the test gives the bytes, the pauses and the way the connection ends.

A script is a list of steps, carried out for each request that comes in:

    bytes          written as they are, one write each (nothing is framed for you; see `stream` and `answer`)
    float or int   a pause in seconds (ends at once when the server is stopped)
    Do.CLOSE       close the connection (FIN)        Do.RESET       reset it (RST)
    Do.HALF_CLOSE  close the sending side only       Do.HOLD        do nothing until the server is stopped
    Do.READ_EOF    wait until the client has closed or reset  (its time is `server.closed_ns[connection]`)

After the last step the connection stays open for the next request. A script can also be a function of the `Received`
request that returns the steps, so it can depend on `received.number` (0, 1, 2 ... over the whole server),
`received.connection`, the headers or the JSON body. The script answers POST; GET `/v1/models` and `/health` are
answered well by themselves, any other GET gives 404, unless `gets` says otherwise.

    with faulty(stream(role(), 0.05, delta("a"), delta("b", finish="length"), DONE)) as server:
        ...send to server.url...
    assert server.requests[0].json["priority"] == 2

    faulty([head(), chunk(delta("a")), Do.RESET])                     reset in the middle
    faulty([head(), chunk(delta("a")[:20]), 0.1, ...])              half an event, then the rest
    faulty(stream(tokens(5), ERROR, DONE))                          error event under HTTP 200
    faulty(stream(tokens(5)))                                       neither finish_reason nor [DONE]
    faulty(answer({"error": {}}, 429, {"Retry-After": "1"}))        too many requests
    faulty(ok, handshake_delay_s=0.2, tls=self_signed(tmp_path))    slow TLS handshake
    faulty(ok, accept=False, backlog=1)                             the kernel's queue fills, nobody accepts

The server runs in threads of its own (one per connection, blocking sockets), so it serves plain tests, asyncio tests
and child processes alike. Every write is in `server.writes` as (request number, step number, monotonic ns, bytes): the
truth that a client's own times are compared with. It listens on 127.0.0.1, on a port the system chooses.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import ipaddress
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Do(enum.Enum):
    """What a connection can do other than write and wait."""

    CLOSE = enum.auto()
    RESET = enum.auto()
    HALF_CLOSE = enum.auto()
    HOLD = enum.auto()
    READ_EOF = enum.auto()


Step = bytes | float | int | Do


@dataclass(frozen=True)
class Received:
    """One request as it came in; `received_ns` is CLOCK_MONOTONIC when its last byte had been read."""

    number: int
    connection: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    received_ns: int

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


Script = Sequence[Step] | Callable[[Received], Sequence[Step]]


# --- bytes for scripts ------------------------------------------------------------------------------------------------


def head(status: int = 200, headers: Mapping[str, str] | None = None) -> bytes:
    """A response head; without headers it announces a chunked event stream."""
    headers = {"content-type": "text/event-stream", "transfer-encoding": "chunked"} if headers is None else headers
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


LAST_CHUNK = b"0\r\n\r\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
ERROR = sse({"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}})
KEEP_ALIVE = b": keep-alive\n\n"


def role(index: int = 0) -> bytes:
    """The role chunk of a chat stream: not a token."""
    return _chat({"role": "assistant", "content": ""}, index, None)


def delta(text: str, index: int = 0, finish: str | None = None, kind: str = "content") -> bytes:
    """A token of a chat stream; `kind` is the delta's field (`content`, `reasoning`, `reasoning_content`)."""
    return _chat({kind: text}, index, finish)


def text(value: str, index: int = 0, finish: str | None = None) -> bytes:
    """A token of a completions stream."""
    return sse(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "choices": [{"index": index, "text": value, "logprobs": None, "finish_reason": finish}],
        }
    )


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    """The usage chunk of a chat stream: not a token."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return sse(_chunk([]) | {"usage": counts} | more)


def tokens(count: int, *, pause_s: float = 0.0, last: str | None = None) -> list[Step]:
    """`count` chat tokens with a pause after each; `last` is the finish_reason of the last one."""
    steps: list[Step] = []
    for i in range(count):
        steps.append(delta(f" t{i}", finish=last if i == count - 1 else None))
        if pause_s and i < count - 1:
            steps.append(pause_s)
    return steps


def stream(*steps: Step | Sequence[Step], end: bool = True) -> list[Step]:
    """Head, each event as a chunk of its own, the last chunk (unless not `end`); pauses and `Do` stay as they are."""
    flat: list[Step] = []
    for step in steps:
        flat.extend(step if isinstance(step, list | tuple) else [step])  # type: ignore[list-item]
    framed = [chunk(step) if isinstance(step, bytes) else step for step in flat]
    return [head(), *framed, *([LAST_CHUNK] if end else [])]


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> list[Step]:
    """A whole JSON answer in one write."""
    body = json.dumps(value).encode()
    more = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
    return [head(status, more) + body]


def good(count: int, *, prompt: int = 10, first_s: float = 0.0, pause_s: float = 0.0) -> list[Step]:
    """A chat stream as it should be: role, `count` tokens, usage, [DONE]."""
    before: list[Step] = [first_s] if first_s else []
    return stream(role(), before, tokens(count, pause_s=pause_s, last="length"), usage(prompt, count), DONE)


def _chat(change: dict[str, Any], index: int, finish: str | None) -> bytes:
    return sse(_chunk([{"index": index, "delta": change, "logprobs": None, "finish_reason": finish}]))


def _chunk(choices: list[Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": choices,
    }


MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "faulty"}]}


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass
class Faulty:
    """A running server: its address, and what it has seen and written."""

    url: str
    port: int
    requests: list[Received] = field(default_factory=list)
    writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    closed_ns: dict[int, int] = field(default_factory=dict)  # connection → when the client was seen to close or reset
    opened: int = 0  # connections accepted so far
    open_now: int = 0
    most_open: int = 0  # most connections open at one time

    def wait_for(self, condition: Callable[[Faulty], bool], timeout_s: float = 5.0) -> None:
        """Block until a condition on this server holds; AssertionError after the timeout."""
        end = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < end, "the server did not see what the test waits for"
            time.sleep(0.002)


@contextlib.contextmanager
def faulty(
    script: Script,
    *,
    gets: Mapping[str, Sequence[Step]] | None = None,
    tls: tuple[Path, Path] | None = None,
    accept: bool = True,
    accept_delay_s: float = 0.0,
    handshake_delay_s: float = 0.0,
    backlog: int = 1024,
    keep_alive_s: float | None = None,
) -> Iterator[Faulty]:
    """A server on loopback that carries out the script for every POST.

    Args:
        script: steps, or a function of the request that returns them.
        gets: path → steps for GET requests, beside `/v1/models` and `/health`.
        tls: paths of certificate and key (see `self_signed`).
        accept: False leaves connections in the kernel's queue, which `backlog` limits.
        accept_delay_s: pause before each accept.
        handshake_delay_s: pause between accept and the TLS handshake (or the first read).
        backlog: length of the kernel's queue.
        keep_alive_s: close a connection that has been idle for so long.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    port = listener.getsockname()[1]
    server = Faulty(f"{'https' if tls else 'http'}://127.0.0.1:{port}", port)
    gets = {"/v1/models": answer(MODELS), "/health": answer({})} | dict(gets or {})
    work = _Work(server, script, gets, _context(tls), handshake_delay_s, keep_alive_s)
    accepting = threading.Thread(target=_accept, args=(listener, work, accept_delay_s), daemon=True)
    if accept:
        accepting.start()
    try:
        yield server
    finally:
        work.stop.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if accept:
            accepting.join(5)
        work.end()


@dataclass
class _Work:
    """What the threads share."""

    server: Faulty
    script: Script
    gets: Mapping[str, Sequence[Step]]
    context: ssl.SSLContext | None
    handshake_delay_s: float
    keep_alive_s: float | None
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sockets: set[socket.socket] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def end(self) -> None:
        with self.lock:
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(5)


def _accept(listener: socket.socket, work: _Work, delay_s: float) -> None:
    while not work.stop.is_set():
        if delay_s:
            work.stop.wait(delay_s)
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=_serve, args=(connection, work.server.opened, work), daemon=True)
        with work.lock:
            work.server.opened += 1
            work.server.open_now += 1
            work.server.most_open = max(work.server.most_open, work.server.open_now)
            work.sockets.add(connection)
            work.threads.append(thread)
        thread.start()


def _serve(connection: socket.socket, number: int, work: _Work) -> None:
    raw = connection
    try:
        if work.handshake_delay_s:
            work.stop.wait(work.handshake_delay_s)
        if work.context is not None:
            connection = work.context.wrap_socket(connection, server_side=True)
            with work.lock:
                work.sockets.discard(raw)
                work.sockets.add(connection)
        _requests(connection, number, work)
    except ConnectionError:  # a client that closes with bytes unread resets: it is gone all the same
        work.server.closed_ns.setdefault(number, time.monotonic_ns())
    except OSError:
        pass
    finally:
        with work.lock:
            work.server.open_now -= 1
            work.sockets.discard(connection)
            work.sockets.discard(raw)
        connection.close()


def _requests(connection: socket.socket, number: int, work: _Work) -> None:
    buffer = bytearray()
    while not work.stop.is_set():
        connection.settimeout(work.keep_alive_s)
        received = _read(connection, number, buffer, work)
        connection.settimeout(None)
        if received is None or not _carry_out(connection, received, work):
            return


def _read(connection: socket.socket, number: int, buffer: bytearray, work: _Work) -> Received | None:
    while (end := buffer.find(b"\r\n\r\n")) < 0:
        if not _more(connection, number, buffer, work):
            return None
    lines = buffer[:end].decode("latin-1").split("\r\n")
    del buffer[: end + 4]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = int(headers.get("content-length", 0))
    while len(buffer) < length:
        if not _more(connection, number, buffer, work):
            return None
    now_ns = time.monotonic_ns()
    body = bytes(buffer[:length])
    del buffer[:length]
    method, path, _ = lines[0].split(" ")
    with work.lock:
        count = len(work.server.requests)
        received = Received(count, number, method, path, headers, body, now_ns)
        if method == "POST":
            work.server.requests.append(received)
    return received


def _more(connection: socket.socket, number: int, buffer: bytearray, work: _Work) -> bool:
    data = connection.recv(1 << 16)
    if not data:
        work.server.closed_ns[number] = time.monotonic_ns()
    buffer += data
    return bool(data)


def _carry_out(connection: socket.socket, received: Received, work: _Work) -> bool:
    """Do the steps; false when the connection is over."""
    if received.method == "POST":
        steps = work.script(received) if callable(work.script) else work.script
    else:
        steps = work.gets.get(received.path.partition("?")[0], answer({"detail": "Not Found"}, 404))
    for position, step in enumerate(steps):
        if isinstance(step, bytes):
            connection.sendall(step)
            work.server.writes.append((received.number, position, time.monotonic_ns(), len(step)))
        elif isinstance(step, Do):
            if not _do(step, connection, received.connection, work):
                return False
        elif work.stop.wait(step):
            return False
    return True


def _do(step: Do, connection: socket.socket, number: int, work: _Work) -> bool:
    if step is Do.RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False
    if step is Do.CLOSE:
        return False
    if step is Do.HALF_CLOSE:
        connection.shutdown(socket.SHUT_WR)
    elif step is Do.HOLD:
        work.stop.wait()
        return False
    else:
        while connection.recv(1 << 16):
            pass
        work.server.closed_ns[number] = time.monotonic_ns()
        return False
    return True


# --- certificates -----------------------------------------------------------------------------------------------------


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate and key for 127.0.0.1 and localhost, valid for a day, as PEM files in `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_path, key_path


def _context(tls: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    return context
