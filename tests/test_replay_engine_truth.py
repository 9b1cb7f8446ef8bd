"""Ground truth on timelines worked out by hand: one token takes one millisecond, nothing else takes time."""

from __future__ import annotations

import pytest

from replay.engine.config import SchedulerConfig
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import StepModel
from replay.engine.truth import Truth

MS = 1_000_000
ONE_MS_PER_TOKEN = StepModel(g_ms=1.0)


def play(config, arrivals):
    """Run (arrival in ms, request) pairs to the end; the truth rows by request id."""
    scheduler, truth = Scheduler(config), Truth(ONE_MS_PER_TOKEN, ["x", "y"])
    pending = sorted(arrivals, key=lambda pair: pair[0])
    now = 0.0
    while pending or scheduler.unfinished:
        if not scheduler.unfinished:
            now = max(now, pending[0][0] * MS)
        while pending and pending[0][0] * MS <= now:
            at, request = pending.pop(0)
            scheduler.add(request)
            truth.arrive(request, at * MS)
        step = scheduler.schedule()
        end = now + ONE_MS_PER_TOKEN.step_ns(step)
        late = [(at, request) for at, request in pending if at * MS < end]
        for at, request in late:
            truth.arrive(request, at * MS)
        scheduler.update(step)
        truth.step(step, now, end)
        for at, request in late:
            pending.remove((at, request))
            scheduler.add(request)
        now = end
    assert not truth._open
    return {row.request.request_id: row for row in truth.rows}, truth


def ask(name, prompt, outputs, tenant="x", **more):
    return EngineRequest(name, prompt_tokens=prompt, max_tokens=outputs, tenant=tenant, **more)


def test_a_wait_for_a_slot_is_split_from_the_rest_of_the_running_step():
    rows, _ = play(SchedulerConfig(max_num_seqs=1), [(0, ask("a", 2, 2)), (1, ask("b", 1, 1, "y"))])
    b = rows["b"]
    assert (b.wait_step_ns, b.wait_slot_ns, b.wait_kv_ns, b.wait_budget_ns) == (1 * MS, 1 * MS, 0, 0)
    assert (b.prefill_ns, b.own_ns, b.first_token_ns) == (1 * MS, 1 * MS, 4 * MS)
    assert b.served_ns == pytest.approx((2 * MS, 1 * MS))


def test_a_wait_for_tokens_counts_as_budget():
    config = SchedulerConfig(max_num_batched_tokens=4)
    rows, _ = play(config, [(0, ask("a", 8, 1)), (0, ask("b", 2, 1, "y"))])
    b = rows["b"]
    assert (b.wait_budget_ns, b.wait_slot_ns) == (8 * MS, 0)
    assert b.served_ns == pytest.approx((8 * MS, 2 * MS))


def test_a_wait_for_blocks_counts_as_kv():
    config = SchedulerConfig(num_gpu_blocks=4, block_size=4, max_model_len=12)
    rows, _ = play(config, [(0, ask("a", 5, 2)), (0, ask("b", 8, 1, "y"))])
    assert (rows["b"].wait_kv_ns, rows["b"].wait_slot_ns, rows["b"].wait_budget_ns) == (6 * MS, 0, 0)


def test_a_wait_after_preemption_does_not_count_before_the_first_token():
    config = SchedulerConfig(num_gpu_blocks=4, block_size=4, max_model_len=12)
    rows, _ = play(config, [(0, ask("a", 4, 5)), (0, ask("b", 4, 5, "y"))])
    assert rows["b"].request.preemptions == 1
    assert rows["b"].wait_kv_ns == 0
    assert rows["b"].resume_wait_ns > 0


def test_what_was_waited_and_what_was_run_add_up_to_the_time_to_first_token():
    asks = [(i % 5, ask(f"r{i}", 3 + i % 7, 1 + i % 4, "xy"[i % 2])) for i in range(40)]
    rows, truth = play(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8), asks)
    for row in rows.values():
        waits = row.wait_step_ns + row.wait_slot_ns + row.wait_budget_ns + row.wait_kv_ns + row.wait_preempted_ns
        assert row.first_token_ns - row.arrival_ns == pytest.approx(waits + row.prefill_ns)
        assert sum(row.served_ns) == pytest.approx(row.first_token_ns - row.arrival_ns)
        assert row.own_ns <= row.prefill_ns + 1e-6
    assert truth.tenants == ["x", "y"]
