"""`replay serve` as a command: ready line, TLS, log, truth, signals, and mistakes as one line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from replay.engine.policies import POLICIES
from replay.engine.serve import make_config, make_profile, serve
from tests.faulty_server import self_signed

ROOT = Path(__file__).resolve().parent.parent


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "replay", "serve", "--port", "0", "--speed-of-time", "100x", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def ask(url: str, tokens: int = 3, context: ssl.SSLContext | None = None, **headers: str) -> dict:
    body = json.dumps({"prompt": "ab", "max_tokens": tokens}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def test_it_prints_its_url_serves_writes_log_and_truth_and_ends_on_sigterm(tmp_path: Path):
    log, truth = tmp_path / "log.parquet", tmp_path / "truth.parquet"
    process, url = start("--policy", "priority", "--log", str(log), "--truth", str(truth))
    ask(url, **{"X-Request-Id": "one", "X-Tenant": "risk"})
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert url.startswith("http://127.0.0.1:")
    assert out == ""
    assert "modelled, not measured" in errors
    assert "3 steps" in errors
    row = pq.read_table(log).to_pylist()[0]
    assert (row["request_id"], row["tenant"], row["output_tokens"]) == ("one", "risk", 3)
    waits = pq.read_table(truth).to_pylist()[0]
    assert (waits["request_id"], waits["tenant"]) == ("one", "risk")
    assert waits["first_token_ns"] - waits["arrival_ns"] > 0
    assert waits["served_ns:risk"] > 0


def test_ctrl_c_in_the_middle_of_a_stream_ends_it_at_once_and_the_log_has_the_row(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    process, url = start("--log", str(log), "--speed-of-time", "1x")
    port = int(url.rsplit(":", 1)[1])
    body = b'{"prompt":"ab","max_tokens":5000,"stream":true}'
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        while b"data: " not in connection.recv(1 << 16):
            pass
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 0
    assert time.monotonic() - begun < 5
    (row,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert row["outcome"] == "abort"
    assert 0 < row["output_tokens"] < 5000


def test_it_serves_tls(tmp_path: Path):
    certificate, key = self_signed(tmp_path)
    process, url = start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    try:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        assert ask(url, context=context)["usage"]["completion_tokens"] == 3
    finally:
        process.terminate()
        process.communicate(timeout=10)


def options(*given: str) -> dict:
    return serve.make_context("serve", list(given)).params


def test_settings_are_the_profiles_unless_given_and_named_as_in_vllm():
    values = options(
        "--max-num-seqs", "8", "--long-prefill-token-threshold", "512", "--async-scheduling", "--watermark", "0.1"
    )
    config = make_config(values, make_profile(values))
    assert config.max_num_seqs == 8
    assert config.max_num_batched_tokens == 2048
    assert config.num_gpu_blocks == 28_000
    assert config.max_model_len == 8192
    assert config.long_prefill_token_threshold == 512
    assert config.async_scheduling
    assert config.watermark == 0.1
    assert config.scheduling_policy == "fcfs"
    weighted = options("--policy", "fair", "--tenant-weight", "risk=3", "--tenant-weight", "summary=0.5")
    assert make_config(weighted, make_profile(weighted)).tenant_weights == {"risk": 3.0, "summary": 0.5}


def test_a_pool_smaller_than_the_context_shortens_the_context():
    values = options("--num-gpu-blocks", "101")
    assert make_config(values, make_profile(values)).max_model_len == 1600


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_served(policy: str):
    values = options("--scheduling-policy", policy)
    assert make_config(values, make_profile(values)).scheduling_policy == policy


MISTAKES = [
    (["--policy", "lifo"], "fcfs"),
    (["--profile", "gpt9"], "llama3-8b-a100-80"),
    (["--profile-file", "/nowhere/profile.toml"], "/nowhere/profile.toml"),
    (["--profile", "llama3-8b-h100", "--profile-file", "x.toml"], "not both"),
    (["--max-num-seqs", "0"], "--max-num-seqs"),
    (["--max-model-len", "9000", "--num-gpu-blocks", "100"], "raise --num-gpu-blocks"),
    (["--tenant-weight", "risk"], "risk=3"),
    (["--tenant-weight", "risk=-1"], "risk=3"),
    (["--ssl-keyfile", __file__], "--ssl-certfile"),
    (["--ssl-certfile", __file__], "--ssl-certfile"),
    (["--speed-of-time", "fast"], "2x"),
    (["--log", "/nowhere/log.jsonl"], "/nowhere/log.jsonl"),
]


@pytest.mark.parametrize(
    ("given", "named"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_that_names_the_option_and_a_right_value(given: list[str], named: str):
    result = CliRunner().invoke(serve, ["--port", "0", *given], standalone_mode=False)
    assert result.exception is not None
    message = getattr(result.exception, "format_message", lambda: str(result.exception))()
    assert named in message
    assert "\n" not in message


def test_a_port_in_use_is_said_in_one_line_with_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "replay", "serve", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"--port {port}" in done.stderr


def test_help_is_quick_and_shows_the_default_of_every_policy():
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "replay", "serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert time.monotonic() - begun < 10
    assert "replay serve --port 8100 --policy priority --max-num-seqs 8\n" in done.stdout
    for heavy in ("aiohttp", "numpy", "pyarrow", "uvloop"):
        assert not re.search(rf"\|\s+{heavy}$", done.stderr, re.MULTILINE), heavy
