"""`tenants judge` on the folder of a run: the verdict, its exit code, and other rules on the same rows."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from tenants import folder, sla
from tenants.judge import judge
from tenants.summary import summarise, to_json
from tenants.tenant import Tenant
from traces import parquet
from traces.record import Metadata, table

MS = 1_000_000


def write_run(path, *, rules=(), rows=300, slow=0, late_ms=0.1, interrupted=False, invalid=()):
    """risk and summary in turn, 100 ms to the first token; `slow` requests of risk take 900 ms."""
    path.mkdir(parents=True)
    first = [(900 if i % 2 == 0 and i // 2 < slow else 100) * MS for i in range(rows)]
    due = [i * 10 * MS for i in range(rows)]
    outcomes = table(
        {
            "arrival_ns": due,
            "due_ns": due,
            "released_ns": due,
            "sent_ns": [round(time + late_ms * MS) for time in due],
            "tenant": ["risk" if i % 2 == 0 else "summary" for i in range(rows)],
            "outcome": ["ok"] * rows,
            "first_token_ns": first,
            "last_token_ns": [time + 90 * MS for time in first],
            "end_ns": [time + 91 * MS for time in first],
            "output_tokens": [10] * rows,
            "chunk_ns": [[time + 10 * MS * k for k in range(10)] for time in first],
        },
        Metadata(),
    )
    parquet.write(outcomes, path / "outcomes.parquet")
    tenants = [Tenant(name="risk", priority=0), Tenant(name="summary", priority=1)]
    summary = summarise(
        outcomes,
        tenants=tenants,
        rules=[sla.parse(rule) for rule in rules],
        interrupted=interrupted,
        invalid=invalid,
        digest="d",
    )
    (path / "run.json").write_text(json.dumps({"summary": json.loads(to_json(summary))}))
    return path


def run(*words):
    return CliRunner().invoke(judge, [str(word) for word in words], standalone_mode=False)


@pytest.mark.parametrize(
    ("made", "words", "code"),
    [
        ({}, [], 0),
        ({"rules": ["risk: ttft_p95 < 800ms"]}, [], 0),
        ({"rules": ["risk: ttft_p95 < 800ms"], "slow": 60}, [], 1),
        ({"rules": ["risk: ttft_p99 < 800ms"]}, [], 3),
        ({"rules": ["risk: ttft_p99 < 800ms"], "rows": 60}, [], 3),
        ({"late_ms": 50}, [], 3),
        ({"interrupted": True}, [], 130),
        ({"invalid": ["a worker died"]}, ["--sla", "risk: ttft_p95 < 800ms"], 3),
        (
            {"invalid": ["client-bound: worker 0 was late to look at its sockets"]},
            ["--sla", "risk: ttft_p95 < 800ms"],
            3,
        ),
        ({"interrupted": True}, ["--sla", "risk: ttft_p95 < 800ms"], 130),
        ({"late_ms": 50}, ["--sla", "risk: ttft_p95 < 800ms"], 3),
        ({"slow": 60}, ["--sla", "risk: ttft_p95 < 800ms"], 1),
        ({"slow": 60, "rules": ["risk: ttft_p95 < 800ms"]}, ["--sla", "risk: ttft_p95 < 1s"], 0),
        ({"slow": 60}, ["--sla", "all: ttft_p95 < 800ms"], 1),
        ({}, ["--sla", "risk: itl_p95 < 11ms"], 0),
    ],
)
def test_the_exit_code_is_the_verdict(tmp_path, made, words, code):
    result = run(write_run(tmp_path / "run", **made), *words)
    assert result.return_value == code, result.output


def test_rules_of_a_file_take_the_place_of_the_runs(tmp_path):
    path = write_run(tmp_path / "run", slow=60)
    (tmp_path / "tenants.toml").write_text('[tenants.risk]\nsla = ["ttft_p95 < 800ms"]\n')
    result = run(path, "--tenants", tmp_path / "tenants.toml", "--json")
    found = json.loads(result.stdout)
    assert result.return_value == 1
    assert found["tenants"]["risk"]["sla"][0]["verdict"] == "fail"
    assert found["digest"] == "d"


def test_j14_the_tenant_that_fails_is_named_first_although_the_whole_passes(tmp_path):
    path = write_run(tmp_path / "run", rows=2000, slow=80, rules=["all: ttft_p95 < 800ms", "risk: ttft_p95 < 800ms"])
    result = run(path)
    assert result.return_value == 1
    assert result.stdout.splitlines()[0].startswith("FAIL  risk TTFT P95")


def test_a_rule_about_a_tenant_the_run_does_not_have_is_a_usage_error(tmp_path):
    result = run(write_run(tmp_path / "run"), "--sla", "rsk: ttft_p95 < 1s")
    assert isinstance(result.exception, click.UsageError)
    assert "did you mean risk?" in result.exception.format_message()


def test_several_runs_stand_side_by_side_and_the_worst_decides(tmp_path):
    good = write_run(tmp_path / "good", rules=["risk: ttft_p95 < 800ms"])
    bad = write_run(tmp_path / "bad", rules=["risk: ttft_p95 < 800ms"], slow=60)
    result = run(good, bad)
    assert result.return_value == 1
    assert result.stdout.splitlines()[0] == "risk TTFT P95: 100 ms in good, 900 ms in bad."
    assert set(json.loads(run(good, bad, "--json").stdout)) == {"good", "bad"}


def test_a_baseline_names_the_metric_that_got_worse_first_and_last_and_in_json(tmp_path):
    before, now = write_run(tmp_path / "before"), write_run(tmp_path / "now", slow=60)
    result = run(now, "--baseline", before)
    lines = result.stdout.splitlines()
    assert result.return_value == 1
    assert lines[0] == lines[-1]
    assert lines[0].startswith("FAIL  worse than the baseline: risk ttft_p95: 900 ms, 100 ms before")
    found = json.loads(run(now, "--baseline", before, "--json").stdout)
    assert found["verdict"] == "pass"  # by the rules it was run with
    assert {text.split(":")[0] for text in found["regressions"]} == {"risk ttft_p95", "risk e2e_p95"}


@pytest.mark.parametrize("made", [{}, {"slow": 4}, {"rows": 30, "slow": 2}])
def test_a_run_like_its_baseline_or_too_short_to_tell_passes(tmp_path, made):
    result = run(write_run(tmp_path / "now", **made), "--baseline", write_run(tmp_path / "before"))
    assert result.return_value == 0
    assert "worse than" not in result.stdout


def test_a_run_that_is_not_valid_is_never_called_worse_and_never_a_baseline(tmp_path):
    good, late = write_run(tmp_path / "good"), write_run(tmp_path / "late", slow=60, late_ms=50)
    assert run(late, "--baseline", good).return_value == 3
    refused = run(good, "--baseline", late)
    assert isinstance(refused.exception, click.UsageError)
    assert "late is not valid (client-bound: P99 lateness 50.0 ms is above" in refused.exception.format_message()


def test_what_made_a_run_invalid_is_kept_apart_from_the_interruption(tmp_path):
    path = write_run(tmp_path / "run", rules=["risk: ttft_p95 < 50ms"], invalid=["a worker died"], interrupted=True)
    summary = folder.load(path).summary
    assert summary.invalid_reasons == ["a worker died"]
    assert summary.interrupted
    assert summary.reasons == ("interrupted", "a worker died")


def test_one_run_says_who_waited_for_whom(tmp_path):
    path = write_run(tmp_path / "run")
    found = json.loads(run(path, "--json").stdout)
    assert set(found["blocking_s"]) == {"risk", "summary"}
    assert set(found["blocking_s"]["risk"]) == {"risk", "summary"}
    assert "Who waited for whom" in run(path).stdout
