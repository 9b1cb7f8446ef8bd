"""Several recorders on one port: no row lost or doubled, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.capturing import recording
from tests.faulty_server import faulty, good
from traces import parquet

ASK = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture(scope="module")
def server():
    with faulty(good(3)) as running:
        yield running


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_two_workers_share_the_port_and_one_that_dies_is_started_again(server, tmp_path):
    out = tmp_path / "out"
    with recording(server.url, out, "--workers", "2") as recorder:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: recorder.ask(ASK), range(40)))
        assert all(b"[DONE]" in answer for answer in answers)
        recorder.rows(40)
        first, second = children(recorder.process.pid)
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 60
        while first in (now := children(recorder.process.pid)) or len(now) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        answers = [recorder.ask(ASK, {"x-session-id": "chat-1"}) for _ in range(10)]
        assert all(b"[DONE]" in answer for answer in answers)
        assert recorder.stop() == 0
    told = "".join(recorder.said)
    assert "ended by signal 9; started again, which recovers its rows" in told
    assert "Recorded 50 rows, none dropped" in told, "those too that the dead worker had not told of"
    assert not alive(second)
    rows = recorder.rows()
    names = Counter(row["request_id"].rpartition("-")[0] for row in rows)
    assert len({row["request_id"] for row in rows}) == len(rows) == 50
    assert min(names.values()) >= 5, f"connections are spread: {names}"
    sessions = [row["session_id"] for row in rows if row["session_id"] is not None]
    assert len(sessions) == 10, "no worker sees all messages, so only a header tells a session"
    assert len(set(sessions)) == 1, "whichever worker had it"
    assert {(row["turn"], row["think_ns"]) for row in rows} == {(None, None)}


def test_the_workers_of_a_parent_that_was_killed_end_by_themselves_with_their_rows(server, tmp_path):
    out = tmp_path / "out"
    with recording(server.url, out, "--workers", "2") as recorder:
        for _ in range(6):
            recorder.ask(ASK)
        workers = children(recorder.process.pid)
        recorder.stop(signal.SIGKILL)
        end = time.monotonic() + 30
        while any(alive(pid) for pid in workers):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert parquet.read(out).num_rows == 6
