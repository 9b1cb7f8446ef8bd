"""`replay simulate`: the plan of `replay`, played in no time, with the truth beside it."""

from __future__ import annotations

import json

import click
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from traces import parquet
from traces.record import Metadata, table

MS = 1_000_000


def write_trace(path, at_ms, **columns):
    columns["arrival_ns"] = [int(ms * MS) for ms in at_ms]
    columns.setdefault("input_tokens", [100] * len(at_ms))
    columns.setdefault("output_tokens", [20] * len(at_ms))
    parquet.write(table(columns, Metadata(source="test")), path)
    return str(path)


def run(command, *arguments):
    result = CliRunner().invoke(command, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def simulated(folder, *arguments):
    """The summary, the outcomes and the truth of a simulation."""
    from replay.simulate import simulate

    result = run(simulate, *arguments, "--out", str(folder), "--json")
    outcomes = parquet.read(folder / "outcomes.parquet").to_pydict()
    return json.loads(result.stdout), outcomes, pq.read_table(folder / "truth.parquet")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Short urgent requests among long ones, two at a time on the engine."""
    at = [index * 120 for index in range(120)]
    tenant = ["summary" if index % 4 == 0 else "risk" for index in range(120)]
    outputs = [250 if name == "summary" else 10 for name in tenant]
    path = tmp_path_factory.mktemp("traces") / "mixed.parquet"
    return write_trace(path, at, tenant=tenant, output_tokens=outputs)


def test_the_plan_is_the_one_replay_would_send(mixed, tmp_path):
    from replay.command import replay

    options = (mixed, "--speed", "2x", "--tenant-mix", "risk:summary", "--seed", "3")
    planned = json.loads(run(replay, *options, "--dry-run", "--json").stdout)
    summary, outcomes, _ = simulated(tmp_path / "a", *options)
    assert summary["digest"] == planned["digest"]
    assert summary["planned"] == summary["ok"] == planned["rows"] == 120
    assert summary["lateness_ms"]["max"] == 0
    assert outcomes["output_tokens"] == outcomes["planned_output_tokens"]


def test_priority_helps_the_urgent_tenant_and_a_cap_holds_the_other(mixed, tmp_path):
    base = (mixed, "--tenant-mix", "risk:summary", "--max-num-seqs", "4")
    fcfs, _, _ = simulated(tmp_path / "fcfs", *base, "--policy", "fcfs")
    priority, _, _ = simulated(tmp_path / "priority", *base, "--policy", "priority")
    capped, _, _ = simulated(tmp_path / "capped", *base, "--policy", "priority", "--cap", "summary=2")
    ttft = [arm["tenants"]["risk"]["ttft_ms"]["p95"] for arm in (fcfs, priority, capped)]
    assert ttft[0] > 2 * ttft[1]
    assert ttft[1] > ttft[2]
    assert capped["tenants"]["summary"]["held_ms"]["p95"] > 0


def test_sglang_preempts_for_a_slot_because_its_dialect_keeps_ranks_apart(mixed, tmp_path):
    base = (mixed, "--tenant-mix", "risk:summary", "--max-num-seqs", "2")
    _, _, truth = simulated(tmp_path / "sglang", *base, "--policy", "sglang")
    _, _, plain = simulated(tmp_path / "priority", *base, "--policy", "priority")
    assert sum(truth.column("preemptions").to_pylist()) > 0
    assert sum(plain.column("preemptions").to_pylist()) == 0


def test_leaping_and_step_by_step_write_the_same_outcomes(mixed, tmp_path):
    _, leapt, truth = simulated(tmp_path / "a", mixed, "--policy", "fcfs")
    _, stepped, same = simulated(tmp_path / "b", mixed, "--policy", "fcfs", "--step-by-step")
    assert leapt == stepped
    assert truth.drop_columns(["served_ns", "own_ns"]).equals(same.drop_columns(["served_ns", "own_ns"]))


def test_the_truth_explains_every_wait(mixed, tmp_path):
    _, outcomes, truth = simulated(tmp_path / "a", mixed, "--tenant-mix", "risk:summary", "--max-num-seqs", "4")
    rows = {name: np.array(truth.column(name).to_pylist()) for name in truth.schema.names if name.endswith("_ns")}
    ttft = rows["first_token_ns"] - rows["sent_ns"]
    waits = sum(rows[f"wait_{cause}_ns"] for cause in ("step", "slot", "budget", "kv", "preempted"))
    np.testing.assert_allclose(ttft, waits + rows["prefill_ns"], atol=10)
    assert (rows["wait_slot_ns"] > 0).any()
    assert (rows["own_ns"] <= ttft).all()
    assert json.loads(truth.schema.metadata[b"convoy.tenants"]) == ["summary", "risk"]  # as they come in the trace
    assert (np.stack(rows["served_ns"]).sum(axis=1) <= ttft + 10).all()
    assert truth.column("request_id").to_pylist() == outcomes["request_id"]


def test_chunks_are_one_token_each_from_the_first_to_the_last(mixed, tmp_path):
    _, outcomes, _ = simulated(tmp_path / "a", mixed)
    for first, last, count, chunks in zip(
        *(outcomes[name] for name in ("first_token_ns", "last_token_ns", "output_tokens", "chunk_ns")), strict=True
    ):
        assert (chunks[0], chunks[-1], len(chunks)) == (first, last, count)
        assert chunks == sorted(chunks)


def test_what_the_engine_would_refuse_is_refused(tmp_path):
    trace = write_trace(tmp_path / "t.parquet", [0, 1, 2], input_tokens=[100, 9000, 100], output_tokens=[5, 5, 5])
    summary, outcomes, _ = simulated(tmp_path / "a", trace)
    assert summary["failed"] == {"http_error": 1}
    assert sorted(outcomes["status"]) == [200, 200, 400]
    assert any("max_model_len 8192" in warning for warning in summary["warnings"])


def test_aborts_and_turns_of_the_trace_are_played(tmp_path):
    trace = write_trace(
        tmp_path / "t.parquet",
        [0, 10, 20],
        session_id=["s", "s", "t"],
        turn=[0, 1, 0],
        think_ns=[None, 500 * MS, None],
        output_tokens=[20, 20, 400],
        end_ns=[None, None, 1000 * MS],
        outcome=["ok", "ok", "client_abort"],
    )
    summary, outcomes, _ = simulated(tmp_path / "a", trace)
    assert (summary["ok"], summary["aborted"]) == (2, 1)
    by_turn = {(s, t): i for i, (s, t) in enumerate(zip(outcomes["session_id"], outcomes["turn"], strict=True))}
    first, second = by_turn["s", 0], by_turn["s", 1]
    assert outcomes["due_ns"][second] == outcomes["sent_ns"][first] + outcomes["end_ns"][first] + 500 * MS
    assert 1000 * MS <= outcomes["end_ns"][by_turn["t", 0]] < 1100 * MS


def test_more_engines_shorten_the_queue(mixed, tmp_path):
    one, _, _ = simulated(tmp_path / "one", mixed, "--policy", "fcfs", "--max-num-seqs", "4")
    two, outcomes, _ = simulated(
        tmp_path / "two",
        mixed,
        "--policy",
        "fcfs",
        "--max-num-seqs",
        "4",
        "--replicas",
        "2",
        "--routing",
        "least-loaded",
    )
    assert two["tenants"]["risk"]["ttft_ms"]["p95"] < one["tenants"]["risk"]["ttft_ms"]["p95"] / 2
    assert set(outcomes["worker"]) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--concurrency", "4"), "--concurrency is not simulated"),
        (("--target", "http://127.0.0.1:1"), "a simulation sends nothing"),
        (("--profile", "b200"), "unknown profile"),
        (("--policy", "lifo"), "lifo"),
        (("--num-gpu-blocks", "10", "--max-model-len", "8192"), "does not fit the KV pool"),
    ],
)
def test_wrong_input_is_one_clear_line(mixed, options, message):
    from replay.simulate import simulate

    result = CliRunner().invoke(simulate, [mixed, *options])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


RANKS = ("--tenant-mix", "risk@0:summary@1")


def experiment(trace, folder, *words):
    """The verdict of a simulated experiment."""
    from replay.simulate import simulate

    result = run(simulate, trace, *RANKS, "--poisson", "--trials", "2", *words, "--out", str(folder), "--json")
    return json.loads(result.stdout)


def test_the_arms_of_an_experiment_are_played_and_judged_without_a_server(mixed, tmp_path):
    words = ("--alone", "risk", "--cap", "summary=1", "--max-num-seqs", "2")
    found = experiment(mixed, tmp_path / "e", *words, "--arm-engine", "wide=--max-num-seqs 64")
    arms = found["tenants"]["risk"]["arms"]
    assert set(arms) == {"alone", "untagged", "tagged", "capped", "wide"}
    p95 = {arm: arms[arm]["ttft_ms"]["p95"] for arm in arms}
    assert p95["alone"] < p95["capped"] < p95["tagged"] < p95["untagged"]  # one slot of two is always risk's
    assert p95["wide"] < p95["capped"]  # an arm with an engine of its own has its slots
    runs = json.loads((tmp_path / "e" / "experiment.json").read_text())["runs"]
    assert len(runs) == 10
    assert {run["folder"] for run in runs} >= {"trial-1/alone-risk", "trial-2/wide"}
    outcomes = parquet.read(tmp_path / "e" / "trial-2" / "capped" / "outcomes.parquet")
    assert set(outcomes.column("arm").to_pylist()) == {"capped"}
    assert (tmp_path / "e" / "trial-1" / "tagged" / "truth.parquet").exists()


def test_a_simulated_pool_is_two_engines(mixed, tmp_path):
    words = ("--arm", "alone", "--arm", "pooled", "--alone", "risk", "--alone", "summary", "--max-num-seqs", "2")
    arms = experiment(mixed, tmp_path / "e", *words)["tenants"]["risk"]["arms"]
    assert arms["pooled"]["ttft_ms"] == arms["alone"]["ttft_ms"]  # an engine of its own: as if it were alone


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "2"], "every trial would be the same"),
        (["--arm", "fair"], "neither one of"),
        (["--arm-engine", "fair"], "not an arm's engine"),
        (["--trials", "1", "--arm-engine", "fair=--policy fast"], "fast"),
        (["--trials", "1", "--arm-engine", "fair=--speed 2x"], "No such option"),
    ],
)
def test_experiments_that_make_no_sense_are_refused(mixed, tmp_path, words, said):
    from replay.simulate import simulate

    with pytest.raises(click.UsageError) as refused:
        run(simulate, mixed, *RANKS, *words, "--out", str(tmp_path / "e"))
    assert said in refused.value.format_message()
    assert not (tmp_path / "e").exists()
