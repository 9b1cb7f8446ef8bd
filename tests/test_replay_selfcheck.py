"""What a plan takes of a client, by arithmetic, and one real check of this machine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from replay import selfcheck
from replay.plan import NONE, Plan, build
from replay.prompts import Wiring
from replay.selfcheck import Floor, busiest, first_rows, refusal
from replay.vocabulary import ASSUMED
from traces.record import Metadata, table

MS, S = 1_000_000, 1_000_000_000
FLOOR = Floor(
    requests=40,
    failed=0,
    ttft_ms_p50=0.3,
    ttft_ms_p99=1.0,
    lateness_ms_p99=0.5,
    request_us=200,
    event_us=10,
    worker_rps=2_000,
    busy=0.1,
    needs=1,
    wall_s=1.0,
)


def plan_of(at_ms: list[float], output: int = 50, **more: object) -> Plan:
    count = len(at_ms)
    columns = {
        "arrival_ns": [round(at * MS) for at in at_ms],
        "endpoint": ["chat"] * count,
        "stream": [True] * count,
        "input_tokens": [30] * count,
        "output_tokens": [output] * count,
    }
    return build(table(columns | more, Metadata()))


def test_the_busiest_stretch_of_ten_seconds_counts():
    at_ns = np.array([0, 20, 21, 22, 29, 31, 60], dtype=np.int64) * S
    cost_us = np.full(7, 1e6)
    assert busiest(at_ns, cost_us) == pytest.approx(4 / 10)


def test_a_plan_shorter_than_a_stretch_counts_as_a_whole():
    assert busiest(np.array([0, 1, 2], dtype=np.int64) * S, np.full(3, 1e6)) == pytest.approx(1.5)
    assert busiest(np.array([], dtype=np.int64), np.array([])) == 0


def test_a_plan_that_the_workers_can_send_is_not_refused():
    assert refusal(FLOOR, 1) is None


def test_a_plan_above_the_floor_is_refused_with_the_workers_it_takes(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    text = refusal(msgspec.structs.replace(FLOOR, needs=3), 1)
    assert "2,000 requests/s" in text
    assert "--workers 3" in text


def test_a_plan_above_the_machine_is_refused_with_the_machines_it_takes(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert "3 machines" in refusal(msgspec.structs.replace(FLOOR, needs=5), 2)


def test_the_first_rows_keep_their_times_when_there_are_many():
    plan = plan_of([index * 5.0 for index in range(1000)])
    found = first_rows(plan, tokens=16)
    assert found.rows == 140  # of the 700 ms of the play
    assert found.at_ns.tolist() == plan.at_ns[:140].tolist()
    assert set(found.output_tokens.tolist()) == {16}


def test_few_rows_are_spread_evenly_over_the_play():
    found = first_rows(plan_of([index * 1000.0 for index in range(100)]), tokens=16)
    assert found.rows == 40
    assert set(np.diff(found.at_ns).tolist()) == {selfcheck.PLAY_NS // 40}


def test_rows_are_repeated_at_once_for_the_flat_play():
    found = first_rows(plan_of([0, 1, 2]), tokens=1, repeat_to=10)
    assert (found.rows, found.at_ns.max(), set(found.output_tokens.tolist())) == (10, 0, {1})


def test_prefix_blocks_go_with_their_rows_and_no_turn_waits():
    plan = plan_of([0, 10], block_size=[16, 16], block_hashes=[[1, 2], [1, 3]], session_id=["a", "a"], turn=[0, 1])
    assert plan.linked
    found = first_rows(plan, tokens=1, repeat_to=3)
    assert found.block_hashes.tolist() == [1, 2, 1, 3, 1, 2]
    assert found.block_offsets.tolist() == [0, 2, 4, 6]
    assert set(found.previous.tolist()) == {NONE}


@pytest.mark.parametrize("closed_loop", [False, True])
def test_this_machine_has_a_floor(closed_loop):
    plan = plan_of([index * 20.0 for index in range(60)], 200)
    floor = selfcheck.measure(plan, Wiring(model="m", models=("m",)), ASSUMED, closed_loop=closed_loop)
    assert (floor.requests, floor.failed) == (40, 0)
    assert 0 < floor.ttft_ms_p50 <= floor.ttft_ms_p99
    assert floor.request_us > 0
    assert floor.needs >= 1
    assert (floor.busy is None) == closed_loop


def test_keys_do_not_take_part_in_the_check(monkeypatch):
    seen = []
    monkeypatch.setattr(
        selfcheck, "_play", lambda plan, wiring, *_: seen.append(wiring) or ((np.array([1.0]),) * 2, 0.1)
    )
    wiring = Wiring(model="m", models=("m",), headers={"authorization": "Bearer x"}, tenant_headers={"a": {"k": "v"}})
    selfcheck.measure(plan_of([0, 1]), wiring, ASSUMED)
    assert [(found.headers, found.tenant_headers) for found in seen] == [({}, {})] * 2
