"""A recorder for tests: `capture` in a process of its own between a client and a server on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from traces import parquet

START_S = 60.0


class Recording:
    """A recorder that runs: its address, folder and process."""

    def __init__(self, process: subprocess.Popen[str], out: Path, port: int, said: list[str]) -> None:
        self.process, self.out, self.port, self.said = process, out, port, said

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Signal it and wait; its exit code."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=timeout_s)
        self.said += [out, err]
        return self.process.returncode

    def rows(self, count: int | None = None, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """The rows of its parts and spools; waits until there are `count` of them."""
        from traces import spool

        end = time.monotonic() + timeout_s
        while True:
            found: list[dict[str, Any]] = []
            if list(self.out.glob("part-*.parquet")):
                found += parquet.read(self.out).to_pylist()
            for path in sorted(self.out.glob("spool-*.arrows")):
                if not spool.part_for(path).exists():
                    found += [row for batch in spool.batches(path) for row in batch.to_pylist()]
            if count is None or len(found) >= count:
                return sorted(found, key=lambda row: row["arrival_ns"])
            assert time.monotonic() < end, f"{len(found)} of {count} rows: {self.said}"
            time.sleep(0.05)

    def ask(self, body: bytes, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions") -> bytes:
        """One request on a connection of its own; the response's bytes, head and all, as they came."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as sock:
            sock.sendall(request(body, headers, path))
            return read_to_end(sock)


def request(
    body: bytes, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions", *, close: bool = True
) -> bytes:
    """The bytes of a POST."""
    more = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    more |= {"connection": "close"} if close else {}
    more |= dict(headers or {})
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in more.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def read_to_end(sock: socket.socket) -> bytes:
    """All bytes until the other side closes or resets."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def body_of(response: bytes) -> bytes:
    """The body of a response, its chunked framing removed."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return body
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        if not re.fullmatch(rb"[0-9a-fA-F]+", size):
            break
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(pieces)


@contextlib.contextmanager
def recording(upstream: str, out: Path, *options: str) -> Iterator[Recording]:
    """Run `capture --upstream UPSTREAM --listen 127.0.0.1:0 --out OUT` and end it; `regular` is a mode instead."""
    server = ["--mode", upstream] if upstream == "regular" else ["--upstream", upstream]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "capture",
            *server,
            "--listen",
            "127.0.0.1:0",
            "--out",
            str(out),
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    running = Recording(process, out, 0, [])
    try:
        running.port = _port(process, running.said)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                running.said += process.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _port(process: subprocess.Popen[str], said: list[str]) -> int:
    assert process.stderr is not None
    end, text = time.monotonic() + START_S, ""
    while time.monotonic() < end:
        if select.select([process.stderr], [], [], 0.5)[0]:
            more = os.read(process.stderr.fileno(), 1 << 16).decode()
            text += more
            match = re.search(r"recording http://[^ ]*:(\d+) ", text)
            if match:
                said.append(text)
                return int(match[1])
            if not more:
                break
    raise AssertionError(f"the recorder did not start: {text}")
