"""The example of two tenants as it ships: what its cap is worth, on the virtual clock."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from replay.simulate import simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "risk-and-summary"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Four minutes, as `run.sh` makes them."""
    path = str(tmp_path_factory.mktemp("example") / "mix.parquet")
    settings = {"rates": {"risk": 0.8, "summary": 0.3}, "answers": {"risk": 80, "summary": 1500}}
    assert runpy.run_path(str(EXAMPLE / "trace.py"))["write"](path, minutes=4, seed=1, **settings) == 264
    return path


def arms(trace, folder, *words):
    """risk's P95 TTFT in ms and summary's output tokens/s, in the arms tagged and capped."""
    words = ("--arm", "tagged", "--arm", "capped", "--poisson", "--trials", "3", "--out", str(folder), "--json", *words)
    tenants = ("--tenants", str(EXAMPLE / "tenants.toml"))
    result = CliRunner().invoke(simulate, [trace, *tenants, *words], standalone_mode=False)
    assert result.exception is None, result.output
    found = json.loads(result.stdout)["tenants"]
    risk, summary = found["risk"]["arms"], found["summary"]["arms"]
    return {
        arm: (risk[arm]["ttft_ms"]["p95"], summary[arm]["output_tokens_per_s"]["value"]) for arm in ("tagged", "capped")
    }


def test_priority_alone_breaks_risks_promise_and_the_cap_keeps_it_for_little(trace, tmp_path):
    found = arms(trace, tmp_path / "six")
    assert found["tagged"][0] > 800 > found["capped"][0]
    assert found["capped"][1] > 0.96 * found["tagged"][1]


def test_a_cap_of_half_the_slots_is_always_full_and_costs_summary_dear(trace, tmp_path):
    found = arms(trace, tmp_path / "four", "--cap", "summary=4")
    assert found["capped"][1] < 0.8 * found["tagged"][1]
