"""The arms of an experiment, and `replay isolate` on the embedded engine."""

from __future__ import annotations

import json

import click
import numpy as np
import pytest
from click.testing import CliRunner

from replay import arms
from replay.arms import Part
from replay.isolate import isolate, parse_server
from replay.options import OfferOptions, make_offer
from replay.plan import NONE
from replay.trials import parse_bound
from traces import parquet
from traces.record import Metadata, table

S = 1_000_000_000


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rows = 24
    path = tmp_path_factory.mktemp("trace") / "mix.parquet"
    columns = {
        "arrival_ns": [i * S // 20 for i in range(rows)],
        "tenant": ["summary" if i % 4 == 3 else "risk" for i in range(rows)],
        "priority": [int(i % 4 == 3) for i in range(rows)],
        "input_tokens": [40 + i for i in range(rows)],
        "output_tokens": [4] * rows,
        "endpoint": ["completions"] * rows,
        "block_size": [16] * rows,
        "block_hashes": [[i, i + 100] for i in range(rows)],
    }
    parquet.write(table(columns, Metadata(source="test")), path)
    return str(path)


@pytest.fixture(scope="module")
def offered(trace):
    return make_offer(OfferOptions(trace=trace, cap=("summary=1",), turns="timed"))


def invoke(*words):
    return CliRunner().invoke(isolate, list(words), standalone_mode=False)


def test_every_trial_runs_every_part_once_in_another_order():
    orders = [arms.parts(["alone", "untagged", "tagged"], ["risk", "summary"], trial) for trial in range(4)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert Part("alone", "risk") in orders[0]


def test_alone_keeps_a_tenants_rows_their_times_and_their_prefixes(offered):
    plan, whole = arms.offered_for(offered, Part("alone", "risk")).plan, offered.plan
    mine = np.flatnonzero(whole.tenant == whole.tenants.index("risk"))
    assert plan.rows == 18
    assert np.array_equal(plan.at_ns, whole.at_ns[mine])
    assert np.array_equal(plan.input_tokens, whole.input_tokens[mine])
    for place, row in enumerate(mine.tolist()):
        kept = plan.block_hashes[plan.block_offsets[place] : plan.block_offsets[place + 1]]
        assert kept.tolist() == [row, row + 100]


def test_arms_differ_in_tags_and_caps_and_in_nothing_else(offered):
    of = {arm: arms.offered_for(offered, Part(arm)) for arm in ("untagged", "tagged", "capped")}
    assert (of["untagged"].plan.rank == NONE).all()
    assert [t.priority for t in of["untagged"].tenants] == [None, None]
    assert of["tagged"].caps == {}
    assert of["capped"].caps == {"summary": 1}
    for other in of.values():
        assert np.array_equal(other.plan.at_ns, offered.plan.at_ns)
        assert np.array_equal(other.plan.output_tokens, offered.plan.output_tokens)


def test_a_pool_has_every_row_once(offered):
    here, there = arms.split(offered, arms.less_urgent(offered.tenants))
    assert here.plan.rows + there.plan.rows == offered.plan.rows
    assert [t.name for t in here.tenants] == ["risk"]
    assert [t.name for t in there.tenants] == ["summary"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tenant-mix", "risk"], "nobody to be isolated from"),
        (["--arm", "capped"], "arm capped needs a cap"),
        (["--arm", "pooled"], "needs --pool-target"),
        (["--arm", "fast"], "neither one of"),
        (["--alone", "rsk"], "no tenant rsk"),
        (["--arm-server", "fcfs=vllm serve"], "needs --target"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(trace, words, said):
    extra = ["--others", "drop"] if "--tenant-mix" in words else []
    result = invoke(trace, *words, *extra, "--dry-run")
    assert isinstance(result.exception, click.UsageError)
    assert said in result.exception.format_message()


def test_bounds_and_servers_are_checked_as_they_are_read():
    assert parse_bound("risk: ttft_p95 <= 1.25x alone")
    with pytest.raises(ValueError, match="compares with no arm"):
        parse_bound("risk: ttft_p95 < 800ms")
    assert parse_server("fcfs=vllm serve m") == ("fcfs", "vllm serve m")
    with pytest.raises(ValueError, match="not an arm's server"):
        parse_server("vllm serve m")


def test_an_experiment_on_the_embedded_engine_is_run_and_judged(trace, tmp_path):
    out = tmp_path / "out"
    words = ["--trials", "2", "--cool", "10ms", "--arm", "alone", "--arm", "untagged", "--arm", "tagged"]
    result = invoke(
        trace, *words, "--alone", "risk", "--no-probe", "--max-lateness", "60s", "--out", str(out), "--json"
    )
    found = json.loads(result.stdout)
    assert result.return_value == 3  # some dozen requests prove nothing
    assert found["verdict"] == "INCONCLUSIVE"
    assert found["trials"] == 2
    assert set(found["tenants"]["risk"]["arms"]) == {"alone", "untagged", "tagged"}
    assert found["tenants"]["risk"]["arms"]["tagged"]["ok"] == 36
    document = json.loads((out / "experiment.json").read_text())
    assert [run["trial"] for run in document["runs"]] == [1, 1, 1, 2, 2, 2]
    assert parquet.read(out / "trial-1" / "untagged" / "outcomes.parquet").column("priority").null_count == 24
