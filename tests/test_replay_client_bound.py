"""When the client is what limits, the run says so, by exit 3 and by name, and blames no server. B04 is a report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from replay import nullserver
from traces import parquet
from traces.record import Metadata, table

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def url():
    with nullserver.running() as found:
        yield found


def write_trace(path: Path, count: int, rate: float, tokens: int = 4) -> str:
    columns = {
        "arrival_ns": np.round(np.arange(count) * 1e9 / rate).astype(np.int64),
        "endpoint": ["chat"] * count,
        "stream": [True] * count,
        "input_tokens": np.full(count, 20, dtype=np.int32),
        "output_tokens": np.full(count, tokens, dtype=np.int32),
    }
    parquet.write(table(columns, Metadata(source="test")), path)
    return str(path)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "replay", *arguments, "--workers", "1", "--no-probe", "--model", "null"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, listed) if b"replay.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def sent_so_far(folder: Path) -> bool:
    """Whether rows have been written: the run is under way."""
    return any(part.stat().st_size > 5_000 for part in folder.glob("**/part-*.arrow"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_b04_a_client_that_stood_still_is_named_and_the_server_is_not_judged(url, tmp_path):
    trace = write_trace(tmp_path / "t.parquet", 1200, 200)
    out = tmp_path / "run"
    rule = ("--sla", "default: ttft_p95 < 200ms")
    process = start(trace, "--target", url, "--out", str(out), "--no-self-check", "--json", *rule)
    for _ in range(1000):
        if sent_so_far(out):
            break
        time.sleep(0.02)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(worker, signal.SIGCONT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    found = json.loads(said)
    assert not found["valid"]
    assert any("client-bound" in reason for reason in found["reasons"])
    assert all(entry["verdict"] not in {"fail", "pass"} for entry in found["sla"])
    assert found["lateness_ms"]["max"] > 500
    assert found["ok"] == found["planned"] == 1200  # late, but sent: nothing disappears


def test_b09_a_plan_above_the_floor_is_refused_with_what_it_takes(url, tmp_path):
    trace = write_trace(tmp_path / "t.parquet", 150_000, 50_000)
    out = tmp_path / "run"
    process = start(trace, "--target", url, "--out", str(out))
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert not said
    last = errors.strip().splitlines()[-1]
    assert "client-bound" in last
    assert "workers" in last
    assert "--no-self-check" in last
    assert not out.exists()


def test_the_floor_stands_beside_the_results(url, tmp_path):
    trace = write_trace(tmp_path / "t.parquet", 50, 100)
    out = tmp_path / "run"
    process = start(trace, "--target", url, "--out", str(out), "--max-lateness", "20s")
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    floor = json.loads((out / "run.json").read_text())["self_check"]
    assert floor["failed"] == 0
    assert floor["ttft_ms_p50"] > 0
    assert floor["worker_rps"] > 0
    assert f"{floor['ttft_ms_p50']:.2f} ms (P50)" in " ".join(said.split())
