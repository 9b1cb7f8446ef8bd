"""The arms of an experiment, and `replay isolate` on the embedded engine."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time

import click
import numpy as np
import pytest
from click.testing import CliRunner

from replay import arms, trials
from replay import isolate as isolation
from replay.arms import Part
from replay.engine import child
from replay.isolate import isolate, parse_server
from replay.options import OfferOptions, SendOptions, make_offer
from replay.plan import NONE
from replay.trials import Setup, parse_bound
from tenants.judge import is_clear
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
        (["--arm-server", "fcfs=serve --port 8000", "--target", "127.0.0.1:8000"], "would listen where the server of"),
        (["--arm-server", "fcfs=serve", "--target", "127.0.0.1:8000"], "would listen where the server of"),
        (["--arm-server", "fcfs='serve --port 1"], "No closing quotation"),
        (["--pool-target", "ftp://x"], "not an http or https URL"),
        (["--pool-target", "http://192.0.2.1"], "--allow-host 192.0.2.1"),
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


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def serve(port, policy):
    return shlex.join([sys.executable, "-m", "replay", "serve", "--port", str(port), "--policy", policy])


BRISK = ("--cool", "10ms", "--no-probe", "--no-self-check", "--max-lateness", "60s")


def test_a_pool_and_an_arm_with_a_server_of_its_own_are_run_and_judged(trace, tmp_path):
    out, port = tmp_path / "out", free_port()
    arms_ = ("--arm", "tagged", "--arm", "pooled", "--arm", "fcfs", "--trials", "1", "--out", str(out))
    with child.running("--policy", "priority") as second:
        own = ("--arm-server", f"fcfs={serve(port, 'fcfs')}", "--pool-target", second)
        result = invoke(trace, *arms_, *own, *BRISK, "--json")
    assert result.return_value == 3, result.stderr  # a single trial tells nothing
    found = json.loads(result.stdout)
    arms_of_risk = found["tenants"]["risk"]["arms"]
    assert {name: (arm["ok"], arm["failed"]) for name, arm in arms_of_risk.items()} == {
        "tagged": (18, 0), "pooled": (18, 0), "fcfs": (18, 0),
    }  # fmt: skip
    targets = {name: json.loads((out / "trial-1" / name / "run.json").read_text())["target"]
               for name in ("tagged", "fcfs", "pooled/first", "pooled/second")}  # fmt: skip
    assert targets["fcfs"] == f"http://127.0.0.1:{port}"
    assert targets["pooled/second"] == second
    assert len({*targets.values()}) == 4
    halves = [parquet.read(out / "trial-1" / "pooled" / half / "outcomes.parquet") for half in ("first", "second")]
    assert [set(half.column("tenant").to_pylist()) for half in halves] == [{"risk"}, {"summary"}]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass  # its server ended with the arm


def test_an_arms_server_is_refused_where_something_else_listens(trace, tmp_path):
    with child.running("--policy", "priority") as there:
        port = there.rpartition(":")[2]
        own = ("--arm", "fcfs", "--arm-server", f"fcfs={serve(port, 'fcfs')}", "--out", str(tmp_path / "out"))
        result = invoke(trace, *own, *BRISK)
    assert isinstance(result.exception, click.UsageError)
    assert "something listens at" in result.exception.format_message()


def test_a_server_that_does_not_come_up_is_refused_with_its_exit_code(trace, tmp_path):
    own = ("--arm", "x", "--arm-server", f"x={sys.executable} -c 'exit(5)' --port {free_port()}")
    result = invoke(trace, *own, *BRISK, "--out", str(tmp_path / "out"))
    assert "ended with exit code 5 before it listened" in result.exception.format_message()


def test_a_server_killed_between_arms_ends_the_experiment_and_what_had_run_is_judged(trace, tmp_path, monkeypatch):
    out, port, runs = tmp_path / "out", free_port(), []
    server = subprocess.Popen(
        shlex.split(serve(port, "priority")), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    make = isolation._one

    def then_kill(*run):
        made = make(*run)
        runs.append(made)
        server.kill()
        server.wait()
        return made

    monkeypatch.setattr(isolation, "_one", then_kill)
    try:
        end = time.monotonic() + 60
        while not isolation._listens(isolation.target_of(f"--port {port}", SendOptions())) and time.monotonic() < end:
            time.sleep(0.1)
        words = ("--arm", "untagged", "--arm", "tagged", "--trials", "1", "--target", f"http://127.0.0.1:{port}")
        result = invoke(trace, *words, *BRISK, "--out", str(out), "--json")
    finally:
        server.kill()
        server.wait()
    assert (result.exception, result.return_value, len(runs)) == (None, 3, 1)
    assert "does not answer" in result.stderr
    assert f"what had run stands in {out}" in result.stderr
    assert json.loads(result.stdout)["verdict"] == "INCONCLUSIVE"
    assert [run["arm"] for run in json.loads((out / "experiment.json").read_text())["runs"]] == ["untagged"]


@pytest.mark.parametrize(
    ("command_", "port"),
    [
        ("vllm serve m --port 8001", 8001),
        ("vllm serve m --port=8002 -v", 8002),
        ("vllm serve m", None),
        ("x --port", None),
    ],
)
def test_the_port_of_a_server_is_read_from_its_command(command_, port):
    assert isolation.port_of(command_) == port
    assert isolation.target_of(command_, SendOptions(target="http://localhost:9000/base")).port == (port or 9000)


def test_an_experiment_is_asked_after_every_trial_but_the_first_whether_it_is_clear(trace, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(trials, "_is_clear", lambda folder: asked.append(folder) or len(asked) == 2)
    offer = OfferOptions(trace=trace, turns="timed")
    setup = Setup(arms=("untagged", "tagged"), alone=(), trials=9, stop_early=True)
    made = []
    assert not trials.play(offer, setup, tmp_path / "out", lambda _o, _a, part, _f: bool(made.append(part)))
    assert (len(made), len(asked)) == (6, 2)  # never after one trial


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory):
    """A minute of short questions, and long prompts that they wait for."""
    path, rng = tmp_path_factory.mktemp("long") / "mix.parquet", np.random.default_rng(1)
    kinds = {"risk": (480, 50), "summary": (60, 4000)}  # requests, tokens in
    rows = sorted(
        (at, name, rank, tokens)
        for rank, (name, (number, tokens)) in enumerate(kinds.items())
        for at in rng.integers(0, 60 * S, number).tolist()
    )
    columns = dict(
        zip(("arrival_ns", "tenant", "priority", "input_tokens"), map(list, zip(*rows, strict=True)), strict=True)
    )
    columns |= {"output_tokens": [5] * len(rows), "endpoint": ["completions"] * len(rows)}
    parquet.write(table(columns, Metadata(source="test", epoch="relative")), path)
    return str(path)


@pytest.fixture
def on_the_virtual_clock(long_prompts, monkeypatch):
    """`replay isolate`, its runs made in no time by the simulated engine: the judge and all else are the real ones."""
    from replay import simulate, simulated

    engine = simulate.engine_of(
        simulate.simulate.make_context("simulate", [long_prompts, "--max-num-seqs", "64"]).params
    )

    def one(bench, offered, asked, part, folder):
        simulated.play_arm((offered, part.arm), asked, engine, bench.send, folder)
        return False

    monkeypatch.setattr(isolation, "_one", one)

    def run(out, *words):
        result = invoke(
            long_prompts, "--target", "http://127.0.0.1:9", "--poisson", "--alone", "risk", "--stop-early", "--json",
            "--cool", "0s", "--out", str(out), *words,
        )  # fmt: skip
        assert result.exception is None, result.output
        return result, json.loads((out / "experiment.json").read_text())["runs"]

    return run


def test_a_clear_experiment_stops_early_by_the_real_judgement(on_the_virtual_clock, tmp_path):
    """The ratio is near 13: a bound of 25 is kept, clearly at 99 % as soon as three trials tell how trials differ."""
    out = tmp_path / "out"
    result, runs = on_the_virtual_clock(out, "--trials", "9", "--bound", "risk: ttft_p95 <= 25x alone")
    assert max(run["trial"] for run in runs) == 3
    assert len(runs) == 3 * 3
    assert "every verdict is clear after 3 trials" in result.stderr
    assert (result.return_value, json.loads(result.stdout)["verdict"]) == (0, "ISOLATED")
    document = json.loads((out / "experiment.json").read_text())
    document["runs"] = [run for run in runs if run["trial"] < 3]
    (out / "experiment.json").write_text(json.dumps(document))
    assert not is_clear(out)


def test_an_experiment_that_stays_open_runs_every_trial(on_the_virtual_clock, tmp_path):
    """A bound of 13 lies in the interval, so no verdict is clear."""
    result, runs = on_the_virtual_clock(tmp_path / "out", "--trials", "4", "--bound", "risk: ttft_p95 <= 13x alone")
    assert max(run["trial"] for run in runs) == 4
    assert "clear" not in result.stderr
    assert (result.return_value, json.loads(result.stdout)["verdict"]) == (3, "INCONCLUSIVE")
