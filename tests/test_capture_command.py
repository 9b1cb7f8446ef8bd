"""The `capture` command's words: what it takes, and the one line it says when something is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from capture.command import address, capture, size, upstream
from tests.conftest import ROOT

GOOD = ["--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*GOOD], "--out traces/staging"),
        (["--out", "x"], "--upstream http://vllm:8000"),
        (["--out", "x", *GOOD, "--mode", "regular"], "--upstream and --mode exclude each other"),
        (["--out", "x", "--upstream", "vllm:8000"], "http://vllm:8000"),
        (["--out", "x", "--upstream", "http://vllm/v1"], "leave the path out"),
        (["--out", "x", "--upstream", "http://vllm:80000"], "http://vllm:8000"),
        (["--out", "x", *GOOD[:2], "--listen", "9000"], "127.0.0.1:9000"),
        (["--out", "x", *GOOD, "--tenant", "cookie"], "header:x-tenant"),
        (["--out", "x", *GOOD, "--dialect", "klingon"], "vllm"),
        (["--out", "x", *GOOD, "--tokenizer", "nowhere.json"], "no such file"),
        (["--out", "x", *GOOD, "--tokenizer", "words.json"], "not a tokenizer file"),
        (["--out", "x", *GOOD, "--max-bytes", "much"], "20GB"),
        (["--out", "x", *GOOD[2:], "--mode", "bogus"], "such as regular or upstream:http://proxy:3128"),
        (["--out", "x", *GOOD[2:], "--mode", "wireguard"], "capture records what comes to a port of TCP"),
        (["--out", "x", *GOOD[2:], "--mode", "regular@9000"], "--listen"),
        (["--out", "x", *GOOD[:2], "--listen", "nowhere.invalid:9000"], "such as 127.0.0.1:9000"),
        (["--out", "x", *GOOD, "--set", "SSL"], "name=value"),
        (["--out", "x", *GOOD, "--set", "listen_port=9000"], "listen_port is told by --listen"),
        (["--out", "/dev/null/x", *GOOD], "--out"),
    ],
)
def test_wrong_words_are_one_line_with_a_right_example(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.json").write_text('{"model": "none"}')
    result = CliRunner().invoke(capture, arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_key_in_the_url_is_refused_and_not_repeated(tmp_path):
    result = CliRunner().invoke(capture, ["--out", str(tmp_path / "x"), "--upstream", "http://me:sk-4711@vllm:8000"])
    assert result.exit_code == 2
    assert "leave them out" in result.output
    assert "sk-4711" not in result.output


def test_an_address_in_use_is_said_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--upstream", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}", "--out", str(tmp_path / "x")]
        result = CliRunner().invoke(capture, arguments)
    assert result.exit_code == 2
    assert "Address already in use; choose another port" in result.output


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, _mode: path != tmp_path / "x")  # what a read-only disk answers
    result = CliRunner().invoke(capture, ["--out", str(tmp_path / "x"), *GOOD])
    assert result.exit_code == 2
    assert "--out" in result.output
    assert "cannot be written to" in result.output


@pytest.mark.parametrize(
    ("given", "workers", "said"),
    [
        ("nosuch=1", "1", "Unknown option(s): nosuch"),
        ("connection_strategy=odd", "1", "connection_strategy=odd is none of eager, lazy"),
        ("nosuch=1", "2", "Unknown option(s): nosuch"),
    ],
)
def test_an_option_that_mitmproxy_does_not_take_is_said_once(given, workers, said, tmp_path):
    told = ["--out", str(tmp_path / "x"), *GOOD, "--set", given, "--workers", workers]
    command = [sys.executable, "-m", "capture", *told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr


def test_words_for_sizes_addresses_and_servers():
    assert (size("500MB"), size("20GB"), size("7")) == (500_000_000, 20_000_000_000, 7)
    assert (address("127.0.0.1:9000"), address("[::1]:90")) == (("127.0.0.1", 9000), ("::1", 90))
    assert upstream("http://vllm:8000/") == "reverse:http://vllm:8000"


def test_help_comes_at_once():
    began = time.process_time()
    subprocess.run([sys.executable, "-c", HELP], check=True, cwd=ROOT, capture_output=True)
    assert time.process_time() - began < 5


HELP = """
import sys
from click.testing import CliRunner
from capture.command import capture
out = CliRunner().invoke(capture, ["--help"]).output
assert "capture status traces/staging" in out
assert not {"mitmproxy", "pyarrow", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
