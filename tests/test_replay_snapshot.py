"""The shared counters: buckets, and sums over processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import snapshot
from tenants import quantiles


@given(st.floats(1e-3, 4e6))
def test_a_time_lies_in_its_bucket_and_the_edge_is_right_to_5_percent(value_ms):
    edges = snapshot.upper_edges_ms()
    number = snapshot.bucket(value_ms)
    assert value_ms <= edges[number] * (1 + 1e-9)
    assert number == 0 or value_ms >= edges[number - 1] * (1 - 1e-9)


@pytest.mark.parametrize(("value_ms", "number"), [(0.0, 0), (-1.0, 0), (math.inf, snapshot.BUCKETS - 1), (1e12, 359)])
def test_times_beyond_the_buckets_count_in_the_outer_ones(value_ms, number):
    assert snapshot.bucket(value_ms) == number


def test_rows_of_all_processes_are_summed():
    rows = np.zeros((3, 2, snapshot.ROW), np.int64)
    for process in range(3):
        rows[process, 1, snapshot.field("sent")] += 5
        rows[process, 1, snapshot.field("done")] += 3
        rows[process, 1, snapshot.place("ttft", 100.0)] += 1
        rows[process, 1, snapshot.place("late", 0.2)] += 2
    found = snapshot.snapshot(1, 2, ["a", "b"], [0, None], [9, 99], rows=rows)
    idle, busy = found.tenants
    assert (idle.sent, idle.in_flight, busy.sent, busy.in_flight, busy.planned) == (0, 0, 15, 6, 99)
    assert (busy.times["ttft"].sum(), busy.times["late"].sum(), busy.times["e2e"].sum()) == (3, 6, 0)
    rows[:] = 0
    assert busy.times["ttft"].sum() == 3


def test_a_live_percentile_is_near_the_exact_one_and_infinite_when_requests_failed():
    values = np.random.default_rng(1).lognormal(5, 1, 2000)
    counts = np.zeros(snapshot.BUCKETS, np.int64)
    for value in values:
        counts[snapshot.bucket(value)] += 1
    for q in (0.5, 0.95, 0.99):
        exact = quantiles.quantile(values, q)
        assert exact <= snapshot.percentile_ms(counts, q) <= exact * 1.05
    counts[snapshot.bucket(math.inf)] += 300
    assert math.isinf(snapshot.percentile_ms(counts, 0.95))
    assert snapshot.percentile_ms(np.zeros(snapshot.BUCKETS, np.int64), 0.5) is None
