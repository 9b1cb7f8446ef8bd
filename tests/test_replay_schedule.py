"""Which request goes when: links, caps, closed loop, late ones. No clock: `now` is passed in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import plan as planning
from replay.schedule import NEVER, Schedule
from traces.record import Metadata, table

MS = 1_000_000


def plan(at_ms, **columns):
    columns["arrival_ns"] = [int(at * MS) for at in at_ms]
    columns.setdefault("input_tokens", [1] * len(at_ms))
    columns.setdefault("output_tokens", [1] * len(at_ms))
    return planning.build(table(columns, Metadata()))


def schedule(made, **options):
    return Schedule(made, np.arange(made.rows), **options)


def taken(queue, now_ms):
    found = []
    while (release := queue.take(int(now_ms * MS))) is not None:
        found.append(release)
    return found


def test_rows_go_when_they_are_due_and_not_before():
    queue = schedule(plan([0, 5, 5, 9]))
    assert [release.row for release in taken(queue, 0)] == [0]
    assert queue.next_ns == 5 * MS
    assert taken(queue, 4.999) == []
    assert [release.row for release in taken(queue, 5)] == [1, 2]
    assert [release.row for release in taken(queue, 100)] == [3], "a late request is sent at once"
    assert queue.finished
    assert queue.next_ns == NEVER


def test_a_late_request_keeps_its_due_time():
    queue = schedule(plan([0, 5]))
    assert [(release.due_ns, release.released_ns) for release in taken(queue, 50)] == [(0, 0), (5 * MS, 5 * MS)]


def test_a_stalled_server_does_not_slow_arrivals_b17():
    queue = schedule(plan(range(0, 3000, 10)))
    sent = [release for now in range(0, 3000, 5) for release in taken(queue, now)]
    assert len(sent) == 300, "nothing has ended, all are sent"


def test_a_later_turn_is_due_at_its_predecessors_end_plus_think_time():
    queue = schedule(plan([0, 10, 20], session_id=["a"] * 3, turn=[0, 1, 2], think_ns=[None, 4 * MS, 0]))
    assert [release.row for release in taken(queue, 0)] == [0]
    assert queue.next_ns == NEVER
    queue.ended(0, 30 * MS)
    assert queue.next_ns == 34 * MS
    assert [(r.row, r.due_ns) for r in taken(queue, 40)] == [(1, 34 * MS)]
    queue.ended(1, 41 * MS)
    assert [(r.row, r.due_ns) for r in taken(queue, 41)] == [(2, 41 * MS)]
    assert queue.finished


@pytest.mark.parametrize(("end_ms", "due_ms"), [(3, 10), (30, 30)])
def test_an_unknown_think_time_is_the_trace_time_or_the_end_whichever_is_later(end_ms, due_ms):
    queue = schedule(plan([0, 10], session_id=["a"] * 2, turn=[0, 1]))
    taken(queue, 0)
    queue.ended(0, end_ms * MS)
    assert queue.next_ns == due_ms * MS


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_cap_holds_requests_which_keep_their_due_time_b08(cap):
    queue = schedule(plan([0] * 6, tenant=["s"] * 6), caps={0: cap})
    sent = taken(queue, 0)
    assert len(sent) == cap, "exactly as many as asked"
    assert queue.held == 6 - cap
    queue.ended(sent[0].row, 7 * MS)
    released = taken(queue, 8)
    assert [(r.due_ns, r.released_ns) for r in released] == [(0, 7 * MS)]


def test_a_cap_holds_only_its_own_tenant():
    queue = schedule(plan([0, 0, 1, 1], tenant=["s", "s", "r", "r"]), caps={0: 1})
    assert [release.row for release in taken(queue, 1)] == [0, 2, 3]


def test_a_slot_that_nobody_waits_for_is_free_again():
    queue = schedule(plan([0, 10], tenant=["s", "s"]), caps={0: 1})
    taken(queue, 0)
    queue.ended(0, 5 * MS)
    assert [(r.row, r.released_ns) for r in taken(queue, 10)] == [(1, 10 * MS)]


def test_a_closed_loop_keeps_n_in_flight_and_nothing_is_due():
    queue = schedule(plan([0, 1000, 2000, 3000]), concurrency=2)
    assert queue.next_ns == 0
    assert [(r.row, r.due_ns) for r in taken(queue, 0)] == [(0, None), (1, None)]
    assert queue.next_ns == NEVER
    queue.ended(1, 5 * MS)
    assert [r.row for r in taken(queue, 5)] == [2]


def test_a_user_of_a_closed_loop_plays_a_whole_session_with_its_pauses():
    made = plan([0, 1, 2], session_id=["a", "a", "b"], turn=[0, 1, 0], think_ns=[None, 4 * MS, None])
    queue = schedule(made, concurrency=1)
    assert [r.row for r in taken(queue, 0)] == [0]
    queue.ended(0, 10 * MS)
    assert taken(queue, 13) == []
    assert [r.row for r in taken(queue, 14)] == [1]
    queue.ended(1, 20 * MS)
    assert [r.row for r in taken(queue, 20)] == [2]


def test_catch_up_drop_gives_up_what_is_too_late_and_counts_it():
    queue = schedule(plan([0, 10, 100]), drop_after_ns=50 * MS)
    assert [r.row for r in taken(queue, 61)] == []
    assert queue.dropped == [0, 1]
    assert [r.row for r in taken(queue, 100)] == [2]


def test_a_dropped_turn_lets_its_session_go_on():
    made = plan([0, 1], session_id=["a", "a"], turn=[0, 1], think_ns=[None, 5 * MS], tenant=["s", "s"])
    queue = schedule(made, drop_after_ns=50 * MS, caps={0: 1})
    assert taken(queue, 100) == []
    assert [r.row for r in taken(queue, 105)] == [1]


def test_a_dropped_row_gives_no_slot_to_a_held_one():
    queue = schedule(plan([0, 0, 10], tenant=["s"] * 3), drop_after_ns=50 * MS, caps={0: 1})
    assert [r.row for r in taken(queue, 0)] == [0]
    assert taken(queue, 100) == []
    assert queue.held == 1


def test_after_stop_nothing_goes():
    queue = schedule(plan([0, 1]))
    queue.stop()
    assert taken(queue, 10) == []
    assert queue.finished
    assert queue.next_ns == NEVER


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9)),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([{}, {0: 1}, {0: 2, 1: 1}]),
    st.integers(0, 40),
)
def test_every_row_is_sent_exactly_once_and_never_early(rows, concurrency, caps, service):
    rows = sorted(rows)
    made = plan(
        [at for at, *_ in rows],
        session_id=[session for _, session, _, _ in rows],
        tenant=[tenant for _, _, tenant, _ in rows],
        think_ns=[think * MS for *_, think in rows],
    )
    caps = {tenant: cap for tenant, cap in caps.items() if tenant < len(made.tenants)}
    queue = schedule(made, concurrency=concurrency, caps={} if concurrency else caps)
    sent, running, now = [], [], 0
    while not queue.finished or running:
        for release in taken(queue, now / MS):
            assert release.released_ns <= now
            assert release.due_ns is None or release.due_ns <= release.released_ns
            sent.append(release.row)
            running.append((now + service * MS, release.row))
        upcoming = [end for end, _ in running] + ([queue.next_ns] if queue.next_ns < NEVER else [])
        assert upcoming, "it never hangs"
        now = max(now, min(upcoming))
        for end, row in [item for item in running if item[0] <= now]:
            running.remove((end, row))
            queue.ended(row, now)
    assert sorted(sent) == list(range(made.rows))
