"""The virtual clock: leaping, stepping and a plain loop over the scheduler give the same times and ground truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from replay.engine import leap, virtual
from replay.engine.config import SchedulerConfig
from replay.engine.policies import POLICIES
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import PicoClock, StepModel
from replay.engine.truth import Truth

MODEL = StepModel(
    t0_ms=0.5,
    te_ms=0.25,
    graph_tokens=9,
    w_ms=3.0,
    u_ms=0.25,
    g0_ms=1.0,
    g_ms=0.5,
    d0_ms=0.125,
    k_ms=0.01,
    dm_ms=0.5,
    km_ms=0.02,
    a_ms=0.002,
    h_ms=0.03,
)
MS = 1_000_000
COLUMNS = (
    "sent_ns",
    "admitted_ns",
    "first_token_ns",
    "last_token_ns",
    "end_ns",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "finish",
    "wait_step_ns",
    "wait_slot_ns",
    "wait_budget_ns",
    "wait_kv_ns",
    "wait_preempted_ns",
    "resume_wait_ns",
)


def workload(rows, **more):
    """From (arrival ms, input, output, tenant, priority) rows."""
    arrival, inputs, outputs, tenant, priority = (
        np.array(values, dtype=np.int64) for values in zip(*rows, strict=True)
    )
    return virtual.Workload(
        arrival_ns=arrival * MS,
        input_tokens=inputs,
        output_tokens=outputs,
        tenant=tenant,
        tenants=("x", "y"),
        priority=priority,
        **more,
    )


def reference(work, config):
    """A plain loop: no skipping, no ledger. Token times and truth rows of each request, by index."""
    clock, scheduler, truth = PicoClock(MODEL), Scheduler(config), Truth(MODEL, work.tenants)
    pending = [(int(work.arrival_ns[i]) * 1000, int(i)) for i in np.argsort(work.arrival_ns, kind="stable")]
    tokens = {index: [] for _, index in pending}
    now = 0
    while pending or scheduler.unfinished:
        if not scheduler.unfinished:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            at, index = pending.pop(0)
            request = EngineRequest(
                f"{index:09d}",
                prompt_tokens=int(work.input_tokens[index]),
                max_tokens=int(work.output_tokens[index]),
                priority=int(work.priority[index]),
                arrival_time=at / 1e12,
                tenant=work.tenants[work.tenant[index]],
                tag=index,
            )
            scheduler.add(request)
            truth.arrive(request, at / 1000)
        step = scheduler.schedule()
        if not step.tokens and not step.preempted:
            if not pending:
                break
            now = pending[0][0]
            continue
        took = clock.duration_ps(step.tokens, step.decodes, step.context, step.area, step.samples) if step.tokens else 0
        scheduler.update(step)
        truth.step(step, now / 1000, (now + took) / 1000)
        now += took
        for request in step.emitted:
            tokens[request.tag].append(now)
    return tokens, {row.request.tag: row for row in truth.rows}


ROW = st.tuples(
    st.integers(0, 120), st.integers(1, 60), st.integers(1, 40), st.integers(0, 1), st.sampled_from([0, 1, 5, 20])
)
CONFIG = st.fixed_dictionaries(
    {
        "scheduling_policy": st.sampled_from(sorted(POLICIES)),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([4, 16, 32, 256]),
        "num_gpu_blocks": st.sampled_from([28, 32, 40, 400]),
        "block_size": st.just(4),
        "max_model_len": st.just(101),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3, 8]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "prefill_schedule_interval": st.sampled_from([1, 1, 1, 3]),
        "enable_prefix_caching": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
        "engine_version": st.sampled_from(["0.32", "0.33"]),
        "ageing_s": st.just(0.02),
        "tenant_weights": st.sampled_from([{}, {"x": 3.0}, {"x": 0.7, "y": 2.0}]),
    }
).map(lambda values: SchedulerConfig(**values))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=25), config=CONFIG, hold=st.sampled_from([0, 1, 64]))
def test_leaping_stepping_and_a_plain_loop_agree(rows, config, hold):
    leap.HOLD_STEPS = hold  # how soon a replica leaps again after it had to step
    work = workload(rows)
    leaping = virtual.simulate(work, config, MODEL)
    stepping = virtual.simulate(work, config, MODEL, stepwise=True)
    assume(not stepping.livelocks)  # given up at a point of its own; the plain loop would go on for ever
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(leaping, name), getattr(stepping, name), err_msg=name)
    np.testing.assert_allclose(leaping.served_ns, stepping.served_ns, atol=2)
    np.testing.assert_allclose(leaping.own_ns, stepping.own_ns, atol=2)
    assert leaping.steps == stepping.steps
    tokens, truth = reference(work, config)
    for index, times_ps in tokens.items():
        np.testing.assert_array_equal(leaping.chunk_ns(index), [(t + 500) // 1000 for t in times_ps])
        np.testing.assert_array_equal(stepping.chunk_ns(index), leaping.chunk_ns(index))
        row = truth.get(index)
        if row is None:
            assert leaping.finish[index] == virtual.UNFINISHED
            continue
        for name in ("wait_step_ns", "wait_slot_ns", "wait_budget_ns", "wait_kv_ns", "resume_wait_ns", "own_ns"):
            assert getattr(leaping, name)[index] == pytest.approx(getattr(row, name), abs=3), name
        np.testing.assert_allclose(leaping.served_ns[:, index], row.served_ns, atol=5)


PLAIN = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks=400, block_size=4, max_model_len=101)
TOKEN = StepModel(g_ms=1.0)  # one millisecond per token


def test_a_turn_is_due_at_its_predecessors_end_plus_its_think_time():
    work = workload(
        [(0, 4, 3, 0, 0), (0, 2, 1, 0, 0)],
        after=np.array([-1, 0]),
        think_ns=np.array([0, 5 * MS]),
    )
    result = virtual.simulate(work, PLAIN, TOKEN)
    assert result.end_ns[0] == 6 * MS  # 4 for the prompt, then two tokens
    assert (result.due_ns[1], result.first_token_ns[1]) == (11 * MS, 13 * MS)


def test_a_capped_tenant_is_held_back_and_its_due_time_kept():
    work = workload([(0, 4, 1, 0, 0), (1, 2, 1, 0, 0), (1, 2, 1, 1, 0)], caps={"x": 1})
    result = virtual.simulate(work, PLAIN, TOKEN)
    assert result.due_ns.tolist() == [0, 1 * MS, 1 * MS]
    assert result.sent_ns.tolist() == [0, 4 * MS, 1 * MS]


@pytest.mark.parametrize("stepwise", [False, True])
def test_an_aborted_request_frees_its_slot_between_steps(stepwise):
    one_slot = SchedulerConfig(max_num_seqs=1, num_gpu_blocks=400, block_size=4, max_model_len=101)
    work = workload([(0, 4, 50, 0, 0), (1, 2, 1, 0, 0)], abort_ns=np.array([int(6.5 * MS), -1]))
    result = virtual.simulate(work, one_slot, TOKEN, stepwise=stepwise)
    assert (result.finish[0], result.output_tokens[0]) == (virtual.ABORT, 4)
    assert result.first_token_ns[1] == 9 * MS  # the step in which the client left ends at 7


ABORTED_ROW = st.tuples(ROW, st.integers(-1, 80))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(ABORTED_ROW, min_size=1, max_size=25),
    config=CONFIG,
    cap=st.sampled_from([None, 1, 3]),
    replicas=st.integers(1, 3),
    routing=st.sampled_from(virtual.ROUTINGS),
)
def test_leaping_and_stepping_agree_with_aborts_turns_caps_and_replicas(rows, config, cap, replicas, routing):
    size = len(rows)
    work = workload(
        [row for row, _ in rows],
        abort_ns=np.array([abort * MS if abort >= 0 else -1 for _, abort in rows]),
        after=np.array([index - 3 if index % 4 == 3 else -1 for index in range(size)]),
        think_ns=np.full(size, 7 * MS),
        caps={"x": cap} if cap else {},
    )
    leaping = virtual.simulate(work, config, MODEL, replicas=replicas, routing=routing)
    stepping = virtual.simulate(work, config, MODEL, replicas=replicas, routing=routing, stepwise=True)
    assume(not stepping.livelocks)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(leaping, name), getattr(stepping, name), err_msg=name)


@pytest.mark.parametrize("stepwise", [False, True])
def test_requests_that_take_each_others_blocks_for_ever_are_given_up(stepwise):
    config = SchedulerConfig(
        scheduling_policy="priority",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_gpu_blocks=28,
        block_size=4,
        max_model_len=101,
        long_prefill_token_threshold=8,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
        engine_version="0.32",
    )
    rows = [(30, 43, 23, 1, 5), (30, 48, 28, 1, 1), (30, 37, 26, 1, 5)]
    rows += [(30, 21, 26, 1, 1), (30, 45, 32, 1, 1), (30, 39, 28, 1, 5)]
    result = virtual.simulate(workload(rows), config, MODEL, stepwise=stepwise)
    assert result.livelocks == 1
    assert (result.finish == virtual.UNFINISHED).any()
    assert int(result.preemptions.max()) > 100


@pytest.mark.parametrize("routing", virtual.ROUTINGS)
def test_every_request_goes_to_one_replica_by_the_rule(routing):
    rows = [(index, 20, 30, index % 2, 0) for index in range(60)]
    work = workload(rows, session=np.array([index % 7 for index in range(60)]))
    result = virtual.simulate(work, PLAIN, TOKEN, replicas=3, routing=routing)
    assert (result.finish == 1).all()
    if routing == "session":
        assert (result.replica == np.arange(60) % 7 % 3).all()
    elif routing == "round-robin":
        assert (result.replica == np.arange(60) % 3).all()
    else:
        assert sorted(np.bincount(result.replica)) == [20, 20, 20]


def test_least_loaded_sends_around_a_replica_that_is_stuck_with_a_long_request():
    rows = [(0, 4, 90, 0, 0)] + [(index, 4, 1, 0, 0) for index in range(1, 40, 8)]
    work = workload(rows)
    result = virtual.simulate(work, PLAIN, TOKEN, replicas=2, routing="least-loaded")
    assert result.replica.tolist() == [0, 1, 1, 1, 1, 1]


def test_more_replicas_finish_sooner():
    rows = [(0, 20, 30, 0, 0)] * 40
    ends = [virtual.simulate(workload(rows), PLAIN, TOKEN, replicas=n).end_ns.max() for n in (1, 2, 4)]
    assert ends[0] > 1.9 * ends[1] > 3.6 * ends[2]


PREFIXED_ROW = st.tuples(ROW, st.lists(st.integers(0, 2), min_size=4, max_size=4))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(PREFIXED_ROW, min_size=1, max_size=25), config=CONFIG)
def test_skipping_and_stepping_agree_where_prompts_share_prefixes(rows, config):
    chains = [[hash(tuple(path[: depth + 1])) for depth in range(len(path))] for _, path in rows]
    work = workload([row for row, _ in rows], prefixes=chains, prefix_block_size=8)
    skipping = virtual.simulate(work, config, MODEL)
    stepping = virtual.simulate(work, config, MODEL, stepwise=True)
    assume(not stepping.livelocks)  # given up at a point of its own; the plain loop would go on for ever
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(skipping, name), getattr(stepping, name), err_msg=name)


def test_equal_prefix_hashes_are_computed_once():
    work = workload(
        [(0, 33, 1, 0, 0), (100, 33, 1, 0, 0), (200, 33, 1, 0, 0)],
        prefixes=[[7, 8, 9], [7, 8, 10], None],
        prefix_block_size=16,
    )
    result = virtual.simulate(work, PLAIN, TOKEN)
    assert result.cached_tokens.tolist() == [0, 32, 0]
    assert (result.first_token_ns - result.sent_ns).tolist() == [33 * MS, 1 * MS, 33 * MS]


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_full_engine_refuses_who_comes_last_and_counts_the_running_ones(stepwise):
    config = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2, num_gpu_blocks=99, block_size=4, max_model_len=101)
    rows = [*[(0, 9, 9, 0, 0)] * 3, (1, 1, 1, 0, 0), (30, 1, 1, 0, 0)]  # the first ends at 17 ms
    result = virtual.simulate(workload(rows), config, TOKEN, stepwise=stepwise)
    assert [virtual.FINISHES[code] for code in result.finish] == ["length", "length", "refused", "refused", "length"]


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_backlog_of_prompt_tokens_without_a_first_token_refuses(stepwise):
    config = SchedulerConfig(
        max_num_seqs=1, max_num_queued_tokens=12, num_gpu_blocks=99, block_size=4, max_model_len=101
    )
    rows = [(0, 9, 9, 0, 0), (10, 9, 1, 0, 0), (11, 9, 1, 0, 0), (12, 1, 1, 0, 0), (40, 1, 1, 0, 0)]
    result = virtual.simulate(workload(rows), config, TOKEN, stepwise=stepwise)
    # The first decodes from 9 ms on and counts no more; at 11 ms one prompt of 9 waits, at 12 ms two do: 18 tokens.
    assert [virtual.FINISHES[code] for code in result.finish] == ["length", "length", "length", "refused", "length"]


def test_asynchronous_scheduling_decides_one_step_ahead():
    config = SchedulerConfig(max_num_seqs=4, num_gpu_blocks=99, block_size=4, max_model_len=101, async_scheduling=True)
    result = virtual.simulate(workload([(0, 4, 9, 0, 0), (1, 4, 1, 0, 0)]), config, TOKEN)
    # The second arrives at 1 ms, while the first prompt runs (0 to 4) and its next token is already planned (4 to 5):
    # it is planned at 4 and runs from 5, together with a token of the first.
    assert result.first_token_ns.tolist() == [4 * MS, 10 * MS]
    assert result.output_tokens.tolist() == [9, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [(0, 0, 1, 0, 0)]}, "at least one token"),
        ({"rows": [(0, 101, 1, 0, 0)]}, "does not fit max_model_len 101"),
        ({"routing": "random"}, "unknown routing"),
        ({"caps": {"z": 1}}, "cap for unknown tenant z"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(change, message):
    work = workload(change.get("rows", [(0, 1, 1, 0, 0)]), caps=change.get("caps", {}))
    with pytest.raises(ValueError, match=message):
        virtual.simulate(work, PLAIN, TOKEN, routing=change.get("routing", "round-robin"))
