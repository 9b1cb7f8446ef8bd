"""Isolation verdicts: what each looks like, what makes it uncertain, and how it is told."""

from __future__ import annotations

import functools
import json
import math
from xml.etree import ElementTree as ET

import click
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import coverage
from tenants import arms, experiment, isolation
from tenants.bootstrap import Estimate
from tenants.judge import judge
from tenants.measures import rows_of
from tenants.tenant import Tenant
from tests import made_experiments as made
from tests.made_experiments import Made
from traces.record import Metadata, table


@functools.cache
def told(path, *words):
    return CliRunner().invoke(judge, [str(path), *map(str, words)], standalone_mode=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders made once, by name."""
    root = tmp_path_factory.mktemp("experiments")
    kinds = {
        "isolated": Made(made.ISOLATED),
        "leaky": Made(made.LEAKY),
        "ineffective": Made(made.INEFFECTIVE),
        "inverted": Made(made.INVERTED),
        "calm": Made(made.CALM),
        "single": Made(made.ISOLATED, trials=1),
        "late": Made(made.ISOLATED, trials=1, late_ms=50.0),
        "failing": Made(made.ISOLATED, failed=(("tagged", 30),)),
        "slow rule": Made(made.ISOLATED, rules=("risk: ttft_p95 < 50ms",)),
    }
    return {name: made.write(root / name, kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("name", "verdict", "code"),
    [
        ("isolated", "ISOLATED", 0),
        ("leaky", "LEAKY", 1),
        ("ineffective", "INEFFECTIVE", 1),
        ("inverted", "INVERTED", 1),
        ("calm", "INCONCLUSIVE", 3),
        ("single", "INCONCLUSIVE", 3),
        ("late", "INVALID", 3),
        ("slow rule", "ISOLATED", 1),
    ],
)
def test_each_verdict_and_its_exit_code(folders, name, verdict, code):
    result = told(folders[name], "--json")
    found = json.loads(result.stdout)
    assert found["verdict"] == verdict, found["sentence"]
    assert result.return_value == code


def test_the_sentence_says_why_a_verdict_is_open(folders):
    assert "no contention" in json.loads(told(folders["calm"], "--json").stdout)["sentence"]
    assert "single trial" in json.loads(told(folders["single"], "--json").stdout)["sentence"]
    late = json.loads(told(folders["late"], "--json").stdout)
    assert "client-bound" in late["reasons"][0]


def test_the_json_has_the_shape_that_was_promised(folders):
    found = json.loads(told(folders["leaky"], "--json").stdout)
    risk = found["tenants"]["risk"]
    assert risk["verdict"] == "LEAKY"
    ratio, share = risk["interference_ratio"]["ttft_p95"], risk["recovered_share"]["ttft_p95"]
    assert ratio["ci"][0] < 3.0 < ratio["ci"][1]
    assert share["ci"][0] < 0.75 < share["ci"][1]
    assert set(risk["arms"]) == {"alone", "untagged", "tagged"}
    for arm in risk["arms"].values():
        assert {"n", "p50", "p95", "p99"} <= set(arm["ttft_ms"])
    assert set(found["blocking_s"]) <= {"risk", "summary"}
    assert set(found["cost"]) == {"summary"}
    assert found["cost"]["summary"]["output_tokens_per_s"]["value"] == pytest.approx(1.0, abs=0.02)
    assert found["tenants"]["summary"]["verdict"] is None


def test_a_failed_request_improves_nothing(folders):
    """A tenth of risk's tagged requests fail: its P95 is +∞ there, so it is not isolated, whatever the others took."""
    result = told(folders["failing"], "--json")
    found = json.loads(result.stdout)
    risk = found["tenants"]["risk"]
    assert risk["arms"]["tagged"]["ttft_ms"]["infinite"] == ["p95", "p99"]
    assert risk["interference_ratio"]["ttft_p95"]["infinite"]
    assert found["verdict"] == "LEAKY"
    assert result.return_value == 1


def test_the_table_begins_and_ends_with_the_verdict(folders):
    lines = told(folders["isolated"]).stdout.splitlines()
    assert lines[0] == lines[-1]
    assert lines[0].startswith("risk is ISOLATED: ttft_p95 tagged is 1.0")
    assert any("intervals from how they differ" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", ["isolated", "failing"])
def test_every_number_has_its_count_however_narrow_the_terminal(folders, name, width):
    shown = CliRunner().invoke(judge, [str(folders[name])], env={"COLUMNS": str(width)}).stdout.splitlines()
    begin = next(i for i, line in enumerate(shown) if line.startswith("Each tenant in each arm"))
    heads, *rows = shown[begin + 2 : shown.index("", begin)]
    words = heads.split()
    assert max(len(line) for line in (heads, *rows)) <= width
    assert [row.split()[words.index("n")] for row in rows] == ["1,600"] * 3 + ["800"] * 3
    assert name == "isolated" or "failed" in words


def test_junit_has_a_case_for_each_promise_and_no_green_one_that_is_open(folders, tmp_path):
    told(folders["leaky"], "--junit", tmp_path / "leaky.xml", "--json")
    suite = ET.parse(tmp_path / "leaky.xml").getroot()  # our own file
    assert suite.attrib["failures"] == "1"
    assert suite.find("testcase/failure").attrib["type"] == "LEAKY"
    told(folders["calm"], "--junit", tmp_path / "calm.xml", "--json")
    assert ET.parse(tmp_path / "calm.xml").getroot().attrib["errors"] == "1"


def test_markdown_is_made_of_tables(folders, tmp_path):
    told(folders["isolated"], "--markdown", tmp_path / "out.md", "--json")
    text = (tmp_path / "out.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows if "TTFT" in line}) == 1
    assert any(line.startswith("|---") for line in rows)


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("isolated", "risk is **ISOLATED**: ttft_p95 tagged is 1."),
        ("leaky", "risk is **LEAKY**: "),
        ("single", "risk is **INCONCLUSIVE**: "),
        ("late", "**INVALID**: "),
    ],
)
def test_the_first_line_of_markdown_says_the_verdict_once(folders, tmp_path, name, begins):
    told(folders[name], "--markdown", tmp_path / "out.md", "--json")
    text = (tmp_path / "out.md").read_text()
    first = text.splitlines()[0]
    verdict = begins.split("**")[1]
    assert first.startswith(begins)
    assert first.count(verdict) == 1
    assert text.count(first.replace("**", "")) == 0


def test_an_experiment_without_the_arms_it_is_judged_by_says_its_verdict(tmp_path):
    path = made.write(tmp_path / "bare", Made({"untagged": 900.0, "tagged": 104.0}, trials=2))
    told(path, "--markdown", tmp_path / "out.md", "--json")
    said = "the arms alone and tagged are needed, there are untagged, tagged"
    assert (tmp_path / "out.md").read_text().splitlines()[0] == f"risk is **INCONCLUSIVE**: {said}"


def test_a_baseline_fails_on_a_regression_and_not_on_chance(folders, tmp_path):
    slower = made.write(tmp_path / "slower", Made({**made.ISOLATED, "tagged": 118.0, "alone": 113.0}))
    same = told(folders["isolated"], "--baseline", folders["isolated"])
    assert same.return_value == 0
    worse = told(slower, "--baseline", folders["isolated"], "--json")
    assert worse.return_value == 1
    assert "risk ttft_p95" in " ".join(json.loads(worse.stdout)["regressions"])


def test_another_arm_can_be_held_against_the_bounds(tmp_path):
    path = made.write(tmp_path / "arms", Made({**made.LEAKY, "capped": 104.0}))
    assert json.loads(told(path, "--arm", "capped", "--json").stdout)["verdict"] == "ISOLATED"
    assert json.loads(told(path, "--json").stdout)["verdict"] == "LEAKY"


def test_an_arm_that_is_not_there_is_named(folders):
    result = told(folders["isolated"], "--arm", "capped")
    assert "has no arm capped" in str(result.exception)


def test_options_of_experiments_are_refused_for_a_run(tmp_path):
    result = told(tmp_path, "--arm", "capped")
    assert isinstance(result.exception, click.UsageError)


def estimate(value, low, high):
    return Estimate(value, low, high, 0.1, 3)


@pytest.mark.parametrize(
    ("ratio", "contention", "share", "verdict"),
    [
        ((1.05, 0.95, 1.2), (8.0, 6.0, 9.0), (0.99, 0.97, 1.01), "ISOLATED"),
        ((1.05, 0.95, 1.2), (1.1, 0.9, 1.3), (0.5, -2.0, 3.0), "INCONCLUSIVE"),
        ((3.0, 2.5, 3.5), (8.0, 6.0, 9.0), (0.7, 0.6, 0.8), "LEAKY"),
        ((8.0, 7.0, 9.0), (8.0, 6.0, 9.0), (0.0, -0.1, 0.1), "INEFFECTIVE"),
        ((8.0, 7.0, 9.0), (8.0, 6.0, 9.0), (0.1, -0.1, 0.3), "INCONCLUSIVE"),
        ((9.0, 8.0, 9.9), (5.0, 4.0, 6.0), (-1.0, -1.5, -0.5), "INVERTED"),
        ((1.3, 1.1, 1.5), (8.0, 6.0, 9.0), (0.9, 0.8, 1.0), "INCONCLUSIVE"),
    ],
)
def test_the_rules_of_the_verdict(ratio, contention, share, verdict):
    found, _ = isolation.decide(estimate(*ratio), estimate(*contention), estimate(*share), 1.25)
    assert found == verdict


def test_overtaking_is_counted_by_who_was_sent_later_and_answered_first():
    rows = made.outcomes(Made(made.CALM, rows=3), "tagged", 1)
    found = rows_of(rows)._replace(
        sent_ms=np.array([0.0, 10.0, 20.0]), due_ms=np.array([0.0, 10.0, 20.0]), ttft_ms=np.array([100.0, 5.0, 10.0])
    )
    risk = found.tenant == found.names.index("risk")
    assert arms.overtaken(found, risk).tolist() == [True, False]


def test_trials_that_lack_an_arm_are_left_out(tmp_path):
    path = made.write(tmp_path / "cut", Made(made.ISOLATED, trials=3))
    document = json.loads((path / "experiment.json").read_text())
    document["runs"] = [run for run in document["runs"] if (run["trial"], run["arm"]) != (3, "tagged")]
    (path / "experiment.json").write_text(json.dumps(document))
    found = experiment.judged(experiment.load(path))
    assert found.isolation.trials == 2
    assert math.isfinite(found.isolation.tenants["risk"].interference_ratio["ttft_p95"].value)


def simulated(times, due_ms, names):
    """A run whose times to the first token are given, one tenant."""
    due_ns, ttft_ns = (due_ms * 1e6).astype(np.int64), np.round(times * 1e9).astype(np.int64)
    columns = {name: due_ns.tolist() for name in ("arrival_ns", "due_ns", "released_ns", "sent_ns")}
    columns |= {name: ttft_ns.tolist() for name in ("first_token_ns", "last_token_ns", "end_ns")}
    columns |= {"tenant": names, "priority": [0] * len(due_ns), "outcome": ["ok"] * len(due_ns)}
    return rows_of(table(columns, Metadata()))


@pytest.mark.parametrize("requests", [900, 100])
def test_a_verdict_has_the_very_intervals_whose_coverage_is_measured(requests):
    """What benchmarks/coverage.py counts is what `tenants judge` says, short runs included."""
    setting = coverage.Setting(0.5, 3, requests)
    times = next(coverage.experiments(setting, 1, np.random.default_rng(12)))
    expected = coverage.at_once(times)
    due_ms = np.arange(requests) * 1000.0
    runs = [
        arms.ArmRun(
            arm={"capped": "tagged"}.get(arm, arm),
            trial=trial,
            tenant="risk" if arm == "alone" else None,
            rows=simulated(times[coverage.ARMS.index(arm), 0, trial], due_ms, ["risk"] * requests),
            digest=f"plan {trial}",
            invalid=(),
        )
        for trial in range(3)
        for arm in ("alone", "untagged", "capped")
    ]
    found = isolation.judge(runs, [Tenant(name="risk", priority=0)]).tenants["risk"].by_arm["tagged"]["ttft_p95"]
    for shown, interval in ((found.contention, expected.ratio[0]), (found.recovered_share, expected.recovered[0])):
        assert (shown.ci is None) == bool(np.isnan(interval[0]))
        assert shown.ci is None or shown.ci == pytest.approx(tuple(interval), abs=1e-4)
    assert (found.contention.ci is None) == (requests == 100)


def test_runs_too_short_show_how_they_differ_and_say_that_it_is_rough(tmp_path):
    path = made.write(tmp_path / "short", Made(made.LEAKY, rows=90))
    result = told(path)
    assert result.return_value == 3
    first = result.stdout.splitlines()[0]
    assert first.startswith("risk is INCONCLUSIVE")
    assert "(roughly " in first
    assert "runs too short" in first
    assert "times as long" in first
    assert any(line.startswith("~ how runs this short differ") for line in result.stdout.splitlines())
    ratio = json.loads(told(path, "--json").stdout)["tenants"]["risk"]["interference_ratio"]["ttft_p95"]
    assert ratio["ci"] is None
    assert ratio["rough"][0] < 3.0 < ratio["rough"][1]
