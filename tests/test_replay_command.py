"""`replay` as a user meets it: what it refuses and how, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from replay import probe
from replay.cli import mistyped
from replay.command import without_values
from replay.engine import child
from replay.report.command import report
from replay.rows import read_part
from tenants import folder, terminal
from tests.faulty_server import Do, faulty, good
from traces import parquet, shell
from traces.record import Metadata, table

MS = 1_000_000
ROOT = Path(__file__).resolve().parent.parent


def write_trace(path, at_ms, **columns):
    rows = len(at_ms)
    columns["arrival_ns"] = [int(ms * MS) for ms in at_ms]
    columns.setdefault("input_tokens", [8] * rows)
    columns.setdefault("output_tokens", [3] * rows)
    parquet.write(table(columns, Metadata(source="test")), path)
    return str(path)


def command(*arguments):
    """`replay` in this process."""
    from replay.command import replay

    runner = CliRunner()
    return runner.invoke(replay, list(arguments), standalone_mode=False)


PATIENT = ("--max-lateness", "20s", "--no-self-check")  # the machine of a test may be busy with others


def program(*arguments, **options):
    """`replay` as a program of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OPENAI_API_KEY", None)
    return subprocess.Popen(
        [sys.executable, "-m", "replay", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def refused(monkeypatch, capsys, *arguments):
    """The one line on stderr of a refusal; asserts exit 2 and no traceback."""
    from replay.command import replay

    monkeypatch.setattr(sys, "argv", ["replay", *arguments])
    with pytest.raises(SystemExit) as ended:
        shell.run(replay, "replay")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    return err


@pytest.fixture
def meta_path(monkeypatch):
    """What a program does to its imports is undone after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return write_trace(folder / "t.parquet", [0, 100, 200, 1200], tenant=["risk", "summary"] * 2, priority=[0, 1] * 2)


@pytest.fixture(scope="module")
def engine():
    with child.running("--policy", "priority", "--max-num-seqs", "8") as url:
        yield url


WRONG = {
    "a missing file": (["nowhere.parquet"], "nowhere.parquet: no such file"),
    "a CSV in place of Parquet": (["{csv}"], "traces import csv"),
    "a recording without lengths": (["{unmeasured}"], "capture again with --tokenizer FILE"),
    "an unknown tenant": (["{trace}", "--tenant-mix", "riks:summary"], "did you mean risk?"),
    "speed 0": (["{trace}", "--speed", "0"], "'--speed': '0' must be above 0"),
    "speed in words": (["{trace}", "--speed", "fast"], "'--speed': 'fast' is not a factor: write it as 2x"),
    "a bad SLA": (["{trace}", "--sla", "risk quick"], "'--sla'"),
    "an SLA of nobody": (["{trace}", "--sla", "nobody: ttft_p95 < 1s"], "nobody"),
    "a bad cap": (["{trace}", "--cap", "summary"], "such as summary=6"),
    "a cap of nobody": (["{trace}", "--cap", "nobody=6"], "there are risk, summary"),
    "an unreachable target": (["{trace}", "--target", "http://127.0.0.1:9"], "does not answer"),
    "a target that is no URL": (["{trace}", "--target", "ftp://x"], "write it as http://127.0.0.1:8000"),
    "a target elsewhere": (["{trace}", "--target", "http://192.0.2.1:8000"], "--allow-host 192.0.2.1"),
    "a name elsewhere": (["{trace}", "--target", "http://no.such.host.invalid"], "--allow-host no.such.host.invalid"),
    "a model that does not exist": (["{trace}", "--target", "{engine}", "--model", "gpt-9"], "no such model; it has"),
    "an output folder that exists": (["{trace}", "--out", "{folder}"], "exists"),
    "an unknown dialect": (["{trace}", "--dialect", "klingon"], "no dialect 'klingon'"),
    "an output folder that cannot be": (["{trace}", "--target", "{engine}", "--out", "{csv}/run"], "cannot be made"),
    "authorities that are not there": (
        ["{trace}", "--target", "{engine}", "--ca-file", "no.pem"],
        "--ca-file no.pem: No such",
    ),
    "authorities that are none": (["{trace}", "--target", "{engine}", "--ca-file", "{csv}"], "no certificate in it"),
    "a dry run with bad authorities": (
        ["{trace}", "--ca-file", "{csv}", "--dry-run"],
        "no certificate in it",
    ),
    "a dry run without its tokenizer": (
        ["{trace}", "--tokenizer", "no.json", "--dry-run"],
        "no.json: no such",
    ),
    "nothing but warm-up": (["{trace}", "--warmup", "1h"], "--warmup 3,600.0 s leaves nothing to measure"),
    "a policy that the embedded engine lacks": (["{trace}", "--policy", "lottery"], "did not start: Invalid value"),
    "a mistyped option": (["{trace}", "--spede", "2x"], "--speed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_clear_line_and_exit_2(case, tagged, engine, tmp_path, monkeypatch, capsys, meta_path):
    csv = tmp_path / "conv.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    arguments, wanted = WRONG[case]
    unmeasured = write_trace(tmp_path / "unmeasured.parquet", [0, 100], input_tokens=[None] * 2)
    places = {"csv": csv, "trace": tagged, "engine": engine, "folder": tmp_path, "unmeasured": unmeasured}
    found = refused(monkeypatch, capsys, *(argument.format(**places) for argument in arguments))
    assert wanted in found


def test_a_mistake_of_the_program_itself_has_no_traceback(tmp_path):
    with program("nowhere.parquet") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "replay: nowhere.parquet: no such file, or a folder without *.parquet files\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("isolat", "isolate"),
        ("Probe", "probe"),
        ("simulat", "simulate"),
        ("sample", None),
        ("conv.parquet", None),
        ("--spede", None),
        ("./isolat", None),
        ("conversations", None),
    ],
)
def test_a_mistyped_subcommand_is_told_from_a_trace(word, meant):
    assert mistyped(word) == meant


def test_a_mistyped_subcommand_is_one_line_that_names_it(tmp_path):
    with program("isolat", cwd=tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "replay: no trace and no subcommand isolat: did you mean `replay isolate`?\n"


def test_a_file_of_that_name_is_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "isolat").touch()
    assert mistyped("isolat") is None


def test_the_line_that_repeats_a_run_has_no_value_of_a_header():
    words = ["t.parquet", "--header", "x-key: s3cret", "--header=authorization: Bearer s3cret", "--seed", "7"]
    said = without_values(words)
    assert said == ["t.parquet", "--header", "x-key: ...", "--header=authorization: ...", "--seed", "7"]


def test_help_is_one_screenful_of_words_and_quick():
    result = command("--help")
    assert result.exit_code == 0
    assert "--tenant-mix" in result.output


def test_a_dry_run_prints_the_plan_and_sends_nothing_b15(tagged):
    result = command(tagged, "--speed", "2x", "--dry-run")
    assert result.exit_code == 0
    assert "span     1.2 s → 600 ms" in result.output
    assert "risk: 2 requests, priority 0" in result.output
    assert "digest" in result.output


def test_a_dry_run_as_json_is_reproducible(tagged):
    found = [json.loads(command(tagged, "--speed", "2x", "--dry-run", "--json").output) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["rows"] == 4
    assert found[0]["tenants"] == {"risk": 2, "summary": 2}
    assert (found[0]["span_before_s"], found[0]["span_s"]) == (1.2, 0.6)


def test_a_run_prints_pure_json_and_accounts_for_every_row(tagged, engine, tmp_path):
    with program(
        tagged, "--target", engine, "--speed", "2x", "--json", "--out", str(tmp_path / "run"), *PATIENT
    ) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["planned"] == 4
    parts = result["ok"], result["aborted"], result["cut"], sum(result["failed"].values()), result["unsent"]
    assert sum(parts) == 4
    rows = parquet.read(tmp_path / "run" / "outcomes.parquet").to_pylist()
    due = [row["due_ns"] for row in rows]
    assert due[0] == 0
    assert due[-1] - due[0] == 600 * MS
    assert [(row["input_tokens"], row["output_tokens"]) for row in rows] == [(8, 3)] * 4, "exact lengths"
    assert "plan     4 requests" in err


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_lengths_are_exact_on_the_embedded_engine(engine, tmp_path, endpoint):
    lengths = [20, 100, 333, 1500]
    path = write_trace(
        tmp_path / "t.parquet",
        range(0, 80, 20),
        input_tokens=lengths,
        output_tokens=[5] * 4,
        endpoint=[endpoint] * 4,
    )
    with program(path, "--target", engine, "--json", "--out", str(tmp_path / "run"), *PATIENT) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    rows = parquet.read(tmp_path / "run" / "outcomes.parquet").to_pylist()
    assert [row["input_tokens"] for row in rows] == lengths
    assert [row["output_tokens"] for row in rows] == [5] * 4
    assert json.loads(out)["warnings"] == []


def test_block_hashes_are_real_shared_prefixes_on_the_engine(engine, tmp_path):
    path = write_trace(
        tmp_path / "t.parquet",
        [0, 400, 800],
        input_tokens=[320] * 3,
        block_size=[64] * 3,
        block_hashes=[[1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [7, 2, 3, 4, 5]],
    )
    for name in ("one", "two"):
        with program(path, "--target", engine, "--json", "--out", str(tmp_path / name), *PATIENT) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        rows = parquet.read(tmp_path / name / "outcomes.parquet").to_pylist()
        assert [row["cached_tokens"] or 0 for row in rows] == [0, 256, 0], f"run {name}: shared inside, not across runs"


def test_tags_without_effect_are_said_in_red_in_every_report(tagged, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "WORTH_S", 0.0)
    with child.running("--policy", "fcfs") as url:
        result = command(tagged, "--target", url, "--out", str(tmp_path / "run"), *PATIENT)
    assert result.exit_code == 0, result.stderr
    assert "PRIORITY HAS NO EFFECT" in result.stdout
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<li style="color:var(--fail);font-weight:600">PRIORITY HAS NO EFFECT' in page
    summary = folder.load(tmp_path / "run").summary
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    terminal.print_result(summary, console)
    assert "\x1b[1;31mPRIORITY HAS NO EFFECT" in console.file.getvalue()


def test_a_run_keeps_who_waited_for_whom(tagged, engine, tmp_path):
    assert command(tagged, "--target", engine, "--out", str(tmp_path / "run"), *PATIENT).exit_code == 0
    found = json.loads((tmp_path / "run" / "run.json").read_text())["blocking"]
    assert set(found["blocking_s"]) == {"risk", "summary"} == set(found["blocking_s"]["risk"])
    assert {"inversion_s", "per_request_s", "worst", "stalls_s", "stalls_per_request_s", "worst_stalls"} <= set(found)
    shown = CliRunner().invoke(report, [str(tmp_path / "run"), "--no-page", "--json"], standalone_mode=False)
    assert json.loads(shown.stdout)["blocking_s"] == found["blocking_s"]


def test_j07_what_a_full_queue_displaces_is_counted_as_the_servers_failure_of_its_tenant(tmp_path):
    """SGLang's queue lets a more urgent request displace a waiting one: no error of the client, none of the others."""
    rows = {"tenant": ["summary", "summary", "risk"], "priority": [1, 1, 0], "output_tokens": [400, 4, 4]}
    path = write_trace(tmp_path / "t.parquet", [0, 600, 1200], **rows)
    sglang = ("--policy", "sglang", "--higher-first", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with child.running(*sglang) as url:
        words = ("--target", url, "--dialect", "sglang", "--no-probe", *PATIENT)
        result = command(path, *words, "--json", "--out", str(tmp_path / "run"))
    tenants = json.loads(result.stdout)["tenants"]
    assert (tenants["risk"]["ok"], tenants["risk"]["failed"]) == (1, {})
    assert (tenants["summary"]["ok"], tenants["summary"]["failed"]) == (1, {"stream_error": 1})
    assert [tenant["aborted"] for tenant in tenants.values()] == [0, 0]


def test_j12_a_mix_of_seven_two_one_is_one_run_with_a_row_for_each(engine, tmp_path):
    path = write_trace(tmp_path / "t.parquet", range(0, 1000, 20))
    words = ("--tenant-mix", "a=7:b=2:c=1", "--target", engine, "--no-probe", *PATIENT)
    result = command(path, *words, "--json", "--out", str(tmp_path / "run"))
    tenants = json.loads(result.stdout)["tenants"]
    assert {name: tenant["ok"] for name, tenant in tenants.items()} == {"a": 35, "b": 10, "c": 5}
    assert all(tenant["ttft_ms"]["n"] == tenant["ok"] for tenant in tenants.values())


def test_killing_the_server_in_mid_run_ends_the_run_with_every_row_on_disk(tmp_path):
    path = write_trace(tmp_path / "t.parquet", range(0, 4000, 40), output_tokens=[20] * 100)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "replay", "serve", "--port", "0", "--die-with-parent"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as server,
        program(
            path, "--target", server.stdout.readline().strip(), "--json", "--out", f"{tmp_path}/run", *PATIENT
        ) as process,
    ):
        wait_for_rows(tmp_path / "run")
        time.sleep(1.0)
        server.kill()
        out, err = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 1, (result["reasons"], err)
    assert result["planned"] == 100
    assert sum(result["failed"].values()) > 10
    assert result["ok"] + sum(result["failed"].values()) == 100
    assert parquet.read(tmp_path / "run" / "outcomes.parquet").num_rows == 100
    assert (tmp_path / "run" / "run.json").exists()


def wait_for_rows(folder):
    """Until the run has begun: its counters are there."""
    end = time.monotonic() + 30
    while not (folder / ".work" / "counters").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def hangups():
    """What is started hears SIGHUP, though the tests may run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_saves_what_there_is_and_exits_130(tmp_path, number):
    path = write_trace(tmp_path / "t.parquet", range(0, 20_000, 50))
    with (
        faulty(lambda r: good(3) if r.number % 5 or not r.json.get("stream") else [Do.HOLD]) as server,
        program(path, "--target", server.url, "--out", str(tmp_path / "run"), *PATIENT) as process,
    ):
        server.wait_for(lambda it: len(it.requests) > 20, 30)
        process.send_signal(number)
        if number == signal.SIGHUP:  # a closed terminal hangs up twice: that is no second interrupt
            time.sleep(0.05)
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    document = json.loads((tmp_path / "run" / "run.json").read_text())["summary"]
    assert (document["valid"], document["reasons"][0]) == (False, "interrupted")
    assert document["planned"] == 400
    assert document["cut"] > 0
    assert document["unsent"] > 300
    assert parquet.read(tmp_path / "run" / "outcomes.parquet").num_rows == 400
    lines = out.strip().splitlines()
    assert lines[0] == lines[-1]
    assert "interrupted" in lines[0]
    for name in ("run.json", "report.html", "outcomes.parquet"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o777 == 0o600, name


def test_a_second_interrupt_leaves_at_once_with_the_rows_that_had_come_back(tmp_path):
    path = write_trace(tmp_path / "t.parquet", range(0, 20_000, 50))
    with (
        faulty(lambda r: good(3)) as server,
        program(path, "--target", server.url, "--out", str(tmp_path / "run"), *PATIENT) as process,
    ):
        part = tmp_path / "run" / ".work" / "part-0.arrow"
        server.wait_for(lambda _: part.exists() and any(read_part(part)), 30)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "outcomes.parquet" in err
    seen = parquet.read(tmp_path / "run" / "outcomes.parquet").column("outcome").to_pylist()
    assert len(seen) == 400
    assert {"ok", "unsent"} <= set(seen)


def test_without_a_target_the_embedded_engine_is_started_and_ended(tagged, tmp_path):
    with program(tagged, "--out", str(tmp_path / "run"), *PATIENT) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.strip().splitlines()
    assert lines[0].startswith("PASS")
    assert lines[0] == lines[-1]
    assert "risk" in out


@pytest.mark.data
def test_a_window_of_the_azure_trace_replays_as_planned(data, engine, tmp_path):
    source = data("traces", "traces", "azure2023", "AzureLLMInferenceTrace_conv.rows1-11000.csv")
    subprocess.run(
        [sys.executable, "-m", "traces", "import", "azure", str(source), "-o", str(tmp_path / "conv.parquet")],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    arrival = parquet.read(tmp_path / "conv.parquet", ["arrival_ns"]).column("arrival_ns").to_numpy()
    inside = arrival[arrival - arrival[0] < 60_000 * MS]
    asked = [str(tmp_path / "conv.parquet"), "--window", "0s:60s", "--speed", "2x", "--tenant-mix", "risk:summary"]
    plans = [json.loads(command(*asked, "--dry-run", "--json").output) for _ in range(2)]
    assert plans[0]["rows"] == len(inside)
    assert plans[0]["span_s"] == pytest.approx((inside[-1] - inside[0]) / 2e9, abs=1e-6)
    assert plans[0]["digest"] == plans[1]["digest"]
