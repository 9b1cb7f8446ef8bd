"""`replay calibrate`: against the embedded engine, whose step times are known, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from replay import calibrate as command
from replay.engine import child
from replay.engine.steptime import load_profile
from traces.shell import EXIT_UNJUDGED

SMALL = ["--prompts", "16,128,512,1024", "--batches", "1,4", "--contexts", "64,700", "--tokens", "12", "--repeats", "1"]


@pytest.fixture(scope="module")
def url():
    with child.running("--profile", "llama3-8b-a100-80") as url:
        yield url


def test_the_embedded_engines_own_profile_comes_back_as_a_file_that_loads(url, tmp_path):
    out = tmp_path / "mine.toml"
    asked = [url, "--out", str(out), "--json", *SMALL]
    result = CliRunner().invoke(command.calibrate, asked, standalone_mode=False)
    assert result.exception is None
    said = json.loads(result.stdout)
    assert len(said["readings"]) == said["fit"]["observations"] >= 8
    profile, truth = load_profile(str(out)), load_profile("llama3-8b-a100-80")
    assert re.fullmatch(r"fitted from \d+ readings of a live engine", profile.provenance)
    assert "median" in profile.error
    assert profile.served_model == truth.served_model
    for load in ((1, 1, 100, 0.0, 1), (1024, 0, 0, 1024 * 512, 1)):  # wide: the machine may be busy
        assert 0.6 < profile.model.duration_ns(*load) / truth.model.duration_ns(*load) < 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://127.0.0.1:1"], "not an http or https URL"),
        (["http://192.0.2.1:8000"], "--allow-host 192.0.2.1"),
        (["http://127.0.0.1:9"], "does not answer"),
        (["http://127.0.0.1:9", "--prompts", "a,b"], "list of whole numbers"),
        (["http://127.0.0.1:9", "--batches", "0,2"], "at least 1"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message):
    result = CliRunner().invoke(command.calibrate, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_profile_is_never_overwritten_and_too_few_readings_are_said(url, tmp_path):
    out = tmp_path / "mine.toml"
    few = CliRunner().invoke(
        command.calibrate, [url, "--out", str(out), "--prompts", "16", "--batches", "1", "--contexts", "64"]
    )
    out.write_text("keep")
    kept = CliRunner().invoke(command.calibrate, [url, "--out", str(out)])
    assert few.exit_code == kept.exit_code == 2
    assert "too few readings" in few.output
    assert "exists already" in kept.output
    assert out.read_text() == "keep"


def test_a_server_that_refuses_completions_is_reported_not_fitted(url, tmp_path):
    asked = [url, "--out", str(tmp_path / "x.toml"), "--model", "nobody", *SMALL]
    result = CliRunner().invoke(command.calibrate, asked, standalone_mode=False)
    assert result.return_value == EXIT_UNJUDGED
    assert "HTTP 404" in result.output
