"""`tenants tag` at the terminal."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from tenants.tag import tag
from traces import parquet
from traces.record import Metadata, metadata_of, table


@pytest.fixture
def trace(tmp_path):
    rows = {"arrival_ns": np.arange(40) * 1000, "output_tokens": np.arange(40)}
    path = tmp_path / "trace.parquet"
    parquet.write(table(rows, Metadata(source="test")), path)
    return path


def run(*words):
    return CliRunner().invoke(tag, [str(word) for word in words])


def test_a_trace_is_tagged_and_the_counts_are_said(trace, tmp_path):
    out = tmp_path / "out.parquet"
    result = run(trace, "--mix", "risk=3:summary=1", "--seed", 7, "-o", out)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"tagged 40 requests for 2 tenants in {out}"
    assert lines[1].split() == ["risk", "rank", "0", "30", "requests", "(75.0%),", *lines[1].split()[6:]]
    tagged = parquet.read(out)
    assert tagged.column("tenant").to_pylist().count("risk") == 30
    assert metadata_of(tagged).history[-1] == "mix risk=3@0:summary=1@1 by share, seed 7"


def test_json_is_all_there_is(trace, tmp_path):
    result = run(trace, "--mix", "a:b", "--assign", "length", "-o", tmp_path / "o.parquet", "--json")
    found = json.loads(result.stdout)
    assert found["tenants"]["a"] == {"priority": 0, "requests": 20, "share": 0.5, "output_tokens": sum(range(20))}


def test_tenants_of_a_file_are_taken_too(trace, tmp_path):
    (tmp_path / "tenants.toml").write_text("[tenants.risk]\nshare = 1\n[tenants.summary]\nshare = 3\n")
    result = run(trace, "--tenants", tmp_path / "tenants.toml", "-o", tmp_path / "o.parquet", "--json")
    assert json.loads(result.stdout)["tenants"]["summary"]["requests"] == 30


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "by --mix risk=3:summary=1 or by --tenants FILE"),
        (["--mix", "a=0:b"], "write it as risk=3:summary=1"),
        (["--mix", "a:b", "--tenants", "x"], "by --mix risk=3:summary=1 or by --tenants FILE"),
        (["--mix", "a:b", "--assign", "zzz"], "share"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(trace, tmp_path, words, says):
    result = run(trace, *words, "-o", tmp_path / "o.parquet")
    assert result.exit_code == 2
    assert says in result.stderr.splitlines()[-1]
    assert not (tmp_path / "o.parquet").exists()


def test_what_exists_is_not_overwritten(trace):
    result = run(trace, "--mix", "a:b", "-o", trace)
    assert result.exit_code == 2
    assert "exists: name a new file" in result.stderr


def test_the_program_says_an_unknown_tenant_in_one_line(trace, tmp_path):
    tagged = tmp_path / "tagged.parquet"
    run(trace, "--mix", "risk:summary", "-o", tagged)
    words = [
        sys.executable,
        "-m",
        "tenants",
        "tag",
        str(tagged),
        "--mix",
        "rsk:summary",
        "-o",
        str(tmp_path / "x.parquet"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "tenants: tenant mix: no tenant 'rsk' in the trace; it has risk, summary (did you mean risk?)"
    ]
