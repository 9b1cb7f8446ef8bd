"""`traces import` at the terminal: one clear line for a mistake, exit 2, counts on stderr, nothing half written."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.cli import main

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:02,5,0\r\n"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run("in.csv", "-o", "out.parquet")` is `traces import in.csv -o out.parquet` in `tmp_path`."""

    def go(*args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["traces", "import", *args])
        with pytest.raises(SystemExit) as left:
            main()
        return Done(left.value.code, *capsys.readouterr())

    return go


@pytest.fixture
def azure(tmp_path):
    (tmp_path / "in.csv").write_bytes(AZURE.encode())
    return tmp_path


def test_a_file_is_imported_by_its_content_and_the_counts_are_told(run, azure):
    done = run("in.csv", "-o", "out.parquet")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out.parquet\n"
    told, counted = done.stderr.splitlines()
    assert told == "in.csv: looks like azure"
    assert counted.split("; ") == [
        "azure: 2 rows",
        "1 failed row (no output tokens, or an error) kept with their outcome",
        "1 row out of order, sorted",  # B13
    ]
    assert pq.read_table(azure / "out.parquet")["input_tokens"].to_pylist() == [5, 4808]


MISTAKES = [
    (["azur", "in.csv", "-o", "out.parquet"], "'azur' is not a format; did you mean azure? Formats: azure, burstgpt,"),
    (["azure", "-o", "out.parquet"], "a file is missing: traces import azure FILE -o OUT"),
    (["azure", "in.csv", "other.csv", "-o", "out.parquet"], "one file at a time"),
    (["in.csv"], "Missing option '-o'"),
    (["nothing.csv", "-o", "out.parquet"], "nothing.csv: no such file"),
    (
        ["burstgpt", "in.csv", "-o", "out.parquet"],
        "in.csv: column 'Model' is missing (found: TIMESTAMP, ContextTokens, Gen",
    ),
    (["in.csv", "-o", "out.parquet", "--seed", "3"], "--seed is for servegen; azure has no use for it"),
    (
        ["in.csv", "-o", "out.parquet", "--map", "arrival=TIMESTAMP"],
        "--map is for csv, jsonl, parquet; azure has no use",
    ),
    (
        ["csv", "in.csv", "-o", "out.parquet", "--map", "arrival"],
        "Invalid value for --map: 'arrival' is not COLUMN=SOURCE",
    ),
    (["csv", "in.csv", "-o", "out.parquet", "--map", "when=TIMESTAMP"], "'when' is no column of a trace"),
    (["csv", "in.csv", "-o", "out.parquet", "--map", "arrival=time"], "column 'time' is missing (found: TIMESTAMP"),
    (
        ["csv", "in.csv", "-o", "out.parquet", "--map", "arrival=TIMESTAMP,end=GeneratedTokens"],
        "the unit of 'GeneratedTok",
    ),
    (["in.csv", "-o", "out.parquet", "--bad-rows", "ignore"], "Invalid value for '--bad-rows'"),
    (["in.csv", "-o", "folder"], "is a directory"),
    (
        ["folder", "-o", "out.parquet"],
        "folder: no known format; name it: traces import NAME folder -o OUT (azure, burst",
    ),
]


@pytest.mark.parametrize(("args", "problem"), MISTAKES)
def test_a_mistake_is_one_line_exit_2_and_no_file(run, azure, args, problem):
    (azure / "folder").mkdir()
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert problem in last
    assert last.startswith("traces: ")
    assert "Traceback" not in done.stderr
    assert sorted(item.name for item in azure.iterdir()) == ["folder", "in.csv"]


def test_an_unknown_format_is_refused_with_the_names_of_the_known(run, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary,\nnothing arrived today\n")
    done = run("notes.txt", "-o", "out.parquet")
    assert done.returncode == 2
    assert "notes.txt: no known format" in done.stderr
    for name in ("azure", "mooncake", "mitm", "parquet"):
        assert name in done.stderr


def test_any_table_imports_by_map_and_a_guess_is_said(run, tmp_path):
    (tmp_path / "log.csv").write_text(
        "when;prompt len;ttft_ms;who\n1700158623979;5;12.5;risk\n1700158624000;6;;summary\n"
    )
    mapping = "arrival=when,input_tokens=prompt len,first_token=ttft_ms,tenant=who"
    done = run("csv", "log.csv", "-o", "out.parquet", "--map", mapping)
    assert done.returncode == 0, done.stderr
    assert "times read as ms since 1970, told by their size" in done.stderr
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows[0] == {
        "tenant": "risk",
        "arrival_ns": 1_700_158_623_979_000_000,
        "input_tokens": 5,
        "first_token_ns": 12_500_000,
    }
    assert rows[1]["first_token_ns"] is None


def test_a_parquet_table_keeps_the_nanoseconds_of_its_timestamps(run, tmp_path):
    stamps = pa.array([1_700_158_623_979_960_001, 1_700_158_623_979_960_000], pa.timestamp("ns", "Europe/Paris"))
    pq.write_table(pa.table({"at": stamps, "n_in": [5, 6], "latency": [0.25, None]}), tmp_path / "log.parquet")
    mapping = "arrival=at,input_tokens=n_in,end=latency:s"
    done = run("parquet", "log.parquet", "-o", "out.parquet", "--map", mapping)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [
        {"arrival_ns": 1_700_158_623_979_960_000, "input_tokens": 6, "end_ns": None},
        {"arrival_ns": 1_700_158_623_979_960_001, "input_tokens": 5, "end_ns": 250_000_000},
    ]


def test_json_lines_import_by_paths_and_keep_all_digits(run, tmp_path):
    (tmp_path / "log.jsonl").write_text(
        '{"ts": 1700158623.123456789, "usage": {"prompt": 5, "completion": 0}}\n{"ts": 1700158624, "usage": {}}\n'
    )
    mapping = "arrival=ts:s,input_tokens=usage.prompt,output_tokens=usage.completion"
    done = run("jsonl", "log.jsonl", "-o", "out.parquet", "--map", mapping)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["arrival_ns"] for row in rows] == [1_700_158_623_123_456_789, 1_700_158_624_000_000_000]
    assert [row["outcome"] for row in rows] == ["no_token", None]


def test_a_trace_of_ours_imports_as_it_is(run, tmp_path):
    (tmp_path / "in.csv").write_text(AZURE)
    run("in.csv", "-o", "one.parquet")
    done = run("one.parquet", "-o", "two.parquet")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "one.parquet").to_pylist() == pq.read_table(tmp_path / "two.parquet").to_pylist()


def test_help_lists_the_formats(run):
    done = run("--help")
    assert done.returncode == 0
    assert "GoReplay recordings" in done.stdout


def test_help_imports_nothing_heavy():
    heavy = {"pyarrow", "numpy", "msgspec", "mitmproxy"}
    script = f"import sys, traces.importers.command; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
