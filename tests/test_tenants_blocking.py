"""Who blocked whom, from outcomes alone, against what the engine itself recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replay.engine.virtual import Workload
from tenants.blocking import blockers, blocking
from tests.virtual_runs import Kind, Truth, run, workload
from traces.record import Metadata, table

FOUR = {"chat": Kind(300, 150), "rag": Kind(3000, 150), "writer": Kind(400, 600), "code": Kind(1200, 60)}
LONG_WAIT_NS = 200e6


def estimate(work: Workload, policy: str):
    """(estimated cells, true cells, estimated and true matrices in seconds), tenants in the truth's order."""
    outcomes, truth = run(work, policy)
    found = blocking(outcomes)
    order = [found.tenants.index(name) for name in truth.tenants]
    matrix = found.matrix_s[np.ix_(order, order)]
    return found, found.by_tenant_ns[:, order], truth, matrix, truth.matrix_s(work.tenant)


@pytest.fixture(scope="module")
def table_of_runs():
    """Light to overloaded, both policies, four tenants of the same share of slots."""
    return [
        (policy, load, *estimate(workload(seed, load, kinds=FOUR), policy))
        for policy in ("fcfs", "priority")
        for load in (0.3, 0.5, 0.7, 0.9, 1.1)
        for seed in (3, 11)
    ]


def test_the_table_of_errors(table_of_runs, capsys):
    with capsys.disabled():
        print("\npolicy    load  requests  blocked s  tenant error  cell error P50  P90   unexplained")
        for policy, load, found, _, _, matrix, truth in table_of_runs:
            error = np.abs(matrix - truth) / np.maximum(truth, 1e-9)
            by_tenant = np.abs(matrix.sum(0) - truth.sum(0)) / truth.sum(0)
            share = found.unexplained_ns.sum() / found.blocked_ns.sum()
            print(
                f"{policy:8s}  {load:4.1f}  {len(found.blocked_ns):8d}  {truth.sum():9.1f}  {np.max(by_tenant):12.1%}"
                f"  {np.median(error):14.1%}  {np.quantile(error, 0.9):4.1%}  {share:10.1%}"
            )


def test_blocked_time_per_tenant_is_within_a_tenth_or_50_ms_at_the_median_run(table_of_runs):
    for name in range(len(FOUR)):
        errors = []
        for _, _, _, _, _, matrix, truth in table_of_runs:
            mine, true = matrix[:, name].sum(), truth[:, name].sum()
            errors.append(0.0 if abs(mine - true) < 0.05 else abs(mine - true) / true)
        assert np.median(errors) < 0.10


def test_nine_cells_of_ten_are_within_a_quarter(table_of_runs):
    errors = [np.abs(m - t) / np.maximum(t, 1e-9) for *_, m, t in table_of_runs]
    assert np.quantile(np.concatenate([error.ravel() for error in errors]), 0.9) < 0.25


def test_the_main_culprit_is_named_and_not_by_guessing_the_biggest(table_of_runs):
    named, guessed = [], []
    for _, _, _, cells, truth, _, matrix in table_of_runs:
        long = truth.blocked_ns > LONG_WAIT_NS
        right = truth.by_tenant_ns.argmax(axis=1)
        named.append((cells.argmax(axis=1) == right)[long])
        guessed.append((right == matrix.sum(axis=0).argmax())[long])
    share, guess = np.concatenate(named).mean(), np.concatenate(guessed).mean()
    assert share >= 0.90
    assert share - guess >= 0.30


def test_nothing_blocked_goes_missing(table_of_runs):
    for _, _, found, *_ in table_of_runs:
        whole = found.by_tenant_ns.sum(axis=1) + found.unexplained_ns
        assert np.allclose(whole, found.blocked_ns, atol=1.0)
        assert (found.unexplained_ns > -1.0).all()
        assert (found.inversion_ns <= found.by_tenant_ns.sum(axis=1) + 1.0).all()


def test_the_estimator_reads_nothing_that_only_the_engine_knows():
    outcomes, _ = run(workload(5, 0.7, 60.0), "fcfs")
    told = outcomes.append_column("queue_ns", pa.array(np.arange(outcomes.num_rows), pa.int64()))
    told = told.append_column("prefill_ns", pa.array(np.arange(outcomes.num_rows), pa.int64()))
    for with_truth, without in zip(flat(blocking(told)), flat(blocking(outcomes)), strict=True):
        assert np.array_equal(np.asarray(with_truth, dtype=object), np.asarray(without, dtype=object))


def flat(found: Any) -> list[Any]:
    """The fields of a result, and those of the records in it."""
    return [part for field in found for part in (flat(field) if hasattr(field, "_fields") else [field])]


def one_long_prefill() -> tuple[pa.Table, Truth]:
    """J08: a prompt of 128k tokens at t = 0, twenty short ones right behind it."""
    arrivals = np.concatenate([[0], 50_000_000 + np.arange(20) * 5_000_000])
    work = Workload(
        arrival_ns=arrivals,
        input_tokens=np.concatenate([[128_000], np.full(20, 100)]),
        output_tokens=np.concatenate([[16], np.full(20, 40)]),
        tenant=np.concatenate([[1], np.zeros(20, dtype=np.int64)]),
        tenants=("risk", "batch"),
        priority=np.concatenate([[1], np.zeros(20, dtype=np.int64)]),
    )
    # some quiet traffic afterwards, from which the estimator learns what short prompts take alone
    quiet = 60_000_000_000 + np.arange(8) * 2_000_000_000
    return run(
        Workload(
            arrival_ns=np.concatenate([work.arrival_ns, quiet]),
            input_tokens=np.concatenate([work.input_tokens, np.linspace(50, 4000, 8).astype(np.int64)]),
            output_tokens=np.concatenate([work.output_tokens, np.full(8, 20)]),
            tenant=np.concatenate([work.tenant, np.zeros(8, dtype=np.int64)]),
            tenants=work.tenants,
            priority=np.concatenate([work.priority, np.zeros(8, dtype=np.int64)]),
        ),
        "priority",
        slots=64,
    )


def test_j08_one_long_prefill_is_named_and_given_the_wait_of_those_behind_it():
    outcomes, _ = one_long_prefill()
    found = blocking(outcomes)
    batch = found.tenants.index("batch")
    short = np.arange(1, 21)
    wait = found.blocked_ns[short]
    assert (wait > 5e9).all()
    assert (found.by_tenant_ns[short, batch] >= 0.9 * wait).all()
    assert (found.inversion_ns[short] >= 0.9 * wait).all()
    worst = blockers(found)[0]
    assert worst.request == 0
    assert worst.victims == 20
    assert worst.blocked_ns >= 0.9 * wait.sum()


def test_a_run_without_contention_blames_nobody():
    work = Workload(
        arrival_ns=np.arange(30) * 2_000_000_000,
        input_tokens=np.linspace(50, 3000, 30).astype(np.int64),
        output_tokens=np.full(30, 40),
        tenant=np.arange(30) % 2,
        tenants=("a", "b"),
        priority=np.arange(30) % 2,
    )
    outcomes, _ = run(work)
    found = blocking(outcomes)
    assert found.alone is not None
    assert found.alone.idle == 30
    assert found.blocked_ns.max() < 10e6
    assert found.matrix_s.sum() < 0.05


def test_a_run_in_which_nothing_was_answered_has_an_empty_matrix():
    rows = table(
        {
            "tenant": ["risk", "summary"],
            "arrival_ns": [0, 1],
            "sent_ns": [0, 1],
            "outcome": ["connect_error", "connect_error"],
            "first_token_ns": [None, None],
            "end_ns": [5, 5],
            "input_tokens": [10, 10],
        },
        Metadata(),
    )
    found = blocking(rows)
    assert found.matrix_s.sum() == 0
    assert found.alone is None
    assert blockers(found) == []


def test_chunks_that_were_not_kept_are_spread_and_still_tell_the_tenants_apart():
    outcomes, truth = run(workload(3, 0.7, kinds=FOUR), "fcfs")
    found = blocking(outcomes.drop_columns(["chunk_ns"]))
    order = [found.tenants.index(name) for name in truth.tenants]
    share = found.matrix_s[np.ix_(order, order)].sum(axis=0)
    true = truth.by_tenant_ns.sum(axis=0)
    assert np.abs(share / share.sum() - true / true.sum()).max() < 0.10


@pytest.mark.parametrize(
    ("queue_ns", "prefill_ns", "source"),
    [
        (None, None, "times seen from outside"),
        (7_000_000, None, "queue times of the engine, its steps seen from outside"),
        (None, 1_000, "prefill times of the engine, its steps seen from outside"),
        (7_000_000, 1_000, "queue and prefill times of the engine, its steps seen from outside"),
    ],
)
def test_the_engines_own_times_are_used_where_it_gives_them_and_that_is_said(queue_ns, prefill_ns, source):
    outcomes, _ = run(workload(5, 0.7, 30.0), "fcfs")
    told = outcomes
    for name, value in (("queue_ns", queue_ns), ("prefill_ns", prefill_ns)):
        told = told.append_column(name, pa.array([value] * outcomes.num_rows, pa.int64()))
    found = blocking(told, engine_times=True)
    assert found.source == source
    assert queue_ns is None or found.blocked_ns.min() >= queue_ns
    assert prefill_ns is None or found.service_ns.max() <= prefill_ns
    if queue_ns is prefill_ns is None:
        assert np.array_equal(found.blocked_ns, blocking(outcomes).blocked_ns)


def test_j01_urgent_requests_behind_full_slots_are_shown_as_inversion_by_those_who_run():
    """Priority orders the queue; with every slot taken by low requests an urgent one waits for one of them to end."""
    low = 8
    arrival = np.concatenate([np.arange(low) * 1_000_000, 2_000_000_000 + np.arange(4) * 10_000_000])
    quiet = 120_000_000_000 + np.arange(8) * 2_000_000_000
    urgent = np.zeros(4 + 8, dtype=np.int64)
    work = Workload(
        arrival_ns=np.concatenate([arrival, quiet]),
        input_tokens=np.concatenate([np.full(low, 200), np.full(4, 60), np.linspace(50, 4000, 8).astype(np.int64)]),
        output_tokens=np.concatenate([np.full(low, 1500), np.full(4, 10), np.full(8, 20)]),
        tenant=np.concatenate([np.ones(low, dtype=np.int64), urgent]),
        tenants=("risk", "summary"),
        priority=np.concatenate([np.ones(low, dtype=np.int64), urgent]),
    )
    outcomes, truth = run(work, "priority", slots=low)
    found = blocking(outcomes)
    waited = np.arange(low, low + 4)
    assert (truth.blocked_ns[waited] > 5e9).all()  # the engine really kept them waiting
    assert (found.inversion_ns[waited] >= 0.9 * found.blocked_ns[waited]).all()
    assert found.blocked_ns[waited] == pytest.approx(truth.blocked_ns[waited], rel=0.1)
