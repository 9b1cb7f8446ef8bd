"""The result at the terminal: the verdict first and last, rules, what each tenant got, what failed, how to trust it.

Colour follows the terminal and NO_COLOR; a pipe gets plain text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from tenants import figures, sla
from tenants.cautions import LOUD
from tenants.columns import Column, lines
from tenants.failures import Cause
from tenants.sentence import title
from tenants.summary import Summary, TenantSummary

WORDS = {sla.PASS: "PASS", sla.FAIL: "FAIL", sla.INVALID: "INVALID", sla.INCONCLUSIVE: "CANNOT JUDGE"}
STYLES = {sla.PASS: "bold green", sla.FAIL: "bold red", sla.INVALID: "bold magenta", sla.INCONCLUSIVE: "bold yellow"}
PIPE_WIDTH = 120
MOST_CAUSES = 6


def stdout_console(file: TextIO | None = None) -> Console:
    """A console for the result: as wide as the terminal, 120 columns in a pipe unless COLUMNS says otherwise."""
    file = file or sys.stdout
    piped = not file.isatty() and "COLUMNS" not in os.environ
    return Console(file=file, width=PIPE_WIDTH if piped else None, highlight=False, emoji=False, markup=False)


def print_result(
    summary: Summary,
    console: Console,
    *,
    folder: str | Path | None = None,
    causes: Sequence[Cause] = (),
    again: str | None = None,
    more: Callable[[Console], None] | None = None,
) -> None:
    """Print a run's result.

    Args:
        summary: of the run.
        console: where to; see `stdout_console`.
        folder: the run folder, named with the files in it.
        causes: failures by cause.
        again: the command that repeats the run.
        more: prints further tables before the facts.
    """
    _verdict(summary, console)
    console.print()
    _table(console, rule_columns(summary), styles=[STYLES[result.verdict] for result in summary.rules])
    console.print()
    _table(console, time_columns(summary.tenants))
    console.print()
    _table(console, count_columns(summary.tenants))
    console.print()
    if more is not None:
        more(console)
    _facts(console, "failed", [cause.text for cause in causes[:MOST_CAUSES]] + _more(causes))
    _facts(console, "trust", [trust(summary)])
    _facts(console, "note", list(summary.warnings))
    if folder is not None:
        names = [name for name in ("report.html", "run.json", "outcomes.parquet") if (Path(folder) / name).exists()]
        _facts(console, "files", [f"{'  '.join(names)}   in {folder}"] if names else [])
    if again is not None:
        _facts(console, "again", [again])
    _verdict(summary, console)


def print_comparison(runs: Sequence[tuple[str, Summary]], console: Console) -> None:
    """Print several runs of one plan side by side, one line a tenant and run; first and last line say what changed."""
    sentence = comparison_sentence(runs)
    console.print(Text(sentence, "bold"), soft_wrap=True)
    console.print()
    _table(console, comparison_columns(runs))
    console.print()
    for name, summary in runs:
        _facts(console, name, [f"{WORDS[summary.verdict]}  {summary.sentence}"])
    console.print(Text(sentence, "bold"), soft_wrap=True)


def comparison_sentence(runs: Sequence[tuple[str, Summary]]) -> str:
    """What happened to the most urgent tenant's P95 TTFT from run to run."""
    urgent = next(iter(runs[0][1].tenants), None)
    shown = []
    for name, summary in runs:
        part = summary.tenants.get(urgent or "")
        trusted = "" if summary.valid else " (not valid)"
        shown.append(f"{figures.percentile(part.ttft_ms if part else None, 'p95')} ms in {name}{trusted}")
    same = len({summary.digest for _, summary in runs}) == 1
    plan = "" if same else " (the plans differ: their digests are not equal)"
    return f"{urgent} TTFT P95: {', '.join(shown)}{plan}."


def comparison_columns(runs: Sequence[tuple[str, Summary]]) -> list[Column]:
    """One line a tenant and run."""
    names = list(dict.fromkeys(name for _, summary in runs for name in summary.tenants))
    lines = [(t, run, s.tenants[t], s) for t in names for run, s in runs if t in s.tenants]
    parts = [part for _, _, part, _ in lines]
    return [
        Column("tenant", [tenant for tenant, *_ in lines], right=False),
        Column("run", [run for _, run, *_ in lines], right=False),
        *_times(parts),
        Column("tok/s", [figures.digits(part.output_tokens_per_s) for part in parts], 1),
        Column("failed", [f"{sum(part.failed.values()) + part.unsent:,}" for part in parts], 6),
        Column("verdict", [WORDS[_verdict_of(part, summary)] for *_, part, summary in lines], 2, right=False),
    ]


def _verdict_of(part: TenantSummary, summary: Summary) -> str:
    """A tenant's own verdict: of its rules, of everybody's where it has none; the run's where that says nothing."""
    return sla.worst(result.verdict for result in part.sla or summary.sla) if summary.valid else summary.verdict


def rule_columns(summary: Summary) -> list[Column]:
    """One line a rule, the tenants' first."""
    results = summary.rules
    return [
        Column("rule", [result.tenant for result in results], right=False),
        Column("", [title(result.metric) for result in results], right=False),
        Column("limit", [figures.limit(result) for result in results]),
        Column("measured", [figures.measured(result) for result in results]),
        Column("95 % interval", [_interval(result) for result in results], 2),
        Column("over", ["" if result.violations is None else f"{result.violations:,}" for result in results], 1),
        Column("n", [f"{result.n:,}" for result in results]),
        Column("verdict", [_verdict_cell(result) for result in results], right=False),
    ]


def time_columns(tenants: dict[str, TenantSummary]) -> list[Column]:
    """One line a tenant: times in ms, from due unless said."""
    parts = list(tenants.values())
    return [
        Column("tenant", list(tenants), right=False),
        Column("rank", ["" if part.priority is None else str(part.priority) for part in parts], 3),
        *_times(parts),
        Column("held ms P95", [figures.percentile(part.held_ms, "p95") for part in parts], 7),
    ]


def count_columns(tenants: dict[str, TenantSummary]) -> list[Column]:
    """One line a tenant: what became of its requests, and its throughput."""
    parts = list(tenants.values())
    return [
        Column("tenant", list(tenants), right=False),
        Column("planned", [f"{part.planned:,}" for part in parts]),
        Column("ok", [f"{part.ok:,}" for part in parts]),
        Column("aborted", [f"{part.aborted:,}" for part in parts], 1),
        Column("cut", [f"{part.cut:,}" for part in parts], 1),
        Column("failed", [f"{sum(part.failed.values()):,}" for part in parts]),
        Column("unsent", [f"{part.unsent:,}" for part in parts]),
        Column("tokens/s", [figures.digits(part.output_tokens_per_s) for part in parts]),
        Column("requests/s", [figures.digits(part.requests_per_s) for part in parts], 2),
        Column("goodput/s", [figures.digits(part.goodput_rps) for part in parts], 3),
    ]


def trust(summary: Summary) -> str:
    """Whether the measurement itself can be relied on."""
    late = summary.lateness_ms
    if summary.closed_loop:
        return "closed loop: compare it with closed loops only"
    if late.p99 is None:
        return "nothing was sent"
    state = "good" if summary.valid else "NONE"
    return (
        f"{state}: sends late by {figures.digits(late.p50)} ms at P50, {figures.digits(late.p99)} ms at P99 "
        f"(limit {figures.digits(late.limit)}), {figures.digits(late.max)} ms at most, n {late.n:,}"
    )


def _times(parts: Sequence[TenantSummary]) -> list[Column]:
    return [
        Column("n", [f"{part.ttft_ms.n:,}" for part in parts]),
        Column("TTFT ms P50", [figures.percentile(part.ttft_ms, "p50") for part in parts]),
        Column("TTFT ms P95", [figures.percentile(part.ttft_ms, "p95") for part in parts]),
        Column("TTFT ms P99", [figures.percentile(part.ttft_ms, "p99") for part in parts]),
        Column("from sent P95", [figures.percentile(part.ttft_sent_ms, "p95") for part in parts], 4),
        Column("TPOT ms P50", [figures.percentile(part.tpot_ms, "p50") for part in parts], 5),
        Column("TPOT ms P95", [figures.percentile(part.tpot_ms, "p95") for part in parts], 2),
        Column("E2E ms P50", [figures.percentile(part.e2e_ms, "p50") for part in parts], 6),
        Column("E2E ms P95", [figures.percentile(part.e2e_ms, "p95") for part in parts], 1),
    ]


def _verdict(summary: Summary, console: Console) -> None:
    line = Text.assemble((WORDS[summary.verdict], STYLES[summary.verdict]), "  ", summary.sentence)
    console.print(line, soft_wrap=True)


def _interval(result: sla.RuleResult) -> str:
    if result.ci is None:
        return ""
    low, high = (figures.amount(end, result.unit) for end in result.ci)
    return f"{low.split(' ')[0]} to {high}"


def _verdict_cell(result: sla.RuleResult) -> str:
    if result.verdict == sla.INCONCLUSIVE and result.samples_to_settle:
        return f"cannot judge, n {result.samples_to_settle:,} would"
    if result.verdict == sla.FAIL and result.broken_s:
        return f"FAIL  {figures.spans(result.broken_s)}"
    return "pass" if result.verdict == sla.PASS else WORDS[result.verdict]


def _more(causes: Sequence[Cause]) -> list[str]:
    left = causes[MOST_CAUSES:]
    return [f"{sum(cause.n for cause in left):,} more of {len(left)} other kinds"] if left else []


def _facts(console: Console, name: str, lines: Sequence[str]) -> None:
    """A word, then one line each."""
    for number, line in enumerate(lines):
        style = "bold red" if line.startswith(LOUD) else ""
        console.print(Text.assemble((f"{name if number == 0 else '':<9}", "dim"), (line, style)), soft_wrap=True)


def _table(console: Console, columns: Sequence[Column], styles: Sequence[str] = ()) -> None:
    for line in lines(columns, console.width, styles):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
