"""The numbers of a run, each against a run small enough to count by hand."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pyarrow as pa
import pytest

from tenants import figures, measures, sla
from tenants import summary as outcome
from tenants.tenant import Tenant
from traces.errors import TraceError
from traces.record import Metadata, table

MS = 1_000_000


def run(rows, **more):
    """An outcome table from rows; times in ms, what a row leaves out is a prompt answer to a request sent when due."""
    names = {name for row in rows for name in row} | set(answer(0))
    columns = {name: [] for name in sorted(names)}
    for number, row in enumerate(rows):
        filled = answer(number) | row
        for name, values in columns.items():
            value = filled.get(name)
            values.append(scaled(value) if name.endswith("_ns") and value is not None else value)
    return table(columns | more, Metadata(source="test"))


def scaled(value):
    return [round(item * MS) for item in value] if isinstance(value, list) else round(value * MS)


def answer(number):
    due = number * 10.0
    return {
        "arrival_ns": due,
        "due_ns": due,
        "released_ns": due,
        "sent_ns": due,
        "tenant": "risk",
        "outcome": "ok",
        "first_token_ns": 100.0,
        "first_visible_ns": 100.0,
        "last_token_ns": 200.0,
        "end_ns": 210.0,
        "output_tokens": 11,
    }


FAILED = {"outcome": "http_error", "first_token_ns": None, "first_visible_ns": None, "last_token_ns": None, "end_ns": 1}
UNSENT = dict.fromkeys(("sent_ns", "released_ns", "first_token_ns", "last_token_ns", "end_ns"))
UNSENT |= {"outcome": "unsent", "first_visible_ns": None, "output_tokens": None}
ABORTED = {"outcome": "client_abort", "first_token_ns": None, "first_visible_ns": None, "last_token_ns": None}


def summarise(rows, *rules, **more):
    return outcome.summarise(run(rows), rules=[sla.parse(rule) for rule in rules], **more)


def risk(rows, *rules, **more):
    return summarise(rows, *rules, **more).tenants["risk"]


# --- times ---


def test_equal_waits_are_equal_whenever_in_the_run_they_were():
    """Else ties would be broken by the clock, and waits that are all alike look like waits that remember each other."""
    due_ms = [random_ns / MS for random_ns in np.random.default_rng(1).integers(0, 10**13, 300).tolist()]
    at = dict.fromkeys(("arrival_ns", "due_ns", "released_ns", "sent_ns"))
    found = measures.rows_of(run([dict.fromkeys(at, due) | {"first_token_ns": 12.753125} for due in due_ms]))
    assert set(found.ttft_ms) == set(found.ttft_sent_ms) == {12.753125}
    assert set(found.e2e_ms) == {210.0}
    assert set(found.late_ms) == {0.0}


def test_ttft_counts_from_due_and_from_sent_stands_beside_it():
    late = {"due_ns": 0, "released_ns": 0, "sent_ns": 50, "first_token_ns": 100}
    found = risk([late, late])
    assert (found.ttft_ms.p50, found.ttft_sent_ms.p50) == (150, 100)


def test_b18_c01_a_long_wait_divides_into_held_late_connecting_and_the_server():
    row = {"due_ns": 0, "released_ns": 30_000, "sent_ns": 30_001, "connect_ns": 50, "first_token_ns": 113}
    found, lateness = risk([row] * 2), summarise([row] * 2).lateness_ms
    assert (found.ttft_ms.p50, found.held_ms.p50, lateness.p50) == (30_114, 30_000, 1)
    assert (found.ttft_sent_ms.p50, found.connect_ms.p50) == (113, 50)


def test_j10_a_tail_is_caught_that_the_median_hides():
    rows = [{"first_token_ns": 900}] * 21 + [{}] * 180
    summary = summarise(rows, "risk: ttft_p50 < 800ms", "risk: ttft_p95 < 800ms")
    assert [result.verdict for result in summary.tenants["risk"].sla] == ["pass", "fail"]


def test_held_time_is_not_lateness():
    held = {"due_ns": 0, "released_ns": 400, "sent_ns": 403}
    summary = summarise([held] * 3)
    assert summary.tenants["risk"].held_ms.p50 == 400
    assert (summary.lateness_ms.p50, summary.lateness_ms.max) == (3, 3)
    assert summary.valid


def test_e2e_counts_from_due():
    assert risk([{"due_ns": 0, "released_ns": 0, "sent_ns": 5, "end_ns": 210}] * 2).e2e_ms.p50 == 215


@pytest.mark.parametrize(
    ("report", "row", "tpot_ms"),
    [
        ("A16", {"first_token_ns": 1000, "last_token_ns": 2000, "output_tokens": 11}, 100),
        ("A12", {"first_token_ns": 10, "last_token_ns": 1000, "output_tokens": 100}, 10),
        ("A09", {"first_token_ns": 0, "last_token_ns": 180, "output_tokens": 12}, 180 / 11),
        (
            "A11",
            {"first_token_ns": 100, "last_token_ns": 180, "output_tokens": 16, "chunk_tokens": [8] + [1] * 8},
            10,
        ),
        ("A17", {"first_token_ns": 100, "last_token_ns": 100, "output_tokens": 1}, None),
        ("a single chunk of many tokens", {"first_token_ns": 100, "last_token_ns": 100, "output_tokens": 9}, None),
        (
            "A19 hidden reasoning",
            {"first_token_ns": 100, "last_token_ns": 590, "output_tokens": 200, "reasoning_tokens": 150},
            10,
        ),
        (
            "streamed reasoning",
            {
                "first_token_ns": 0,
                "first_visible_ns": 50,
                "last_token_ns": 1990,
                "output_tokens": 200,
                "reasoning_tokens": 150,
            },
            10,
        ),
        ("all hidden", {"first_token_ns": 1, "last_token_ns": 2, "output_tokens": 5, "reasoning_tokens": 5}, None),
        ("several answers", {"n": 2}, None),
        ("no usage", {"output_tokens": None}, None),
    ],
)
def test_tpot_of_one_answer(report, row, tpot_ms):
    shown = {"first_visible_ns": row.get("first_token_ns", 100.0)} | row
    found = risk([shown, shown])
    assert found.tpot_ms.n == (0 if tpot_ms is None else 2), report
    assert found.tpot_ms.p50 == (None if tpot_ms is None else pytest.approx(tpot_ms, abs=1e-6)), report


def test_a17_goodput_takes_a_tpot_that_does_not_exist_as_kept():
    single = {"first_token_ns": 100, "last_token_ns": 100, "output_tokens": 1}
    assert risk([single] * 4, "risk: tpot_p95 < 1ms").goodput_rps == risk([single] * 4).requests_per_s


def test_a03_time_to_the_first_visible_token_stands_beside_ttft():
    found = risk([{"first_token_ns": 100, "first_visible_ns": 900, "last_token_ns": 950}] * 2)
    assert (found.ttft_ms.p50, found.ttft_visible_ms.p50) == (100, 900)


def test_a14_itl_is_gaps_alone_where_each_chunk_is_one_token():
    found = risk([{"chunk_ns": [1000.0 + 10 * i for i in range(11)], "output_tokens": 11}])
    assert (found.itl_ms.p50, found.itl_ms.n, found.inter_chunk_ms) == (10, 10, None)
    assert found.itl_ms.ci["p50"] is None


def test_a09_chunks_of_several_tokens_are_never_called_itl():
    found = risk([{"chunk_ns": [0.0, 60.0, 120.0, 180.0], "output_tokens": 12}])
    assert found.itl_ms is None
    assert (found.inter_chunk_ms.p50, found.inter_chunk_ms.n) == (60, 3)


def test_one_answer_with_fuller_chunks_makes_it_inter_chunk_latency_for_its_tenant():
    single = {"chunk_ns": [0.0, 10.0, 20.0], "output_tokens": 3}
    told = {"chunk_ns": [0.0, 10.0], "chunk_tokens": [1, 1], "output_tokens": 9}
    fuller = {"chunk_ns": [0.0, 30.0], "output_tokens": 9}
    assert risk([single, told]).itl_ms.n == 3
    mixed = risk([single, fuller])
    assert mixed.itl_ms is None
    assert mixed.inter_chunk_ms.n == 3


def test_gaps_do_not_cross_from_one_answer_to_the_next_or_to_another_tenant():
    rows = [
        {"chunk_ns": [0.0, 10.0], "output_tokens": 2},
        {"chunk_ns": None},
        {"chunk_ns": [500.0, 520.0, 540.0], "output_tokens": 3, "tenant": "summary"},
    ]
    summary = summarise(rows)
    assert summary.tenants["risk"].itl_ms.n == 1
    assert summary.tenants["summary"].itl_ms.p50 == 20


def test_an_itl_rule_on_chunks_of_several_tokens_cannot_be_judged():
    rows = [{"chunk_ns": [0.0, 60.0, 120.0, 180.0], "output_tokens": 12}] * 100
    assert [r.verdict for r in risk(rows, "risk: itl_p95 < 1s", "risk: inter_chunk_p95 < 1s").sla] == [
        "inconclusive",
        "pass",
    ]


def test_an_answer_that_was_not_streamed_has_an_e2e_and_nothing_else():
    whole = {"stream": False, "first_token_ns": None, "last_token_ns": None, "first_visible_ns": None}
    found = risk([whole] * 2 + [{**FAILED, "stream": False}])
    assert (found.ttft_ms.n, found.tpot_ms.n, found.e2e_ms.n) == (0, 0, 3)


# --- what did not work ---


def test_d03_a_failed_request_is_infinite_and_the_success_only_value_stands_beside():
    rows = [{**FAILED, "status": 429}] * 34 + [{"first_token_ns": 770}] * 66
    found = risk(rows)
    assert found.ttft_ms.p50 == 770
    assert (found.ttft_ms.p95, found.ttft_ms.infinite) == (None, ("p95", "p99"))
    assert (found.ttft_ok_ms.p95, found.ttft_ok_ms.n, found.ttft_ms.n) == (770, 66, 100)
    assert found.e2e_ms.infinite == ("p95", "p99")


def test_a07_a_stream_without_a_token_is_no_ttft_of_zero():
    rows = [{}] * 10 + [{**FAILED, "outcome": "no_token"}] * 10
    found = risk(rows)
    assert (found.ttft_ok_ms.n, found.failed, found.ok) == (10, {"no_token": 10}, 10)


def test_a_failed_request_with_tokens_is_infinite_all_the_same():
    assert risk([{"outcome": "truncated"}] * 2).ttft_ms.infinite == ("p50",)


def test_an_abort_before_the_first_token_is_censored_and_one_after_it_counts():
    found = risk([{**ABORTED}] * 5 + [{"outcome": "client_abort"}] * 3 + [{}] * 2)
    assert (found.aborted, found.ttft_ms.n, found.ttft_ok_ms.n, found.e2e_ms.n) == (8, 5, 2, 2)
    assert found.ttft_ms.infinite == ()


def test_a_client_that_gave_up_after_the_limit_is_said_but_not_counted():
    summary = summarise([{**ABORTED, "end_ns": 5000}] * 2 + [{}] * 60, "risk: ttft_p95 < 800ms")
    assert summary.verdict == "pass"
    assert any("2 clients gave up after the limit" in warning for warning in summary.warnings)


def test_cut_requests_are_censored_and_counted_apart():
    cut = {"outcome": "cut", "first_token_ns": None, "last_token_ns": None, "first_visible_ns": None}
    summary = summarise([cut] * 5 + [{}] * 60, "risk: ttft_p95 < 800ms")
    assert (summary.cut, summary.tenants["risk"].ttft_ms.n, summary.verdict) == (5, 60, "pass")


def test_unsent_requests_miss_their_sla_unless_the_run_was_interrupted():
    rows = [UNSENT] * 40 + [{}] * 60
    ended = summarise(rows, "risk: ttft_p95 < 800ms")
    assert (ended.unsent, ended.verdict, ended.tenants["risk"].ttft_ms.n) == (40, "fail", 100)
    stopped = summarise(rows, "risk: ttft_p95 < 800ms", interrupted=True)
    assert (stopped.tenants["risk"].ttft_ms.n, stopped.tenants["risk"].sla[0].violations) == (60, 0)
    assert (stopped.verdict, stopped.valid, stopped.reasons) == ("invalid", False, ("interrupted",))
    assert outcome.exit_code(stopped) == 130


def test_b09_unsent_requests_fail_a_run_without_any_sla():
    assert outcome.exit_code(summarise([UNSENT] * 2 + [{}] * 98)) == 1


def test_d07_the_parts_add_up_to_what_was_planned():
    rows = [{}] * 5 + [ABORTED] * 3 + [FAILED] * 2 + [{**FAILED, "outcome": "timeout_idle"}] + [UNSENT] * 4
    rows += [{"outcome": "cut"}] * 6
    summary = summarise(rows)
    for part in (summary, summary.tenants["risk"]):
        assert part.planned == part.ok + part.aborted + part.cut + sum(part.failed.values()) + part.unsent == 21
    assert summary.failed == {"http_error": 2, "timeout_idle": 1}


# --- rates ---


def test_throughput_is_what_ended_over_the_measured_window():
    rows = [{"due_ns": 1000, "released_ns": 1000, "sent_ns": 1000, "end_ns": 1000, "output_tokens": 30}] * 2
    rows += [{"due_ns": 2000, "released_ns": 2000, "sent_ns": 2000, "end_ns": 1000, "output_tokens": 40}]
    summary = summarise(rows)
    assert summary.window_s == 2.0  # from the first due time, 1 s, to the last end, 3 s
    assert (summary.tenants["risk"].output_tokens_per_s, summary.tenants["risk"].requests_per_s) == (50, 1.5)


def test_d05_failures_are_no_throughput():
    found = risk([FAILED] * 60)
    assert (found.requests_per_s, found.output_tokens_per_s) == (0, 0)


def test_d06_when_nothing_works_there_is_a_clean_result():
    summary = summarise([{**FAILED, "outcome": "connect_error"}] * 60)
    assert summary.verdict == "fail"
    assert "60 of 60 requests failed" in summary.sentence
    assert "connect_error 60" in summary.sentence
    assert outcome.exit_code(summary) == 1


def test_goodput_counts_answers_that_met_every_limit_of_their_tenant():
    rows = [{}] * 6 + [{"first_token_ns": 900}] * 2 + [{"end_ns": 5000}] * 1 + [FAILED]
    found = risk(rows, "risk: ttft_p95 < 800ms", "risk: e2e_p95 < 1s")
    assert found.goodput_rps == pytest.approx(6 / summarise(rows).window_s, rel=1e-6)
    assert risk(rows).goodput_rps is None


def test_goodput_obeys_the_rules_of_all_tenants_too():
    found = risk([{}] * 3 + [{"first_token_ns": 900}], "all: ttft_p95 < 800ms")
    assert found.goodput_rps == pytest.approx(found.requests_per_s * 3 / 4, rel=1e-6)


# --- validity ---


@pytest.mark.parametrize(
    ("late_ms", "rule", "limit", "valid"),
    [
        (9, None, None, True),
        (11, None, None, False),
        (39, "risk: ttft_p95 < 800ms", None, True),
        (41, "risk: ttft_p95 < 800ms", None, False),
        (9, "risk: ttft_p95 < 100ms", None, True),
        (41, "risk: ttft_p95 < 800ms", 100, True),
    ],
)
def test_a_run_whose_sender_was_late_is_invalid(late_ms, rule, limit, valid):
    rows = [{"due_ns": 0, "released_ns": 0, "sent_ns": late_ms}] * 200
    summary = summarise(rows, *([rule] if rule else []), max_lateness_ms=limit)
    assert summary.valid == valid
    if not valid:
        assert summary.verdict == "invalid"
        assert summary.reasons[0].startswith("client-bound")
        assert outcome.exit_code(summary) == 3


@pytest.mark.parametrize(
    ("late_ms", "limit_ms", "said"),
    [
        (0.25, 0.001, "P99 lateness 0.25 ms is above 0.001 ms"),
        (0.002, 0.0015, "P99 lateness 0.002 ms is above 0.0015 ms"),
        (10.04, 10, "P99 lateness 10.04 ms is above 10.0 ms"),
        (1234.4, 1234, "P99 lateness 1,234.4 ms is above 1,234 ms"),
    ],
)
def test_a_limit_is_said_as_it_is_and_what_passed_it_as_more(late_ms, limit_ms, said):
    summary = summarise([{"due_ns": 0, "released_ns": 0, "sent_ns": late_ms}] * 200, max_lateness_ms=limit_ms)
    assert said in summary.sentence


def test_a_limit_far_below_a_millisecond_is_judged_and_said_as_it_is():
    summary = summarise([{"first_token_ns": 0.5}] * 200, "risk: ttft_p95 < 0.001ms")
    assert summary.verdict == "fail"
    assert "promised < 0.001ms" in summary.sentence
    assert figures.limit(summary.tenants["risk"].sla[0]) == "0.001 ms"


def test_one_late_request_in_a_thousand_is_no_reason():
    rows = [{}] * 999 + [{"due_ns": 0, "released_ns": 0, "sent_ns": 500}]
    summary = summarise(rows)
    assert summary.valid
    assert summary.lateness_ms.max == 500


def test_invalid_beats_fail_and_no_rule_is_judged_by_a_run_that_is_not_valid():
    rows = [{"due_ns": 0, "released_ns": 0, "sent_ns": 900}] * 100
    summary = summarise(rows, "risk: ttft_p95 < 1ms", "risk: e2e_p95 < 9s")
    assert summary.verdict == "invalid"
    assert {(result.verdict, result.samples_to_settle) for result in summary.rules} == {("inconclusive", None)}
    assert [result.violations for result in summary.tenants["risk"].sla] == [100, 0]


def test_a_closed_loop_counts_from_sent_and_has_no_lateness():
    rows = [{"due_ns": None, "released_ns": None, "sent_ns": 1000.0 * i} for i in range(3)]
    summary = summarise(rows)
    assert (summary.closed_loop, summary.valid, summary.lateness_ms.p99) == (True, True, None)
    assert (summary.tenants["risk"].ttft_ms.p50, summary.tenants["risk"].e2e_ms.p50) == (100, 210)
    assert summary.window_s == pytest.approx(2.21)


def test_several_answers_are_warned_of_only_where_priorities_were_sent():
    def warned(priority):
        return any("n > 1 with priority" in text for text in summarise([{"n": 2, "priority": priority}] * 3).warnings)

    assert (warned(1), warned(0), warned(None)) == (True, True, False)


def test_b20_a_short_run_says_that_it_is_too_short_and_leaves_nothing_out_unasked():
    cold = {"first_token_ns": 6_000}
    short = summarise([cold] * 2 + [{}] * 10, "risk: ttft_p95 < 20s")
    ttft = short.tenants["risk"].ttft_ms
    assert (short.warmup, short.planned, ttft.n) == (0, 12, 12)  # the cold requests are in
    assert (ttft.p50, ttft.p95, ttft.p99) == (100, None, None)  # no percentile that 12 rows cannot give
    assert (short.verdict, short.tenants["risk"].sla[0].samples_to_settle) == ("inconclusive", 59)


def test_rows_of_the_warm_up_are_left_out_and_counted():
    rows = [{"warmup": True, "first_token_ns": 9000, "end_ns": 9100}] * 4 + [{"warmup": False}] * 2
    summary = summarise(rows)
    assert (summary.warmup, summary.planned, summary.tenants["risk"].ttft_ms.p50) == (4, 2, 100)
    assert summary.window_s == pytest.approx(0.22)


# --- verdicts ---


def test_without_an_sla_more_than_one_percent_failed_is_a_fail():
    assert summarise([FAILED] + [{}] * 99).verdict == "pass"
    assert summarise([FAILED] * 2 + [{}] * 98).verdict == "fail"


def test_a_tenants_own_error_rate_rule_takes_the_place_of_the_implicit_one():
    rows = [FAILED] * 3 + [{}] * 297
    assert summarise([*rows, FAILED], "risk: error_rate < 5%").verdict == "pass"
    others = [{**FAILED, "tenant": "summary"}] * 5 + [{"tenant": "summary"}] * 5
    assert summarise(rows + others, "risk: error_rate < 5%").verdict == "fail"


def test_j14_a_tenant_that_fails_is_not_hidden_by_an_aggregate_that_passes():
    rows = [{"tenant": "summary"}] * 3000 + [{"first_token_ns": 900}] * 30
    summary = summarise(rows, "all: ttft_p95 < 800ms", "risk: ttft_p95 < 800ms")
    assert {result.rule: result.verdict for result in summary.rules} == {
        "risk: ttft_p95 < 800ms": "fail",
        "all: ttft_p95 < 800ms": "pass",
        "all: error_rate <= 1%": "pass",
    }
    assert outcome.exit_code(summary) == 1
    assert "risk" in summary.sentence
    assert any("risk" in reason for reason in summary.reasons)


def test_thirty_requests_without_a_violation_do_not_settle_a_p99():
    summary = summarise([{}] * 30, "risk: ttft_p99 < 800ms")
    assert (summary.verdict, outcome.exit_code(summary)) == ("inconclusive", 3)
    assert "299 would settle it" in summary.sentence


def test_a_rule_about_a_tenant_without_requests_is_inconclusive():
    summary = summarise([{}] * 60, "nobody: ttft_p95 < 800ms")
    assert summary.tenants["nobody"].planned == 0
    assert summary.verdict == "inconclusive"


def test_a_rule_that_failed_says_when():
    rows = [{"first_token_ns": 900.0 if 400 <= i < 800 else 100.0} for i in range(1200)]  # one each 10 ms
    (result,) = risk(rows, "risk: ttft_p95 < 800ms").sla
    assert (result.verdict, result.broken_s) == ("fail", ((4.0, 8.0),))
    assert risk(rows, "risk: ttft_p50 < 800ms").sla[0].broken_s == ()
    summary = summarise(rows, "risk: ttft_p95 < 800ms")
    assert outcome.from_json(json.loads(outcome.to_json(summary))) == summary


def test_an_empty_run_is_inconclusive():
    summary = outcome.summarise(run([{}]).slice(0, 0))
    assert (summary.planned, summary.verdict) == (0, "inconclusive")


def test_isolation_bounds_are_left_to_the_judge_of_several_arms():
    assert risk([{}] * 60, "risk: ttft_p95 <= 1.25x alone").sla == ()


def test_rules_of_tenants_and_of_the_command_line_are_judged_once_each():
    rule = sla.parse("risk: ttft_p95 < 800ms")
    summary = outcome.summarise(run([{}] * 60), tenants=[Tenant(name="risk", priority=0, rules=(rule,))], rules=[rule])
    assert len(summary.tenants["risk"].sla) == 1


def test_tenants_come_in_the_order_of_their_rank():
    rows = [{"tenant": "a", "priority": 2}, {"tenant": "z", "priority": 0}, {"tenant": "m", "priority": 1}]
    summary = summarise(rows)
    assert list(summary.tenants) == ["z", "m", "a"]
    assert [part.priority for part in summary.tenants.values()] == [0, 1, 2]


def test_a_run_without_rules_passes_and_says_that_none_was_given():
    assert "no SLA was given" in summarise([{}] * 3).sentence


# --- warnings ---


def test_e08_output_lengths_that_were_not_met_are_said():
    rows = [{"planned_output_tokens": 10, "output_tokens": 15}] * 3 + [{"planned_output_tokens": 11}]
    assert summarise(rows).warnings == (
        "output lengths not met: 3 of 4 answers differ from the plan (137% of its tokens)",
    )


def test_k05_a_slow_beginning_is_said():
    cold = [{"first_token_ns": 300.0 + i % 7} for i in range(40)] + [
        {"first_token_ns": 100.0 + i % 7} for i in range(160)
    ]
    assert any("not stationary: risk TTFT P50 is 303 ms" in warning for warning in summarise(cold).warnings)
    even = [{"first_token_ns": 100.0 + i % 50} for i in range(200)]
    assert summarise(even).warnings == ()


def test_warnings_of_earlier_stages_come_first_and_once():
    assert summarise([{}] * 2, warnings=["a", "b", "a"]).warnings == ("a", "b")


# --- JSON ---


def test_the_json_of_a_run_has_every_key_that_was_agreed():
    summary = summarise([{}] * 80 + [FAILED] * 20, "risk: ttft_p95 < 800ms", digest="abc")
    document = json.loads(outcome.to_json(summary))
    top = "planned ok aborted cut failed unsent valid reasons lateness_ms tenants verdict warmup warnings digest"
    assert set(top.split()) <= set(document)
    assert set(document["lateness_ms"]) >= {"p50", "p99", "max"}
    part = document["tenants"]["risk"]
    blocks = ["ttft_ms", "ttft_ok_ms", "ttft_sent_ms", "held_ms", "tpot_ms", "e2e_ms"]
    assert {
        *blocks,
        *["priority", "planned", "ok", "output_tokens_per_s", "requests_per_s", "goodput_rps", "sla"],
    } <= set(part)
    for block in blocks:
        assert {"n", "p50", "p95", "p99", "infinite"} <= set(part[block])
    assert part["ttft_ms"]["p99"] is None
    assert part["ttft_ms"]["infinite"] == ["p95", "p99"]
    rule = part["sla"][0]
    assert rule["rule"] == "risk: ttft_p95 < 800ms"
    assert (rule["value"], rule["ci"], rule["infinite"], rule["unit"], rule["verdict"]) == (
        None,
        None,
        True,
        "ms",
        "fail",
    )


def test_the_json_reads_back_to_the_same_summary():
    summary = summarise([{}] * 80 + [FAILED], "risk: ttft_p95 < 800ms", "risk: goodput > 1%")
    assert outcome.from_json(json.loads(outcome.to_json(summary))) == summary


def test_a_percentile_needs_enough_requests_and_has_an_interval_where_there_are_more():
    for n, shown in [(1, []), (2, ["p50"]), (19, ["p50"]), (20, ["p50", "p95"]), (99, ["p50", "p95"])]:
        block = risk([{}] * n).ttft_ms
        assert [name for name in ("p50", "p95", "p99") if getattr(block, name) is not None] == shown
    block = outcome.percentiles(np.arange(368.0))
    assert block.ci["p99"] is not None
    assert outcome.percentiles(np.arange(367.0)).ci["p99"] is None
    assert outcome.percentiles(np.arange(71.0)).ci["p95"] is None


def test_a_captured_trace_is_no_result_of_a_run():
    captured = table({"arrival_ns": [0, 1], "outcome": ["ok", None]}, Metadata())
    with pytest.raises(TraceError, match="not the outcomes of a run"):
        outcome.summarise(captured)


def test_rows_keep_their_place_in_the_outcome_table():
    rows = measures.rows_of(run([{"warmup": True}, {"warmup": False}, {"warmup": False}]))
    assert rows.at.tolist() == [1, 2]


def test_a_million_outcomes_are_summarised_in_seconds():
    n = 1_000_000
    rng = np.random.default_rng(1)
    due = np.sort(rng.integers(0, 3_600_000 * MS, n))
    first = rng.integers(50 * MS, 900 * MS, n)
    words = pa.array(["ok", "http_error"]).cast(pa.string())
    outcomes = table(
        {
            "arrival_ns": due,
            "due_ns": due,
            "released_ns": due,
            "sent_ns": due + 10_000,
            "first_token_ns": first,
            "first_visible_ns": first,
            "last_token_ns": first + 10 * MS,
            "end_ns": first + 11 * MS,
            "output_tokens": rng.integers(2, 100, n),
            "tenant": pa.DictionaryArray.from_arrays(pa.array(rng.integers(0, 4, n, np.int32)), pa.array(list("abcd"))),
            "outcome": pa.DictionaryArray.from_arrays(pa.array((rng.random(n) < 0.001).astype(np.int32)), words),
        },
        Metadata(),
    )
    begin = time.process_time()
    summary = outcome.summarise(outcomes, rules=[sla.parse(f"{name}: ttft_p95 < 890ms") for name in "abcd"])
    assert time.process_time() - begin < 10
    assert summary.planned == n
    assert not math.isnan(summary.window_s)
