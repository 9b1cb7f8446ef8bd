"""The live view, fed with snapshots of a run that never was: what a person sees at each moment and width."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from replay import live, snapshot
from tenants import sla
from traces.units import NS_PER_S

RULES = [sla.parse("risk: ttft_p95 < 500ms"), sla.parse("summary: e2e_p95 < 30s"), sla.parse("risk: goodput > 1rps")]


class Run:
    """Counters of two tenants that a test moves by hand."""

    def __init__(self):
        self.rows = np.zeros((1, 2, snapshot.ROW), np.int64)

    def answers(self, tenant, count, ttft_ms, e2e_ms=1000.0, failed=False, open_=0):
        row = self.rows[0, tenant]
        row[snapshot.field("sent")] += count + open_
        row[snapshot.field("done")] += count
        row[snapshot.field("failed" if failed else "ok")] += count
        row[snapshot.field("output_tokens")] += 0 if failed else 10 * count
        row[snapshot.place("ttft", ttft_ms)] += count
        row[snapshot.place("e2e", e2e_ms)] += count
        row[snapshot.place("late", 0.4)] += count

    def at(self, seconds, **more):
        return snapshot.snapshot(
            round(seconds * NS_PER_S), 120 * NS_PER_S, ["risk", "summary"], [0, 1], [400, 100], rows=self.rows, **more
        )


def viewer(terminal=False, **options):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=options.pop("width", 100), **options)
    return live.LiveView("replay sample -> 127.0.0.1:8000  2x  risk:summary", RULES, console), file


def text_of(view, now, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view.render(now, width))
    return console.file.getvalue()


def states(view, now):
    return {rule.rule.text: rule.state for rule in view.rules_now(now)}


def test_a_rule_goes_from_no_data_to_undecided_to_ok_to_failing():
    run, (view, _) = Run(), viewer()
    view.update(run.at(0))
    assert states(view, run.at(0))["risk: ttft_p95 < 500ms"] == "no data"
    run.answers(0, 20, 100.0)
    assert states(view, run.at(5))["risk: ttft_p95 < 500ms"] == "so far undecided"
    run.answers(0, 60, 100.0)
    assert states(view, run.at(10))["risk: ttft_p95 < 500ms"] == "ok"
    run.answers(0, 60, 900.0)
    view.update(run.at(15))
    assert states(view, run.at(15))["risk: ttft_p95 < 500ms"] == "FAILING"
    assert "0:15  risk TTFT P95 fails its limit of 500ms" in view.events


def test_failures_fail_the_rules_on_times_and_the_implicit_one():
    run, (view, _) = Run(), viewer()
    run.answers(0, 90, 100.0)
    run.answers(0, 30, math.inf, math.inf, failed=True)
    view.update(run.at(10, failures={"http_error": 30}))
    found = states(view, run.at(10))
    assert (found["risk: ttft_p95 < 500ms"], found["all: error_rate <= 1%"]) == ("FAILING", "FAILING")
    assert any("first failure http_error 30" in event for event in view.events)


def test_what_only_the_end_can_tell_is_said_so():
    assert states(viewer()[0], Run().at(5))["risk: goodput > 1rps"] == "at the end"


def test_the_last_30_seconds_forget_what_came_before():
    run, (view, _) = Run(), viewer()
    view.update(run.at(0))
    run.answers(0, 100, 2000.0)
    for second in range(60):
        run.answers(0, 5, 100.0)
        view.update(run.at(second))
    now = next(rule for rule in view.rules_now(run.at(60)) if rule.rule.metric == "ttft")
    assert now.recent < 110
    assert now.whole > 1900
    assert now.n == 400


def test_stretches_without_an_answer_are_gaps_and_failed_ones_full_bars():
    run, (view, _) = Run(), viewer()
    view.update(run.at(0))
    view.update(run.at(6))
    assert "no answers yet" in text_of(view, run.at(6), 100)
    for second, ttft_ms in ((7, 100.0), (12, None), (17, math.inf), (22, 200.0), (27, None)):
        if ttft_ms is not None:
            run.answers(0, 30, ttft_ms)
        view.update(run.at(second))
    line = next(line for line in text_of(view, run.at(27), 100).splitlines() if "5 s bins" in line)
    assert line.split("bins  ")[1] == " ▂█▄   worst ∞ ms at 0:10, limit 500ms"


def test_time_left_comes_from_the_schedule():
    run, (view, _) = Run(), viewer()
    run.answers(0, 1, 100.0)
    view.update(run.at(30))
    shown = text_of(view, run.at(30), 100)
    assert "0:30 of 2:00" in shown
    assert "1:30 left" in shown
    assert "25%" in shown


def test_after_the_schedule_the_drain_is_shown_and_before_it_the_wait():
    run, (view, _) = Run(), viewer()
    run.answers(0, 5, 100.0, open_=3)
    assert "draining: 3 in flight" in text_of(view, run.at(121), 100)
    assert "stopping: 3 in flight" in text_of(view, run.at(60, stage="stopping"), 100)
    assert "starts in 2 s" in text_of(view, run.at(-2), 100)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_the_failures_are_always_there(width):
    run, (view, _) = Run(), viewer()
    for second in range(0, 110, 1):
        run.answers(0, 9_999, 100.0 + 10 * second, 33_333.0, open_=50)
        run.answers(1, 999, 5_000.0, 99_999.0, failed=second % 2 == 0)
        view.update(run.at(second))
    shown = text_of(view, run.at(110), width)
    assert max(cell_len(line.rstrip()) for line in shown.splitlines()) <= width
    for word in ("FAILING", "failed", "tokens/s", "TTFT", "P95", "in flight", "whole run", "left"):
        assert word in shown


def test_on_a_terminal_it_redraws_in_place_and_leaves_nothing_behind():
    run, (view, file) = Run(), viewer(terminal=True)
    with view:
        run.answers(0, 10, 100.0)
        view.update(run.at(1))
        view.update(run.at(2))
    assert "\x1b[" in file.getvalue()
    assert file.getvalue().count("risk:summary") >= 2


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    run, (view, file) = Run(), viewer(terminal=True)
    with view:
        run.answers(0, 100, 900.0)
        view.update(run.at(1))
    assert "\x1b[31m" not in file.getvalue()
    assert "\x1b[1;31m" not in file.getvalue()


def test_elsewhere_one_plain_line_is_written_every_10_seconds():
    run, (view, file) = Run(), viewer(terminal=False)
    with view:
        for quarter in range(4 * 31):
            run.answers(0, 1, 100.0)
            view.update(run.at(quarter / 4))
    written = file.getvalue().splitlines()
    assert [line.split(" of ")[0] for line in written] == ["0:00", "0:10", "0:20", "0:30"]
    assert "sent 81 of 500, done 81, failed 0" in written[2]
    assert "risk TTFT P95 102 ms (so far undecided)" in written[1]
    assert "\x1b" not in file.getvalue()


def test_a_run_without_requests_shows_no_traceback():
    view, _ = viewer()
    empty = snapshot.snapshot(0, 0, [], [], [], rows=np.zeros((1, 0, snapshot.ROW), np.int64))
    view.update(empty)
    assert "no rule is failing" in text_of(view, empty, 80)
