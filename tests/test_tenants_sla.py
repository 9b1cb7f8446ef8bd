"""The rule grammar, and verdicts on counts of violations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tenants import sla
from tenants.sla import parse


@pytest.mark.parametrize(
    ("text", "tenant", "metric", "q", "op", "limit", "unit"),
    [
        ("risk: ttft_p95 < 800ms", "risk", "ttft", 0.95, "<", 800, "ms"),
        ("summary:e2e_p95<30s", "summary", "e2e", 0.95, "<", 30_000, "ms"),
        ("risk: TTFT_P99.9 <= 1.5s", "risk", "ttft", 0.999, "<=", 1500, "ms"),
        ("risk: tpot_p50 < 40 ms", "risk", "tpot", 0.5, "<", 40, "ms"),
        ("risk: ttft_sent_p95 < 1s", "risk", "ttft_sent", 0.95, "<", 1000, "ms"),
        ("risk: itl_p99 < 100ms", "risk", "itl", 0.99, "<", 100, "ms"),
        ("all: error_rate < 1%", "all", "error_rate", None, "<", 0.01, "share"),
        ("risk: goodput > 95%", "risk", "goodput", None, ">", 0.95, "share"),
        ("risk: goodput >= 2rps", "risk", "goodput", None, ">=", 2, "rps"),
        ("summary: output_tokens_per_s > 500 tok/s", "summary", "output_tokens_per_s", None, ">", 500, "tokens_per_s"),
        ("risk: ttft_p95 <= 1.25x alone", "risk", "ttft", 0.95, "<=", 1.25, "x"),
    ],
)
def test_a_rule_is_read_into_its_parts(text, tenant, metric, q, op, limit, unit):
    rule = parse(text)
    assert (rule.tenant, rule.metric, rule.q, rule.op, rule.limit, rule.unit) == (tenant, metric, q, op, limit, unit)
    assert rule.is_bound == (unit == "x")
    assert parse(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write it as 'risk: ttft_p95 < 800ms'"),
        ("risk ttft p95 under 800", "write it as 'risk: ttft_p95 < 800ms'"),
        ("ttft_p95 < 800ms", "whose rule"),
        ("risk: ttft < 800ms", "ttft_p95"),
        ("risk: tfft_p95 < 800ms", "did you mean ttft_p95?"),
        ("risk: ttft_p95 < 800", "not a time with a unit"),
        ("risk: ttft_p95 < 0ms", "above 0"),
        ("risk: ttft_p95 > 800ms", "'risk: ttft_p95 < 800ms'"),
        ("risk: goodput < 95%", "'risk: goodput > 95%'"),
        ("risk: error_rate < 5ms", "error_rate < 1%"),
        ("risk: error_rate < 101%", "between 0% and 100%"),
        ("risk: ttft_p100 < 1s", "no metric"),
        ("risk: error_rate <= 2x alone", "not a limit of error_rate"),
    ],
)
def test_a_wrong_rule_is_refused_with_a_right_example(text, says):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_gives_its_tenants_name_and_refuses_another():
    assert parse("ttft_p95 < 1s", "risk").tenant == "risk"
    with pytest.raises(ValueError, match=r"move it to \[tenants.summary\]"):
        parse("summary: ttft_p95 < 1s", "risk")


def test_a_rule_about_an_unknown_tenant_names_those_there_are():
    with pytest.raises(ValueError, match=r"no tenant 'rsk'; there are risk, summary \(did you mean risk\?\)"):
        sla.check_tenants([parse("rsk: ttft_p95 < 1s")], ["risk", "summary"])
    sla.check_tenants([parse("all: error_rate < 1%")], ["risk"])


@pytest.mark.parametrize(
    ("n", "violations", "q", "verdict"),
    [
        (59, 0, 0.95, "pass"),
        (58, 0, 0.95, "inconclusive"),
        (299, 0, 0.99, "pass"),
        (298, 0, 0.99, "inconclusive"),
        (30, 0, 0.99, "inconclusive"),
        (0, 0, 0.95, "inconclusive"),
        (100, 5, 0.95, "inconclusive"),
        (100, 8, 0.95, "inconclusive"),
        (100, 11, 0.95, "fail"),
        (10, 10, 0.95, "fail"),
        (1000, 30, 0.95, "pass"),
    ],
)
def test_a_rule_is_judged_on_its_violations(n, violations, q, verdict):
    rule = sla.Rule(tenant="risk", metric="ttft", q=q, op="<", limit=800, unit="ms")
    values = np.array([900.0] * violations + [100.0] * (n - violations))
    result = sla.judge(rule, values)
    assert (result.verdict, result.n, result.violations) == (verdict, n, violations)


def test_a_value_on_the_limit_breaks_less_than_and_keeps_at_most():
    values = np.full(100, 800.0)
    assert sla.judge(parse("r: ttft_p95 < 800ms"), values).verdict == "fail"
    assert sla.judge(parse("r: ttft_p95 <= 800ms"), values).verdict == "pass"


def test_what_was_censored_is_not_counted_and_what_failed_is():
    rule = parse("r: ttft_p95 < 800ms")
    result = sla.judge(rule, np.array([100.0] * 90 + [math.inf] * 10 + [math.nan] * 50))
    assert (result.n, result.violations, result.infinite, result.value, result.ci) == (100, 10, True, None, None)


def test_a_rule_that_no_sample_settles_says_how_many_would():
    result = sla.judge(parse("r: ttft_p99 < 800ms"), np.full(30, 100.0))
    assert (result.verdict, result.samples_to_settle, result.value) == ("inconclusive", 299, None)


def test_shares_are_judged_exactly_and_rates_as_they_are():
    assert sla.judge_share(parse("r: error_rate < 1%"), 0, 299).verdict == "pass"
    assert sla.judge_share(parse("r: error_rate < 1%"), 0, 100).verdict == "inconclusive"
    assert sla.judge_share(parse("r: error_rate < 1%"), 10, 100).verdict == "fail"
    good = sla.judge_share(parse("r: goodput > 90%"), 2, 100)
    assert (good.verdict, good.value) == ("pass", 0.98)
    exact = stats.binomtest(98, 100).proportion_ci(0.95, method="exact")
    assert good.ci == pytest.approx((exact.low, exact.high))
    assert sla.judge_rate(parse("r: goodput > 2rps"), 2.0, 10).verdict == "fail"
    assert sla.judge_rate(parse("r: goodput >= 2rps"), 2.0, 10).verdict == "pass"
    assert sla.judge_rate(parse("r: goodput >= 2rps"), 2.0, 0).verdict == "inconclusive"


def test_the_worst_verdict_wins():
    assert sla.worst(["pass", "inconclusive", "fail"]) == "fail"
    assert sla.worst(["pass", "invalid", "fail"]) == "invalid"
    assert sla.worst(["pass", "inconclusive"]) == "inconclusive"
    assert sla.worst([]) == "pass"


@given(st.integers(1, 400), st.integers(0, 400))
def test_a_fail_and_a_pass_are_never_both_proven_and_more_violations_never_help(n, k):
    k = min(k, n)
    order = ["pass", "inconclusive", "fail"]
    here, worse = sla.judge_count(k, n, 0.05), sla.judge_count(min(n, k + 1), n, 0.05)
    assert order.index(worse) >= order.index(here)
