"""The engine's steps from outside: small cases worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.steps import SPLIT_SHARE, Seen, cluster, emitting_steps, seen, steps
from traces.record import Metadata, table

MS = 1_000_000


def view(requests: list[tuple[int, int, list[float]]]) -> Seen:
    """Requests as (sent ms, input tokens, chunk times in ms)."""
    sent = np.array([int(row[0] * MS) for row in requests])
    chunks = [np.array([int(time * MS) for time in row[2]]) for row in requests]
    return Seen(
        sent_ns=sent,
        first_ns=np.array([c[0] if len(c) else -1 for c in chunks]),
        end_ns=np.array([c[-1] if len(c) else s for c, s in zip(chunks, sent, strict=True)]),
        input_tokens=np.array([row[1] for row in requests]),
        chunk_ns=np.concatenate(chunks),
        chunk_of=np.repeat(np.arange(len(requests)), [len(c) for c in chunks]),
    )


def test_chunks_that_arrive_together_end_one_step():
    order, step = cluster(np.array([10, 20, 30, 11, 21, 31]) * MS, np.array([0, 0, 0, 1, 1, 1]))
    assert step.tolist() == [0, 0, 1, 1, 2, 2]
    assert order.tolist() == [0, 3, 1, 4, 2, 5]


def test_a_stream_never_emits_twice_in_one_step():
    _, step = cluster(np.array([100, 101, 102, 200, 300]) * MS, np.array([0, 0, 1, 0, 0]))
    assert step.tolist() == [0, 1, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), min_size=1, max_size=60))
def test_steps_are_those_of_the_definition_chunk_by_chunk(chunks):
    times, owners = (np.array(column, dtype=np.int64) for column in zip(*chunks, strict=True))
    order, step = cluster(times, owners)
    gaps = [b - a for who in set(owners.tolist()) for a, b in pairwise(sorted(times[owners == who].tolist())) if b > a]
    limit = SPLIT_SHARE * float(np.median(gaps)) if gaps else 1e6
    number, seen_in, last = 0, {}, times[order[0]]
    for place, row in enumerate(order.tolist()):
        if times[row] - last > limit or seen_in.get(owners[row]) == number:
            number += 1
        seen_in[owners[row]], last = number, times[row]
        assert step[place] == number


def test_a_step_after_an_idle_engine_starts_when_something_is_sent():
    found = steps(
        emitting_steps(view([(0, 10, [20, 30, 40]), (500, 10, [520, 530])])), np.array([20.0 * MS, 20.0 * MS])
    )
    after = int(np.searchsorted(found.end_ns, 520 * MS))
    assert found.start_ns[after] == 500 * MS


def test_a_long_step_is_the_prefill_of_who_then_gets_its_first_token():
    decoding = (0, 100, [10, *range(20, 101, 10), 200, *range(210, 301, 10)])
    newcomer = (95, 1500, [200, *range(210, 301, 10)])
    found = steps(emitting_steps(view([decoding, newcomer])), np.array([10.0 * MS, 95.0 * MS]))
    long = int(np.searchsorted(found.end_ns, 200 * MS))
    rows = found.row_step == long
    work = dict(zip(found.row_request[rows].tolist(), found.row_work[rows].tolist(), strict=True))
    assert sum(work.values()) == pytest.approx(100 * MS)
    assert work[1] > 0.85 * 100 * MS


def test_all_of_a_step_is_given_to_somebody():
    requests = [(i * 7.0, 200, [50.0 + i * 7 + 10 * k for k in range(20)]) for i in range(4)]
    found = steps(emitting_steps(view(requests)), np.full(4, 15.0 * MS))
    given = np.bincount(found.row_step, weights=found.row_work, minlength=len(found.end_ns))
    served = given > 0
    assert np.allclose(given[served], (found.end_ns - found.start_ns)[served])


def test_cached_tokens_need_no_prefill():
    rows = table(
        {"arrival_ns": [0], "sent_ns": [0], "input_tokens": [1000], "cached_tokens": [960], "output_tokens": [1]},
        Metadata(),
    )
    assert seen(rows).input_tokens.tolist() == [40]


def test_a_server_that_merges_tokens_into_few_chunks_has_them_spread():
    rows = table(
        {
            "arrival_ns": [0],
            "sent_ns": [100],
            "first_token_ns": [10],
            "last_token_ns": [100],
            "output_tokens": [10],
            "chunk_ns": [[10, 100]],
        },
        Metadata(),
    )
    assert seen(rows).chunk_ns.tolist() == [110 + 10 * k for k in range(10)]
