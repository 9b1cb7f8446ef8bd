"""The result for people: terminal tables at 80, 100 and 120 columns, failures by cause, figures."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from tenants import columns, failures, figures, sla, terminal
from tenants import summary as outcome
from tenants.tenant import Tenant
from traces.record import Metadata, table

MS = 1_000_000


def outcomes(rows=200, failed=0, slow=0, seed_ms=0):
    """risk and summary in turn; `failed` requests of summary fail, `slow` of risk miss 800 ms."""
    columns_ = {
        "request_id": [f"r{i:04}" for i in range(rows)],
        "arrival_ns": [i * 10 * MS for i in range(rows)],
        "tenant": ["risk" if i % 2 == 0 else "summary" for i in range(rows)],
        "priority": [i % 2 for i in range(rows)],
        "outcome": ["ok"] * rows,
        "error": [None] * rows,
        "status": [200] * rows,
        "due_ns": [i * 10 * MS for i in range(rows)],
        "released_ns": [i * 10 * MS for i in range(rows)],
        "sent_ns": [i * 10 * MS + 1000 for i in range(rows)],
        "first_token_ns": [(100 + seed_ms + i) * MS for i in range(rows)],
        "last_token_ns": [(900 + i) * MS for i in range(rows)],
        "end_ns": [(950 + i) * MS for i in range(rows)],
        "output_tokens": [20] * rows,
        "input_tokens": [300] * rows,
    }
    for i in range(failed):
        row = 2 * i + 1
        columns_["outcome"][row], columns_["error"][row], columns_["status"][row] = "http_error", "http 503", 503
        columns_["first_token_ns"][row] = columns_["last_token_ns"][row] = columns_["output_tokens"][row] = None
    for i in range(slow):
        columns_["first_token_ns"][2 * i] = 880 * MS
    return table(columns_, Metadata(source="test"))


def summary_of(rules=("risk: ttft_p95 < 800ms", "summary: e2e_p95 < 30s"), **more):
    tenants = [Tenant(name="risk", priority=0), Tenant(name="summary", priority=1)]
    return outcome.summarise(outcomes(**more), tenants=tenants, rules=[sla.parse(r) for r in rules], digest="d")


def printed(width, draw):
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False, emoji=False, markup=False)
    draw(console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("more", "word"),
    [({}, "PASS"), ({"slow": 40}, "FAIL"), ({"rows": 20}, "CANNOT JUDGE"), ({"failed": 30}, "FAIL")],
)
def test_the_first_line_is_the_verdict_and_so_is_the_last(more, word):
    shown = printed(100, lambda console: terminal.print_result(summary_of(**more), console)).splitlines()
    assert shown[0].startswith(word)
    assert shown[-1] == shown[0]


def test_a_failing_run_names_the_tenant_the_limit_the_value_and_the_count():
    first = printed(100, lambda console: terminal.print_result(summary_of(slow=40), console)).splitlines()[0]
    assert first == "FAIL  risk TTFT P95 is 880 ms over 100 requests, promised < 800ms; 1 of 3 rules failed."


def test_a_rule_that_failed_says_when():
    shown = printed(100, lambda console: terminal.print_result(summary_of(rows=600, slow=200), console))
    assert "FAIL  0:00-0:04" in shown


def test_a_run_that_is_not_valid_is_marked_in_a_comparison():
    late = outcome.summarise(outcomes(), digest="d", invalid=["a worker died"])
    assert "ms in late (not valid)" in terminal.comparison_sentence([("a", summary_of()), ("late", late)])


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_and_keep_what_matters(width):
    summary = summary_of(slow=40, failed=20)
    shown = printed(width, lambda console: terminal.print_result(summary, console))
    table_lines = [line for line in shown.splitlines() if line.startswith(("risk", "summary", "all", "tenant", "rule"))]
    assert max(cell_len(line) for line in table_lines) <= width
    for word in ("limit", "measured", "verdict", "TTFT ms", "P95", "planned", "failed", "unsent", "tokens/s", " n "):
        assert word in shown


def test_the_same_failure_is_one_line_with_a_count_and_an_example():
    rows = outcomes(failed=20)
    found = failures.causes(rows)
    assert [cause.text for cause in found] == ["20 × http_error 503, first at 0.0 s (summary, request r0001)"]
    shown = printed(100, lambda console: terminal.print_result(summary_of(failed=20), console, causes=found))
    assert "failed   20 × http_error 503" in shown


def test_causes_are_told_apart_and_the_most_frequent_comes_first():
    rows = table(
        {
            "arrival_ns": [0, 1, 2, 3, 4],
            "outcome": ["timeout_idle", "http_error", "http_error", "ok", "http_error"],
            "error": ["timeout idle", "http 429", "http 429", None, "http 429"],
            "warmup": [False, False, False, False, True],
        },
        Metadata(),
    )
    found = failures.causes(rows)
    assert [(cause.outcome, cause.n) for cause in found] == [("http_error", 2), ("timeout_idle", 1)]
    assert found[1].text == "1 × timeout_idle, first (default)"


def test_many_causes_are_cut_short_and_the_rest_is_counted():
    many = [failures.Cause("http_error", f"http {500 + i}", 10 - i, {"risk": 1}, "r1", 0.5) for i in range(9)]
    shown = printed(100, lambda console: terminal.print_result(summary_of(), console, causes=many))
    assert shown.count("http_error") == terminal.MOST_CAUSES
    assert "9 more of 3 other kinds" in shown


def test_trust_is_always_said():
    shown = printed(100, lambda console: terminal.print_result(summary_of(), console))
    assert "trust    good: sends late by" in shown
    assert "n 200" in shown


def test_files_that_exist_are_named(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    shown = printed(
        100, lambda console: terminal.print_result(summary_of(), console, folder=tmp_path, again="replay sample")
    )
    assert f"files    run.json   in {tmp_path}" in shown
    assert "again    replay sample" in shown


def test_infinite_and_absent_percentiles_are_shown_as_such():
    shown = printed(120, lambda console: terminal.print_result(summary_of(rows=40, failed=10), console))
    times = [line.split() for line in shown.splitlines() if line.startswith("summary")][1]
    assert times[2:6] == ["20", "139", "∞", "n/a"]


def test_arms_stand_side_by_side_and_the_first_line_tells_the_story():
    runs = [("fcfs", summary_of(seed_ms=700)), ("priority", summary_of(seed_ms=100)), ("capped", summary_of())]
    shown = printed(100, lambda console: terminal.print_comparison(runs, console))
    first = shown.splitlines()[0]
    assert first == "risk TTFT P95: 988 ms in fcfs, 388 ms in priority, 288 ms in capped."
    assert shown.splitlines()[-1] == first
    lines = [line.split()[:2] for line in shown.splitlines()]
    assert [line for line in lines if line[:1] == ["risk"]][1:4] == [
        ["risk", "fcfs"],
        ["risk", "priority"],
        ["risk", "capped"],
    ]


def test_arms_of_different_plans_are_said_to_be():
    other = outcome.summarise(outcomes(), digest="another")
    assert "the plans differ" in terminal.comparison_sentence([("a", summary_of()), ("b", other)])


def test_each_row_of_a_comparison_has_its_tenants_own_verdict():
    found = summary_of(failed=60)
    column = next(c for c in terminal.comparison_columns([("a", found)]) if c.heading == "verdict")
    assert [result.verdict for result in found.tenants["summary"].sla] == [sla.FAIL]
    assert dict(zip(found.tenants, column.cells, strict=True)) == {"risk": "PASS", "summary": "FAIL"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.00001, "0.00001"),
        (0.001234, "0.00123"),
        (0.05678, "0.0568"),
        (0.1234, "0.12"),
        (3.14159, "3.14"),
        (9.996, "10.0"),
        (31.4159, "31.4"),
        (99.96, "100"),
        (3141.6, "3,142"),
        (math.inf, "∞"),
        (math.nan, "n/a"),
        (None, "n/a"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert figures.digits(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (180, "3:00"), (3723, "1:02:03"), (-3, "0:00")]
)
def test_a_clock_counts_minutes(seconds, text):
    assert figures.clock(seconds) == text


def test_columns_are_dropped_by_their_importance_and_the_first_never():
    found = [columns.Column("a", ["x" * 30]), columns.Column("b", ["y" * 30], 1), columns.Column("c", ["z" * 30], 2)]
    assert [column.heading for column in columns.fitting(found, 100)] == ["a", "b", "c"]
    assert [column.heading for column in columns.fitting(found, 70)] == ["a", "b"]
    assert [column.heading for column in columns.fitting(found, 10)] == ["a"]


def test_neighbouring_columns_of_a_group_name_it_once_and_a_lone_one_keeps_it():
    found = [columns.Column("T ms P50", ["1"]), columns.Column("T ms P95", ["2"]), columns.Column("E ms P95", ["3"])]
    heads = [line.plain.split() for line in columns.lines(found, 80)[:2]]
    assert heads == [["T", "ms", "E", "ms"], ["P50", "P95", "P95"]]
