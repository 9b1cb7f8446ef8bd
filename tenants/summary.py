"""What a run says in numbers: outcomes in, the summary and its verdict out. Pure; no clock, no file.

The times of a request and what becomes of a failed, aborted, cut or unsent one stand in `tenants.measures`; rules
and their verdicts in `tenants.sla`. On top of them:

    throughput = tokens (answers) that ended in the measured window / its length;
                 the window runs from the first due time after the warm-up to the last end
    goodput    = answers/s that met every limit of their tenant; a time that an answer does not have breaks no limit
    verdict    = invalid > fail > inconclusive > pass: a run whose sender was late is invalid whatever its rules say;
                 without any SLA it still fails when more than 1 % of its requests failed or were never sent

docs/numbers.md has each formula with an example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tenants import figures, quantiles, sla, verdicts
from tenants.cautions import cautions
from tenants.measures import ABORT, CUT, FAILED, OK, UNSENT, Floats, Gaps, Mask, Rows, rows_of
from tenants.sentence import describe, sentence
from tenants.sla import Rule, RuleResult
from tenants.tenant import Tenant
from traces.record import OUTCOMES
from traces.units import NS_PER_MS, NS_PER_S

SHOWN = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LEAST_LATENESS_LIMIT_MS = 10.0
LATENESS_OF_TTFT = 0.05  # of the tightest TTFT limit
LATE = "client-bound: P99 lateness"  # how the reason begins that other rules judge anew


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Exact order statistics of one time, in ms; None where n is too small for a percentile, or where it is +∞."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None
    ci: dict[str, tuple[float, float] | None]
    infinite: tuple[str, ...]


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Sent − released, in ms: the sender's own fault. None in a closed loop, where it means nothing."""

    n: int
    p50: float | None
    p99: float | None
    max: float | None
    limit: float


class TenantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part of the summary. planned = ok + aborted + cut + sum(failed) + unsent."""

    priority: int | None
    planned: int
    ok: int
    aborted: int
    cut: int
    failed: dict[str, int]
    unsent: int
    ttft_ms: Percentiles
    ttft_ok_ms: Percentiles
    ttft_sent_ms: Percentiles
    ttft_visible_ms: Percentiles
    held_ms: Percentiles
    connect_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles | None
    inter_chunk_ms: Percentiles | None
    e2e_ms: Percentiles
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float | None
    sla: tuple[RuleResult, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `sla` holds the rules about all tenants together, the implicit one on failures included."""

    planned: int
    ok: int
    aborted: int
    cut: int
    failed: dict[str, int]
    unsent: int
    warmup: int
    valid: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    digest: str
    closed_loop: bool
    window_s: float
    lateness_ms: Lateness
    tenants: dict[str, TenantSummary]
    sla: tuple[RuleResult, ...]
    sentence: str
    verdict: str

    @property
    def interrupted(self) -> bool:
        """Whether the run was ended before its time."""
        return "interrupted" in self.reasons

    @property
    def invalid_reasons(self) -> list[str]:
        """Why the run says nothing about the server, `interrupted` aside; empty when it is valid."""
        return [] if self.valid else [reason for reason in self.reasons if reason != "interrupted"]

    @property
    def rules(self) -> tuple[RuleResult, ...]:
        """Every rule of the run, tenants first."""
        return (*(result for tenant in self.tenants.values() for result in tenant.sla), *self.sla)


def summarise(
    outcomes: pa.Table,
    *,
    tenants: Sequence[Tenant] = (),
    rules: Sequence[Rule] = (),
    max_lateness_ms: float | None = None,
    interrupted: bool = False,
    digest: str = "",
    warnings: Sequence[str] = (),
    invalid: Sequence[str] = (),
) -> Summary:
    """The numbers and the verdict of a run.

    Args:
        outcomes: all rows of the plan, unsent ones too, warm-up rows marked.
        tenants: their rules are judged; they give the order of rows. Tenants only the outcomes know come after them.
        rules: further rules, also of `all`. Isolation bounds are left to the judge of several arms.
        max_lateness_ms: P99 lateness beyond which the run is invalid; None = the larger of 10 ms and 5 % of the
            tightest TTFT limit.
        interrupted: the run was ended by Ctrl-C or SIGTERM.
        digest: of the plan.
        warnings: of the stages before, passed on.
        invalid: further reasons, found elsewhere, why this run says nothing about the server.

    Raises:
        TraceError: the table is no result of a run.
    """
    given = (*(rule for tenant in tenants for rule in tenant.slas), *rules)
    judged = tuple(dict.fromkeys(rule for rule in given if not rule.is_bound))
    rows = rows_of(outcomes, interrupted=interrupted)
    run = verdicts.Measured(rows, Gaps(outcomes, rows), judged, _window_s(rows), interrupted)
    of_rules = [rule.tenant for rule in judged if rule.tenant != sla.ALL]
    names = dict.fromkeys([*(tenant.name for tenant in tenants), *_by_rank(rows), *of_rules])
    parts = {name: _tenant(run, name, tenants) for name in names}
    common = verdicts.common(run)
    lateness = _lateness(rows, max_lateness_ms, judged)
    invalid = _reasons_invalid(lateness, interrupted=interrupted, invalid=invalid)
    if invalid:
        parts = {name: msgspec.structs.replace(part, sla=_void(part.sla)) for name, part in parts.items()}
        common = _void(common)
    results = [*(result for part in parts.values() for result in part.sla), *common]
    verdict = sla.INVALID if invalid else sla.worst(result.verdict for result in results)
    counts = _counts(rows.outcome)
    return Summary(
        **counts,
        warmup=outcomes.num_rows - len(rows.at),
        valid=not invalid,
        reasons=tuple(invalid or (_reason(result) for result in results if result.verdict != sla.PASS)),
        warnings=tuple(dict.fromkeys([*warnings, *cautions(outcomes, rows, run.rules)])),
        digest=digest,
        closed_loop=rows.closed_loop,
        window_s=round(run.window_s, 6),
        lateness_ms=lateness,
        tenants=parts,
        sla=common,
        sentence=sentence(verdict, results, counts, lateness.p99, invalid),
        verdict=verdict,
    )


def exit_code(summary: Summary) -> int:
    """0 pass, 1 fail, 3 invalid or inconclusive, 130 interrupted."""
    if summary.interrupted:
        return 130
    return {sla.PASS: 0, sla.FAIL: 1}.get(summary.verdict, 3)


def to_json(summary: Summary) -> bytes:
    """The JSON of a run: one object, ASCII-safe UTF-8, infinities as null and named."""
    return msgspec.json.encode(summary)


def to_json_of_runs(runs: Sequence[tuple[str, Summary]]) -> bytes:
    """One run: its JSON; several: an object of them by name."""
    return to_json(runs[0][1]) if len(runs) == 1 else msgspec.json.encode(dict(runs))


def from_json(document: Any) -> Summary:
    """A summary from the parsed JSON of `run.json`. Raises msgspec.ValidationError."""
    return msgspec.convert(document, Summary, strict=False)


def percentiles(values: Floats, *, intervals: bool = True) -> Percentiles:
    """P50, P95 and P99 with their count and intervals; NaN values are left out, +∞ counts.

    No intervals for gaps between tokens: those of one answer are alike, so their number says little.
    """
    seen = quantiles.ordered(values)
    n = len(seen)
    found: dict[str, float | None] = {}
    ends: dict[str, tuple[float, float] | None] = {}
    infinite = []
    for name, q in SHOWN.items():
        value = float(seen[quantiles.rank(n, q)]) if n >= quantiles.needed(q) else None
        if value is not None and math.isinf(value):
            infinite.append(name)
            value = None
        bounds = quantiles.interval(seen, q) if value is not None and intervals else None
        found[name] = None if value is None else round(value, 6)
        finite = bounds is not None and math.isfinite(bounds.high)
        ends[name] = (round(bounds.low, 6), round(bounds.high, 6)) if bounds is not None and finite else None
    return Percentiles(n=n, ci=ends, infinite=tuple(infinite), **found)


def _tenant(run: verdicts.Measured, name: str, tenants: Sequence[Tenant]) -> TenantSummary:
    rows, mine = run.rows, run.of(name)
    done = mine & (rows.outcome == OK)
    gap_ms, one_token = run.gaps.of([rows.names.index(name)] if name in rows.names else [])
    good = verdicts.good_answers(run, mine)
    tokens = run.tokens(mine)

    def block(values: Floats) -> Percentiles:
        return percentiles(values[mine])

    return TenantSummary(
        priority=_priority(name, rows, mine, tenants),
        **_counts(rows.outcome[mine]),
        ttft_ms=block(rows.ttft_ms),
        ttft_ok_ms=percentiles(rows.ttft_ms[done]),
        ttft_sent_ms=block(rows.ttft_sent_ms),
        ttft_visible_ms=block(rows.ttft_visible_ms),
        held_ms=block(rows.held_ms),
        connect_ms=block(rows.connect_ms),
        tpot_ms=block(rows.tpot_ms),
        itl_ms=percentiles(gap_ms, intervals=False) if len(gap_ms) and one_token else None,
        inter_chunk_ms=percentiles(gap_ms, intervals=False) if len(gap_ms) and not one_token else None,
        e2e_ms=block(rows.e2e_ms),
        output_tokens=tokens,
        output_tokens_per_s=run.per_s(tokens),
        requests_per_s=run.per_s(int(done.sum())),
        goodput_rps=None if good is None else run.per_s(int(good.sum())),
        sla=tuple(verdicts.judge(run, rule) for rule in run.rules if rule.tenant == name),
    )


def _counts(outcome: NDArray[np.int64]) -> dict[str, Any]:
    counts = np.bincount(outcome, minlength=len(OUTCOMES))
    return {
        "planned": len(outcome),
        "ok": int(counts[OK]),
        "aborted": int(counts[ABORT]),
        "cut": int(counts[CUT]),
        "failed": {OUTCOMES[code]: int(counts[code]) for code in FAILED if counts[code]},
        "unsent": int(counts[UNSENT]),
    }


def _lateness(rows: Rows, given_limit_ms: float | None, rules: Sequence[Rule]) -> Lateness:
    limit_ms = given_limit_ms
    if limit_ms is None:
        limit_ms = max(LEAST_LATENESS_LIMIT_MS, LATENESS_OF_TTFT * (sla.tightest_ttft_ms(rules) or 0.0))
    seen = quantiles.ordered(rows.late_ms)
    n = len(seen)

    def at(q: float) -> float | None:
        return round(float(seen[quantiles.rank(n, q)]), 6) if n else None

    return Lateness(n=n, p50=at(0.5), p99=at(0.99), max=at(1.0), limit=round(limit_ms, 6))


def _window_s(rows: Rows) -> float:
    """From the first due time after the warm-up to the last end; 0 when nothing ended."""
    ends = rows.end_ms[~np.isnan(rows.end_ms)]
    starts = rows.due_ms[~np.isnan(rows.due_ms)]
    if len(ends) == 0 or len(starts) == 0:
        return 0.0
    return max(0.0, float(ends.max() - starts.min())) * NS_PER_MS / NS_PER_S


def _priority(name: str, rows: Rows, mine: Mask, tenants: Sequence[Tenant]) -> int | None:
    """The tenant's rank: as described, else the most frequent one of its rows."""
    described = next((tenant.priority for tenant in tenants if tenant.name == name), None)
    if described is not None:
        return described
    ranks = rows.priority[mine & ~np.isnan(rows.priority)]
    if len(ranks) == 0:
        return None
    values, counts = np.unique(ranks, return_counts=True)
    return int(values[np.argmax(counts)])


def _by_rank(rows: Rows) -> list[str]:
    """Tenants of the rows, most urgent first, then by name."""

    def key(name: str) -> tuple[float, str]:
        ranks = rows.priority[rows.tenant == rows.names.index(name)]
        known = ranks[~np.isnan(ranks)]
        return (float(known.min()) if len(known) else math.inf, name)

    present = {int(code) for code in np.unique(rows.tenant)}
    return sorted((name for code, name in enumerate(rows.names) if code in present), key=key)


def _reasons_invalid(lateness: Lateness, *, interrupted: bool, invalid: Sequence[str]) -> list[str]:
    reasons = ["interrupted"] if interrupted else []
    if lateness.p99 is not None and lateness.p99 > lateness.limit:
        reasons.append(
            f"{LATE} {figures.beside(lateness.p99, lateness.limit)} ms is above "
            f"{figures.digits(lateness.limit)} ms "
            "(the sender was late, so the run says nothing about the server)"
        )
    return [*reasons, *invalid]


def _void(results: tuple[RuleResult, ...]) -> tuple[RuleResult, ...]:
    """The results of a run that is not valid: what was measured stays, no rule is judged by it."""
    return tuple(
        msgspec.structs.replace(result, verdict=sla.INCONCLUSIVE, samples_to_settle=None) for result in results
    )


def _reason(result: RuleResult) -> str:
    return f"{result.rule}: {describe(result)} ({result.verdict})"
