"""The sender's benchmark runs, and its arithmetic is right; no figure is judged here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import sender
import soak
import truth


@pytest.fixture(scope="module")
def server(data):
    data("bench", "truth_server.c")
    if not truth.available():
        pytest.skip("no C compiler")
    with truth.server(core=None) as found:
        yield found


@pytest.mark.data
@pytest.mark.parametrize("client", ["replay", "protocol", "aiohttp"])
def test_every_request_of_a_fixed_schedule_is_found_in_the_servers_log(server, client, tmp_path):
    server.set(ttft_ms=5, itl_ms=1)
    if client == "replay":
        ran = sender.ours(server, tmp_path, 30, 4, rate=100)
    else:
        ran = sender.minimal(client, server, tmp_path, "fixed", 30, 100, 4)
    found = sender.judge(ran, server.log(), 30)
    assert 0 <= found["late_p50"] <= found["late_p99"]
    assert 0 <= found["added_p50"] <= found["added_p99"]
    assert client != "replay" or found["gap_p50"] >= 0  # the others count reads, not chunks
    assert found["cpu"] > 0


@pytest.mark.data
def test_a_closed_loop_asks_as_often_as_it_is_told(server, tmp_path):
    server.set()
    sender.ours(server, tmp_path, 100, 16)
    log = sender.by_row(server.log())
    assert len(log.ids) == 100
    assert set(log.tokens.tolist()) == {16}
    assert np.all(log.last_ns >= log.token_ns)


@pytest.mark.data
def test_a_soak_tells_lateness_and_memory_by_process(server, tmp_path):
    ran = soak.soak(server, tmp_path, 0.02, 50, look_s=0.2)
    assert len(ran.late_ms) == len(ran.added_ms) == 60
    assert ran.late_ms.min() >= 0
    assert {name for name, sizes in ran.memory_mb.items() if max(sizes) > 5} == {"command", "worker"}
    assert "60 requests sent, 60 ok, valid" in soak.report(ran, 0.02, 50)


def test_a_drift_is_told_as_its_sum_over_the_run():
    assert soak.trend(np.linspace(1.0, 2.0, 10)).startswith("+1.1")
    assert soak.by_minute(np.array([0.0, 59.9, 60.0, 61.0]), np.array([1.0, 1.0, 5.0, 5.0]), 0.5).tolist() == [1.0, 5.0]
