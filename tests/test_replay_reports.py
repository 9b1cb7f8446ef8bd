"""What users of other load generators reported about schedules (B) and clients (C), each as a small test."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import uvloop

from replay import nullserver
from replay.connection import HttpTransport
from replay.exchange import Exchange, WireRequest
from replay.plan import build
from replay.schedule import NEVER, Schedule
from tests.faulty_server import faulty, good
from traces import parquet
from traces.meter import Meter
from traces.record import Metadata, table

ROOT = Path(__file__).resolve().parent.parent
MS, S = 1_000_000, 1_000_000_000


def plan_of(at_ns):
    count = len(at_ns)
    columns = {"arrival_ns": at_ns, "input_tokens": [8] * count, "output_tokens": [2] * count}
    return build(table(columns, Metadata()))


def replay(folder: Path, url: str, at_ns, *options: str, tokens: int = 2) -> tuple[int, dict, list[dict]]:
    """The command on a trace of its own: exit code, summary, rows."""
    count = len(at_ns)
    columns = {
        "arrival_ns": np.asarray(at_ns, dtype=np.int64),
        "endpoint": ["chat"] * count,
        "input_tokens": [8] * count,
        "output_tokens": [tokens] * count,
    }
    trace, out = folder / "trace.parquet", folder / "run"
    parquet.write(table(columns, Metadata(source="test")), trace)
    command = [sys.executable, "-m", "replay", str(trace), "--target", url, "--out", str(out), "--json", "--no-probe"]
    done = subprocess.run(
        [*command, "--no-self-check", "--model", "null", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout), parquet.read(out / "outcomes.parquet").to_pylist()


@pytest.fixture(scope="module")
def null():
    with nullserver.running() as url:
        yield url


def ask(url: str, count: int, **limits: int) -> list[Exchange]:
    """So many requests at once."""

    async def main() -> list[Exchange]:
        transport = HttpTransport(url)
        await transport.open()
        futures = [asyncio.get_running_loop().create_future() for _ in range(count)]
        request = WireRequest("POST", "/v1/chat/completions", b"", b'{"stream": true, "max_tokens": 40}', **limits)
        for future in futures:
            transport.start(request, future.set_result)
        done = [await asyncio.wait_for(future, 60) for future in futures]
        await transport.close()
        return done

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_b01_a_loop_that_wakes_late_every_time_does_not_drift():
    """10,000 rows at 200/s, every wake up to 9 ms late: the span is right to 0.1 %, because due times are absolute."""
    at_ns = np.arange(10_000) * 5 * MS
    schedule = Schedule(plan_of(at_ns), np.arange(10_000))
    late = np.random.default_rng(1).integers(0, 9 * MS, 20_000).tolist()
    sent = []
    while (next_ns := schedule.next_ns) < NEVER:
        now_ns = next_ns + late.pop()
        while (release := schedule.take(now_ns)) is not None:
            assert release.due_ns == at_ns[release.row]
            sent.append(now_ns)
    assert len(sent) == 10_000
    assert abs((sent[-1] - sent[0]) / (at_ns[-1] - at_ns[0]) - 1) < 0.001


def test_b03_five_thousand_a_second_are_on_time_or_the_client_is_named(null, tmp_path):
    code, summary, rows = replay(tmp_path, null, np.arange(2_500) * (S // 5_000), "--workers", "1")
    assert len(rows) == summary["planned"] == 2_500
    late_ms = np.array([(row["sent_ns"] - row["due_ns"]) / MS for row in rows if row["sent_ns"] is not None])
    on_time = len(late_ms) == 2_500 and np.quantile(late_ms, 0.99) <= summary["lateness_ms"]["limit"]
    if on_time:
        assert code == 0
    else:
        assert code == 3
        assert any("client-bound" in reason for reason in summary["reasons"])


def test_b21_arrivals_keep_the_shape_that_they_had(null, tmp_path):
    """The coefficient of variation of the gaps: of what was sent as of what was planned."""
    gaps_ns = np.random.default_rng(3).gamma(0.25, 60 * MS, 150)  # bursty: cv 2
    at_ns = np.cumsum(gaps_ns).astype(np.int64)
    _, _, rows = replay(tmp_path, null, at_ns - at_ns[0], "--workers", "1")
    due, sent = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("due_ns", "sent_ns"))
    late = sent - due
    assert np.all(late >= 0)
    quiet = late < np.quantile(late, 0.5) + 5 * MS  # what another process held up says nothing about the pacer
    planned, kept = np.diff(due[quiet]), np.diff(sent[quiet])
    assert np.std(kept) / np.mean(kept) == pytest.approx(np.std(planned) / np.mean(planned), rel=0.05)


def test_c03_files_that_a_burst_takes_are_asked_for_before_it():
    from replay.preflight import SPARE_DESCRIPTORS, file_descriptors

    assert SPARE_DESCRIPTORS >= 100
    assert file_descriptors(plan_of([0] * 50), 1, None) == []


def test_c03_a_plan_that_needs_more_files_than_there_can_be_is_told(monkeypatch):
    from replay import preflight

    monkeypatch.setattr(preflight.descriptors, "attainable", lambda: 1_000)
    assert preflight.file_descriptors(plan_of([0] * 800), 1, None) == []
    (note,) = preflight.file_descriptors(plan_of([0] * 2_000), 1, None)
    assert "at most 900 connections per worker (ulimit -n), the plan could need 2,000" in note
    assert preflight.file_descriptors(plan_of([0] * 2_000), 4, None) == []


def test_c05_after_a_pause_the_new_connection_is_shown_apart():
    """A server that closes idle connections after 50 ms, and a gap of 300 ms: connecting has its own time."""

    async def main() -> tuple[Exchange, Exchange]:
        async def serve(reader, writer):
            while True:
                try:
                    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.05)
                except (TimeoutError, asyncio.IncompleteReadError):
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        transport = HttpTransport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await transport.open()
        done = []
        for pause_s in (0, 0.3):
            await asyncio.sleep(pause_s)
            future = asyncio.get_running_loop().create_future()
            transport.start(WireRequest("GET", "/", b"", b""), future.set_result)
            done.append(await asyncio.wait_for(future, 20))
        await transport.close()
        server.close()
        await asyncio.sleep(0.1)
        return done[0], done[1]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first, second = runner.run(main())
    assert first.status == second.status == 200
    assert second.connect_ns is not None
    assert not second.reused
    assert second.headers_ns - second.started_ns >= second.connect_ns


def test_c06_a_backlog_that_overflows_is_told_apart_and_nothing_is_lost():
    with faulty([], accept=False, backlog=1) as server:
        done = ask(server.url, 60, connect_ns=400 * MS, idle_ns=600 * MS)
    ends = {exchange.end for exchange in done}
    assert len(done) == 60
    assert ends <= {"timeout_connect", "timeout_idle", "reset", "connect_error"}
    assert "timeout_connect" in ends
    assert all(exchange.status is None and exchange.error for exchange in done)


def test_c13_a_chunk_is_seen_when_a_bare_socket_sees_it():
    """The same stream to a blocking socket and to us, at the same time: the gaps between chunks agree to a millisecond.

    The median of a few tries decides: other processes may hold up either reader.
    """
    events = [f'data: {{"choices":[{{"index":0,"text":"{index}"}}]}}\n\n'.encode() for index in range(60)]
    framed = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    barrier = threading.Barrier(3)

    def serve(listener: socket.socket) -> None:
        with listener:
            connections = [listener.accept()[0] for _ in range(2)]
        for connection in connections:
            connection.recv(65_536)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for frame in framed:
            time.sleep(0.004)
            for connection in connections:
                connection.sendall(frame)
        for connection in connections:
            connection.sendall(b"0\r\n\r\n")
            connection.close()

    seen: list[int] = []

    def reference(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as bare:
            bare.sendall(b"GET / HTTP/1.1\r\n\r\n")
            barrier.wait()
            while data := bare.recv(65_536):
                seen.extend([time.monotonic_ns()] * data.count(b"data: "))

    differences = []
    for _ in range(3):
        seen.clear()
        barrier = threading.Barrier(2)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        threads = [threading.Thread(target=serve, args=(listener,)), threading.Thread(target=reference, args=(port,))]
        for thread in threads:
            thread.start()
        barrier.wait()
        (exchange,) = ask(f"http://127.0.0.1:{port}", 1)
        for thread in threads:
            thread.join()
        ours = [at_ns for at_ns, data in exchange.segments for _ in range(data.count(b"data: "))]
        assert len(ours) == len(seen) == 60
        differences += [abs(mine - theirs) / MS for mine, theirs in zip(ours, seen, strict=True)]
    assert float(np.median(differences)) < 1


def test_c14_every_result_reaches_the_disk(null, tmp_path):
    """Nothing passes through a queue that could drop it: rows on disk = answers seen by the counters = plan."""
    code, summary, rows = replay(
        tmp_path, null, np.zeros(1_500, dtype=np.int64), "--concurrency", "64", "--workers", "2"
    )
    assert code == 0
    assert len(rows) == summary["planned"] == summary["ok"] == 1_500
    assert len({row["worker"] for row in rows}) == 2
    assert all(row["response_bytes"] > 0 for row in rows)


def test_fifty_rows_of_one_timestamp_go_out_together(null, tmp_path):
    """Within 10 ms on a free machine; here the middle half of them counts, and nobody waits for anybody's answer."""
    _, _, rows = replay(tmp_path, null, [0] * 50, "--workers", "1", tokens=40)
    sent = sorted(row["sent_ns"] for row in rows)
    ended = min(row["sent_ns"] + row["end_ns"] for row in rows)
    assert sent[-1] < ended
    assert np.median([b - a for a, b in pairwise(sent)]) < 10 * MS / 50


def test_a_meter_fed_from_an_exchange_gives_the_truth_of_the_server():
    with faulty(lambda _: good(5)) as server:
        (exchange,) = ask(server.url, 1)
    meter = Meter(start_ns=exchange.started_ns)
    meter.head(exchange.headers_ns, exchange.status, exchange.headers)
    meter.feed_all(exchange.segments)
    row = meter.close(exchange.end_ns, exchange.end)
    assert (row.outcome, len(row.chunk_ns)) == ("ok", 5)
    first_write_ns = server.writes[0][2]
    assert exchange.started_ns + row.first_token_ns >= first_write_ns
