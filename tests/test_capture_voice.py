"""Lines on stderr hold up neither traffic nor rows, whoever reads them."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from capture.voice import MOST, Voice
from tests.capturing import ROOT
from tests.faulty_server import faulty, good
from traces import parquet


def test_lines_are_said_in_order():
    said: list[bytes] = []
    voice = Voice(said.append)
    for number in range(20):
        voice(f"line {number}")
    assert voice.rest(10.0)
    assert said == [b"line %d\n" % number for number in range(20)]


def test_a_reader_that_stops_holds_up_nobody_and_what_was_left_out_is_counted():
    reads, said = threading.Event(), []

    def write(data: bytes) -> None:
        reads.wait(30)
        said.append(data)

    voice = Voice(write)
    voice("first")
    while voice._lines.qsize():  # the thread has it, and waits
        time.sleep(0.001)
    for number in range(MOST + 7):
        voice(f"line {number}")
    assert not voice.rest(0.01)
    assert said == []
    reads.set()
    assert voice.rest(10.0)
    assert len(said) == 1 + MOST
    assert said[1] == b"capture: 7 lines were left out, for nobody read them\nline 0\n"


def test_a_stderr_that_is_gone_is_no_error():
    def write(data: bytes) -> None:
        raise BrokenPipeError

    voice = Voice(write)
    voice("a")
    assert voice.rest(10.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_recorder_whose_stderr_is_full_from_the_start_serves_and_records(workers: int, tmp_path: Path):
    readable, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b"x" * 4096):
            pass
    fcntl.fcntl(full, fcntl.F_SETFL, 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with faulty(good(3)) as server:
        words = ["--upstream", server.url, "--listen", f"127.0.0.1:{port}", "--out", str(tmp_path / "out")]
        process = subprocess.Popen(
            [sys.executable, "-m", "capture", *words, "--workers", str(workers)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=full, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            for _ in range(6):
                assert ask(port).count(b" t") == 3
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
            os.close(full)
            os.close(readable)
    assert process.returncode == 0
    assert b"Recorded 6 rows, none dropped" in said
    assert parquet.read(tmp_path / "out").num_rows == 6


def ask(port: int) -> bytes:
    """One answer through the recorder, which may still be starting."""
    end_s = time.monotonic() + 60
    while True:
        try:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            client.request("POST", "/v1/chat/completions", b'{"model":"m","stream":true,"messages":[]}')
            body = client.getresponse().read()
            client.close()
        except ConnectionRefusedError:
            assert time.monotonic() < end_s, "the recorder did not start"
            time.sleep(0.05)
        else:
            return body
