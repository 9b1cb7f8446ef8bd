"""How faithful one trace is to another, as a specification."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from traces import parquet
from traces.compare import compare, fidelity, sentence
from traces.record import Metadata, table

NS = 1_000_000_000


def trace(arrival_ns, **columns):
    rows = len(arrival_ns)
    columns = {"request_id": [f"r{i}" for i in range(rows)], "input_tokens": [100] * rows, "output_tokens": [20] * rows,
               "outcome": ["ok"] * rows, **columns}  # fmt: skip
    return table({"arrival_ns": np.asarray(arrival_ns, dtype=np.int64), **columns}, Metadata(epoch="relative"))


@pytest.fixture
def arrivals():
    return np.cumsum(np.random.default_rng(7).exponential(0.05, 400) * NS).astype(np.int64)


def test_a_trace_is_faithful_to_itself(arrivals):
    found = fidelity(trace(arrivals), trace(arrivals))
    assert found["differences"] == []
    assert found["displacement_ms"] == {"n": 400, "p50": 0.0, "p99": 0.0, "max": 0.0}
    assert sentence(found, "A", "B").startswith("B is faithful to A: 400 requests")


def test_played_at_twice_the_speed_it_is_as_faithful(arrivals):
    found = fidelity(trace(arrivals), trace(arrivals // 2 + 5 * NS))
    assert found["speed"] == pytest.approx(2, abs=0.001)
    assert found["differences"] == []
    assert found["dispersion_1s"][0] == pytest.approx(found["dispersion_1s"][1], rel=0.1)
    assert "at 2x speed" in sentence(found, "A", "B")


def test_evenly_spread_arrivals_are_not_the_bursts_they_were(arrivals):
    even = np.linspace(0, arrivals[-1], len(arrivals)).astype(np.int64)
    found = fidelity(trace(arrivals), trace(even))
    assert found["inter_arrival_cv"][1] < 0.01
    assert any(each.startswith("inter-arrival CV") for each in found["differences"])


def test_rows_are_paired_by_id_so_a_changed_order_shows(arrivals):
    swapped = arrivals.copy()
    swapped[[10, 11]] = swapped[[11, 10]]
    found = fidelity(trace(arrivals), parquet.in_order(trace(swapped)))
    assert found["paired_by"] == "request id"
    assert found["out_of_order"] == 1
    assert "order (1 steps back)" in found["differences"]


def test_lost_rows_and_other_lengths_are_said(arrivals):
    shorter = trace(arrivals[:390], output_tokens=[19] * 390)
    found = fidelity(trace(arrivals), shorter, 1.0)
    assert found["paired"] == 390
    assert found["lengths"]["input_tokens"]["same"] == 1.0
    assert found["lengths"]["output_tokens"]["mean"] == [20.0, 19.0]
    text = sentence(found, "A", "B")
    assert "count (400 and 390 requests, 390 paired)" in text
    assert "output tokens (0% the same)" in text


def test_the_ks_distance_of_first_tokens_is_the_largest_gap_of_two_distributions(arrivals):
    fast = np.full(400, 100_000_000)
    slow = np.where(np.arange(400) < 100, 900_000_000, 100_000_000)
    found = fidelity(trace(arrivals, first_token_ns=fast), trace(arrivals, first_token_ns=slow))
    assert found["ttft"]["ks"] == pytest.approx(0.25)
    assert found["ttft"]["p"] < 0.05
    assert found["differences"] == [], "that the servers differ is not the replay's fault"
    same = fidelity(trace(arrivals, first_token_ns=fast), trace(arrivals, first_token_ns=fast))
    assert same["ttft"]["ks"] == 0.0


def test_the_command_says_it_first_and_last_and_leaves_out_what_was_not_sent(tmp_path, arrivals):
    outcome = ["ok"] * 399 + ["unsent"]
    parquet.write(trace(arrivals), tmp_path / "a.parquet")
    (tmp_path / "run").mkdir()
    parquet.write(trace(arrivals, outcome=outcome), tmp_path / "run" / "outcomes.parquet")
    result = CliRunner().invoke(compare, [str(tmp_path / "a.parquet"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == lines[-1]
    assert "count (400 and 399 requests, 399 paired)" in lines[0]
    as_json = CliRunner().invoke(compare, [str(tmp_path / "a.parquet"), str(tmp_path / "a.parquet"), "--json"])
    assert json.loads(as_json.output)["paired"] == 400


def test_an_empty_trace_is_one_clear_line(tmp_path):
    parquet.write(trace([]), tmp_path / "a.parquet")
    result = CliRunner().invoke(compare, [str(tmp_path / "a.parquet"), str(tmp_path / "a.parquet")])
    assert "no request in it" in str(result.exception)
