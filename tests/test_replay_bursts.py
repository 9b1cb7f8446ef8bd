"""A probe's bursts on the virtual engine: every mode is told apart by the times of the answers alone."""

from __future__ import annotations

import numpy as np
import pytest

from replay import bursts
from replay.engine.config import SchedulerConfig
from replay.engine.steptime import load_profile
from replay.engine.virtual import Workload, simulate
from traces.record import Metadata, table

MODES = {
    "fcfs": ("fcfs", 1),
    "priority": ("priority", 1),
    "inverted": ("priority", -1),
    "sglang": ("sglang", 100),
    "preemptive": ("priority-preemptive", 1),
}


def played(rows, mode, *, slots=8, budget=2048, drain_s=None):
    """Outcomes of a burst on the virtual engine; `drain_s` after the last send what still runs is cut."""
    policy, gap = MODES[mode]
    rows = sorted(rows)
    kinds = [kind for _, kind, *_ in rows]
    work = Workload(
        arrival_ns=np.array([int(at * 1e9) for at, *_ in rows]),
        input_tokens=np.array([tokens for *_, tokens, _ in rows]),
        output_tokens=np.array([tokens for *_, tokens in rows]),
        tenant=np.array([list(bursts.RANKS).index(kind) for kind in kinds]),
        tenants=tuple(bursts.RANKS),
        priority=np.array([gap * bursts.RANKS[kind] for kind in kinds]),
    )
    config = SchedulerConfig(scheduling_policy=policy, max_num_seqs=slots, max_num_batched_tokens=budget)
    result = simulate(work, config, load_profile().model)
    last = (rows[-1][0] + drain_s) * 1e9 if drain_s else np.inf
    found = []
    for i, (_, kind, asked, _) in enumerate(rows):
        chunks = [int(t - result.sent_ns[i]) for t in result.chunk_ns(i) if t <= last]
        ended = result.end_ns[i] <= last
        found.append(
            {
                "tenant": kind,
                "arrival_ns": int(result.sent_ns[i]),
                "sent_ns": int(result.sent_ns[i]),
                "input_tokens": asked,
                "planned_input_tokens": asked,
                "first_token_ns": chunks[0] if chunks else None,
                "end_ns": int(min(result.end_ns[i], last)) - int(result.sent_ns[i]),
                "chunk_ns": chunks,
                "status": 200,
                "outcome": "ok" if ended else "cut",
            }
        )
    return table({name: [row[name] for row in found] for name in found[0]}, Metadata())


@pytest.fixture(scope="module")
def idle():
    found = bursts.read_idle(played(bursts.idle_rows(), "fcfs"))
    assert found is not None
    assert found.busy == ""
    return found


@pytest.mark.parametrize("slots", [8, 256])
@pytest.mark.parametrize(
    ("mode", "word"),
    [("fcfs", "ignored"), ("priority", "honoured"), ("inverted", "inverted"), ("sglang", "honoured")],
)
def test_the_backlog_tells_every_mode_with_few_slots_and_with_hundreds(idle, mode, word, slots):
    found = bursts.read_backlog(played(bursts.backlog_rows(idle, None), mode, slots=slots), idle)
    assert found.word == word, found.evidence


@pytest.mark.parametrize(
    ("mode", "displaced"), [("fcfs", False), ("priority", False), ("sglang", True), ("preemptive", True)]
)
@pytest.mark.parametrize("slots", [4, 8, 16])
def test_slots_are_counted_and_a_displaced_stream_is_seen(idle, mode, displaced, slots):
    outcomes = played(bursts.slot_rows(idle), mode, slots=slots, drain_s=bursts.SLOTS_DRAIN_S)
    assert bursts.read_slots(outcomes)[:2] == (slots, displaced)


def test_more_slots_than_streams_is_no_answer(idle):
    assert bursts.read_slots(played(bursts.slot_rows(idle), "priority", slots=256))[:2] == (None, None)


@pytest.mark.parametrize("mode", ["fcfs", "priority", "sglang"])
@pytest.mark.parametrize("budget", [1024, 2048, 4096])
def test_a_long_prompt_blocks_and_the_budget_is_about_right(idle, mode, budget):
    blocks, found, told = bursts.read_long(played(bursts.long_rows(idle, 32_768), mode, budget=budget))
    assert blocks is True, told
    assert found == pytest.approx(budget, rel=0.35), told


def test_a_server_that_prefers_an_urgent_request_to_a_prompt_in_progress_does_not_block(idle):
    blocks, _, told = bursts.read_long(played(bursts.long_rows(idle, 32_768), "preemptive", slots=2))
    assert blocks is False, told


def test_a_refused_tag_is_rejected(idle):
    outcomes = played(bursts.backlog_rows(idle, None), "fcfs")
    refused = outcomes.set_column(outcomes.schema.names.index("status"), "status", [[400] * outcomes.num_rows])
    assert bursts.read_backlog(refused, idle).word == "rejected"


def test_short_requests_that_met_no_queue_prove_nothing(idle):
    rows = [
        (at + 5.0 if kind != bursts.BLOCK else at, kind, i, o) for at, kind, i, o in bursts.backlog_rows(idle, None)
    ]
    assert bursts.read_backlog(played(rows, "priority"), idle).word == "inconclusive"


def test_a_busy_server_is_seen_by_its_short_answers():
    crowd = [(0.0, bursts.BLOCK, 100, 400) for _ in range(30)]
    outcomes = played([*crowd, *bursts.idle_rows()], "fcfs", slots=4)
    probing = outcomes.filter([tokens != 100 for tokens in outcomes.column("input_tokens").to_pylist()])
    found = bursts.read_idle(probing)
    assert found is not None
    assert found.busy
