"""Whose prefill held up whose streams, from outcomes alone, against the steps of the embedded engine's scheduler."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from replay.engine.config import SchedulerConfig
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import load_profile
from replay.engine.truth import row_weights
from replay.engine.virtual import Workload
from replay.report import blocked
from tenants import experiment, isolation_text
from tenants.blocking import blocking
from tenants.stalls import LONG, stalls
from tests.virtual_runs import BUDGET, SLOTS, Kind, workload
from traces.record import Metadata, table

FOUR = {"chat": Kind(300, 150), "rag": Kind(3000, 150), "writer": Kind(400, 600), "code": Kind(1200, 60)}


def play(work: Workload, policy: str, *, slots: int = SLOTS, noise_ms: float = 0.3):
    """Outcomes as a replayer sees them, and ns, victim request × whose prefill, from the engine's steps."""
    model = load_profile().model
    scheduler = Scheduler(SchedulerConfig(scheduling_policy=policy, max_num_seqs=slots, max_num_batched_tokens=BUDGET))
    order, truth = np.argsort(work.arrival_ns, kind="stable").tolist(), np.zeros((len(work), len(work)))
    chunks: list[list[float]] = [[] for _ in range(len(work))]
    index, now = {}, 0.0
    while order or scheduler.unfinished:
        if not scheduler.unfinished:
            now = max(now, float(work.arrival_ns[order[0]]))
        while order and work.arrival_ns[order[0]] <= now:
            row = order.pop(0)
            rank = int(work.priority[row]) if policy == "priority" else 0
            request = EngineRequest(
                str(row), prompt_tokens=int(work.input_tokens[row]), max_tokens=int(work.output_tokens[row]),
                priority=rank, arrival_time=work.arrival_ns[row] / 1e9,
            )  # fmt: skip
            index[request] = row
            scheduler.add(request)
        step = scheduler.schedule()
        took = model.step_ns(step)
        own = model.duration_ns(step.decodes, step.decodes, step.context, 0.0, step.decodes)
        weights = row_weights(model, step)
        decodes = [part.tokens == 1 and part.computed >= part.request.prompt_tokens for part in step.scheduled]
        victims = [index[part.request] for part, yes in zip(step.scheduled, decodes, strict=True) if yes]
        culprits = [
            (index[p.request], w) for p, w, yes in zip(step.scheduled, weights, decodes, strict=True) if not yes
        ]
        if victims and culprits and took > LONG * own:
            whole = sum(weight for _, weight in culprits)
            for culprit, weight in culprits:
                truth[victims, culprit] += (took - own) * weight / whole
        scheduler.update(step)
        now += took
        for request in step.emitted:
            chunks[index[request]].append(now)
    return outcomes_of(work, chunks, noise_ms), truth


def outcomes_of(work: Workload, chunks: list[list[float]], noise_ms: float) -> pa.Table:
    rng = np.random.default_rng(0)
    offsets = []
    for times, sent in zip(chunks, work.arrival_ns, strict=True):
        noise = np.abs(rng.normal(0.0, noise_ms * 1e6, len(times)))
        offsets.append(np.maximum.accumulate(np.array(times) - sent + noise).astype(np.int64))
    ends = [int(times[-1]) for times in offsets]
    columns = {
        "tenant": [work.tenants[code] for code in work.tenant.tolist()],
        "priority": work.priority,
        "arrival_ns": work.arrival_ns,
        "stream": [True] * len(work),
        "input_tokens": work.input_tokens,
        "output_tokens": [len(times) for times in offsets],
        "first_token_ns": [int(times[0]) for times in offsets],
        "last_token_ns": ends,
        "end_ns": ends,
        "chunk_ns": [times.tolist() for times in offsets],
        "outcome": ["ok"] * len(work),
        "due_ns": work.arrival_ns,
        "released_ns": work.arrival_ns,
        "sent_ns": work.arrival_ns,
    }
    return table(columns, Metadata(source="virtual engine"))


def cells(truth, tenant, number):
    """(tenants, tenants) seconds."""
    member = np.eye(number)[tenant]
    return member.T @ truth @ member / 1e9


@pytest.fixture(scope="module")
def table_of_runs():
    found = []
    for policy in ("fcfs", "priority"):
        for load in (0.3, 0.7, 1.1):
            work = workload(3, load, 60.0, kinds=FOUR)
            outcomes, truth = play(work, policy)
            seen = stalls(outcomes, blocking(outcomes))
            order = [seen.tenants.index(name) for name in work.tenants]
            found.append(
                (policy, load, seen, truth, seen.matrix_s[np.ix_(order, order)], cells(truth, work.tenant, len(FOUR)))
            )
    return found


def test_the_table_of_errors_of_stalls(table_of_runs, capsys):
    with capsys.disabled():
        print("\npolicy    load  requests  stalled s  worst tenant's error  cells P50  P90   unexplained  worst named")
        for policy, load, seen, truth, matrix, true in table_of_runs:
            error = np.abs(matrix - true) / np.maximum(true, 1e-9)
            by_tenant = np.abs(matrix.sum(0) - true.sum(0)) / true.sum(0)
            rest = seen.unexplained_ns.sum() / (seen.unexplained_ns.sum() + seen.by_tenant_ns.sum())
            print(
                f"{policy:8s}  {load:4.1f}  {len(seen.tenant):8d}  {true.sum():9.1f}  {by_tenant.max():19.1%}"
                f"  {np.median(error):9.1%}  {np.quantile(error, 0.9):5.1%}  {rest:10.1%}  {named(seen, truth):.0%}"
            )


def named(seen, truth):
    """Share of the five worst named that are among the engine's own ten worst."""
    own = set(np.argsort(-truth.sum(axis=0))[:10].tolist())
    return np.mean([staller.request in own for staller in seen.worst[:5]])


def test_stalled_time_per_tenant_is_within_a_tenth_at_the_median_run(table_of_runs):
    errors = [np.abs(m.sum(0) - t.sum(0)) / t.sum(0) for *_, m, t in table_of_runs]
    assert (np.median(errors, axis=0) < 0.10).all()


def test_nine_cells_of_ten_are_within_a_quarter(table_of_runs):
    errors = [(np.abs(m - t) / np.maximum(t, 1e-9))[t > 0.05] for *_, m, t in table_of_runs]
    assert np.quantile(np.concatenate(errors), 0.9) < 0.25


def test_the_worst_are_named(table_of_runs):
    assert np.mean([named(seen, truth) for _, _, seen, truth, _, _ in table_of_runs]) >= 0.8


def one_prompt_beside(streams: int, prompt: int):
    """Streams that decode, and one prompt that arrives among them; before, single prompts that say what they take."""
    quiet = np.arange(8) * 2_000_000_000
    begin = 20_000_000_000 + np.arange(streams) * 100_000_000
    number = 8 + streams + 1
    work = Workload(
        arrival_ns=np.concatenate([quiet, begin, [25_000_000_000]]),
        input_tokens=np.concatenate([np.linspace(50, 8000, 8), np.full(streams, 100), [prompt]]).astype(np.int64),
        output_tokens=np.concatenate([np.full(8, 20), np.full(streams, 900), [4]]),
        tenant=np.concatenate([np.zeros(8 + streams, dtype=np.int64), [1]]),
        tenants=("risk", "batch"),
        priority=np.concatenate([np.zeros(8 + streams, dtype=np.int64), [1]]),
    )
    return play(work, "priority", slots=64), number - 1


def test_one_long_prompt_is_named_with_the_streams_it_held_up():
    (outcomes, truth), row = one_prompt_beside(6, 16_000)
    found = stalls(outcomes, blocking(outcomes))
    worst = found.worst[0]
    assert (worst.request, worst.victims, worst.by_victim[0][0]) == (row, 6, "risk")
    assert worst.stalled_ns == pytest.approx(truth[:, row].sum(), rel=0.1)
    assert worst.stalled_ns >= 0.9 * found.by_tenant_ns.sum()


def test_j03_urgent_streams_still_stall_behind_a_prompt_of_the_less_urgent_with_priority_on():
    """Priority orders the queue; a prompt that was admitted shares the step, so decoding is not isolated by it."""
    (outcomes, _), _ = one_prompt_beside(6, 16_000)
    blocked = blocking(outcomes)
    found = stalls(outcomes, blocked)
    risk, batch = found.tenants.index("risk"), found.tenants.index("batch")
    assert found.matrix_s[risk, batch] > 5.0  # of decoding: 6 streams of about 1.7 s each
    assert blocked.matrix_s[risk, batch] < 0.1  # of waiting for a first token: none
    assert found.matrix_s[batch].sum() == pytest.approx(0.0, abs=0.05)


def test_streams_alone_are_not_stalled_by_anybody():
    (outcomes, _), row = one_prompt_beside(6, 16_000)
    keep = np.arange(outcomes.num_rows) != row
    alone = outcomes.filter(pa.array(keep))
    # without its row the prompt's work is seen but cannot be anybody's
    found = stalls(alone, blocking(alone))
    assert found.unexplained_ns.sum() > 0.8 * (found.unexplained_ns.sum() + found.by_tenant_ns.sum())


def test_chunks_that_were_not_kept_tell_nothing():
    (outcomes, _), _ = one_prompt_beside(2, 4_000)
    bare = outcomes.drop_columns(["chunk_ns"])
    assert stalls(bare, blocking(bare)) is None


def test_what_only_the_engine_knows_is_not_read():
    (outcomes, _), _ = one_prompt_beside(3, 8_000)
    told = outcomes.append_column("queue_ns", pa.array(np.arange(outcomes.num_rows), pa.int64()))
    told = told.append_column("prefill_ns", pa.array(np.arange(outcomes.num_rows), pa.int64()))
    a, b = stalls(told, blocking(told)), stalls(outcomes, blocking(outcomes))
    assert np.array_equal(a.by_tenant_ns, b.by_tenant_ns)
    assert a.worst == b.worst


def test_the_second_matrix_and_the_worst_stand_in_every_result_of_a_run():
    (outcomes, _), row = one_prompt_beside(6, 16_000)
    found = experiment.of_runs([outcomes, outcomes])
    each = stalls(outcomes, blocking(outcomes))
    risk, batch = each.tenants.index("risk"), each.tenants.index("batch")
    assert found.stalls_s["risk"]["batch"] == pytest.approx(2 * each.matrix_s[risk, batch], abs=2e-3)
    assert found.stalls_per_request_s["risk"]["batch"] == pytest.approx(each.matrix_s[risk, batch] / 14, abs=1e-3)
    worst = found.worst_stalls[0]
    assert (worst["tenant"], worst["input_tokens"], worst["victims"]) == ("batch", 16_000, 6)
    assert list(worst["of"]) == ["risk"]
    console = Console(width=160, record=True, file=io.StringIO())
    isolation_text.print_blocking(found, console)
    shown = console.export_text()
    assert "Whose streams stalled for whose prefill" in shown
    assert "16,000" in shown.split("Worst single prefills beside streams")[1]
    page = blocked.stalls(found)
    assert "batch, 16,000 tokens in" in page
    assert "held up 6 streams" in page
    assert outcomes.num_rows - 1 == row
