"""A verdict in words: one sentence that says what was promised, what was measured and on how many requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenants import figures, sla
from tenants.sla import RuleResult

MOST_FAILED = 0.01  # share of failed requests from which on any run fails
IMPLICIT = sla.Rule(tenant=sla.ALL, metric="error_rate", q=None, op="<=", limit=MOST_FAILED, unit="share")


def sentence(
    verdict: str,
    results: Sequence[RuleResult],
    counts: Mapping[str, Any],
    late_p99_ms: float | None,
    reasons: Sequence[str],
) -> str:
    """The run in one sentence; it names the tenant that failed."""
    planned, failed = counts["planned"], sum(counts["failed"].values())
    if verdict == sla.INVALID:
        if "interrupted" in reasons:
            done = planned - counts["unsent"]
            return (
                f"interrupted: {done:,} of {planned:,} requests were sent, {counts['ok']:,} answered; partial results."
            )
        return f"{reasons[0]}."
    if planned == 0:
        return "nothing was planned, so there is nothing to judge."
    about = [result for result in results if result.verdict == verdict]
    ruled = [result for result in results if result.rule != IMPLICIT.text]
    count = f"{len(about)} of {len(results)} rules" if len(results) > 1 else "the rule"
    if verdict == sla.PASS:
        late = f"; sends late by {figures.digits(late_p99_ms)} ms at P99" if late_p99_ms is not None else ""
        if not ruled:
            return f"{planned:,} requests, {failed:,} failed{late}; no SLA was given."
        held = f"all {len(ruled)} SLAs hold" if len(ruled) > 1 else "the SLA holds"
        return f"{held}: {_says(ruled[0])}{late}."
    first = about[0]
    if verdict == sla.FAIL:
        if first.rule == IMPLICIT.text:
            causes = ", ".join(f"{cause} {n:,}" for cause, n in counts["failed"].items())
            unsent = f"{', ' if causes else ''}unsent {counts['unsent']:,}" if counts["unsent"] else ""
            return f"{describe(first)}, limit 1 %: {causes}{unsent}."
        return f"{_says(first)}; {count} failed."
    more = f"; {first.samples_to_settle:,} would settle it" if first.samples_to_settle else ""
    return f"{first.rule} cannot be judged: {describe(first)}{more}; {count} inconclusive."


def describe(result: RuleResult) -> str:
    """What was measured, in words: ``3,120 ms over 412 requests``."""
    if result.n == 0:
        return "no samples"
    requests = f"{result.n:,} request{'s' if result.n != 1 else ''}"
    if result.unit == "share":
        word = "failed" if result.metric == "error_rate" else "missed a limit"
        return f"{result.violations:,} of {requests} {word} ({(result.violations or 0) / result.n:.2%})"
    if result.infinite:
        return f"infinite over {requests} ({result.violations:,} over the limit or failed)"
    if result.value is None:
        return f"{result.violations:,} of {requests} over the limit"
    return f"{show(result.value, result.unit)} over {requests}"


def show(value: float, unit: str) -> str:
    """A value in a rule's unit for people: three digits or whole numbers."""
    if unit == "ms" and value >= 10_000:
        return f"{value / 1000:,.3g} s"
    if unit == "ms":
        return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
    if unit == "share":
        return f"{value:.2%}"
    return f"{value:,.3g} {'requests/s' if unit == 'rps' else 'tokens/s'}"


def _says(result: RuleResult) -> str:
    """``risk TTFT P95 is 3,120 ms over 412 requests, promised < 800 ms``."""
    promised = result.rule.split(": ", 1)[1].removeprefix(result.metric).strip()
    return f"{result.tenant} {title(result.metric)} is {describe(result)}, promised {promised}"


def title(metric: str) -> str:
    """A metric for people: ``ttft_p95`` → ``TTFT P95``."""
    words = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
    head, _, tail = metric.partition("_p")
    shown = words.get(head, head.replace("_", " "))
    if head == "ttft_sent":
        shown = "TTFT from sent"
    return f"{shown} P{tail}" if tail and tail[0].isdigit() else metric.replace("_", " ")
