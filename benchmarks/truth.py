"""The ground-truth server of the benchmarks: started on a core of its own, asked for what really happened.

The server is `truth_server.c` of the reference data (CONVOY_DATA): one thread, epoll, timed server-sent events in the
shape of the OpenAI API, and for every request the monotonic time of its first byte, of its last byte, and of every
token that it wrote.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SERVER_CORE = 1
CLIENT_CORE = 0


class Log(NamedTuple):
    """What the server saw, one entry per request, sorted by id; times in ns of CLOCK_MONOTONIC."""

    ids: npt.NDArray[np.str_]
    first_byte_ns: npt.NDArray[np.int64]
    complete_ns: npt.NDArray[np.int64]  # the whole request was there
    token_ns: npt.NDArray[np.int64]  # the first token was written
    last_ns: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]  # of the request's first entry in `written_ns`
    written_ns: npt.NDArray[np.int64]  # every token of every request


class Truth:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def set(self, *, ttft_ms: float = 0, itl_ms: float = 0, coalesce: int = 1) -> None:
        """Timing of the answers from now on; 0 is as fast as possible. Forgets the log."""
        self._get(f"/__set?ttft={ttft_ms}&itl={itl_ms}&coalesce={coalesce}")
        self._get("/__reset")

    def log(self) -> Log:
        """What was seen since `set`, once nothing is in flight any more."""
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/log.csv"
            self._get(f"/__dump?{path}")
            with Path(path).open() as file:
                names = file.readline().strip().split(",")
                rows = [line.rstrip("\n").split(",") for line in file]
            written = np.fromfile(f"{path}.tok", dtype=np.int64)
        rows.sort(key=lambda row: row[-1])
        columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())

        def number(name: str) -> npt.NDArray[np.int64]:
            return np.array(columns[name], dtype=np.int64)

        return Log(
            np.array(columns["id"]),
            number("m_first_byte"),
            number("m_full"),
            number("m_tok0"),
            number("m_last"),
            number("sent"),
            number("tok_off"),
            written,
        )

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:  # noqa: S310 loopback
            return str(answer.read().decode())


@contextmanager
def server(*, core: int | None = SERVER_CORE) -> Iterator[Truth]:
    """Build the server if need be and run it on one core for as long as the context lasts."""
    binary = _build()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*on_core(core), str(binary), str(port)])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield Truth(port)
    finally:
        process.terminate()
        process.wait()


def available() -> bool:
    """Whether the server's source and a compiler are there."""
    return _source().exists() and shutil.which("gcc") is not None


def on_core(core: int | None) -> Sequence[str]:
    """Prefix of a command that keeps it on one core."""
    several = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    return ["taskset", "-c", str(core)] if core is not None and several and shutil.which("taskset") else []


def _source() -> Path:
    root = Path(__file__).resolve().parent.parent
    return Path(os.environ.get("CONVOY_DATA", root.parent / "shared")) / "bench" / "truth_server.c"


def _build() -> Path:
    source = _source()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    binary = Path(tempfile.gettempdir()) / f"convoy-truth-server-{os.getuid()}-{digest}"
    if not binary.exists():
        made = binary.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-o", made, source], check=True)
        made.rename(binary)
    return binary
